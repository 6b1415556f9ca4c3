"""Each thing that codecs for protobuf get wrong, by name, and what the codec promises beyond google's parser."""

from __future__ import annotations

import copy
import math
import pickle
import struct
from dataclasses import dataclass
from typing import Any

import betterproto
import pytest

from trio_router.errors import BadRequest, DecodeError
from trio_router.protocol.codec import decode, encode, make
from trio_router.protocol.messages import (
    AbortRequest,
    AbortResponse,
    ChoiceConstraint,
    EmbedResponse,
    EngineLoad,
    EngineMemory,
    GenerateComplete,
    GenerateRequest,
    GenerateResponse,
    GenerateStreamChunk,
    GetModelInfoResponse,
    KvBlock,
    KvBlocksRemoved,
    KvBlocksStored,
    KvCacheTier,
    MediaIdentity,
    MediaRefs,
    Modality,
    MultimodalInputs,
    OutputLogProbs,
    PlaceholderRange,
    SamplingParams,
    ShmHandle,
    TensorData,
    TokenizedInput,
)
from trio_router.protocol.wire import field_bytes


@dataclass(eq=False, repr=False)
class Node(betterproto.Message):
    value: int = betterproto.int32_field(1)
    next: Node = betterproto.message_field(2)  # noqa: RUF009  # the only way to declare it


@dataclass(eq=False, repr=False)
class Holder(betterproto.Message):
    held: AbortResponse = betterproto.message_field(1)  # noqa: RUF009


def hexed(text: str) -> bytes:
    return bytes.fromhex(text.replace(" ", ""))


class TestRepeatedFields:
    def test_a_packed_field_in_two_pieces_is_one_list(self) -> None:
        assert decode(TokenizedInput, hexed("12 02 01 02 12 02 03 04")).input_ids == [1, 2, 3, 4]

    def test_packed_and_unpacked_elements_are_one_list(self) -> None:
        assert decode(TokenizedInput, hexed("12 02 01 02 10 03 12 01 04")).input_ids == [1, 2, 3, 4]

    def test_packed_floats_in_two_pieces_are_one_list(self) -> None:
        one, two = struct.pack("<f", 1.0).hex(), struct.pack("<f", 2.0).hex()
        assert decode(EmbedResponse, hexed(f"0a 04 {one} 0d {two} 0a 00")).embedding == [1.0, 2.0]

    def test_empty_strings_and_empty_messages_are_elements(self) -> None:
        assert encode(SamplingParams(stop=["", "a"])) == hexed("52 00 52 01 61")
        inputs = MultimodalInputs(mm_placeholders=[PlaceholderRange(), PlaceholderRange(length=3)])
        assert decode(MultimodalInputs, encode(inputs)) == inputs

    def test_no_elements_are_no_field(self) -> None:
        assert encode(TokenizedInput(input_ids=[])) == b""

    def test_any_iterable_of_numbers_will_do(self) -> None:
        assert encode(TokenizedInput(input_ids=range(1, 4))) == encode(TokenizedInput(input_ids=[1, 2, 3]))

    @pytest.mark.parametrize("ids", [[0, 1, 127, 128, 16383, 16384, 262143, 262144, 2**31, 2**32 - 1], [0], [2**21]])
    def test_ids_of_every_length_survive(self, ids: list[int]) -> None:
        assert decode(TokenizedInput, encode(TokenizedInput(input_ids=ids))).input_ids == ids

    def test_a_varint_that_is_longer_than_it_needs_to_be_has_the_same_value(self) -> None:
        assert decode(TokenizedInput, hexed("12 03 85 80 00")).input_ids == [5]
        assert decode(TokenizedInput, hexed("12 01 05")).input_ids == [5]


