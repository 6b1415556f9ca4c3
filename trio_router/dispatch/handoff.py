"""The handoff between the legs: taking it from a prefill leg's answer, and what becomes of it. Pure.

Invariants I1, I3 and I5. A handoff is issued by a prefill leg, offered to at most one decode leg, and ends consumed,
released, lapsed or refused as invalid; each end is told once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum, unique
from typing import Final

import betterproto

from ..errors import ConfigError, DecodeError, PrefillFailed
from ..protocol.codec import decode
from ..protocol.messages import GenerateResponse, MediaIdentity
from ..protocol.wire import is_complete
from .connectors import Connector
from .kvparams import KvParams

FAILED_ENDINGS: Final = frozenset({"abort", "error"})
"""Finish reasons of a leg that has given nothing: no handoff (I1), or no first token (I10)."""


class PrefillAnswer:
    """What a prefill leg has said so far: the last of its complete frames, and how many frames there were. Nothing else
    is kept, so a worker that goes on and on fills no memory.
    """

    __slots__ = ("completes", "frames", "last")

    def __init__(self) -> None:
        self.frames = 0
        self.completes = 0
        self.last: bytes | None = None

    def add(self, frame: bytes) -> None:
        """Take the next frame, whatever is in it."""
        self.frames += 1
        try:
            complete = is_complete(frame)
        except DecodeError:
            return  # says nothing, and a leg that says nothing has failed
        if complete:
            self.completes += 1
            self.last = frame


@dataclass(frozen=True, slots=True, kw_only=True)
class Harvest:
    """What a prefill leg's complete frame held. `kv_params` is the worker's JSON, byte for byte; None when it gave
    none.
    """

    frame: bytes
    kv_params: str | None
    identity: MediaIdentity | None
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    completes: int


def harvest(answer: PrefillAnswer) -> Harvest:
    """Read the answer of a prefill leg that has ended. Of several completes the last counts.

    Raises PrefillFailed when there is none, when it is no GenerateResponse, or when it ended with `abort` or `error`.
    """
    if answer.last is None:
        raise PrefillFailed("the prefill leg ended without a complete frame")
    try:
        last = decode(GenerateResponse, answer.last).complete
    except DecodeError as exc:
        raise PrefillFailed(f"the prefill leg's complete frame cannot be read: {exc}") from exc
    if last.finish_reason in FAILED_ENDINGS:
        raise PrefillFailed(f"the prefill leg ended with finish reason {last.finish_reason!r}")
    return Harvest(
        frame=answer.last,
        # An empty string counts as absent: that is how a worker without params spells it.
        kv_params=last.kv_transfer_params_json or None,
        identity=last.media_identity if betterproto.serialized_on_wire(last.media_identity) else None,
        finish_reason=last.finish_reason,
        prompt_tokens=last.prompt_tokens,
        cached_tokens=last.cached_tokens,
        completes=answer.completes,
    )


@unique
class OnMissingHandoff(StrEnum):
    """What becomes of a pair whose prefill leg ended well and handed nothing over."""

    RECOMPUTE = "recompute"
    """The decode worker computes the prompt again; counted, with a warning."""
    FAIL = "fail"
    """The attempt has failed."""


@unique
class OnEmptyPrefill(StrEnum):
    """What becomes of a request when no prefill worker is ready."""

    FAIL = "fail"
    DECODE_LOCAL = "decode-local"
    """A decode worker serves it whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffSettings:
    """Leases in seconds: how long a prefill worker of that connector holds what nobody has fetched (vLLM's defaults;
    set them to what the workers were started with). A handoff is offered while its age is below `fresh_fraction` of its
    lease.
    """

    fresh_fraction: float = 0.7
    nixl_lease: float = 30.0
    mooncake_lease: float = 480.0
    on_missing: OnMissingHandoff = OnMissingHandoff.RECOMPUTE
    on_empty_prefill: OnEmptyPrefill = OnEmptyPrefill.FAIL

    def lease(self, connector: Connector) -> float:
        """The lease of a handoff of this connector. One that nobody knows is taken for the shortest there is."""
        return self.mooncake_lease if connector is Connector.MOONCAKE else self.nixl_lease

    def validate(self) -> None:
        """Raise ConfigError, naming the setting."""
        if not 0 <= self.fresh_fraction < 1:
            raise ConfigError(
                f"handoff.fresh_fraction is a share of the lease, from 0 to below 1, not {self.fresh_fraction}"
            )
        for name in ("nixl_lease", "mooncake_lease"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"handoff.{name} is in seconds and above 0, not {getattr(self, name)}")


