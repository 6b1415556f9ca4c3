"""Header lists: bounds, compression state, and what is well-formed."""

from __future__ import annotations

from contextlib import suppress

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_router.errors import ProtocolViolation
from trio_router.http2.frames import ErrorCode
from trio_router.http2.headers import (
    MAX_CONTINUATIONS,
    MAX_REMEMBERED,
    MAX_REMEMBERED_BYTES,
    MAX_TABLE_UPDATES,
    HeaderBlock,
    HeaderDecoder,
    HeaderEncoder,
    check_request,
    check_response,
    check_size,
    check_trailers,
)

REQUEST = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/s/m")]
STATUS = [(b":status", b"200")]
# Few enough names and values that lists repeat, and large enough that the table overflows.
FIELDS = st.tuples(
    st.sampled_from([b"a", b"b", b"content-type", b"authorization"]),
    st.sampled_from([b"", b"1", b"2", b"x" * 1000, b"y" * 1500, b"z" * 5000]),
)
LISTS = st.lists(st.lists(FIELDS, max_size=3), min_size=1, max_size=12)


class TestEncoding:
    @given(st.lists(st.tuples(st.binary(min_size=1, max_size=20), st.binary(max_size=60)), max_size=8))
    def test_a_foreign_decoder_reads_it(self, headers):
        assert list(hpack.Decoder().decode(HeaderEncoder().encode(headers), raw=True)) == headers

    def test_secrets_and_values_that_never_repeat_stay_out_of_the_table(self):
        encoder, decoder = HeaderEncoder(), hpack.Decoder()
        decoder.decode(encoder.encode([(b"authorization", b"Bearer s3cret"), (b"grpc-timeout", b"99m")]), raw=True)
        assert not decoder.header_table.dynamic_entries
        decoder.decode(encoder.encode([(b"content-type", b"application/grpc")]), raw=True)
        assert len(decoder.header_table.dynamic_entries) == 1

    def test_a_table_limit_of_the_peer_is_announced_even_when_it_comes_twice(self):
        encoder, decoder = HeaderEncoder(), hpack.Decoder()
        decoder.decode(encoder.encode([(b"a", b"b")]), raw=True)
        encoder.limit_table(0)
        encoder.limit_table(0)
        decoder.max_allowed_table_size = 0  # raises below if the change was not announced
        assert list(decoder.decode(encoder.encode([(b"a", b"b")]), raw=True)) == [(b"a", b"b")]
        assert not decoder.header_table.dynamic_entries

    def test_a_larger_table_than_the_default_is_not_used(self):
        encoder, decoder = HeaderEncoder(), hpack.Decoder()
        encoder.limit_table(1 << 30)
        decoder.decode(encoder.encode([(b"a", b"b")]), raw=True)
        assert decoder.header_table_size == 4096

    def test_a_table_that_shrank_grows_again(self):
        encoder, decoder = HeaderEncoder(), hpack.Decoder()
        encoder.limit_table(100)
        encoder.limit_table(5000)
        for _ in range(2):
            assert list(decoder.decode(encoder.encode([(b"a", b"b")]), raw=True)) == [(b"a", b"b")]

    @given(
        lists=LISTS,
        limits=st.dictionaries(st.integers(0, 30), st.lists(st.sampled_from([0, 100, 2000, 4096, 9999]), max_size=4)),
    )
    def test_a_list_that_repeats_is_read_as_the_first_time_whatever_came_between(self, lists, limits):
        encoder, decoder = HeaderEncoder(), hpack.Decoder()
        for at, headers in enumerate(lists * 3):
            for limit in limits.get(at, ()):
                encoder.limit_table(limit)
                decoder.max_allowed_table_size = min(limit, 4096)  # raises below if this was not announced
            assert list(decoder.decode(encoder.encode(headers), raw=True)) == headers

    def test_a_list_that_repeats_is_not_searched_for_again(self, monkeypatch):
        encoder = HeaderEncoder()
        blocks = [encoder.encode(REQUEST) for _ in range(2)]
        monkeypatch.setattr(hpack.Encoder, "encode", None)
        assert encoder.encode(REQUEST) == blocks[1]

    def test_however_often_the_table_changes_two_sizes_are_announced(self):
        encoder = HeaderEncoder()
        plain = len(encoder.encode(REQUEST))
        for number in range(100_000):
            encoder.limit_table(number % 4096)
        assert len(encoder.encode(REQUEST)) <= plain + 2 * 3

    def test_what_is_remembered_is_bounded(self):
        encoder, decoder = HeaderEncoder(), HeaderDecoder(max_list_bytes=10_000)
        for number in range(1000):
            decoder.decode(hpack.Encoder().encode([(b"a", b"%d" % number, True)], huffman=False))
            encoder.encode([STATUS[0]] * number)
        assert len(encoder._blocks) <= MAX_REMEMBERED
        encoder.encode([(b"too-large-for-the-table", b"x" * 5000)])
        assert all(len(block) <= MAX_REMEMBERED_BYTES for block in encoder._blocks.values())
        assert len(decoder._lists) <= MAX_REMEMBERED