class TestSubMessages:
    def test_one_in_two_pieces_is_merged(self) -> None:
        wire = encode(GenerateRequest(sampling_params=SamplingParams(top_k=5, stop=["a"])))
        wire += encode(GenerateRequest(sampling_params=SamplingParams(n=2, stop=["b"])))
        params = decode(GenerateRequest, wire).sampling_params
        assert (params.top_k, params.n, params.stop) == (5, 2, ["a", "b"])

    def test_unknown_fields_of_both_pieces_survive(self) -> None:
        wire = hexed("22 03 a8 06 01 22 03 b0 06 02")
        assert encode(decode(GenerateRequest, wire)) == hexed("22 06 a8 06 01 b0 06 02")

    def test_an_empty_one_is_present_after_decoding(self) -> None:
        request = decode(GenerateRequest, hexed("22 00"))
        assert request.is_set("sampling_params")
        assert encode(request) == hexed("22 00")

    def test_one_that_was_only_looked_at_is_not_written(self) -> None:
        request = GenerateRequest(request_id="r")
        assert request.sampling_params.top_k == 0
        assert request.media_refs.items == []
        assert encode(request) == hexed("0a 01 72")

    def test_one_that_was_looked_at_and_then_filled_is_written(self) -> None:
        identity = MediaIdentity()
        identity.mm_inputs.mm_hashes.append("h")
        identity.extra_mm_inputs.append(MultimodalInputs())
        identity.mm_inputs.pixel_values.shape.append(2)
        assert encode(identity) == hexed("12 08 12 03 12 01 02 32 01 68 1a 00")

    def test_one_that_was_assigned_to_is_written_even_if_empty(self) -> None:
        request = GenerateRequest()
        request.sampling_params.top_k = 0
        assert encode(request) == hexed("22 00")

    def test_one_without_fields_is_written_when_it_was_assigned(self) -> None:
        assert encode(Holder()) == b""
        assert encode(Holder(held=AbortResponse())) == hexed("0a 00")

    def test_an_optional_one_keeps_its_presence(self) -> None:
        assert encode(EngineLoad(memory=EngineMemory())) == hexed("6a 00")
        assert decode(EngineLoad, hexed("6a 00")).memory == EngineMemory()
        assert decode(EngineLoad, b"").memory is None

    def test_decoded_messages_share_nothing(self) -> None:
        wire = encode(GenerateRequest(text="x"))
        one, other = decode(GenerateRequest, wire), decode(GenerateRequest, wire)
        one.tokenized = TokenizedInput(input_ids=[1])
        one.extra_mm_inputs.append(MultimodalInputs())
        assert encode(other) == wire


class TestPresence:
    def test_optional_scalars_keep_a_zero(self) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=0, logprobs=0, seed=0)
        assert encode(params) == hexed("0d 00000000 40 00 b0 01 00 c0 01 00")
        back = decode(SamplingParams, encode(params))
        assert (back.temperature, back.max_tokens, back.seed, back.prompt_logprobs) == (0.0, 0, 0, None)

    def test_optional_strings_and_enums_keep_their_default(self) -> None:
        assert encode(GenerateRequest(kv_transfer_params_json="")) == hexed("42 00")
        assert encode(KvBlocksStored(tier=KvCacheTier.UNSPECIFIED)) == hexed("18 00")

    def test_a_rank_of_zero_is_a_rank(self) -> None:
        assert decode(GenerateRequest, encode(GenerateRequest(data_parallel_rank=0))).data_parallel_rank == 0
        assert decode(GenerateRequest, b"").data_parallel_rank is None

    def test_plain_scalars_at_their_default_are_left_out(self) -> None:
        assert encode(SamplingParams(top_p=0.0, top_k=0, ignore_eos=False, stop=[], logit_bias={})) == b""
        assert encode(SamplingParams(top_k=False)) == b""

    def test_an_optional_field_can_be_unset_after_decoding(self) -> None:
        params = decode(SamplingParams, hexed("40 05"))
        params.max_tokens = None
        assert encode(params) == b""


