"""What a leg's request says beside its client's, byte by byte, from any client (A17)."""

from __future__ import annotations

import betterproto
from hypothesis import given
from hypothesis import strategies as st

from trio_router.dispatch.legs import decode_leg, parse_request, prefill_leg
from trio_router.protocol.codec import decode
from trio_router.protocol.messages import GenerateRequest
from trio_router.protocol.wire import edit

ODD_TEXT = '{"b": 1e2, "a": 12345678901234567890123, "\\u00e9": "é", "a": 1.0, "z":-0}'
VARINT = st.integers(0, 2**64 - 1)


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value % 128 + 128)
        value //= 128
    out.append(value)
    return bytes(out)


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


SAMPLING_FIELDS = st.one_of(
    st.builds(field, st.sampled_from([8, 9, 12, 14, 22]), st.integers(0, 1000)),
    st.builds(field, st.just(15), st.integers(0, 3)),
    st.builds(field, st.sampled_from([10, 17]), st.binary(max_size=5).filter(bytes.isascii)),
    st.builds(field, st.just(11), st.lists(st.integers(0, 127), max_size=4).map(bytes)),
    st.builds(field, st.integers(300, 400), VARINT),
)
SAMPLING = st.lists(SAMPLING_FIELDS, max_size=8).map(b"".join)
INPUT = st.builds(
    lambda text, ids, later: field(1, text.encode()) + field(2, bytes(ids)) + later,
    st.sampled_from(["hi", ODD_TEXT]),
    st.lists(st.integers(0, 127), max_size=5),
    st.builds(field, st.integers(300, 400), VARINT),
)
REQUEST_FIELDS = st.one_of(
    st.builds(field, st.just(1), st.sampled_from([b"mine", b"\xc3\xa9"])),
    st.builds(field, st.just(2), INPUT),
    st.builds(field, st.just(4), SAMPLING),
    st.builds(field, st.just(5), st.integers(0, 1)),
    st.builds(field, st.just(6), st.just(field(1, b"evil") + field(2, 1))),
    st.builds(field, st.just(8), st.sampled_from([b"{}", ODD_TEXT.encode()])),
    st.builds(field, st.just(9), st.integers(0, 5)),
    st.builds(field, st.integers(300, 400), st.binary(max_size=5)),
)
SET_BY_DECODE_LEG = {(1,): None, (5,): None, (6,): None, (8,): None}
SET_BY_PREFILL_LEG = SET_BY_DECODE_LEG | {(4, number): None for number in (8, 9, 10, 11, 14, 15)}


class TestBytesOfLegs:
    """A17: fields in any order, several times, unknown, oddly spelled: each byte that is not edited stays."""

    @given(st.lists(REQUEST_FIELDS, max_size=10).map(b"".join))
    def test_case_a17_a_decode_leg_is_the_clients_bytes_outside_what_is_edited(self, message):
        view = parse_request(message, disaggregated=False)
        leg = decode_leg(view, attempt_id="a1", kv_params=ODD_TEXT)
        assert edit(leg, SET_BY_DECODE_LEG) == edit(message, SET_BY_DECODE_LEG)
        decoded = decode(GenerateRequest, leg)
        assert (decoded.request_id, decoded.stream) == ("a1", True)
        assert decoded.kv_transfer_params_json == ODD_TEXT
        assert not decoded.kv_transfer_params.remote_host
        # Of the client's own fields each means what it meant.
        theirs = decode(GenerateRequest, message)
        assert decoded.sampling_params == theirs.sampling_params
        assert betterproto.which_one_of(decoded, "input") == betterproto.which_one_of(theirs, "input")
        assert decoded.data_parallel_rank == theirs.data_parallel_rank

    @given(st.lists(REQUEST_FIELDS, max_size=10).map(b"".join))
    def test_case_a17_a_prefill_leg_keeps_all_but_what_could_end_it(self, message):
        view = parse_request(message, disaggregated=False)
        leg = prefill_leg(view, attempt_id="a1", kv_params=None, rank=3)
        edited = SET_BY_PREFILL_LEG | {(9,): None}
        assert strip_empty_sampling(edit(leg, edited)) == strip_empty_sampling(edit(message, edited))
        decoded = decode(GenerateRequest, leg)
        params = decoded.sampling_params
        assert (params.max_tokens, params.min_tokens, params.n, params.ignore_eos) == (1, 0, 1, True)
        assert (params.stop, params.stop_token_ids) == ([], [])
        assert (decoded.stream, decoded.data_parallel_rank) == (False, 3)
        assert decoded.kv_transfer_params_json is None


def strip_empty_sampling(message: bytes) -> bytes:
    """A request that had no sampling parameters has some on its prefill leg, which are empty without the edited."""
    return message.replace(field(4, b""), b"")
