"""Who processes the media: the whole table, and what strict mode says to those it refuses."""

from __future__ import annotations

from itertools import product

import pytest

from trio_router.errors import BadRequest
from trio_router.media.items import Form, MediaItem, MediaPlan, Modality
from trio_router.media.mode import ProcessingMode, Reason, Resolution, Side, WorkerMedia, resolve
from trio_router.media.specs import ModelFacts, spec_for

ABLE = WorkerMedia(mm_processor="inprocess")
UNABLE = WorkerMedia()
ZMQ = WorkerMedia(mm_processor="inprocess", is_vllm_grpc=False)
FLEETS = {
    "all": (ABLE, ABLE),
    "none": (UNABLE, UNABLE),
    "mixed": (ABLE, UNABLE),
    "zmq beside": (ABLE, ZMQ),
    "zmq only": (ZMQ, ZMQ),
    "nobody": (),
}
QWEN3, LLAMA4, PHI = (spec_for(ModelFacts(name=name)) for name in ("qwen3-vl", "llama-4", "phi-3.5-vision"))


def item(url: str = "https://x/y", *, modality: Modality = Modality.IMAGE, **fields) -> MediaItem:
    return MediaItem(modality=modality, url=url, part="messages[0].content[1].image_url", **fields)


PLAIN = (item(),)
VIDEO = (item(modality=Modality.VIDEO),)
# name -> (items, spec, why auto does not forward it, the code of strict mode)
PLANS = {
    "plain URL": (PLAIN, QWEN3, None, None),
    "data URL": ((item("data:image/png;base64,AA"),), QWEN3, None, None),
    "image and video": (PLAIN + VIDEO, QWEN3, None, None),
    "hint": (
        (item(), item(hints=("fps",))),
        QWEN3,
        Reason.PLAN_NOT_FORWARDABLE,
        "multimodal_hint_unsupported_in_worker_mode",
    ),
    "inline bytes": ((item(form=Form.INLINE),), QWEN3, Reason.PLAN_NOT_FORWARDABLE, "multimodal_not_supported"),
    "audio": ((item(modality=Modality.AUDIO),), QWEN3, Reason.PLAN_NOT_FORWARDABLE, "multimodal_not_supported"),
    "embeddings": ((item(form=Form.EMBEDDINGS),), QWEN3, Reason.PLAN_NOT_FORWARDABLE, "multimodal_not_supported"),
    "model not opted in": (
        PLAIN,
        PHI,
        Reason.MODEL_NOT_OPTED_IN,
        "multimodal_worker_processing_unsupported_model",
    ),
    "model not known": (
        PLAIN,
        None,
        Reason.MODEL_NOT_OPTED_IN,
        "multimodal_worker_processing_unsupported_model",
    ),
    "modality not opted in": (
        PLAIN + VIDEO,
        LLAMA4,
        Reason.MODEL_NOT_OPTED_IN,
        "multimodal_worker_processing_unsupported_model",
    ),
}
AUTO = {
    "all": Resolution(Side.WORKER, Reason.AUTO_UNIFORM),
    "none": Resolution(Side.ROUTER, Reason.AUTO_NONE),
    "mixed": Resolution(Side.ROUTER, Reason.AUTO_MIXED),
    "zmq beside": Resolution(Side.ROUTER, Reason.AUTO_MIXED),
    "zmq only": Resolution(Side.ROUTER, Reason.AUTO_NONE),
    "nobody": Resolution(Side.ROUTER, Reason.AUTO_NONE),
}


@pytest.mark.parametrize("epd", [False, True], ids=["pd", "epd"])
@pytest.mark.parametrize(("plan", "fleet"), list(product(PLANS, FLEETS)), ids=lambda value: value.replace(" ", "_"))
def test_case_b12_auto_forwards_only_what_every_worker_of_the_model_can_process(plan, fleet, epd):
    items, spec, obstacle, _ = PLANS[plan]
    expected = AUTO[fleet] if obstacle is None else Resolution(Side.ROUTER, obstacle)
    if epd:
        expected = Resolution(Side.ROUTER, Reason.EPD_UNSUPPORTED)

    found = resolve(MediaPlan(items), spec=spec, workers=FLEETS[fleet], mode=ProcessingMode.AUTO, epd=epd)

    assert found == expected