class TestDecoding:
    @given(lists=LISTS, limits=st.dictionaries(st.integers(0, 30), st.sampled_from([0, 100, 2000, 4096])))
    def test_a_block_that_repeats_means_what_it_does_to_others(self, lists, limits):
        encoder, decoder = hpack.Encoder(), HeaderDecoder(max_list_bytes=100_000)
        for at, headers in enumerate(lists * 3):
            if at in limits:
                encoder.header_table_size = limits[at]
            assert decoder.decode(encoder.encode(headers)) == headers

    def test_lists_of_one_block_share_nothing(self):
        block = hpack.Encoder().encode(STATUS)
        decoder = HeaderDecoder(max_list_bytes=1000)
        for _ in range(3):
            headers = decoder.decode(block)
            assert headers == STATUS
            headers.append((b"a", b"b"))

    def test_a_table_update_takes_effect_each_time(self):
        decoder = HeaderDecoder(max_list_bytes=1000)
        shrink, grow = b"\x20", b"\x3f\xe1\x1f"  # to 0, to 4096
        insert = b"\x40\x01a\x01b"
        for _ in range(3):
            assert decoder.decode(grow + insert) == [(b"a", b"b")]
            assert decoder.decode(b"\xbe") == [(b"a", b"b")]
            assert decoder.decode(shrink + b"\x88") == STATUS
            with pytest.raises(ProtocolViolation):
                decoder.decode(b"\xbe")

    def test_table_updates_are_bounded(self):
        """They decode to nothing, so the list's limit does not see them: 64 KiB of them took 0.16 s."""
        one, two = b"\x20", b"\x3f\xe1\x1f"
        for update in (one, two):
            decoder = HeaderDecoder(max_list_bytes=1000)
            assert decoder.decode(update * MAX_TABLE_UPDATES + b"\x88") == STATUS
            with pytest.raises(ProtocolViolation, match="table sizes") as caught:
                decoder.decode(update * (MAX_TABLE_UPDATES + 1) + b"\x88")
            assert caught.value.h2_code == ErrorCode.COMPRESSION_ERROR

    def test_an_error_says_nothing_about_our_memory(self):
        """hpack puts the address of its buffer into a message, and the debug text of a GOAWAY is for strangers."""
        with pytest.raises(ProtocolViolation) as caught:
            HeaderDecoder(max_list_bytes=1000).decode(b"\x10" + b"\xff" * 100)
        assert caught.value.message == "header block cannot be decoded: HPACKDecodingError"

    def test_garbage_is_a_compression_error(self):
        with pytest.raises(ProtocolViolation) as caught:
            HeaderDecoder(max_list_bytes=1000).decode(b"\xff\xff\xff")
        assert caught.value.h2_code == ErrorCode.COMPRESSION_ERROR

    @given(st.binary(max_size=60))
    def test_any_bytes_give_headers_or_the_declared_error(self, block):
        headers = []
        with suppress(ProtocolViolation):
            headers = HeaderDecoder(max_list_bytes=1000).decode(block)
        assert all(isinstance(part, bytes) for field in headers for part in field)

    def test_a_bomb_is_not_unpacked(self):
        # One large field in the table, then a reference to it per byte.
        block = hpack.Encoder().encode([(b"x", b"y" * 3000)], huffman=False) + b"\xbe" * 1000
        with pytest.raises(ProtocolViolation) as caught:
            HeaderDecoder(max_list_bytes=1000).decode(block)
        assert caught.value.h2_code == ErrorCode.ENHANCE_YOUR_CALM


