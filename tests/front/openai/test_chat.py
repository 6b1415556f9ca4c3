"""POST /v1/chat/completions, from the client's side."""

from __future__ import annotations

import gc

import msgspec
import pytest
import trio

from trio_router.front.openai.schema import ChatRequest
from trio_router.front.wire import HttpRequest

CHAT = "/v1/chat/completions"
HELLO = {"model": "tiny-english", "messages": [{"role": "user", "content": "Say hello"}]}
STREAM = {**HELLO, "stream": True}


# the answer as a whole


async def test_a_whole_answer(autojump_clock, serve, scripted, frames) -> None:
    router = scripted(frames.text("Hello world", cached=4))
    client = await (await serve(router)).connect()

    response = await client.post(CHAT, HELLO)

    assert response.status == 200
    assert response.header("content-type") == "application/json"
    assert response.json == {
        "id": "chatcmpl-" + "0" * 31 + "2",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "tiny-english",
        "system_fingerprint": "default",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello world"},
                "logprobs": None,
                "finish_reason": "stop",
                "matched_stop": None,
            }
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 5,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
    assert router.outcomes == ["ok"]


async def test_the_worker_gets_the_rendered_prompt_streamed(autojump_clock, serve, scripted, frames, tokenizer) -> None:
    router = scripted(frames.text("x"))
    client = await (await serve(router)).connect()

    await client.post(CHAT, {**HELLO, "max_completion_tokens": 9, "rid": "mine"})

    [request] = router.requests
    prompt = "<|im_start|>user\nSay hello<|im_end|>\n<|im_start|>assistant\n"
    assert request.request_id == "mine"
    assert request.tokenized.original_text == prompt
    assert request.tokenized.input_ids == tokenizer.encode(prompt)
    assert request.stream
    assert request.sampling_params.max_tokens == 9
    assert router.timeouts == [1800.0]


async def test_without_an_id_of_the_clients_the_response_id_is_the_request_id(
    autojump_clock, serve, scripted, frames
) -> None:
    router = scripted(frames.text("x"))
    client = await (await serve(router)).connect()

    response = await client.post(CHAT, HELLO)

    assert router.requests[0].request_id == response.json["id"]
    assert response.header("x-request-id") == response.json["id"]


@pytest.mark.parametrize(
    ("header", "rid", "known_as", "echoed"),
    [
        ("proxy-1", None, "proxy-1", "proxy-1"),
        ("proxy-1", "mine", "mine", "proxy-1"),
        (None, "mine", "mine", "mine"),
        (None, "m\u00efne", "m\u00efne", "req-" + "0" * 31 + "1"),
        (None, "a b\n", "a b\n", "req-" + "0" * 31 + "1"),
    ],
)
async def test_a_request_is_known_by_the_id_that_its_client_gave(
    autojump_clock, serve, scripted, frames, header, rid, known_as, echoed
) -> None:
    router = scripted(frames.text("hi"))
    client = await (await serve(router)).connect()

    asked = {"messages": [{"role": "user", "content": "hi"}], **({"rid": rid} if rid else {})}
    response = await client.post(CHAT, asked, headers=f"x-request-id: {header}\r\n" if header else "")

    assert router.requests[0].request_id == known_as
    assert response.header("x-request-id") == echoed


async def test_several_choices_are_told_in_order(autojump_clock, serve, scripted, frames) -> None:
    script = [*frames.text("second", "length", index=1), *frames.text("first", index=0)]
    router = scripted(script)
    client = await (await serve(router)).connect()

    response = (await client.post(CHAT, {**HELLO, "n": 2})).json

    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in response["choices"]] == [
        (0, "first", "stop"),
        (1, "second", "length"),
    ]
    assert response["usage"]["prompt_tokens"] == 7
    assert router.requests[0].sampling_params.n == 2


# the answer as events


async def test_a_streamed_answer(autojump_clock, serve, scripted, frames, read_events) -> None:
    client = await (await serve(scripted(frames.text("Hello you")))).connect()

    response = await client.post(CHAT, STREAM)
    events = read_events(response.body)

    assert response.header("content-type") == "text/event-stream; charset=utf-8"
    assert response.header("cache-control") == "no-cache"
    same = {
        "id": "chatcmpl-" + "0" * 31 + "2",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": "tiny-english",
        "system_fingerprint": "default",
    }
    pieces = ["", "He", "ll", "o", " you"]
    assert events[:-2] == [
        {
            **same,
            "choices": [
                {
                    "index": 0,
                    "delta": {"role": "assistant", "content": piece},
                    "logprobs": None,
                    "finish_reason": None,
                }
            ],
        }
        for piece in pieces
    ]
    ending = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "matched_stop": None}
    assert events[-2:] == [{**same, "choices": [ending]}, "[DONE]"]


