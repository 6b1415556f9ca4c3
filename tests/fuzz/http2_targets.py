"""One HTTP/2 connection between a script that plays its peer and one that plays its user."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import hpack

from trio_router.errors import TooLarge
from trio_router.http2 import Connection, Http2Settings, Role, Stream, frames
from trio_router.http2.core import DRAIN_PING
from trio_router.http2.frames import FRAME_HEADER, FrameType
from trio_router.http2.framing import join

from .script import Script

REQUEST: Final = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/test/Method")]
RESPONSE: Final = [(b":status", b"200"), (b"content-type", b"application/grpc")]
TRAILERS: Final = [(b"grpc-status", b"0")]
LISTS: Final = [
    REQUEST,
    RESPONSE,
    TRAILERS,
    [(b":status", b"103")],
    [*RESPONSE, *TRAILERS],
    [*REQUEST, (b"content-length", b"7")],
    [*RESPONSE, (b"content-length", b"0")],
    [*REQUEST, (b"x-large", b"x" * 5000)],
    [*REQUEST, (b"Upper", b"case")],
    [],
]
SETTINGS: Final = Http2Settings(
    stream_window_bytes=200,
    connection_window_bytes=65_535,
    max_message_bytes=3000,
    max_unfinished_bytes=1000,
    max_concurrent_streams=4,
    max_header_list_bytes=4096,
)
# Before our SETTINGS are acknowledged a window is of the default size.
HELD: Final = SETTINGS.max_concurrent_streams * (frames.DEFAULT_WINDOW + 5)
HELD_UNFINISHED: Final = SETTINGS.max_unfinished_bytes + SETTINGS.max_message_bytes
MAX_STEPS: Final = 400


@dataclass
class Reader:
    """Reads what the connection writes, as strictly as RFC 9113 allows, and keeps its compression state."""

    decoder: hpack.Decoder
    preface_due: bool
    pending: bytes = b""
    block: bytes | None = None

    def feed(self, data: bytes) -> None:
        self.pending += data
        if self.preface_due:
            if len(self.pending) < len(frames.PREFACE):
                return
            assert self.pending.startswith(frames.PREFACE)
            self.pending = self.pending[len(frames.PREFACE) :]
            self.preface_due = False
        while len(self.pending) >= FRAME_HEADER.size:
            word, flags, stream_id = FRAME_HEADER.unpack_from(self.pending)
            end = FRAME_HEADER.size + (word >> 8)
            if len(self.pending) < end:
                return
            self.frame(word & 0xFF, flags, stream_id, self.pending[FRAME_HEADER.size : end])
            self.pending = self.pending[end:]

    def frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        assert kind in list(FrameType)
        assert kind not in (FrameType.PRIORITY, FrameType.PUSH_PROMISE)
        assert len(payload) <= frames.SEND_FRAME_BYTES
        if kind == FrameType.WINDOW_UPDATE:
            assert 0 < int.from_bytes(payload, "big") < 2**31
        else:
            assert (stream_id == 0) is (kind in (FrameType.SETTINGS, FrameType.PING, FrameType.GOAWAY))
        assert (self.block is None) is (kind != FrameType.CONTINUATION)
        if kind in (FrameType.HEADERS, FrameType.CONTINUATION):
            self.block = (self.block or b"") + payload
            if flags & frames.END_HEADERS:
                assert self.decoder.decode(self.block, raw=True)
                self.block = None


class Play:
    """One run: the peer's frames and the user's calls in any order, with everything checked that must always hold."""

    def __init__(self, role: Role, script: Script, *, delivering: bool = True) -> None:
        self.script = script
        self.delivering = delivering
        self.connection = Connection(role, settings=SETTINGS)
        self.role = role
        self.streams: list[Stream] = []
        self.encoder = hpack.Encoder()
        self.reader = Reader(hpack.Decoder(max_header_list_size=1 << 20), preface_due=role is Role.CLIENT)
        self.to_connection = b""
        self.was_error = False

    def run(self) -> None:
        greeting = self.script.below(8)
        if greeting:
            if self.role is Role.SERVER:
                self.peer_sends(frames.PREFACE)
            self.peer_sends(frames.settings({}) + (frames.SETTINGS_ACK if greeting > 1 else b""))
        for _ in range(MAX_STEPS):
            if self.script.over:
                break
            if self.script.below(3):
                self.peer_acts()
            else:
                self.user_acts()
            self.check()
        self.deliver(len(self.to_connection))
        self.finish()

    # -- the peer

    def peer_acts(self) -> None:
        script = self.script
        act = PEER_ACTS[script.below(len(PEER_ACTS))]
        act(self)
        if act is not Play.peer_part_of_a_read and script.below(4):
            self.deliver(len(self.to_connection))

    def peer_sends(self, data: bytes) -> None:
        self.to_connection += data

    def deliver(self, size: int) -> None:
        if not self.delivering:
            return
        data, self.to_connection = self.to_connection[:size], self.to_connection[size:]
        effort = self.script.below(20) or None
        touched = self.connection.receive(data, effort=effort)
        while self.connection.has_input:
            touched += self.connection.receive(b"", effort=effort)
        assert not (touched and self.was_error)
        for stream in touched:
            if stream.user is None:
                assert not (self.role is Role.SERVER and stream.headers is None)
                stream.user = self
                if stream not in self.streams:
                    self.streams.append(stream)
        self.was_error = self.connection.error is not None

    def peer_garbage(self) -> None:
        self.peer_sends(self.script.blob())

    def peer_any_frame(self) -> None:
        script = self.script
        self.peer_frame(script.byte(), script.byte(), self.stream_id(), script.blob())

    def peer_headers(self) -> None:
        script = self.script
        flags = script.byte()
        block = self.encoder.encode(LISTS[script.below(len(LISTS))], huffman=bool(flags & 0x80))
        stream_id = self.stream_id()
        if flags & 0x40:
            cut = script.byte() % (len(block) + 1)
            self.peer_frame(FrameType.HEADERS, flags & frames.END_STREAM, stream_id, block[:cut])
            self.peer_frame(FrameType.CONTINUATION, frames.END_HEADERS, stream_id, block[cut:])
            return
        if flags & frames.PRIORITY:
            block = bytes(5) + block
        if flags & frames.PADDED:
            block = bytes([flags >> 4]) + block + bytes(flags >> 4)
        self.peer_frame(FrameType.HEADERS, flags | frames.END_HEADERS, stream_id, block)

    def peer_messages(self) -> None:
        script = self.script
        body = join([script.blob() for _ in range(1 + script.below(3))])
        self.peer_frame(FrameType.DATA, script.byte() & frames.END_STREAM, self.stream_id(), body)

    def peer_settings(self) -> None:
        script = self.script
        self.peer_sends(frames.settings({script.below(8): script.number() for _ in range(script.below(4))}))

    def peer_credit(self) -> None:
        script = self.script
        self.peer_sends(frames.window_update(self.stream_id() * (script.byte() & 1), script.number()))

    def peer_reset(self) -> None:
        self.peer_sends(frames.rst_stream(self.stream_id(), self.script.number()))

    def peer_goes_away(self) -> None:
        script = self.script
        self.peer_sends(frames.goaway(script.number(), script.number(), script.blob()[:16_000]))

    def peer_ping(self) -> None:
        script = self.script
        payload = DRAIN_PING if script.byte() & 1 else script.take(8).ljust(8, b"\0")
        self.peer_sends(frames.ping(payload, ack=bool(script.byte() & 1)))

    def peer_part_of_a_read(self) -> None:
        self.deliver(self.script.size())

    def peer_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        self.peer_sends(FRAME_HEADER.pack(len(payload) << 8 | kind, flags, stream_id) + payload)

    def stream_id(self) -> int:
        number = self.script.below(24)
        return number if number < 20 else self.script.number()

    # -- the user

    def user_acts(self) -> None:
        script = self.script
        connection = self.connection
        act = script.below(9)
        if act == 0:
            self.take(script.size())
        elif act == 1:
            connection.ping(script.take(8).ljust(8, b"\0"))
        elif act == 2:
            if script.byte() & 1:
                connection.go_away(script.byte(), script.blob()[:2000])
            else:
                connection.drain()
        elif act == 3 and self.role is Role.CLIENT:
            if connection.can_open:
                with suppress(TooLarge):
                    self.streams.append(connection.open_stream(REQUEST))
        elif self.streams:
            self.user_acts_on(self.streams[script.below(len(self.streams))], act)
        for stream in connection.take_drained():
            assert stream.queued_bytes == 0

    def user_acts_on(self, stream: Stream, act: int) -> None:
        script = self.script
        connection = self.connection
        may_send = stream.closed or (stream.sendable and stream.ending is None)
        if act in (3, 4):
            assert all(len(message) <= SETTINGS.max_message_bytes for message in stream.take())
            stream.credit()
        elif act == 5:
            connection.reset(stream, script.byte())
        elif act == 6 and may_send:
            messages = [script.blob() for _ in range(script.below(4))]
            connection.send_messages(stream, messages, end_stream=bool(script.byte() & 1))
        elif act == 7 and self.role is Role.SERVER:
            with suppress(TooLarge):
                if not stream.started and not stream.closed:
                    connection.send_headers(stream, RESPONSE)
                elif may_send:
                    connection.send_headers(stream, TRAILERS, end_stream=True)
        elif act == 8 and may_send:
            connection.end_stream(stream)

    def take(self, size: int) -> None:
        had = self.connection.has_output
        data = self.connection.take_output(max(size, 1))
        assert len(data) <= max(size, 1)
        assert bool(data) is had
        self.reader.feed(data)

    # -- what always holds

    def check(self) -> None:
        connection = self.connection
        core = connection._core
        if self.role is Role.SERVER:
            assert connection.open_streams <= SETTINGS.max_concurrent_streams
        assert len(connection._inbound._buffer) <= 2 * (SETTINGS.max_frame_bytes + FRAME_HEADER.size)
        assert core.outbox.window >= 0
        assert core.loans.lent == sum(stream.borrowed for stream in core.streams.values())
        unread = sum(len(message) + 5 for stream in core.streams.values() for message in stream.messages)
        unfinished = sum(len(stream.assembler._partial) for stream in core.streams.values() if stream.assembler)
        if self.role is Role.SERVER:
            assert unread + unfinished <= HELD + HELD_UNFINISHED
        for stream in core.streams.values():
            assert not stream.closed
            assert stream.queued_bytes == sum(map(len, stream.queue or ()))
            assert stream.flowing is (stream.sendable and not stream.queued_bytes)

    def finish(self) -> None:
        for _ in range(10_000):
            if not self.connection.has_output:
                break
            self.take(1 << 16)
        assert not self.connection.has_output
        assert not self.reader.pending
        lost = self.connection.connection_lost()
        assert all(stream.lost and stream.closed for stream in lost)
        assert self.connection.open_streams == 0
        assert self.connection.receive(b"anything") == []


PEER_ACTS: Final = [
    Play.peer_garbage,
    Play.peer_any_frame,
    Play.peer_headers,
    Play.peer_headers,
    Play.peer_messages,
    Play.peer_messages,
    Play.peer_settings,
    Play.peer_credit,
    Play.peer_reset,
    Play.peer_goes_away,
    Play.peer_ping,
    Play.peer_part_of_a_read,
]


def server(data: bytes) -> None:
    """A server connection under a script."""
    Play(Role.SERVER, Script(data)).run()


def client(data: bytes) -> None:
    """A client connection under a script."""
    Play(Role.CLIENT, Script(data)).run()


def raw_server(data: bytes) -> None:
    """Plain bytes behind an honest greeting."""
    connection = Connection(Role.SERVER, settings=SETTINGS)
    connection.receive(frames.PREFACE + frames.settings({}) + frames.SETTINGS_ACK)
    connection.receive(data)
    reader = Reader(hpack.Decoder(), preface_due=False)
    reader.feed(connection.take_output(1 << 30))
    assert not reader.pending


def any_split(data: bytes) -> None:
    """However the peer's bytes are cut, they mean the same."""
    script = Script(data)
    role = Role.SERVER if script.byte() & 1 else Role.CLIENT
    cuts = [script.size() for _ in range(script.below(16))]
    source = Play(role, script, delivering=False)
    source.peer_sends(frames.settings({}))
    while not script.over:
        source.peer_acts()
    assert heard(role, source.to_connection, cuts) == heard(role, source.to_connection, [])


def heard(role: Role, data: bytes, cuts: list[int]) -> object:
    """Everything a connection makes of `data`, delivered in pieces of the given sizes and the rest at once."""
    # A wide window: whether credit would have been given back in between does depend on the cuts.
    connection = Connection(role, settings=replace(SETTINGS, connection_window_bytes=1 << 24))
    streams: dict[int, Stream] = {}
    if role is Role.CLIENT:
        for _ in range(3):
            stream = connection.open_stream(REQUEST)
            streams[stream.id] = stream
    else:
        data = frames.PREFACE + data
    at = 0
    for size in [*cuts, len(data)]:
        for stream in connection.receive(data[at : at + size]):
            streams[stream.id] = stream
        at += size
    error = connection.error
    return (
        error and (error.h2_code, error.message),
        connection.goaway_received,
        connection.pings_received,
        [_known_of(stream) for _, stream in sorted(streams.items())],
    )


def _known_of(stream: Stream) -> object:
    ends = (stream.remote_ended, stream.reset_code, stream.refused, stream.lost, stream.closed)
    return stream.id, stream.headers, stream.trailers, stream.trailers_only, stream.messages, ends, repr(stream.failure)
