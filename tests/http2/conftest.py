"""Peers for the connection under test: our own other end, and a scripted one that writes any frames it likes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import hpack
import pytest

from trio_router.http2 import Connection, Http2Settings, Role, Stream, frames
from trio_router.http2.frames import FRAME_HEADER, FrameType

REQUEST = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/test/Method"), (b":authority", b"test")]
RESPONSE = [(b":status", b"200"), (b"content-type", b"application/grpc")]


class Pair:
    """A client and a server connection joined by memory.

    `server_streams` are the requests the server has seen, in order. Unless an end has been told not to read, what
    arrives there is taken and credited at once and kept in `received`.
    """

    def __init__(
        self,
        *,
        client: Http2Settings | None = None,
        server: Http2Settings | None = None,
        chunk: int | None = None,
        max_output: int = 262_144,
    ) -> None:
        self.client = Connection(Role.CLIENT, settings=client or Http2Settings())
        self.server = Connection(Role.SERVER, settings=server or Http2Settings())
        self.server_streams: list[Stream] = []
        self.received: dict[tuple[Role, int], list[bytes]] = {}
        self.client_reading = True
        self.server_reading = True
        self._chunk = chunk
        self._max_output = max_output
        self.settle()

    def settle(self, *, rounds: int = 100_000) -> None:
        """Carry bytes until neither end has any; fails if that does not come to an end."""
        for _ in range(rounds):
            there = self.client.take_output(self._max_output)
            back = self.server.take_output(self._max_output)
            if not there and not back:
                return
            self._deliver(self.server, there, role=Role.SERVER, reading=self.server_reading)
            self._deliver(self.client, back, role=Role.CLIENT, reading=self.client_reading)
        raise AssertionError("the two ends never stop talking")

    def _deliver(self, connection: Connection, data: bytes, *, role: Role, reading: bool) -> None:
        size = self._chunk or max(len(data), 1)
        for start in range(0, len(data), size):
            for stream in connection.receive(data[start : start + size]):
                if role is Role.SERVER and stream.user is None:
                    stream.user = self
                    self.server_streams.append(stream)
                if reading:
                    self.read(role, stream)

    def read(self, role: Role, stream: Stream) -> list[bytes]:
        """Take what has come, consume it, and remember it."""
        messages = stream.take()
        self.received.setdefault((role, stream.id), []).extend(messages)
        stream.credit()
        return messages

    def call(self, messages: list[bytes] | None = None) -> tuple[Stream, Stream]:
        """A request that was sent whole, and answered with headers; both ends of its stream."""
        stream = self.client.open_stream(REQUEST)
        self.client.send_messages(stream, [b""] if messages is None else messages, end_stream=True)
        self.settle()
        served = self.server_streams[-1]
        self.server.send_headers(served, RESPONSE)
        self.settle()
        return stream, served


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame as it was written."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes


def parse_frames(data: bytes) -> list[Frame]:
    """Cut whole frames; the bytes must end with one."""
    found = []
    at = 0
    while at < len(data):
        word, flags, stream_id = FRAME_HEADER.unpack_from(data, at)
        end = at + FRAME_HEADER.size + (word >> 8)
        assert end <= len(data), "output ends inside a frame"
        found.append(Frame(word & 0xFF, flags, stream_id, data[at + FRAME_HEADER.size : end]))
        at = end
    return found


class Scripted:
    """Writes frames by hand to one connection, and reads its frames."""

    def __init__(
        self,
        role: Role,
        *,
        settings: Http2Settings | None = None,
        greet: bool = True,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.connection = Connection(role, settings=settings or Http2Settings(), clock=clock)
        self.encoder = hpack.Encoder()
        self.decoder = hpack.Decoder()
        if greet:
            if role is Role.SERVER:
                self.connection.receive(frames.PREFACE)
            self.connection.receive(frames.settings({}) + frames.SETTINGS_ACK)
            self.output()

    @staticmethod
    def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
        """A frame as bytes, nothing checked."""
        return FRAME_HEADER.pack(len(payload) << 8 | kind, flags, stream_id) + payload

    def write(self, kind: int, flags: int = 0, stream_id: int = 0, payload: bytes = b"") -> list[Stream]:
        """One frame with any contents."""
        return self.connection.receive(self.frame(kind, flags, stream_id, payload))

    def headers(self, stream_id: int, headers: list[tuple[bytes, bytes]], *, end: bool = False) -> list[Stream]:
        """One HEADERS frame."""
        return self.connection.receive(self.header_frame(stream_id, headers, end=end))

    def header_frame(self, stream_id: int, headers: list[tuple[bytes, bytes]], *, end: bool = False) -> bytes:
        """The bytes of one HEADERS frame; it must be sent, for it is in the compression state now."""
        flags = frames.END_HEADERS | (frames.END_STREAM if end else 0)
        return self.frame(FrameType.HEADERS, flags, stream_id, self.encoder.encode(headers))

    def data(self, stream_id: int, payload: bytes, *, end: bool = False) -> list[Stream]:
        """One DATA frame without padding."""
        return self.write(FrameType.DATA, frames.END_STREAM if end else 0, stream_id, payload)

    def output(self) -> list[Frame]:
        """The frames the connection has written since the last call."""
        return parse_frames(self.connection.take_output(1 << 30).removeprefix(frames.PREFACE))


@pytest.fixture(scope="session")
def make_pair() -> Callable[..., Pair]:
    return Pair


@pytest.fixture(scope="session")
def make_scripted() -> Callable[..., Scripted]:
    return Scripted
