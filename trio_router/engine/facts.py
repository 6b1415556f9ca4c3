"""What a worker says about itself: the model, the server, its load and its counters, as wire messages.

Pure: it reads records and builds replies.
"""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime
from typing import Final

import msgspec

from ..protocol.messages import (
    GetCountersResponse,
    GetLoadsResponse,
    GetModelInfoResponse,
    GetServerInfoResponse,
    SchedulerLoad,
)
from .core import Core
from .model import Model
from .settings import Connector, WorkerSettings

VERSION: Final = "reference"

THROUGHPUT_WINDOW: Final = 2.0
"""Seconds over which generated tokens are averaged, as the servicer does."""
HIT_WINDOW: Final = 64
"""First outputs over which the prefix hit rate is taken, as the servicer does."""

# Of the generation config, what a client may want as its default.
_SAMPLING_DEFAULTS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def model_info(model: Model, *, settings: WorkerSettings) -> GetModelInfoResponse:
    config = model.config
    defaults = {key: model.generation_config[key] for key in _SAMPLING_DEFAULTS if key in model.generation_config}
    return GetModelInfoResponse(
        model_path=str(model.directory),
        is_generation=True,
        max_context_length=settings.max_context_length,
        vocab_size=model.vocab_size,
        supports_vision=settings.media.sees and not settings.media.language_model_only,
        served_model_name=settings.served_name,
        tokenizer_path=str(model.directory),
        model_type=str(config.get("model_type", "")),
        architectures=[str(name) for name in config.get("architectures", [])],
        eos_token_ids=_ids(config.get("eos_token_id")),
        pad_token_id=_id(config.get("pad_token_id")),
        bos_token_id=_id(config.get("bos_token_id")),
        max_req_input_len=settings.max_context_length,
        default_sampling_params_json=msgspec.json.encode(defaults).decode() if defaults else "",
    )


def server_info(settings: WorkerSettings, *, engine_id: str) -> GetServerInfoResponse:
    """The connector facts are empty on a worker without one, those of media likewise. The engine id is the base,
    whatever ranks there are."""
    media = settings.media
    processor = media.advertised
    return GetServerInfoResponse(
        kv_connector=settings.kv_connector.class_name,
        kv_role=settings.kv_role,
        kv_engine_id="" if settings.kv_connector is Connector.NONE else engine_id,
        data_parallel_size=settings.dp_size,
        kv_cache_dtype="auto",
        block_size=settings.block_size,
        model_dtype="bfloat16",
        max_num_seqs=settings.max_num_seqs,
        mm_processor=processor,
        mm_media_ref_schemes=",".join(media.schemes) if processor else "",
        mm_processor_source=media.source if processor else "",
        mm_item_limits=",".join(f"{kind}={limit}" for kind, limit in sorted(media.limits.items())) if processor else "",
        multimodal_encoder_dtype="bfloat16" if processor else "",
    )


def counters_reply(core: Core) -> GetCountersResponse:
    counters = core.counters
    return GetCountersResponse(
        generates=counters.generates,
        aborts=counters.aborts,
        pulls=counters.pulls,
        pulled_tokens=counters.pulled_tokens,
        prefix_hit_tokens=counters.prefix_hit_tokens,
        recomputed_prompt_tokens=counters.recomputed_prompt_tokens,
        released=counters.released,
        lease_expired=counters.lease_expired,
        pinned_blocks=core.ledger.pinned_blocks,
        pinned_requests=len(core.ledger),
        running=core.active,
        waiting=len(core.waiting),
        free_blocks=core.cache.free_blocks,
        total_blocks=core.cache.num_blocks,
        engine_dead=core.dead,
        media_fetches=counters.media_fetches,
        media_items_processed=counters.media_items_processed,
    )


class LoadBook:
    """The servicer's own running estimates: tokens per second lately, and how much of a prompt is usually cached."""

    __slots__ = ("_hits", "_samples")

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()
        self._hits: deque[tuple[int, int]] = deque(maxlen=HIT_WINDOW)

    def note_tokens(self, total: int, *, now: float) -> None:
        """The number of tokens generated so far."""
        samples = self._samples
        samples.append((now, total))
        # One sample from before the window stays, to count from.
        while len(samples) > 1 and samples[1][0] <= now - THROUGHPUT_WINDOW:
            samples.popleft()

    def note_first_output(self, *, prompt_tokens: int, cached_tokens: int) -> None:
        self._hits.append((prompt_tokens, cached_tokens))

    def throughput(self, *, now: float) -> float:
        """Tokens per second over the window that ends now."""
        # Steps stop when nothing runs, so the last sample may lie before the window.
        before = last = 0
        for at, total in self._samples:
            last = total
            if at <= now - THROUGHPUT_WINDOW:
                before = total
        return (last - before) / THROUGHPUT_WINDOW

    @property
    def hit_rate(self) -> float:
        prompts = sum(prompt for prompt, _cached in self._hits)
        return sum(cached for _prompt, cached in self._hits) / prompts if prompts else 0.0


def loads_reply(core: Core, *, book: LoadBook, now: float, wall_clock: datetime | None = None) -> GetLoadsResponse:
    """The load of every rank. `now` is the engine's clock; `wall_clock` only stamps the reply.

    Sequences are counted where they are; memory and throughput are one engine's, of which each rank is told its share.
    """
    stamp = (wall_clock or datetime.now(UTC)).isoformat()
    ranks = core.settings.dp_size
    loads = [_rank_load(core, book=book, now=now, rank=rank) for rank in range(ranks)]
    return GetLoadsResponse(timestamp=stamp, version=VERSION, dp_rank_count=ranks, loads=loads)


def _rank_load(core: Core, *, book: LoadBook, now: float, rank: int) -> SchedulerLoad:
    settings, cache = core.settings, core.cache
    capacity = cache.num_blocks * cache.block_size // settings.dp_size
    usage = cache.held_blocks / cache.num_blocks
    active = sum(sequence.rank == rank for sequence in (*core.running, *core.pulling))
    waiting = [sequence for sequence in core.waiting if sequence.rank == rank]
    queued = sum(len(sequence.tokens) for sequence in waiting)
    return SchedulerLoad(
        dp_rank=rank,
        num_running_reqs=active,
        num_waiting_reqs=len(waiting),
        num_total_reqs=active + len(waiting),
        num_used_tokens=round(usage * capacity),
        max_total_num_tokens=capacity,
        token_usage=usage,
        gen_throughput=book.throughput(now=now) / settings.dp_size,
        cache_hit_rate=book.hit_rate,
        utilization=usage,
        max_running_requests=settings.max_num_seqs,
        num_waiting_uncached_tokens=round(queued * (1 - book.hit_rate)),
    )


def _id(value: object) -> int:
    return value if isinstance(value, int) else 0


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int)]