class TestOneofs:
    @pytest.mark.parametrize(
        ("message", "wire"),
        [
            (GenerateRequest(text=""), "1a 00"),
            (GenerateRequest(tokenized=TokenizedInput()), "12 00"),
            (SamplingParams(json_object=False), "a0 01 00"),
            (SamplingParams(choice=ChoiceConstraint()), "aa 01 00"),
            (TensorData(inline=b""), "0a 00"),
            (GenerateComplete(matched_token_id=0), "50 00"),
            (GenerateResponse(chunk=GenerateStreamChunk()), "0a 00"),
        ],
    )
    def test_a_chosen_member_is_written_even_at_its_default(self, message: betterproto.Message, wire: str) -> None:
        assert encode(message) == hexed(wire)
        back = decode(type(message), hexed(wire))
        assert encode(back) == hexed(wire)

    def test_the_last_on_the_wire_wins(self) -> None:
        request = decode(GenerateRequest, hexed("1a 01 78 12 03 12 01 05"))
        assert betterproto.which_one_of(request, "input") == ("tokenized", TokenizedInput(input_ids=[5]))
        assert encode(request) == hexed("12 03 12 01 05")

    def test_the_same_member_twice_is_merged_but_not_across_another(self) -> None:
        assert decode(GenerateRequest, hexed("12 03 12 01 05 12 03 12 01 06")).tokenized.input_ids == [5, 6]
        wire = hexed("12 03 12 01 05 1a 00 12 03 12 01 06")
        assert decode(GenerateRequest, wire).tokenized.input_ids == [6]

    def test_a_member_with_another_wire_type_changes_nothing(self) -> None:
        request = decode(GenerateRequest, hexed("1a 01 78 10 05"))
        assert betterproto.which_one_of(request, "input") == ("text", "x")
        assert encode(request) == hexed("1a 01 78 10 05")

    def test_choosing_another_member_after_decoding(self) -> None:
        request = decode(GenerateRequest, hexed("12 03 12 01 05"))
        request.text = "x"
        assert encode(request) == hexed("1a 01 78")

    def test_unsetting_the_member_after_decoding(self) -> None:
        request = decode(GenerateRequest, hexed("0a 01 72 1a 01 78"))
        request.text = None  # type: ignore[assignment]  # betterproto knows no other way to choose no member
        assert encode(request) == hexed("0a 01 72")

    def test_a_constructor_given_two_members_takes_the_last(self) -> None:
        request = GenerateRequest(text="x", tokenized=TokenizedInput(input_ids=[5]))
        assert betterproto.which_one_of(request, "input")[0] == "text"
        assert encode(request) == hexed("1a 01 78")


class TestMaking:
    @pytest.mark.parametrize(
        ("cls", "fields"),
        [
            (AbortRequest, {"request_ids": ["a", "b"]}),
            (GenerateRequest, {"request_id": "r", "text": "", "stream": True}),
            (GenerateRequest, {"tokenized": TokenizedInput(original_text="x", input_ids=[5, 6]), "stream": False}),
            (SamplingParams, {"temperature": 0.0, "max_tokens": 0, "seed": None, "n": 1, "stop": ["x"]}),
            (SamplingParams, {"temperature": None, "logit_bias": {5: -1.0}, "regex": "a+", "ignore_eos": True}),
            (GenerateComplete, {"matched_token_id": 0, "kv_transfer_params_json": None}),
            (MultimodalInputs, {}),
        ],
    )
    def test_it_is_what_the_constructor_makes(self, cls: type[betterproto.Message], fields: dict[str, Any]) -> None:
        made, built = make(cls, **fields), cls(**fields)
        assert type(made) is cls
        assert encode(made) == encode(built)
        assert made == built
        assert {group: betterproto.which_one_of(made, group) for group in cls._betterproto.oneof_field_by_group} == {
            group: betterproto.which_one_of(built, group) for group in cls._betterproto.oneof_field_by_group
        }

    def test_an_empty_one_inside_another_is_absent_until_something_is_set(self) -> None:
        for inner in (make(AbortResponse), make(KvBlock)):
            assert not betterproto.serialized_on_wire(inner)
        assert betterproto.serialized_on_wire(make(KvBlock, block_size=0))

    def test_it_can_be_changed_afterwards(self) -> None:
        request = make(GenerateRequest, text="x")
        request.tokenized = TokenizedInput(input_ids=[5])
        request.request_id = "r"
        assert encode(request) == encode(GenerateRequest(request_id="r", tokenized=TokenizedInput(input_ids=[5])))

    def test_two_share_nothing(self) -> None:
        first, second = make(SamplingParams, n=1), make(SamplingParams, n=1)
        first.stop.append("x")
        first.json_object = True
        assert encode(second) == encode(SamplingParams(n=1))

    def test_a_field_that_there_is_not_is_refused(self) -> None:
        with pytest.raises(TypeError, match="SamplingParams has no field max_token"):
            make(SamplingParams, max_token=5)

    def test_two_members_of_a_oneof_are_refused(self) -> None:
        with pytest.raises(TypeError, match="one of text and tokenized"):
            make(GenerateRequest, text="x", tokenized=TokenizedInput())


