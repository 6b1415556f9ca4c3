"""The workers there are, and who takes a request. Static for now: what the configuration names.

Selection is one synchronous step: candidates, policy, leases. Nothing can slip between a choice and its lease.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import trio
from grpclib.exceptions import GRPCError

from ..errors import ModelNotFound, RouterError, WorkerUnavailable
from ..observe.hooks import Observer
from ..policy.base import Candidate, Policy
from .worker import Lease, Worker, WorkerRole


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """How workers are watched. Seconds; a worker is routable from its first good probe until `failures` bad ones in
    a row.
    """

    interval: float = 10.0
    startup_interval: float = 0.25
    failures: int = 3


class Registry:
    """All workers, by role."""

    def __init__(self, workers: Sequence[Worker], *, policies: dict[WorkerRole, Policy], observer: Observer) -> None:
        self.workers = tuple(workers)
        self._policies = policies
        self._observer = observer
        self._changed = trio.Event()

    def __repr__(self) -> str:
        return f"<Registry {list(self.workers)}>"

    @property
    def disaggregated(self) -> bool:
        """Whether requests go through a prefill/decode pair."""
        return any(worker.spec.role is WorkerRole.PREFILL for worker in self.workers)

    @property
    def ready(self) -> bool:
        """Whether every leg a request needs has a routable worker."""
        return all(any(w.ready for w in self._of(role)) for role in self._roles())

    async def wait_ready(self, *, every_worker: bool = False) -> None:
        """Return when `ready`, or only once every worker is routable."""
        while not (all(worker.ready for worker in self.workers) if every_worker else self.ready):
            await self._changed.wait()

    def models(self) -> list[str]:
        """Names of the served models, in order of registration."""
        return list(dict.fromkeys(w.facts.model for w in self.workers if w.facts is not None and w.ready))

    def take(self, role: WorkerRole, *, model: str | None = None, failed: Collection[str] = ()) -> Lease:
        """Choose a worker for a leg and reserve a slot on it.

        `failed` names workers this request has already failed on: they are chosen only when nobody else is left. Raises
        WorkerUnavailable when no worker of the role is ready, ModelNotFound when none of those serves `model`.
        """
        ready = [worker for worker in self._of(role) if worker.ready and worker.facts is not None]
        if not ready:
            known = ", ".join(worker.name for worker in self._of(role)) or "none registered"
            raise WorkerUnavailable(f"no {role} worker is ready (registered: {known})")
        serving = [w for w in ready if model is None or (w.facts is not None and w.facts.model == model)]
        if not serving:
            raise ModelNotFound(f"no {role} worker serves model {model!r}; served: {', '.join(self.models())}")
        candidates = [
            Candidate(worker=worker.name, load=worker.in_flight, failed_before=worker.name in failed)
            for worker in serving
        ]
        return Lease(serving[self._policies[role].pick(candidates)])

    def stand_ins(self, worker: Worker) -> list[Worker]:
        """Other ready workers of the same role and model."""
        return [
            other
            for other in self._of(worker.spec.role)
            if other is not worker and other.ready and _model_of(other) == _model_of(worker)
        ]

    async def watch(self, worker: Worker, *, settings: ProbeSettings) -> None:
        """Keep a worker's facts and readiness up to date until cancelled. Every probe has the client's own deadline."""
        failures = 0
        while True:
            try:
                worker.facts = await worker.client.facts()
                healthy = await worker.client.healthy()
            except (GRPCError, RouterError):
                healthy = False
            failures = 0 if healthy else failures + 1
            if healthy or failures >= settings.failures:
                self._set_ready(worker, healthy)
            await trio.sleep(settings.interval if worker.ready else settings.startup_interval)

    def _set_ready(self, worker: Worker, ready: bool) -> None:
        if worker.ready is not ready:
            worker.ready = ready
            self._changed.set()
            self._changed = trio.Event()
            self._observer.worker_ready(worker=worker.name, role=worker.spec.role.value, ready=ready)

    def _of(self, role: WorkerRole) -> list[Worker]:
        return [worker for worker in self.workers if worker.spec.role is role]

    def _roles(self) -> tuple[WorkerRole, ...]:
        return (WorkerRole.PREFILL, WorkerRole.DECODE) if self.disaggregated else (WorkerRole.PLAIN,)


def _model_of(worker: Worker) -> str | None:
    return worker.facts.model if worker.facts is not None else None
