"""Handoffs that a prefill worker has promised and still holds blocks for.

Every entry ends exactly one way: pulled, released, or expired. Time is passed in; nothing here waits or sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, unique
from types import MappingProxyType

from .blocks import KvCache


@unique
class PinEnd(Enum):
    """How a pinned handoff ended."""

    PULLED = "pulled"
    """A decode worker has the state: it has read the blocks and said so, or they were pushed to it."""
    RELEASED = "released"
    """Somebody said that nobody will read them."""
    EXPIRED = "expired"
    """Nobody said anything for the length of a lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One handoff that is still held. Times are on the worker's clock, in seconds."""

    request_id: str
    """What it is asked for by: the engine's own name of the request, or the transfer id it came with."""
    engine_id: str
    """The engine, or the rank of it, that computed the blocks."""
    blocks: tuple[int, ...]
    num_tokens: int
    pinned_at: float
    expires_at: float


class Ledger:
    """The pins of one worker. It owns one reference to each pinned block and gives it back when the pin ends."""

    __slots__ = ("_cache", "_lease", "_pins", "ended")

    def __init__(self, cache: KvCache, *, lease_seconds: float) -> None:
        self._cache = cache
        self._lease = lease_seconds
        self._pins: dict[str, Pin] = {}
        self.ended: Counter[PinEnd] = Counter()

    def __repr__(self) -> str:
        ends = " ".join(f"{end.value}={count}" for end, count in self.ended.items())
        return f"<Ledger {len(self._pins)} pinned {ends}>"

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def pins(self) -> Mapping[str, Pin]:
        """What is held now, by request id, oldest first."""
        return MappingProxyType(self._pins)

    @property
    def pinned_blocks(self) -> int:
        return sum(len(pin.blocks) for pin in self._pins.values())

    @property
    def next_expiry(self) -> float | None:
        """When the first pin expires unless it is renewed; None when nothing is held."""
        return min((pin.expires_at for pin in self._pins.values()), default=None)

    def pin(self, request_id: str, *, engine_id: str, blocks: Iterable[int], num_tokens: int, now: float) -> Pin:
        """Take over the caller's reference to `blocks` for the length of a lease.

        Raises ValueError when the id is pinned already: the engine's own never repeat, and whoever takes others' ids
        ends the older pin first.
        """
        if request_id in self._pins:
            raise ValueError(f"request {request_id} already holds a handoff")
        pin = Pin(
            request_id=request_id,
            engine_id=engine_id,
            blocks=tuple(blocks),
            num_tokens=num_tokens,
            pinned_at=now,
            expires_at=now + self._lease,
        )
        self._pins[request_id] = pin
        return pin

    def end(self, request_id: str, *, how: PinEnd) -> Pin | None:
        """End a pin and free its blocks. None when there is none of that id: it has ended before, or never was."""
        pin = self._pins.pop(request_id, None)
        if pin is not None:
            self.ended[how] += 1
            self._cache.release(pin.blocks)
        return pin

    def renew(self, request_id: str, *, now: float) -> bool:
        """Start a pin's lease again; says whether there is such a pin."""
        pin = self._pins.get(request_id)
        if pin is None:
            return False
        self._pins[request_id] = replace(pin, expires_at=now + self._lease)
        return True

    def expire(self, now: float) -> list[Pin]:
        """End every pin whose lease has run out."""
        overdue = [pin for pin in self._pins.values() if pin.expires_at <= now]
        for pin in overdue:
            self.end(pin.request_id, how=PinEnd.EXPIRED)
        return overdue
