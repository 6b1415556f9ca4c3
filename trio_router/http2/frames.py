"""The frame layer of RFC 9113 section 4 and 6: numbers, codes, and frames as bytes.

Responsible for how a frame looks. Must not know what a frame means to a stream or a connection: functions here
take and return plain values, and raise `ProtocolViolation` with the connection error code when a payload has the
wrong shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from struct import Struct
from typing import Final

from trio_router.errors import ProtocolViolation

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

FRAME_HEADER: Final = Struct(">IBI")  # (length << 8 | type), flags, stream id: 9 bytes in one call
MESSAGE_HEADER: Final = Struct(">IBIBI")  # a frame header and the gRPC prefix behind it: compressed flag, length
UINT32: Final = Struct(">I")

DEFAULT_WINDOW: Final = 65_535  # RFC 9113 6.9.2, of a stream before SETTINGS and of every connection
MAX_WINDOW: Final = 2**31 - 1
MAX_STREAM_ID: Final = 2**31 - 1
# The smallest value a peer may ask for (RFC 9113 6.5.2), and what we use whatever it allows: a larger frame would
# let one stream hold the connection longer, and gains nothing measurable at this size.
SEND_FRAME_BYTES: Final = 16_384

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITY: Final = 0x20


class FrameType(IntEnum):
    """Frame types that RFC 9113 section 6 defines; every other number is to be ignored (4.1)."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class ErrorCode(IntEnum):
    """RFC 9113 section 7. Peers may send codes that are not here, so a received code stays a plain int."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


SETTINGS_ACK: Final = FRAME_HEADER.pack(FrameType.SETTINGS, ACK, 0)


def data_header(stream_id: int, length: int, *, end_stream: bool) -> bytes:
    """The nine bytes before `length` bytes of DATA."""
    return FRAME_HEADER.pack(length << 8, END_STREAM if end_stream else 0, stream_id)


def header_frames(stream_id: int, block: bytes, *, end_stream: bool) -> bytes:
    """An encoded header block as HEADERS and, if it needs more frames, CONTINUATION behind it (6.2, 6.10)."""
    flags = END_STREAM if end_stream else 0
    if len(block) <= SEND_FRAME_BYTES:
        return FRAME_HEADER.pack(len(block) << 8 | FrameType.HEADERS, flags | END_HEADERS, stream_id) + block
    frames = bytearray()
    kind = FrameType.HEADERS
    for start in range(0, len(block), SEND_FRAME_BYTES):
        piece = block[start : start + SEND_FRAME_BYTES]
        if start + SEND_FRAME_BYTES >= len(block):
            flags |= END_HEADERS
        frames += FRAME_HEADER.pack(len(piece) << 8 | kind, flags, stream_id) + piece
        kind, flags = FrameType.CONTINUATION, 0
    return bytes(frames)


def rst_stream(stream_id: int, code: int) -> bytes:
    """RST_STREAM (6.4)."""
    return FRAME_HEADER.pack(4 << 8 | FrameType.RST_STREAM, 0, stream_id) + UINT32.pack(code)


def window_update(stream_id: int, increment: int) -> bytes:
    """WINDOW_UPDATE (6.9); stream 0 is the connection."""
    return FRAME_HEADER.pack(4 << 8 | FrameType.WINDOW_UPDATE, 0, stream_id) + UINT32.pack(increment)


def ping(payload: bytes, *, ack: bool) -> bytes:
    """PING (6.7) with its eight opaque bytes."""
    return FRAME_HEADER.pack(8 << 8 | FrameType.PING, ACK if ack else 0, 0) + payload


def settings(values: Mapping[int, int]) -> bytes:
    """SETTINGS (6.5) with the given identifiers and values, in order."""
    payload = b"".join(number.to_bytes(2, "big") + UINT32.pack(value) for number, value in values.items())
    return FRAME_HEADER.pack(len(payload) << 8 | FrameType.SETTINGS, 0, 0) + payload


def goaway(last_stream_id: int, code: int, debug: bytes) -> bytes:
    """GOAWAY (6.8)."""
    head = FRAME_HEADER.pack((8 + len(debug)) << 8 | FrameType.GOAWAY, 0, 0)
    return head + UINT32.pack(last_stream_id) + UINT32.pack(code) + debug


def without_padding(kind: FrameType, flags: int, payload: bytes) -> bytes:
    """The payload of DATA or HEADERS less its padding and the deprecated priority fields (6.1, 6.2)."""
    if flags & PADDED:
        if not payload or payload[0] >= len(payload):
            raise ProtocolViolation(f"{kind.name} frame of {len(payload)} bytes is all padding")
        payload = payload[1 : len(payload) - payload[0]]
    if kind is FrameType.HEADERS and flags & PRIORITY:
        if len(payload) < 5:
            raise ProtocolViolation(
                "HEADERS frame is too short for its priority fields", h2_code=ErrorCode.FRAME_SIZE_ERROR
            )
        payload = payload[5:]
    return payload


def exactly(kind: FrameType, payload: bytes, *, length: int) -> bytes:
    """`payload` if it has the one length its frame type allows, else FRAME_SIZE_ERROR."""
    if len(payload) != length:
        raise ProtocolViolation(
            f"{kind.name} frame of {len(payload)} bytes instead of {length}", h2_code=ErrorCode.FRAME_SIZE_ERROR
        )
    return payload
