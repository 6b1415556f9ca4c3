"""What tests look at of a router: everything it told its observer, and what it still holds."""

from __future__ import annotations

import itertools
from contextlib import AbstractAsyncContextManager

from ..dispatch.router import Router, RouterSettings, open_router
from ..observe.hooks import Observer, RequestRecord
from ..rpc.memory import MemoryNetwork


class Recorder(Observer):
    """Remembers what the router told it."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.handoffs: list[str] = []
        self.failures: list[str] = []
        self.blamed: list[str] = []
        self.missing: list[str] = []
        self.skipped: list[str] = []
        self.breakers: list[tuple[str, str]] = []
        self.media: list[tuple[str, str | None]] = []
        self.pairs: list[tuple[str, float]] = []
        self.readiness: list[tuple[str, bool]] = []
        self.connections: list[tuple[str, str, str | None]] = []

    def request_ended(self, record: RequestRecord) -> None:
        self.records.append(record)

    def handoff_ended(self, *, outcome: str) -> None:
        self.handoffs.append(outcome)

    def pair_dispatched(self, *, connector: str, prefill_seconds: float, handoff_seconds: float) -> None:
        self.pairs.append((connector, prefill_seconds))

    def handoff_missing(self, *, worker: str) -> None:
        self.missing.append(worker)

    def prefill_skipped(self, *, reason: str) -> None:
        self.skipped.append(reason)

    def media_judged(self, *, request_id: str, outcome: str, detail: str | None) -> None:
        self.media.append((outcome, detail))

    def breaker_changed(self, *, worker: str, state: str) -> None:
        self.breakers.append((worker, state))

    def attempt_failed(self, *, worker: str, role: str, code: str, will_retry: bool) -> None:
        self.failures.append(code)
        self.blamed.append(worker)

    def worker_ready(self, *, worker: str, role: str, ready: bool) -> None:
        self.readiness.append((worker, ready))

    def channel_changed(self, *, worker: str, state: str, reason: str | None) -> None:
        self.connections.append((worker, state, reason))


def open_counted_router(
    settings: RouterSettings, *, network: MemoryNetwork, recorder: Recorder
) -> AbstractAsyncContextManager[Router]:
    """A router on a memory network without randomness: ids count up and every jitter is none."""
    ids = itertools.count(1)
    return open_router(
        settings,
        dialer=network.dial,
        observer=recorder,
        new_id=lambda: f"id{next(ids)}",
        chance=lambda: 0.5,
    )


def router_leaks(router: Router) -> dict[str, int]:
    """How much the router holds of what must return to zero after quiet (invariant I8), by name."""
    held = {"requests in flight": router.in_flight, "janitor jobs": router.janitor.jobs}
    for worker in router.registry.workers:
        held |= {f"leases on {worker.name}": worker.in_flight, f"tries on {worker.name}": worker.trying}
        held |= {f"prompt tokens on {worker.name}": worker.tokens_in_flight}
    return held


def said(held: dict[str, int]) -> list[str]:
    """What is not zero, in words."""
    return [f"{count} {what}" for what, count in held.items() if count]
