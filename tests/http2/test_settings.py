"""Settings: our own limits and the peer's."""

from __future__ import annotations

import pytest

from trio_router.errors import ConfigError, ProtocolViolation
from trio_router.http2.frames import ErrorCode
from trio_router.http2.settings import Http2Settings, parse_settings


def payload(*pairs: tuple[int, int]) -> bytes:
    return b"".join(number.to_bytes(2, "big") + value.to_bytes(4, "big") for number, value in pairs)


class TestOwn:
    def test_the_defaults_are_valid(self):
        assert Http2Settings() == Http2Settings()

    @pytest.mark.parametrize(
        "wrong",
        [
            {"stream_window_bytes": 0},
            {"stream_window_bytes": 2**31},
            {"connection_window_bytes": 65_534},
            {"max_message_bytes": 0},
            {"max_concurrent_streams": 0},
            {"max_header_list_bytes": 10},
            {"max_frame_bytes": 16_383},
            {"max_frame_bytes": 2**24},
        ],
    )
    def test_a_wrong_value_is_named(self, wrong):
        (name,) = wrong
        with pytest.raises(ConfigError, match=name):
            Http2Settings(**wrong)

    def test_the_test_profile_has_tiny_windows(self):
        assert Http2Settings.for_test().stream_window_bytes < 100


class TestPeers:
    def test_the_last_of_repeated_values_counts(self):
        assert parse_settings(payload((4, 1), (3, 7), (4, 2)), from_server=False) == {4: 2, 3: 7}

    def test_unknown_settings_pass(self):
        assert parse_settings(payload((0xBEEF, 9)), from_server=True) == {0xBEEF: 9}

    @pytest.mark.parametrize(
        ("pair", "code"),
        [
            ((2, 2), ErrorCode.PROTOCOL_ERROR),
            ((4, 2**31), ErrorCode.FLOW_CONTROL_ERROR),
            ((5, 16_383), ErrorCode.PROTOCOL_ERROR),
            ((5, 2**24), ErrorCode.PROTOCOL_ERROR),
        ],
    )
    def test_values_that_do_not_exist(self, pair, code):
        with pytest.raises(ProtocolViolation) as caught:
            # Even when a good value follows.
            parse_settings(payload(pair, (4, 1), (5, 16_384), (2, 0)), from_server=False)
        assert caught.value.h2_code == code

    @pytest.mark.parametrize(("value", "from_server", "fine"), [(0, True, True), (1, True, False), (1, False, True)])
    def test_only_a_client_may_enable_push(self, value, from_server, fine):
        if fine:
            assert parse_settings(payload((2, value)), from_server=from_server) == {2: value}
        else:
            with pytest.raises(ProtocolViolation):
                parse_settings(payload((2, value)), from_server=from_server)

    @pytest.mark.parametrize("size", [1, 5, 7])
    def test_a_torn_list(self, size):
        with pytest.raises(ProtocolViolation) as caught:
            parse_settings(bytes(size), from_server=True)
        assert caught.value.h2_code == ErrorCode.FRAME_SIZE_ERROR