class TestMaps:
    def test_keys_and_values_are_written_even_at_their_default(self) -> None:
        assert encode(MultimodalInputs(flat_keys={"": ""})) == hexed("42 04 0a 00 12 00")
        params = SamplingParams(logit_bias={-5: 1.5, 0: 0.0, 7: -100.0})
        assert decode(SamplingParams, encode(params)).logit_bias == {-5: 1.5, 0: 0.0, 7: -100.0}

    def test_an_entry_may_lack_its_key_or_its_value(self) -> None:
        inputs = decode(MultimodalInputs, hexed("1a 00 42 03 12 01 78 42 03 0a 01 79"))
        assert inputs.model_specific_tensors == {"": TensorData()}
        assert inputs.flat_keys == {"": "x", "y": ""}

    def test_the_last_of_a_key_wins(self) -> None:
        inputs = decode(MultimodalInputs, hexed("42 06 0a 01 61 12 01 78 42 06 0a 01 61 12 01 79"))
        assert inputs.flat_keys == {"a": "y"}

    def test_unknown_fields_inside_a_value_survive(self) -> None:
        wire = hexed("1a 0b 0a 01 6b 12 06 1a 01 78 a8 06 2a")
        assert encode(decode(MultimodalInputs, wire)) == wire

    def test_an_entry_with_something_else_in_it_survives_as_a_whole(self) -> None:
        wire = hexed("42 07 0a 01 61 12 00 20 07")
        inputs = decode(MultimodalInputs, wire)
        assert inputs.flat_keys == {}
        assert encode(inputs) == wire


class TestNumbers:
    @pytest.mark.parametrize("value", [-0.0, math.inf, -math.inf, 1e-45])
    def test_floats_that_are_not_quite_zero_are_written(self, value: float) -> None:
        back = decode(SamplingParams, encode(SamplingParams(top_p=value))).top_p
        assert struct.pack("<f", back) == struct.pack("<f", value)

    def test_a_float_that_rounds_to_zero_is_left_out(self) -> None:
        assert encode(SamplingParams(top_p=1e-60)) == b""

    def test_negative_int32_is_ten_bytes(self) -> None:
        assert encode(SamplingParams(logprobs=-1)) == hexed("b0 01 ff ff ff ff ff ff ff ff ff 01")
        assert decode(SamplingParams, hexed("b0 01 ff ff ff ff 0f")).logprobs == -1

    def test_numbers_that_are_too_large_are_cut_as_protobuf_cuts_them(self) -> None:
        assert decode(GenerateStreamChunk, hexed("10 80 80 80 80 10")).prompt_tokens == 0
        assert decode(GenerateStreamChunk, hexed("10 ff ff ff ff ff ff ff ff ff 01")).prompt_tokens == 2**32 - 1
        assert decode(GenerateStreamChunk, hexed("0a 06 81 80 80 80 80 20")).token_ids == [1]
        assert decode(SamplingParams, hexed("b0 01 80 80 80 80 08")).logprobs == -(2**31)
        assert decode(KvBlock, b"\x08" + b"\xff" * 9 + b"\x7f").block_hash == -1
        assert decode(ShmHandle, b"\x10" + b"\xff" * 9 + b"\x7f").offset == 2**64 - 1

    def test_int64_of_either_sign(self) -> None:
        hashes = [-1, -(2**63), 2**63 - 1, 0]
        assert decode(KvBlocksRemoved, encode(KvBlocksRemoved(block_hashes=hashes))).block_hashes == hashes
        assert decode(KvBlock, encode(KvBlock(block_hash=-(2**63)))).block_hash == -(2**63)

    def test_repeated_int32_of_either_sign(self) -> None:
        ids = [-1, 2**31 - 1, -(2**31)]
        assert decode(GetModelInfoResponse, encode(GetModelInfoResponse(eos_token_ids=ids))).eos_token_ids == ids

    def test_a_varint_of_more_than_ten_bytes_is_malformed(self) -> None:
        for wire in ("10 ff ff ff ff ff ff ff ff ff ff 01", "0a 0b ff ff ff ff ff ff ff ff ff ff 01"):
            with pytest.raises(DecodeError, match="longer than 10 bytes"):
                decode(GenerateStreamChunk, hexed(wire))

    def test_any_varint_but_zero_is_true(self) -> None:
        assert decode(GenerateRequest, hexed("28 80 80 80 80 80 80 80 80 80 01")).stream is True

    def test_an_unknown_enum_value_survives(self) -> None:
        inputs = decode(MultimodalInputs, hexed("50 63"))
        assert (inputs.modality, inputs.modality.name) == (99, None)
        assert encode(inputs) == hexed("50 63")
        assert decode(MultimodalInputs, hexed("50 02")).modality is Modality.AUDIO


