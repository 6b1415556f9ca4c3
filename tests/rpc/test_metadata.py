"""gRPC's use of headers, as pure functions: what goes out comes back, and what a peer may send has a meaning."""

from __future__ import annotations

import math
from base64 import b64encode

import pytest
from grpclib.const import Status
from hypothesis import example, given
from hypothesis import strategies as st

from trio_router.http2.headers import check_request, check_trailers
from trio_router.rpc.metadata import (
    MAX_DETAILS_BYTES,
    MAX_MESSAGE_BYTES,
    Origin,
    decode_metadata,
    decode_timeout,
    encode_metadata,
    encode_timeout,
    get,
    not_grpc,
    outcome,
    request_headers,
    reset_outcome,
    response_headers,
    status_trailers,
)

KEYS = st.text("abcdefghijklmnopqrstuvwxyz0123456789_-.", min_size=1, max_size=12).map(lambda key: "x" + key)
TEXTS = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=40).map(str.strip)
PAIRS = st.lists(
    st.one_of(
        st.tuples(KEYS.filter(lambda key: not key.endswith("-bin")), TEXTS),
        st.tuples(KEYS.map(lambda key: key + "-bin"), st.binary(max_size=40)),
    ),
    max_size=8,
)
OK_HEADERS = response_headers()


class TestTimeouts:
    @given(st.floats(min_value=0, max_value=99_999_999 * 3600))
    @example(0.1)
    @example(99_999_999e-9)
    @example(100_000_000e-9)
    @example(0.07)
    def test_a_peer_never_gives_up_earlier_nor_much_later(self, seconds):
        read = decode_timeout(encode_timeout(seconds))
        assert read >= seconds * (1 - 1e-12)
        assert read <= seconds * (1 + 1e-4) + 1e-9

    @given(st.floats(allow_nan=True))
    def test_whatever_is_asked_for_goes_over_the_wire(self, seconds):
        encoded = encode_timeout(seconds)
        assert 2 <= len(encoded) <= 9
        assert decode_timeout(encoded) >= 0

    @pytest.mark.parametrize(
        ("seconds", "wire"),
        [
            (-1.0, b"0n"),
            (0.0, b"0n"),
            (-math.inf, b"0n"),
            (math.inf, b"99999999H"),
            (1e300, b"99999999H"),
            (5.0, b"5000000u"),
        ],
    )
    def test_the_ends_of_the_range(self, seconds, wire):
        assert encode_timeout(seconds) == wire

    @pytest.mark.parametrize("unit", "HMSmun")
    @given(number=st.integers(min_value=0, max_value=99_999_999))
    def test_every_unit_is_read(self, unit, number):
        scale = {"H": 3600, "M": 60, "S": 1, "m": 1e-3, "u": 1e-6, "n": 1e-9}[unit]
        assert decode_timeout(f"{number}{unit}".encode()) == pytest.approx(number * scale)

    @given(st.binary(max_size=12))
    @example(b"")
    @example(b"S")
    @example(b"123456789S")
    @example(b"+5S")
    @example("٣S".encode())
    def test_anything_else_is_refused(self, value):
        try:
            seconds = decode_timeout(value)
        except ValueError as exc:
            assert "grpc-timeout" in str(exc)  # noqa: PT017  # either outcome is fine, and the loop decides which
        else:
            assert value[:-1].isdigit()
            assert len(value) <= 9
            assert seconds >= 0


