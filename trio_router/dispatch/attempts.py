"""As many attempts as a request needs until its first frame: workers chosen, slots reserved, failures charged."""

from __future__ import annotations

from collections.abc import Callable

import trio

from ..errors import RouterError
from ..fleet.registry import Registry
from ..fleet.worker import Lease, WorkerRole
from ..observe.hooks import Observer
from .attempt import Attempt
from .failures import retryable
from .janitor import Janitor
from .legs import RequestView
from .live import LiveRequest
from .retry import RetrySettings, backoff
from .stream import GenerateStream


class Attempts:
    """Makes attempts for any number of requests. `new_id` and `chance` (uniform in [0, 1)) are its randomness;
    `fresh_fraction` is the share of its lease up to which a handoff may be offered.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        janitor: Janitor,
        observer: Observer,
        retry: RetrySettings,
        fresh_fraction: float,
        new_id: Callable[[], str],
        chance: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._janitor = janitor
        self._observer = observer
        self._retry = retry
        self._fresh_fraction = fresh_fraction
        self._new_id = new_id
        self._chance = chance

    async def first_frame(self, live: LiveRequest, view: RequestView, *, model: str | None) -> GenerateStream:
        """Try until a first frame is here; the attempt that has it, or is under way, is in `live`.

        Raises the last attempt's error; BadRequest, ModelNotFound or WorkerUnavailable when there is nobody to try.
        """
        settings = self._retry
        failed = live.timeline.workers_tried
        for failures in range(1, settings.attempts + 1):
            attempt = live.attempt = self._reserve(live, view, model=model)
            try:
                await attempt.first_frame()
            except RouterError as exc:
                attempt.leave()
                goes_on = retryable(exc) and failures < settings.attempts
                blamed = attempt.blamed
                self._observer.attempt_failed(
                    worker=blamed.name, role=blamed.spec.role.value, code=exc.error_code, will_retry=goes_on
                )
                failed.append(blamed.name)
                if not goes_on:
                    raise
            else:
                return attempt.stream(request_id=live.client_id)
            await trio.sleep(backoff(settings, failures=failures, chance=self._chance()))
        raise AssertionError("unreachable: the last attempt raises")

    def _reserve(self, live: LiveRequest, view: RequestView, *, model: str | None) -> Attempt:
        """Choose workers and reserve their slots; the decode slot is held before prefill begins (I5)."""
        timeline = live.timeline
        failed = timeline.workers_tried
        timeline.forget_attempt()
        prefill: Lease | None = None
        if self._registry.disaggregated:
            decode = self._registry.take(WorkerRole.DECODE, model=model, failed=failed)
            # A handoff has one consumer: several samples would free the blocks under each other, so they recompute.
            if view.n <= 1:
                try:
                    prefill = self._registry.take(WorkerRole.PREFILL, model=model, failed=failed)
                except RouterError:
                    decode.release()
                    raise
        else:
            decode = self._registry.take(WorkerRole.PLAIN, model=model, failed=failed)
        timeline.attempts += 1
        return Attempt(
            view,
            attempt_id=f"{live.client_id}-{self._new_id()}",
            decode=decode,
            prefill=prefill,
            janitor=self._janitor,
            observer=self._observer,
            timeline=timeline,
            fresh_fraction=self._fresh_fraction,
        )
