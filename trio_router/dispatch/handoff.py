"""The handoff between the legs: taking it, checking it, and what becomes of it. Pure.

Invariants I3, I5 and I6. A handoff is issued by a prefill leg, offered to at most one decode leg, and ends consumed,
released, lapsed or refused as invalid; each end is counted once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, unique
from typing import Any, Final

import msgspec

from ..errors import PrefillFailed
from ..protocol.codec import decode
from ..protocol.messages import GenerateResponse, MediaIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class Harvest:
    """What a prefill leg's complete frame held. `kv_params` is the worker's JSON, byte for byte; None when it gave
    none.
    """

    kv_params: str | None
    identity: MediaIdentity | None
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    completes: int


# An ending that hands nothing over, whatever else the frame says (I1).
_FAILED_ENDINGS: Final = frozenset({"abort", "error"})


def harvest(frames: list[bytes]) -> Harvest:
    """Take the handoff from a prefill leg that has ended. Of several completes the last counts.

    Raises PrefillFailed when there is none, or when it ended with `abort` or `error`; DecodeError for bytes that are no
    GenerateResponse.
    """
    completes = [
        response.complete for response in (decode(GenerateResponse, f) for f in frames) if _is_complete(response)
    ]
    if not completes:
        raise PrefillFailed("the prefill leg ended without a complete frame")
    last = completes[-1]
    if last.finish_reason in _FAILED_ENDINGS:
        raise PrefillFailed(f"the prefill leg ended with finish reason {last.finish_reason!r}")
    return Harvest(
        # An empty string counts as absent: that is how a worker without params spells it.
        kv_params=last.kv_transfer_params_json or None,
        identity=last.media_identity if last.media_identity else None,
        finish_reason=last.finish_reason,
        prompt_tokens=last.prompt_tokens,
        cached_tokens=last.cached_tokens,
        completes=len(completes),
    )


def _is_complete(response: GenerateResponse) -> bool:
    return bool(response._group_current.get("response") == "complete")


def is_handoff(kv_params: str | None) -> bool:
    """Whether params hand anything over: `{}` and an explicit `do_remote_prefill: false` do not. Unparsable ones
    might.
    """
    if kv_params is None:
        return False
    try:
        params = msgspec.json.decode(kv_params)
    except msgspec.DecodeError:
        return True
    return not isinstance(params, dict) or (bool(params) and params.get("do_remote_prefill") is not False)


def invalid_because(kv_params: str, *, prompt_tokens: int, block_size: int = 0) -> str | None:
    """Why these NIXL-shaped params must not reach an engine (I6); None when they may.

    Real engines die of params that lack or misshape these keys. Params without the modern keys (`tp_size`,
    `transfer_mode`) come from older engines with other rules and are only required to be a JSON object.
    """
    try:
        params = msgspec.json.decode(kv_params)
    except msgspec.DecodeError as exc:
        return f"not JSON: {exc}"
    if not isinstance(params, dict):
        return f"a JSON {type(params).__name__}, not an object"
    if not is_modern(params):
        return None
    faults = _faults(params, prompt_tokens=prompt_tokens, block_size=block_size)
    return next((reason for reason in faults if reason), None)


def is_modern(params: dict[str, Any]) -> bool:
    """Whether params have the shape whose rules are known."""
    return "tp_size" in params and "transfer_mode" in params


def _faults(params: dict[str, Any], *, prompt_tokens: int, block_size: int) -> list[str | None]:
    blocks, tokens = params.get("remote_block_ids"), params.get("remote_num_tokens")
    return [
        None if params.get("do_remote_prefill") is True else "do_remote_prefill is not true",
        None if _text(params, "remote_request_id") else "remote_request_id is missing",
        None if _text(params, "remote_engine_id") else "remote_engine_id is missing",
        None if _text(params, "remote_host") else "remote_host is missing",
        None if _is_port(params.get("remote_port")) else "remote_port is not a port number",
        _block_fault(blocks),
        _tokens_fault(tokens, prompt_tokens=prompt_tokens) or _coverage_fault(blocks, tokens, block_size=block_size),
    ]


def _text(params: dict[str, Any], key: str) -> bool:
    value = params.get(key)
    return isinstance(value, str) and bool(value)


def _is_port(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 65536


def _block_fault(blocks: object) -> str | None:
    if not isinstance(blocks, list) or not blocks:
        return "remote_block_ids is not a list of lists of block ids"
    for group in blocks:
        if not isinstance(group, list) or not group:
            return "remote_block_ids is not a list of lists of block ids"
        if not all(isinstance(block, int) and not isinstance(block, bool) and block >= 0 for block in group):
            return "remote_block_ids holds something that is no block id"
    return None


def _tokens_fault(tokens: object, *, prompt_tokens: int) -> str | None:
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens <= 0:
        return "remote_num_tokens is not a positive number"
    if prompt_tokens and tokens > prompt_tokens:
        return f"remote_num_tokens is {tokens} for a prompt of {prompt_tokens}"
    return None


def _coverage_fault(blocks: Any, tokens: Any, *, block_size: int) -> str | None:
    # Only after _block_fault and _tokens_fault found nothing. An engine that is offered too few blocks dies.
    if block_size <= 0 or _block_fault(blocks):
        return None
    covered = max(len(group) for group in blocks) * block_size
    return None if covered >= tokens else f"remote_block_ids cover {covered} of {tokens} tokens"


@unique
class HandoffState(StrEnum):
    """Where a handoff is in its life."""

    ISSUED = "issued"
    OFFERED = "offered"
    CONSUMED = "consumed"
    RELEASED = "released"
    LAPSED = "lapsed"
    INVALID = "invalid"


_TRANSITIONS: Final[dict[HandoffState, frozenset[HandoffState]]] = {
    HandoffState.ISSUED: frozenset(
        {HandoffState.OFFERED, HandoffState.RELEASED, HandoffState.LAPSED, HandoffState.INVALID}
    ),
    HandoffState.OFFERED: frozenset({HandoffState.CONSUMED, HandoffState.RELEASED, HandoffState.LAPSED}),
    HandoffState.CONSUMED: frozenset(),
    HandoffState.RELEASED: frozenset(),
    HandoffState.LAPSED: frozenset(),
    HandoffState.INVALID: frozenset(),
}


class Handoff:
    """KV params with their life cycle. `issued_at` and all times are seconds on one clock; `lease` is in seconds."""

    __slots__ = ("issued_at", "kv_params", "lease", "prefill_worker", "state")

    def __init__(self, kv_params: str, *, prefill_worker: str, issued_at: float, lease: float) -> None:
        self.kv_params = kv_params
        self.prefill_worker = prefill_worker
        self.issued_at = issued_at
        self.lease = lease
        self.state = HandoffState.ISSUED

    def __repr__(self) -> str:
        return f"<Handoff from {self.prefill_worker} {self.state}>"

    @property
    def ended(self) -> bool:
        """Whether nothing more may become of it."""
        return not _TRANSITIONS[self.state]

    def move(self, target: HandoffState) -> None:
        """Go to `target`. A step the table does not have is a bug here and raises RuntimeError."""
        if target not in _TRANSITIONS[self.state]:
            raise RuntimeError(f"a handoff cannot go from {self.state} to {target} ({self!r})")
        self.state = target

    def is_fresh(self, now: float, *, fraction: float) -> bool:
        """Whether it may still be offered: its age is under `fraction` of its lease (I5)."""
        return now - self.issued_at < self.lease * fraction
