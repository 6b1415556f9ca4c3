"""Credit for unfinished messages: who may have it, and how much all of them hold."""

from __future__ import annotations

import pytest

from trio_router.http2 import ErrorCode, Http2Settings, Role, frames
from trio_router.http2.frames import FrameType
from trio_router.http2.framing import PREFIX

REQUEST = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/test/Method")]
WINDOW = 1000
MESSAGE = 10_000
LIMIT = 5000
# `for_test` sizes with a window that leaves room to see what is lent.
LIMITS = Http2Settings(stream_window_bytes=WINDOW, max_message_bytes=MESSAGE, max_unfinished_bytes=LIMIT)


class Sender:
    """A peer with many streams, each with a large message that it sends as far as its windows let it."""

    def __init__(self, peer, *, streams: int) -> None:
        self.peer = peer
        self.streams = [peer.headers(1 + 2 * number, REQUEST)[0] for number in range(streams)]
        self.window = dict.fromkeys((stream.id for stream in self.streams), WINDOW)
        self.left = dict.fromkeys((stream.id for stream in self.streams), b"")
        for stream in self.streams:
            self.begin(stream.id)

    def begin(self, stream_id: int) -> None:
        self.left[stream_id] = PREFIX.pack(0, MESSAGE) + bytes(MESSAGE)

    def read_credit(self) -> None:
        for frame in self.peer.output():
            if frame.kind == FrameType.WINDOW_UPDATE and frame.stream_id in self.window:
                self.window[frame.stream_id] += int.from_bytes(frame.payload, "big")

    def send(self, stream_id: int, *, at_most: int = 1 << 30) -> int:
        """Everything that may go now on one stream."""
        sent = 0
        while True:
            self.read_credit()
            size = min(self.window[stream_id], len(self.left[stream_id]), at_most - sent)
            if size <= 0:
                return sent
            self.peer.data(stream_id, self.left[stream_id][:size])
            self.left[stream_id] = self.left[stream_id][size:]
            self.window[stream_id] -= size
            sent += size

    def send_all(self) -> int:
        return sum(self.send(stream.id) for stream in self.streams)

    def held(self) -> int:
        """What the connection keeps of their messages."""
        parts = (len(stream.assembler._partial) for stream in self.streams if stream.assembler is not None)
        return sum(parts) + sum(sum(map(len, stream.messages)) for stream in self.streams)


@pytest.fixture
def sender(make_scripted):
    return Sender(make_scripted(Role.SERVER, settings=LIMITS), streams=50)


def consume(stream) -> list[bytes]:
    messages = stream.take()
    stream.credit()
    return messages


def test_half_sent_messages_are_bounded_over_all_streams(sender):
    for stream in sender.streams:
        sender.send(stream.id, at_most=MESSAGE // 2)
    # The window that each stream has anyway, what may be lent, and the rest of one message.
    assert sender.held() <= len(sender.streams) * WINDOW + LIMIT + MESSAGE
    assert sender.peer.connection.error is None


def test_whole_messages_that_nobody_reads_are_bounded_too(sender):
    sender.send_all()
    assert sender.held() <= len(sender.streams) * WINDOW + LIMIT + MESSAGE
    assert [len(stream.messages) for stream in sender.streams].count(1) == 1


def test_everybody_has_a_turn_when_messages_are_read(sender):
    heard = 0
    for _ in range(200):
        sender.send_all()
        for stream in sender.streams:
            heard += len(consume(stream))
        if heard == len(sender.streams):
            break
    assert heard == len(sender.streams)
    assert sender.peer.connection._core.loans.lent == 0
    assert not sender.peer.connection._core.loans._waiting


def test_a_message_that_fits_into_its_window_never_waits(sender):
    sender.send_all()
    (small,) = sender.peer.headers(1001, REQUEST)
    for _ in range(20):
        sender.peer.data(1001, PREFIX.pack(0, WINDOW - 5) + bytes(WINDOW - 5))
        assert consume(small) == [bytes(WINDOW - 5)]


@pytest.mark.parametrize("how", ["reset by the peer", "reset by us", "not readable"])
def test_what_is_lost_is_no_longer_owed(sender, how):
    first = sender.streams[0]
    sender.send_all()
    others = sum(map(len, sender.left.values()))
    match how:
        case "reset by the peer":
            sender.peer.write(FrameType.RST_STREAM, 0, first.id, int(ErrorCode.CANCEL).to_bytes(4, "big"))
        case "reset by us":
            sender.peer.connection.reset(first, ErrorCode.CANCEL)
        case "not readable":
            consume(first)
            sender.send(first.id)
            sender.peer.data(first.id, b"\x01\0\0\0\0")
    assert first.borrowed == 0
    sender.send_all()
    assert sum(map(len, sender.left.values())) < others


def test_nothing_is_lent_by_a_connection_that_is_over(sender):
    sender.send_all()
    sender.peer.output()
    sender.peer.write(FrameType.PING, payload=b"short")
    assert [frame.kind for frame in sender.peer.output()] == [FrameType.GOAWAY]
    assert sender.peer.connection._core.loans.lent == 0


def test_the_stream_that_owes_longest_is_finished_whatever_the_others_hold(make_scripted):
    limits = Http2Settings(stream_window_bytes=WINDOW, max_message_bytes=MESSAGE, max_unfinished_bytes=0)
    sender = Sender(make_scripted(Role.SERVER, settings=limits), streams=3)
    for stream in sender.streams:
        sender.send(stream.id, at_most=WINDOW)
    sender.send(sender.streams[0].id)
    assert len(sender.streams[0].messages) == 1
    assert sender.send(sender.streams[1].id) == 0
    consume(sender.streams[0])
    sender.send(sender.streams[1].id)
    assert len(sender.streams[1].messages) == 1


def test_a_client_is_bounded_as_well(make_scripted):
    peer = make_scripted(Role.CLIENT, settings=LIMITS)
    streams = [peer.connection.open_stream(REQUEST) for _ in range(2)]
    for stream in streams:
        peer.headers(stream.id, [(b":status", b"200")])
        peer.data(stream.id, PREFIX.pack(0, MESSAGE) + bytes(WINDOW - 5))
    peer.output()
    assert peer.connection._core.loans.lent == 2 * WINDOW
    for stream in streams:
        peer.write(FrameType.HEADERS, frames.END_HEADERS | frames.END_STREAM, stream.id, b"")
    assert peer.connection._core.loans.lent == 0
