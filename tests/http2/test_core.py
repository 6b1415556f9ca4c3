"""The law of flow control (see `http2/credit.py`) between two ends, and against peers that overdraw."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_router.http2 import ErrorCode, Http2Settings, Role, frames
from trio_router.http2.frames import FrameType
from trio_router.http2.framing import join

REQUEST = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/test/Method")]
TINY = Http2Settings.for_test()
# The smallest connection window the protocol allows, so that unread streams could take all of it.
NARROW = Http2Settings(connection_window_bytes=65_535, stream_window_bytes=32_768)


class TestStalledReader:
    def test_one_does_not_freeze_the_others(self, make_pair):
        pair = make_pair(client=NARROW)
        calls = [pair.call() for _ in range(10)]
        pair.client_reading = False
        for _stream, served in calls[1:]:  # nine windows of 32 KiB through a connection window of 64 KiB
            pair.server.send_messages(served, [b"unread" * 100] * 1000)
        pair.settle()
        assert all(served.queued_bytes for _stream, served in calls[1:])
        stream, served = calls[0]
        for number in range(50):
            pair.server.send_messages(served, [b"%d" % number * 1000])
            pair.settle()
            assert stream.take() == [b"%d" % number * 1000]
            stream.credit()

    @pytest.mark.parametrize("size", [1, 10, 100, 1000, 30_000])
    def test_what_waits_for_it_is_bounded_by_a_window_and_a_message(self, make_pair, size):
        window = 1000
        pair = make_pair(client=Http2Settings(stream_window_bytes=window))
        stream, served = pair.call()
        pair.client_reading = False
        for _ in range(3000 // size + 5):
            pair.server.send_messages(served, [b"x" * size])
            pair.settle()
        held = len(join(stream.messages)) + len(stream.assembler._partial if stream.assembler else b"")
        assert window - size - 5 < held <= window + size + 5
        assert served.queued_bytes > 0

    def test_taking_gives_no_credit_and_consuming_does(self, make_pair):
        pair = make_pair(client=TINY)
        stream, served = pair.call()
        pair.client_reading = False
        pair.server.send_messages(served, [b"x" * 10] * 20)
        pair.settle()
        first = stream.take()
        assert len(first) == 4  # 60 of the 64 bytes; the fifth message has begun
        pair.settle()
        assert stream.messages == []
        stream.credit()
        pair.settle()
        assert len(stream.take()) >= 4

    def test_messages_not_taken_are_not_credited(self, make_pair):
        pair = make_pair(client=TINY)
        stream, served = pair.call()
        pair.client_reading = False
        pair.server.send_messages(served, [b"x" * 10] * 20)
        pair.settle()
        stream.credit()
        pair.settle()
        assert len(stream.messages) == 4

    def test_credit_comes_in_batches_of_half_a_window(self, make_pair):
        pair = make_pair(client=Http2Settings(stream_window_bytes=1000))
        stream, served = pair.call()
        pair.client_reading = False
        updates = 0
        for _ in range(100):
            pair.server.send_messages(served, [b"x" * 20])
            pair.client.receive(pair.server.take_output())
            stream.take()
            stream.credit()
            updates += pair.client.has_output
            pair.server.receive(pair.client.take_output())
        assert updates == 100 * 25 // 500

    def test_no_credit_is_sent_for_a_stream_that_has_ended(self, make_pair):
        pair = make_pair(client=TINY)
        pair.client_reading = False
        stream, served = pair.call()
        pair.server.send_messages(served, [b"x" * 50], end_stream=True)
        pair.settle()
        assert stream.take() == [b"x" * 50]
        stream.credit()
        assert not pair.client.has_output


class TestMessagesLargerThanTheWindow:
    @pytest.mark.parametrize("size", [65, 1000, 90_000])
    def test_they_arrive_although_nobody_can_read_before_their_end(self, make_pair, size):
        pair = make_pair(client=TINY, server=TINY)
        pair.client_reading = pair.server_reading = False
        stream = pair.client.open_stream(REQUEST)
        pair.client.send_messages(stream, [b"x" * size])
        pair.settle()
        (served,) = pair.server_streams
        assert served.take() == [b"x" * size]

    def test_one_waits_while_another_is_unread(self, make_pair):
        pair = make_pair(client=TINY)
        stream, served = pair.call()
        pair.client_reading = False
        pair.server.send_messages(served, [b"first", b"x" * 1000])
        pair.settle()
        assert (stream.messages, served.queued_bytes) == ([b"first"], 10 + 1005 - 64)
        assert stream.take() == [b"first"]
        stream.credit()
        pair.settle()
        assert stream.take() == [b"x" * 1000]

    def test_one_waits_while_another_is_taken_and_not_consumed(self, make_pair):
        pair = make_pair(client=TINY)
        stream, served = pair.call()
        pair.client_reading = False
        pair.server.send_messages(served, [b"first"])
        pair.settle()
        assert stream.take() == [b"first"]
        pair.server.send_messages(served, [b"x" * 1000])
        pair.settle()
        assert (stream.messages, served.queued_bytes) == ([], 10 + 1005 - 64)
        stream.credit()
        pair.settle()
        assert stream.take() == [b"x" * 1000]

    @pytest.mark.parametrize("how", ["unfinished", "consumed"])
    def test_what_was_received_under_a_larger_window_is_credited_when_ours_takes_effect(self, make_scripted, how):
        """Our small window holds from its ACK on; a peer that has overdrawn it by then must not wait for ever."""
        peer = make_scripted(Role.SERVER, settings=TINY, greet=False)
        peer.connection.receive(frames.PREFACE + frames.settings({}))
        (stream,) = peer.headers(1, REQUEST)
        peer.data(1, b"\0" + (5000 if how == "unfinished" else 995).to_bytes(4, "big") + b"x" * 995)
        stream.take()
        stream.credit()
        peer.output()
        peer.connection.receive(frames.SETTINGS_ACK)
        (update,) = peer.output()
        assert (update.kind, update.stream_id, update.payload) == (FrameType.WINDOW_UPDATE, 1, b"\0\0\x03\xe8")
        assert stream.receive_left == TINY.stream_window_bytes


class TestConnectionWindow:
    def test_unread_and_reset_streams_give_it_all_back(self, make_pair):
        """A connection whose streams are cancelled with data unread goes on (h2#1210, grpclib#67)."""
        pair = make_pair(client=NARROW)
        pair.client_reading = False
        survivor, served_survivor = pair.call()
        for round_ in range(300):
            stream, served = pair.call()
            pair.server.send_messages(served, [b"x" * 30_000])
            if round_ % 2:
                pair.settle()
            pair.client.reset(stream, ErrorCode.CANCEL)
            pair.settle()
        assert pair.server._outbox.window > 32_767
        pair.server.send_messages(served_survivor, [b"y" * 30_000])
        pair.settle()
        assert survivor.take() == [b"y" * 30_000]

    def test_data_of_refused_and_dead_streams_is_credited(self, make_scripted):
        peer = make_scripted(
            Role.SERVER, settings=Http2Settings(connection_window_bytes=65_535, max_concurrent_streams=1)
        )
        peer.headers(1, REQUEST)
        peer.headers(3, REQUEST)  # refused
        peer.output()
        for _ in range(3):
            peer.data(3, bytes(16_000))
        (update,) = peer.output()
        assert (update.kind, update.stream_id, update.payload) == (
            FrameType.WINDOW_UPDATE,
            0,
            (48_000).to_bytes(4, "big"),
        )

    def test_padding_is_credited_on_both(self, make_scripted):
        peer = make_scripted(Role.SERVER, settings=Http2Settings(connection_window_bytes=65_535))
        peer.headers(1, REQUEST)
        peer.output()
        for _ in range(128):
            peer.write(FrameType.DATA, frames.PADDED, 1, b"\xff" + bytes(255))
        updates = {frame.stream_id: int.from_bytes(frame.payload, "big") for frame in peer.output()}
        assert updates == {0: 128 * 256, 1: 128 * 256}

    def test_a_peer_that_overdraws_it_ends_the_connection(self, make_scripted):
        limits = Http2Settings(connection_window_bytes=65_535, stream_window_bytes=1 << 20)
        peer = make_scripted(Role.SERVER, settings=limits)
        peer.headers(1, REQUEST)
        peer.connection.receive(peer.frame(FrameType.DATA, 0, 1, bytes(16_000)) * 5)
        assert peer.connection.error.h2_code == ErrorCode.FLOW_CONTROL_ERROR


class TestStreamWindow:
    @pytest.mark.parametrize("whole", [False, True])
    def test_a_peer_that_overdraws_it_loses_the_stream_only(self, make_scripted, whole):
        peer = make_scripted(Role.SERVER, settings=TINY)
        (stream,) = peer.headers(1, REQUEST)
        (other,) = peer.headers(3, REQUEST)
        peer.data(1, join([b"x" * 30]))
        peer.data(1, join([b"x" * 25]) if whole else bytes(30))
        assert stream.failure.h2_code == ErrorCode.FLOW_CONTROL_ERROR
        assert (len(stream.messages), stream.closed, peer.connection.error) == (1, True, None)
        peer.data(3, join([b"x"]))
        assert other.messages == [b"x"]

    def test_a_window_may_be_used_to_its_last_byte(self, make_scripted):
        peer = make_scripted(Role.SERVER, settings=TINY)
        (stream,) = peer.headers(1, REQUEST)
        peer.data(1, join([b"x" * 59]))
        assert (stream.messages, stream.failure) == ([b"x" * 59], None)


@given(
    sizes=st.lists(st.lists(st.integers(0, 400), max_size=8), min_size=1, max_size=4),
    window=st.integers(1, 200),
    chunk=st.integers(1, 300),
    max_output=st.integers(1, 500),
)
@settings(deadline=None, max_examples=80)
def test_all_messages_arrive_in_order_whatever_the_windows(make_pair, sizes, window, chunk, max_output):
    limits = Http2Settings(stream_window_bytes=window)
    pair = make_pair(client=limits, server=limits, chunk=chunk, max_output=max_output)
    sent = {}
    for lengths in sizes:
        stream, served = pair.call([b"q" * length for length in lengths])
        messages = [bytes([length % 256]) * length for length in lengths]
        pair.server.send_messages(served, messages)
        sent[stream.id] = messages
    for served in pair.server_streams:
        pair.server.send_headers(served, [(b"grpc-status", b"0")], end_stream=True)
    pair.settle()
    for stream_id, messages in sent.items():
        assert pair.received.get((Role.CLIENT, stream_id), []) == messages
        assert [len(message) for message in pair.received[Role.SERVER, stream_id]] == [len(item) for item in messages]
    assert pair.client.open_streams == pair.server.open_streams == 0
    assert pair.client.error is pair.server.error is None
