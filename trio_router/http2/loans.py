"""Credit that is given before its bytes have been consumed, and how much of it one connection may have.

A message larger than its stream's window can only arrive if credit comes back while it is still unfinished. That credit
is a loan: what it lets in stays in memory until the message has been consumed. Without a bound over all streams, a peer
could have a message of the largest size half sent on each of thousands of streams.

Responsible for who may borrow. Must not know windows or frames. Beyond the limit streams wait for their turn, and
nobody is refused. The stream that has owed longest may always borrow, so its message is finished some time, whatever
the others hold; a message that fits into a window needs no loan and never waits.
"""

from __future__ import annotations

from trio_router.http2.streams import Stream


class Loans:
    """The loans of one connection; at most `limit` bytes and one message."""

    __slots__ = ("_borrowers", "_waiting", "lent", "limit")

    def __init__(self, *, limit: int) -> None:
        self.limit = limit
        self.lent = 0
        self._borrowers: dict[int, Stream] = {}  # the one that has owed longest comes first
        self._waiting: dict[int, Stream] = {}

    def grant(self, stream: Stream, amount: int) -> bool:
        """Whether the stream may have `amount` now; if not it is among the `waiting` until it may or is settled."""
        if self.lent + amount > self.limit and next(iter(self._borrowers), stream.id) != stream.id:
            self._waiting[stream.id] = stream
            return False
        self._waiting.pop(stream.id, None)
        self._borrowers[stream.id] = stream
        self.lent += amount
        stream.borrowed += amount
        return True

    def settle(self, stream: Stream) -> list[Stream]:
        """All that the stream owes has been consumed, or is lost with it. Returns who may try again, in turn."""
        self.lent -= stream.borrowed
        stream.borrowed = 0
        self._borrowers.pop(stream.id, None)
        self._waiting.pop(stream.id, None)
        return list(self._waiting.values())
