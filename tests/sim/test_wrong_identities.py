"""Prefill workers that tell wrong things of media, in whole clusters: decode looks itself, and nobody dies of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio

from trio_router.engine.settings import Faults
from trio_router.engine.vision.settings import MediaSettings
from trio_router.protocol.messages import MediaIdentity, MultimodalInputs, PlaceholderRange, TensorData
from trio_router.testing import collect, open_cluster
from trio_router.testing.origin import Origin, film, picture, reference

SEES = MediaSettings(processor="inprocess")
MEDIA = [reference("http://o/red"), reference("http://o/blue"), reference("http://o/film", kind="video")]
Change = Callable[[MediaIdentity], Any]


def grid(identity: MediaIdentity) -> TensorData:
    return identity.mm_inputs.model_specific_tensors["image_grid_thw"]


def drop_batch(identity: MediaIdentity) -> None:
    identity.extra_mm_inputs.clear()


def drop_first_batch(identity: MediaIdentity) -> None:
    identity.mm_inputs = MultimodalInputs()


def swap_spans(identity: MediaIdentity) -> None:
    identity.mm_inputs.mm_placeholders.reverse()


def overlap_spans(identity: MediaIdentity) -> None:
    identity.mm_inputs.mm_placeholders[1] = identity.mm_inputs.mm_placeholders[0]


def add_pixels(identity: MediaIdentity) -> None:
    identity.mm_inputs.pixel_values = TensorData(shape=[1], dtype="uint8", inline=b"x")


def drop_some_grids(identity: MediaIdentity) -> None:
    identity.mm_inputs.model_specific_tensors.clear()
    identity.mm_inputs.batched_keys.clear()
    identity.mm_inputs.keep_on_cpu_keys.clear()


WRONG: dict[str, Change] = {
    "no ids": lambda i: i.prompt_token_ids.clear(),
    "more ids than a context": lambda i: i.prompt_token_ids.extend([5] * 9000),
    "a kind missing": drop_batch,
    "the first kind missing": drop_first_batch,
    "a kind twice": lambda i: i.extra_mm_inputs.append(i.extra_mm_inputs[0]),
    "no hashes": lambda i: i.mm_inputs.mm_hashes.clear(),
    "a hash too few": lambda i: i.mm_inputs.mm_hashes.pop(),
    "a hash too many": lambda i: i.mm_inputs.mm_hashes.append("more"),
    "an empty hash": lambda i: i.mm_inputs.mm_hashes.__setitem__(0, ""),
    "an endless hash": lambda i: i.mm_inputs.mm_hashes.__setitem__(0, "h" * 100_000),
    "a place too few": lambda i: i.mm_inputs.mm_placeholders.pop(),
    "a place beyond the prompt": lambda i: setattr(i.mm_inputs.mm_placeholders[1], "length", 2**31),
    "an empty place": lambda i: setattr(i.mm_inputs.mm_placeholders[0], "length", 0),
    "places in another order": swap_spans,
    "one place for two": overlap_spans,
    "a place in another's": lambda i: i.extra_mm_inputs[0].mm_placeholders.__setitem__(0, PlaceholderRange(6, 9)),
    "a token that is not there": lambda i: setattr(i.mm_inputs, "im_token_id", 7),
    "pixels": add_pixels,
    "grids of some kinds only": drop_some_grids,
    "a grid in fewer rows": lambda i: setattr(grid(i), "shape", [1, 6]),
    "a grid in fewer bytes": lambda i: setattr(grid(i), "inline", grid(i).inline[:-8]),
    "a grid of no type": lambda i: setattr(grid(i), "dtype", "int3"),
    "a grid elsewhere": lambda i: setattr(i.mm_inputs.model_specific_tensors["image_grid_thw"], "inline", None),
    "a tensor that is no grid": lambda i: i.mm_inputs.model_specific_tensors.update(other=grid(i)),
    "a description of nothing": lambda i: i.mm_inputs.batched_keys.append("nothing"),
}


@pytest.fixture
def origin() -> Origin:
    contents = (picture("red"), picture("blue"), film("red", "blue", "lime"))
    return Origin({item.url: content for item, content in zip(MEDIA, contents, strict=True)})


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
async def test_what_is_seen_to_be_wrong_is_not_used(autojump_clock, origin, change):
    def changed(identity: MediaIdentity) -> MediaIdentity:
        change(identity)
        return identity

    async with open_cluster(prefill=0, decode=0, plain=1, media=SEES, fetcher=origin) as plain:
        expected = await collect(plain.router, plain.request(media=MEDIA))
    async with open_cluster(media=SEES, fetcher=origin) as cluster:
        (prefill,), (decode,) = cluster.prefill, cluster.decode
        prefill.faults = Faults(change_identity=changed)
        assert await collect(cluster.router, cluster.request(media=MEDIA)) == expected
        assert decode.counters.media_items_processed == len(MEDIA)
        assert (decode.counters.pulls, decode.engine.core.dead) == (1, False)
        # And the next one, told rightly, is used.
        prefill.faults = Faults()
        assert await collect(cluster.router, cluster.request(media=MEDIA)) == expected
        assert decode.counters.media_items_processed == len(MEDIA)
        await trio.sleep(2)
        assert cluster.leaks() == []
