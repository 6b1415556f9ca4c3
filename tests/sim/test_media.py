"""Pictures and films through whole clusters of workers that see: processed once, on the prefill leg, never confused.

The text of the reference worker is a function of everything in its context, the contents of its media included: a
picture that was mixed up, lost or taken from another request's cache is a wrong text.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import trio

from trio_router.dispatch.retry import RetrySettings
from trio_router.dispatch.router import RouterSettings
from trio_router.engine.settings import Faults, WorkerSettings
from trio_router.engine.vision.settings import MediaSettings
from trio_router.errors import RouterError, WorkerUnavailable
from trio_router.testing import collect, open_cluster
from trio_router.testing.origin import Origin, film, picture, reference

SEES = MediaSettings(processor="inprocess")
BLIND = MediaSettings()
A, B, C = "https://origin.example/a.png", "https://origin.example/b.png", "https://origin.example/c.gif"


def an_origin() -> Origin:
    return Origin(items={A: picture("red"), B: picture("blue"), C: film("red", "green", "blue", "white")})


def images(*urls: str) -> list[Any]:
    return [reference(url, kind="video" if url == C else "image") for url in urls]


CASES = {
    "one image": images(A),
    "two images": images(A, B),
    "one video": images(C),
    "an image and a video": images(A, C),
    "a video and an image": images(C, A),
    "the same image twice": images(A, A),
}


async def plain_text(media: list[Any], *, n: int = 1) -> list[int]:
    async with open_cluster(prefill=0, decode=0, plain=1, media=SEES, fetcher=an_origin()) as cluster:
        return await collect(cluster.router, cluster.request("what is it", media=media, n=n))


def processed(workers: list[Any]) -> int:
    return sum(worker.counters.media_items_processed for worker in workers)


def alive(cluster: Any) -> bool:
    return not any(worker.engine.core.dead for worker in cluster.workers)


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
@pytest.mark.parametrize("media", CASES.values(), ids=CASES)
async def test_media_are_fetched_and_processed_once_and_the_text_is_that_of_one_worker(
    autojump_clock, media, connector
):
    origin = an_origin()
    async with open_cluster(connector=connector, media=SEES, fetcher=origin) as cluster:
        tokens = await collect(cluster.router, cluster.request("what is it", media=media))
        assert tokens == await plain_text(media)
        assert origin.hits.total() == len(media)
        assert (processed(cluster.prefill), processed(cluster.decode)) == (len(media), 0)
        assert cluster.decode[0].counters.pulls == 1
        assert cluster.decode[0].counters.recomputed_prompt_tokens == 0
        assert cluster.recorder.media == [("applied", None)]
        assert cluster.leaks() == []


async def test_case_b1_pictures_of_one_size_behind_one_text_never_share_an_answer(autojump_clock):
    async with open_cluster(media=SEES, fetcher=an_origin()) as cluster:
        texts = [
            tuple(await collect(cluster.router, cluster.request("what is it", media=images(url))))
            for url in (A, B, A, B)
        ]
        assert texts[0] == texts[2] == tuple(await plain_text(images(A)))
        assert texts[1] == texts[3] == tuple(await plain_text(images(B)))
        assert texts[0] != texts[1]
        assert cluster.leaks() == []


async def test_case_b4_an_origin_that_changes_is_asked_once(autojump_clock):
    origin = Origin(items={A: lambda hits: picture("red" if hits == 1 else "blue")})
    async with open_cluster(media=SEES, fetcher=origin) as cluster:
        assert await collect(cluster.router, cluster.request("what is it", media=images(A))) == await plain_text(
            images(A)
        )
        assert origin.hits == {A: 1}


async def test_case_b10_bad_pictures_are_told_and_harm_nothing_after_them(autojump_clock):
    bad = "https://origin.example/bad.png"
    origin = Origin(items={A: picture("red"), bad: picture("red")[:40]})
    async with open_cluster(media=SEES, fetcher=origin) as cluster:
        expected = await plain_text(images(A))
        for _ in range(30):
            with pytest.raises(RouterError) as caught:
                await collect(cluster.router, cluster.request("what is it", media=images(bad)))
            assert caught.value.http_status == 500  # a worker's own status; the fronts make 400 of INVALID_ARGUMENT
            assert await collect(cluster.router, cluster.request("what is it", media=images(A))) == expected
        assert cluster.recorder.breakers == []
        assert alive(cluster)
        assert cluster.leaks() == []


class TestFallbacks:
    """Where there is no identity to go by, the decode worker processes the media itself: slower, and right."""

    @pytest.mark.parametrize(
        ("prefill", "faults", "n", "outcome"),
        [
            (replace(SEES, identity=False), Faults(), 1, "missing"),
            (SEES, Faults(drop_handoff=True), 1, "no_handoff"),
            (SEES, Faults(), 3, "several_samples"),
        ],
        ids=["an older worker", "a dropped handoff", "several samples"],
    )
    @pytest.mark.parametrize("connector", ["nixl", "mooncake"])
    async def test_the_text_is_right_all_the_same(self, autojump_clock, prefill, faults, n, outcome, connector):
        told = {"prefill": prefill, "decode": SEES}
        if connector == "mooncake" and faults.drop_handoff:
            pytest.skip("a worker that pushes returns nothing that could be dropped")
        async with open_cluster(connector=connector, media=told, fetcher=an_origin()) as cluster:
            cluster.prefill[0].faults = faults
            request = cluster.request("what is it", media=images(A, B), n=n)
            if n > 1:
                request.sampling_params.temperature = 0.8  # engines refuse several greedy samples
                async with cluster.router.generate(request) as stream:
                    assert len({frame.message().complete.index async for frame in stream if frame.is_complete}) == n
            else:
                assert await collect(cluster.router, request) == await plain_text(images(A, B))
            assert cluster.recorder.media == [(outcome, None)]
            assert processed(cluster.decode) == 2
            await trio.sleep(3)
            assert alive(cluster)
            assert cluster.leaks() == []

    async def test_a_failed_kv_load_starts_again_with_the_media(self, autojump_clock):
        async with open_cluster(decode=2, media=SEES, fetcher=an_origin()) as cluster:
            cluster.decode[0].faults = Faults(load_error_rate=1.0)
            for number in range(4):
                request = cluster.request("what is it", media=images(A))
                assert await collect(cluster.router, request) == await plain_text(images(A)), number
            await trio.sleep(35)
            assert processed(cluster.decode) == 0
            assert alive(cluster)


async def test_policies_see_how_long_a_prompt_becomes(autojump_clock):
    """One anchor stands for a thousand tokens, which is what a worker will be busy with."""
    async with open_cluster(media=SEES, fetcher=an_origin()) as cluster:
        plain, media = cluster.request("what is it"), cluster.request("what is it", media=images(A, C))
        for request, least, most in ((plain, 1, 100), (media, 4000, 4200)):
            async with cluster.router.generate(request):
                held = [worker.tokens_in_flight for worker in cluster.router.registry.workers]
                assert held[0] == 0, "the prefill leg has ended"
                assert least <= held[1] <= most
        await trio.sleep(1)
        assert cluster.leaks() == []


class TestWhoIsAsked:
    async def test_decode_workers_for_language_only_are_refused_before_any_prefill(self, autojump_clock):
        origin = an_origin()
        told = {"prefill": SEES, "decode": replace(SEES, language_model_only=True)}
        async with open_cluster(media=told, fetcher=origin) as cluster:
            with pytest.raises(WorkerUnavailable) as caught:
                await collect(cluster.router, cluster.request("what is it", media=images(A)))
            assert caught.value.error_code == "pd_decode_language_model_only_media_refs"
            assert origin.hits.total() == 0
            assert cluster.prefill[0].counters.generates == 0
            assert await collect(cluster.router, cluster.request("text goes on"))

    async def test_in_a_mixed_fleet_those_who_see_are_asked(self, autojump_clock):
        told = {"prefill-0": SEES, "prefill-1": BLIND, "decode-0": BLIND, "decode-1": SEES}
        one = WorkerSettings(name="template", model_name="tiny-vl-english")
        async with open_cluster(prefill=2, decode=2, worker=one, media=told, fetcher=an_origin()) as cluster:
            expected = await plain_text(images(A))
            for _ in range(6):
                assert await collect(cluster.router, cluster.request("what is it", media=images(A))) == expected
            assert [worker.counters.generates for worker in cluster.prefill] == [6, 0]
            assert [worker.counters.generates for worker in cluster.decode] == [0, 6]
            assert cluster.leaks() == []

    async def test_a_busy_origin_is_asked_by_another_worker(self, autojump_clock):
        """What a worker cannot fetch for the moment is no fault of its own, nor of the request."""
        origin = Origin(items={A: WorkerUnavailable("the origin answered with 503")})
        settings = RouterSettings(retry=RetrySettings(attempts=3))
        async with open_cluster(prefill=2, media=SEES, fetcher=origin, router=settings) as cluster:
            with pytest.raises(RouterError) as caught:
                await collect(cluster.router, cluster.request("what is it", media=images(A)))
            assert caught.value.retry_after is not None
            assert origin.hits == {A: 2}
            assert cluster.recorder.breakers == []
            assert cluster.leaks() == []


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.005, 0.02, 0.05, 0.2])
async def test_a_client_that_leaves_at_any_moment_leaves_nothing(autojump_clock, seconds):
    async with open_cluster(media=SEES, fetcher=an_origin()) as cluster:
        with trio.move_on_after(seconds):
            await collect(cluster.router, cluster.request("what is it", media=images(A, C), max_tokens=400))
        await trio.sleep(3)
        assert alive(cluster)
        assert cluster.leaks() == []