@unique
class HandoffState(StrEnum):
    """Where a handoff is in its life."""

    ISSUED = "issued"
    OFFERED = "offered"
    CONSUMED = "consumed"
    RELEASED = "released"
    LAPSED = "lapsed"
    INVALID = "invalid"


_S = HandoffState
_TRANSITIONS: Final[dict[HandoffState, frozenset[HandoffState]]] = {
    _S.ISSUED: frozenset({_S.OFFERED, _S.RELEASED, _S.LAPSED, _S.INVALID}),
    _S.OFFERED: frozenset({_S.CONSUMED, _S.RELEASED, _S.LAPSED}),
    _S.CONSUMED: frozenset(),
    _S.RELEASED: frozenset(),
    _S.LAPSED: frozenset(),
    _S.INVALID: frozenset(),
}


class Handoff:
    """KV params with their life cycle. `issued_at` and all times are seconds on one clock; `lease` is in seconds.

    `on_end` is called with it, once, when it has come to an end.
    """

    __slots__ = ("_on_end", "attempt_id", "connector", "issued_at", "lease", "params", "prefill_worker", "state")

    def __init__(
        self,
        params: KvParams,
        *,
        attempt_id: str,
        connector: Connector,
        prefill_worker: str,
        issued_at: float,
        lease: float,
        on_end: Callable[[Handoff], None],
    ) -> None:
        self.params = params
        self.attempt_id = attempt_id
        self.connector = connector
        self.prefill_worker = prefill_worker
        self.issued_at = issued_at
        self.lease = lease
        self.state = HandoffState.ISSUED
        self._on_end = on_end

    def __repr__(self) -> str:
        return f"<Handoff from {self.prefill_worker} {self.state}>"

    @property
    def ended(self) -> bool:
        """Whether nothing more may become of it."""
        return not _TRANSITIONS[self.state]

    def offer(self) -> None:
        """It goes out on a decode leg. A second offer (I5) is a bug here and raises RuntimeError."""
        self._move(HandoffState.OFFERED)

    def end(self, state: HandoffState) -> None:
        """Record what became of it. Later words on one that has ended are ignored: the first to know was right.

        Raises RuntimeError for a state that is no end, or not one that it could come to.
        """
        if _TRANSITIONS[state]:
            raise RuntimeError(f"{state} is no end of a handoff ({self!r})")
        if not self.ended:
            self._move(state)
            self._on_end(self)

    def is_fresh(self, now: float, *, fraction: float) -> bool:
        """Whether its age is still under `fraction` of its lease (I5)."""
        return now - self.issued_at < self.lease * fraction

    def _move(self, target: HandoffState) -> None:
        if target not in _TRANSITIONS[self.state]:
            raise RuntimeError(f"a handoff cannot go from {self.state} to {target} ({self!r})")
        self.state = target


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveHandoff:
    """A handoff that has not ended, for an operator. Seconds; `left` is what remains of its lease."""

    attempt_id: str
    prefill_worker: str
    connector: str
    state: str
    age: float
    left: float


class HandoffBook:
    """Every handoff that has not ended. `on_end` is told of each that does."""

    def __init__(self, *, settings: HandoffSettings, on_end: Callable[[HandoffState], None]) -> None:
        self.settings = settings
        self._on_end = on_end
        self._live: dict[Handoff, None] = {}

    def __repr__(self) -> str:
        return f"<HandoffBook {list(self._live)}>"

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Handoff]:
        return iter(tuple(self._live))

    def issue(
        self, params: KvParams, *, attempt_id: str, connector: Connector, prefill_worker: str, now: float
    ) -> Handoff:
        """A prefill leg has handed these over."""
        handoff = Handoff(
            params,
            attempt_id=attempt_id,
            connector=connector,
            prefill_worker=prefill_worker,
            issued_at=now,
            lease=self.settings.lease(connector),
            on_end=self._ended,
        )
        self._live[handoff] = None
        return handoff

    def _ended(self, handoff: Handoff) -> None:
        del self._live[handoff]
        self._on_end(handoff.state)

    def live(self, *, now: float) -> list[LiveHandoff]:
        """What there is, oldest first."""
        return [
            LiveHandoff(
                attempt_id=handoff.attempt_id,
                prefill_worker=handoff.prefill_worker,
                connector=handoff.connector.value,
                state=handoff.state.value,
                age=now - handoff.issued_at,
                left=handoff.issued_at + handoff.lease - now,
            )
            for handoff in self._live
        ]