class TestUserMetadata:
    @given(PAIRS)
    def test_it_comes_back_as_it_went(self, pairs):
        encoded = encode_metadata(pairs)
        assert decode_metadata(encoded) == pairs
        assert check_trailers(encoded) is None

    @given(PAIRS)
    def test_a_request_with_it_is_well_formed_and_says_no_more(self, pairs):
        headers = request_headers("/a/b", authority="host:1", metadata=pairs, timeout=3)
        assert check_request(headers) is None
        assert decode_metadata(headers) == pairs

    @given(PAIRS)
    def test_a_binary_value_is_read_with_padding_too(self, pairs):
        padded = [
            (key.encode(), b64encode(value) if isinstance(value, bytes) else value.encode()) for key, value in pairs
        ]
        assert decode_metadata(padded) == pairs

    @given(st.lists(st.binary(max_size=20), min_size=1, max_size=4))
    def test_several_binary_values_may_come_as_one(self, values):
        joined = b",".join(b64encode(value).rstrip(b"=") for value in values)
        assert decode_metadata([(b"x-bin", joined)]) == [("x-bin", value) for value in values]

    @given(st.lists(st.tuples(st.binary(max_size=10), st.binary(max_size=10)), max_size=5))
    def test_whatever_a_peer_sends_is_read_without_an_error(self, headers):
        assert len(decode_metadata(headers)) <= sum(1 + value.count(b",") for _, value in headers)

    def test_keys_are_written_in_lower_case(self):
        assert encode_metadata({"X-Request-Id": "Ab"}) == [(b"x-request-id", b"Ab")]

    @pytest.mark.parametrize(
        "key", ["", "a b", "a:b", ":path", "grpc-status", "GRPC-Timeout", "te", "Content-Type", "ä", "a\n"]
    )
    def test_keys_that_are_not_the_users_are_refused(self, key):
        with pytest.raises(ValueError, match="metadata key"):
            encode_metadata([(key, "1")])

    def test_of_the_protocols_own_names_a_handler_may_set_when_to_come_back(self):
        sent = encode_metadata({"grpc-retry-pushback-ms": "250"})
        assert decode_metadata(sent) == [("grpc-retry-pushback-ms", "250")]

    @pytest.mark.parametrize("value", ["ä", "a\nb", "\x7f", "\x00", " a", "a ", " "])
    def test_values_that_are_not_printable_ascii_are_refused(self, value):
        with pytest.raises(ValueError, match="x-a"):
            encode_metadata({"x-a": value})

    @pytest.mark.parametrize(("key", "value"), [("x-a", b"1"), ("x-a-bin", "1"), ("x-a", 1), ("x-a-bin", None)])
    def test_values_of_the_wrong_type_are_refused(self, key, value):
        with pytest.raises(TypeError, match=key):
            encode_metadata({key: value})


