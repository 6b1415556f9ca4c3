"""How many requests get on at once, and what is counted."""

from __future__ import annotations

import pytest
import trio

from trio_router.engine.counters import Counters
from trio_router.engine.vision.expansion import Anchors
from trio_router.engine.vision.processor import MediaProcessor, measure
from trio_router.engine.vision.references import Reference
from trio_router.engine.vision.settings import MediaSettings
from trio_router.engine.vision.web import MediaUnavailable
from trio_router.errors import BadRequest
from trio_router.offload import inline
from trio_router.testing.origin import film, picture

ANCHORS = Anchors(image=100, video=101, vision_start=102, vision_end=103)


def ref(url: str) -> Reference:
    return Reference(kind="image", scheme="http", url=url)


def make(fetcher, **settings) -> MediaProcessor:
    return MediaProcessor(
        MediaSettings(processor="inprocess", **settings),
        fetcher=fetcher,
        offload=inline,
        counters=Counters(),
        anchors=ANCHORS,
        encode=lambda _text: [1],
    )


async def test_equal_bytes_are_one_item_and_each_is_counted(origin):
    counters = Counters()
    processor = make(origin)
    processor._counters = counters
    processed = await processor.process([ref("http://o/red")] * 2, prompt=[100, 5, 100])
    (group,) = processed.groups
    assert len(set(group.hashes)) == 1
    assert (counters.media_fetches, counters.media_items_processed) == (2, 2)
    assert processed.prompt.count(100) == sum(span.length for span in group.placeholders)


async def test_what_is_over_a_limit_is_not_fetched(origin):
    with pytest.raises(BadRequest, match="At most 1"):
        await make(origin, max_items=1).process([ref("http://o/red")] * 2, prompt=[100, 100])
    assert not origin.hits


async def test_a_saturated_worker_says_so_and_goes_on(origin):
    origin.items["http://o/slow"] = None
    processor = make(origin, max_inflight=2)
    outcomes = []

    async def one(url):
        try:
            await processor.process([ref(url)], prompt=[100])
            outcomes.append("served")
        except MediaUnavailable as exc:
            outcomes.append(exc.message)

    async with trio.open_nursery() as nursery:
        for url in ("http://o/slow", "http://o/slow", "http://o/red", "http://o/red", "http://o/red"):
            nursery.start_soon(one, url)
            await trio.sleep(1)
        # Two are under way, as many wait, and the fifth was refused.
        assert outcomes == ["worker is saturated: too many multimodal requests wait already"]
        nursery.cancel_scope.cancel()
    await one("http://o/red")
    assert outcomes[1:] == ["served"]


class TestMeasuring:
    def test_the_digest_is_of_the_bytes_and_the_grid_of_the_size(self):
        red, blue, small = (
            measure(data, kind="image") for data in (picture(), picture("blue"), picture(size=(37, 23)))
        )
        assert red == measure(picture(), kind="image")
        assert red.digest != blue.digest
        assert red.grid == blue.grid
        assert small.grid.row == (1, 14, 22)

    def test_a_film(self):
        assert measure(film("red", "blue", "lime", size=(37, 35)), kind="video").grid.row == (2, 2, 2)
