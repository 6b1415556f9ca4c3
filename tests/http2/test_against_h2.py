"""Random conversations with `h2` as the other end: it checks our frames, states and windows as a stranger would.

Each step is one act of one end or the carriage of some bytes; at the end both read everything, and what was said must
have arrived. `h2` raises on any frame it finds wrong, and we must find nothing wrong with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_router.http2 import Connection, ErrorCode, Http2Settings, Role, Stream
from trio_router.http2.framing import join

REQUEST = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/test/Method"), (b":authority", b"test")]
RESPONSE = [(b":status", b"200"), (b"content-type", b"application/grpc")]
TRAILERS = [(b"grpc-status", b"0"), (b"grpc-message", b"fine")]


@dataclass
class Said:
    """What one end has said on a stream, and what the other has heard."""

    said: bytes = b""
    ended: bool = False
    reset: bool = False


@dataclass
class ForeignStream:
    """A stream as the h2 end keeps it."""

    heard: bytes = b""
    unacknowledged: int = 0
    headers: list[tuple[bytes, bytes]] | None = None
    trailers: list[tuple[bytes, bytes]] | None = None
    ended: bool = False
    reset: int | None = None
    outgoing: bytes = b""
    sent: Said = field(default_factory=Said)
    may_send: bool = False
    ending: bool = False
    sent_end: bool = False


class Foreign:
    """An end made of h2: queues what it may not send yet, acknowledges data only when told to read."""

    def __init__(self, *, client: bool, window: int) -> None:
        config = h2.config.H2Configuration(client_side=client, header_encoding=None)
        self.h2 = h2.connection.H2Connection(config=config)
        initial = {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window, h2.settings.SettingCodes.ENABLE_PUSH: 0}
        if not client:
            initial = {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window}
        self.h2.local_settings = h2.settings.Settings(client=client, initial_values=initial)
        self.h2.initiate_connection()
        self.client = client
        self.streams: dict[int, ForeignStream] = {}
        self.pongs = 0

    def receive(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            match event:
                case h2.events.RequestReceived() | h2.events.ResponseReceived():
                    stream = self.streams.setdefault(event.stream_id, ForeignStream())
                    stream.headers = list(event.headers)
                case h2.events.TrailersReceived():
                    self.streams[event.stream_id].trailers = list(event.headers)
                case h2.events.DataReceived():
                    stream = self.streams[event.stream_id]
                    stream.heard += event.data
                    stream.unacknowledged += event.flow_controlled_length
                case h2.events.StreamEnded():
                    self.streams[event.stream_id].ended = True
                case h2.events.StreamReset():
                    if event.remote_reset:
                        self.streams[event.stream_id].reset = int(event.error_code)
                        self.streams[event.stream_id].may_send = False
                case h2.events.PingAckReceived():
                    self.pongs += 1

    def read(self, stream_id: int) -> None:
        stream = self.streams[stream_id]
        if stream.unacknowledged:
            self.h2.acknowledge_received_data(stream.unacknowledged, stream_id)
            stream.unacknowledged = 0
        # h2 weighs credit only when data is acknowledged: a window that was lowered since may stay closed for ever.
        over = stream.ended or stream.sent.reset or stream.reset is not None
        if not over and self.h2.remote_flow_control_window(stream_id) <= 0:
            self.h2.increment_flow_control_window(1000, stream_id)

    def pump(self, *, padding: int = 0) -> None:
        """Send what windows allow."""
        for stream_id, stream in self.streams.items():
            while stream.may_send and stream.outgoing:
                room = min(self.h2.local_flow_control_window(stream_id), self.h2.max_outbound_frame_size)
                pad = padding if padding and room > padding + 1 else None
                length = min(room - (pad + 1 if pad else 0), len(stream.outgoing))
                if length <= 0:
                    break
                self.h2.send_data(stream_id, stream.outgoing[:length], pad_length=pad)
                stream.outgoing = stream.outgoing[length:]
            if stream.may_send and stream.ending and not stream.outgoing:
                self.finish(stream_id)

    def finish(self, stream_id: int) -> None:
        stream = self.streams[stream_id]
        stream.may_send = False
        stream.sent_end = True
        if self.client:
            self.h2.end_stream(stream_id)
        else:
            self.h2.send_headers(stream_id, TRAILERS, end_stream=True)

    def reset(self, stream_id: int) -> None:
        stream = self.streams[stream_id]
        if stream.reset is None and not stream.sent.reset and not (stream.ended and stream.sent_end):
            self.read(stream_id)
            self.h2.reset_stream(stream_id, ErrorCode.CANCEL)
            stream.may_send = False
            stream.sent.reset = True


class Conversation:
    """One of ours and one of theirs, with bytes in flight both ways."""

    def __init__(self, role: Role, *, window: int, their_window: int) -> None:
        limits = Http2Settings(stream_window_bytes=window, connection_window_bytes=65_535)
        self.ours = Connection(role, settings=limits)
        self.theirs = Foreign(client=role is Role.SERVER, window=their_window)
        self.role = role
        self.to_us = b""
        self.to_them = b""
        self.streams: dict[int, Stream] = {}
        self.heard: dict[int, list[bytes]] = {}
        self.sent: dict[int, Said] = {}
        self.pings = 0
        # So that even a message that comes in crumbs of a window comes to an end.
        self.largest = 100 * min(window, their_window)
        # h2 holds us to its window from the start, although we cannot know it before its settings have come.
        for _ in range(3):
            self.carry_to_us(1 << 20)
            self.carry_to_them(1 << 20)

    def begin(self, *, streams: int) -> None:
        """Open streams, and answer them, so that talk can begin at once."""
        client, server = ("open ours", "open theirs") if self.role is Role.CLIENT else ("open theirs", "open ours")
        for act in [client] * streams + ["carry to us", "carry to them", server, "carry to us", "carry to them"]:
            self.step(act, 0, 100_000)

    # -- carriage

    def carry_to_us(self, size: int) -> None:
        self.to_us += self.theirs.h2.data_to_send()
        data, self.to_us = self.to_us[:size], self.to_us[size:]
        for stream in self.ours.receive(data):
            self.streams[stream.id] = stream
            assert stream.failure is None
        assert self.ours.error is None

    def carry_to_them(self, size: int) -> None:
        self.to_them += self.ours.take_output(size)
        data, self.to_them = self.to_them[:size], self.to_them[size:]
        self.theirs.receive(data)

    # -- acts of ours

    def pick(self, number: int) -> Stream | None:
        known = sorted(self.streams)
        return self.streams[known[number % len(known)]] if known else None

    def read(self, stream: Stream) -> None:
        self.heard.setdefault(stream.id, []).extend(stream.take())
        stream.credit()

    def say(self, stream: Stream, messages: list[bytes], *, end: bool) -> None:
        if stream.closed or not stream.sendable:
            return
        if end and stream.send_window < 0 and not stream.queued_bytes:
            return  # h2 takes even an empty DATA frame for an overdraft then, against RFC 9113 6.9.1
        self.ours.send_messages(stream, messages, end_stream=end and self.role is Role.CLIENT)
        note = self.sent.setdefault(stream.id, Said())
        note.said += join(messages)
        note.ended = end
        if end and self.role is Role.SERVER:
            self.ours.send_headers(stream, TRAILERS, end_stream=True)

    def open_ours(self) -> None:
        if self.role is Role.CLIENT:
            if self.ours.can_open:
                stream = self.ours.open_stream(REQUEST)
                self.streams[stream.id] = stream
            return
        for stream in self.streams.values():
            if not stream.started and not stream.closed:
                self.ours.send_headers(stream, RESPONSE)

    def reset_ours(self, stream: Stream) -> None:
        if not stream.closed:
            self.ours.reset(stream, ErrorCode.CANCEL)
            self.sent.setdefault(stream.id, Said()).reset = True

    # -- acts of theirs

    def open_theirs(self) -> None:
        foreign = self.theirs
        if foreign.client:
            if len(foreign.streams) < 20:
                stream_id = foreign.h2.get_next_available_stream_id()
                foreign.h2.send_headers(stream_id, REQUEST)
                foreign.streams[stream_id] = ForeignStream(may_send=True)
            return
        for stream_id, stream in foreign.streams.items():
            if not (stream.may_send or stream.sent_end or stream.sent.reset or stream.reset is not None):
                foreign.h2.send_headers(stream_id, RESPONSE)
                stream.may_send = True

    def say_theirs(self, number: int, messages: list[bytes], *, end: bool) -> None:
        sending = [stream for stream in self.theirs.streams.values() if stream.may_send and not stream.ending]
        if sending:
            stream = sending[number % len(sending)]
            stream.outgoing += join(messages)
            stream.sent.said += join(messages)
            stream.ending = end

    def read_theirs(self, number: int) -> None:
        for stream_id in sorted(self.theirs.streams)[number % 5 :: 5]:
            self.theirs.read(stream_id)

    def reset_theirs(self, number: int) -> None:
        for stream_id in sorted(self.theirs.streams)[number % 5 :: 5][:1]:
            self.theirs.reset(stream_id)

    def change_their_window(self, window: int) -> None:
        self.theirs.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})

    def ping(self, number: int) -> None:
        self.ours.ping(number.to_bytes(8, "big"))
        self.theirs.h2.ping(bytes(8))
        self.pings += 1

    # -- one step, and the end

    def step(self, act: str, number: int, size: int) -> None:
        """One act; does nothing when there is no stream to do it on."""
        stream = self.pick(number)
        if not act.startswith("carry"):
            size = min(size, self.largest)
        if act in WITH_STREAM:
            if stream is not None:
                WITH_STREAM[act](self, stream, number, size)
        else:
            WITHOUT_STREAM[act](self, number, size)
        self.theirs.pump(padding=number % 7)

    def conclude(self) -> None:
        """Read and carry until nothing moves."""
        for _ in range(100_000):
            for stream in self.streams.values():
                self.read(stream)
            for stream_id in self.theirs.streams:
                self.theirs.read(stream_id)
            self.theirs.pump()
            self.to_us += self.theirs.h2.data_to_send()
            if not (self.ours.has_output or self.to_us or self.to_them):
                return
            self.carry_to_us(1 << 20)
            self.carry_to_them(1 << 20)
        raise AssertionError("the conversation does not come to an end")


def burst(number: int, size: int) -> list[bytes]:
    return [bytes([number % 256]) * size] * (1 + number % 3)


def last_burst(number: int, size: int) -> list[bytes]:
    return burst(number, size) if number % 2 else []


WITH_STREAM = {
    "say ours": lambda talk, stream, number, size: talk.say(stream, burst(number, size), end=False),
    "end ours": lambda talk, stream, number, size: talk.say(stream, last_burst(number, size), end=True),
    "read ours": lambda talk, stream, _number, _size: talk.read(stream),
    "reset ours": lambda talk, stream, _number, _size: talk.reset_ours(stream),
}
WITHOUT_STREAM = {
    "carry to us": lambda talk, _number, size: talk.carry_to_us(size + 1),
    "carry to them": lambda talk, _number, size: talk.carry_to_them(size + 1),
    "open ours": lambda talk, _number, _size: talk.open_ours(),
    "open theirs": lambda talk, _number, _size: talk.open_theirs(),
    "say theirs": lambda talk, number, size: talk.say_theirs(number, burst(number, size), end=False),
    "end theirs": lambda talk, number, size: talk.say_theirs(number, last_burst(number, size), end=True),
    "read theirs": lambda talk, number, _size: talk.read_theirs(number),
    "reset theirs": lambda talk, number, _size: talk.reset_theirs(number),
    "window": lambda talk, _number, size: talk.change_their_window(1 + size),
    "ping": lambda talk, number, _size: talk.ping(number),
}
# The acts that make conversations long are drawn more often.
ACTS = [*WITH_STREAM, *WITHOUT_STREAM, "say ours", "say theirs", "carry to us", "carry to them"]
steps = st.lists(
    st.tuples(st.sampled_from(ACTS), st.integers(0, 40), st.one_of(st.integers(0, 40), st.integers(0, 20_000))),
    max_size=80,
)


def check(talk: Conversation) -> None:
    """Everything said on streams that nobody gave up has been heard, in both directions."""
    assert len(talk.ours.pings_acked) == talk.theirs.pongs == talk.pings
    for stream_id, stream in talk.streams.items():
        note = talk.sent.get(stream_id, Said())
        foreign = talk.theirs.streams.get(stream_id, ForeignStream())
        heard = join(talk.heard.get(stream_id, []))
        given_up = note.reset or foreign.sent.reset
        if given_up:
            assert note.said.startswith(foreign.heard)
            assert foreign.sent.said.startswith(heard)
            assert stream.closed
            continue
        # A finished response ends the request, so the rest of it is not sent.
        response_done = foreign.sent_end if talk.role is Role.CLIENT else note.ended
        if talk.role is Role.CLIENT and response_done:
            assert note.said.startswith(foreign.heard)
        else:
            assert foreign.heard == note.said
            assert foreign.ended is note.ended
        if talk.role is Role.SERVER and response_done:
            assert foreign.sent.said.startswith(heard)
        else:
            assert heard == foreign.sent.said
        assert stream.queued_bytes == 0
        assert stream.closed is response_done
        if talk.role is Role.CLIENT and foreign.sent_end:
            assert stream.trailers == TRAILERS
        if talk.role is Role.SERVER and note.ended:
            assert foreign.trailers == TRAILERS


@pytest.mark.parametrize("role", list(Role))
@given(steps=steps, window=st.integers(1, 3000), their_window=st.integers(1, 3000))
@settings(deadline=None, max_examples=120)
def test_random_conversations(role, steps, window, their_window):
    talk = Conversation(role, window=window, their_window=their_window)
    talk.begin(streams=3)
    for act, number, size in steps:
        talk.step(act, number, size)
    talk.conclude()
    check(talk)


@pytest.mark.parametrize("role", list(Role))
def test_a_hundred_streams_of_mixed_messages(role):
    """The same machinery on a long, fixed conversation: every stream ends well."""
    talk = Conversation(role, window=500, their_window=700)
    for number in range(40):
        talk.step("open ours" if role is Role.CLIENT else "open theirs", number, 0)
        talk.step("carry to us", 0, 5000)
        talk.step("carry to them", 0, 5000)
        talk.step("open theirs" if role is Role.CLIENT else "open ours", number, 0)
        for turn in range(6):
            talk.step("say ours", number + turn, 200 * turn)
            talk.step("say theirs", number + turn, 300 * turn)
            talk.step("carry to us", 0, 900)
            talk.step("read ours", number + turn, 0)
            talk.step("read theirs", number + turn, 0)
            talk.step("carry to them", 0, 900)
    talk.conclude()
    check(talk)
    assert sum(map(len, talk.heard.values())) > 300
    assert sum(len(stream.heard) for stream in talk.theirs.streams.values()) > 100_000