class TestStatuses:
    @given(
        st.sampled_from([status for status in Status if status is not Status.OK]),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=300),
        st.binary(max_size=300),
        PAIRS,
    )
    def test_status_message_details_and_metadata_come_back(self, status, message, details, pairs):
        trailers = status_trailers(status, message, details=details, metadata=pairs)
        error = outcome(OK_HEADERS, trailers=trailers)
        assert error is not None
        assert (error.status, error.message or "", error.details or b"") == (status, message, details)
        assert error.origin is Origin.PEER
        assert decode_metadata(trailers) == pairs
        assert check_trailers(trailers) is None

    @given(st.text(max_size=6000))
    @example("x" * MAX_MESSAGE_BYTES)
    @example("x" * (MAX_MESSAGE_BYTES + 1))
    @example("😀" * 6000)
    @example("😀" * 255 + "x" * 6000)
    @example("lone \ud800 surrogate")
    def test_any_message_can_be_sent_and_is_cut_between_characters(self, message):
        trailers = status_trailers(Status.ABORTED, message)
        assert len(get(trailers, b"grpc-message") or b"") <= MAX_MESSAGE_BYTES
        error = outcome(OK_HEADERS, trailers=trailers)
        said, meant = error.message or "", message.encode(errors="replace").decode()
        assert said == meant or (said.endswith("…") and meant.startswith(said[:-1]) and len(said) > 200)

    def test_a_message_that_fits_exactly_is_not_cut(self):
        for length, cut in ((MAX_MESSAGE_BYTES, False), (MAX_MESSAGE_BYTES + 1, True)):
            error = outcome(OK_HEADERS, trailers=status_trailers(Status.ABORTED, "x" * length))
            assert error.message.endswith("…") is cut

    def test_details_are_sent_whole_or_not_at_all(self):
        for length in (MAX_DETAILS_BYTES, MAX_DETAILS_BYTES + 1):
            error = outcome(OK_HEADERS, trailers=status_trailers(Status.ABORTED, None, details=bytes(length)))
            assert error.details == (bytes(length) if length <= MAX_DETAILS_BYTES else None)

    @pytest.mark.parametrize(
        ("headers", "trailers", "status", "origin"),
        [
            (OK_HEADERS, [(b"grpc-status", b"0")], None, None),
            (OK_HEADERS, [(b"grpc-status", b"00")], None, None),
            (OK_HEADERS, [(b"grpc-status", b"5"), (b"grpc-status", b"0")], Status.NOT_FOUND, Origin.PEER),
            (OK_HEADERS, None, Status.INTERNAL, Origin.TRANSPORT),
            (None, None, Status.INTERNAL, Origin.TRANSPORT),
            (OK_HEADERS, [], Status.UNKNOWN, Origin.TRANSPORT),
            (OK_HEADERS, [(b"grpc-message", b"lost")], Status.UNKNOWN, Origin.TRANSPORT),
            (OK_HEADERS, [(b"grpc-status", b"17")], Status.UNKNOWN, Origin.PEER),
            (OK_HEADERS, [(b"grpc-status", b"-1")], Status.UNKNOWN, Origin.PEER),
            (OK_HEADERS, [(b"grpc-status", b"")], Status.UNKNOWN, Origin.PEER),
            (OK_HEADERS, [(b"grpc-status", b"five")], Status.UNKNOWN, Origin.PEER),
            (OK_HEADERS, [(b"grpc-status", b"9" * 5000)], Status.UNKNOWN, Origin.PEER),
            (OK_HEADERS, [(b"grpc-status", "٣".encode())], Status.UNKNOWN, Origin.PEER),
            ([(b":status", b"503")], None, Status.UNAVAILABLE, Origin.PEER),
            ([(b":status", b"503")], [(b"server", b"proxy")], Status.UNAVAILABLE, Origin.PEER),
            ([(b":status", b"404")], None, Status.UNIMPLEMENTED, Origin.PEER),
            ([(b":status", b"418")], None, Status.UNKNOWN, Origin.PEER),
            # A gRPC status says more than the HTTP one; but an HTTP failure is never a success.
            ([(b":status", b"503")], [(b"grpc-status", b"5")], Status.NOT_FOUND, Origin.PEER),
            ([(b":status", b"503")], [(b"grpc-status", b"0")], Status.UNAVAILABLE, Origin.PEER),
        ],
    )
    def test_what_a_peers_end_means(self, headers, trailers, status, origin):
        error = outcome(headers, trailers=trailers)
        assert (error and error.status, error and error.origin) == (status, origin)

    @given(
        st.lists(
            st.tuples(
                st.sampled_from([b"grpc-status", b"grpc-message", b"grpc-status-details-bin"]), st.binary(max_size=12)
            )
        )
    )
    def test_odd_trailers_are_read_without_an_error(self, trailers):
        error = outcome(OK_HEADERS, trailers=trailers)
        assert error is not None or int(get(trailers, b"grpc-status")) == 0

    @pytest.mark.parametrize(
        ("code", "refused", "status", "origin"),
        [
            (0, False, Status.INTERNAL, Origin.TRANSPORT),
            (2, False, Status.INTERNAL, Origin.TRANSPORT),
            (7, True, Status.UNAVAILABLE, Origin.REFUSED),
            (7, False, Status.UNAVAILABLE, Origin.TRANSPORT),
            (8, False, Status.CANCELLED, Origin.TRANSPORT),
            (11, False, Status.RESOURCE_EXHAUSTED, Origin.TRANSPORT),
            (12, False, Status.PERMISSION_DENIED, Origin.TRANSPORT),
            (4_000_000_000, False, Status.INTERNAL, Origin.TRANSPORT),
        ],
    )
    def test_what_a_reset_means(self, code, refused, status, origin):
        error = reset_outcome(code, refused=refused)
        assert (error.status, error.origin) == (status, origin)
        assert str(code) in error.message

    def test_only_other_http_statuses_are_not_grpc(self):
        assert not_grpc(None) is None
        assert not_grpc(OK_HEADERS) is None
        assert "HTTP 502" in str(not_grpc([(b":status", b"502")]))
