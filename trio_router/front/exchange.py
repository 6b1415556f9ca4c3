"""One request and its response, as a handler sees them.

Knows the framing of a response and the connection's outbox; must not know routes, JSON or tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from email.utils import formatdate
from typing import Final

from .outbox import Outbox
from .wire import Headers, HttpRequest, Wire

_MAX_ID_CHARS: Final = 128
_LAST_CHUNK: Final = b"0\r\n\r\n"


def http_date(seconds: float) -> bytes:
    """Wall time as a date header has it."""
    return formatdate(seconds, usegmt=True).encode("ascii")


def is_request_id(text: str) -> bool:
    """Whether a text may stand in a header as a request's id."""
    return 0 < len(text) <= _MAX_ID_CHARS and all("!" <= char <= "~" for char in text)


class Exchange:
    """Answer once: `respond` with everything, or `start_stream` and write. `always` is added to either's headers.

    The handler runs in a scope that is cancelled when the client leaves.
    """

    __slots__ = (
        "_clock",
        "_close",
        "_outbox",
        "_release",
        "_wire",
        "_writer",
        "always",
        "finished",
        "given_id",
        "recorded",
        "request",
        "request_id",
        "started",
        "status",
    )

    def __init__(
        self,
        request: HttpRequest,
        *,
        wire: Wire,
        outbox: Outbox,
        clock: Callable[[], float],
        close: Callable[[], bool],
        release: Callable[[], None],
    ) -> None:
        self.request = request
        self.always: Headers = ()
        self.request_id = ""
        # Chosen by the client, in a header.
        self.given_id: str | None = None
        # The router keeps a record of how this request ends, so that nobody else needs to tell.
        self.recorded = False
        self.started = False
        self.finished = False
        self.status: int | None = None
        self._wire = wire
        self._outbox = outbox
        self._clock = clock
        self._close = close
        self._release = release
        self._writer: BodyWriter | None = None

    def __repr__(self) -> str:
        return f"<Exchange {self.request.method} {self.request.path} status={self.status}>"

    def name(self, request_id: str) -> None:
        """Tell the client, too, by which id its request is known from here on: visible ASCII."""
        self.request_id = request_id
        self.always = ((b"x-request-id", request_id.encode("ascii")),)

    def drop_body(self) -> None:
        """The request's body has been made into something as large: let its memory go, and keep its share of the budget
        for now.
        """
        self.request.body = b""

    def forget_body(self) -> None:
        """The request's body has been made into something small: let its memory, and its share of the budget, go."""
        self.drop_body()
        self._release()

    async def respond(self, status: int, *, headers: Headers = (), body: bytes = b"") -> None:
        """Send a complete response and wait until the client's socket has it; raises ClientGone."""
        data = self._head(status, headers=((b"content-length", b"%d" % len(body)), *headers))
        if body:
            data += self._wire.response_body(body)
        self._outbox.write(data + self._wire.response_end())
        self.finished = True
        await self._outbox.drain()

    def start_stream(self, status: int = 200, *, headers: Headers = ()) -> BodyWriter:
        """Begin a response of unknown length. Its head leaves with the first bytes of the body."""
        head = self._head(status, headers=headers)
        self._writer = BodyWriter(self, head=head, outbox=self._outbox, chunked=self._wire.is_http_11)
        return self._writer

    def end_stream(self) -> None:
        """Tell the HTTP side that the body is complete. Called by the writer."""
        self._wire.response_end()
        self.finished = True

    def _head(self, status: int, *, headers: Headers) -> bytes:
        date = http_date(self._clock())
        closing: Headers = ((b"connection", b"close"),) if self._close() else ()
        head = self._wire.response_head(status, headers=((b"date", date), *headers, *self.always, *closing))
        self.started = True
        self.status = status
        return head


class BodyWriter:
    """A streamed response's body. Bytes pass by h11: a chunk is framed here and leaves in one send."""

    __slots__ = ("_chunked", "_exchange", "_head", "_outbox")

    def __init__(self, exchange: Exchange, *, head: bytes, outbox: Outbox, chunked: bool) -> None:
        self._exchange = exchange
        self._head = head
        self._outbox = outbox
        self._chunked = chunked

    @property
    def full(self) -> bool:
        """The client has not taken all of what was written."""
        return self._outbox.pending_bytes > 0 or self._outbox.broken

    def on_drained(self, callback: Callable[[], None]) -> None:
        """Have `callback` called whenever the client has caught up after a write that said full."""
        self._outbox.on_drained = callback

    def write_nowait(self, data: bytes) -> bool:
        """Send `data` as one chunk. False: full, or the client is gone. What was given is kept either way as long as
        the outbox's bound allows; a producer that goes on beyond it loses the client."""
        if not data:
            return not self.full  # an empty chunk would end the body
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._head:
            data = self._head + data
            self._head = b""
        return self._outbox.write(data)

    async def drain(self) -> None:
        """Wait until the client has taken everything; raises ClientGone."""
        await self._outbox.drain()

    async def finish(self, tail: bytes = b"") -> None:
        """Write `tail`, end the body and wait until the client has it; raises ClientGone."""
        self._outbox.on_drained = None
        data = self._head
        self._head = b""
        if self._chunked:
            data += (b"%x\r\n%b\r\n" % (len(tail), tail) if tail else b"") + _LAST_CHUNK
        else:
            data += tail
        self._exchange.end_stream()
        self._outbox.write(data)
        await self._outbox.drain()