class TestMalformedData:
    @pytest.mark.parametrize(
        "wire",
        [
            "0a",  # a tag and nothing else
            "0a 05 61",  # a string that is cut short
            "22 02 18",  # a sub-message that is cut short
            "22 01 18 05",  # a sub-message whose last field reaches beyond it
            "22 01 18 28 01",  # the same, where what it reaches into makes sense both ways
            "22 02 a0 06 28 01",  # the same with an unknown field
            "22 02 52 01 78",  # the same with counted bytes
            "28",  # a varint that is missing
            "28 80",  # a varint that is cut short
            "22 03 0d 00 00",  # a float that is cut short
            "22 03 0d 00 00 00 00",  # a float that reaches beyond its message
            "12 04 12 02 80 80",  # packed varints that end inside one
            "02",  # field number 0
            "0e",  # wire type 6
            "0f",  # wire type 7
            "8a 80 80 80 80 00 00",  # a tag of six bytes
            "8a 80 80 80 10 00",  # a tag of more than 32 bits
            "0a 80 80 80 80 08",  # a length of 2 GiB
            "0a ff ff ff ff ff 01",  # a length of six bytes
        ],
    )
    def test_it_is_refused(self, wire: str) -> None:
        with pytest.raises(DecodeError, match="not a GenerateRequest"):
            decode(GenerateRequest, hexed(wire))

    def test_packed_floats_that_end_inside_one(self) -> None:
        with pytest.raises(DecodeError, match="inside a number"):
            decode(OutputLogProbs, hexed("0a 05 00 00 00 00 00"))

    def test_every_cut_of_a_message_that_ends_in_a_sub_message(self) -> None:
        wire = encode(GenerateResponse(chunk=GenerateStreamChunk(token_ids=[91234], prompt_tokens=2048)))
        for end in range(1, len(wire)):
            with pytest.raises(DecodeError):
                decode(GenerateResponse, wire[:end])

    @pytest.mark.parametrize("payload", ["ff", "c0 80", "ed a0 80", "e2 82", "f4 90 80 80"])
    def test_strings_must_be_utf8(self, payload: str) -> None:
        data = hexed(payload)
        for field in (b"\x0a", b"\x1a", b"\x42"):
            with pytest.raises(DecodeError, match="UTF-8"):
                decode(GenerateRequest, field + bytes([len(data)]) + data)

    def test_bytes_need_not_be(self) -> None:
        assert decode(TensorData, hexed("0a 01 ff")).inline == b"\xff"


class TestUnknownFields:
    UNKNOWN = "a0 06 2a aa 06 03 61 62 63 ad 06 01 02 03 04 a9 06 31 32 33 34 35 36 37 38"

    def test_they_survive_at_the_top_and_inside(self) -> None:
        top = hexed("0a 01 72" + self.UNKNOWN)
        assert encode(decode(GenerateRequest, top)) == top
        inner = hexed("22 1b 18 05" + self.UNKNOWN)
        assert encode(decode(GenerateRequest, inner)) == inner

    def test_groups_are_skipped_and_survive(self) -> None:
        wire = hexed("28 01 a3 06 28 00 a3 06 a4 06 0a 01 78 a4 06")
        request = decode(GenerateRequest, wire)
        assert request.stream is True
        assert request.request_id == ""
        assert encode(request) == wire

    def test_a_known_field_with_another_wire_type_is_unknown(self) -> None:
        for wire in ("0d 01 02 03 04", "08 05", "0b 08 05 0c", "2a 01 01", "29 01 02 03 04 05 06 07 08"):
            request = decode(GenerateRequest, hexed(wire))
            assert (request.request_id, request.stream) == ("", False)
            assert encode(request) == hexed(wire)

    @pytest.mark.parametrize("wire", ["0b", "0b 0c 0c", "0b 14", "0c", "0b 08", "0b 0b 0c", "22 01 0b 0c"])
    def test_groups_that_do_not_match_are_malformed(self, wire: str) -> None:
        with pytest.raises(DecodeError):
            decode(GenerateRequest, hexed(wire))

    def test_a_great_many_survive(self) -> None:
        # Both are a peer's way to make a parser copy what it has kept for each field anew.
        top, inside = hexed("a0 06 2a") * 100_000, hexed("22 03 a0 06 2a") * 100_000
        request = decode(GenerateRequest, top + inside)
        assert encode(request) == field_bytes(4, hexed("a0 06 2a") * 100_000) + top

    def test_they_survive_beside_changed_fields(self) -> None:
        request = decode(GenerateRequest, hexed("0a 01 72 a0 06 2a"))
        request.request_id = "s"
        assert encode(request) == hexed("0a 01 73 a0 06 2a")


