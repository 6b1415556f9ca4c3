"""Scans agree with the codec; edits do what they say and leave every other byte alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import betterproto
import pytest
from google.protobuf.message import DecodeError as GoogleDecodeError
from google.protobuf.message import Message as GoogleMessage
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_router.errors import DecodeError
from trio_router.pieces import Pieces
from trio_router.protocol.codec import decode, encode
from trio_router.protocol.messages import (
    GenerateComplete,
    GenerateRequest,
    GenerateResponse,
    GenerateStreamChunk,
    KvTransferParams,
    OutputLogProbs,
    SamplingParams,
    TokenizedInput,
)
from trio_router.protocol.wire import (
    edit,
    field_bytes,
    field_varint,
    get_bodies,
    get_string,
    get_varint,
    is_complete,
    one_token_end,
    scan_chunk,
    splice,
)

REQUEST, RESPONSE = "vllm.grpc.engine.GenerateRequest", "vllm.grpc.engine.GenerateResponse"
WireData = Callable[..., st.SearchStrategy[bytes]]
GoogleClass = Callable[[str], type[GoogleMessage]]

U32 = st.one_of(st.integers(0, 300), st.integers(0, 2**32 - 1))
CHUNKS = st.builds(
    GenerateStreamChunk,
    token_ids=st.lists(U32, max_size=60),
    prompt_tokens=U32,
    completion_tokens=U32,
    cached_tokens=U32,
    index=U32,
)


def hexed(text: str) -> bytes:
    return bytes.fromhex(text.replace(" ", ""))


def chunk(**fields: Any) -> bytes:
    return encode(GenerateResponse(chunk=GenerateStreamChunk(**fields)))


def fields_of(chunk: GenerateStreamChunk) -> tuple[list[int], int, int, int, int]:
    return chunk.token_ids, chunk.prompt_tokens, chunk.completion_tokens, chunk.cached_tokens, chunk.index


class TestScanningChunks:
    @given(expected=CHUNKS)
    def test_a_chunk_with_ids_is_always_understood(self, expected: GenerateStreamChunk) -> None:
        wire = encode(GenerateResponse(chunk=expected))
        scanned = scan_chunk(wire)
        assert scanned == fields_of(expected) or (len(wire) < 4 and scanned is None)

    @settings(max_examples=400, deadline=None)
    @given(data=st.data())
    def test_it_agrees_with_the_codec_on_any_data(self, wire_data: WireData, data: st.DataObject) -> None:
        wire = data.draw(wire_data(RESPONSE))
        scanned = scan_chunk(wire)
        if scanned is not None:
            response = decode(GenerateResponse, wire)
            assert scanned == fields_of(response.chunk)
            # Nothing was in it besides.
            plain = decode(GenerateResponse, chunk(**dict(zip(NAMES, scanned, strict=True))))
            assert encode(response) == encode(plain)

    @given(expected=CHUNKS, at=st.integers(0, 400), byte=st.binary(max_size=1), dropped=st.integers(0, 2))
    def test_it_agrees_with_the_codec_on_damaged_chunks(
        self, expected: GenerateStreamChunk, at: int, byte: bytes, dropped: int
    ) -> None:
        whole = encode(GenerateResponse(chunk=expected))
        at %= len(whole)
        wire = whole[:at] + byte + whole[at + dropped :]
        scanned = scan_chunk(wire)
        if scanned is not None:
            assert scanned == fields_of(decode(GenerateResponse, wire).chunk)

    @pytest.mark.parametrize(
        "message",
        [
            b"",
            b"\x0a",
            encode(GenerateResponse(complete=GenerateComplete(output_ids=[1]))),
            chunk(token_ids=[1], output_logprobs=OutputLogProbs(token_ids=[1])),
            hexed("0a 05 0a 01 05 32 00"),  # empty logprobs
            chunk(token_ids=[5]) + chunk(token_ids=[6]),
            chunk(token_ids=[5]) + hexed("12 00"),
            chunk(token_ids=[5]) + hexed("a0 06 01"),
            hexed("0a 06 0a 01 05 a0 06 01"),  # an unknown field
            hexed("0a 05 0a 01 05 08 06"),  # an id that is not packed
            hexed("0a 06 0a 01 05 0a 01 06"),  # ids in two pieces
            hexed("0a 06 0a 01 05 12 01 06"),  # another wire type
            hexed("0a 04 0a 02 05 80"),  # ids that end inside a varint
            hexed("0a 05 0a 03 05 06 80"),
            hexed("0a 04 0a 03 05 06"),  # ids that reach beyond the chunk
            hexed("0a 05 0a 01 05 10 80"),  # a count that is cut short
            hexed("0a 04 0a 01 05 10"),
            hexed("0a 03 0a 01"),  # a chunk that is cut short
            hexed("0a 02 0a 01 05"),  # and one that is followed by something
            hexed("0a 0f 0a 01 05 10 ff ff ff ff ff ff ff ff ff ff 01"),  # eleven bytes of count
        ],
    )
    def test_anything_else_is_left_to_the_codec(self, message: bytes) -> None:
        assert scan_chunk(message) is None
        assert scan_chunk(message) is None  # nor is it when some of it has been seen before

    def test_long_forms_and_large_numbers(self) -> None:
        assert scan_chunk(hexed("0a 85 00 0a 82 00 05 06")) == ([5, 6], 0, 0, 0, 0)
        assert scan_chunk(hexed("0a 05 0a 03 85 80 00")) == ([5], 0, 0, 0, 0)
        assert scan_chunk(hexed("0a 09 0a 01 05 10 81 80 80 80 10")) == ([5], 1, 0, 0, 0)
        assert scan_chunk(hexed("0a 07 0a 01 05 10 07 10 08")) == ([5], 8, 0, 0, 0)

    def test_counts_that_are_repeated_without_end_are_not_remembered(self) -> None:
        assert scan_chunk(field_bytes(1, hexed("0a 01 05") + hexed("10 07") * 12)) == ([5], 7, 0, 0, 0)
        assert scan_chunk(field_bytes(1, hexed("0a 01 05") + hexed("10 07") * 100)) is None

    def test_the_list_of_ids_belongs_to_the_caller(self) -> None:
        for ids in ([5], [5, 6]):
            first = scan_chunk(chunk(token_ids=ids))
            assert first is not None
            first[0].append(7)
            assert scan_chunk(chunk(token_ids=ids)) == (ids, 0, 0, 0, 0)


NAMES = ("token_ids", "prompt_tokens", "completion_tokens", "cached_tokens", "index")


class TestOneTokenEnd:
    @given(first=U32, second=U32, prompt=U32, cached=U32, index=U32)
    def test_the_chunks_of_a_stream_share_it(
        self, first: int, second: int, prompt: int, cached: int, index: int
    ) -> None:
        counts = {"prompt_tokens": prompt, "completion_tokens": 1, "cached_tokens": cached, "index": index}
        end = one_token_end(chunk(token_ids=[first], **counts))
        assert end is not None
        assert chunk(token_ids=[second], **counts).endswith(end)
        more = chunk(token_ids=[first, second], **{**counts, "completion_tokens": 2})
        assert not more.endswith(end)

    @given(expected=CHUNKS, at=st.integers(0, 400), byte=st.binary(max_size=1), dropped=st.integers(0, 2))
    def test_any_message_that_has_one_is_a_chunk_of_one_token(
        self, expected: GenerateStreamChunk, at: int, byte: bytes, dropped: int
    ) -> None:
        whole = encode(GenerateResponse(chunk=expected))
        at %= len(whole)
        for wire in (whole, whole[:at] + byte + whole[at + dropped :]):
            end = one_token_end(wire)
            if end is not None:
                scanned = scan_chunk(wire)
                assert scanned is not None
                assert (len(scanned[0]), scanned[2]) == (1, 1)
                # What is before it is the id and nothing else.
                assert decode(GenerateStreamChunk, wire[2 : len(wire) - len(end)]).token_ids == scanned[0]

    @pytest.mark.parametrize(
        "message",
        [
            b"",
            chunk(token_ids=[5]),  # says nothing of its tokens
            chunk(token_ids=[5], completion_tokens=2),
            chunk(token_ids=[5, 6], completion_tokens=1),
            chunk(completion_tokens=1),
            hexed("0a 85 00 0a 01 05 18 01"),
            encode(GenerateResponse(complete=GenerateComplete(output_ids=[5], completion_tokens=1))),
        ],
    )
    def test_other_messages_have_none(self, message: bytes) -> None:
        assert one_token_end(message) is None


class TestIsComplete:
    @settings(max_examples=200, deadline=None)
    @given(data=st.data())
    def test_it_agrees_with_the_codec(self, wire_data: WireData, data: st.DataObject) -> None:
        wire = data.draw(wire_data(RESPONSE))
        try:
            response = decode(GenerateResponse, wire)
        except DecodeError:
            return
        assert is_complete(wire) == (betterproto.which_one_of(response, "response")[0] == "complete")

    def test_the_last_member_counts(self) -> None:
        assert is_complete(hexed("0a 00 12 00"))
        assert not is_complete(hexed("12 00 0a 00"))
        assert is_complete(hexed("0a 00 12 00 a0 06 01"))
        assert is_complete(encode(GenerateResponse(complete=GenerateComplete(finish_reason="x" * 200))))
        assert not is_complete(b"")

    @pytest.mark.parametrize("wire", ["12", "12 05 00", "12 ff", "0a 00 12"])
    def test_malformed_messages_are_refused(self, wire: str) -> None:
        with pytest.raises(DecodeError):
            is_complete(hexed(wire))


class TestReadingFields:
    MESSAGE = encode(
        GenerateResponse(
            complete=GenerateComplete(
                output_ids=[1, 2], finish_reason="stop", prompt_tokens=300, kv_transfer_params_json="{}",
                kv_transfer_params=KvTransferParams(remote_host="h", remote_port=7),
            )
        )
    )  # fmt: skip

    def test_at_any_depth(self) -> None:
        assert get_string(self.MESSAGE, (2, 2)) == "stop"
        assert get_string(self.MESSAGE, (2, 9, 1)) == "h"
        assert get_varint(self.MESSAGE, (2, 3)) == 300
        assert get_varint(self.MESSAGE, (2, 9, 2)) == 7

    def test_absent_ones(self) -> None:
        for path in ((1, 2), (2, 11), (2, 9, 3), (3,)):
            assert get_string(self.MESSAGE, path) is None
            assert get_varint(self.MESSAGE, path) is None

    def test_ones_of_another_wire_type_are_absent(self) -> None:
        assert get_varint(self.MESSAGE, (2, 2)) is None
        assert get_string(self.MESSAGE, (2, 3)) is None
        assert get_string(self.MESSAGE, (2, 3, 1)) is None

    def test_the_last_of_several_counts_also_across_pieces_of_the_parent(self) -> None:
        assert get_string(hexed("0a 01 61 08 05 0a 01 62"), (1,)) == "b"
        pieces = hexed("22 04 40 05 78 01 22 02 40 06 22 00")
        assert get_varint(pieces, (4, 8)) == 6
        assert get_varint(pieces, (4, 15)) == 1

    def test_all_bodies_come_in_order_also_across_pieces_of_the_parent(self) -> None:
        wire = hexed("0a 01 61 08 05 12 04 0a 02 62 63 0a 00 12 02 08 07 12 03 0a 01 64")
        assert get_bodies(wire, (1,)) == [b"a", b""]
        assert get_bodies(wire, (2, 1)) == [b"bc", b"d"]
        assert get_bodies(wire, (3,)) == []
        with pytest.raises(DecodeError):
            get_bodies(hexed("0a 05 61"), (1,))

    def test_integers_are_unsigned_on_the_wire(self) -> None:
        assert get_varint(encode(GenerateRequest(data_parallel_rank=-1)), (9,)) == 2**64 - 1

    @pytest.mark.parametrize("wire", ["0a 05 61", "0a 01 ff", "0a", "0b 0a 01 61", "0a 01 61 0c"])
    def test_malformed_messages_are_refused(self, wire: str) -> None:
        with pytest.raises(DecodeError):
            get_string(hexed(wire), (1,))

    def test_malformed_sub_messages_are_refused_on_the_path_only(self) -> None:
        wire = hexed("0a 01 61 22 01 40")
        assert get_string(wire, (1,)) == "a"
        with pytest.raises(DecodeError):
            get_varint(wire, (4, 8))


class TestMakingFields:
    def test_they_are_what_the_codec_writes(self) -> None:
        assert field_bytes(1, b"r") == encode(GenerateRequest(request_id="r"))
        assert field_varint(9, -1) == encode(GenerateRequest(data_parallel_rank=-1))
        assert field_varint(24, 300) == encode(SamplingParams(seed=300))
        assert field_varint(3, 2**64 - 1) == b"\x18" + b"\xff" * 9 + b"\x01"

    @pytest.mark.parametrize("number", [0, -1, 2**29])
    def test_numbers_that_no_field_can_have(self, number: int) -> None:
        for make in (lambda: field_varint(number, 1), lambda: field_bytes(number, b"")):
            with pytest.raises(ValueError, match="no field number"):
                make()

    @pytest.mark.parametrize("value", [2**64, -(2**63) - 1])
    def test_integers_of_more_than_64_bits(self, value: int) -> None:
        with pytest.raises(ValueError, match="64 bits"):
            field_varint(1, value)


# What an edit does in terms of google's API: (edit, what it does to google's message).
EDITS: dict[str, tuple[dict[tuple[int, ...], bytes | None], Callable[[Any], None]]] = {
    "set a string": ({(1,): field_bytes(1, b"new")}, lambda m: setattr(m, "request_id", "new")),
    "delete an optional string": ({(8,): None}, lambda m: m.ClearField("kv_transfer_params_json")),
    "set an optional string": ({(8,): field_bytes(8, b"{}")}, lambda m: setattr(m, "kv_transfer_params_json", "{}")),
    "set an integer": ({(9,): field_varint(9, 3)}, lambda m: setattr(m, "data_parallel_rank", 3)),
    "delete a repeated message": ({(11,): None}, lambda m: m.ClearField("extra_mm_inputs")),
    "set inside a message": ({(4, 8): field_varint(8, 1)}, lambda m: setattr(m.sampling_params, "max_tokens", 1)),
    "delete inside a message": ({(4, 10): None}, lambda m: clear_below(m, "sampling_params", "stop")),
    "delete two levels down": ({(7, 2, 2): None}, lambda m: clear_below(m, "mm_inputs", "pixel_values", "shape")),
    "set two levels down": (
        {(7, 2, 3): field_bytes(3, b"t")},
        lambda m: setattr(m.mm_inputs.pixel_values, "dtype", "t"),
    ),
    "replace a repeated field": (
        {(4, 10): field_bytes(10, b"a") + field_bytes(10, b"")},
        lambda m: replace(m.sampling_params.stop, ["a", ""]),
    ),
    "choose a member of a oneof": ({(2,): None, (3,): field_bytes(3, b"t")}, lambda m: setattr(m, "text", "t")),
}


def canonical(message: GoogleMessage) -> bytes:
    return message.SerializeToString(deterministic=True)


def clear_below(message: Any, *path: str) -> None:
    # Google's ClearField makes the parent when it is absent.
    *parents, name = path
    for parent in parents:
        if not message.HasField(parent):
            return
        message = getattr(message, parent)
    message.ClearField(name)


def replace(values: Any, new: list[Any]) -> None:
    del values[:]
    values.extend(new)


class TestEditing:
    @pytest.mark.parametrize("name", EDITS)
    @settings(max_examples=40, deadline=None)
    @given(data=st.data())
    def test_google_reads_what_its_own_edit_would_give(
        self, google: GoogleClass, wire_data: WireData, name: str, data: st.DataObject
    ) -> None:
        edits, do = EDITS[name]
        wire = data.draw(wire_data(REQUEST, odd=False))
        try:
            theirs = google(REQUEST).FromString(wire)
        except GoogleDecodeError:
            return  # padding can make a number too long
        do(theirs)
        ours = google(REQUEST).FromString(edit(wire, edits))
        assert canonical(ours) == canonical(theirs)

    @settings(max_examples=40, deadline=None)
    @given(data=st.data(), names=st.sets(st.sampled_from(sorted(EDITS)), max_size=4))
    def test_several_at_once_are_as_good_as_one_after_another(
        self, google: GoogleClass, wire_data: WireData, data: st.DataObject, names: set[str]
    ) -> None:
        wire = data.draw(wire_data(REQUEST, odd=False))
        together: dict[tuple[int, ...], bytes | None] = {}
        for name in sorted(names):
            together |= EDITS[name][0]
        one_by_one = wire
        try:
            for path, replacement in together.items():
                one_by_one = edit(one_by_one, {path: replacement})
            read = google(REQUEST).FromString(one_by_one)
        except (DecodeError, GoogleDecodeError):
            return
        assert canonical(google(REQUEST).FromString(edit(wire, together))) == canonical(read)

    FIELDS = st.lists(
        st.one_of(
            st.builds(field_varint, st.sampled_from([1, 2, 3, 536870911]), st.integers(0, 2**64 - 1)),
            st.builds(field_bytes, st.sampled_from([1, 2, 3, 536870911]), st.binary(max_size=6)),
            st.sampled_from(
                [hexed("0b 08 05 0c"), hexed("1b 0b 0c 1c"), hexed("0d 0a 0a 0a 0a"), hexed("8a 00 80 00")]
            ),
        ),
        max_size=6,
    )

    @given(fields=FIELDS, new=st.binary(max_size=3))
    def test_every_other_byte_stays_in_order(self, fields: list[bytes], new: bytes) -> None:
        wire = b"".join(fields)
        others = b"".join(field for field in fields if number_of(field) != 1)
        assert edit(wire, {(1,): None}) == others
        assert edit(wire, {(1,): field_bytes(1, new)}) == others + field_bytes(1, new)
        assert edit(wire, {(7,): None, (9, 1): None}) == wire

    @given(before=FIELDS, inside=FIELDS, after=FIELDS)
    def test_every_other_byte_of_a_parent_stays_in_order(
        self, before: list[bytes], inside: list[bytes], after: list[bytes]
    ) -> None:
        head = b"".join(field for field in before if number_of(field) != 3)
        tail = b"".join(field for field in after if number_of(field) != 3)
        others = b"".join(field for field in inside if number_of(field) != 1)
        wire = head + field_bytes(3, b"".join(inside)) + tail
        assert edit(wire, {(3, 1): None}) == head + field_bytes(3, others) + tail
        assert edit(wire, {(3, 1): b"\x08\x05"}) == head + field_bytes(3, others + b"\x08\x05") + tail

    def test_a_parent_that_does_not_change_keeps_its_long_length(self) -> None:
        wire = hexed("22 84 80 00 18 05 78 01")
        assert edit(wire, {(4, 8): None}) == wire
        assert edit(wire, {(4, 3): None}) == hexed("22 02 78 01")

    def test_a_missing_parent_is_made_when_something_is_set_in_it(self) -> None:
        assert edit(b"", {(4, 8): field_varint(8, 1)}) == hexed("22 02 40 01")
        assert edit(b"", {(7, 2, 3): field_bytes(3, b"t")}) == hexed("3a 05 12 03 1a 01 74")
        assert edit(hexed("28 01"), {(4, 8): None, (7, 2, 3): None}) == hexed("28 01")

    def test_of_a_parent_in_pieces_all_lose_and_the_last_gets(self) -> None:
        wire = hexed("22 04 40 05 18 07 28 01 22 04 40 06 78 02")
        assert edit(wire, {(4, 8): field_varint(8, 1)}) == hexed("22 02 18 07 28 01 22 04 78 02 40 01")
        assert edit(wire, {(4, 8): None}) == hexed("22 02 18 07 28 01 22 02 78 02")

    def test_something_else_with_the_parents_number_stays_and_is_no_parent(self) -> None:
        assert edit(hexed("20 05"), {(4, 8): field_varint(8, 1)}) == hexed("20 05 22 02 40 01")
        assert edit(hexed("23 40 05 24"), {(4, 8): None}) == hexed("23 40 05 24")

    def test_no_edits_no_change(self) -> None:
        assert edit(hexed("0a 01 61"), {}) == hexed("0a 01 61")

    def test_an_edited_request_is_what_the_codec_expects(self) -> None:
        wire = encode(
            GenerateRequest(
                request_id="r", tokenized=TokenizedInput(input_ids=[1, 2]), stream=True,
                sampling_params=SamplingParams(max_tokens=100, min_tokens=5, stop=["a"]),
            )
        )  # fmt: skip
        edits = {(1,): field_bytes(1, b"r-p"), (5,): None, (4, 8): field_varint(8, 1), (4, 9): None, (4, 10): None}
        prefill = decode(GenerateRequest, edit(wire, {**edits, (8,): field_bytes(8, b"{}")}))
        assert prefill == GenerateRequest(
            request_id="r-p", tokenized=TokenizedInput(input_ids=[1, 2]), sampling_params=SamplingParams(max_tokens=1),
            kv_transfer_params_json="{}",
        )  # fmt: skip

    @pytest.mark.parametrize(
        "wire", ["0a", "0a 05 61", "22 01 40", "22 02 12 05", "0c", "0b", "02 00", "22 01 0b 0c", "22 01 40 28 01"]
    )
    def test_malformed_messages_are_refused(self, wire: str) -> None:
        with pytest.raises(DecodeError):
            edit(hexed(wire), {(1,): None, (4, 8): None})

    @settings(deadline=None)
    @given(data=st.data())
    def test_what_the_codec_can_read_can_be_edited(self, wire_data: WireData, data: st.DataObject) -> None:
        wire = data.draw(wire_data(REQUEST))
        try:
            decode(GenerateRequest, wire)
        except DecodeError:
            return
        edited = edit(wire, {(4, 8): field_varint(8, 7), (1,): None})
        request = decode(GenerateRequest, edited)
        assert (request.sampling_params.max_tokens, request.request_id) == (7, "")
        assert get_varint(edited, (4, 8)) == 7
        assert get_string(edited, (1,)) is None

    @pytest.mark.parametrize(
        ("edits", "complaint"),
        [
            ({(): None}, "empty path"),
            ({(4,): None, (4, 8): None}, "inside a field"),
            ({(4, 8): None, (4,): None}, "as a whole and in part"),
            ({(4, 8): field_varint(9, 1)}, "another field"),
        ],
    )
    def test_edits_that_make_no_sense(self, edits: dict[tuple[int, ...], bytes | None], complaint: str) -> None:
        with pytest.raises(ValueError, match=complaint):
            edit(b"", edits)


def number_of(field: bytes) -> int:
    """The number of the first field, read as plainly as can be."""
    value = shift = 0
    for byte in field:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value >> 3
    raise AssertionError("no tag")


class TestSplicing:
    """As editing, but what is kept of a large message is not copied."""

    @given(
        st.integers(0, 200_000),
        st.sampled_from([{}, {(1,): None}, {(1,): field_bytes(1, b"new"), (4, 8): b"\x40\x01"}]),
    )
    def test_it_is_what_the_edit_is(self, size: int, edits: dict[tuple[int, ...], bytes | None]) -> None:
        message = encode(GenerateRequest(request_id="id", text="x" * size, stream=True)) + field_bytes(10, b"y" * size)
        spliced = splice(message, edits)
        assert bytes(spliced) == edit(message, edits)
        assert len(spliced) == len(bytes(spliced))

    def test_most_of_a_large_message_is_the_same_memory(self) -> None:
        message = field_bytes(1, b"id") + field_bytes(10, b"y" * 1_000_000)
        spliced = splice(message, {(1,): field_bytes(1, b"another")})
        assert isinstance(spliced, Pieces)
        shared = [part for part in spliced.parts if isinstance(part, memoryview)]
        assert all(part.obj is message for part in shared)
        assert sum(map(len, shared)) >= 1_000_000
