"""A whole cluster in one process: each connector does its work, and the router is told what it needs for it."""

from __future__ import annotations

import pytest
import trio

from trio_router.engine.settings import Connector, WorkerSettings
from trio_router.testing import collect, open_cluster

PROMPTS = [f"Prompt number {i}: tell me about the " + "harbour and the garden " * (i % 7) for i in range(12)]


async def ask_all(cluster) -> list[list[int]]:
    answers: dict[str, list[int]] = {}

    async def ask(prompt: str) -> None:
        answers[prompt] = await collect(cluster.router, cluster.request(prompt, max_tokens=24))

    async with trio.open_nursery() as nursery:
        for prompt in PROMPTS:
            nursery.start_soon(ask, prompt)
    await trio.sleep(1)
    return [answers[prompt] for prompt in PROMPTS]


@pytest.fixture
async def expected(autojump_clock):
    async with open_cluster(prefill=0, decode=0, plain=1) as plain:
        return await ask_all(plain)


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
async def test_with_a_connector_that_moves_state_nothing_is_computed_twice(connector, expected):
    async with open_cluster(prefill=2, decode=2, connector=connector) as cluster:
        assert await ask_all(cluster) == expected
        assert sum(worker.counters.pulls for worker in cluster.decode) == len(PROMPTS)
        assert sum(worker.counters.recomputed_prompt_tokens for worker in cluster.decode) == 0
        assert cluster.leaks() == []


@pytest.mark.parametrize("connector", ["store", "none"])
async def test_with_any_other_the_decode_worker_computes_the_prompt(connector, expected):
    async with open_cluster(connector=connector) as cluster:
        assert await ask_all(cluster) == expected
        (decode,) = cluster.decode
        assert (decode.counters.pulls, cluster.prefill[0].counters.pinned) == (0, 0)
        assert decode.counters.recomputed_prompt_tokens > 0
        assert cluster.leaks() == []


async def test_ranks_are_every_workers_and_pulls_name_them(expected):
    async with open_cluster(dp_size=2) as cluster:
        assert await ask_all(cluster) == expected
        assert [worker.settings.dp_size for worker in cluster.workers] == [2, 2]
        assert sum(worker.counters.pulls for worker in cluster.decode) == len(PROMPTS)


async def test_what_is_asked_for_goes_before_the_template(autojump_clock):
    template = WorkerSettings(name="template", connector="store", dp_size=3)
    async with open_cluster(worker=template, connector="mooncake") as cluster:
        assert [worker.settings.connector for worker in cluster.workers] == [Connector.MOONCAKE] * 2
        assert [worker.settings.dp_size for worker in cluster.workers] == [3, 3]