class TestDepth:
    @staticmethod
    def nested(levels: int) -> bytes:
        wire = b""
        for _ in range(levels):
            wire = field_bytes(2, wire)
        return wire

    def test_a_hundred_levels_are_enough(self) -> None:
        node = decode(Node, self.nested(100))
        assert encode(node) == self.nested(100)

    @pytest.mark.parametrize("levels", [101, 5000])
    def test_more_are_refused(self, levels: int) -> None:
        with pytest.raises(DecodeError, match="100 levels"):
            decode(Node, self.nested(levels))

    def test_groups_count(self) -> None:
        assert encode(decode(Node, b"\x0b" * 100 + b"\x0c" * 100)) == b"\x0b" * 100 + b"\x0c" * 100
        for levels in (101, 100_000):
            with pytest.raises(DecodeError, match="100 levels"):
                decode(Node, b"\x0b" * levels + b"\x0c" * levels)


class TestValuesThatCannotBeWritten:
    @pytest.mark.parametrize(
        ("message", "field"),
        [
            (GenerateStreamChunk(prompt_tokens=2**32), "GenerateStreamChunk.prompt_tokens"),
            (GenerateStreamChunk(prompt_tokens=-1), "GenerateStreamChunk.prompt_tokens"),
            (GenerateStreamChunk(token_ids=[1, 2**32]), "GenerateStreamChunk.token_ids"),
            (GenerateStreamChunk(token_ids=[-1]), "GenerateStreamChunk.token_ids"),
            (GenerateStreamChunk(token_ids=[1.0]), "GenerateStreamChunk.token_ids"),
            (GenerateStreamChunk(token_ids=b"abcd"), "GenerateStreamChunk.token_ids"),
            (GenerateStreamChunk(token_ids=5), "GenerateStreamChunk.token_ids"),
            (GenerateStreamChunk(prompt_tokens="7"), "GenerateStreamChunk.prompt_tokens"),
            (GenerateStreamChunk(prompt_tokens=""), "GenerateStreamChunk.prompt_tokens"),
            (GenerateStreamChunk(prompt_tokens=1.0), "GenerateStreamChunk.prompt_tokens"),
            (SamplingParams(seed=2**31), "SamplingParams.seed"),
            (SamplingParams(seed=-(2**31) - 1), "SamplingParams.seed"),
            (SamplingParams(temperature=1e300), "SamplingParams.temperature"),
            (SamplingParams(temperature="1"), "SamplingParams.temperature"),
            (SamplingParams(stop="abc"), "SamplingParams.stop"),
            (SamplingParams(stop=[b"abc"]), "SamplingParams.stop"),
            (SamplingParams(stop=[None]), "SamplingParams.stop"),
            (SamplingParams(logit_bias={2**31: 1.0}), "SamplingParams.logit_bias"),
            (SamplingParams(logit_bias={"1": 1.0}), "SamplingParams.logit_bias"),
            (SamplingParams(logit_bias=[1]), "SamplingParams.logit_bias"),
            (SamplingParams(ignore_eos="yes"), "SamplingParams.ignore_eos"),
            (EmbedResponse(embedding=[1e300]), "EmbedResponse.embedding"),
            (GetModelInfoResponse(eos_token_ids=[2**31]), "GetModelInfoResponse.eos_token_ids"),
            (KvBlocksRemoved(block_hashes=[2**63]), "KvBlocksRemoved.block_hashes"),
            (KvBlock(block_hash=-(2**63) - 1), "KvBlock.block_hash"),
            (GenerateRequest(request_id="\ud800"), "GenerateRequest.request_id"),
            (GenerateRequest(request_id=b"r"), "GenerateRequest.request_id"),
            (GenerateRequest(text=5), "GenerateRequest.text"),
            (GenerateRequest(media_refs=MultimodalInputs(mm_hashes=["h"])), "GenerateRequest.media_refs"),
            (GenerateRequest(extra_mm_inputs=[MediaRefs()]), "GenerateRequest.extra_mm_inputs"),
            (GenerateRequest(tokenized=TokenizedInput(input_ids=[-1])), "TokenizedInput.input_ids"),
            (TensorData(inline="text"), "TensorData.inline"),
            (TensorData(inline=7), "TensorData.inline"),
            (MultimodalInputs(modality=2**31), "MultimodalInputs.modality"),
            (MultimodalInputs(modality="IMAGE"), "MultimodalInputs.modality"),
        ],
    )
    def test_the_error_names_the_field(self, message: betterproto.Message, field: str) -> None:
        with pytest.raises(BadRequest, match=f"^{field}: "):
            encode(message)

    def test_an_id_that_is_no_integer_is_refused_also_after_its_equal_was_written(self) -> None:
        assert encode(GenerateStreamChunk(token_ids=[1])) == hexed("0a 01 01")
        with pytest.raises(BadRequest):
            encode(GenerateStreamChunk(token_ids=[1.0]))

    def test_buffers_are_bytes_and_integers_may_be_of_any_kind(self) -> None:
        assert encode(TensorData(inline=bytearray(b"ab"))) == encode(TensorData(inline=b"ab"))
        assert encode(TensorData(inline=memoryview(b"ab"))) == encode(TensorData(inline=b"ab"))
        assert encode(SamplingParams(top_k=Modality.AUDIO)) == encode(SamplingParams(top_k=2))
        assert encode(MultimodalInputs(modality=2)) == encode(MultimodalInputs(modality=Modality.AUDIO))
        assert encode(SamplingParams(temperature=1)) == encode(SamplingParams(temperature=1.0))

    def test_types_no_message_has_are_refused_when_the_class_is_first_used(self) -> None:
        @dataclass(eq=False, repr=False)
        class Odd(betterproto.Message):
            value: int = betterproto.sint32_field(1)

        with pytest.raises(TypeError, match="sint32"):
            encode(Odd())


