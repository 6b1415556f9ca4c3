"""A peer that keeps us busy: an end in time, bounded memory, and others in their turn."""

from __future__ import annotations

import pytest

from trio_router.http2 import ErrorCode, Http2Settings, Role, frames, limits
from trio_router.http2.frames import FrameType
from trio_router.http2.framing import join

REQUEST = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/test/Method")]
RESPONSE = [(b":status", b"200")]
TRAILERS = [(b"grpc-status", b"0")]


def receiving(peer):
    """Stream 1 in the state where messages may come."""
    if peer.connection._core.role is Role.SERVER:
        (stream,) = peer.headers(1, REQUEST)
    else:
        stream = peer.connection.open_stream(REQUEST)
        peer.headers(1, RESPONSE)
    peer.output()
    return stream


class TestFloods:
    """A peer that makes us answer and does not read, or that sends nothing of use: an end, and bounded memory."""

    def flood(self, peer, chunk: bytes, *, times: int) -> int:
        """Feed `chunk` until the connection gives up; how often that was possible."""
        for number in range(times):
            peer.connection.receive(chunk)
            if peer.connection.error is not None:
                return number
        return times

    @pytest.mark.parametrize(
        "chunk", [frames.ping(bytes(8), ack=False) * 100, frames.settings({3: 1}) * 100], ids=["ping", "settings"]
    )
    def test_answers_that_nobody_reads(self, make_scripted, chunk):
        peer = make_scripted(Role.SERVER)
        assert self.flood(peer, chunk, times=1000) == limits.MAX_PENDING_ANSWERS // 100
        assert peer.connection.error.h2_code == ErrorCode.ENHANCE_YOUR_CALM
        assert len(peer.connection.take_output(1 << 30)) < 400_000

    def test_pings_that_are_read_are_forgiven_by_time_or_work(self, make_scripted):
        now = 0.0
        peer = make_scripted(Role.SERVER, clock=lambda: now)
        pings = frames.ping(bytes(8), ack=False) * 1000
        for _ in range(100):
            peer.connection.receive(pings)
            peer.output()
            now += 1000 / limits.IDLE_FRAMES_PER_SECOND
        assert peer.connection.error is None
        for stream_id in range(1, 201, 2):
            peer.connection.receive(pings)
            peer.headers(stream_id, REQUEST)
            peer.output()
        assert peer.connection.error is None
        now = 0.0
        for _ in range(1 + limits.MAX_IDLE_FRAMES // 1000):
            assert peer.connection.error is None
            peer.connection.receive(pings)
            peer.output()
        assert peer.connection.error.h2_code == ErrorCode.ENHANCE_YOUR_CALM

    @pytest.mark.parametrize(
        ("kind", "flags", "payload"),
        [
            (FrameType.DATA, 0, b""),
            (FrameType.DATA, frames.PADDED, b"\x09" + bytes(9)),
            (FrameType.PRIORITY, 0, bytes(5)),
            (99, 0, b"anything"),
            (FrameType.GOAWAY, 0, bytes(8)),
        ],
    )
    def test_frames_that_carry_nothing(self, make_scripted, kind, flags, payload):
        peer = make_scripted(Role.SERVER)
        receiving(peer)
        frame = peer.frame(kind, flags, 0 if kind == FrameType.GOAWAY else 1, payload)
        assert self.flood(peer, frame * 1000, times=1000) == limits.MAX_IDLE_FRAMES // 1000
        assert peer.connection.error.h2_code == ErrorCode.ENHANCE_YOUR_CALM

    @pytest.mark.parametrize("kind", [FrameType.RST_STREAM, FrameType.WINDOW_UPDATE, FrameType.HEADERS])
    def test_frames_for_a_stream_that_is_gone(self, make_scripted, kind):
        peer = make_scripted(Role.SERVER)
        stream = receiving(peer)
        peer.connection.reset(stream, ErrorCode.CANCEL)
        payload = b"\0\0\0\1" if kind != FrameType.HEADERS else b""
        frame = peer.frame(kind, frames.END_HEADERS if kind == FrameType.HEADERS else 0, 1, payload)
        assert self.flood(peer, frame * 1000, times=1000) == limits.MAX_IDLE_FRAMES // 1000
        assert peer.connection.error.h2_code == ErrorCode.ENHANCE_YOUR_CALM

    @pytest.mark.parametrize("stream_id", [0, 1])
    def test_credit_that_nobody_needs(self, make_scripted, stream_id):
        peer = make_scripted(Role.SERVER)
        receiving(peer)
        assert self.flood(peer, frames.window_update(stream_id, 1) * 1000, times=1000) == limits.MAX_CREDITS // 1000
        assert peer.connection.error.h2_code == ErrorCode.ENHANCE_YOUR_CALM

    def test_credit_for_every_message_on_stream_and_connection_is_no_flood(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        stream = receiving(peer)
        peer.connection.send_headers(stream, RESPONSE)
        for _ in range(30):
            for _ in range(1000):
                peer.connection.send_messages(stream, [b"x"])
            assert len(peer.output()) >= 1000
            peer.connection.receive((frames.window_update(0, 6) + frames.window_update(1, 6)) * 1000)
        assert peer.connection.error is None

    def test_a_message_now_and_then_makes_up_for_them(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        stream = receiving(peer)
        empty = peer.frame(FrameType.DATA, 0, 1, b"") * 1000
        for _ in range(50):
            peer.connection.receive(empty + peer.frame(FrameType.DATA, 0, 1, join([b"x"])))
            stream.take()
            stream.credit()
        assert peer.connection.error is None

    def test_rapid_reset(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        reset = (8).to_bytes(4, "big")
        for stream_id in range(1, 40_000, 2):
            peer.headers(stream_id, REQUEST)
            peer.write(FrameType.RST_STREAM, 0, stream_id, reset)
            if peer.connection.error is not None:
                break
        assert stream_id // 2 == limits.MAX_UNANSWERED_RESETS
        assert peer.connection.error.h2_code == ErrorCode.ENHANCE_YOUR_CALM
        assert peer.connection.open_streams == 0

    @pytest.mark.parametrize(
        ("kind", "payload"),
        [(FrameType.WINDOW_UPDATE, bytes(4)), (FrameType.PRIORITY, b"?"), (FrameType.HEADERS, b"")],
    )
    def test_resets_that_a_peer_makes_us_send_are_its_own(self, make_scripted, kind, payload):
        """Each stream ends by a frame that breaks a rule of its stream only (CVE-2025-8671). Our answers are read."""
        peer = make_scripted(Role.SERVER)
        for stream_id in range(1, 40_000, 2):
            peer.headers(stream_id, REQUEST)
            peer.write(kind, frames.END_HEADERS if kind == FrameType.HEADERS else 0, stream_id, payload)
            peer.output()
            if peer.connection.error is not None:
                break
        assert stream_id // 2 == limits.MAX_UNANSWERED_RESETS
        assert peer.connection.error.h2_code == ErrorCode.ENHANCE_YOUR_CALM

    def test_streams_that_break_the_rules_one_after_another(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        for stream_id in range(1, 40_000, 2):
            peer.headers(stream_id, REQUEST)
            peer.data(stream_id, b"\x01\0\0\0\0")
            if peer.connection.error is not None:
                break
        assert stream_id // 2 == limits.MAX_PENDING_ANSWERS

    def test_late_frames_of_many_reset_streams_are_no_flood(self, make_scripted):
        peer = make_scripted(Role.CLIENT)
        stream = receiving(peer)
        peer.connection.reset(stream, ErrorCode.CANCEL)
        token = peer.frame(FrameType.DATA, 0, 1, join([b"token"])) * 1000
        for _ in range(100):
            peer.connection.receive(token)
        assert peer.connection.error is None

    def test_many_streams_leave_no_memory_behind(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        for stream_id in range(1, 6001, 2):
            (stream,) = peer.headers(stream_id, REQUEST, end=True)
            peer.connection.send_headers(stream, [*RESPONSE, *TRAILERS], end_stream=True)
            peer.output()
        core = peer.connection._core
        assert not core.streams
        assert not core.outbox._ring
        assert not core.outbox._drained
        assert not core.outbox.parts

    def test_a_partial_frame_is_not_copied_for_every_byte(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        stream = receiving(peer)
        body = peer.frame(FrameType.DATA, 0, 1, join([b"x" * 16_000]))
        for byte in body:
            peer.connection.receive(bytes([byte]))
            assert len(peer.connection._inbound._buffer) <= len(body)
        assert stream.messages == [b"x" * 16_000]


class TestEffort:
    """One read is handled in portions, so that a peer of many small frames does not keep all others waiting."""

    def many(self, peer, count: int) -> bytes:
        return b"".join(
            peer.header_frame(stream_id, REQUEST) + peer.frame(FrameType.DATA, 0, stream_id, join([b"a", b"b"]))
            for stream_id in range(1, 2 * count, 2)
        )

    def test_a_portion_ends_and_the_rest_is_kept(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        touched = peer.connection.receive(self.many(peer, 100), effort=120)
        assert len(touched) == 10  # a header list counts as ten frames more
        assert peer.connection.has_input
        portions = 1
        while peer.connection.has_input:
            touched += peer.connection.receive(b"", effort=120)
            portions += 1
        assert portions == 10
        assert [stream.messages for stream in touched] == [[b"a", b"b"]] * 100

    @pytest.mark.parametrize("effort", [1, 7, 50, 10_000])
    @pytest.mark.parametrize("size", [1, 10, 1000, 100_000])
    def test_portions_of_any_size_mean_the_same(self, make_scripted, effort, size):
        peer = make_scripted(Role.SERVER)
        data = self.many(peer, 30)
        streams = {}
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            while piece or peer.connection.has_input:
                streams.update((stream.id, stream) for stream in peer.connection.receive(piece, effort=effort))
                piece = b""
        assert [stream.messages for stream in streams.values()] == [[b"a", b"b"]] * 30
        assert not peer.connection.has_input

    def test_whole_messages_cost_none(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        stream = receiving(peer)
        peer.connection.receive(peer.frame(FrameType.DATA, 0, 1, join([b"x"])) * 1000, effort=1)
        assert (len(stream.messages), peer.connection.has_input) == (1000, False)

    def test_a_change_of_many_windows_costs_more(self, make_scripted):
        peer = make_scripted(Role.SERVER, settings=Http2Settings(max_concurrent_streams=1000))
        for number in range(1000):
            peer.headers(1 + 2 * number, REQUEST)
        peer.connection.receive(frames.settings({4: 7}) * 100, effort=500)
        acks = [frame for frame in peer.output() if frame.kind == FrameType.SETTINGS]
        assert len(acks) == 4

    @pytest.mark.parametrize("effort", [0, 1, None])
    def test_a_frame_that_is_not_whole_is_no_input(self, make_scripted, effort):
        peer = make_scripted(Role.SERVER)
        ping = frames.ping(bytes(8), ack=False)
        peer.connection.receive(ping + ping[:5], effort=1)
        if peer.connection.has_input:
            peer.connection.receive(b"", effort=effort)
        assert not peer.connection.has_input
        peer.connection.receive(ping[5:], effort=effort)
        assert len(peer.output()) == 2

    def test_a_portion_does_not_shorten_the_next_read(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        pings = frames.ping(bytes(8), ack=False) * 10
        peer.connection.receive(pings, effort=1)
        peer.connection.receive(pings)
        assert (len(peer.output()), peer.connection.has_input) == (20, False)

    def test_there_is_nothing_left_of_a_connection_that_is_over(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        bad = peer.frame(FrameType.PING, 0, 0, b"short")
        peer.connection.receive(bad * 10, effort=1)
        assert peer.connection.error is not None
        assert not peer.connection.has_input
