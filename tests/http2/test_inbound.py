"""A peer that writes any frames it likes: what each wrong one costs, and whom."""

from __future__ import annotations

import pytest

from trio_router.errors import ProtocolViolation, TooLarge
from trio_router.http2 import Connection, ErrorCode, Http2Settings, Role, frames
from trio_router.http2.frames import FrameType
from trio_router.http2.framing import join

REQUEST = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/test/Method")]
RESPONSE = [(b":status", b"200")]
TRAILERS = [(b"grpc-status", b"0")]
BOTH = list(Role)


def receiving(peer):
    """Stream 1 in the state where messages may come."""
    if peer.connection._core.role is Role.SERVER:
        (stream,) = peer.headers(1, REQUEST)
    else:
        stream = peer.connection.open_stream(REQUEST)
        peer.headers(1, RESPONSE)
    peer.output()
    return stream


class TestConnectionErrors:
    @pytest.mark.parametrize("role", BOTH)
    @pytest.mark.parametrize(
        ("kind", "flags", "stream_id", "payload", "code"),
        [
            (FrameType.DATA, 0, 0, b"x", ErrorCode.PROTOCOL_ERROR),
            (FrameType.HEADERS, 4, 0, b"", ErrorCode.PROTOCOL_ERROR),
            (FrameType.PRIORITY, 0, 0, bytes(5), ErrorCode.PROTOCOL_ERROR),
            (FrameType.RST_STREAM, 0, 0, bytes(4), ErrorCode.PROTOCOL_ERROR),
            (FrameType.SETTINGS, 0, 1, b"", ErrorCode.PROTOCOL_ERROR),
            (FrameType.PING, 0, 1, bytes(8), ErrorCode.PROTOCOL_ERROR),
            (FrameType.GOAWAY, 0, 1, bytes(8), ErrorCode.PROTOCOL_ERROR),
            (FrameType.CONTINUATION, 4, 0, b"", ErrorCode.PROTOCOL_ERROR),
            (FrameType.CONTINUATION, 4, 1, b"", ErrorCode.PROTOCOL_ERROR),
            (FrameType.WINDOW_UPDATE, 0, 0, bytes(4), ErrorCode.PROTOCOL_ERROR),
            (FrameType.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff", ErrorCode.FLOW_CONTROL_ERROR),
            (FrameType.WINDOW_UPDATE, 0, 0, bytes(3), ErrorCode.FRAME_SIZE_ERROR),
            (FrameType.WINDOW_UPDATE, 0, 1, bytes(5), ErrorCode.FRAME_SIZE_ERROR),
            (FrameType.RST_STREAM, 0, 1, bytes(3), ErrorCode.FRAME_SIZE_ERROR),
            (FrameType.PING, 0, 0, bytes(7), ErrorCode.FRAME_SIZE_ERROR),
            (FrameType.GOAWAY, 0, 0, bytes(7), ErrorCode.FRAME_SIZE_ERROR),
            (FrameType.SETTINGS, 0, 0, bytes(5), ErrorCode.FRAME_SIZE_ERROR),
            (FrameType.SETTINGS, 1, 0, bytes(6), ErrorCode.FRAME_SIZE_ERROR),
            (FrameType.SETTINGS, 0, 0, b"\0\x04\xff\xff\xff\xff", ErrorCode.FLOW_CONTROL_ERROR),
            (FrameType.SETTINGS, 0, 0, b"\0\x05\0\0\0\0", ErrorCode.PROTOCOL_ERROR),
            (FrameType.DATA, 8, 1, b"\x05abc", ErrorCode.PROTOCOL_ERROR),
            (FrameType.DATA, 8, 1, b"", ErrorCode.PROTOCOL_ERROR),
            (FrameType.HEADERS, 4 | 32, 1, b"abcd", ErrorCode.FRAME_SIZE_ERROR),
            (FrameType.HEADERS, 4, 1, b"\xff\xff\xff\xff", ErrorCode.COMPRESSION_ERROR),
            # Also for a stream that is gone: the compression state is shared.
            (FrameType.HEADERS, 4, 3, b"\xff\xff\xff\xff", ErrorCode.COMPRESSION_ERROR),
            (FrameType.DATA, 0, 1, bytes(16_385), ErrorCode.FRAME_SIZE_ERROR),
            (77, 0, 1, bytes(16_385), ErrorCode.FRAME_SIZE_ERROR),
        ],
    )
    def test_a_malformed_frame_ends_the_connection_with_its_code(
        self, make_scripted, role, kind, flags, stream_id, payload, code
    ):
        peer = make_scripted(role)
        stream = receiving(peer)
        touched = peer.write(kind, flags, stream_id, payload)
        assert peer.connection.error.h2_code == code
        assert touched == [stream]
        assert (stream.lost, stream.closed, stream.failure) == (True, True, None)
        (goaway,) = peer.output()
        assert goaway.kind == FrameType.GOAWAY
        assert goaway.payload[4:8] == int(code).to_bytes(4, "big")
        assert int.from_bytes(goaway.payload[:4], "big") == (1 if role is Role.SERVER else 0)
        # Deaf and idle from now on.
        assert peer.write(FrameType.PING, payload=bytes(8)) == []
        assert peer.output() == []
        assert not peer.connection.can_open

    def test_what_came_before_the_error_is_delivered(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        stream = receiving(peer)
        good = peer.frame(FrameType.DATA, 0, 1, join([b"good"]))
        bad = peer.frame(FrameType.PING, 0, 0, b"short")
        assert peer.connection.receive(good + bad + good) == [stream]
        assert (stream.take(), stream.lost) == ([b"good"], True)

    def test_the_first_frame_must_be_settings(self):
        for first in (frames.ping(bytes(8), ack=False), frames.SETTINGS_ACK, frames.window_update(0, 1)):
            client = Connection(Role.CLIENT)
            client.receive(first)
            assert client.error.h2_code == ErrorCode.PROTOCOL_ERROR

    def test_a_client_may_not_open_even_streams(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        peer.headers(2, REQUEST)
        assert peer.connection.error.h2_code == ErrorCode.PROTOCOL_ERROR

    @pytest.mark.parametrize("role", BOTH)
    def test_streams_of_the_other_parity_are_idle_for_ever(self, make_scripted, role):
        peer = make_scripted(role)
        receiving(peer)
        if role is Role.SERVER:
            peer.headers(3, REQUEST)
        else:
            peer.connection.open_stream(REQUEST)
        peer.data(2, b"x")
        assert peer.connection.error.h2_code == ErrorCode.PROTOCOL_ERROR

    def test_a_servers_enable_push(self, make_scripted):
        peer = make_scripted(Role.CLIENT)
        peer.connection.receive(frames.settings({2: 1}))
        assert peer.connection.error.h2_code == ErrorCode.PROTOCOL_ERROR

    def test_the_reserved_bit_of_a_stream_id_is_ignored(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        stream = receiving(peer)
        peer.data(1 | 1 << 31, join([b"x"]))
        assert stream.messages == [b"x"]

    @pytest.mark.parametrize("role", BOTH)
    def test_unknown_frames_and_flags_are_ignored(self, make_scripted, role):
        peer = make_scripted(role)
        stream = receiving(peer)
        assert peer.write(200, 255, 1, b"anything") == []
        assert peer.write(200, 255, 99, b"anything") == []
        peer.write(FrameType.DATA, 0xF6, 1, join([b"x"]))
        assert (stream.messages, peer.connection.error) == ([b"x"], None)


class TestPreface:
    def test_it_may_come_in_pieces(self):
        server = Connection(Role.SERVER)
        for byte in frames.PREFACE + frames.settings({}):
            assert not server.greeted
            server.receive(bytes([byte]))
        assert server.error is None
        assert server.greeted

    @pytest.mark.parametrize(
        ("start", "what"),
        [
            (b"G", "no connection preface"),
            (b"GET / HTTP/1.1\r\n", "an HTTP/1 request"),
            (b"POST /v1/chat/completions HTTP/1.1\r\n", "an HTTP/1 request"),
            (b"PRI * HTTP/1", "no connection preface"),
            (frames.PREFACE[:-1] + b"x", "no connection preface"),
            (b"\x16\x03\x01", "a TLS handshake"),
        ],
    )
    def test_anything_else_is_refused_at_its_first_wrong_byte(self, start, what):
        server = Connection(Role.SERVER)
        server.receive(start)
        assert (server.error.h2_code, server.error.message.endswith(f"the first bytes are {what}")) == (1, True)
        assert server.take_output().endswith(server.error.message.encode())

    def test_a_server_that_speaks_http_1_is_recognised(self):
        client = Connection(Role.CLIENT)
        client.receive(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        assert (client.error.h2_code, client.error.message) == (13, "the peer answered in HTTP/1")


class TestHeaderBlocks:
    @pytest.mark.parametrize("pieces", [2, 3, 7])
    def test_continuations_are_joined(self, make_scripted, pieces):
        peer = make_scripted(Role.SERVER)
        block = peer.encoder.encode(REQUEST)
        cuts = [block[start::pieces] for start in range(pieces)]
        cuts = [block[len(block) * at // pieces : len(block) * (at + 1) // pieces] for at in range(pieces)]
        assert peer.write(FrameType.HEADERS, frames.END_STREAM, 1, cuts[0]) == []
        for piece in cuts[1:-1]:
            assert peer.write(FrameType.CONTINUATION, 0, 1, piece) == []
        (stream,) = peer.write(FrameType.CONTINUATION, frames.END_HEADERS, 1, cuts[-1])
        assert (stream.headers, stream.remote_ended) == (REQUEST, True)

    @pytest.mark.parametrize(
        ("kind", "stream_id", "payload"),
        [
            (FrameType.DATA, 1, join([b"x"])),
            (FrameType.PING, 0, bytes(8)),
            (FrameType.CONTINUATION, 3, b""),
            (FrameType.HEADERS, 3, b""),
            (99, 1, b""),
        ],
    )
    def test_nothing_may_come_between(self, make_scripted, kind, stream_id, payload):
        peer = make_scripted(Role.SERVER)
        stream = receiving(peer)
        peer.write(FrameType.HEADERS, frames.END_STREAM, 1, b"")
        peer.write(kind, 0, stream_id, payload)
        assert peer.connection.error.h2_code == ErrorCode.PROTOCOL_ERROR
        assert stream.messages == []

    def test_messages_go_on_behind_a_block(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        stream = receiving(peer)
        block = peer.encoder.encode(REQUEST)
        peer.write(FrameType.HEADERS, 0, 3, block[:2])
        peer.write(FrameType.CONTINUATION, frames.END_HEADERS, 3, block[2:])
        peer.data(1, join([b"x"]))
        assert stream.messages == [b"x"]

    @pytest.mark.parametrize("fragment", [b"", b"x" * 1000])
    def test_a_flood_of_continuations_ends_with_calm(self, make_scripted, fragment):
        peer = make_scripted(Role.SERVER)
        peer.write(FrameType.HEADERS, 0, 1, b"")
        for _ in range(100):
            peer.write(FrameType.CONTINUATION, 0, 1, fragment)
        assert peer.connection.error.h2_code == ErrorCode.ENHANCE_YOUR_CALM

    def test_padded_headers_with_priority(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        block = peer.encoder.encode(REQUEST)
        flags = frames.END_HEADERS | frames.PADDED | frames.PRIORITY
        (stream,) = peer.write(FrameType.HEADERS, flags, 1, b"\x03" + bytes(5) + block + bytes(3))
        assert stream.headers == REQUEST


class TestRequests:
    @pytest.mark.parametrize(
        ("headers", "code"),
        [
            (REQUEST[1:], ErrorCode.PROTOCOL_ERROR),
            ([*REQUEST, (b"Upper", b"x")], ErrorCode.PROTOCOL_ERROR),
            ([*REQUEST, (b"connection", b"close")], ErrorCode.PROTOCOL_ERROR),
            ([*REQUEST, (b"big", b"x" * 5000)], ErrorCode.ENHANCE_YOUR_CALM),
        ],
    )
    def test_a_bad_request_is_reset_and_never_seen(self, make_scripted, headers, code):
        peer = make_scripted(Role.SERVER, settings=Http2Settings(max_header_list_bytes=4096))
        assert peer.headers(1, headers) == []
        (reset,) = peer.output()
        assert (reset.kind, reset.payload) == (FrameType.RST_STREAM, int(code).to_bytes(4, "big"))
        # The connection and its compression state are as before.
        (stream,) = peer.headers(3, REQUEST)
        assert stream.headers == REQUEST
        assert peer.data(1, join([b"late"])) == []
        assert peer.connection.error is None

    def test_other_methods_are_left_to_the_user(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        (stream,) = peer.headers(1, [(b":method", b"GET"), *REQUEST[1:]], end=True)
        assert stream.headers[0] == (b":method", b"GET")

    def test_skipped_ids_are_closed(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        peer.headers(7, REQUEST)
        assert peer.headers(3, TRAILERS, end=True) == []
        assert peer.data(5, b"") == []
        assert peer.connection.error is None
        assert peer.connection.open_streams == 1
        peer.headers(3, REQUEST)
        assert peer.connection.error.h2_code == ErrorCode.PROTOCOL_ERROR


class TestResponses:
    def test_informational_headers_are_skipped(self, make_scripted):
        peer = make_scripted(Role.CLIENT)
        stream = peer.connection.open_stream(REQUEST)
        assert peer.headers(1, [(b":status", b"100")]) == []
        assert peer.headers(1, [(b":status", b"103"), (b"link", b"x")]) == []
        assert stream.headers is None
        assert peer.headers(1, RESPONSE) == [stream]
        assert stream.headers == RESPONSE

    @pytest.mark.parametrize(
        ("headers", "end"),
        [
            ([(b"grpc-status", b"0")], False),
            ([(b":status", b"101")], True),
            ([(b":status", b"100")], True),
            ([(b":status", b"200"), (b":path", b"/")], False),
        ],
    )
    def test_a_malformed_response_fails_its_stream_only(self, make_scripted, headers, end):
        peer = make_scripted(Role.CLIENT)
        stream, other = peer.connection.open_stream(REQUEST), peer.connection.open_stream(REQUEST)
        peer.output()
        assert peer.headers(1, headers, end=end) == [stream]
        assert isinstance(stream.failure, ProtocolViolation)
        assert (stream.closed, stream.headers) == (True, None)
        assert [frame.kind for frame in peer.output()] == [FrameType.RST_STREAM]
        peer.headers(3, RESPONSE)
        assert (other.headers, other.failure) == (RESPONSE, None)

    def test_malformed_trailers(self, make_scripted):
        peer = make_scripted(Role.CLIENT)
        stream = receiving(peer)
        peer.headers(1, [*TRAILERS, (b":status", b"200")], end=True)
        assert isinstance(stream.failure, ProtocolViolation)

    def test_an_oversized_list_names_the_limit(self, make_scripted):
        peer = make_scripted(Role.CLIENT, settings=Http2Settings(max_header_list_bytes=1000))
        stream = peer.connection.open_stream(REQUEST)
        peer.output()
        peer.headers(1, [*RESPONSE, (b"big", b"x" * 1000)])
        assert isinstance(stream.failure, TooLarge)
        assert "max_header_list_bytes (1000)" in stream.failure.message
        assert peer.output()[0].payload == b"\0\0\0\x0b"

    @pytest.mark.parametrize("with_messages", [False, True])
    def test_a_refusal_may_be_repeated_only_before_the_response(self, make_scripted, with_messages):
        peer = make_scripted(Role.CLIENT)
        stream = peer.connection.open_stream(REQUEST)
        if with_messages:
            peer.headers(1, RESPONSE)
        peer.write(FrameType.RST_STREAM, 0, 1, b"\0\0\0\x07")
        assert (stream.reset_code, stream.refused) == (7, not with_messages)

    def test_a_reset_behind_the_end_changes_nothing(self, make_scripted):
        peer = make_scripted(Role.CLIENT)
        stream = receiving(peer)
        peer.headers(1, TRAILERS, end=True)
        assert peer.write(FrameType.RST_STREAM, 0, 1, bytes(4)) == []
        assert (stream.remote_ended, stream.reset_code, stream.trailers) == (True, None, TRAILERS)


class TestMessages:
    @pytest.mark.parametrize("role", BOTH)
    @pytest.mark.parametrize("cut", [1, 5, 7])
    def test_the_end_inside_a_message_fails_the_stream(self, make_scripted, role, cut):
        peer = make_scripted(role)
        stream = receiving(peer)
        peer.data(1, join([b"whole", b"torn"])[: 10 + cut], end=True)
        assert stream.messages == [b"whole"]
        assert (stream.failure.message, stream.closed) == ("the stream ended inside a message", role is Role.CLIENT)
        assert [frame.payload for frame in peer.output()] == [b"\0\0\0\x01"] * (role is Role.CLIENT)

    def test_trailers_inside_a_message_are_kept_beside_the_failure(self, make_scripted):
        peer = make_scripted(Role.CLIENT)
        stream = receiving(peer)
        peer.data(1, b"\0\0\0\0\x09half")
        peer.headers(1, [(b"grpc-status", b"13")], end=True)
        assert stream.failure is not None
        assert stream.trailers == [(b"grpc-status", b"13")]

    @pytest.mark.parametrize("role", BOTH)
    @pytest.mark.parametrize("alone", [False, True])
    def test_a_compressed_message_fails_the_stream(self, make_scripted, role, alone):
        peer = make_scripted(role)
        stream = receiving(peer)
        peer.data(1, (b"" if alone else join([b"good"])) + b"\x01\0\0\0\x02hi")
        assert "identity" in stream.failure.message
        assert stream.messages == ([] if alone else [b"good"])
        assert stream.closed is (role is Role.CLIENT)
        assert peer.connection.error is None

    @pytest.mark.parametrize("size", [101, 16_000, 2**32 - 1])
    def test_a_message_over_the_limit_fails_the_stream_before_it_is_kept(self, make_scripted, size):
        peer = make_scripted(Role.SERVER, settings=Http2Settings(max_message_bytes=100))
        stream = receiving(peer)
        peer.data(1, b"\0" + size.to_bytes(4, "big") + b"x" * min(size, 16_000))
        assert isinstance(stream.failure, TooLarge)
        assert stream.failure.message == f"gRPC message of {size} bytes is over max_message_bytes (100)"
        assert (stream.messages, stream.closed) == ([], False)
        assert peer.output() == []

    def test_a_client_gives_such_a_response_up(self, make_scripted):
        peer = make_scripted(Role.CLIENT, settings=Http2Settings(max_message_bytes=100))
        stream = receiving(peer)
        peer.data(1, join([b"x" * 101]))
        assert isinstance(stream.failure, TooLarge)
        assert stream.closed
        assert [frame.payload for frame in peer.output()] == [b"\0\0\0\x0b"]

    @pytest.mark.parametrize("ended", [False, True])
    def test_a_server_can_say_what_was_wrong_with_a_message(self, make_scripted, ended):
        peer = make_scripted(Role.SERVER, settings=Http2Settings(max_message_bytes=100))
        stream = receiving(peer)
        peer.data(1, join([b"good", b"x" * 101]), end=ended)
        assert (stream.remote_ended, stream.closed) == (False, False)
        # What follows is no message, however much it looks like one; the connection's credit for it comes back.
        for _ in range(3):
            assert peer.data(1, join([b"more"])) == []
        assert peer.data(1, b"", end=True) == []
        assert peer.headers(1, TRAILERS, end=True) == []
        assert stream.messages == [b"good"]
        assert peer.connection._core.uncredited == len(join([b"good", b"x" * 101])) + 3 * len(join([b"more"]))
        peer.connection.send_headers(stream, [*RESPONSE, *TRAILERS], end_stream=True)
        assert [frame.kind for frame in peer.output()] == [FrameType.HEADERS, FrameType.RST_STREAM]
        assert stream.closed

    def test_a_client_may_give_up_waiting_for_that(self, make_scripted):
        peer = make_scripted(Role.SERVER, settings=Http2Settings(max_message_bytes=100))
        stream = receiving(peer)
        peer.data(1, join([b"x" * 101]))
        assert peer.write(FrameType.RST_STREAM, 0, 1, b"\0\0\0\x08") == [stream]
        assert (stream.closed, stream.reset_code) == (True, 8)

    def test_a_message_of_the_limit_passes(self, make_scripted):
        peer = make_scripted(Role.SERVER, settings=Http2Settings(max_message_bytes=100))
        stream = receiving(peer)
        peer.data(1, join([b"x" * 100]))
        assert stream.messages == [b"x" * 100]

    def test_the_rest_of_a_message_may_look_like_a_whole_one(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        stream = receiving(peer)
        whole = join([b"a message"])
        for piece in (join([whole])[:5], whole, whole):
            peer.data(1, piece)
        assert stream.messages == [whole, b"a message"]

    def test_no_reset_for_a_stream_that_both_ends_have_ended(self, make_scripted):
        peer = make_scripted(Role.CLIENT)
        stream = receiving(peer)
        peer.connection.end_stream(stream)
        peer.output()
        peer.data(1, b"\0\0", end=True)
        assert stream.failure is not None
        assert peer.output() == []

    @pytest.mark.parametrize("padding", [0, 1, 255])
    def test_padding_is_no_part_of_a_message(self, make_scripted, padding):
        peer = make_scripted(Role.SERVER)
        stream = receiving(peer)
        for piece in (join([b"padded"])[:6], join([b"padded"])[6:]):
            peer.write(FrameType.DATA, frames.PADDED, 1, bytes([padding]) + piece + bytes(padding))
        assert stream.messages == [b"padded"]

    def test_a_message_with_the_end_in_one_frame(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        stream = receiving(peer)
        peer.data(1, join([b"only"]), end=True)
        assert (stream.messages, stream.remote_ended, stream.closed) == ([b"only"], True, False)


class TestSettings:
    def test_each_settings_frame_is_acknowledged(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        peer.connection.receive(frames.settings({3: 5}) * 2)
        assert [(frame.kind, frame.flags) for frame in peer.output()] == [(FrameType.SETTINGS, frames.ACK)] * 2

    def test_a_lower_stream_limit_holds_for_the_next_stream(self, make_scripted):
        peer = make_scripted(Role.CLIENT)
        peer.connection.open_stream(REQUEST)
        peer.connection.receive(frames.settings({3: 1}))
        assert not peer.connection.can_open
        peer.connection.receive(frames.settings({3: 2}))
        assert peer.connection.can_open
        # A frame that does not mention it leaves it alone.
        peer.connection.open_stream(REQUEST)
        peer.connection.receive(frames.settings({}))
        assert not peer.connection.can_open

    def test_a_smaller_header_table_is_obeyed(self, make_scripted):
        peer = make_scripted(Role.CLIENT)
        peer.connection.receive(frames.settings({1: 0}))
        peer.decoder.max_allowed_table_size = 0
        for _ in range(2):
            peer.connection.open_stream([*REQUEST, (b"again", b"again")])
        for frame in peer.output():
            if frame.kind == FrameType.HEADERS:
                assert list(peer.decoder.decode(frame.payload, raw=True))[-1] == (b"again", b"again")

    def test_our_stream_window_holds_from_its_acknowledgement_on(self, make_scripted):
        peer = make_scripted(Role.SERVER, settings=Http2Settings.for_test(), greet=False)
        peer.connection.receive(frames.PREFACE + frames.settings({}))
        stream = receiving(peer)
        peer.data(1, join([b"x" * 1000]))  # the peer has not seen our settings yet
        assert stream.failure is None
        peer.connection.receive(frames.SETTINGS_ACK)
        stream.take()
        stream.credit()
        peer.data(1, join([b"x" * 59]))
        assert stream.failure is None
        peer.data(1, b"\0")
        assert stream.failure.h2_code == ErrorCode.FLOW_CONTROL_ERROR

    @pytest.mark.parametrize("delta", [0, 1])
    def test_a_window_over_the_limit(self, make_scripted, delta):
        peer = make_scripted(Role.CLIENT)
        stream = peer.connection.open_stream(REQUEST)
        peer.write(FrameType.WINDOW_UPDATE, 0, 1, (2**31 - 1 - 65_535).to_bytes(4, "big"))
        assert stream.send_window == 2**31 - 1
        peer.connection.receive(frames.settings({4: 65_535 + delta}))
        if delta:
            assert peer.connection.error.h2_code == ErrorCode.FLOW_CONTROL_ERROR
        else:
            assert peer.connection.error is None

    @pytest.mark.parametrize(("increment", "code"), [(0, 1), (2**31 - 1, 3)])
    def test_a_bad_stream_increment_fails_its_stream_only(self, make_scripted, increment, code):
        peer = make_scripted(Role.CLIENT)
        stream = receiving(peer)
        assert peer.write(FrameType.WINDOW_UPDATE, 0, 1, increment.to_bytes(4, "big")) == [stream]
        assert stream.failure.h2_code == code
        assert peer.connection.error is None
