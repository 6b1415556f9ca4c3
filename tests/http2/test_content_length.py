"""What a content-length promises must come, no more and no less."""

from __future__ import annotations

from typing import ClassVar

import pytest

from trio_router.http2 import ErrorCode, Role, frames
from trio_router.http2.frames import FrameType
from trio_router.http2.framing import join

REQUEST = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/test/Method")]
RESPONSE = [(b":status", b"200")]
TRAILERS = [(b"grpc-status", b"0")]
BOTH = list(Role)


class TestContentLength:
    """RFC 9113 8.1.1. gRPC has no use for it, but general clients and proxies send it."""

    WITH_SEVEN: ClassVar = {
        Role.SERVER: [*REQUEST, (b"content-length", b"7")],
        Role.CLIENT: [*RESPONSE, (b"content-length", b"7")],
    }

    def promised(self, make_scripted, role):
        """Stream 1, on which seven bytes of DATA are to come: one message of two bytes."""
        peer = make_scripted(role)
        if role is Role.CLIENT:
            peer.connection.open_stream(REQUEST)
        (stream,) = peer.headers(1, self.WITH_SEVEN[role])
        peer.output()
        return peer, stream

    @pytest.mark.parametrize("role", BOTH)
    @pytest.mark.parametrize("pieces", [[7], [1, 6], [7, 0], [3, 3, 1]])
    def test_what_adds_up_is_delivered(self, make_scripted, role, pieces):
        peer, stream = self.promised(make_scripted, role)
        body = join([b"ok"])
        for number, size in enumerate(pieces, 1):
            peer.data(1, body[:size], end=number == len(pieces))
            body = body[size:]
        assert (stream.messages, stream.remote_ended, stream.failure) == ([b"ok"], True, None)

    @pytest.mark.parametrize("role", BOTH)
    def test_padding_does_not_count(self, make_scripted, role):
        peer, stream = self.promised(make_scripted, role)
        peer.write(FrameType.DATA, frames.PADDED | frames.END_STREAM, 1, b"\x09" + join([b"ok"]) + bytes(9))
        assert (stream.messages, stream.failure) == ([b"ok"], None)

    @pytest.mark.parametrize("role", BOTH)
    @pytest.mark.parametrize(
        "bodies",
        [[join([b"too long"])], [join([b"ok"]), join([b""])], [join([b""])], [b""]],
        ids=["longer", "another", "shorter", "none"],
    )
    def test_what_does_not_fails_its_stream(self, make_scripted, role, bodies):
        peer, stream = self.promised(make_scripted, role)
        for number, body in enumerate(bodies, 1):
            peer.data(1, body, end=number == len(bodies))
        assert (stream.failure.h2_code, stream.closed) == (ErrorCode.PROTOCOL_ERROR, True)
        assert "content-length" in stream.failure.message
        assert [frame.kind for frame in peer.output()] == [FrameType.RST_STREAM]
        assert peer.connection.error is None

    @pytest.mark.parametrize("role", BOTH)
    def test_trailers_must_not_come_early(self, make_scripted, role):
        peer, stream = self.promised(make_scripted, role)
        peer.data(1, join([b""]))
        peer.headers(1, TRAILERS, end=True)
        assert "fewer bytes" in stream.failure.message

    def test_a_request_that_is_nothing_but_headers_promises_nothing(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        (stream,) = peer.headers(1, self.WITH_SEVEN[Role.SERVER], end=True)
        assert (stream.closed, stream.failure.h2_code) == (True, ErrorCode.PROTOCOL_ERROR)
        (stream,) = peer.headers(3, [*REQUEST, (b"content-length", b"0")], end=True)
        assert stream.failure is None

    @pytest.mark.parametrize("value", [b"", b"-1", b"+7", b"0x7", b"7, 7", b"7 7", b"1" * 19, b"\xd9\xa7"])
    def test_no_number(self, make_scripted, value):
        peer = make_scripted(Role.SERVER)
        assert peer.headers(1, [*REQUEST, (b"content-length", value)]) == []
        (reset,) = peer.output()
        assert (reset.kind, reset.payload) == (FrameType.RST_STREAM, b"\0\0\0\x01")

    def test_two_of_them(self, make_scripted):
        peer = make_scripted(Role.SERVER)
        assert peer.headers(1, [*self.WITH_SEVEN[Role.SERVER], (b"content-length", b"7")]) == []
