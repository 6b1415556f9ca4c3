"""HTTP/1.1 as a value: request bytes in, records out; response records in, bytes out.

h11 does the grammar. This module adds what a server must decide on top of it (request targets, smuggling, what a
limit answers) and must not know sockets, time or what a request means. RFC 9112.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

import h11

from ..errors import RouterError, Unsupported
from .faults import HeadersTooLarge, MalformedHttp
from .respond import REASONS

Headers = tuple[tuple[bytes, bytes], ...]
"""Names are lower case."""


class Body(Enum):
    """Whether more of a request's body is to come."""

    MORE = auto()
    COMPLETE = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHead:
    """A request line and its headers. `content_length` is None when there is none (chunked, or no body)."""

    method: str
    path: str
    query: str
    headers: Headers
    content_length: int | None


@dataclass(slots=True, kw_only=True)
class HttpRequest:
    """A whole request. The body alone may change: to nothing, once it has been read."""

    method: str
    path: str
    query: str = ""
    headers: Headers = ()
    body: bytes = field(default=b"", repr=False)

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header (lower-case name), or None."""
        return next((value for key, value in self.headers if key == name), None)


# What h11 suggests for a violation; everything else is a plain 400.
_FAULTS: Final[dict[int, type[RouterError]]] = {431: HeadersTooLarge, 501: Unsupported}


class Wire:
    """One connection's requests and responses, in turn. Methods raise an error of the family for a bad peer."""

    __slots__ = ("_bodiless", "_h11", "_max_header_bytes")

    def __init__(self, *, max_header_bytes: int) -> None:
        self._max_header_bytes = max_header_bytes
        self._bodiless = False
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=max_header_bytes)

    def __repr__(self) -> str:
        return f"<Wire {self._h11.states}>"

    def feed(self, data: bytes) -> None:
        """Take what the peer sent; never b""."""
        self._h11.receive_data(data)

    @property
    def buffered_bytes(self) -> int:
        """Received and not yet parsed."""
        return len(self._h11.trailing_data[0])

    def next_head(self) -> RequestHead | None:
        """The next request's head, or None when more bytes are needed."""
        event = self._next_event()
        if not isinstance(event, h11.Request):
            return None
        # h11 limits what is incomplete; the answer must not depend on how the bytes were cut.
        if sum(len(name) + len(value) + 4 for name, value in event.headers) > self._max_header_bytes:
            raise HeadersTooLarge("the request headers are too large")
        if event.http_version not in (b"1.0", b"1.1"):
            raise MalformedHttp("only HTTP/1.0 and HTTP/1.1 are spoken here; gRPC has a port of its own")
        self._bodiless = event.method == b"HEAD"
        return _head(event)

    def read_body(self, into: bytearray) -> Body:
        """Append what has come of the body."""
        while True:
            event = self._next_event()
            if isinstance(event, h11.Data):
                into += event.data
            else:
                return Body.COMPLETE if isinstance(event, h11.EndOfMessage) else Body.MORE

    @property
    def awaits_continue(self) -> bool:
        """The peer holds its body back until it is told to go on (or is refused)."""
        return bool(self._h11.they_are_waiting_for_100_continue)

    def go_on(self) -> bytes:
        """The interim response that lets the body come."""
        return self._send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))

    def response_head(self, status: int, *, headers: Headers) -> bytes:
        """Begin the response. Without a content-length its body is chunked, or, for HTTP/1.0, ends the connection."""
        reason = REASONS.get(status, "").encode("ascii")
        return self._send(h11.Response(status_code=status, headers=list(headers), reason=reason))

    def response_body(self, data: bytes) -> bytes:
        """Frame a whole body announced by content-length; nothing in answer to HEAD."""
        return b"" if self._bodiless else self._send(h11.Data(data=data))

    def response_end(self) -> bytes:
        """End the response."""
        return self._send(h11.EndOfMessage())

    @property
    def is_http_11(self) -> bool:
        """The current request's client understands chunks."""
        return self._h11.their_http_version != b"1.0"

    @property
    def can_respond(self) -> bool:
        """No final response has been begun for the current (perhaps unreadable) request."""
        return self._h11.our_state in (h11.IDLE, h11.SEND_RESPONSE)

    def next_cycle(self) -> bool:
        """Get ready for the next request; False when the connection has to end."""
        if self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE:
            self._h11.start_next_cycle()
            return True
        return False

    def _send(self, event: h11.Event) -> bytes:
        return self._h11.send(event) or b""

    def _next_event(self) -> object:
        try:
            return self._h11.next_event()
        except h11.RemoteProtocolError as exc:
            raise _FAULTS.get(exc.error_status_hint, MalformedHttp)(_words(exc)) from exc


def _words(error: h11.RemoteProtocolError) -> str:
    """What h11 says, without the bytes it quotes as Python writes them."""
    return str(error).partition(": bytearray(")[0]


def _head(request: h11.Request) -> RequestHead:
    headers = tuple(request.headers)
    lengths = [value for name, value in headers if name == b"content-length"]
    if lengths and any(name == b"transfer-encoding" for name, _ in headers):
        # Two peers on one path may disagree on where such a request ends (RFC 9112 6.3, 11.2).
        raise MalformedHttp("both content-length and transfer-encoding are present")
    path, query = _split_target(request.target)
    return RequestHead(
        method=request.method.decode("ascii"),
        path=path,
        query=query,
        headers=headers,
        content_length=int(lengths[0]) if lengths else None,
    )


def _split_target(target: bytes) -> tuple[str, str]:
    text = target.decode("latin-1")
    scheme, separator, rest = text.partition("://")
    if separator and scheme.lower() in ("http", "https"):
        # Absolute form: a server must take it although only proxies send it (RFC 9112 3.2.2).
        slash = rest.find("/")
        text = rest[slash:] if slash >= 0 else "/"
    path, _, query = text.partition("?")
    return path, query
