"""From a GenerateRequest to sequences: the servicer's checks in the servicer's order.

Pure. A request that cannot be run raises BadRequest with the words the real servicer or its engine uses, as far as
clients can tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import betterproto

from ..errors import BadRequest
from ..protocol.messages import GenerateRequest
from .handoff import KvParams, read_directive
from .model import Model, StopStrings
from .sampling import SamplingPlan, plan_sampling
from .sequence import Outlet, Sequence
from .settings import WorkerSettings
from .vision.batches import is_preprocessed
from .vision.sight import NOTHING_SEEN, Sight, has_media_refs, is_tokenized, media_batches
from .vision.visuals import Visuals


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A request that passed every check."""

    request_id: str
    prompt: list[int]
    plan: SamplingPlan
    streaming: bool
    params: KvParams | None
    rank: int | None
    """The data parallel rank it asks for; None: the engine chooses."""
    visuals: Visuals | None = None
    cache_salt: str | None = None


def input_type(request: GenerateRequest) -> str | None:
    """Which input the request carries: "tokenized", "text" or None."""
    return betterproto.which_one_of(request, "input")[0] or None


def log_line(request: GenerateRequest) -> str:
    """The servicer's one INFO line for each Generate. Others scrape it: word for word, vLLM servicer 0.14.1."""
    preprocessed = any(is_preprocessed(batch) for batch in media_batches(request))
    refs = len(request.media_refs.items) if has_media_refs(request) else 0
    return (
        f"Generate request {request.request_id}: input_type={input_type(request)}, stream={request.stream},"
        f" preprocessed_mm={preprocessed}, media_refs={refs}, dp_rank={request.data_parallel_rank}"
    )


def take_order(
    request: GenerateRequest,
    *,
    params: KvParams | None,
    model: Model,
    settings: WorkerSettings,
    sight: Sight = NOTHING_SEEN,
) -> Order:
    """Check everything but the KV params and the media, which come before. Raises BadRequest."""
    plan = plan_sampling(request.sampling_params, vocab_size=model.vocab_size)
    rank = request.data_parallel_rank
    if rank is not None and not 0 <= rank < settings.dp_size:
        raise BadRequest(f"data_parallel_rank {rank} is out of range [0, {settings.dp_size}).")
    if sight.prompt is not None:
        prompt = sight.prompt
    elif is_tokenized(request):
        prompt = request.tokenized.input_ids
    else:
        # An unset input arrives at the engine as an empty text.
        text = request.text if input_type(request) == "text" else ""
        prompt = model.tokenizer.encode(text, add_special_tokens=True)
    if plan.truncate_prompt_tokens is not None and plan.truncate_prompt_tokens >= 0:
        if sight.visuals is not None:
            raise BadRequest("truncate_prompt_tokens would cut media; leave it out of a request that has any")
        prompt = prompt[max(0, len(prompt) - plan.truncate_prompt_tokens) :]
    _check_prompt(prompt, vocab_size=model.vocab_size, limit=settings.max_context_length)
    return Order(
        request_id=request.request_id,
        prompt=prompt,
        plan=plan,
        streaming=request.stream,
        params=params,
        rank=rank,
        visuals=sight.visuals,
        cache_salt=sight.cache_salt,
    )


def _check_prompt(prompt: list[int], *, vocab_size: int, limit: int) -> None:
    if not prompt:
        raise BadRequest("The prompt is empty: at least one token is needed.")
    if max(prompt) >= vocab_size:
        raise BadRequest(f"Token id {max(prompt)} is out of vocabulary.")
    if len(prompt) >= limit:
        raise BadRequest(f"The prompt (length {len(prompt)}) leaves no room in the maximum model length of {limit}.")


def make_sequences(
    order: Order,
    *,
    outlet: Outlet,
    model: Model,
    settings: WorkerSettings,
    new_id: Callable[[], str],
    next_rank: Callable[[], int],
    draw_seed: Callable[[], int],
) -> list[Sequence]:
    """One sequence for each choice, all of one rank. With several choices each has an internal id of its own, and one
    handoff is offered to all of them: the first to pull it frees the blocks under the others, as on a real engine."""
    plan = order.plan
    prompt_blocks = -(-len(order.prompt) // settings.block_size)
    directive = read_directive(order.params, prompt_blocks=prompt_blocks, connector=settings.kv_connector)
    seed = 0
    if not plan.greedy:
        seed = draw_seed() if plan.seed is None else plan.seed & 0xFFFF_FFFF
    rank = next_rank() if order.rank is None else order.rank
    internal_id = f"{order.request_id}-{new_id()}"
    return [
        Sequence(
            internal_id=internal_id if plan.n == 1 else f"{index}_{internal_id}",
            external_id=order.request_id,
            index=index,
            prompt=order.prompt,
            plan=plan,
            outlet=outlet,
            context_limit=settings.max_context_length,
            eos_token_id=model.language.eos_token_id,
            seed=seed,
            rank=rank,
            directive=directive,
            stop_text=StopStrings(model.tokenizer, plan=plan) if plan.stop else None,
            visuals=order.visuals,
            cache_salt=order.cache_salt,
        )
        for index in range(plan.n)
    ]
