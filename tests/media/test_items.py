"""The media plan: what a request carries, in order."""

from __future__ import annotations

import pytest

from trio_router.media.items import Form, MediaItem, MediaPlan, Modality, Obstacle
from trio_router.protocol.codec import decode, encode
from trio_router.protocol.messages import MediaRefs
from trio_router.protocol.messages import Modality as WireModality

SECRET = "https://media.example/private/token-1234.png?signature=abc"


def item(url: str = SECRET, *, modality: Modality = Modality.IMAGE, part: str = "messages[0]", **fields) -> MediaItem:
    return MediaItem(modality=modality, url=url, part=part, **fields)


def test_a_modality_knows_its_number_on_the_wire():
    assert [kind.wire for kind in (Modality.IMAGE, Modality.AUDIO, Modality.VIDEO)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("url", "scheme"),
    [
        (SECRET, "https"),
        ("HTTP://x", "http"),
        ("data:image/png;base64,AAAA", "data"),
        ("/etc/passwd", ""),
        (":", ""),
        ("", ""),
        ("x" * 100 + ":", ""),
    ],
)
def test_the_scheme_is_what_stands_before_the_first_colon(url, scheme):
    assert item(url).scheme == scheme


def test_neither_an_item_nor_a_plan_shows_its_url():
    plan = MediaPlan((item(),))
    assert "token-1234" not in repr(plan)
    assert repr(plan.items[0]) == "<image https: at messages[0]>"


def test_an_empty_plan_is_false_and_has_nothing():
    plan = MediaPlan()
    assert not plan
    assert (plan.counts, plan.schemes, plan.modalities, plan.obstacle) == ({}, frozenset(), frozenset(), None)


def test_a_plan_counts_by_modality_and_collects_schemes():
    plan = MediaPlan((item(), item("data:image/png;base64,AA"), item("http://x/v", modality=Modality.VIDEO)))
    assert plan.counts == {Modality.IMAGE: 2, Modality.VIDEO: 1}
    assert plan.counts[Modality.AUDIO] == 0
    assert plan.schemes == {"https", "data", "http"}
    assert plan.modalities == {Modality.IMAGE, Modality.VIDEO}


def test_what_is_no_reference_has_no_scheme_to_fetch():
    assert MediaPlan((item("", form=Form.EMBEDDINGS), item("", form=Form.INLINE))).schemes == frozenset()


def test_references_keep_the_order_of_the_message():
    plan = MediaPlan((item("http://x/2", modality=Modality.VIDEO), item("http://x/1")))
    refs = decode(MediaRefs, encode(plan.references()))
    assert [(ref.modality, ref.url) for ref in refs.items] == [
        (WireModality.VIDEO, "http://x/2"),
        (WireModality.IMAGE, "http://x/1"),
    ]


@pytest.mark.parametrize(
    ("bad", "obstacle"),
    [
        (item(hints=("fps",)), Obstacle.HINT),
        (item(form=Form.INLINE), Obstacle.INLINE),
        (item(modality=Modality.AUDIO), Obstacle.AUDIO),
        (item(modality=Modality.AUDIO, form=Form.INLINE), Obstacle.AUDIO),
        (item(form=Form.EMBEDDINGS), Obstacle.EMBEDDINGS),
    ],
)
def test_the_first_part_that_cannot_be_forwarded_is_named_with_its_reason(bad, obstacle):
    later = item(hints=("fps",), part="messages[9]")
    assert MediaPlan((item(), bad, later)).obstacle == (bad, obstacle)
    assert MediaPlan((item(), item())).obstacle is None
