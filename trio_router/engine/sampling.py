"""Sampling parameters: the wire's defaults, the engine's refusals, and what is left to decide with.

Pure. It reads one message and gives a plan or raises; it chooses no tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import betterproto

from ..errors import BadRequest
from ..protocol.messages import SamplingParams

MAX_STOP_STRINGS: Final = 64
MAX_CHOICES: Final = 1024
"""The engine's own bounds: what a single request may make it keep track of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """What the engine needs of a request's sampling parameters."""

    greedy: bool = True
    seed: int | None = None
    """Only read when not greedy. None: the worker draws one."""
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None


def plan_sampling(params: SamplingParams, *, vocab_size: int) -> SamplingPlan:
    """Read the parameters as the engine does. Raises BadRequest with the engine's reason.

    What would change the text but is not simulated (penalties, min_p, top_p, logit_bias) is checked and then has no
    effect. What would change the answer's shape (constraints, logprobs) is refused rather than left out.
    """
    _refuse_unsupported(params)
    temperature = 1.0 if params.temperature is None else params.temperature
    _check_ranges(params, temperature=temperature, vocab_size=vocab_size)
    n = params.n or 1
    greedy = temperature == 0 or params.top_k == 1
    if temperature == 0 and n > 1:
        raise BadRequest(f"n must be 1 when using greedy sampling, got {n}.")
    return SamplingPlan(
        greedy=greedy,
        seed=params.seed,
        n=n,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop=tuple(params.stop),
        stop_token_ids=frozenset(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        skip_special_tokens=params.skip_special_tokens,
        truncate_prompt_tokens=params.truncate_prompt_tokens,
    )


def _refuse_unsupported(params: SamplingParams) -> None:
    constraint, _value = betterproto.which_one_of(params, "constraint")
    if constraint:
        raise BadRequest(f"{constraint}: the reference worker cannot constrain its output")
    for field in ("logprobs", "prompt_logprobs"):
        if getattr(params, field) is not None:
            raise BadRequest(f"{field}: the reference worker has no probabilities to report")


def _check_ranges(params: SamplingParams, *, temperature: float, vocab_size: int) -> None:
    top_p = params.top_p or 1.0
    repetition_penalty = params.repetition_penalty or 1.0
    checks = (
        (math.isfinite(temperature) and temperature >= 0, f"temperature must be non-negative, got {temperature}."),
        (0 < top_p <= 1, f"top_p must be in (0, 1], got {top_p}."),
        (0 <= params.min_p <= 1, f"min_p must be in [0, 1], got {params.min_p}."),
        (-2 <= params.frequency_penalty <= 2, f"frequency_penalty must be in [-2, 2], got {params.frequency_penalty}."),
        (-2 <= params.presence_penalty <= 2, f"presence_penalty must be in [-2, 2], got {params.presence_penalty}."),
        (repetition_penalty > 0, f"repetition_penalty must be greater than zero, got {repetition_penalty}."),
        (params.max_tokens != 0, f"max_tokens must be at least 1, got {params.max_tokens}."),
        (
            params.max_tokens is None or params.min_tokens <= params.max_tokens,
            f"min_tokens must be less than or equal to max_tokens={params.max_tokens}, got {params.min_tokens}.",
        ),
        (params.n <= MAX_CHOICES, f"n must be at most {MAX_CHOICES}, got {params.n}."),
        (len(params.stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} stop strings, got {len(params.stop)}."),
        ("" not in params.stop, "stop cannot contain an empty string."),
        (
            all(token < vocab_size for token in params.stop_token_ids),
            f"stop_token_ids must be below the vocabulary size of {vocab_size}.",
        ),
        (
            params.truncate_prompt_tokens is None or params.truncate_prompt_tokens >= -1,
            f"truncate_prompt_tokens must be -1 or more, got {params.truncate_prompt_tokens}.",
        ),
    )
    for holds, complaint in checks:
        if not holds:
            raise BadRequest(complaint)