@pytest.mark.parametrize(("plan", "fleet", "epd"), list(product(PLANS, FLEETS, [False, True])))
def test_router_mode_never_forwards(plan, fleet, epd):
    items, spec, _, _ = PLANS[plan]
    found = resolve(MediaPlan(items), spec=spec, workers=FLEETS[fleet], mode=ProcessingMode.ROUTER, epd=epd)
    assert found == Resolution(Side.ROUTER, Reason.CONFIG)


@pytest.mark.parametrize(("plan", "fleet", "epd"), list(product(PLANS, FLEETS, [False, True])))
def test_case_b12_strict_mode_forwards_or_refuses_and_never_falls_back(plan, fleet, epd):
    items, spec, _, code = PLANS[plan]
    if epd and code is None:
        code = "multimodal_not_supported"

    if code is None:
        found = resolve(MediaPlan(items), spec=spec, workers=FLEETS[fleet], mode=ProcessingMode.WORKER, epd=epd)
        assert found == Resolution(Side.WORKER, Reason.CONFIG)
    else:
        with pytest.raises(BadRequest) as caught:
            resolve(MediaPlan(items), spec=spec, workers=FLEETS[fleet], mode=ProcessingMode.WORKER, epd=epd)
        assert caught.value.error_code == code
        assert caught.value.message.startswith("messages[0].content[1].image_url")


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (item(hints=("fps", "max_long_side_pixel")), "has fps, max_long_side_pixel, and workers"),
        (item(form=Form.INLINE), "is inline bytes, and workers take URLs only; send it as a data: URL"),
        (item(modality=Modality.AUDIO), "is audio, which workers do not process; leave it out"),
        (item(form=Form.EMBEDDINGS), "is embeddings, which workers do not take; send the media itself"),
    ],
)
def test_the_refusal_names_what_is_wrong_and_not_always_hints(bad, told):
    later = item(hints=("fps",))
    with pytest.raises(BadRequest) as caught:
        resolve(MediaPlan((item(), bad, later)), spec=QWEN3, workers=(ABLE,), mode=ProcessingMode.WORKER)
    assert told in caught.value.message


@pytest.mark.parametrize(
    ("items", "spec", "told"),
    [
        (PLAIN, PHI, "is an image, which workers do not process for models of the family phi3_v"),
        (PLAIN, None, "is an image, which workers do not process for a model of this kind"),
        (PLAIN + VIDEO, LLAMA4, "is a video, which workers do not process for models of the family llama4"),
    ],
)
def test_a_model_that_is_not_opted_in_is_named_by_its_family(items, spec, told):
    with pytest.raises(BadRequest, match=told):
        resolve(MediaPlan(items), spec=spec, workers=(ABLE,), mode=ProcessingMode.WORKER)


def test_strict_mode_leaves_it_to_selection_to_find_out_who_can():
    found = resolve(MediaPlan(PLAIN), spec=QWEN3, workers=(UNABLE,), mode=ProcessingMode.WORKER)
    assert found.side is Side.WORKER


def test_no_url_gets_into_a_refusal():
    secret = "https://user:secret@media.example/token"
    bad = (item(secret, hints=("fps",)), item(secret, form=Form.INLINE), item(secret, modality=Modality.AUDIO))
    for each, spec in [(bad[0], QWEN3), (bad[1], QWEN3), (bad[2], QWEN3), (item(secret), None)]:
        with pytest.raises(BadRequest) as caught:
            resolve(MediaPlan((each,)), spec=spec, workers=(ABLE,), mode=ProcessingMode.WORKER)
        assert "secret" not in caught.value.message
        assert "token" not in caught.value.message
