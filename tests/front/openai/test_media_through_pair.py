"""Pictures and films from an HTTP client through a prefill and a decode worker that process them themselves."""

from __future__ import annotations

import base64

import pytest

from trio_router.engine.vision.settings import MediaSettings as WorkerMediaSettings
from trio_router.front.settings import MediaSettings
from trio_router.media.mode import ProcessingMode
from trio_router.service import media_desk
from trio_router.testing.cluster import Cluster, open_cluster
from trio_router.testing.origin import Origin, film, picture

CHAT = "/v1/chat/completions"
SEES = WorkerMediaSettings(processor="inprocess")
RED, BLUE, FILM = "https://8.8.8.8/red.png", "https://8.8.8.8/blue.png", "https://8.8.8.8/film.gif"


@pytest.fixture
def origin() -> Origin:
    pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    data = "data:image/png;base64," + base64.b64encode(picture("lime")).decode()
    return Origin(
        {RED: picture("red"), BLUE: picture("blue"), FILM: film("red", "blue", "lime"), data: picture("lime")}
    )


def asked(*urls: str, text: str = "What is it?") -> dict:
    kinds = ["video_url" if url == FILM else "image_url" for url in urls]
    content = [{"type": kind, kind: {"url": url}} for kind, url in zip(kinds, urls, strict=True)]
    return {
        "messages": [{"role": "user", "content": [*content, {"type": "text", "text": text}]}],
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
    }


@pytest.fixture
def front(serve):
    """An HTTP client of a cluster: `client = await front(cluster)`."""

    async def connect(cluster: Cluster, **media):
        desk = media_desk(cluster.router, settings=MediaSettings(**media))
        return await (await serve(cluster.router, media=desk, texts=cluster.model.tokenizer)).connect()

    return connect


def processed(cluster: Cluster) -> dict[str, int]:
    return {worker.settings.name: worker.counters.media_items_processed for worker in cluster.workers}


async def told(client, request: dict) -> tuple[str, int]:
    answer = await client.post(CHAT, request)
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]["message"]["content"], answer.json["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "urls",
    [[RED], [RED, BLUE], [RED, RED], [FILM], [RED, FILM], [FILM, BLUE], ["data"]],
    ids=["image", "two images", "the same twice", "film", "image and film", "film and image", "data URL"],
)
async def test_the_pair_says_what_one_worker_says_and_looks_once(autojump_clock, front, origin, urls) -> None:
    urls = [next(key for key in origin.items if key.startswith("data:")) if url == "data" else url for url in urls]
    async with open_cluster(prefill=0, decode=0, plain=1, media=SEES, fetcher=origin) as alone:
        client = await front(alone)
        expected = await told(client, asked(*urls))
        client.leave()
    origin.hits.clear()

    async with open_cluster(media=SEES, fetcher=origin) as pair:
        client = await front(pair)
        assert await told(client, asked(*urls)) == expected
        client.leave()
        assert origin.hits.total() == len(urls)
        assert processed(pair) == {"prefill-0": len(urls), "decode-0": 0}
    assert expected[1] > 30


async def test_case_b1_different_images_behind_one_text_never_share_an_answer(autojump_clock, front, origin) -> None:
    async with open_cluster(media=SEES, fetcher=origin) as pair:
        client = await front(pair)
        red, blue, red_again, blue_again = [await told(client, asked(url)) for url in (RED, BLUE, RED, BLUE)]
        client.leave()
    assert red != blue
    assert (red_again, blue_again) == (red, blue)


async def test_where_one_worker_has_no_processor_nothing_is_sent(autojump_clock, front, origin) -> None:
    blind = WorkerMediaSettings(processor="inprocess", language_model_only=True)
    async with open_cluster(media={"prefill": SEES, "decode": blind}, fetcher=origin) as pair:
        client = await front(pair)
        answer = await client.post(CHAT, asked(RED))
        assert (answer.status, answer.json["error"]["code"]) == (501, "multimodal_router_processing_unavailable")
        assert "(auto_mixed)" in answer.json["error"]["message"]
        client.leave()
        strict = await front(pair, mode=ProcessingMode.WORKER)
        answer = await strict.post(CHAT, asked(RED))
        assert answer.json["error"]["code"] == "pd_decode_language_model_only_media_refs"
        strict.leave()
        assert origin.hits.total() == 0
        assert [worker.counters.generates for worker in pair.workers] == [0, 0]


async def test_case_b10_a_broken_picture_is_its_clients_fault_and_the_next_is_fine(
    autojump_clock, front, origin
) -> None:
    origin.items[BLUE] = picture("blue")[:40]
    async with open_cluster(media=SEES, fetcher=origin) as pair:
        client = await front(pair)
        for _ in range(5):
            assert (await client.post(CHAT, asked(BLUE))).status == 400
            await told(client, asked(RED))
        client.leave()
        assert processed(pair)["decode-0"] == 0
