"""The receiving half of a connection: from bytes to frames, header lists and messages (RFC 9113 sections 4 to 6).

Responsible for cutting bytes into frames and for what those of a stream's contents do; `control` has the others. Must
not know callers: it changes streams and the books in `core`, and raises `ProtocolViolation` for whatever must end the
connection.

The fast path takes a DATA frame that holds exactly one whole message; every other frame goes through a handler
and the table in `streams`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from trio_router.errors import ProtocolViolation, TooLarge
from trio_router.http2 import frames
from trio_router.http2.control import ON_CONNECTION, Control, fail_stream, refuse
from trio_router.http2.core import Core
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
    content_length,
    status_of,
)
from trio_router.http2.limits import MAX_UNREAD_BYTES
from trio_router.http2.streams import Action, Input, Role, State, Stream

# No frame passes this test, so that every one takes the slow path: before the first SETTINGS and inside a header
# block.
_NO_FAST_PATH: Final = -1
# What a header list costs, in frames without one: hpack is Python, too.
_HEADERS_EFFORT: Final = 10
_NO_END: Final = 1 << 60
# First bytes of what is sent to the wrong port most often, and what to say of it.
_OTHER_PROTOCOLS: Final = (
    (re.compile(rb"(?:GET|HEAD|POST|PUT|DELETE|OPTIONS|PATCH|CONNECT|TRACE) ").match, "an HTTP/1 request"),
    (re.compile(rb"\x16\x03[\x00-\x04]").match, "a TLS handshake"),
)
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
        "_control",
        "_core",
        "_decoder",
        "_effort",
        "_fast_limit",
        "_handlers",
        "_preface_due",
        "_wanted",
    )

    def __init__(self, core: Core) -> None:
        self._core = core
        self._decoder = HeaderDecoder(max_list_bytes=core.settings.max_header_list_bytes)
        self._block: HeaderBlock | None = None  # a header block that has begun and not ended
        self._buffer = bytearray()
        # Bytes the buffer must hold before it is worth parsing again; 0 with bytes in it: it is now.
        self._wanted = 0
        self._preface_due = core.role is Role.SERVER
        self._control = Control(core)
        self._handlers: dict[int, Callable[[int, int, bytes], None]] = {
            FrameType.DATA: self._on_data,
            FrameType.HEADERS: self._on_headers,
            FrameType.CONTINUATION: self._on_continuation,
            **self._control.handlers(),
        }
        self._fast_limit = _NO_FAST_PATH
        self._effort = _NO_END  # what may still be spent in this call of `feed`

    @property
    def greeted(self) -> bool:
        """Whether the peer's first frame has come."""
        return not self._control.settings_due

    @property
    def has_input(self) -> bool:
        """Whether the last `feed` stopped for lack of effort, and not of bytes."""
        return not self._wanted and bool(self._buffer)

    def feed(self, data: bytes, effort: int | None) -> None:
        """Act on every frame that is complete with `data`; or, after about `effort` frames off the fast path, stop.

        Raises `ProtocolViolation` when the connection must end.
        """
        self._effort = _NO_END if effort is None else effort
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
            what = next((name for looks_like, name in _OTHER_PROTOCOLS if looks_like(head)), "no connection preface")
            raise ProtocolViolation(f"this port speaks HTTP/2 only, and the first bytes are {what}")
        self._wanted = len(frames.PREFACE)
        if len(head) < len(frames.PREFACE):
            return 0
        self._preface_due = False
        return len(head)

    def _take_frames(self, data: bytes, at: int) -> int:  # noqa: C901  # the hot loop: bench/http2.py
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
            if self._effort <= 0:
                self._wanted = 0
                break
        if received:
            core.uncredited += received
            patience = core.patience
            patience.idle_frames = patience.credits = 0
        if core.uncredited >= core.credit_mark:
            core.return_connection_credit()
        return at

    def _oversized(self, data: bytes, length: int) -> ProtocolViolation:
        if not self.greeted and data.startswith(b"HTTP/"):
            return ProtocolViolation("the peer answered in HTTP/1", h2_code=ErrorCode.HTTP_1_1_REQUIRED)
        limit = self._core.settings.max_frame_bytes
        return ProtocolViolation(
            f"frame of {length} bytes is over max_frame_bytes ({limit})", h2_code=ErrorCode.FRAME_SIZE_ERROR
        )

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """One frame off the fast path."""
        self._effort -= 1
        block = self._block
        if block is not None and (kind != FrameType.CONTINUATION or stream_id != block.stream_id):
            raise ProtocolViolation("a header block was interrupted by another frame")
        control = self._control
        greeting = control.settings_due
        if greeting and (kind != FrameType.SETTINGS or flags & frames.ACK):
            raise ProtocolViolation("the first frame is not SETTINGS")
        handler = self._handlers.get(kind)
        if handler is None:
            self._core.patience.idle_frame()
            return
        if kind != FrameType.WINDOW_UPDATE and (stream_id == 0) is not (kind in ON_CONNECTION):
            raise ProtocolViolation(f"{FrameType(kind).name} frame on stream {stream_id}")
        handler(flags, stream_id, payload)
        if control.effort:
            self._effort -= control.effort
            control.effort = 0
        if greeting:
            self._open_fast_path()

    # -- messages

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        core = self._core
        core.uncredited += len(payload)
        end = bool(flags & frames.END_STREAM)
        body = frames.without_padding(FrameType.DATA, flags, payload) if flags & frames.PADDED else payload
        if not body:
            core.patience.idle_frame()
        stream = core.streams.get(stream_id)
        rule = core.rule(stream, stream_id, Input.DATA_END if end else Input.DATA)
        if stream is None or rule.action not in _DELIVERING:
            refuse(core, stream, rule)
            return
        stream.receive_left -= len(payload)
        if stream.receive_left < 0:
            fail_stream(core, stream, "DATA beyond the flow-control window", ErrorCode.FLOW_CONTROL_ERROR)
            return
        if stream.content_left is not None:
            stream.content_left -= len(body)
            if stream.content_left < 0:
                fail_stream(core, stream, "more bytes came than content-length says")
                return
        core.touch(stream)
        if not self._assemble(stream, body):
            return
        if end:
            core.remote_end(stream)
        else:
            core.lend_credit(stream)  # if only a piece of a message has come

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
        stream.plain = not assembler.pending and stream.content_left is None
        if len(stream.messages) > before:
            self._core.patience.work()
        return True

    # -- header lists

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        fragment = frames.without_padding(FrameType.HEADERS, flags, payload)
        end = bool(flags & frames.END_STREAM)
        if flags & frames.END_HEADERS:
            self._header_list(stream_id, fragment, end=end)
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
            self._header_list(stream_id, block.content(), end=block.end_stream)

    def _open_fast_path(self) -> None:
        limits = self._core.settings
        self._fast_limit = min(limits.max_frame_bytes, limits.max_message_bytes + PREFIX_BYTES) << 8

    def _header_list(self, stream_id: int, block: bytes, *, end: bool) -> None:
        """A whole header list; what it means depends on the stream."""
        self._effort -= _HEADERS_EFFORT
        headers = self._decoder.decode(block)
        core = self._core
        stream = core.streams.get(stream_id)
        event = Input.HEADERS_END if end else Input.HEADERS
        if core.role is Role.CLIENT:
            if not end and (status_of(headers) or b"").startswith(b"1"):
                event = Input.INFORMATIONAL
        elif stream_id <= core.last_peer_id and headers and headers[0][0].startswith(b":"):
            event = Input.REQUEST
        rule = core.rule(stream, stream_id, event)
        if rule.action is Action.OPEN:
            self._open_request(stream_id, headers, end=end)
            return
        check = _CHECKS.get(rule.action)
        if stream is None or check is None:
            core.patience.idle_frame()
            refuse(core, stream, rule)
            return
        problem = check(headers) or check_size(headers, limit=core.settings.max_header_list_bytes)
        if problem is not None:
            core.fail_stream(stream, problem)
            return
        core.patience.work()
        core.touch(stream)
        if rule.action is not Action.TRAILERS:
            stream.headers = headers
            stream.content_left = content_length(headers)
        if end:
            stream.trailers = headers
            stream.trailers_only = rule.action is Action.TRAILERS_ONLY
            core.remote_end(stream)
        else:
            stream.state = rule.target
            stream.plain = stream.content_left is None

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
        core.patience.work()
        stream = core.new_stream(stream_id, state=State.RECEIVING)
        stream.headers = headers
        stream.content_left = content_length(headers)
        stream.plain = stream.content_left is None
        core.touch(stream)
        if end:
            core.remote_end(stream)

    def _refusal(self, stream_id: int, headers: Headers) -> ErrorCode | None:
        core = self._core
        if core.refuse_above is not None and stream_id > core.refuse_above:
            return ErrorCode.REFUSED_STREAM
        if len(core.streams) >= core.settings.max_concurrent_streams or core.outbox.unread > MAX_UNREAD_BYTES:
            return ErrorCode.REFUSED_STREAM
        if check_request(headers) is not None:
            return ErrorCode.PROTOCOL_ERROR
        if check_size(headers, limit=core.settings.max_header_list_bytes) is not None:
            return ErrorCode.ENHANCE_YOUR_CALM
        return None
