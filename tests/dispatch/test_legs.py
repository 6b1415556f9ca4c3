"""The bytes of each leg (case A8: six public routers sanitised the prefill copy wrongly)."""

from __future__ import annotations

import itertools

import pytest

from trio_router.dispatch.legs import client_streams, decode_leg, parse_request, plain_leg, prefill_leg, release_leg
from trio_router.errors import BadRequest, DecodeError
from trio_router.protocol.codec import decode, encode
from trio_router.protocol.messages import (
    GenerateRequest,
    KvTransferParams,
    MultimodalInputs,
    SamplingParams,
    TensorData,
    TokenizedInput,
)
from trio_router.protocol.wire import edit, field_bytes, field_varint

PARAMS = '{"do_remote_decode":true,"do_remote_prefill":false}'
UNKNOWN = b"\xfa\x3e\x05later"  # field 1007: something a newer client says

SAMPLING_CHOICES = {
    "max_tokens": [None, 1, 7],
    "min_tokens": [0, 3],
    "stop": [[], ["END", "."]],
    "stop_token_ids": [[], [5, 6]],
    "ignore_eos": [False, True],
    "n": [0, 1],
}


def client_requests():
    keys = list(SAMPLING_CHOICES)
    for values in itertools.product(*SAMPLING_CHOICES.values()):
        sampling = SamplingParams(
            temperature=0.5, seed=11, logprobs=2, regex="a+", **dict(zip(keys, values, strict=True))
        )
        for stream in (False, True):
            yield GenerateRequest(
                request_id="client",
                tokenized=TokenizedInput(original_text="hi", input_ids=[1, 2, 300]),
                sampling_params=sampling,
                stream=stream,
                kv_transfer_params=KvTransferParams(remote_host="evil", remote_port=1),
                kv_transfer_params_json='{"do_remote_prefill":true}',
                data_parallel_rank=0,
            )


@pytest.fixture(params=["sampling params", "no sampling params"])
def messages(request):
    if request.param == "sampling params":
        return [encode(message) + UNKNOWN for message in client_requests()]
    return [encode(GenerateRequest(request_id="r", text="prompt")) + UNKNOWN]


def test_case_a8_the_prefill_leg_can_only_end_by_its_length(messages):
    for message in messages:
        view = parse_request(message, disaggregated=True)
        leg = decode(GenerateRequest, prefill_leg(view, attempt_id="a1", kv_params=PARAMS))
        params = leg.sampling_params
        assert (params.max_tokens, params.min_tokens, params.n) == (1, 0, 1)
        assert (params.stop, params.stop_token_ids, params.ignore_eos) == ([], [], True)
        assert not leg.stream
        assert leg.request_id == "a1"
        assert leg.kv_transfer_params_json == PARAMS


def test_a_release_leg_does_not_carry_the_prompt():
    ids = list(range(300, 5000))
    request = GenerateRequest(request_id="r", tokenized=TokenizedInput(original_text="long", input_ids=ids))
    leg = release_leg(parse_request(encode(request), disaggregated=True), attempt_id="r", kv_params=PARAMS)
    assert len(leg) < 500
    assert decode(GenerateRequest, leg).tokenized == TokenizedInput(input_ids=[300])


def test_case_a8_the_prefill_leg_keeps_what_the_first_token_is_sampled_with():
    view = parse_request(encode(next(iter(client_requests()))), disaggregated=True)
    params = decode(GenerateRequest, prefill_leg(view, attempt_id="a", kv_params=None)).sampling_params
    assert (params.temperature, params.seed, params.logprobs, params.regex) == (0.5, 11, 2, "a+")


def test_case_a8_the_decode_leg_is_the_clients_bytes_outside_id_stream_and_kv(messages):
    without_those = {(1,): None, (5,): None, (6,): None, (8,): None}
    for message in messages:
        view = parse_request(message, disaggregated=True)
        leg = decode_leg(view, attempt_id="a1", kv_params='{"x": 1e2}')
        assert edit(leg, without_those) == edit(message, without_those)
        decoded = decode(GenerateRequest, leg)
        assert decoded.stream
        assert decoded.request_id == "a1"
        assert decoded.kv_transfer_params_json == '{"x": 1e2}', "the worker's own spelling, byte for byte"


