"""The workers there are, and who takes a request. Static for now: what the configuration names.

Selection is one synchronous step: candidates, policy, leases. Nothing can slip between a choice and its lease.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

import trio
from grpclib.exceptions import GRPCError

from ..errors import BadRequest, ModelNotFound, RouterError, WorkerUnavailable
from ..observe.hooks import Observer
from ..policy.base import Candidate, Policy
from ..policy.breaker import BreakerState
from .client import WorkerFacts
from .needs import MediaNeeds
from .worker import Lease, Worker, WorkerRole

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """How workers are watched. Seconds; a worker is routable from its first good probe until `failures` bad ones in
    a row.
    """

    interval: float = 10.0
    startup_interval: float = 0.25
    failures: int = 3


class Registry:
    """All workers, by role. With `prefill_optional` decode workers alone are enough to serve."""

    def __init__(
        self,
        workers: Sequence[Worker],
        *,
        policies: dict[WorkerRole, Policy],
        observer: Observer,
        prefill_optional: bool = False,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        self.workers = tuple(workers)
        self.disaggregated = any(worker.spec.role is WorkerRole.PREFILL for worker in self.workers)
        """Whether requests go through a prefill/decode pair."""
        self._prefill_optional = prefill_optional
        self._clock = clock
        self._policies = policies
        self._observer = observer
        self._changed = trio.Event()

    def __repr__(self) -> str:
        return f"<Registry {list(self.workers)}>"

    @property
    def ready(self) -> bool:
        """Whether some request could be served: every leg of it has a ready worker of its model."""
        return bool(self.models())

    async def wait_ready(self, *, every_worker: bool = False) -> None:
        """Return when `ready`, or only once every worker is routable."""
        while not (all(worker.ready for worker in self.workers) if every_worker else self.ready):
            await self._changed.wait()

    def models(self) -> list[str]:
        """Names of the models that have a ready worker for every leg, in order of registration."""
        ready = [worker for worker in self.workers if worker.ready]
        legs = [{_model_of(worker) for worker in ready if worker.spec.role is role} for role in self._roles()]
        served = set.intersection(*legs)
        return list(dict.fromkeys(w.facts.model for w in ready if w.facts is not None and w.facts.model in served))

    def take(
        self,
        role: WorkerRole,
        *,
        model: str | None = None,
        failed: Collection[str] = (),
        busy: Collection[str] = (),
        media: MediaNeeds | None = None,
        tokens: int = 0,
    ) -> Lease:
        """Choose a worker for a leg and reserve a slot on it. Without `model` there must be only one.

        `failed` names workers this request has already failed on: they are chosen only when nobody else is left.
        `busy` names those that had no room for it: they are not chosen. Raises WorkerUnavailable when nobody is ready
        who could, ModelNotFound when none of those who are serves `model`, BadRequest when several models are served
        and none is named. `media` is asked last: what it refuses with is told only when nothing else is the matter.
        `tokens` is about how long the prompt is.
        """
        if model is None:
            self._check_only_model()
        members = self._of(role)
        serving = [worker for worker in members if worker.facts is not None and model in (None, worker.facts.model)]
        ready = [worker for worker in serving if worker.ready]
        if not ready:
            raise self._nobody(role, members, model=model, is_known=bool(serving))
        if media is not None:
            ready = self._able(role, ready, media=media)
        now = self._clock()
        open_to_it = [worker for worker in self._trusted(role, ready, now=now) if worker.name not in busy]
        if not open_to_it:
            raise WorkerUnavailable(
                f"every {role} worker that is ready has been asked and is busy", code="worker_overload_protection_shed"
            )
        # Where every one of them is to be spared, none is.
        open_to_it = [
            worker for worker in open_to_it if not worker.breaker.is_to_be_spared(now, trying=worker.trying)
        ] or open_to_it
        candidates = [
            Candidate(
                worker=worker.name,
                load=worker.in_flight,
                tokens=worker.tokens_in_flight,
                failed_before=worker.name in failed,
            )
            for worker in open_to_it
        ]
        chosen = open_to_it[self._policies[role].pick(candidates, retry=bool(busy))]
        return Lease(chosen, tries=chosen.breaker.state(now) is BreakerState.HALF_OPEN, tokens=tokens)

    def _able(self, role: WorkerRole, ready: list[Worker], *, media: MediaNeeds) -> list[Worker]:
        """Those that take the media of a request."""
        able = [worker for worker in ready if worker.facts is not None and media.met_by(worker.facts)]
        if not able:
            elsewhere = self._of(WorkerRole.PREFILL) if role is WorkerRole.DECODE else []
            raise media.refusal(
                role.value,
                [worker.facts for worker in ready if worker.facts is not None],
                elsewhere=[worker.facts for worker in elsewhere if worker.facts is not None],
            )
        return able

    def _trusted(self, role: WorkerRole, ready: list[Worker], *, now: float) -> list[Worker]:
        """Those that have not failed so often lately that they get no requests for a while."""
        found = [worker for worker in ready if worker.breaker.state(now) is not BreakerState.OPEN]
        if not found:
            error = WorkerUnavailable(f"every {role} worker that is ready has failed too often lately")
            error.retry_after = min(worker.breaker.retry_after(now) for worker in ready)
            raise error
        return found

    def _check_only_model(self) -> None:
        known = list(dict.fromkeys(worker.facts.model for worker in self.workers if worker.facts is not None))
        if len(known) > 1:
            # Whether or not all of them are ready now: a request's ids mean something to one of them only.
            raise BadRequest(f"several models are served here: {', '.join(known)}; the request must name one")

    def _nobody(
        self, role: WorkerRole, members: list[Worker], *, model: str | None, is_known: bool
    ) -> ModelNotFound | WorkerUnavailable:
        if any(worker.ready for worker in members):
            if not is_known:
                return ModelNotFound(f"no {role} worker serves model {model!r}; served: {', '.join(self.models())}")
            return WorkerUnavailable(f"no {role} worker that serves model {model!r} is ready")
        registered = ", ".join(worker.name for worker in members) or "none registered"
        return WorkerUnavailable(f"no {role} worker is ready (registered: {registered})")

    def has_room_beside(self, worker: Worker, *, busy: Collection[str], media: MediaNeeds | None = None) -> bool:
        """Whether somebody else could take what this worker would, who is not among the busy ones."""
        now = self._clock()
        return any(
            other.name not in busy
            and other.breaker.state(now) is not BreakerState.OPEN
            and (media is None or (other.facts is not None and media.met_by(other.facts)))
            for other in self.stand_ins(worker)
        )

    def note_success(self, worker: Worker) -> None:
        """A leg on this worker went well."""
        self._note(worker, worker.breaker.succeeded)

    def note_failure(self, worker: Worker) -> None:
        """A leg on this worker failed by its fault."""
        self._note(worker, worker.breaker.failed)

    def _note(self, worker: Worker, tell: Callable[[float], None]) -> None:
        now = self._clock()
        before = worker.breaker.state(now)
        tell(now)
        state = worker.breaker.state(now)
        if state is not before:
            self._observer.breaker_changed(worker=worker.name, state=state.value)

    def stand_ins(self, worker: Worker) -> list[Worker]:
        """Other ready workers of the same role and model."""
        return [
            other
            for other in self._of(worker.spec.role)
            if other is not worker and other.ready and _model_of(other) == _model_of(worker)
        ]

    async def watch(self, worker: Worker, *, settings: ProbeSettings) -> None:
        """Keep a worker's facts and readiness up to date until cancelled. Every probe has the client's own deadline.

        One that is doubted, or has failed a probe, is asked again soon: until it is known to be gone it gets requests.
        """
        failures = 0
        while True:
            if await self._probe(worker):
                failures = 0
                self._set_ready(worker, True)
            else:
                failures += 1
                if failures >= settings.failures:
                    self._set_ready(worker, False)
            worker.doubted = trio.Event()
            with trio.move_on_after(settings.interval if worker.ready and not failures else settings.startup_interval):
                await worker.doubted.wait()

    async def _probe(self, worker: Worker) -> bool:
        try:
            self._learn(worker, await worker.client.facts())
            trouble = None if await worker.client.healthy() else "it says that it is not healthy"
        except (GRPCError, RouterError) as exc:
            trouble = getattr(exc, "message", None) or str(exc)
        except Exception as exc:  # noqa: BLE001  # a bug here, or in an embedder's dialer, must not take all workers away
            _log.exception("probing %s failed inside", worker.name)
            trouble = f"probing it failed inside: {type(exc).__name__}"
        if trouble is not None:
            # Loud once until it is well again: a worker that is not ready is probed four times a second.
            _log.log(logging.DEBUG if worker.trouble else logging.WARNING, "worker %s: %s", worker.name, trouble)
        worker.trouble = trouble
        return trouble is None

    def _learn(self, worker: Worker, facts: WorkerFacts) -> None:
        known, worker.facts = worker.facts, facts
        if known is not None and known.kv_engine_id != facts.kv_engine_id:
            self._forget(worker)
            self._note(worker, lambda _: worker.breaker.reset())

    def _set_ready(self, worker: Worker, ready: bool) -> None:
        if worker.ready is not ready:
            worker.ready = ready
            # Who answers when it is back may be another process.
            if ready:
                self._note(worker, lambda _: worker.breaker.reset())
            else:
                self._forget(worker)
            self._changed.set()
            self._changed = trio.Event()
            self._observer.worker_ready(worker=worker.name, role=worker.spec.role.value, ready=ready)

    def _forget(self, worker: Worker) -> None:
        """It may have been restarted: it knows nobody, and nobody knows it."""
        worker.forget()
        for other in self.workers:
            other.forget(worker.name)

    def _of(self, role: WorkerRole) -> list[Worker]:
        return [worker for worker in self.workers if worker.spec.role is role]

    def _roles(self) -> tuple[WorkerRole, ...]:
        if not self.disaggregated:
            return (WorkerRole.PLAIN,)
        return (WorkerRole.DECODE,) if self._prefill_optional else (WorkerRole.PREFILL, WorkerRole.DECODE)


def _model_of(worker: Worker) -> str | None:
    return worker.facts.model if worker.facts is not None else None
