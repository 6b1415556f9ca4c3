"""Frames about the connection, and those that steer a stream without carrying any of it (RFC 9113 6.3 to 6.9).

Responsible for what SETTINGS, PING, GOAWAY, WINDOW_UPDATE, RST_STREAM, PRIORITY and PUSH_PROMISE do to the books in
`core`. Must not know how frames are cut out of bytes, header lists or messages: they are `inbound`'s. Raises
`ProtocolViolation` for whatever must end the connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from trio_router.errors import ProtocolViolation
from trio_router.http2 import credit, frames
from trio_router.http2.core import DRAIN_PING, MAX_DEBUG_BYTES, Core, GoAway
from trio_router.http2.frames import ErrorCode, FrameType
from trio_router.http2.limits import STREAMS_PER_IDLE_FRAME
from trio_router.http2.settings import SettingId, parse_settings
from trio_router.http2.streams import Action, Input, Role, Rule, Stream

ON_CONNECTION: Final = frozenset({FrameType.SETTINGS, FrameType.PING, FrameType.GOAWAY})
"""Types that only ever come on stream 0."""


class Control:
    """The peer's control frames. `effort` is what the last frame cost beyond the usual, in frames."""

    __slots__ = ("_core", "_settings_unacked", "effort", "settings_due")

    def __init__(self, core: Core) -> None:
        self._core = core
        self.settings_due = True  # the first frame of the peer, which must be SETTINGS, has not come
        self._settings_unacked = True
        self.effort = 0

    def handlers(self) -> dict[int, Callable[[int, int, bytes], None]]:
        """What takes (flags, stream id, payload) of which frame type."""
        return {
            FrameType.PRIORITY: self._on_priority,
            FrameType.RST_STREAM: self._on_rst_stream,
            FrameType.SETTINGS: self._on_settings,
            FrameType.PUSH_PROMISE: self._on_push_promise,
            FrameType.PING: self._on_ping,
            FrameType.GOAWAY: self._on_goaway,
            FrameType.WINDOW_UPDATE: self._on_window_update,
        }

    # -- streams

    def _admit(self, stream_id: int, event: Input, action: Action) -> Stream | None:
        """The stream, if the table answers `event` with `action`; else that answer is carried out here."""
        stream = self._core.streams.get(stream_id)
        rule = self._core.rule(stream, stream_id, event)
        if rule.action is action and stream is not None:
            return stream
        refuse(self._core, stream, rule)
        self._core.patience.idle_frame()
        return None

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
        core.given_up(stream)

    def _on_priority(self, _flags: int, stream_id: int, payload: bytes) -> None:
        stream = self._core.streams.get(stream_id)
        self._core.patience.idle_frame()
        if len(payload) != 5 and stream is not None:
            fail_stream(self._core, stream, "PRIORITY of a wrong size", ErrorCode.FRAME_SIZE_ERROR)

    def _on_push_promise(self, _flags: int, stream_id: int, _payload: bytes) -> None:
        stream = self._core.streams.get(stream_id)
        refuse(self._core, stream, self._core.rule(stream, stream_id, Input.PUSH))

    # -- windows

    def _on_window_update(self, _flags: int, stream_id: int, payload: bytes) -> None:
        increment = (
            int.from_bytes(frames.exactly(FrameType.WINDOW_UPDATE, payload, length=4), "big") & frames.MAX_WINDOW
        )
        self._core.patience.credit()
        if stream_id == 0:
            self._grow_connection_window(increment)
            return
        stream = self._admit(stream_id, Input.CREDIT, Action.GRANT)
        if stream is None:
            return
        window = credit.grown(stream.send_window, increment)
        if increment == 0:
            fail_stream(self._core, stream, "WINDOW_UPDATE of 0")
        elif window is None:
            fail_stream(self._core, stream, "the stream's window overflows", ErrorCode.FLOW_CONTROL_ERROR)
        else:
            stream.send_window = window
            self._core.outbox.update(stream)

    def _grow_connection_window(self, increment: int) -> None:
        if increment == 0:
            raise ProtocolViolation("WINDOW_UPDATE of 0 on the connection")
        if not self._core.outbox.grow(increment):
            raise ProtocolViolation("the connection's window overflows", h2_code=ErrorCode.FLOW_CONTROL_ERROR)

    # -- settings

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
            # No value means no limit; before the first frame we only guess one.
            peer.max_concurrent_streams = frames.MAX_STREAM_ID
        peer.max_concurrent_streams = values.get(SettingId.MAX_CONCURRENT_STREAMS, peer.max_concurrent_streams)
        peer.max_header_list_bytes = values.get(SettingId.MAX_HEADER_LIST_SIZE, peer.max_header_list_bytes)
        if SettingId.HEADER_TABLE_SIZE in values:
            core.encoder.limit_table(values[SettingId.HEADER_TABLE_SIZE])
        weight = 1
        if SettingId.INITIAL_WINDOW_SIZE in values:
            self.effort = len(core.streams) // STREAMS_PER_IDLE_FRAME
            weight += self.effort
            self._shift_send_windows(values[SettingId.INITIAL_WINDOW_SIZE])
        core.patience.idle_frame(weight=weight)
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

    # -- the connection

    def _on_ping(self, flags: int, _stream_id: int, payload: bytes) -> None:
        core = self._core
        frames.exactly(FrameType.PING, payload, length=8)
        if not flags & frames.ACK:
            core.pings_received += 1
            core.patience.idle_frame()
            core.answer(frames.ping(payload, ack=True))
        elif payload in core.pings_out:
            core.pings_out.remove(payload)
            core.pings_acked.append(payload)
        elif payload == DRAIN_PING and core.draining:
            core.go_away(ErrorCode.NO_ERROR, debug=b"")
        else:
            core.patience.idle_frame()

    def _on_goaway(self, _flags: int, _stream_id: int, payload: bytes) -> None:
        core = self._core
        if len(payload) < 8:
            raise ProtocolViolation("GOAWAY is too short", h2_code=ErrorCode.FRAME_SIZE_ERROR)
        core.patience.idle_frame()
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


def refuse(core: Core, stream: Stream | None, rule: Rule) -> None:
    """Carry out the actions that need nothing but the rule."""
    if rule.action is Action.FAIL_CONNECTION:
        raise ProtocolViolation(rule.why, h2_code=rule.code)
    if rule.action is Action.FAIL_STREAM and stream is not None:
        fail_stream(core, stream, rule.why, rule.code)


def fail_stream(core: Core, stream: Stream, why: str, code: ErrorCode = ErrorCode.PROTOCOL_ERROR) -> None:
    """The peer broke a rule on this stream alone."""
    core.fail_stream(stream, ProtocolViolation(why, h2_code=code))
