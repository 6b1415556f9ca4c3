"""What is known of families of multimodal models: how one is recognised, and what stands for an item in its prompts.

A table, read from above. It must not know requests or workers, nor how pixels become tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from .items import Modality

_NOTHING: Final[frozenset[Modality]] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a worker says of the model it serves. Empty: it does not say."""

    name: str
    model_type: str = ""
    architectures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One family of models.

    `named` looks at a served name, in small letters; `model_types` and `architectures` are those of config.json.
    `anchors` are the texts that stand for one unexpanded item, by modality; the tokenizer has a token for each.
    `limits` are items a prompt may have. `worker_expandable` are the modalities whose anchor is the one token that
    vLLM's own processor replaces, so that it can be left to a worker.
    `expanded` estimates the tokens that an item becomes, for policies that look at the length of prompts: their cost is
    a choice that is less good, so the item is taken to be of a usual size.
    """

    name: str
    named: Callable[[str], bool]
    model_types: frozenset[str]
    architectures: frozenset[str]
    anchors: Mapping[Modality, str]
    limits: Mapping[Modality, int]
    worker_expandable: frozenset[Modality] = field(default=_NOTHING)
    expanded: Mapping[Modality, int]

    def matches(self, facts: ModelFacts) -> bool:
        """Whether a model is of this family: by what it is called, its type, or its class."""
        return (
            self.named(facts.name.lower())
            or facts.model_type in self.model_types
            or not self.architectures.isdisjoint(facts.architectures)
        )

    def extra_tokens(self, counts: Mapping[Modality, int]) -> int:
        """How many tokens longer than with anchors a prompt is likely to be once so many items are expanded."""
        return sum(count * (self.expanded.get(kind, 1) - 1) for kind, count in counts.items())


@lru_cache(maxsize=256)
def spec_for(facts: ModelFacts) -> ModelSpec | None:
    """The first family in the table that a model belongs to; None for a model of text, or one that is not known."""
    return next((spec for spec in SPECS if spec.matches(facts)), None)


def _has(*words: str) -> Callable[[str], bool]:
    return lambda name: all(word in name for word in words)


def _any_of(*tests: Callable[[str], bool]) -> Callable[[str], bool]:
    return lambda name: any(test(name) for test in tests)


_IMAGE, _VIDEO = Modality.IMAGE, Modality.VIDEO
# The Qwen families since Qwen2-VL: their stock templates put vision_start and vision_end around one pad.
_PADS: Final = MappingProxyType({_IMAGE: "<|image_pad|>", _VIDEO: "<|video_pad|>"})

SPECS: Final[tuple[ModelSpec, ...]] = (
    ModelSpec(
        name="qwen3_vl",
        named=_any_of(_has("qwen3", "vl"), _has("qwen3.5"), _has("qwen3.6")),
        model_types=frozenset({"qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"}),
        architectures=frozenset({"Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"}),
        anchors=_PADS,
        limits=MappingProxyType({_IMAGE: 10, _VIDEO: 1}),
        worker_expandable=frozenset({_IMAGE, _VIDEO}),
        # A pad for each 32 x 32 pixels: an image of a megapixel; a clip of ten seconds at two frames a second, each
        # pair of frames of 640 x 480 being 300 pads.
        expanded=MappingProxyType({_IMAGE: 1024, _VIDEO: 3000}),
    ),
    # Its workers would replace the same pads. It is left out of what they may process until that has been seen on one.
    ModelSpec(
        name="qwen2_vl",
        named=_any_of(_has("qwen2-vl"), _has("qwen2.5-vl"), _has("qwen2_vl"), _has("qwen2_5_vl")),
        model_types=frozenset({"qwen2_vl", "qwen2_5_vl"}),
        architectures=frozenset({"Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"}),
        anchors=_PADS,
        limits=MappingProxyType({_IMAGE: 10, _VIDEO: 1}),
        # A pad for each 28 x 28 pixels.
        expanded=MappingProxyType({_IMAGE: 1337, _VIDEO: 3900}),
    ),
    # The first Qwen-VL, whose own class writes paths between tags: no template renders what a worker would look for.
    ModelSpec(
        name="qwen_vl",
        named=_has("qwen", "vl"),
        model_types=frozenset(),
        architectures=frozenset({"QWenLMHeadModel"}),
        anchors=MappingProxyType({_IMAGE: "<image>"}),
        limits=MappingProxyType({_IMAGE: 10}),
        expanded=MappingProxyType({_IMAGE: 256}),
    ),
    ModelSpec(
        name="llama4",
        named=_any_of(_has("llama-4"), _has("llama4")),
        model_types=frozenset({"llama4"}),
        architectures=frozenset({"Llama4ForConditionalGeneration"}),
        anchors=MappingProxyType({_IMAGE: "<|image|>"}),
        limits=MappingProxyType({_IMAGE: 8}),
        worker_expandable=frozenset({_IMAGE}),
        # 2 x 2 tiles of 144 and a small picture of the whole.
        expanded=MappingProxyType({_IMAGE: 727}),
    ),
    # Workers look for numbered anchors, <|image_1|> and so on.
    ModelSpec(
        name="phi3_v",
        named=_has("phi", "vision"),
        model_types=frozenset({"phi3_v"}),
        architectures=frozenset({"Phi3VForCausalLM"}),
        anchors=MappingProxyType({_IMAGE: "<|image|>"}),
        limits=MappingProxyType({_IMAGE: 4}),
        # Four crops and the whole.
        expanded=MappingProxyType({_IMAGE: 757}),
    ),
    ModelSpec(
        name="llava_next",
        named=_any_of(_has("llava-next"), _has("llava-v1.6"), _has("llava_next")),
        model_types=frozenset({"llava_next"}),
        architectures=frozenset({"LlavaNextForConditionalGeneration"}),
        anchors=MappingProxyType({_IMAGE: "<image>"}),
        limits=MappingProxyType({_IMAGE: 4}),
        # Four tiles of 576 and the whole.
        expanded=MappingProxyType({_IMAGE: 2880}),
    ),
    ModelSpec(
        name="llava",
        named=_has("llava"),
        model_types=frozenset({"llava"}),
        architectures=frozenset({"LlavaForConditionalGeneration"}),
        anchors=MappingProxyType({_IMAGE: "<image>"}),
        limits=MappingProxyType({_IMAGE: 4}),
        # (336 / 14) squared, whatever the image's size.
        expanded=MappingProxyType({_IMAGE: 576}),
    ),
)
"""The families, the narrower before the wider: the first that matches counts."""
