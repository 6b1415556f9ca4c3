"""The order of output: straight, queued, in turns, and what ends a stream."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_router.http2 import ErrorCode, Http2Settings, Role, frames
from trio_router.http2.frames import FrameType
from trio_router.http2.framing import join
from trio_router.http2.outbox import DIRECT_LIMIT_BYTES
from trio_router.pieces import Pieces

REQUEST = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/test/Method")]
RESPONSE = [(b":status", b"200")]
TRAILERS = [(b"grpc-status", b"0")]
HUGE = 2**31 - 1


@pytest.fixture
def serve(make_scripted):
    """A server with `count` answered requests, whose peer allows `window` per stream and `connection` in all."""

    def do(count=1, *, window=65_535, connection=65_535):
        peer = make_scripted(Role.SERVER)
        peer.connection.receive(frames.settings({4: window}))
        if connection > 65_535:
            peer.write(FrameType.WINDOW_UPDATE, 0, 0, (connection - 65_535).to_bytes(4, "big"))
        streams = []
        for number in range(count):
            streams += peer.headers(1 + 2 * number, REQUEST)
            peer.connection.send_headers(streams[-1], RESPONSE)
        peer.output()
        return peer, streams

    return do


def allow(peer, stream_id: int, increment: int) -> None:
    peer.write(FrameType.WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4, "big"))


def data_of(written) -> list[tuple[int, int]]:
    return [(frame.stream_id, len(frame.payload)) for frame in written if frame.kind == FrameType.DATA]


class TestStraight:
    def test_a_small_message_is_one_frame_and_queues_nothing(self, serve):
        peer, (stream,) = serve()
        peer.connection.send_messages(stream, [b"token"])
        assert stream.queued_bytes == 0
        assert [frame.payload for frame in peer.output()] == [b"\0\0\0\0\x05token"]
        assert not peer.connection.has_output

    def test_several_small_messages_share_a_frame(self, serve):
        peer, (stream,) = serve()
        peer.connection.send_messages(stream, [b"a", b"", b"bc"])
        (frame,) = peer.output()
        assert frame.payload == b"\0\0\0\0\x01a" + b"\0\0\0\0\0" + b"\0\0\0\0\x02bc"

    def test_the_end_of_the_stream_goes_with_the_last_message(self, make_pair):
        pair = make_pair()
        stream = pair.client.open_stream(REQUEST)
        pair.client.take_output()
        pair.client.send_messages(stream, [b"x"], end_stream=True)
        output = pair.client.take_output()
        assert output == b"\0\0\x06\0\x01\0\0\0\x01" + b"\0\0\0\0\x01x"

    @pytest.mark.parametrize("messages", [[], [b""]])
    def test_ending_with_little_or_nothing(self, serve, messages):
        peer, (stream,) = serve()
        peer.data(1, b"", end=True)
        peer.connection.send_messages(stream, messages, end_stream=True)
        assert data_of(peer.output()) == [(1, 5 * len(messages))]
        assert stream.closed

    def test_no_messages_are_no_frame(self, serve):
        peer, (stream,) = serve()
        peer.connection.send_messages(stream, [])
        assert not peer.connection.has_output

    def test_output_between_two_takes_is_bounded_and_the_rest_queues(self, serve):
        peer, streams = serve(4, window=HUGE, connection=HUGE)
        for _ in range(100):
            for stream in streams:
                peer.connection.send_messages(stream, [b"x" * 4000])
        assert sum(map(len, peer.connection._outbox.parts)) <= DIRECT_LIMIT_BYTES * 1.1
        assert all(stream.queued_bytes for stream in streams)
        taken = []
        while peer.connection.has_output:
            taken.append(len(peer.connection.take_output()))
            assert taken[-1] <= DIRECT_LIMIT_BYTES
        assert sum(taken) >= 400 * 4005
        assert sorted(stream.id for stream in peer.connection.take_drained()) == [1, 3, 5, 7]


class TestTurns:
    def test_large_messages_leave_in_turns_of_one_frame(self, serve):
        peer, streams = serve(3, window=HUGE, connection=HUGE)
        for stream in streams:
            peer.connection.send_messages(stream, [b"x" * 100_000])
        written = data_of(peer.output())
        assert written[:6] == [(1, 16_384), (3, 16_384), (5, 16_384)] * 2
        assert Counter(stream_id for stream_id, _size in written) == {1: 7, 3: 7, 5: 7}

    def test_a_token_overtakes_a_large_message_of_another_stream(self, serve):
        peer, (large, small) = serve(2, window=HUGE, connection=HUGE)
        peer.connection.send_messages(large, [b"x" * 10_000_000])
        peer.connection.take_output()
        peer.connection.send_messages(small, [b"token"])
        # At most the rest of a frame that had begun to leave stands before it.
        assert peer.connection.take_output().index(b"\0\0\x0a\0\0\0\0\0\x03\0\0\0\0\x05token") <= 16_384

    def test_a_message_never_overtakes_another_of_its_stream(self, serve):
        peer, (stream,) = serve(window=HUGE, connection=HUGE)
        peer.connection.send_messages(stream, [b"x" * 20_000])
        peer.connection.send_messages(stream, [b"token"])
        peer.connection.send_messages(stream, [b"a", b"b"])
        written = b"".join(frame.payload for frame in peer.output())
        assert written == join([b"x" * 20_000, b"token", b"a", b"b"])

    def test_queued_data_leaves_even_when_others_fill_every_output(self, serve):
        peer, (large, *busy) = serve(65, window=HUGE, connection=HUGE)
        peer.connection.send_messages(large, [b"x" * 200_000])
        for _ in range(40):
            for stream in busy:
                peer.connection.send_messages(stream, [b"y" * 4090])
            peer.connection.take_output()
        assert large.queued_bytes == 0

    def test_a_stream_without_credit_does_not_hold_up_the_others(self, serve):
        peer, (blocked, free) = serve(2, window=100, connection=HUGE)
        allow(peer, 3, 100_000)
        peer.connection.send_messages(blocked, [b"x" * 1000])
        peer.connection.send_messages(free, [b"y" * 50_000])
        written = peer.output()
        assert sum(size for stream_id, size in data_of(written) if stream_id == 1) == 100
        assert free.queued_bytes == 0
        assert (blocked.queued_bytes, peer.connection.has_output) == (905, False)
        allow(peer, 1, 5)
        assert data_of(peer.output()) == [(1, 5)]

    def test_the_connections_window_holds_for_all_together(self, serve):
        peer, streams = serve(3, window=HUGE)
        for stream in streams:
            peer.connection.send_messages(stream, [b"x" * 60_000])
        assert sum(size for _stream_id, size in data_of(peer.output())) == 65_535
        assert not peer.connection.has_output
        allow(peer, 0, 30)
        assert data_of(peer.output()) == [(streams[1].id, 30)]

    def test_straight_messages_wait_for_the_connections_window_too(self, serve):
        peer, (first, second) = serve(2, window=HUGE)
        peer.connection.send_messages(first, [b"x" * 65_000])
        peer.output()
        peer.connection.send_messages(second, [b"y" * 600])
        assert data_of(peer.output()) == [(3, 65_535 - 65_005)]
        assert second.queued_bytes == 75
        allow(peer, 0, 1000)
        assert data_of(peer.output()) == [(3, 75)]

    def test_a_window_that_shrinks_below_zero_stops_the_stream(self, serve):
        peer, (stream,) = serve(window=100)
        peer.connection.send_messages(stream, [b"x" * 90])
        peer.connection.send_messages(stream, [b"y" * 90])
        peer.connection.receive(frames.settings({4: 10}))
        assert (stream.send_window, stream.queued_bytes) == (10 - 95, 95)
        assert data_of(peer.output()) == [(1, 95)]
        assert not peer.connection.has_output
        allow(peer, 1, 85)
        assert not peer.connection.has_output
        allow(peer, 1, 1)
        assert data_of(peer.output()) == [(1, 1)]
        peer.connection.receive(frames.settings({4: 1000}))
        assert data_of(peer.output()) == [(1, 94)]


class TestBounds:
    @given(st.lists(st.integers(1, 40_000), min_size=1, max_size=40))
    def test_takes_of_any_size_give_the_same_bytes_in_order(self, make_pair, sizes):
        pair = make_pair(client=Http2Settings(stream_window_bytes=1 << 20))
        _stream, served = pair.call()
        messages = [bytes([number]) * 3000 * number for number in range(12)]
        pair.server.send_messages(served, messages)
        pair.server.send_headers(served, TRAILERS, end_stream=True)
        received = []
        for size in [*sizes, 1 << 30]:
            output = pair.server.take_output(size)
            assert len(output) <= size
            for stream in pair.client.receive(output):
                received += stream.take()
                stream.credit()
        assert not pair.server.has_output
        assert received == messages


class TestEndings:
    def test_trailers_wait_for_the_queue(self, serve):
        peer, (stream,) = serve(window=100)
        peer.connection.send_messages(stream, [b"x" * 145])
        peer.connection.send_headers(stream, TRAILERS, end_stream=True)
        assert data_of(peer.output()) == [(1, 100)]
        allow(peer, 1, 1000)
        written = peer.output()
        assert [(frame.kind, frame.flags) for frame in written[:2]] == [(FrameType.DATA, 0), (FrameType.HEADERS, 5)]
        assert stream.closed
        assert peer.connection.take_drained() == [stream]

    def test_an_end_without_trailers_waits_for_the_queue(self, make_pair):
        pair = make_pair(server=Http2Settings.for_test())
        stream = pair.client.open_stream(REQUEST)
        pair.client.send_messages(stream, [b"x" * 500, b"y" * 500])
        pair.client.end_stream(stream)
        assert not stream.local_ended
        pair.settle()
        (served,) = pair.server_streams
        assert pair.received[Role.SERVER, 1] == [b"x" * 500, b"y" * 500]
        assert served.remote_ended
        assert stream.local_ended

    def test_trailers_are_encoded_in_the_order_in_which_they_leave(self, make_pair):
        pair = make_pair(client=Http2Settings.for_test())
        calls = [pair.call() for _ in range(5)]
        for number, (_stream, served) in enumerate(calls):
            pair.server.send_messages(served, [b"x" * 100 * (5 - number)])
            pair.server.send_headers(served, [*TRAILERS, (b"number-%d" % number, b"shared")], end_stream=True)
        pair.settle()
        assert [stream.trailers[-1][0] for stream, _served in calls] == [b"number-%d" % number for number in range(5)]


class TestDrained:
    def test_a_stream_is_reported_once_when_its_queue_is_empty(self, serve):
        peer, (stream, other) = serve(2, window=100)
        peer.connection.send_messages(other, [b"straight"])
        peer.connection.send_messages(stream, [b"x" * 120])
        assert peer.connection.take_drained() == []
        peer.output()
        assert (stream.queued_bytes, peer.connection.take_drained()) == (25, [])
        allow(peer, 1, 100)
        peer.output()
        assert peer.connection.take_drained() == [stream]
        assert peer.connection.take_drained() == []
        peer.connection.send_messages(stream, [b"straight again"])
        assert stream.queued_bytes == 0

    @pytest.mark.parametrize("how", ["reset here", "reset there", "lost", "failed"])
    def test_a_dropped_queue_is_empty_and_not_reported(self, serve, how):
        peer, (stream,) = serve(window=10)
        peer.connection.send_messages(stream, [b"x" * 100])
        match how:
            case "reset here":
                peer.connection.reset(stream, ErrorCode.CANCEL)
            case "reset there":
                peer.write(FrameType.RST_STREAM, 0, 1, bytes(4))
            case "lost":
                peer.connection.connection_lost()
            case "failed":
                peer.write(FrameType.PING)
        assert (stream.queued_bytes, peer.connection.take_drained()) == (0, [])
        assert data_of(peer.output()) == []


@pytest.mark.parametrize("size", [10, 100_000], ids=["straight", "queued"])
@pytest.mark.parametrize("alone", [True, False])
def test_a_message_in_pieces_arrives_as_one(make_pair, size, alone):
    pair = make_pair()
    _stream, served = pair.call()
    message = bytes(range(256)) * (size // 256 + 1)
    pieces = Pieces([message[:3], memoryview(message)[3:-1], b"", message[-1:]])
    messages = [pieces] if alone else [b"before", pieces, b"after"]
    pair.server.send_messages(served, messages)
    pair.settle()
    assert pair.received[Role.CLIENT, served.id] == [bytes(each) for each in messages]
