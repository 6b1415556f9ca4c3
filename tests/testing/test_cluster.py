"""A whole cluster in one process: each connector does its work, and the router is told what it needs for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import trio

from trio_router.engine.settings import Connector, WorkerSettings
from trio_router.engine.vision.settings import MediaSettings
from trio_router.engine.vision.web import MediaUnavailable
from trio_router.errors import BadRequest
from trio_router.testing import collect, open_cluster
from trio_router.testing.origin import Origin, film, picture, reference

SEES = MediaSettings(processor="inprocess")


@dataclass
class Asked:
    url: str


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


class TestMedia:
    @pytest.fixture
    def origin(self):
        return Origin({"http://o/red": picture("red"), "http://o/film": film("red", "blue", "lime")})

    async def test_a_cluster_that_sees_processes_once_on_the_prefill_leg(self, origin, autojump_clock):
        media = [reference("http://o/red"), reference("http://o/film", kind="video")]
        async with open_cluster(prefill=0, decode=0, plain=1, media=SEES, fetcher=origin) as plain:
            expected = await collect(plain.router, plain.request(media=media))
        origin.hits.clear()
        async with open_cluster(media=SEES, fetcher=origin) as cluster:
            assert await collect(cluster.router, cluster.request(media=media)) == expected
            assert origin.hits.total() == 2
            (prefill,), (decode,) = cluster.prefill, cluster.decode
            assert (prefill.counters.media_items_processed, decode.counters.media_items_processed) == (2, 0)
            await trio.sleep(1)
            assert cluster.leaks() == []

    async def test_each_worker_may_have_settings_of_its_own(self, origin, autojump_clock):
        media = {"prefill-0": replace(SEES, identity=False), "decode": replace(SEES, max_items=1)}
        async with open_cluster(prefill=2, media=media, fetcher=origin) as cluster:
            told = [worker.settings.media for worker in cluster.workers]
            assert [settings.advertised for settings in told] == ["inprocess", "", "inprocess"]
            assert [settings.identity for settings in told] == [False, True, True]

    async def test_what_never_comes_is_waited_for_and_what_is_not_there_is_refused(self, origin, autojump_clock):
        origin.items |= {"http://o/never": None, "http://o/later": MediaUnavailable("not now")}
        ask = {name: Asked(f"http://o/{name}") for name in ("never", "later", "missing", "red")}
        with trio.move_on_after(5) as scope:
            await origin(ask["never"])
        assert scope.cancelled_caught
        with pytest.raises(MediaUnavailable):
            await origin(ask["later"])
        with pytest.raises(BadRequest):
            await origin(ask["missing"])
        assert await origin(ask["red"]) == picture("red") != picture("blue")
        assert origin.hits == {asked.url: 1 for asked in ask.values()}