def test_no_leg_carries_kv_params_the_client_made_up(messages):
    for message in messages:
        view = parse_request(message, disaggregated=True)
        for leg in (
            prefill_leg(view, attempt_id="a", kv_params=None),
            decode_leg(view, attempt_id="a", kv_params=None),
        ):
            decoded = decode(GenerateRequest, leg)
            assert decoded.kv_transfer_params_json is None
            assert not decoded.kv_transfer_params.remote_host


def test_a_plain_leg_changes_the_id_and_the_stream_flag_only(messages):
    for message in messages:
        leg = plain_leg(parse_request(message, disaggregated=False), attempt_id="a1")
        rest = {(1,): None, (5,): None}
        assert edit(leg, rest) == edit(message, rest)


def test_a_release_leg_is_made_to_be_refused(messages):
    for message in messages:
        leg = decode(
            GenerateRequest, release_leg(parse_request(message, disaggregated=True), attempt_id="r", kv_params=PARAMS)
        )
        assert leg.sampling_params.max_tokens == 0
        assert leg.kv_transfer_params_json == PARAMS


def test_prompt_logprobs_are_refused_behind_a_pair_only():
    message = encode(GenerateRequest(text="x", sampling_params=SamplingParams(prompt_logprobs=0)))
    with pytest.raises(BadRequest, match="prompt_logprobs"):
        parse_request(message, disaggregated=True)
    assert parse_request(message, disaggregated=False).n == 1


def test_no_tokens_are_refused_behind_a_pair_only():
    """A plain worker says so itself, and at once; behind a pair the prompt would have been computed by then."""
    message = encode(GenerateRequest(text="x", sampling_params=SamplingParams(max_tokens=0)))
    with pytest.raises(BadRequest, match="max_tokens is 0"):
        parse_request(message, disaggregated=True)
    assert parse_request(message, disaggregated=False).n == 1


PIXELS = TensorData(shape=[2], dtype="uint8", inline=b"ab")
GRIDS = {"image_grid_thw": TensorData(shape=[1, 3], dtype="int64", inline=bytes(24))}


def test_media_that_come_without_pixels_are_refused_behind_a_pair_only():
    """A plain worker says so itself. One that prefills sees KV params, takes its leg for a decode leg, and dies."""
    seen, unseen = MultimodalInputs(pixel_values=PIXELS), MultimodalInputs(model_specific_tensors=GRIDS)
    for message in (
        encode(GenerateRequest(mm_inputs=unseen)),
        encode(GenerateRequest(mm_inputs=seen, extra_mm_inputs=[seen, unseen])),
    ):
        with pytest.raises(BadRequest, match="without pixel_values") as caught:
            parse_request(message, disaggregated=True)
        assert caught.value.error_code == "invalid_multimodal_request"
        assert parse_request(message, disaggregated=False).n == 1


def test_media_with_their_pixels_or_with_hashes_only_pass():
    whole = MultimodalInputs(pixel_values=PIXELS, model_specific_tensors=GRIDS)
    in_pieces = field_bytes(7, field_bytes(3, b"")) + field_bytes(7, field_bytes(2, b""))
    for message in (
        encode(GenerateRequest(mm_inputs=whole, extra_mm_inputs=[whole])),
        encode(GenerateRequest(extra_mm_inputs=[MultimodalInputs(mm_hashes=["a"])])),
        in_pieces,
    ):
        assert parse_request(message, disaggregated=True).n == 1


def test_bytes_that_are_no_message_are_a_decode_error():
    with pytest.raises(DecodeError):
        parse_request(b"\x0a\xff", disaggregated=True)


def test_n_and_stream_are_read_with_their_defaults():
    sampling = field_bytes(4, field_varint(15, 4))
    assert parse_request(sampling, disaggregated=True).n == 4
    assert parse_request(b"", disaggregated=True).n == 1
    assert client_streams(field_varint(5, 1))
    assert not client_streams(b"")
