"""Who processes a request's media: the router, or the workers, who get references and fetch the media themselves.

One pure decision over frozen facts, made once per request, before any worker is chosen. It must not know how a worker
is chosen, nor what is done with the decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum, unique
from typing import Final

from ..errors import BadRequest, Unsupported
from .items import MediaItem, MediaPlan, Obstacle
from .specs import ModelSpec


@unique
class ProcessingMode(StrEnum):
    """The operator's choice."""

    # Leave to the workers what every one of them can process.
    AUTO = "auto"
    ROUTER = "router"
    # Leave everything to the workers, and refuse what cannot be.
    WORKER = "worker"


@unique
class Side(StrEnum):
    """Who processes the media of one request."""

    ROUTER = "router"
    WORKER = "worker"


@unique
class Reason(StrEnum):
    """Why it is that side; the values are labels of `smg_mm_processing_total`."""

    CONFIG = "config"
    EPD_UNSUPPORTED = "epd_unsupported"
    PLAN_NOT_FORWARDABLE = "plan_not_forwardable"
    MODEL_NOT_OPTED_IN = "model_not_opted_in"
    # Every worker, some, or none can process media.
    AUTO_UNIFORM = "auto_uniform"
    AUTO_MIXED = "auto_mixed"
    AUTO_NONE = "auto_none"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMedia:
    """What a registered worker of the model says of media, whether it is ready or not.

    `is_vllm_grpc` is false for workers behind ZMQ, which have no processor whatever they say. `mm_processor` is which
    processor it has, empty for none. `schemes`: those it can fetch, None when it does not say. `item_limits` is its own
    word on items per prompt, like "image=8,video=2". `leg` is the part of a request it serves.
    """

    mm_processor: str = ""
    is_vllm_grpc: bool = True
    schemes: frozenset[str] | None = None
    item_limits: str = ""
    leg: str = ""

    @property
    def accepts_references(self) -> bool:
        """It fetches and processes media by itself."""
        return self.is_vllm_grpc and bool(self.mm_processor)


@dataclass(frozen=True, slots=True)
class Resolution:
    """The decision and why."""

    side: Side
    reason: Reason


def resolve(
    plan: MediaPlan,
    *,
    spec: ModelSpec | None,
    workers: Sequence[WorkerMedia],
    mode: ProcessingMode,
    epd: bool = False,
) -> Resolution:
    """Decide for a plan that is not empty.

    `workers` are all that are registered for the model; `epd` tells that the router has encode workers, which take
    pixels. Raises BadRequest in mode `worker` for what no worker could process, naming the part and what to do.
    """
    if mode is ProcessingMode.ROUTER:
        return Resolution(Side.ROUTER, Reason.CONFIG)
    if mode is ProcessingMode.WORKER:
        _refuse_impossible(plan, spec=spec, epd=epd)
        # Whether a worker can take it now is selection's to find out, and to tell.
        return Resolution(Side.WORKER, Reason.CONFIG)
    if epd:
        return Resolution(Side.ROUTER, Reason.EPD_UNSUPPORTED)
    if plan.obstacle is not None:
        return Resolution(Side.ROUTER, Reason.PLAN_NOT_FORWARDABLE)
    if _not_opted_in(plan, spec=spec) is not None:
        return Resolution(Side.ROUTER, Reason.MODEL_NOT_OPTED_IN)
    able = sum(worker.accepts_references for worker in workers)
    if not able:
        return Resolution(Side.ROUTER, Reason.AUTO_NONE)
    if able < len(workers):
        return Resolution(Side.ROUTER, Reason.AUTO_MIXED)
    return Resolution(Side.WORKER, Reason.AUTO_UNIFORM)


def unavailable(plan: MediaPlan, *, reason: Reason) -> Unsupported:
    """The error for a plan that the router would have to process, which it cannot yet."""
    return Unsupported(
        f"{plan.items[0].part}: the media of this request are not left to workers ({reason}), and this router cannot"
        " process them yet",
        code="multimodal_router_processing_unavailable",
    )


def _not_opted_in(plan: MediaPlan, *, spec: ModelSpec | None) -> MediaItem | None:
    """The first item of a kind that is not left to workers of this model."""
    expandable = frozenset() if spec is None else spec.worker_expandable
    return next((item for item in plan if item.modality not in expandable), None)


_WHY: Final = {
    Obstacle.INLINE: "is inline bytes, and workers take URLs only; send it as a data: URL",
    Obstacle.AUDIO: "is audio, which workers do not process; leave it out",
    Obstacle.EMBEDDINGS: "is embeddings, which workers do not take; send the media itself",
}


def _refuse_impossible(plan: MediaPlan, *, spec: ModelSpec | None, epd: bool) -> None:
    if plan.obstacle is not None:
        item, obstacle = plan.obstacle
        if obstacle is Obstacle.HINT:
            raise BadRequest(
                f"{item.part} has {', '.join(item.hints)}, and workers, which process the media here, take no such"
                " hints; leave it out",
                code="multimodal_hint_unsupported_in_worker_mode",
            )
        raise BadRequest(f"{item.part} {_WHY[obstacle]}", code="multimodal_not_supported")
    refused = _not_opted_in(plan, spec=spec)
    if refused is not None:
        model = "a model of this kind" if spec is None else f"models of the family {spec.name}"
        raise BadRequest(
            f"{refused.part} is {_with_article(refused)}, which workers do not process for {model}; leave it out",
            code="multimodal_worker_processing_unsupported_model",
        )
    if epd:
        raise BadRequest(
            f"{plan.items[0].part}: this fleet has encode workers, which are given pixels and not references;"
            " leave it out",
            code="multimodal_not_supported",
        )


def _with_article(item: MediaItem) -> str:
    return f"{'a' if item.modality == 'video' else 'an'} {item.modality}"
