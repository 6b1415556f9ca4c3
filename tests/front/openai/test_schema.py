"""Requests as the client wrote them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_router.errors import BadRequest, TooLarge
from trio_router.front.openai.schema import MAX_JSON_VALUES, ChatRequest, CompletionRequest, parse

MESSAGES = [{"role": "user", "content": "x"}]


def chat(**fields: object) -> ChatRequest:
    return parse(ChatRequest, msgspec.json.encode({"messages": MESSAGES, **fields}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", 1),
        ("stream", "true"),
        ("n", 0),
        ("n", 1.5),
        ("max_tokens", -1),
        ("max_tokens", 2**31),
        ("max_completion_tokens", "x"),
        ("min_tokens", -1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", -0.1),
        ("frequency_penalty", 3),
        ("presence_penalty", -3),
        ("repetition_penalty", 0),
        ("seed", "x"),
        ("stop", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**32]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {str(2**31): 1}),
        ("logit_bias", {str(at): 1 for at in range(20_000)}),
        ("stop", ["x"] * 2000),
        ("stop_token_ids", [1] * 5000),
        ("ignore_eos", 1),
        ("rid", ""),
        ("stream_options", {"include_usage": "yes"}),
        ("response_format", "json"),
        ("chat_template_kwargs", []),
    ],
)
def test_a_wrong_value_names_its_field(name: str, value: object) -> None:
    with pytest.raises(BadRequest) as caught:
        chat(**{name: value})

    assert f"$.{name}" in caught.value.message
    assert caught.value.error_code == "invalid_request_parameters"


def test_null_is_as_good_as_absent() -> None:
    names = [name for name in ChatRequest.__struct_fields__ if name != "messages"]

    assert chat(**dict.fromkeys(names)) == chat()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b'{"messages": NaN}',
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b'{"a":' + b"[" * 100_000,
        b'{"messages": [{"role": "user"}]}x',
    ],
)
def test_what_is_no_json_is_said_to_be_none(body: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(ChatRequest, body)

    assert caught.value.error_code == "malformed_json"


@given(st.binary(max_size=100))
def test_no_body_gets_past_as_anything_but_a_bad_request(body: bytes) -> None:
    with pytest.raises(BadRequest):
        parse(CompletionRequest, body)


def test_a_schema_is_kept_as_it_was_written() -> None:
    schema = b'{"b": 1e2,"a":1}'
    form = b'{"type":"json_schema","json_schema":{"schema":%b}}' % schema
    body = b'{"messages":[{"role":"user"}],"response_format":%b}' % form

    wanted = parse(ChatRequest, body).response_format

    assert bytes(wanted.json_schema.schema) == schema


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":[' + b"1," * MAX_JSON_VALUES + b"1]}",
        b'{"prompt":"","x":[' + b"[]," * (MAX_JSON_VALUES // 2) + b"1]}",
        b'{"prompt":"","x":[' + b"{}," * (MAX_JSON_VALUES // 2) + b"1]}",
        b'{"prompt":"","x":' + b"[" * (MAX_JSON_VALUES + 1),
    ],
    ids=["numbers", "lists", "objects", "depth"],
)
def test_a_body_of_more_values_than_can_be_decoded_at_once_is_refused_undecoded(body: bytes) -> None:
    with pytest.raises(TooLarge, match="commas and brackets"):
        parse(CompletionRequest, body)


def test_a_body_that_is_long_by_its_texts_is_taken() -> None:
    text = "No image has commas. " * MAX_JSON_VALUES

    assert parse(CompletionRequest, msgspec.json.encode({"prompt": text})).prompt == text
