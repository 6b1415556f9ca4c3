"""Workers that are killed and started again under load: every client gets the right text or is told what went wrong.

The run here is short. A longer one by hand: `KILLS_REQUESTS=500 KILLS_SEED=7 pytest tests/e2e/test_kills.py`.
"""

from __future__ import annotations

import os
import random
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial

import openai
import pytest

from .conftest import Process, counters_of, prefill_flags, start_router, started
from .test_fleet import client_of, wait_for

REQUESTS = int(os.environ.get("KILLS_REQUESTS", "100"))
SEED = int(os.environ.get("KILLS_SEED", "1"))
CONCURRENT = 16
MAX_TOKENS = 24
LEASE = 2
# A worker that comes back within a second must be seen to have been away.
WATCH = ("--health-check-interval-secs", "0.2", "--health-failure-threshold", "1")
RESTING = (
    "smg_worker_requests_active",
    "trio_router_requests_in_flight",
    "trio_router_janitor_jobs",
    "trio_router_handoffs_live",
)


class Member:
    """A worker with a place of its own, to which it comes back."""

    def __init__(self, role: str, *, connector: str) -> None:
        self._flags = ("worker", "--role", role, "--connector", connector, "--inter-token-ms", "15")
        self._flags += ("--lease-secs", str(LEASE), "--handshake-secs", "2")
        self.process = Process(*self._flags, "--port", "0")
        self.role = role

    @cached_property
    def address(self) -> str:
        return self.process.find(r"grpc://(\S+)")

    @cached_property
    def transfer_port(self) -> str:
        return self.process.find(r"transfers on \S+:(\d+)")

    def restart(self) -> None:
        port = self.address.rpartition(":")[2]
        self.process = Process(*self._flags, "--port", port, "--transfer-port", self.transfer_port)
        self.process.find(r"(ready)")

    def end(self) -> None:
        self.process.kill()


@dataclass
class Outcomes:
    """What became of the requests. `wrong` is what must never be."""

    right: int = 0
    told: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Truncated(Exception):
    """A stream ended well without having said so."""


def prompt_of(number: int) -> str:
    return f"Number {number}: what is there to say about the harbour, the hills and the rain? " * (1 + number % 4)


def ask(client: openai.OpenAI, number: int) -> tuple[str, Exception | None]:
    """One completion, streamed or not; whatever text came, and how it failed if it did."""
    request = {"model": "tiny-english", "prompt": prompt_of(number), "max_tokens": MAX_TOKENS, "temperature": 0}
    text = ""
    try:
        if number % 2:
            answer = client.completions.create(**request, stream=False)
            return answer.choices[0].text, None
        finish = None
        with client.completions.create(**request, stream=True) as chunks:
            for chunk in chunks:
                for choice in chunk.choices:
                    text += choice.text
                    finish = choice.finish_reason or finish
        return text, None if finish in ("stop", "length") else Truncated(f"finish_reason {finish}")
    except (openai.APIError, Truncated) as exc:
        return text, exc


def judge(number: int, expected: str, text: str, error: Exception | None, outcomes: Outcomes) -> None:
    clear = isinstance(error, openai.APIError) and not isinstance(error, openai.APIConnectionError)
    code = getattr(error, "code", None)
    if error is None and text == expected:
        outcomes.right += 1
    elif clear and code and expected.startswith(text):
        outcomes.told[str(code)] += 1
    else:
        outcomes.wrong.append(f"{number}: {text!r} for {expected!r}, {error!r}")


@contextmanager
def killing(members: list[Member], *, metrics: str, seed: int) -> Iterator[list[str]]:
    """Kill a random worker and start it again, until the block is left; the router has all of them back then.

    One at a time, as far as the router knows: there is always somebody who could take over.
    """
    rng = random.Random(seed)
    over = threading.Event()
    killed: list[str] = []

    def kill() -> None:
        while not over.wait(rng.uniform(0.1, 0.8)):
            victim = rng.choice(members)
            assert victim.transfer_port, "read before it goes"
            victim.end()
            killed.append(victim.role)
            over.wait(rng.uniform(0.0, 0.5))
            victim.restart()
            assert wait_for(partial(is_healthy, metrics, victim), seconds=20), victim.process.lines

    with ThreadPoolExecutor(1) as pool:
        killer = pool.submit(kill)
        try:
            yield killed
        finally:
            over.set()
        killer.result()


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """What a worker says that nobody kills."""
    with ExitStack() as stack:
        plain = stack.enter_context(started("worker", "--port", "0", "--inter-token-ms", "0"))
        router = start_router(stack, "--worker-urls", plain.find(r"(grpc://\S+)"))
        client = stack.enter_context(client_of(router.find(r"(http://\S+) \(OpenAI")))
        pool = stack.enter_context(ThreadPoolExecutor(CONCURRENT))
        answers = list(pool.map(lambda number: ask(client, number), range(REQUESTS)))
    assert [error for _text, error in answers if error is not None] == []
    return [text for text, _error in answers]


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
def test_a_killed_worker_costs_its_clients_at_most_a_clear_error(connector, expected):
    outcomes = Outcomes()
    with ExitStack() as stack:
        members = []
        for role in ("prefill", "prefill", "decode", "decode"):
            members.append(Member(role, connector=connector))
            stack.callback(members[-1].end)
        router = start_router(
            stack,
            *(flag for m in members[:2] for flag in prefill_flags(m.process, connector=connector)),
            *(flag for m in members[2:] for flag in ("--decode", f"grpc://{m.address}")),
            *WATCH,
        )
        client = stack.enter_context(client_of(router.find(r"(http://\S+) \(OpenAI")))
        metrics = router.find(r"(http://\S+/metrics)")
        router.find(r"(ready: )")
        with killing(members, metrics=metrics, seed=SEED) as killed, ThreadPoolExecutor(CONCURRENT) as pool:
            answers = list(pool.map(lambda number: ask(client, number), range(REQUESTS)))
        for number, (text, error) in enumerate(answers):
            judge(number, expected[number], text, error, outcomes)
        print(f"\n{connector}: {len(killed)} kills, {outcomes.right} right, told: {dict(outcomes.told)}")  # noqa: T201  # for -s
        assert outcomes.wrong == []
        assert killed
        assert outcomes.right > REQUESTS // 2

        def at_rest() -> bool:
            counters = counters_of([member.address for member in members])
            return all((c.pinned_requests, c.running, c.waiting) == (0, 0, 0) for c in counters)

        assert wait_for(at_rest, seconds=LEASE + 1)
        assert wait_for(lambda: set(gauges(metrics, *RESTING).values()) == {0.0}, seconds=2), gauges(metrics, *RESTING)
        text, error = ask(client, 0)
        assert (text, error) == (expected[0], None), "the fleet serves on"


def is_healthy(metrics: str, member: Member) -> bool:
    """Whether the router sends requests to it."""
    name = f'smg_worker_health{{worker="{member.address}"}}'
    return gauges(metrics, name) == {name: 1.0}


def gauges(url: str, *names: str) -> dict[str, float]:
    """The router's metrics whose lines begin with one of the names."""
    with urllib.request.urlopen(url, timeout=10) as response:  # noqa: S310  # our own http:// address
        lines = response.read().decode().splitlines()
    found = [line.rsplit(" ", 1) for line in lines if line.startswith(names)]
    return {name: float(value) for name, value in found}
