"""POST /v1/chat/completions, from the client's side."""

from __future__ import annotations

import gc

import msgspec
import pytest
import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from trio_router.dispatch.retry import RetrySettings
from trio_router.dispatch.router import RouterSettings
from trio_router.errors import DecodeFailed, WorkerRejected, WorkerUnavailable
from trio_router.front.openai.schema import ChatRequest
from trio_router.front.wire import HttpRequest
from trio_router.testing.scripted import open_scene, plain_worker

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


# requests that are refused


@pytest.mark.parametrize(
    ("change", "status", "code", "named"),
    [
        ({"max_tokens": "many"}, 400, "invalid_request_parameters", "$.max_tokens"),
        ({"max_tokens": 0}, 400, "invalid_request_parameters", "$.max_tokens"),
        ({"temperature": 1e300}, 400, "invalid_request_parameters", "$.temperature"),
        ({"stop": ["a", 1]}, 400, "invalid_request_parameters", "$.stop[1]"),
        ({"messages": []}, 400, "invalid_request_parameters", "$.messages"),
        ({"messages": [{"content": "x"}]}, 400, "invalid_request_parameters", "role"),
        ({"n": 129}, 400, "invalid_request_parameters", "n=129"),
        ({"model": "other"}, 404, "model_not_found", "other"),
        ({"tools": [{"type": "function"}]}, 501, "not_implemented", "tools"),
        ({"logprobs": True}, 501, "not_implemented", "logprobs"),
        ({"regex": "a", "ebnf": "b"}, 400, "invalid_request_parameters", "constrain"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
            501,
            "multimodal_router_processing_unavailable",
            "messages[0].content[0].image_url: the media of this request are not left to workers (model_not_opted_in)",
        ),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused_with_its_reason(
    autojump_clock, serve, scripted, frames, change: dict, status: int, code: str, named: str
) -> None:
    router = scripted(frames.text("x"))
    client = await (await serve(router)).connect()

    response = await client.post(CHAT, {**STREAM, **change})

    assert (response.status, response.json["error"]["code"]) == (status, code)
    assert response.header("x-smg-error-code") == code
    assert named in response.json["error"]["message"]
    assert router.requests == []
    assert (await client.post(CHAT, HELLO)).status == 200


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


async def test_without_workers_it_is_unavailable_not_unknown(autojump_clock, serve, scripted) -> None:
    router = scripted([])
    router.served = []
    client = await (await serve(router)).connect()

    response = await client.post(CHAT, HELLO)

    assert (response.status, response.json["error"]["code"]) == (503, "no_available_workers")


# failures


@pytest.mark.parametrize("asked", [HELLO, STREAM])
async def test_case_d3_a_shed_request_is_told_when_to_come_back(autojump_clock, serve, scripted, frames, asked) -> None:
    busy = WorkerUnavailable("all workers are busy")
    busy.retry_after = 10.0
    client = await (await serve(scripted([1.0, busy]))).connect()

    response = await client.post(CHAT, asked)

    assert (response.status, response.json["error"]["code"]) == (503, "no_available_workers")
    assert response.header("retry-after") == "10"
    assert response.header("x-request-id") is not None


@pytest.mark.parametrize("asked", [HELLO, STREAM])
@pytest.mark.parametrize(("status", "expected"), [(Status.UNAVAILABLE, 503), (Status.RESOURCE_EXHAUSTED, 429)])
async def test_case_d3_when_every_worker_is_busy_the_last_ones_word_is_told_at_once(
    autojump_clock, serve, asked, status, expected
) -> None:
    async def busy(call, request) -> None:
        raise GRPCError(status, "worker is saturated: 256 requests are waiting")

    workers = [plain_worker(busy, name=name, model="tiny-english") for name in ("one", "two")]
    settings = RouterSettings(retry=RetrySettings(busy_retry_after=2.5))
    async with open_scene(*workers, router=settings) as scene:
        client = await (await serve(scene.router)).connect()
        before = trio.current_time()

        response = await client.post(CHAT, asked)

        assert trio.current_time() == pytest.approx(before, abs=0.001), "nobody was waited for"
        assert (response.status, response.header("retry-after")) == (expected, "3")
        assert response.header("x-smg-error-code") == "worker_overload_protection_shed"
        assert response.json["error"]["code"] == "worker_overload_protection_shed"
        message = "no worker can take it now; the last one said: worker is saturated: 256 requests are waiting"
        assert response.json["error"]["message"] == message
        assert [len(worker.requests) for worker in workers] == [1, 1]
        client.leave()


async def test_case_d2_a_workers_refusal_keeps_its_meaning(autojump_clock, serve, scripted) -> None:
    no = WorkerRejected("the prompt is too long", status=Status.INVALID_ARGUMENT, leg="prefill")
    client = await (await serve(scripted([no]))).connect()

    response = await client.post(CHAT, STREAM)

    assert response.status == 400
    assert response.json["error"]["message"] == "the prompt is too long"


@pytest.mark.parametrize("asked", [HELLO, STREAM])
async def test_case_g2_a_request_over_a_workers_message_limit_is_refused_once(autojump_clock, serve, asked) -> None:
    async def refuse(call, request) -> None:
        raise GRPCError(Status.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max (5242880 vs. 4194304)")

    workers = [plain_worker(refuse, name=name, model="tiny-english") for name in ("one", "two")]
    async with open_scene(*workers) as scene:
        client = await (await serve(scene.router)).connect()

        response = await client.post(CHAT, asked)

        assert (response.status, response.json["error"]["code"]) == (413, "payload_too_large")
        assert "larger than max (5242880 vs. 4194304)" in response.json["error"]["message"]
        assert sum(len(worker.requests) for worker in workers) == 1
        client.leave()


async def test_case_g3_a_failure_after_the_first_byte_is_an_event_and_no_done(
    autojump_clock, serve, scripted, frames, read_events, content
) -> None:
    broken = WorkerRejected("worker gone", status=Status.UNAVAILABLE, leg="decode")
    router = scripted([*frames.text("Hello")[:-1], broken])
    client = await (await serve(router)).connect()

    events = read_events((await client.post(CHAT, STREAM)).body)

    assert content(events[:-1]) == "Hello"
    assert events[-1] == {"error": {"message": "worker gone", "type": "internal_error", "code": "worker_stream_failed"}}
    assert router.outcomes == ["failed"]
    assert (await client.request("GET", "/health")).status == 200


async def test_a_failure_after_a_frame_without_text_can_still_be_the_status(
    autojump_clock, serve, scripted, frames, tokenizer
) -> None:
    half = tokenizer.encode("中")[:1]
    broken = WorkerRejected("worker gone", status=Status.UNAVAILABLE, leg="decode")
    client = await (await serve(scripted([frames.chunk(half), broken]))).connect()

    assert (await client.post(CHAT, STREAM)).status == 503


async def test_an_engine_that_fails_in_the_middle_is_an_error_not_an_end(
    autojump_clock, serve, scripted, frames, read_events
) -> None:
    script = [*frames.text("Hello")[:-1], frames.complete("error")]
    router = scripted(script)
    client = await (await serve(router)).connect()

    events = read_events((await client.post(CHAT, STREAM)).body)
    whole = await client.post(CHAT, HELLO)

    assert "error" in events[-1]
    assert (whole.status, whole.json["error"]["code"]) == (500, "worker_stream_failed")
    assert router.outcomes == ["failed", "failed"]


async def test_an_abort_is_passed_on(autojump_clock, serve, scripted, frames) -> None:
    client = await (await serve(scripted(frames.text("Hello", "abort")))).connect()

    assert (await client.post(CHAT, HELLO)).json["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("asked", [HELLO, STREAM])
async def test_a_frame_that_is_none_is_the_workers_fault(autojump_clock, serve, scripted, asked) -> None:
    router = scripted([b"\x0a\xff"])
    client = await (await serve(router)).connect()

    response = await client.post(CHAT, asked)

    assert (response.status, response.json["error"]["code"]) == (500, "worker_stream_failed")
    assert router.outcomes == ["failed"]


async def test_a_choice_that_nobody_asked_for_is_the_workers_fault(autojump_clock, serve, scripted, frames) -> None:
    client = await (await serve(scripted([frames.chunk([300], index=1)]))).connect()

    assert (await client.post(CHAT, HELLO)).json["error"]["code"] == DecodeFailed.code


async def test_a_bug_in_the_middle_tells_nothing(
    autojump_clock, serve, scripted, frames, read_events, caplog: pytest.LogCaptureFixture
) -> None:
    client = await (await serve(scripted([*frames.text("Hello")[:-1], KeyError("secret")]))).connect()

    events = read_events((await client.post(CHAT, STREAM)).body)

    assert events[-1]["error"] == {"message": "internal error", "type": "internal_error", "code": "internal_error"}
    assert "secret" in caplog.text


async def test_a_whole_answer_has_a_bound(autojump_clock, serve, scripted, frames) -> None:
    client = await (await serve(scripted(frames.text("word " * 50)), front={"max_response_chars": 100})).connect()

    response = await client.post(CHAT, HELLO)

    assert (response.status, response.json["error"]["code"]) == (413, "response_too_large")


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
