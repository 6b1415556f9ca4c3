"""POST /v1/completions, from the client's side."""

from __future__ import annotations

import pytest
import trio

from trio_router.errors import WorkerUnavailable

COMPLETIONS = "/v1/completions"


async def test_a_whole_completion(autojump_clock, serve, scripted, frames, tokenizer) -> None:
    router = scripted(frames.text(" world", "length", cached=2))
    client = await (await serve(router)).connect()

    response = await client.post(COMPLETIONS, {"prompt": "Hello", "max_tokens": 2})

    assert response.json == {
        "id": "cmpl-" + "0" * 31 + "2",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "tiny-english",
        "system_fingerprint": "default",
        "choices": [{"index": 0, "text": " world", "logprobs": None, "finish_reason": "length", "matched_stop": None}],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 2,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
    [request] = router.requests
    assert request.tokenized.original_text == "Hello"
    assert request.tokenized.input_ids == tokenizer.encode("Hello")
    assert request.sampling_params.max_tokens == 2


async def test_a_streamed_completion(autojump_clock, serve, scripted, frames, read_events, content) -> None:
    client = await (await serve(scripted(frames.text(" world")))).connect()

    events = read_events((await client.post(COMPLETIONS, {"prompt": "Hello", "stream": True})).body)

    assert [event["choices"] for event in events[:-1]] == [
        [{"index": 0, "text": " wor", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "ld", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop", "matched_stop": None}],
    ]
    assert {event["object"] for event in events[:-1]} == {"text_completion"}
    assert content(events) == " world"


@pytest.mark.parametrize("prompt", [[300, 301, 302], [[300, 301, 302]]])
async def test_a_prompt_of_token_ids_is_passed_on(autojump_clock, serve, scripted, frames, prompt) -> None:
    router = scripted(frames.text("x"))
    client = await (await serve(router)).connect()

    assert (await client.post(COMPLETIONS, {"prompt": prompt})).status == 200

    assert [list(request.tokenized.input_ids) for request in router.requests] == [[300, 301, 302]]


# several prompts


def answers(frames):
    """Each prompt is answered with itself; longer ones take longer."""

    def script(request):
        text = request.tokenized.original_text
        return [step for frame in frames.text(text, cached=1) for step in (float(len(text)), frame)]

    return script


async def test_several_prompts_run_at_once_and_their_usage_is_summed(autojump_clock, serve, scripted, frames) -> None:
    router = scripted(answers(frames))
    client = await (await serve(router)).connect()

    response = (await client.post(COMPLETIONS, {"prompt": ["one two three", "four"], "rid": "r"})).json

    assert [(choice["index"], choice["text"]) for choice in response["choices"]] == [(0, "one two three"), (1, "four")]
    assert response["usage"]["prompt_tokens"] == 14
    assert response["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert response["usage"]["completion_tokens"] == sum(
        len(frames.tokenizer.encode(text)) for text in ("one two three", "four")
    )
    assert {request.request_id for request in router.requests} == {"r-p0", "r-p1"}
    # The longer of both, not their sum.
    assert trio.current_time() == max(
        len(text) * (len(frames.tokenizer.encode(text)) + 1) for text in ("one two three", "four")
    )


async def test_several_prompts_with_several_choices_have_their_own_indices(
    autojump_clock, serve, scripted, frames, read_events, content
) -> None:
    def script(request):
        text = request.tokenized.original_text
        return [*frames.text(f"{text}-0", index=0), *frames.text(f"{text}-1", index=1)]

    client = await (await serve(scripted(script))).connect()
    asked = {"prompt": ["a", "b"], "n": 2}

    events = read_events((await client.post(COMPLETIONS, {**asked, "stream": True})).body)
    whole = (await client.post(COMPLETIONS, asked)).json

    assert [content(events, index) for index in range(4)] == ["a-0", "a-1", "b-0", "b-1"]
    assert [choice["text"] for choice in whole["choices"]] == ["a-0", "a-1", "b-0", "b-1"]


@pytest.mark.parametrize("stream", [True, False])
async def test_the_first_prompt_that_fails_fails_all(autojump_clock, serve, scripted, frames, stream: bool) -> None:
    def script(request):
        return [1.0, WorkerUnavailable("busy")] if request.tokenized.original_text == "bad" else [60.0]

    router = scripted(script)
    client = await (await serve(router)).connect()

    response = await client.post(COMPLETIONS, {"prompt": ["good", "bad", "fine"], "stream": stream})

    assert (response.status, response.json["error"]["message"]) == (503, "busy")
    assert sorted(router.outcomes) == ["cancelled", "cancelled", "failed"]
    assert trio.current_time() == 1.0


async def test_a_prompt_that_fails_late_ends_the_stream_with_its_error(
    autojump_clock, serve, scripted, frames, read_events
) -> None:
    def script(request):
        text = request.tokenized.original_text
        return [2.0, WorkerUnavailable("busy")] if text == "bad" else [frames.chunk([300]), 60.0]

    router = scripted(script)
    client = await (await serve(router)).connect()

    events = read_events((await client.post(COMPLETIONS, {"prompt": ["good", "bad"], "stream": True})).body)

    assert events[-1]["error"]["message"] == "busy"
    assert sorted(router.outcomes) == ["cancelled", "failed"]


async def test_leaving_cancels_every_prompt(autojump_clock, serve, scripted, frames, request_bytes) -> None:
    router = scripted([frames.chunk([300]), 60.0])
    client = await (await serve(router)).connect()
    await client.send(request_bytes("POST", COMPLETIONS, body=b'{"prompt": ["a", "b", "c"], "stream": true}'))
    await trio.sleep(1)

    client.leave()
    await trio.sleep(0.1)

    assert router.outcomes == ["cancelled"] * 3
    assert router.ended_at == [1.0] * 3


# refusals


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt must be"),
        ({"prompt": ["a", 1]}, 400, "prompt must be"),
        ({"prompt": [[1], "a"]}, 400, "prompt must be"),
        ({"prompt": [1.5]}, 400, "$.prompt[0]"),
        ({"prompt": [-1]}, 400, "$.prompt[0]"),
        ({"prompt": [2**40]}, 400, "$.prompt[0]"),
        ({"prompt": ""}, 400, "the prompt is empty"),
        ({"prompt": [[]]}, 400, "the prompt is empty"),
        ({"prompt": ["a"] * 129}, 400, "129 prompts"),
        ({"prompt": "a", "logprobs": 0}, 501, "logprobs"),
        ({"prompt": "a", "echo": True}, 501, "echo"),
        ({"prompt": "a", "suffix": "b"}, 501, "suffix"),
        ({"prompt": "a", "best_of": 3}, 501, "best_of"),
    ],
)
async def test_what_cannot_be_served_is_refused_with_its_reason(
    autojump_clock, serve, scripted, frames, body: dict, status: int, named: str
) -> None:
    router = scripted(frames.text("x"))
    client = await (await serve(router)).connect()

    response = await client.post(COMPLETIONS, body)

    assert response.status == status
    assert named in response.json["error"]["message"]
    assert router.requests == []


async def test_fields_that_change_nothing_are_fine(autojump_clock, serve, scripted, frames) -> None:
    client = await (await serve(scripted(frames.text("x")))).connect()
    harmless = {"prompt": "a", "echo": False, "suffix": "", "best_of": 1, "user": "me", "logprobs": None}

    assert (await client.post(COMPLETIONS, harmless)).status == 200


# limits


@pytest.mark.parametrize("prompt", ["hello " * 100, [300] * 100, ["hi", "hello " * 100], [[300], [300] * 100]])
async def test_a_prompt_that_the_context_cannot_hold_costs_no_worker_anything(
    autojump_clock, serve, scripted, prompt
) -> None:
    router = scripted([])
    client = await (await serve(router, context=50)).connect()

    response = await client.post(COMPLETIONS, {"prompt": prompt})

    assert (response.status, response.json["error"]["code"]) == (400, "context_length_exceeded")
    assert router.requests == []


async def test_more_choices_than_are_allowed_are_refused_before_any_work(
    autojump_clock, serve, scripted, tokenizer, monkeypatch
) -> None:
    def refuse(*args, **options) -> None:
        raise AssertionError("a prompt was tokenized")

    monkeypatch.setattr(tokenizer, "encode", refuse)
    client = await (await serve(scripted([]), front={"max_choices": 5})).connect()

    one = await client.post(COMPLETIONS, {"prompt": "a", "n": 6})
    many = await client.post(COMPLETIONS, {"prompt": ["a", "b", "c"], "n": 2})

    assert one.json["error"]["message"] == "n=6 asks for 6 choices, more than the limit of 5"
    assert many.json["error"]["message"] == "n=2 for each of 3 prompts asks for 6 choices, more than the limit of 5"
    assert {one.status, many.status} == {400}
