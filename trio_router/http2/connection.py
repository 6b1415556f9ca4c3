"""One HTTP/2 connection, either end: bytes in, touched streams out; calls in, bytes out.

Responsible for what its user may ask, and for sending. Must not know sockets, time, gRPC metadata or what its
user does with a message. Nothing here blocks, and `receive` never raises: what a peer does wrong becomes
`Stream.failure` or `Connection.error`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from trio_router.errors import LinkError, ProtocolViolation, TooLarge
from trio_router.http2 import frames
from trio_router.http2.core import Core, GoAway
from trio_router.http2.frames import MESSAGE_HEADER, SEND_FRAME_BYTES, ErrorCode
from trio_router.http2.framing import PREFIX_BYTES, join
from trio_router.http2.headers import Headers, size_of
from trio_router.http2.inbound import Inbound
from trio_router.http2.limits import MAX_UNREAD_BYTES, Clock, no_clock
from trio_router.http2.outbox import DIRECT_LIMIT_BYTES
from trio_router.http2.settings import Http2Settings
from trio_router.http2.streams import Role, State, Stream
from trio_router.pieces import Message

_DEFAULTS: Final = Http2Settings()
_pack_message = MESSAGE_HEADER.pack


@final
class Connection:
    """The state of one HTTP/2 connection for gRPC."""

    __slots__ = ("_core", "_inbound", "_outbox")

    def __init__(self, role: Role, *, settings: Http2Settings = _DEFAULTS, clock: Clock = no_clock) -> None:
        """`clock` gives seconds; it is asked only when a peer seems to misbehave (see `limits`)."""
        self._core = Core(role, settings=settings, clock=clock)
        self._inbound = Inbound(self._core)
        self._outbox = self._core.outbox

    # -- state

    @property
    def error(self) -> ProtocolViolation | None:
        """Why the connection has failed; its GOAWAY is in the output, and `receive` ignores everything from then on."""
        return self._core.error

    @property
    def greeted(self) -> bool:
        """Whether the peer's first SETTINGS have come, so that its limits are known."""
        return self._inbound.greeted

    @property
    def goaway_received(self) -> GoAway | None:
        """The latest GOAWAY of the peer."""
        return self._core.goaway_received

    @property
    def pings_acked(self) -> list[bytes]:
        """Payloads of our pings that were answered, oldest first; the reader removes them."""
        return self._core.pings_acked

    @property
    def pings_received(self) -> int:
        """How many pings the peer has sent so far (answers to ours are none)."""
        return self._core.pings_received

    @property
    def stream_limit(self) -> int:
        """How many streams the peer lets us have open at a time."""
        return self._core.peer.max_concurrent_streams

    @property
    def can_open(self) -> bool:
        """Whether `open_stream` would succeed now."""
        core = self._core
        return (
            core.role is Role.CLIENT
            and core.error is None
            and not core.lost
            and core.goaway_received is None
            and core.refuse_above is None
            and len(core.streams) < core.peer.max_concurrent_streams
            and self._outbox.unread <= MAX_UNREAD_BYTES
            and core.next_id <= frames.MAX_STREAM_ID
        )

    @property
    def open_streams(self) -> int:
        """Streams that are not closed."""
        return len(self._core.streams)

    def __repr__(self) -> str:
        core = self._core
        state = "failed" if core.error else "lost" if core.lost else "going away" if core.goaway_received else "open"
        return f"<Connection {core.role.value} {state} streams={len(core.streams)}>"

    # -- the transport's side

    def receive(self, data: bytes, *, effort: int | None = None) -> list[Stream]:
        """Take bytes from the transport; the streams that changed, each once, in the order of their first change.

        Never raises. On a server a stream whose `user` is None is a new request.

        With `effort` it stops after about so many frames that are not one message each (a header list counts as ten):
        if `has_input` says so, call it again with b"" for the rest, when others have had their turn. One read of frames
        that are small and dear may take a second otherwise.
        """
        core = self._core
        touched: list[Stream] = []
        if core.error is None and not core.lost:
            core.touched = touched
            core.batch += 1
            try:
                self._inbound.feed(data, effort)
            except ProtocolViolation as violation:
                core.fail(violation)
        return touched

    @property
    def has_input(self) -> bool:
        """Whether the last `receive` stopped before the end of what has come."""
        return self._inbound.has_input and self._core.error is None and not self._core.lost

    @property
    def has_output(self) -> bool:
        """Whether `take_output` would return anything now."""
        return self._outbox.pending

    def take_output(self, max_bytes: int = DIRECT_LIMIT_BYTES) -> bytes:
        """The next bytes for the transport: finished frames, then queued DATA in turns; b"" when there is nothing.

        At most `max_bytes`, which may end inside a frame; what is returned counts as sent.
        """
        output = self._outbox.take(max_bytes)
        self._core.patience.taken(len(output))
        return output

    def take_drained(self) -> list[Stream]:
        """Streams whose `queued_bytes` went to 0 since the last call because all of it was taken."""
        return self._outbox.take_drained()

    def connection_lost(self) -> list[Stream]:
        """The transport is gone: every open stream becomes `lost` and closed. Returns them."""
        self._core.lost = True
        return self._core.lose_all()

    # -- streams

    def open_stream(self, headers: Headers) -> Stream:
        """Start a request. Raises `LinkError` when `can_open` is False, and `TooLarge` when the peer has said that it
        takes no such list of headers; nothing has been sent then.
        """
        if not self.can_open:
            raise LinkError(f"no new stream on this connection: {self!r}")
        core = self._core
        self._check_size(headers)
        stream = core.new_stream(core.next_id, state=State.AWAITING)
        core.next_id += 2
        stream.started = stream.sendable = stream.flowing = True
        self._outbox.add_headers(stream, headers, end_stream=False)
        return stream

    def send_headers(self, stream: Stream, headers: Headers, *, end_stream: bool = False) -> None:
        """A server's response headers; or, with `end_stream`, trailers, which leave behind the queued messages.

        Does nothing on a closed stream: its owner may not have noticed yet. Raises `RuntimeError` when called out
        of order, and `TooLarge` as `open_stream` does.
        """
        if stream.closed:
            return
        if stream.local_ended or stream.ending is not None or (stream.started and not end_stream):
            raise RuntimeError(f"headers out of order on {stream!r}")
        self._check_size(headers)
        stream.sendable = stream.flowing = not end_stream
        if stream.queued_bytes:
            stream.ending = headers
            return
        if not stream.started:
            stream.started = True
            self._core.patience.answered()
        self._outbox.add_headers(stream, headers, end_stream=end_stream)
        if end_stream:
            self._core.local_end(stream)

    def send_messages(self, stream: Stream, messages: Sequence[Message], *, end_stream: bool = False) -> None:
        """Send gRPC messages; what credit and room do not allow now is queued (`Stream.queued_bytes`).

        Does nothing on a closed stream. Raises `RuntimeError` before headers and after the end of our side.
        """
        if len(messages) == 1 and not end_stream:
            message = messages[0]
            size = len(message) + PREFIX_BYTES
            outbox = self._outbox
            if size <= stream.send_window and size <= outbox.direct and size <= SEND_FRAME_BYTES and stream.flowing:
                stream.send_window -= size
                outbox.direct -= size
                outbox.parts.append(_pack_message(size << 8, 0, stream.id, 0, size - PREFIX_BYTES) + bytes(message))
                return
        self._send_several(stream, messages, end_stream=end_stream)

    def _send_several(self, stream: Stream, messages: Sequence[Message], *, end_stream: bool) -> None:
        if stream.closed:
            return
        if not stream.sendable:
            raise RuntimeError(f"messages out of order on {stream!r}")
        outbox = self._outbox
        size = sum(map(len, messages)) + PREFIX_BYTES * len(messages)
        if not stream.flowing or size > min(stream.send_window, outbox.direct, SEND_FRAME_BYTES):
            if size:
                outbox.enqueue(stream, messages)
        elif size:
            stream.send_window -= size
            outbox.direct -= size
            outbox.add(frames.data_header(stream.id, size, end_stream=end_stream) + join(messages))
            if end_stream:
                self._core.local_end(stream)
            return
        if end_stream:
            self.end_stream(stream)

    def end_stream(self, stream: Stream) -> None:
        """End our side without trailers, behind the queued messages. Does nothing when it has ended already."""
        if stream.closed or stream.local_ended or stream.ending is not None:
            return
        if not stream.sendable:
            raise RuntimeError(f"end before the headers of {stream!r}")
        stream.sendable = stream.flowing = False
        if stream.queued_bytes:
            stream.ending = []
        else:
            self._outbox.add(frames.data_header(stream.id, 0, end_stream=True))
            self._core.local_end(stream)

    def reset(self, stream: Stream, code: int) -> None:
        """Give a stream up in both directions: queued messages are dropped, what still comes for it is ignored."""
        if not stream.closed:
            self._core.reset(stream, code=code)

    def _check_size(self, headers: Headers) -> None:
        limit = self._core.peer.max_header_list_bytes
        if limit is not None:
            size = size_of(headers)
            if size > limit:
                raise TooLarge(f"header list of {size} bytes is over the peer's limit of {limit}")

    # -- the connection

    def ping(self, payload: bytes) -> None:
        """Send a PING of eight bytes; its answer appears in `pings_acked`."""
        if len(payload) != 8:
            raise ValueError(f"a PING payload has 8 bytes, not {len(payload)}")
        self._core.pings_out.append(payload)
        self._outbox.add(frames.ping(payload, ack=False))

    def go_away(self, code: int = ErrorCode.NO_ERROR, debug: bytes = b"") -> None:
        """Say that no stream above the newest seen one will be served; those that are open go on."""
        self._core.go_away(code, debug=debug)

    def drain(self, debug: bytes = b"") -> None:
        """Ask for no more requests, and refuse none that was sent before the peer has read this (RFC 9113 6.8).

        `draining` until it has; then `go_away` happens by itself. A client, to which nobody sends requests, says the
        latter at once.
        """
        if self._core.role is Role.SERVER:
            self._core.drain(debug=debug)
        else:
            self._core.go_away(ErrorCode.NO_ERROR, debug=debug)

    @property
    def draining(self) -> bool:
        """Whether `drain` was called, and requests may still be on their way that the peer sent before it knew."""
        return self._core.draining