class TestBlock:
    def test_fragments_are_joined(self):
        block = HeaderBlock(stream_id=1, end_stream=True, first=b"ab", max_list_bytes=1000)
        block.add(b"")
        block.add(b"cd")
        assert block.content() == b"abcd"

    def test_bytes_are_bounded(self):
        block = HeaderBlock(stream_id=1, end_stream=True, first=b"x" * 4000, max_list_bytes=1000)
        with pytest.raises(ProtocolViolation) as caught:
            block.add(b"x")
        assert caught.value.h2_code == ErrorCode.ENHANCE_YOUR_CALM

    def test_frames_are_bounded(self):
        block = HeaderBlock(stream_id=1, end_stream=True, first=b"", max_list_bytes=1000)
        for _ in range(MAX_CONTINUATIONS):
            block.add(b"")
        with pytest.raises(ProtocolViolation):
            block.add(b"")


def test_size_counts_as_the_rfc_does():
    headers = [(b"ab", b"cde")] * 2
    assert check_size(headers, limit=74) is None
    assert "74 bytes is over max_header_list_bytes (73)" in str(check_size(headers, limit=73))


class TestWellFormed:
    def test_the_usual(self):
        assert check_request([*REQUEST, (b":authority", b"x"), (b"te", b"trailers"), (b"a-bin", b"AAE=")]) is None
        assert check_request([(b":method", b"GET"), *REQUEST[1:]]) is None
        assert check_response([*STATUS, (b"content-type", b"application/grpc")]) is None
        assert check_trailers([(b"grpc-status", b"0"), (b"grpc-message", b" spaces stay ")]) is None

    @pytest.mark.parametrize("missing", [0, 1, 2])
    def test_a_request_needs_its_three_fields(self, missing):
        headers = [field for at, field in enumerate(REQUEST) if at != missing]
        assert REQUEST[missing][0].decode() in str(check_request(headers))

    @pytest.mark.parametrize(
        "headers",
        [
            [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"")],
            [*REQUEST, (b":path", b"/again")],
            [*REQUEST, (b":status", b"200")],
            [*REQUEST, (b":unknown", b"x")],
            [REQUEST[0], (b"early", b"x"), *REQUEST[1:]],
            [(b":method", b"CONNECT"), (b":authority", b"x")],
        ],
    )
    def test_pseudo_headers_of_requests(self, headers):
        assert check_request(headers) is not None

    @pytest.mark.parametrize("status", [b"", b"20", b"2000", b"abc", b"099", b"100", b"101", b"+20"])
    def test_statuses_that_do_not_exist(self, status):
        assert check_response([(b":status", status)]) is not None

    def test_a_response_needs_one_status(self):
        assert check_response([(b"a", b"b")]) is not None
        assert check_response([*STATUS, *STATUS]) is not None
        assert check_response([*REQUEST, *STATUS]) is not None

    def test_trailers_have_no_pseudo_headers(self):
        assert check_trailers([*STATUS, (b"grpc-status", b"0")]) is not None

    @pytest.mark.parametrize(
        "name", [b"", b"Upper", b"with space", b"with:colon", b"nul\0", b"high\xff", b"del\x7f", b"tab\t", b"nl\n"]
    )
    def test_names(self, name):
        assert check_trailers([(name, b"x")]) is not None

    @pytest.mark.parametrize("value", [b"a\0b", b"a\rb", b"a\nb", b" a", b"a ", b"\ta", b"a\t"])
    def test_values(self, value):
        assert check_trailers([(b"name", value)]) is not None

    @pytest.mark.parametrize("value", [b"", b"a b", b"\xff\x80", b"a:b"])
    def test_values_that_pass(self, value):
        assert check_trailers([(b"name", value)]) is None

    @pytest.mark.parametrize(
        "name", [b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"]
    )
    def test_headers_of_http_1(self, name):
        assert check_trailers([(name, b"x")]) is not None

    def test_te_means_trailers_or_nothing(self):
        assert check_request([*REQUEST, (b"te", b"gzip")]) is not None
