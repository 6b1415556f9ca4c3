"""Frames as bytes, both ways."""

from __future__ import annotations

import hyperframe.frame
import pytest

from trio_router.errors import ProtocolViolation
from trio_router.http2 import frames
from trio_router.http2.frames import ErrorCode, FrameType


def foreign(data: bytes) -> hyperframe.frame.Frame:
    """The same bytes read by somebody else's parser."""
    parsed, length = hyperframe.frame.Frame.parse_frame_header(memoryview(data[:9]))
    parsed.parse_body(memoryview(data[9 : 9 + length]))
    assert len(data) == 9 + length
    return parsed


class TestBuilding:
    def test_reset(self):
        parsed = foreign(frames.rst_stream(7, ErrorCode.CANCEL))
        assert (parsed.stream_id, parsed.error_code) == (7, 8)

    def test_window_update(self):
        parsed = foreign(frames.window_update(0, 2**31 - 1))
        assert (parsed.stream_id, parsed.window_increment) == (0, 2**31 - 1)

    @pytest.mark.parametrize("ack", [False, True])
    def test_ping(self, ack):
        parsed = foreign(frames.ping(b"12345678", ack=ack))
        assert (parsed.opaque_data, "ACK" in parsed.flags) == (b"12345678", ack)

    def test_settings(self):
        assert foreign(frames.settings({4: 100, 2: 0})).settings == {4: 100, 2: 0}
        assert "ACK" in foreign(frames.SETTINGS_ACK).flags

    def test_goaway(self):
        parsed = foreign(frames.goaway(5, ErrorCode.ENHANCE_YOUR_CALM, b"why"))
        assert (parsed.last_stream_id, parsed.error_code, parsed.additional_data) == (5, 11, b"why")

    @pytest.mark.parametrize("end", [False, True])
    def test_data_header(self, end):
        parsed = foreign(frames.data_header(3, 4, end_stream=end) + b"abcd")
        assert (parsed.stream_id, parsed.data, "END_STREAM" in parsed.flags) == (3, b"abcd", end)


class TestHeaderFrames:
    def test_a_small_block_is_one_frame(self):
        parsed = foreign(frames.header_frames(1, b"block", end_stream=True))
        assert parsed.flags == {"END_HEADERS", "END_STREAM"}
        assert parsed.data == b"block"

    @pytest.mark.parametrize("size", [16_384, 16_385, 32_768, 40_000])
    def test_a_large_block_goes_on_in_continuations(self, size):
        block = bytes(range(256)) * (size // 256) + bytes(size % 256)
        data = frames.header_frames(1, block, end_stream=True)
        kinds, flags, rebuilt, at = [], [], b"", 0
        while at < len(data):
            word, flag, _stream_id = frames.FRAME_HEADER.unpack_from(data, at)
            kinds.append(word & 0xFF)
            flags.append(flag)
            rebuilt += data[at + 9 : at + 9 + (word >> 8)]
            at += 9 + (word >> 8)
        assert rebuilt == block
        assert kinds == [FrameType.HEADERS] + [FrameType.CONTINUATION] * (len(kinds) - 1)
        assert len(kinds) == -(-size // 16_384)
        assert [bool(flag & frames.END_HEADERS) for flag in flags] == [False] * (len(kinds) - 1) + [True]
        assert [bool(flag & frames.END_STREAM) for flag in flags] == [True] + [False] * (len(kinds) - 1)


class TestPadding:
    def test_nothing_to_strip(self):
        assert frames.without_padding(FrameType.DATA, 0, b"abc") == b"abc"

    @pytest.mark.parametrize(
        ("payload", "rest"), [(b"\x00abc", b"abc"), (b"\x02abc\0\0", b"abc"), (b"\x03\0\0\0", b""), (b"\x00", b"")]
    )
    def test_padding_is_stripped(self, payload, rest):
        assert frames.without_padding(FrameType.DATA, frames.PADDED, payload) == rest

    @pytest.mark.parametrize("payload", [b"", b"\x01", b"\x04abc", b"\xff" + bytes(254)])
    def test_more_padding_than_payload_is_an_error(self, payload):
        with pytest.raises(ProtocolViolation) as caught:
            frames.without_padding(FrameType.DATA, frames.PADDED, payload)
        assert caught.value.h2_code == ErrorCode.PROTOCOL_ERROR

    def test_priority_fields_are_stripped_from_headers_only(self):
        both = frames.PADDED | frames.PRIORITY
        assert frames.without_padding(FrameType.HEADERS, both, b"\x01" + b"prior" + b"block" + b"\0") == b"block"
        assert frames.without_padding(FrameType.DATA, frames.PRIORITY, b"prior") == b"prior"

    def test_headers_too_short_for_their_priority(self):
        with pytest.raises(ProtocolViolation) as caught:
            frames.without_padding(FrameType.HEADERS, frames.PRIORITY, b"1234")
        assert caught.value.h2_code == ErrorCode.FRAME_SIZE_ERROR


def test_a_frame_of_fixed_length_must_have_it():
    assert frames.exactly(FrameType.PING, bytes(8), length=8) == bytes(8)
    with pytest.raises(ProtocolViolation) as caught:
        frames.exactly(FrameType.PING, bytes(7), length=8)
    assert caught.value.h2_code == ErrorCode.FRAME_SIZE_ERROR
