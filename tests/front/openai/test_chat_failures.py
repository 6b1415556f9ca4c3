"""POST /v1/chat/completions: requests that are refused, and answers that fail."""

from __future__ import annotations

import pytest
import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from trio_router.dispatch.retry import RetrySettings
from trio_router.dispatch.router import RouterSettings
from trio_router.errors import DecodeFailed, WorkerRejected, WorkerUnavailable
from trio_router.testing.scripted import open_scene, plain_worker

CHAT = "/v1/chat/completions"
HELLO = {"model": "tiny-english", "messages": [{"role": "user", "content": "Say hello"}]}
STREAM = {**HELLO, "stream": True}


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
