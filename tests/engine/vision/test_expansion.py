"""Prompts with anchors, made into prompts with embeddings' places."""

from __future__ import annotations

import pytest

from trio_router.engine.vision.expansion import Anchors, Measured, expand
from trio_router.engine.vision.grid import Grid
from trio_router.engine.vision.items import ProcessingFailed

IMAGE, VIDEO, START, END = 100, 101, 102, 103
ANCHORS = Anchors(image=IMAGE, video=VIDEO, vision_start=START, vision_end=END)
TIMES = {"<0.2 seconds>": [7, 8], "<1.2 seconds>": [7, 9]}


def image(digest: str = "i", grid: Grid | None = None) -> Measured:
    return Measured(kind="image", digest=digest, grid=grid or Grid(1, 4, 2))


def video(digest: str = "v", grid: Grid | None = None) -> Measured:
    return Measured(kind="video", digest=digest, grid=grid or Grid(2, 2, 2))


def run(prompt, *items):
    return expand(prompt, items, anchors=ANCHORS, encode=TIMES.__getitem__)


def test_an_image_is_a_pad_for_each_embedding():
    processed = run([1, START, IMAGE, END, 2], image())
    assert processed.prompt == [1, START, IMAGE, IMAGE, END, 2]
    (group,) = processed.groups
    (span,) = group.placeholders
    assert (span.offset, span.length, span.is_embed) == (2, 2, None)
    assert group.fields[0]["image_grid_thw"].values == (1, 4, 2)


def test_a_video_is_its_pairs_of_frames_with_their_times_and_its_span_begins_at_the_mark():
    processed = run([1, START, VIDEO, END, 2], video())
    assert processed.prompt == [1, START, 7, 8, VIDEO, END, 7, 9, START, VIDEO, END, 2]
    (span,) = processed.groups[0].placeholders
    assert (span.offset, span.length) == (1, 9)
    assert span.embedded(prompt_length=12) == [4, 9]
    assert processed.groups[0].fields[0]["video_second_per_grid"].values == (1.0,)


def test_a_video_of_one_pair_has_no_times():
    processed = run([START, VIDEO, END], video(grid=Grid(1, 4, 2)))
    assert processed.prompt == [START, VIDEO, VIDEO, END]
    (span,) = processed.groups[0].placeholders
    assert (span.offset, span.length, span.is_embed) == (0, 3, (False, True, True))


def test_items_of_a_kind_take_their_anchors_in_order():
    processed = run([IMAGE, 1, IMAGE], image("a", Grid(1, 2, 2)), image("b"))
    assert processed.prompt == [IMAGE, 1, IMAGE, IMAGE]
    (group,) = processed.groups
    assert group.hashes == ("a", "b")
    assert [(span.offset, span.length) for span in group.placeholders] == [(0, 1), (2, 2)]


def test_kinds_come_in_the_order_of_their_first_reference_not_of_their_anchors():
    processed = run([VIDEO, IMAGE], image(), video(grid=Grid(1, 2, 2)))
    assert [group.kind for group in processed.groups] == ["image", "video"]


def test_an_anchor_too_many_stays():
    assert run([IMAGE, IMAGE], image()).prompt == [IMAGE, IMAGE, IMAGE]


@pytest.mark.parametrize("prompt", [[IMAGE], [VIDEO, IMAGE], []])
def test_an_item_too_many_is_a_failure(prompt):
    with pytest.raises(ProcessingFailed, match="have no placeholder"):
        run(prompt, image(), image())


def test_the_model_says_which_tokens_they_are(vision_model):
    anchors = Anchors.of(vision_model.config)
    names = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    ids = [anchors.image, anchors.video, anchors.vision_start, anchors.vision_end]
    assert [vision_model.tokenizer.encode(name) for name in names] == [[number] for number in ids]
