"""The receiving half of a connection: from bytes to the meaning of frames (RFC 9113 sections 4 to 6).

Responsible for cutting bytes into frames and for what each frame does. Must not know callers: it changes streams
and the books in `core`, and raises `ProtocolViolation` for whatever must end the connection.

The fast path takes a DATA frame that holds exactly one whole message; every other frame goes through a handler
and the table in `streams`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Final

from trio_router.errors import ProtocolViolation, TooLarge
from trio_router.http2 import credit, frames
from trio_router.http2.core import MAX_DEBUG_BYTES, Core, GoAway
from trio_router.http2.frames import FRAME_HEADER, MESSAGE_HEADER, ErrorCode, FrameType
from trio_router.http2.framing import PREFIX_BYTES, Assembler
from trio_router.http2.headers import (
    HeaderBlock,
    HeaderDecoder,
    Headers,
    check_request,
    check_response,
    check_size,
    check_trailers,
    status_of,
)
from trio_router.http2.settings import SettingId, parse_settings
from trio_router.http2.streams import Action, Input, Role, Rule, State, Stream

# No frame passes this test, so that every one takes the slow path: before the first SETTINGS and inside a header
# block.
_NO_FAST_PATH: Final = -1
_ON_CONNECTION: Final = frozenset({FrameType.SETTINGS, FrameType.PING, FrameType.GOAWAY})
_DELIVERING: Final = frozenset({Action.DELIVER, Action.DELIVER_LAST})
_CHECKS: Final[Mapping[Action, Callable[[Headers], ProtocolViolation | None]]] = {
    Action.RESPOND: check_response,
    Action.TRAILERS_ONLY: check_response,
    Action.TRAILERS: check_trailers,
}


class Inbound:
    """Takes what the peer sends, in pieces of any size."""

    __slots__ = (
        "_block",
        "_buffer",
        "_core",
        "_decoder",
        "_fast_limit",
        "_preface_due",
        "_settings_unacked",
        "_wanted",
        "settings_due",
    )

    def __init__(self, core: Core) -> None:
        self._core = core
        self._decoder = HeaderDecoder(max_list_bytes=core.settings.max_header_list_bytes)
        self._block: HeaderBlock | None = None  # a header block that has begun and not ended
        self._buffer = bytearray()
        self._wanted = 0  # bytes the buffer must hold before it is worth parsing again
        self._preface_due = core.role is Role.SERVER
        self.settings_due = True  # the first frame of the peer, which must be SETTINGS, has not come
        self._settings_unacked = True
        self._fast_limit = _NO_FAST_PATH

    def feed(self, data: bytes) -> None:
        """Act on every frame that is complete with `data`. Raises `ProtocolViolation` when the connection must end."""
        buffer = self._buffer
        if buffer:
            buffer += data
            if len(buffer) < self._wanted:
                return
            data = bytes(buffer)
            buffer.clear()
        end = self._take_preface(data) if self._preface_due else 0
        if not self._preface_due:
            end = self._take_frames(data, end)
        if end < len(data):
            buffer += data[end:] if end else data

    def _take_preface(self, data: bytes) -> int:
        """The length of the client preface, once it is all here (RFC 9113 3.4)."""
        head = data[: len(frames.PREFACE)]
        if not frames.PREFACE.startswith(head):
            raise ProtocolViolation("the peer does not speak HTTP/2: its first bytes are no connection preface")
        self._wanted = len(frames.PREFACE)
        if len(head) < len(frames.PREFACE):
            return 0
        self._preface_due = False
        return len(head)

    def _take_frames(self, data: bytes, at: int) -> int:
        """Handle every whole frame from `at` on; where the first incomplete one begins."""
        core = self._core
        size = len(data)
        last = size - MESSAGE_HEADER.size
        max_frame = core.settings.max_frame_bytes
        unpack = MESSAGE_HEADER.unpack_from
        stream_of = core.streams.get
        touched = core.touched
        batch = core.batch
        limit = self._fast_limit
        received = 0
        while True:
            if at <= last:
                word, flags, stream_id, mark, length = unpack(data, at)
                # One comparison says: type DATA, exactly one message in the frame, within our limits.
                if (length + 5) << 8 == word <= limit and not flags | mark:
                    stream = stream_of(stream_id)
                    if stream is not None and stream.plain:
                        left = stream.receive_left - length - 5
                        end = at + 14 + length
                        if left >= 0 and end <= size:
                            stream.receive_left = left
                            stream.messages.append(data[at + 14 : end])
                            if stream.batch != batch:
                                stream.batch = batch
                                touched.append(stream)
                            received += length + 5
                            at = end
                            continue
            elif size - at < FRAME_HEADER.size:
                self._wanted = FRAME_HEADER.size
                break
            word, flags, stream_id = FRAME_HEADER.unpack_from(data, at)
            length = word >> 8
            end = at + FRAME_HEADER.size + length
            if length > max_frame:
                raise self._oversized(data, length)
            if end > size:
                self._wanted = end - at
                break
            self._frame(word & 0xFF, flags, stream_id & frames.MAX_STREAM_ID, data[at + FRAME_HEADER.size : end])
            limit = self._fast_limit
            at = end
        if received:
            core.uncredited += received
            core.patience.idle_frames = 0
        if core.uncredited >= core.credit_mark:
            core.return_connection_credit()
        return at

    def _oversized(self, data: bytes, length: int) -> ProtocolViolation:
        if self.settings_due and data.startswith(b"HTTP/"):
            return ProtocolViolation("the peer answered in HTTP/1", h2_code=ErrorCode.HTTP_1_1_REQUIRED)
        limit = self._core.settings.max_frame_bytes
        return ProtocolViolation(
            f"frame of {length} bytes is over max_frame_bytes ({limit})", h2_code=ErrorCode.FRAME_SIZE_ERROR
        )

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """One frame off the fast path."""
        block = self._block
        if block is not None and (kind != FrameType.CONTINUATION or stream_id != block.stream_id):
            raise ProtocolViolation("a header block was interrupted by another frame")
        if self.settings_due and (kind != FrameType.SETTINGS or flags & frames.ACK):
            raise ProtocolViolation("the first frame is not SETTINGS")
        handler = self._HANDLERS.get(kind)
        if handler is None:
            self._core.patience.idle_frame()
            return
        if kind != FrameType.WINDOW_UPDATE and (stream_id == 0) is not (kind in _ON_CONNECTION):
            raise ProtocolViolation(f"{FrameType(kind).name} frame on stream {stream_id}")
        handler(self, flags, stream_id, payload)

    def _admit(self, stream_id: int, event: Input, action: Action) -> Stream | None:
        """The stream, if the table answers `event` with `action`; else that answer is carried out here."""
        stream = self._core.streams.get(stream_id)
        rule = self._core.rule(stream, stream_id, event)
        if rule.action is action and stream is not None:
            return stream
        self._refuse(stream, rule)
        return None

    def _refuse(self, stream: Stream | None, rule: Rule) -> None:
        """Carry out the actions that need nothing but the rule."""
        if rule.action is Action.FAIL_CONNECTION:
            raise ProtocolViolation(rule.why, h2_code=rule.code)
        if rule.action is Action.FAIL_STREAM and stream is not None:
            self._fail_stream(stream, rule.why, rule.code)

    def _fail_stream(self, stream: Stream, why: str, code: ErrorCode = ErrorCode.PROTOCOL_ERROR) -> None:
        self._core.fail_stream(stream, ProtocolViolation(why, h2_code=code))

    # -- messages

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        core = self._core
        core.uncredited += len(payload)
        end = bool(flags & frames.END_STREAM)
        if not payload and not end:
            core.patience.idle_frame()
        stream = core.streams.get(stream_id)
        rule = core.rule(stream, stream_id, Input.DATA_END if end else Input.DATA)
        if stream is None or rule.action not in _DELIVERING:
            self._refuse(stream, rule)
            return
        body = frames.without_padding(FrameType.DATA, flags, payload) if flags & frames.PADDED else payload
        stream.receive_left -= len(payload)
        if stream.receive_left < 0:
            self._fail_stream(stream, "DATA beyond the flow-control window", ErrorCode.FLOW_CONTROL_ERROR)
            return
        core.touch(stream)
        if not self._assemble(stream, body):
            return
        if end:
            core.remote_end(stream)
        elif not stream.messages and not stream.taken:
            # Only a piece of a message has come: see the law in `credit`.
            core.return_credit(stream)

    def _assemble(self, stream: Stream, body: bytes) -> bool:
        """Cut messages out of DATA; False if that failed the stream."""
        assembler = stream.assembler
        if assembler is None:
            assembler = stream.assembler = Assembler(limit=self._core.settings.max_message_bytes)
        before = len(stream.messages)
        try:
            assembler.feed(body, into=stream.messages)
        except (ProtocolViolation, TooLarge) as error:
            self._core.fail_message(stream, error)
            return False
        stream.plain = not assembler.pending
        if len(stream.messages) > before:
            self._core.patience.idle_frames = 0
        return True

    # -- header lists

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        fragment = frames.without_padding(FrameType.HEADERS, flags, payload)
        end = bool(flags & frames.END_STREAM)
        if flags & frames.END_HEADERS:
            self._header_list(stream_id, self._decoder.decode(fragment), end=end)
            return
        limit = self._core.settings.max_header_list_bytes
        self._block = HeaderBlock(stream_id=stream_id, end_stream=end, first=fragment, max_list_bytes=limit)
        self._fast_limit = _NO_FAST_PATH

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        block = self._block
        if block is None:
            raise ProtocolViolation("CONTINUATION without a header block")
        block.add(payload)
        if flags & frames.END_HEADERS:
            self._block = None
            self._open_fast_path()
            self._header_list(stream_id, self._decoder.decode(block.content()), end=block.end_stream)

    def _open_fast_path(self) -> None:
        limits = self._core.settings
        self._fast_limit = min(limits.max_frame_bytes, limits.max_message_bytes + PREFIX_BYTES) << 8

    def _header_list(self, stream_id: int, headers: Headers, *, end: bool) -> None:
        """A whole header list, decoded; what it means depends on the stream."""
        core = self._core
        stream = core.streams.get(stream_id)
        event = Input.HEADERS_END if end else Input.HEADERS
        if core.role is Role.CLIENT and not end and (status_of(headers) or b"").startswith(b"1"):
            event = Input.INFORMATIONAL
        rule = core.rule(stream, stream_id, event)
        if rule.action is Action.OPEN:
            self._open_request(stream_id, headers, end=end)
            return
        if event is Input.INFORMATIONAL:
            core.patience.idle_frame()
        check = _CHECKS.get(rule.action)
        if stream is None or check is None:
            self._refuse(stream, rule)
            return
        problem = check(headers) or check_size(headers, limit=core.settings.max_header_list_bytes)
        if problem is not None:
            core.fail_stream(stream, problem)
            return
        core.patience.idle_frames = 0
        core.touch(stream)
        if rule.action is not Action.TRAILERS:
            stream.headers = headers
        if end:
            stream.trailers = headers
            stream.trailers_only = rule.action is Action.TRAILERS_ONLY
            core.remote_end(stream)
        else:
            stream.state = rule.target
            stream.plain = True

    def _open_request(self, stream_id: int, headers: Headers, *, end: bool) -> None:
        """A client's new stream, or its refusal. What is refused here never becomes visible above."""
        core = self._core
        if not stream_id & 1:
            raise ProtocolViolation(f"a client may not open stream {stream_id}")
        core.last_peer_id = stream_id
        refusal = self._refusal(stream_id, headers)
        if refusal is not None:
            core.answer(frames.rst_stream(stream_id, refusal))
            return
        core.patience.idle_frames = 0
        stream = core.new_stream(stream_id, state=State.RECEIVING)
        stream.headers = headers
        core.touch(stream)
        if end:
            core.remote_end(stream)

    def _refusal(self, stream_id: int, headers: Headers) -> ErrorCode | None:
        core = self._core
        if core.refuse_above is not None and stream_id > core.refuse_above:
            return ErrorCode.REFUSED_STREAM
        if len(core.streams) >= core.settings.max_concurrent_streams:
            return ErrorCode.REFUSED_STREAM
        if check_request(headers) is not None:
            return ErrorCode.PROTOCOL_ERROR
        if check_size(headers, limit=core.settings.max_header_list_bytes) is not None:
            return ErrorCode.ENHANCE_YOUR_CALM
        return None

    # -- control

    def _on_rst_stream(self, _flags: int, stream_id: int, payload: bytes) -> None:
        code = int.from_bytes(frames.exactly(FrameType.RST_STREAM, payload, length=4), "big")
        stream = self._admit(stream_id, Input.RESET, Action.RESET)
        if stream is None:
            return
        core = self._core
        core.touch(stream)
        stream.reset_code = code
        stream.refused = code == ErrorCode.REFUSED_STREAM and stream.headers is None
        core.close(stream)
        if core.role is Role.SERVER and not stream.started:
            core.patience.unanswered_reset()

    def _on_window_update(self, _flags: int, stream_id: int, payload: bytes) -> None:
        increment = (
            int.from_bytes(frames.exactly(FrameType.WINDOW_UPDATE, payload, length=4), "big") & frames.MAX_WINDOW
        )
        if stream_id == 0:
            self._grow_connection_window(increment)
            return
        stream = self._admit(stream_id, Input.CREDIT, Action.GRANT)
        if stream is None:
            return
        window = credit.grown(stream.send_window, increment)
        if increment == 0:
            self._fail_stream(stream, "WINDOW_UPDATE of 0")
        elif window is None:
            self._fail_stream(stream, "the stream's window overflows", ErrorCode.FLOW_CONTROL_ERROR)
        else:
            stream.send_window = window
            self._core.outbox.update(stream)

    def _grow_connection_window(self, increment: int) -> None:
        if increment == 0:
            raise ProtocolViolation("WINDOW_UPDATE of 0 on the connection")
        if not self._core.outbox.grow(increment):
            raise ProtocolViolation("the connection's window overflows", h2_code=ErrorCode.FLOW_CONTROL_ERROR)

    def _on_settings(self, flags: int, _stream_id: int, payload: bytes) -> None:
        if flags & frames.ACK:
            frames.exactly(FrameType.SETTINGS, payload, length=0)
            self._settings_acked()
            return
        core = self._core
        values = parse_settings(payload, from_server=core.role is Role.CLIENT)
        peer = core.peer
        if self.settings_due:
            self.settings_due = False
            self._open_fast_path()
            # No value means no limit; before the first frame we only guess one.
            peer.max_concurrent_streams = frames.MAX_STREAM_ID
        peer.max_concurrent_streams = values.get(SettingId.MAX_CONCURRENT_STREAMS, peer.max_concurrent_streams)
        if SettingId.HEADER_TABLE_SIZE in values:
            core.encoder.limit_table(values[SettingId.HEADER_TABLE_SIZE])
        if SettingId.INITIAL_WINDOW_SIZE in values:
            self._shift_send_windows(values[SettingId.INITIAL_WINDOW_SIZE])
        core.answer(frames.SETTINGS_ACK)

    def _shift_send_windows(self, initial: int) -> None:
        """The peer's INITIAL_WINDOW_SIZE changed: so do the windows of all streams, below zero if need be (6.9.2)."""
        core = self._core
        change = initial - core.peer.initial_window
        core.peer.initial_window = initial
        for stream in core.streams.values():
            window = credit.grown(stream.send_window, change)
            if window is None:
                raise ProtocolViolation(
                    "INITIAL_WINDOW_SIZE overflows a stream's window", h2_code=ErrorCode.FLOW_CONTROL_ERROR
                )
            stream.send_window = window
            core.outbox.update(stream)

    def _settings_acked(self) -> None:
        core = self._core
        if not self._settings_unacked:
            core.patience.idle_frame()
            return
        self._settings_unacked = False
        core.set_receive_window(core.settings.stream_window_bytes)

    def _on_ping(self, flags: int, _stream_id: int, payload: bytes) -> None:
        core = self._core
        frames.exactly(FrameType.PING, payload, length=8)
        if not flags & frames.ACK:
            core.pings_received += 1
            core.answer(frames.ping(payload, ack=True))
        elif payload in core.pings_out:
            core.pings_out.remove(payload)
            core.pings_acked.append(payload)
        else:
            core.patience.idle_frame()

    def _on_goaway(self, _flags: int, _stream_id: int, payload: bytes) -> None:
        core = self._core
        if len(payload) < 8:
            raise ProtocolViolation("GOAWAY is too short", h2_code=ErrorCode.FRAME_SIZE_ERROR)
        last = int.from_bytes(payload[:4], "big") & frames.MAX_STREAM_ID
        code = int.from_bytes(payload[4:8], "big")
        core.goaway_received = GoAway(last_stream_id=last, code=code, debug=payload[8 : 8 + MAX_DEBUG_BYTES])
        if core.role is Role.SERVER:
            return
        for stream in [stream for stream in core.streams.values() if stream.id > last]:
            core.touch(stream)
            stream.reset_code = ErrorCode.REFUSED_STREAM
            # As for a reset: who has answered has acted, whatever it says now.
            stream.refused = stream.headers is None
            core.close(stream)

    def _on_priority(self, _flags: int, stream_id: int, payload: bytes) -> None:
        stream = self._core.streams.get(stream_id)
        self._core.patience.idle_frame()
        if len(payload) != 5 and stream is not None:
            self._fail_stream(stream, "PRIORITY of a wrong size", ErrorCode.FRAME_SIZE_ERROR)

    def _on_push_promise(self, _flags: int, stream_id: int, _payload: bytes) -> None:
        stream = self._core.streams.get(stream_id)
        self._refuse(stream, self._core.rule(stream, stream_id, Input.PUSH))

    _HANDLERS: ClassVar[Mapping[int, Callable[[Inbound, int, int, bytes], None]]] = {
        FrameType.DATA: _on_data,
        FrameType.HEADERS: _on_headers,
        FrameType.PRIORITY: _on_priority,
        FrameType.RST_STREAM: _on_rst_stream,
        FrameType.SETTINGS: _on_settings,
        FrameType.PUSH_PROMISE: _on_push_promise,
        FrameType.PING: _on_ping,
        FrameType.GOAWAY: _on_goaway,
        FrameType.WINDOW_UPDATE: _on_window_update,
        FrameType.CONTINUATION: _on_continuation,
    }
