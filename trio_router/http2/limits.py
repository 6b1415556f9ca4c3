"""How much nonsense a peer may cause before the connection ends with ENHANCE_YOUR_CALM (RFC 9113 10.5).

Responsible for counting; must not know frames. There is no clock here, so each count is set against useful work
or against what the peer has read of our answers, not against time. Each limit is far above what an honest peer
was ever seen to do.
"""

from __future__ import annotations

from typing import Final

from trio_router.errors import ProtocolViolation
from trio_router.http2.frames import ErrorCode

# Answers (PING and SETTINGS acks, resets of refused streams) that wait because the peer does not read. 17 bytes
# each, so 170 kB. A client that opens a thousand streams before it has read our SETTINGS is honest; ten thousand
# unread answers are not.
MAX_PENDING_ANSWERS: Final = 10_000
# Frames in a row that carry nothing (empty DATA, PRIORITY, unknown types, informational headers, acks of nothing), with
# no message or request between them. Frames that come late for closed streams do not count: the reset of a thousand
# streams with tokens in flight leaves a hundred thousand of them, and nobody is to blame.
MAX_IDLE_FRAMES: Final = 20_000
# Requests that were reset before we answered them at all, less those we did answer: "rapid reset". A front that
# drops its whole load at once stays below it, since at most max_concurrent_streams can be open.
MAX_UNANSWERED_RESETS: Final = 10_000


class Patience:
    """The three counts of one connection. Every method raises `ProtocolViolation` when its limit is passed.

    * `answers`: queued only because the peer sent something; set to 0 when output is handed to the transport.
    * `idle_frames`: in a row that carried nothing; set to 0 by a request, a response or a message.
    * `unanswered_resets`: requests reset before anything was sent for them, less those that were answered.
    """

    __slots__ = ("answers", "idle_frames", "unanswered_resets")

    def __init__(self) -> None:
        self.answers = 0
        self.idle_frames = 0
        self.unanswered_resets = 0

    def answer(self) -> None:
        """A frame was queued only because the peer sent one."""
        self.answers += 1
        if self.answers > MAX_PENDING_ANSWERS:
            raise _calm(f"{self.answers} answers that the peer has not read")

    def idle_frame(self) -> None:
        """A frame came that carries nothing."""
        self.idle_frames += 1
        if self.idle_frames > MAX_IDLE_FRAMES:
            raise _calm(f"{self.idle_frames} frames in a row that carry nothing")

    def unanswered_reset(self) -> None:
        """The peer reset a request to which we had sent nothing."""
        self.unanswered_resets += 1
        if self.unanswered_resets > MAX_UNANSWERED_RESETS:
            raise _calm(f"{self.unanswered_resets} requests reset before an answer")

    def answered(self) -> None:
        """We sent response headers."""
        self.unanswered_resets = max(0, self.unanswered_resets - 1)


def _calm(why: str) -> ProtocolViolation:
    return ProtocolViolation(why, h2_code=ErrorCode.ENHANCE_YOUR_CALM)
