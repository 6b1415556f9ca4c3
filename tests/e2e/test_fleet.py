"""Two prefill and two decode workers behind `serve`, all separate processes, asked by the official OpenAI client."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from .conftest import Fleet

REQUESTS = 200
CONCURRENT = 32
SUBJECTS = ["the harbour", "a garden in spring", "the night train", "bread", "the weather in the hills", "an old map"]
PROMPTS = [f"Number {i}: tell me about {SUBJECTS[i % len(SUBJECTS)]}, please. " * (1 + i % 5) for i in range(REQUESTS)]


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def ask(client: openai.OpenAI, prompt: str, *, stream: bool) -> str:
    messages = [{"role": "user", "content": prompt}]
    if not stream:
        answer = client.chat.completions.create(
            model="tiny-english", messages=messages, max_tokens=24, temperature=0, stream=False
        )
        return answer.choices[0].message.content or ""
    with client.chat.completions.create(
        model="tiny-english", messages=messages, max_tokens=24, temperature=0, stream=True
    ) as chunks:
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def ask_all(url: str) -> list[str]:
    with client_of(url) as client, ThreadPoolExecutor(CONCURRENT) as pool:
        return list(pool.map(lambda item: ask(client, item[1], stream=item[0] % 2 == 0), enumerate(PROMPTS)))


def wait_for(condition: Callable[[], bool], *, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)  # real processes: nothing else tells when their ledgers have emptied
    return condition()


@pytest.fixture(scope="module")
def answers(fleet: Fleet) -> list[str]:
    """The 200 answers of the pairs, asked once for all tests below."""
    return ask_all(fleet.http)


def test_streamed_or_not_every_answer_is_that_of_a_plain_worker(fleet, answers):
    expected = ask_all(fleet.plain_http)
    assert answers == expected
    assert all(len(text) > 10 for text in answers)
    assert len(set(answers)) > REQUESTS // 2


def test_every_prompt_was_computed_once_and_pulled_once(fleet, answers):
    decode, prefill = fleet.counters(fleet.decode), fleet.counters(fleet.prefill)
    assert sum(c.pulls for c in decode) == REQUESTS
    assert sum(c.recomputed_prompt_tokens for c in decode) == 0
    assert sum(c.pulled_tokens + c.prefix_hit_tokens for c in decode) == _prompt_tokens(fleet)
    assert all(c.generates > REQUESTS // 10 for c in (*prefill, *decode)), "every worker takes a share"


def _prompt_tokens(fleet: Fleet) -> int:
    """What the router counted as input."""
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in _metric(fleet, "smg_router_tokens_total", "input"))


def _metric(fleet: Fleet, name: str, *words: str) -> list[str]:
    with urllib.request.urlopen(fleet.metrics, timeout=10) as response:  # noqa: S310  # our own http:// address
        lines = response.read().decode().splitlines()
    return [line for line in lines if line.startswith(name) and all(word in line for word in words)]


def test_ledgers_and_gauges_are_at_rest_within_a_second_of_the_last_answer(fleet, answers):
    def at_rest() -> bool:
        return all(c.pinned_requests == 0 and c.running == 0 and c.waiting == 0 for c in fleet.counters(everyone))

    everyone = [*fleet.prefill, *fleet.decode]
    assert wait_for(at_rest, seconds=1)
    assert sum(c.lease_expired for c in fleet.counters(everyone)) == 0
    for gauge in ("smg_worker_requests_active", "trio_router_requests_in_flight", "trio_router_janitor_jobs"):
        lines = _metric(fleet, gauge)
        assert lines, gauge
        assert all(float(line.rsplit(" ", 1)[1]) == 0 for line in lines), lines


def test_a_client_that_leaves_in_mid_stream_frees_its_worker(fleet, answers):
    before = sum(c.aborts for c in fleet.counters(fleet.decode))
    with client_of(fleet.http) as client:
        stream = client.completions.create(
            model="tiny-english",
            prompt="Once upon a time",
            max_tokens=4000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        stream.close()
    assert wait_for(lambda: sum(c.aborts for c in fleet.counters(fleet.decode)) == before + 1, seconds=5)
    assert wait_for(lambda: all(c.running == 0 for c in fleet.counters(fleet.decode)), seconds=5)


def test_an_unknown_model_and_a_bad_field_are_told_in_the_clients_own_errors(fleet):
    with client_of(fleet.http) as client:
        hello = [{"role": "user", "content": "hi"}]
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="gpt-9", messages=hello)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.chat.completions.create(model="tiny-english", messages=hello, max_tokens="many")
        assert [model.id for model in client.models.list()] == ["tiny-english"]
