"""The table of model families."""

from __future__ import annotations

import pytest

from trio_router.media.items import MediaItem, MediaPlan, Modality
from trio_router.media.specs import SPECS, ModelFacts, spec_for

IMAGE, VIDEO = Modality.IMAGE, Modality.VIDEO


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("Qwen/Qwen3-VL-8B-Instruct", "qwen3_vl"),
        ("qwen3.5-35b", "qwen3_vl"),
        ("Qwen/Qwen3.6-27B", "qwen3_vl"),
        ("Qwen/Qwen2-VL-7B-Instruct", "qwen2_vl"),
        ("Qwen/Qwen2.5-VL-72B", "qwen2_vl"),
        ("Qwen/Qwen-VL-Chat", "qwen_vl"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama4"),
        ("llama4-maverick", "llama4"),
        ("microsoft/Phi-3.5-vision-instruct", "phi3_v"),
        ("llava-hf/llava-1.5-7b-hf", "llava"),
        ("llava-hf/llava-v1.6-mistral-7b-hf", "llava_next"),
        ("Qwen/Qwen3-8B", None),
        ("meta-llama/Llama-3.1-8B", None),
        ("microsoft/phi-4", None),
        ("tiny-english", None),
        ("", None),
    ],
)
def test_a_family_is_known_by_a_models_name(name, family):
    spec = spec_for(ModelFacts(name=name))
    assert (spec and spec.name) == family


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_family_is_known_by_type_and_class_whatever_a_model_is_called(spec):
    for model_type in spec.model_types:
        assert spec_for(ModelFacts(name="mine", model_type=model_type)) is spec
    for architecture in spec.architectures:
        assert spec_for(ModelFacts(name="mine", architectures=("Other", architecture))) is spec


def test_only_the_families_whose_anchor_workers_replace_are_left_to_them():
    opted_in = {spec.name: spec.worker_expandable for spec in SPECS if spec.worker_expandable}
    assert opted_in == {"qwen3_vl": {IMAGE, VIDEO}, "llama4": {IMAGE}}


def test_the_families_agree_on_what_they_know():
    for spec in SPECS:
        assert set(spec.anchors) == set(spec.limits) == set(spec.expanded) >= spec.worker_expandable
        assert len(set(spec.anchors.values())) == len(spec.anchors)
        assert min(spec.expanded.values()) > 1


def test_the_estimate_counts_what_comes_in_place_of_anchors():
    spec = spec_for(ModelFacts(name="qwen3-vl"))
    assert spec is not None
    image = MediaItem(modality=IMAGE, url="http://x", part="")
    video = MediaItem(modality=VIDEO, url="http://x", part="")
    audio = MediaItem(modality=Modality.AUDIO, url="http://x", part="")

    assert spec.extra_tokens(MediaPlan().counts) == 0
    assert spec.extra_tokens(MediaPlan((image, image, video)).counts) == 2 * 1023 + 2999
    assert spec.extra_tokens(MediaPlan((audio,)).counts) == 0
