"""From the client's sampling fields to the engine's."""

from __future__ import annotations

import betterproto
import msgspec
import pytest

from trio_router.errors import BadRequest, Unsupported
from trio_router.front.openai.sampling import sampling_params
from trio_router.front.openai.schema import ChatRequest, parse
from trio_router.protocol.codec import decode, encode
from trio_router.protocol.messages import SamplingParams


def mapped(*, max_tokens: int | None = None, defaults: dict[str, float] | None = None, **fields) -> SamplingParams:
    body = msgspec.json.encode({"messages": [{"role": "user", "content": "x"}], **fields})
    params = sampling_params(parse(ChatRequest, body), max_tokens=max_tokens, defaults=defaults or {})
    return decode(SamplingParams, encode(params))


def test_what_the_client_leaves_out_is_neutral() -> None:
    assert mapped() == SamplingParams(
        temperature=None,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.0,
        max_tokens=None,
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
        n=1,
        seed=None,
    )


def test_every_field_reaches_the_engine() -> None:
    params = mapped(
        max_tokens=5,
        temperature=0.5,
        top_p=0.25,
        top_k=40,
        min_p=0.125,
        frequency_penalty=-1.5,
        presence_penalty=1.5,
        repetition_penalty=1.25,
        min_tokens=2,
        stop=["a", "b"],
        stop_token_ids=[7, 8],
        ignore_eos=True,
        n=3,
        seed=42,
        logit_bias={"5": -100, "9": 1.5},
        no_stop_trim=True,
    )

    assert params == SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=40,
        min_p=0.125,
        frequency_penalty=-1.5,
        presence_penalty=1.5,
        repetition_penalty=1.25,
        max_tokens=5,
        min_tokens=2,
        stop=["a", "b"],
        stop_token_ids=[7, 8],
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
        ignore_eos=True,
        n=3,
        seed=42,
        include_stop_str_in_output=True,
        logit_bias={5: -100.0, 9: 1.5},
    )


def test_a_temperature_of_zero_is_not_an_absent_one() -> None:
    assert mapped(temperature=0).temperature == 0.0


def test_all_tokens_is_minus_one_to_clients_and_zero_to_the_engine() -> None:
    assert mapped(top_k=-1).top_k == 0


@pytest.mark.parametrize(("given", "sent"), [(2**40, 2**31 - 1), (-(2**70), -(2**31)), (-5, -5)])
def test_a_seed_is_brought_into_range(given: int, sent: int) -> None:
    assert mapped(seed=given).seed == sent


@pytest.mark.parametrize(("stop", "sent"), [("x", ["x"]), ("", []), (["", "y"], ["y"]), (None, [])])
def test_stops_are_a_list_without_empty_ones(stop: object, sent: list[str]) -> None:
    assert mapped(stop=stop).stop == sent


def test_the_models_recommendations_fill_only_what_is_left_out() -> None:
    defaults = {"temperature": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5}

    filled = mapped(defaults=defaults)
    chosen = mapped(defaults=defaults, temperature=0, top_k=-1, top_p=1, min_p=0, repetition_penalty=1)

    assert (filled.temperature, filled.top_k, filled.top_p) == (0.5, 20, 0.75)
    assert (filled.min_p, filled.repetition_penalty) == (0.25, 1.5)
    assert (chosen.temperature, chosen.top_k, chosen.top_p) == (0.0, 0, 1.0)
    assert (chosen.min_p, chosen.repetition_penalty) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"response_format": {"type": "text"}}, "", None),
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "string"}}}},
            "json_schema",
            '{"type":"string"}',
        ),
        ({"regex": "a+"}, "regex", "a+"),
        ({"ebnf": "root ::= x"}, "grammar", "root ::= x"),
    ],
)
def test_a_constraint_is_passed_on(fields: dict, name: str, value: str | None) -> None:
    assert betterproto.which_one_of(mapped(**fields), "constraint") == (name, value)


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "a", "ebnf": "b"},
        {"regex": "a", "response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
        {"response_format": {"type": "xml"}},
    ],
)
def test_a_constraint_that_makes_no_sense_is_refused(fields: dict) -> None:
    with pytest.raises(BadRequest):
        mapped(**fields)


def test_prompt_logprobs_are_unsupported() -> None:
    with pytest.raises(Unsupported):
        mapped(prompt_logprobs=1)


@pytest.mark.parametrize("stop", ["x" * 4097, ["x" * 2000] * 3])
def test_stop_strings_that_would_take_too_much_memory_to_look_for_are_refused(stop: object) -> None:
    with pytest.raises(BadRequest, match="stop: at most 4096 characters"):
        mapped(stop=stop)


def test_as_many_as_are_allowed_are_passed_on() -> None:
    assert mapped(stop=["x" * 1024] * 4).stop == ["x" * 1024] * 4
