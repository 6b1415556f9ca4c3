"""What either side of a connection may ask of the other (RFC 9113 6.5), and our own limits.

Responsible for validating settings in both directions. Must not know streams: applying a changed value to them is the
connection's work.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from trio_router.errors import ConfigError, ProtocolViolation
from trio_router.http2.frames import DEFAULT_WINDOW, MAX_WINDOW, ErrorCode

MIN_FRAME_BYTES: Final = 16_384
MAX_FRAME_BYTES: Final = 2**24 - 1


class SettingId(IntEnum):
    """Settings of RFC 9113 6.5.2; other identifiers are ignored."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Http2Settings:
    """Limits that we put on our peer. Raises `ConfigError` when made with a value the protocol does not allow.

    `stream_window_bytes`: how much of one stream may wait here unread (besides one message).
    `connection_window_bytes`: how much may be in flight on a connection; credited on receipt, so it bounds
    bursts, not memory.
    `max_message_bytes`: a gRPC message above it fails its stream.
    `max_unfinished_bytes`: how much of messages larger than their window may be here unfinished or unread, on all
    streams of a connection; beyond it (and one message) further ones wait for their turn. So a connection holds at most
    max_concurrent_streams windows and this.
    `max_concurrent_streams`: what a server advertises and enforces.
    `max_header_list_bytes`: decoded size of one header list, counted as RFC 9113 6.5.2 does.
    `max_frame_bytes`: the largest frame we accept.
    """

    stream_window_bytes: int = 65_536
    connection_window_bytes: int = 16 * 1024 * 1024
    max_message_bytes: int = 64 * 1024 * 1024
    max_unfinished_bytes: int = 256 * 1024 * 1024
    max_concurrent_streams: int = 2048
    max_header_list_bytes: int = 16_384
    max_frame_bytes: int = MIN_FRAME_BYTES

    def __post_init__(self) -> None:
        bounds = {
            "stream_window_bytes": (1, MAX_WINDOW),
            "connection_window_bytes": (DEFAULT_WINDOW, MAX_WINDOW),
            "max_message_bytes": (1, 2**32 - 1),
            "max_unfinished_bytes": (0, 2**40),
            "max_concurrent_streams": (1, MAX_WINDOW),
            "max_header_list_bytes": (256, 2**24),
            "max_frame_bytes": (MIN_FRAME_BYTES, MAX_FRAME_BYTES),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"http2 {name} is {value}; it must be between {low} and {high}")

    @classmethod
    def for_test(cls) -> Http2Settings:
        """Windows so small that a unit test reaches every flow-control path; the connection's has a minimum."""
        return cls(
            stream_window_bytes=64,
            connection_window_bytes=DEFAULT_WINDOW,
            max_message_bytes=100_000,
            max_unfinished_bytes=1000,
            max_concurrent_streams=100,
            max_header_list_bytes=4096,
        )


@dataclass(slots=True, kw_only=True)
class PeerSettings:
    """What the peer allows us; the defaults are those of RFC 9113 6.5.2 before its first SETTINGS frame.

    `max_concurrent_streams` starts at 100, not unlimited: the protocol's own recommended minimum for a peer that
    has not spoken yet, so that a client's first burst is not answered with refusals.
    """

    max_concurrent_streams: int = 100
    initial_window: int = DEFAULT_WINDOW
    max_header_list_bytes: int | None = None


def parse_settings(payload: bytes, *, from_server: bool) -> dict[int, int]:
    """The last value of each identifier in a SETTINGS payload, every occurrence validated (6.5.2).

    Only the last matters for each: between two values of one frame nothing is sent, so applying both would be the
    same work twice, and a frame that repeats one setting 2,700 times would cost 2,700 passes over all streams.
    """
    if len(payload) % 6:
        raise ProtocolViolation(
            f"SETTINGS of {len(payload)} bytes is no list of pairs", h2_code=ErrorCode.FRAME_SIZE_ERROR
        )
    values: dict[int, int] = {}
    for start in range(0, len(payload), 6):
        number = int.from_bytes(payload[start : start + 2], "big")
        value = int.from_bytes(payload[start + 2 : start + 6], "big")
        _validate(number, value, from_server=from_server)
        values[number] = value
    return values


def _validate(number: int, value: int, *, from_server: bool) -> None:
    if number == SettingId.ENABLE_PUSH and value > (0 if from_server else 1):
        raise ProtocolViolation(f"ENABLE_PUSH is {value}")
    if number == SettingId.INITIAL_WINDOW_SIZE and value > MAX_WINDOW:
        raise ProtocolViolation(f"INITIAL_WINDOW_SIZE is {value}", h2_code=ErrorCode.FLOW_CONTROL_ERROR)
    if number == SettingId.MAX_FRAME_SIZE and not MIN_FRAME_BYTES <= value <= MAX_FRAME_BYTES:
        raise ProtocolViolation(f"MAX_FRAME_SIZE is {value}")