class TestDecodedMessages:
    WIRE = encode(
        GenerateRequest(request_id="r", text="x", sampling_params=SamplingParams(n=2), kv_transfer_params_json="{}")
    )

    def test_they_are_what_betterproto_makes_of_the_same_bytes(self) -> None:
        assert decode(GenerateRequest, self.WIRE) == GenerateRequest().parse(self.WIRE)

    def test_betterproto_writes_them_as_it_writes_its_own(self) -> None:
        assert bytes(decode(GenerateRequest, self.WIRE)) == self.WIRE

    @pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])  # noqa: S301
    def test_they_can_be_copied(self, duplicate: Any) -> None:
        assert encode(duplicate(decode(GenerateRequest, self.WIRE))) == self.WIRE

    def test_absent_fields_read_as_their_defaults(self) -> None:
        request = decode(GenerateRequest, b"")
        assert (request.request_id, request.stream, request.extra_mm_inputs) == ("", False, [])
        assert request.sampling_params == SamplingParams()
        assert betterproto.which_one_of(request, "input") == ("", None)
        assert not request

    def test_any_buffer_can_be_decoded(self) -> None:
        for buffer in (bytearray(self.WIRE), memoryview(self.WIRE)):
            assert decode(GenerateRequest, buffer) == decode(GenerateRequest, self.WIRE)

    def test_messages_without_fields(self) -> None:
        assert encode(AbortResponse()) == b""
        assert encode(decode(AbortResponse, hexed("08 01"))) == hexed("08 01")
        assert encode(AbortRequest(request_ids=["a", ""])) == hexed("0a 01 61 0a 00")
