"""As many attempts as a request needs until its first frame: workers chosen, slots reserved, failures charged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from ..errors import ModelNotFound, RouterError, WorkerBusy, WorkerUnavailable
from ..fleet.needs import MediaNeeds
from ..fleet.registry import Registry
from ..fleet.worker import Lease, WorkerRole
from ..media.items import Modality
from ..media.specs import spec_for
from ..observe.hooks import Observer
from ..policy.retry_budget import RetryBudget
from .attempt import Attempt
from .connectors import Connector
from .failures import Verdict, judge, shed
from .handoff import HandoffBook, OnEmptyPrefill
from .janitor import Janitor
from .legs import RequestView
from .live import LiveRequest
from .prefill import connector_at
from .retry import RetrySettings, backoff
from .stream import GenerateStream

_LONGEST_ID: Final = 256


@dataclass(slots=True, kw_only=True)
class Wanted:
    """What workers are chosen by, over all attempts of a request."""

    view: RequestView
    model: str | None
    failed: list[str]
    """Those it has failed on or that had no room, in order; the request's record shows them."""
    busy: set[str] = field(default_factory=set)
    media: MediaNeeds | None = None
    tokens: int = 0
    """About how long its prompt is, its media of usual sizes."""

    def __post_init__(self) -> None:
        if self.view.media is not None:
            self.media = MediaNeeds(schemes=self.view.media.schemes)


def _loggable(client_id: str) -> str:
    """As much of it as is told to workers, who log it as it comes: on one line, and no megabytes."""
    told = client_id[:_LONGEST_ID]
    return told if told.isprintable() else "".join(each if each.isprintable() else "?" for each in told)


class Attempts:
    """Makes attempts for any number of requests. `new_id` and `chance` (uniform in [0, 1)) are its randomness."""

    def __init__(
        self,
        registry: Registry,
        *,
        janitor: Janitor,
        book: HandoffBook,
        observer: Observer,
        retry: RetrySettings,
        new_id: Callable[[], str],
        chance: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._janitor = janitor
        self._book = book
        self._observer = observer
        self._retry = retry
        self._budget = RetryBudget(share=retry.budget_share, floor=retry.budget_floor)
        self._new_id = new_id
        self._chance = chance

    async def first_frame(self, live: LiveRequest, view: RequestView, *, model: str | None) -> GenerateStream:
        """Try until a first frame is here; the attempt that has it, or is under way, is in `live`.

        A worker that is busy is left for another at once, each one no more than once. After a failure comes a pause,
        and those that were busy before it may have room then.

        Raises the last attempt's error; WorkerBusy when nobody has room; BadRequest, ModelNotFound or WorkerUnavailable
        when there is nobody to try.
        """
        failures = 0
        wanted = Wanted(
            model=model,
            view=view,
            failed=live.timeline.workers_tried,
            tokens=view.prompt_tokens + self._media_tokens(view, model=model),
        )
        self._budget.note_request()
        while True:
            attempt = live.attempt = self._reserve(live, wanted)
            try:
                await attempt.first_frame()
            except RouterError as exc:
                attempt.leave()
                verdict = judge(exc)
                failures += verdict is Verdict.FAILED
                if not self._goes_on(attempt, exc, verdict, failures=failures, wanted=wanted):
                    if isinstance(exc, WorkerBusy):
                        raise shed(exc, retry_after=self._retry.busy_retry_after) from exc
                    raise
                wanted.failed.append(attempt.blamed.name)
            else:
                view.forget_message()
                return attempt.stream(request_id=live.client_id)
            if verdict is Verdict.FAILED:
                await trio.sleep(backoff(self._retry, failures=failures, chance=self._chance()))
                wanted.busy.clear()

    def _media_tokens(self, view: RequestView, *, model: str | None) -> int:
        """How much longer the prompt gets where its media are expanded: it has one anchor for each item."""
        if view.media is None:
            return 0
        serving = (worker.facts for worker in self._registry.workers)
        facts = next((each for each in serving if each is not None and model in (None, each.model)), None)
        spec = None if facts is None else spec_for(facts.family)
        counts = {kind: view.media.counts.get(int(kind.wire), 0) for kind in Modality}
        return 0 if spec is None else spec.extra_tokens(counts)

    def _goes_on(
        self, attempt: Attempt, error: RouterError, verdict: Verdict, *, failures: int, wanted: Wanted
    ) -> bool:
        """Charge a failed attempt, and tell whether there is to be another."""
        blamed = attempt.blamed
        goes_on = False
        if verdict is Verdict.BUSY:
            wanted.busy.add(blamed.name)
            goes_on = self._registry.has_room_beside(blamed, busy=wanted.busy, media=wanted.media)
        elif verdict is Verdict.FAILED:
            self._registry.note_failure(blamed)
            goes_on = failures < self._retry.attempts and self._budget.take(trio.current_time())
        else:
            self._registry.note_success(blamed)
        self._observer.attempt_failed(
            worker=blamed.name, role=blamed.spec.role.value, code=error.error_code, will_retry=goes_on
        )
        return goes_on

    def _reserve(self, live: LiveRequest, wanted: Wanted) -> Attempt:
        """Choose workers and reserve their slots; the decode slot is held before prefill begins (I5)."""
        timeline = live.timeline
        timeline.forget_attempt()
        role = WorkerRole.DECODE if self._registry.disaggregated else WorkerRole.PLAIN
        decode = self._take(role, wanted)
        prefill: Lease | None = None
        if role is WorkerRole.DECODE:
            try:
                prefill = self._reserve_prefill(wanted)
            except RouterError:
                decode.release()
                raise
        timeline.attempts += 1
        return Attempt(
            wanted.view,
            attempt_id=f"{_loggable(live.client_id)}-{self._new_id()}",
            transfer_id=f"xfer-{self._new_id()}",
            decode=decode,
            prefill=prefill,
            registry=self._registry,
            janitor=self._janitor,
            book=self._book,
            observer=self._observer,
            timeline=timeline,
        )

    def _take(self, role: WorkerRole, wanted: Wanted) -> Lease:
        try:
            return self._registry.take(
                role,
                model=wanted.model,
                failed=wanted.failed,
                busy=wanted.busy,
                media=wanted.media,
                tokens=wanted.tokens,
            )
        except WorkerUnavailable as exc:
            if wanted.busy and exc.retry_after is None:
                # Of those it was between, some have no room, and the others have gone meanwhile.
                exc.retry_after = self._retry.busy_retry_after
            raise

    def _reserve_prefill(self, wanted: Wanted) -> Lease | None:
        """The slot of the prefill leg; None for a request that a decode worker is to serve whole."""
        if wanted.view.n > 1 and not self._shares_a_store():
            # A handoff has one consumer: several samples would free the blocks under each other, so they recompute.
            self._observer.prefill_skipped(reason="several_samples")
            return None
        try:
            return self._take(WorkerRole.PREFILL, wanted)
        except (WorkerUnavailable, ModelNotFound):
            if self._book.settings.on_empty_prefill is OnEmptyPrefill.FAIL:
                raise
            self._observer.prefill_skipped(reason="empty_prefill_pool")
            return None

    def _shares_a_store(self) -> bool:
        """Whether all prefill workers that are ready write to a store, from which several samples may read."""
        ready = [worker for worker in self._registry.workers if worker.spec.role is WorkerRole.PREFILL and worker.ready]
        return bool(ready) and all(connector_at(worker) is Connector.STORE for worker in ready)
