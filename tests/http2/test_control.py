"""Frames about the connection: going away without losing a request, and settings that cost."""

from __future__ import annotations

import hpack
import pytest

from trio_router.errors import LinkError, TooLarge
from trio_router.http2 import ErrorCode, Http2Settings, Role, frames, limits
from trio_router.http2.core import DRAIN_PING
from trio_router.http2.frames import FrameType

REQUEST = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/test/Method"), (b":authority", b"test")]
RESPONSE = [(b":status", b"200"), (b"content-type", b"application/grpc")]
TRAILERS = [(b"grpc-status", b"0")]


def goaways(written) -> list[tuple[int, int]]:
    """(last stream id, code) of each GOAWAY."""
    return [
        (int.from_bytes(frame.payload[:4], "big"), int.from_bytes(frame.payload[4:8], "big"))
        for frame in written
        if frame.kind == FrameType.GOAWAY
    ]


def resets(written) -> list[tuple[int, int]]:
    """(stream id, code) of each RST_STREAM."""
    sent = [frame for frame in written if frame.kind == FrameType.RST_STREAM]
    return [(frame.stream_id, int.from_bytes(frame.payload, "big")) for frame in sent]


class TestDrain:
    """RFC 9113 6.8: what was sent before the peer knew is served, what it sends afterwards is refused."""

    def test_it_is_announced_before_anything_is_refused(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        peer.headers(1, REQUEST)
        peer.connection.drain(b"restarting")
        written = peer.output()
        assert goaways(written) == [(2**31 - 1, ErrorCode.NO_ERROR)]
        assert written[-2].payload[8:] == b"restarting"
        assert (written[-1].kind, written[-1].payload) == (FrameType.PING, DRAIN_PING)
        assert peer.connection.draining

    def test_requests_that_were_on_their_way_are_served(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        peer.connection.drain()
        for stream_id in (1, 3):
            (stream,) = peer.headers(stream_id, REQUEST, end=True)
            assert not stream.closed
        assert resets(peer.output()) == []
        peer.connection.receive(frames.ping(DRAIN_PING, ack=True))
        assert goaways(peer.output()) == [(3, ErrorCode.NO_ERROR)]
        assert not peer.connection.draining
        assert peer.headers(5, REQUEST) == []
        assert resets(peer.output()) == [(5, ErrorCode.REFUSED_STREAM)]
        assert peer.connection.open_streams == 2

    def test_it_is_said_once(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        peer.connection.drain()
        peer.output()
        peer.connection.drain()
        assert peer.output() == []
        peer.connection.receive(frames.ping(DRAIN_PING, ack=True) * 2)
        assert len(goaways(peer.output())) == 1
        peer.connection.drain()
        assert peer.output() == []
        assert not peer.connection.draining

    def test_an_answer_that_was_not_asked_for_drains_nothing(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        peer.connection.receive(frames.ping(DRAIN_PING, ack=True))
        assert peer.output() == []

    def test_going_away_at_once_cuts_it_short(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        peer.headers(1, REQUEST)
        peer.connection.drain()
        peer.connection.go_away(ErrorCode.INTERNAL_ERROR)
        assert goaways(peer.output()) == [(2**31 - 1, ErrorCode.NO_ERROR), (1, ErrorCode.INTERNAL_ERROR)]
        peer.connection.receive(frames.ping(DRAIN_PING, ack=True))
        assert peer.output() == []
        assert peer.headers(3, REQUEST) == []

    def test_a_broken_rule_while_draining_ends_the_connection(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        peer.connection.drain()
        peer.write(FrameType.PING, payload=b"short")
        assert goaways(peer.output())[-1] == (0, ErrorCode.FRAME_SIZE_ERROR)
        assert not peer.connection.draining

    def test_its_ping_is_nobody_elses(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        peer.connection.drain()
        peer.connection.receive(frames.ping(DRAIN_PING, ack=True))
        assert peer.connection.pings_acked == []

    def test_a_client_has_nothing_to_wait_for(self, make_pair):
        pair = make_pair()
        pair.client.drain()
        pair.settle()
        assert pair.server.goaway_received.code == ErrorCode.NO_ERROR
        assert not pair.client.draining

    def test_no_request_is_lost_between_two_of_ours(self, make_pair):
        """The client sends as long as it may, and the server is drained in the middle: every request is answered."""
        pair = make_pair()
        streams = []
        for number in range(30):
            if number == 10:
                pair.server.drain()
                in_flight = pair.server.take_output()  # not read by the client before it has sent ten more
            if pair.client.can_open:
                streams.append(pair.client.open_stream(REQUEST))
                pair.client.send_messages(streams[-1], [b"x"], end_stream=True)
            if number == 20:
                pair.client.receive(in_flight)
        pair.settle()
        for served in pair.server_streams:
            pair.server.send_headers(served, [*RESPONSE, *TRAILERS], end_stream=True)
        pair.settle()
        assert len(streams) == 21
        assert [stream.trailers_only and not stream.refused for stream in streams] == [True] * 21
        assert not pair.server.draining


class TestSettingsThatCost:
    def test_a_change_of_many_windows_counts_as_many_frames(self, make_scripted):
        """Each of these frames changes the window of 1,000 streams: 125 frames' worth of patience."""
        peer = make_scripted(Role.SERVER, settings=Http2Settings(max_concurrent_streams=1000))
        for number in range(1000):
            peer.headers(1 + 2 * number, REQUEST)
        sent = 0
        while peer.connection.error is None and sent < 10_000:
            peer.connection.receive(frames.settings({4: 1000 + sent % 2}))
            peer.output()
            sent += 1
        assert sent == limits.MAX_IDLE_FRAMES // (1 + 1000 // limits.STREAMS_PER_IDLE_FRAME) + 1
        assert peer.connection.error.h2_code == ErrorCode.ENHANCE_YOUR_CALM

    def test_a_table_size_that_changes_again_and_again_is_announced_in_two_steps(self, make_scripted):
        """hpack would keep every change and announce all of them."""
        peer = make_scripted(Role.CLIENT)
        for number in range(1000):
            peer.connection.receive(frames.settings({1: number % 2 * 4096}))
        peer.output()
        peer.connection.open_stream(REQUEST)
        (headers,) = peer.output()
        assert len(headers.payload) < 100
        decoder = hpack.Decoder()
        assert list(decoder.decode(headers.payload, raw=True)) == REQUEST
        assert decoder.header_table_size == 4096


class TestPeersHeaderLimit:
    def test_a_request_above_it_is_refused_here(self, make_scripted):
        peer = make_scripted(Role.CLIENT)
        peer.connection.receive(frames.settings({6: 300}))
        peer.output()
        with pytest.raises(TooLarge, match=r"header list of \d+ bytes is over the peer's limit of 300"):
            peer.connection.open_stream([*REQUEST, (b"big", b"x" * 300)])
        assert (peer.output(), peer.connection.open_streams) == ([], 0)
        assert peer.connection.open_stream(REQUEST).id == 1

    @pytest.mark.parametrize("over", [0, 1])
    def test_the_limit_itself_passes(self, make_scripted, over):
        peer = make_scripted(Role.CLIENT)
        size = sum(len(name) + len(value) + 32 for name, value in REQUEST)
        peer.connection.receive(frames.settings({6: size - over}))
        if over:
            with pytest.raises(TooLarge):
                peer.connection.open_stream(REQUEST)
        else:
            peer.connection.open_stream(REQUEST)

    def test_trailers_above_it_leave_the_stream_as_it_is(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        peer.connection.receive(frames.settings({6: 300}))
        (stream,) = peer.headers(1, REQUEST, end=True)
        peer.connection.send_headers(stream, RESPONSE)
        peer.output()
        with pytest.raises(TooLarge):
            peer.connection.send_headers(stream, [*TRAILERS, (b"big", b"x" * 300)], end_stream=True)
        assert (peer.output(), stream.sendable, stream.closed) == ([], True, False)
        peer.connection.send_headers(stream, TRAILERS, end_stream=True)
        assert stream.closed


class TestOutputThatNobodyReads:
    def answer_until_refused(self, peer, *, trailer: bytes) -> int:
        """Requests that are answered at once and whose answers stay here; how many until one is refused."""
        for number in range(100_000):
            touched = peer.headers(1 + 2 * number, REQUEST, end=True)
            if not touched:
                return number
            headers = [*RESPONSE, *TRAILERS, (b"x", trailer)]
            peer.connection.send_headers(touched[0], headers, end_stream=True)
        raise AssertionError("never refused")

    @pytest.mark.parametrize("size", [10, 5000])
    def test_a_server_takes_no_more_requests(self, make_scripted, size):
        peer = make_scripted(Role.SERVER)
        self.answer_until_refused(peer, trailer=b"x" * size)
        written = peer.output()
        assert resets(written)[-1][1] == ErrorCode.REFUSED_STREAM
        answers = sum(len(frame.payload) + 9 for frame in written)
        assert limits.MAX_UNREAD_BYTES < answers < limits.MAX_UNREAD_BYTES + size + 1000
        # Now that they have been read, it goes on.
        assert len(peer.headers(300_001, REQUEST)) == 1

    def test_who_goes_on_all_the_same_is_cut_off(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        first = self.answer_until_refused(peer, trailer=b"x" * 500)
        for number in range(first + 1, first + 2 * limits.MAX_PENDING_ANSWERS):
            peer.headers(1 + 2 * number, REQUEST, end=True)
            if peer.connection.error is not None:
                break
        assert peer.connection.error.h2_code == ErrorCode.ENHANCE_YOUR_CALM
        bound = limits.MAX_UNREAD_BYTES + 17 * limits.MAX_PENDING_ANSWERS + 1000
        assert len(peer.connection.take_output(1 << 30)) < bound

    def test_a_client_opens_no_more_streams(self, make_scripted):
        peer = make_scripted(Role.CLIENT)
        opened = 0
        while peer.connection.can_open:
            stream = peer.connection.open_stream([*REQUEST, (b"x", b"x" * 5000)])
            peer.connection.reset(stream, ErrorCode.CANCEL)
            opened += 1
        assert limits.MAX_UNREAD_BYTES // 5200 < opened <= limits.MAX_UNREAD_BYTES // 5000 + 1
        with pytest.raises(LinkError):
            peer.connection.open_stream(REQUEST)
        peer.output()
        assert peer.connection.can_open

    def test_what_is_taken_in_pieces_still_counts(self, make_scripted):
        peer = make_scripted(Role.CLIENT)
        while peer.connection.can_open:
            stream = peer.connection.open_stream([*REQUEST, (b"x", b"x" * 5000)])
            peer.connection.reset(stream, ErrorCode.CANCEL)
        peer.connection.take_output(10)
        assert not peer.connection.can_open
        peer.connection.take_output(100_000)
        assert peer.connection.can_open

    def test_streams_that_were_reset_with_their_queues_leave_nothing_behind(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        peer.connection.receive(frames.settings({4: 10}))
        peer.output()
        for stream_id in range(1, 2001, 2):
            (stream,) = peer.headers(stream_id, REQUEST)
            peer.connection.send_headers(stream, RESPONSE)
            peer.connection.send_messages(stream, [b"x" * 1000])
            peer.write(FrameType.RST_STREAM, 0, stream_id, int(ErrorCode.CANCEL).to_bytes(4, "big"))
        outbox = peer.connection._core.outbox
        assert (len(outbox._drained), len(outbox._ring)) == (0, 0)
