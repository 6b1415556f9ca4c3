"""Both ends of a connection, joined by memory: calls as gRPC makes them, and how they end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_router.errors import LinkError
from trio_router.http2 import Connection, ErrorCode, Http2Settings, Role, frames
from trio_router.http2.frames import FrameType

REQUEST = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/test/Method"), (b":authority", b"test")]
RESPONSE = [(b":status", b"200"), (b"content-type", b"application/grpc")]
TRAILERS = [(b"grpc-status", b"0")]
TINY = Http2Settings.for_test()


class TestCalls:
    def test_a_unary_call(self, make_pair):
        pair = make_pair()
        stream, served = pair.call([b"question"])
        assert served.headers == REQUEST
        assert served.remote_ended
        pair.server.send_messages(served, [b"answer"])
        pair.server.send_headers(served, TRAILERS, end_stream=True)
        pair.settle()
        assert pair.received == {(Role.SERVER, 1): [b"question"], (Role.CLIENT, 1): [b"answer"]}
        assert (stream.headers, stream.trailers, stream.trailers_only) == (RESPONSE, TRAILERS, False)
        assert stream.closed
        assert served.closed
        assert pair.client.open_streams == pair.server.open_streams == 0
        assert (stream.reset_code, served.reset_code, stream.failure, served.failure) == (None,) * 4

    def test_messages_flow_both_ways_before_either_end(self, make_pair):
        pair = make_pair(client=TINY, server=TINY)
        stream = pair.client.open_stream(REQUEST)
        pair.settle()
        (served,) = pair.server_streams
        pair.server.send_headers(served, RESPONSE)
        for number in range(20):
            pair.client.send_messages(stream, [b"to the server %d" % number])
            pair.server.send_messages(served, [b"to the client %d" % number] * 2)
            pair.settle()
        pair.client.end_stream(stream)
        pair.settle()
        assert served.remote_ended
        assert not stream.remote_ended
        pair.server.send_headers(served, TRAILERS, end_stream=True)
        pair.settle()
        assert len(pair.received[Role.SERVER, 1]) == 20
        assert len(pair.received[Role.CLIENT, 1]) == 40
        assert stream.closed
        assert served.closed

    def test_a_trailers_only_response(self, make_pair):
        pair = make_pair()
        stream = pair.client.open_stream(REQUEST)
        pair.client.end_stream(stream)
        pair.settle()
        answer = [*RESPONSE, (b"grpc-status", b"5")]
        pair.server.send_headers(pair.server_streams[0], answer, end_stream=True)
        pair.settle()
        assert stream.trailers_only
        assert stream.headers is stream.trailers
        assert stream.trailers == answer
        assert stream.closed

    def test_a_response_that_ends_without_trailers(self, make_pair):
        pair = make_pair()
        stream, served = pair.call()
        pair.server.send_messages(served, [b"last"], end_stream=True)
        pair.settle()
        assert (stream.remote_ended, stream.trailers, stream.failure) == (True, None, None)
        assert pair.received[Role.CLIENT, 1] == [b"last"]

    def test_an_answer_before_the_end_of_the_request_ends_it(self, make_pair):
        pair = make_pair()
        stream = pair.client.open_stream(REQUEST)
        pair.settle()
        (served,) = pair.server_streams
        pair.server.send_headers(served, RESPONSE)
        pair.server.send_headers(served, TRAILERS, end_stream=True)
        assert served.closed
        pair.settle()
        assert (stream.trailers, stream.remote_ended, stream.closed) == (TRAILERS, True, True)
        pair.client.send_messages(stream, [b"too late"], end_stream=True)
        pair.settle()
        assert pair.client.error is pair.server.error is None

    def test_a_client_may_send_trailers(self, make_pair):
        pair = make_pair()
        stream = pair.client.open_stream(REQUEST)
        pair.client.send_messages(stream, [b"x"])
        pair.client.send_headers(stream, [(b"checksum", b"7")], end_stream=True)
        pair.settle()
        (served,) = pair.server_streams
        assert (served.trailers, served.remote_ended) == ([(b"checksum", b"7")], True)

    def test_large_header_lists_cross_frames(self, make_pair):
        limits = Http2Settings(max_header_list_bytes=200_000)
        pair = make_pair(client=limits, server=limits)
        headers = [*REQUEST, *((b"name-%d" % number, b"v" * 1000) for number in range(60))]
        pair.client.open_stream(headers)
        pair.settle()
        assert pair.server_streams[0].headers == headers

    @pytest.mark.parametrize("size", [16_379, 16_380, 65_530, 65_531, 65_532, 500_000])
    @pytest.mark.parametrize("window", [64, 65_536, 1 << 20])
    def test_messages_around_frame_and_window_sizes(self, make_pair, size, window):
        pair = make_pair(client=Http2Settings(stream_window_bytes=window))
        _stream, served = pair.call()
        message = bytes(range(256)) * (size // 256 + 1)
        pair.server.send_messages(served, [b"before", message[:size], b"after"])
        pair.settle()
        assert pair.received[Role.CLIENT, 1] == [b"before", message[:size], b"after"]
        assert served.queued_bytes == 0


def script(pair) -> tuple[list[object], bytes]:
    """A fixed conversation; what its client ends up with, and the bytes that the server wrote."""
    wire = b""
    streams = []
    for number in range(4):
        stream = pair.client.open_stream(REQUEST)
        streams.append(stream)
        pair.client.send_messages(stream, [b"q%d" % number], end_stream=True)
        pair.server.receive(pair.client.take_output())
    served = list(pair.server._core.streams.values())
    for stream in served:
        pair.server.send_headers(stream, RESPONSE)
    for step in range(6):
        for stream in served[:3]:
            pair.server.send_messages(stream, [bytes([step]) * (step * 7)] * (1 + step % 3))
        wire += pair.server.take_output()
    pair.server.send_headers(served[0], TRAILERS, end_stream=True)
    pair.server.reset(served[1], ErrorCode.INTERNAL_ERROR)
    pair.server.send_messages(served[2], [b"end"], end_stream=True)
    pair.server.send_headers(served[3], TRAILERS, end_stream=True)
    pair.server.ping(b"01234567")
    return streams, wire + pair.server.take_output()


def picture(stream) -> tuple[object, ...]:
    """Everything a user can see of a stream."""
    return (
        stream.headers,
        stream.trailers,
        stream.trailers_only,
        stream.messages,
        stream.remote_ended,
        stream.reset_code,
        stream.failure,
        stream.closed,
    )


class TestSplits:
    @given(st.data())
    @settings(deadline=None, max_examples=60)
    def test_any_split_of_the_bytes_gives_the_same_streams(self, make_pair, data):
        whole = make_pair()
        expected, wire = script(whole)
        whole.client.receive(wire)
        torn = make_pair()
        got, same_wire = script(torn)
        assert same_wire == wire
        cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=30)))
        touched = []
        for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
            touched += torn.client.receive(wire[start:end])
        assert list(map(picture, got)) == list(map(picture, expected))
        assert set(touched) == set(got)
        assert torn.client.take_output() == whole.client.take_output()

    def test_byte_by_byte_both_ways(self, make_pair):
        pair = make_pair(client=TINY, server=TINY, chunk=1)
        stream, served = pair.call([b"a" * 500])
        pair.server.send_messages(served, [b"b" * 700, b"", b"c"])
        pair.server.send_headers(served, TRAILERS, end_stream=True)
        pair.settle()
        assert pair.received == {(Role.SERVER, 1): [b"a" * 500], (Role.CLIENT, 1): [b"b" * 700, b"", b"c"]}
        assert stream.closed

    def test_each_touched_stream_is_reported_once_in_order_of_its_first_change(self, make_pair):
        pair = make_pair()
        calls = [pair.call() for _ in range(3)]
        for _ in range(2):
            for _stream, served in reversed(calls):
                pair.server.send_messages(served, [b"x"])
        touched = pair.client.receive(pair.server.take_output())
        assert touched == [stream for stream, _served in reversed(calls)]
        assert [len(stream.messages) for stream in touched] == [2, 2, 2]
        assert pair.client.receive(b"") == []


class TestOpening:
    def test_before_the_peers_settings_a_hundred_streams_may_open(self):
        client = Connection(Role.CLIENT)
        for _ in range(100):
            client.open_stream(REQUEST)
        assert not client.can_open
        with pytest.raises(LinkError, match="streams=100"):
            client.open_stream(REQUEST)
        client.receive(frames.settings({}))
        assert client.can_open

    def test_the_peers_limit_holds_and_a_closed_stream_makes_room(self, make_pair):
        pair = make_pair(server=Http2Settings(max_concurrent_streams=2))
        first, second = pair.client.open_stream(REQUEST), pair.client.open_stream(REQUEST)
        assert not pair.client.can_open
        pair.client.reset(first, ErrorCode.CANCEL)
        assert pair.client.can_open
        third = pair.client.open_stream(REQUEST)
        pair.settle()
        assert [stream.id for stream in pair.server_streams] == [1, 3, 5]
        assert [stream.closed for stream in (second, third)] == [False, False]

    def test_a_server_opens_nothing(self):
        server = Connection(Role.SERVER)
        assert not server.can_open
        with pytest.raises(LinkError):
            server.open_stream(REQUEST)

    def test_stream_ids_run_out(self):
        client = Connection(Role.CLIENT)
        client._core.next_id = 2**31 - 1
        assert client.open_stream(REQUEST).id == 2**31 - 1
        assert not client.can_open

    def test_a_request_too_many_is_refused_and_may_be_repeated(self, make_pair):
        pair = make_pair(server=Http2Settings(max_concurrent_streams=1))
        pair.client._core.peer.max_concurrent_streams = 10  # a client that has not read our settings
        first, second = pair.client.open_stream(REQUEST), pair.client.open_stream(REQUEST)
        pair.settle()
        assert (second.reset_code, second.refused, second.closed) == (ErrorCode.REFUSED_STREAM, True, True)
        assert not first.closed
        assert [stream.id for stream in pair.server_streams] == [1]


class TestReset:
    def test_the_peer_sees_the_code(self, make_pair):
        pair = make_pair()
        stream, served = pair.call()
        pair.client.reset(stream, ErrorCode.CANCEL)
        pair.settle()
        assert (served.reset_code, served.refused, served.closed) == (ErrorCode.CANCEL, False, True)
        assert (stream.reset_code, stream.closed) == (None, True)

    @pytest.mark.parametrize("code", [0, 2, 7, 8, 13, 0xDEAD_BEEF])
    def test_every_code_comes_through(self, make_pair, code):
        pair = make_pair()
        stream, served = pair.call()
        pair.server.reset(served, code)
        pair.settle()
        assert (stream.reset_code, stream.closed, stream.remote_ended) == (code, True, False)
        # Response headers had come: the request was processed, whatever the code says.
        assert not stream.refused

    def test_queued_messages_and_their_trailers_are_dropped(self, make_pair):
        pair = make_pair(client=TINY)
        pair.client_reading = False
        stream, served = pair.call()
        pair.server.send_messages(served, [b"x" * 50] * 20)
        pair.server.send_headers(served, TRAILERS, end_stream=True)
        pair.settle()
        assert served.queued_bytes > 0
        pair.server.reset(served, ErrorCode.INTERNAL_ERROR)
        assert served.queued_bytes == 0
        assert pair.server.take_drained() == []
        pair.settle()
        assert (stream.reset_code, stream.trailers, stream.messages) == (ErrorCode.INTERNAL_ERROR, None, [b"x" * 50])

    def test_compression_stays_in_step_when_streams_die_with_their_headers_unsent(self, make_pair):
        pair = make_pair(client=TINY)
        pair.client_reading = False
        for number in range(20):
            fresh = [(b"unseen-%d" % number, b"value-%d" % number)]
            doomed = pair.client.open_stream([*REQUEST, *fresh])
            pair.client.reset(doomed, ErrorCode.CANCEL)
            stream = pair.client.open_stream([*REQUEST, *fresh])
            pair.client.end_stream(stream)
            pair.settle()
            served = pair.server_streams[-1]
            assert served.headers == [*REQUEST, *fresh]
            pair.server.send_headers(served, [*RESPONSE, *fresh])
            pair.server.send_messages(served, [b"more than a window"] * 10)
            pair.server.send_headers(served, [*TRAILERS, (b"dropped-%d" % number, b"")], end_stream=True)
            pair.server.reset(served, ErrorCode.INTERNAL_ERROR)
            pair.settle()
            assert stream.headers == [*RESPONSE, *fresh]
        assert pair.client.error is pair.server.error is None

    def test_what_still_comes_for_a_reset_stream_is_ignored(self, make_pair):
        pair = make_pair()
        stream, served = pair.call()
        pair.client.reset(stream, ErrorCode.CANCEL)
        pair.server.send_messages(served, [b"late", b"later"])
        pair.server.send_headers(served, [*TRAILERS, (b"new-in-the-table", b"1")], end_stream=True)
        assert pair.client.receive(pair.server.take_output()) == []
        assert (stream.messages, stream.trailers) == ([], None)
        pair.settle()
        # The ignored header list was decoded all the same.
        again, served = pair.call()
        pair.server.send_headers(served, [*TRAILERS, (b"new-in-the-table", b"1")], end_stream=True)
        pair.settle()
        assert again.trailers == [*TRAILERS, (b"new-in-the-table", b"1")]

    def test_messages_that_came_before_the_reset_stay_readable(self, make_pair):
        pair = make_pair()
        pair.client_reading = False
        stream, served = pair.call()
        pair.server.send_messages(served, [b"one", b"two"])
        pair.server.reset(served, ErrorCode.NO_ERROR)
        pair.settle()
        assert (stream.reset_code, stream.take()) == (0, [b"one", b"two"])

    def test_everything_on_a_closed_stream_is_silently_nothing(self, make_pair):
        pair = make_pair()
        stream, _served = pair.call()
        pair.client.reset(stream, ErrorCode.CANCEL)
        pair.settle()
        pair.client.send_messages(stream, [b"x"])
        pair.client.send_messages(stream, [b"x", b"y"], end_stream=True)
        pair.client.send_headers(stream, TRAILERS, end_stream=True)
        pair.client.end_stream(stream)
        pair.client.reset(stream, ErrorCode.CANCEL)
        stream.credit()
        assert not pair.client.has_output


class TestMisuse:
    def test_a_server_sends_headers_first(self, make_pair):
        pair = make_pair()
        pair.client.open_stream(REQUEST)
        pair.settle()
        (served,) = pair.server_streams
        with pytest.raises(RuntimeError, match="out of order"):
            pair.server.send_messages(served, [b"x"])
        with pytest.raises(RuntimeError, match="before the headers"):
            pair.server.end_stream(served)
        pair.server.send_headers(served, RESPONSE)
        with pytest.raises(RuntimeError, match="out of order"):
            pair.server.send_headers(served, RESPONSE)

    @pytest.mark.parametrize("queued", [False, True])
    def test_nothing_follows_the_end_of_our_side(self, make_pair, queued):
        pair = make_pair(server=TINY)
        pair.server_reading = False
        stream = pair.client.open_stream(REQUEST)
        pair.settle()
        pair.client.send_messages(stream, [b"x" * 50] * (10 if queued else 1))
        pair.client.end_stream(stream)
        pair.client.end_stream(stream)  # idempotent
        with pytest.raises(RuntimeError):
            pair.client.send_messages(stream, [b"x"])
        with pytest.raises(RuntimeError):
            pair.client.send_headers(stream, TRAILERS, end_stream=True)

    def test_a_ping_has_eight_bytes(self):
        with pytest.raises(ValueError, match="8 bytes"):
            Connection(Role.CLIENT).ping(b"short")


class TestPing:
    def test_an_answer_is_recorded_once(self, make_pair):
        pair = make_pair()
        pair.client.ping(b"payload1")
        pair.client.ping(b"payload2")
        pair.settle()
        assert pair.client.pings_acked == [b"payload1", b"payload2"]
        assert (pair.client.pings_received, pair.server.pings_received) == (0, 2)
        pair.client.pings_acked.clear()
        pair.client.receive(frames.ping(b"payload1", ack=True))
        assert pair.client.pings_acked == []

    def test_pings_of_the_peer_are_answered_and_not_recorded(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        peer.write(FrameType.PING, payload=b"abcdefgh")
        (answer,) = peer.output()
        assert (answer.kind, answer.flags, answer.payload) == (FrameType.PING, frames.ACK, b"abcdefgh")
        assert peer.connection.pings_acked == []


class TestGoAway:
    def test_open_streams_go_on_and_new_ones_are_refused(self, make_pair):
        pair = make_pair()
        stream, served = pair.call()
        pair.server.go_away(debug=b"going for maintenance")
        pair.settle()
        goaway = pair.client.goaway_received
        assert (goaway.last_stream_id, goaway.code, goaway.debug) == (1, 0, b"going for maintenance")
        assert not pair.client.can_open
        assert not stream.closed
        pair.server.send_messages(served, [b"still here"])
        pair.server.send_headers(served, TRAILERS, end_stream=True)
        pair.settle()
        assert pair.received[Role.CLIENT, 1] == [b"still here"]
        assert stream.trailers == TRAILERS

    def test_streams_that_crossed_the_goaway_are_refused_and_may_be_repeated(self, make_pair):
        pair = make_pair()
        first, _served = pair.call()
        pair.server.go_away()
        crossing = pair.client.open_stream(REQUEST)
        touched = pair.client.receive(pair.server.take_output())
        assert touched == [crossing]
        assert (crossing.refused, crossing.reset_code, crossing.closed) == (True, ErrorCode.REFUSED_STREAM, True)
        pair.settle()
        assert [stream.id for stream in pair.server_streams] == [1]
        assert not first.closed
        assert pair.server.error is None

    def test_a_server_that_goes_away_refuses_even_a_client_that_ignores_it(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        peer.headers(1, REQUEST)
        peer.connection.go_away()
        assert peer.headers(3, REQUEST) == []
        # Frames behind the refused request belong to a closed stream, not to an idle one.
        assert peer.data(3, b"\0\0\0\0\0") == []
        assert peer.connection.error is None
        goaway, refusal = peer.output()
        assert goaway.kind == FrameType.GOAWAY
        assert (refusal.kind, refusal.stream_id, refusal.payload) == (FrameType.RST_STREAM, 3, b"\0\0\0\x07")

    def test_a_second_goaway_does_not_raise_the_last_id(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        peer.headers(1, REQUEST)
        peer.connection.go_away()
        peer.headers(3, REQUEST)
        peer.write(FrameType.PING, stream_id=7, payload=bytes(8))
        last_ids = [frame.payload[:4] for frame in peer.output() if frame.kind == FrameType.GOAWAY]
        assert last_ids == [b"\0\0\0\1"] * 2

    def test_an_unknown_code_and_a_long_reason(self, make_scripted):
        peer = make_scripted(Role.CLIENT)
        peer.write(FrameType.GOAWAY, payload=b"\x80\0\0\x05" + b"\0\0\xff\xff" + b"x" * 5000)
        goaway = peer.connection.goaway_received
        assert (goaway.last_stream_id, goaway.code) == (5, 0xFFFF)
        assert goaway.debug == b"x" * 256


class TestLoss:
    def test_every_open_stream_is_lost(self, make_pair):
        pair = make_pair()
        pair.client_reading = False
        stream, served = pair.call()
        finished, served_too = pair.call()
        pair.server.send_headers(served_too, TRAILERS, end_stream=True)
        pair.server.send_messages(served, [b"came in time"])
        pair.settle()
        assert pair.client.connection_lost() == [stream]
        assert (stream.lost, stream.closed, stream.take()) == (True, True, [b"came in time"])
        assert not finished.lost
        assert not pair.client.can_open
        assert pair.client.receive(b"whatever") == []
        assert pair.client.connection_lost() == []
        assert pair.client.error is None

    def test_a_connection_tells_its_state(self, make_pair):
        pair = make_pair()
        pair.call()
        assert repr(pair.client) == "<Connection client open streams=1>"
        pair.server.go_away()
        pair.settle()
        assert repr(pair.client) == "<Connection client going away streams=1>"
        pair.client.connection_lost()
        assert repr(pair.client) == "<Connection client lost streams=0>"
        pair.server.receive(b"\xff" * 100)
        assert repr(pair.server) == "<Connection server failed streams=0>"