async def test_usage_comes_last_when_asked_for(autojump_clock, serve, scripted, frames, read_events) -> None:
    client = await (await serve(scripted(frames.text("Hello world", cached=3)))).connect()

    events = read_events((await client.post(CHAT, {**STREAM, "stream_options": {"include_usage": True}})).body)

    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert all("usage" not in event for event in events[:-2])


@pytest.mark.parametrize("stream", [True, False])
async def test_the_prompt_is_counted_by_whoever_computed_it(
    autojump_clock, serve, scripted, frames, read_events, monkeypatch, stream
) -> None:
    """Behind a pair a decode worker counts all that it was handed as cached."""
    monkeypatch.setattr("tests.front.openai.conftest.ScriptedStream.prompt_counts", (6, 2), raising=True)
    client = await (await serve(scripted(frames.text("Hello world", cached=6)))).connect()

    body = (await client.post(CHAT, {**HELLO, "stream": stream, "stream_options": {"include_usage": True}})).body

    usage = (read_events(body)[-2] if stream else msgspec.json.decode(body))["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (6, 2)


async def test_an_event_leaves_as_soon_as_its_token_comes(
    autojump_clock, serve, scripted, frames, request_bytes
) -> None:
    script = [step for chunk in frames.text("Hello you") for step in (1.0, chunk)]
    client = await (await serve(scripted(script))).connect()
    await client.send(request_bytes("POST", CHAT, body=msgspec.json.encode(STREAM)))

    arrived = []
    for piece in (b"He", b"ll", b"o", b" you"):
        await client.until(b'"content":"' + piece + b'"')
        arrived.append(trio.current_time())

    assert arrived == [1.0, 2.0, 3.0, 4.0]


async def test_streams_of_several_choices_interleave(
    autojump_clock, serve, scripted, frames, read_events, content
) -> None:
    first, second = frames.text("one two", index=0), frames.text("three four five", "length", index=1)
    mixed = [frame for pair in zip(first, second, strict=False) for frame in pair] + second[len(first) :]
    client = await (await serve(scripted(mixed))).connect()

    events = read_events((await client.post(CHAT, {**STREAM, "n": 2})).body)

    assert (content(events, 0), content(events, 1)) == ("one two", "three four five")
    endings = [choice for event in events[:-1] for choice in event["choices"] if choice["finish_reason"]]
    assert [(choice["index"], choice["finish_reason"]) for choice in endings] == [(0, "stop"), (1, "length")]


async def test_a_choice_without_text_has_no_role_only_an_end(
    autojump_clock, serve, scripted, frames, read_events
) -> None:
    client = await (await serve(scripted([frames.complete("length")]))).connect()

    events = read_events((await client.post(CHAT, STREAM)).body)

    assert [event["choices"][0]["delta"] for event in events[:-1]] == [{}]


@pytest.mark.parametrize("batch", [1, 7, 1000])
async def test_case_c1_content_reaches_the_client_byte_for_byte(
    autojump_clock, serve, scripted, frames, read_events, content, batch: int
) -> None:
    family = "\N{WOMAN}\u200d\N{WOMAN}\u200d\N{GIRL}\u200d\N{BOY}"
    text = f'data: [DONE]\n\n中文 한국어 😀{family} "q" \\\r\n\x00\x1b: comment\nevent: x\n\u2028 data: [DONE]\n\n'
    script = frames.text(text)
    client = await (await serve(scripted([script[i : i + batch] for i in range(0, len(script), batch)]))).connect()

    streamed = await client.post(CHAT, STREAM)
    whole = await client.post(CHAT, HELLO)

    events = read_events(streamed.body)
    assert content(events) == text
    assert events.count("[DONE]") == 1
    assert whole.json["choices"][0]["message"]["content"] == text


async def test_a_batch_of_a_whole_window_is_told_in_few_events(
    autojump_clock, serve, scripted, frames, read_events, content
) -> None:
    client = await (await serve(scripted([frames.text("word " * 1000)]), capacity=1 << 20)).connect()

    events = read_events((await client.post(CHAT, STREAM)).body)

    assert content(events) == "word " * 1000
    assert len(events) < 6


# stops


async def test_a_stop_string_ends_the_text_and_is_told(
    autojump_clock, serve, scripted, frames, read_events, content
) -> None:
    router = scripted(frames.text("Hello world and more", "length"))
    client = await (await serve(router)).connect()

    events = read_events((await client.post(CHAT, {**STREAM, "stop": ["", "orld"]})).body)
    whole = (await client.post(CHAT, {**HELLO, "stop": "orld"})).json["choices"][0]

    ending = events[-2]["choices"][0]
    assert content(events) == whole["message"]["content"] == "Hello w"
    assert (ending["finish_reason"], ending["matched_stop"]) == ("stop", "orld")
    assert (whole["finish_reason"], whole["matched_stop"]) == ("stop", "orld")
    assert router.requests[0].sampling_params.stop == ["orld"]


async def test_a_stop_string_can_be_shown(autojump_clock, serve, scripted, frames) -> None:
    client = await (await serve(scripted(frames.text("Hello world and more")))).connect()

    whole = (await client.post(CHAT, {**HELLO, "stop": "orld", "no_stop_trim": True})).json["choices"][0]

    assert whole["message"]["content"] == "Hello world"


async def test_what_only_looked_like_a_stop_is_not_lost(autojump_clock, serve, scripted, frames) -> None:
    client = await (await serve(scripted(frames.text("Hello wor", "length")))).connect()

    whole = (await client.post(CHAT, {**HELLO, "stop": "world"})).json["choices"][0]

    assert (whole["message"]["content"], whole["finish_reason"]) == ("Hello wor", "length")


async def test_a_stop_token_is_hidden_and_told(autojump_clock, serve, scripted, frames, tokenizer) -> None:
    [stop] = tokenizer.encode(" this")
    script = [frames.chunk([token]) for token in tokenizer.encode("Hello this")]
    script.append(frames.complete("stop", output_ids=[stop], matched_token_id=stop))
    client = await (await serve(scripted(script))).connect()

    whole = (await client.post(CHAT, {**HELLO, "stop_token_ids": [stop]})).json

    assert whole["choices"][0]["message"]["content"] == "Hello"
    assert whole["choices"][0]["matched_stop"] == stop
    assert whole["usage"]["completion_tokens"] == len(script) - 1


async def test_tokens_after_a_stop_are_counted_and_not_shown(
    autojump_clock, serve, scripted, frames, read_events, content
) -> None:
    script = frames.text("one. two. three.", "length")
    client = await (await serve(scripted(script))).connect()
    asked = {**STREAM, "stop": ". t", "stream_options": {"include_usage": True}}

    events = read_events((await client.post(CHAT, asked)).body)

    assert content(events) == "one"
    assert events[-2]["usage"]["completion_tokens"] == len(script) - 1


async def test_text_parts_and_unknown_fields_are_fine(autojump_clock, serve, scripted, frames) -> None:
    router = scripted(frames.text("x"))
    client = await (await serve(router)).connect()
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two", "cache_control": {}}]
    body = {
        **HELLO,
        "messages": [{"role": "user", "content": parts, "x": 1}],
        "user": "me",
        "metadata": {"a": 1},
        "tools": [{"type": "function"}],
        "tool_choice": "none",
        "stop": None,
    }

    assert (await client.post(CHAT, body)).status == 200
    assert "one\ntwo<|im_end|>" in router.requests[0].tokenized.original_text


async def test_without_a_model_the_only_one_serves(autojump_clock, serve, scripted, frames) -> None:
    client = await (await serve(scripted(frames.text("x")))).connect()

    response = await client.post(CHAT, {"messages": HELLO["messages"]})

    assert response.json["model"] == "tiny-english"


# models


async def test_a_client_that_has_to_choose_a_model_is_told_so(autojump_clock, serve, scripted, frames) -> None:
    router = scripted(frames.text("hi"))
    router.served = ["one", "two"]
    client = await (await serve(router)).connect()
    asked = {"messages": HELLO["messages"]}

    refused = await client.post(CHAT, asked)

    assert (refused.status, refused.json["error"]["code"]) == (400, "invalid_request_parameters")
    assert refused.json["error"]["message"] == "several models are served here: one, two; the request must name one"
    assert (await client.post(CHAT, {**asked, "model": "two"})).json["model"] == "two"


# memory


@pytest.mark.parametrize("stream", [True, False])
async def test_case_f6_nothing_of_a_body_is_held_while_its_answer_is_made(
    autojump_clock, serve, scripted, frames, stream: bool
) -> None:
    site = await serve(scripted([frames.chunk([300]), 1000.0]), small_body_bytes=0)
    client = await site.connect()

    await client.send(wire({**HELLO, "stream": stream, "metadata": {"note": "x" * 100_000}}))
    await trio.sleep(1)

    assert site.server.held_body_bytes == 0
    assert [each for each in gc.get_objects() if isinstance(each, HttpRequest) and each.body] == []
    assert [each for each in gc.get_objects() if isinstance(each, ChatRequest)] == []
    client.leave()


def wire(asked: dict) -> bytes:
    body = msgspec.json.encode(asked)
    return b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body)
