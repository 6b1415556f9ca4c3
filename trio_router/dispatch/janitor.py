"""What must outlive its request: bounded jobs, each with a deadline, in one nursery that the router owns.

Three kinds (invariants I3 and I4): an abandoned prefill leg is read to its end, and aborted by RPC unless that comes
soon; an orphaned handoff is released by a decode leg that its worker refuses; an abandoned decode leg that carries a
handoff is reset only after its first frame. A request hands a job over synchronously and never waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final

import trio
from grpclib.exceptions import GRPCError

from ..errors import RouterError
from ..fleet.worker import Worker
from ..observe.hooks import Observer
from ..rpc.metadata import RpcError
from .decode import DecodeLeg
from .failures import is_refusal
from .handoff import Handoff, HandoffState
from .legs import RequestView, release_leg
from .prefill import PrefillLeg

_log: Final = logging.getLogger(__name__)

_MAX_MESSENGERS: Final = 3
"""Decode workers that a release is tried through, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JanitorSettings:
    """Bounds, in seconds and jobs. The waits are those of the field's gateways; the release's were measured on real
    pairs.
    """

    prefill_drain: float = 10.0
    # An Abort that meets the last few milliseconds of a prefill loses the handoff and leaves its blocks pinned for the
    # whole lease, and nobody can release them: 3 of 40 that were aborted at once, of prompts that take 15 ms, on vLLM
    # 0.32. So one that ends soon may, and is released; what is aborted is long enough for that window to be small.
    abort_after: float = 0.1
    decode_first_frame: float = 30.0
    release_timeout: float = 2.0
    # A decode worker that never met the prefill worker drops the first notice; the second, this much later, gets
    # through.
    release_repeat_after: float = 0.5
    max_jobs: int = 4096
    exit_grace: float = 5.0


class Janitor:
    """Owns leftovers. `jobs` counts them; when `max_jobs` are running a leftover is dropped at once instead.

    `stand_ins` gives, for a decode worker, others that can reach the same prefill workers.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        *,
        settings: JanitorSettings,
        observer: Observer,
        new_id: Callable[[], str],
        stand_ins: Callable[[Worker], Iterable[Worker]],
    ) -> None:
        self.jobs = 0
        self._nursery = nursery
        self._settings = settings
        self._observer = observer
        self._new_id = new_id
        self._stand_ins = stand_ins
        self._idle = trio.lowlevel.ParkingLot()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Janitor {self.jobs} jobs{', closed' if self._closed else ''}>"

    # Handing over: synchronous

    def finish_prefill(self, leg: PrefillLeg, *, through: Worker, view: RequestView) -> None:
        """Read the leg to its end, abort it by RPC unless that comes soon, and release a handoff that still comes."""
        if not self._start(partial(self._finish_prefill, leg, through, view)):
            _drop_prefill(leg)

    def release(self, handoff: Handoff, *, through: Worker, view: RequestView) -> None:
        """Tell the prefill worker, through this decode worker if it can be reached, that nobody will fetch it."""
        if not self._start(partial(self._release, handoff, through, view)):
            handoff.end(HandoffState.LAPSED)

    def finish_decode(self, leg: DecodeLeg, *, view: RequestView) -> None:
        """Reset the leg after its first frame, its end, or the bound, whichever is first."""
        if not self._start(partial(self._finish_decode, leg, view)):
            _drop_decode(leg)

    async def wait_idle(self) -> None:
        """Return when no job is running."""
        while self.jobs:
            await self._idle.park()

    def close(self) -> None:
        """Take nothing more: from now on leftovers are dropped at once."""
        self._closed = True

    # Jobs

    def _start(self, job: Callable[[], Awaitable[None]]) -> bool:
        if self._closed:
            return False
        if self.jobs >= self._settings.max_jobs:
            _log.warning("the janitor holds %d jobs; a leftover is dropped", self.jobs)
            return False
        self._count(+1)
        self._nursery.start_soon(self._run, job)
        return True

    async def _run(self, job: Callable[[], Awaitable[None]]) -> None:
        try:
            await job()
        except Exception:  # noqa: BLE001  # the edge of a job or handler: logged, and nothing else is harmed
            # One leftover's trouble must not end the nursery that every other one lives in.
            _log.exception("a janitor job failed")
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        self.jobs += change
        self._observer.janitor_jobs(self.jobs)
        if not self.jobs:
            self._idle.unpark_all()

    async def _finish_prefill(self, leg: PrefillLeg, through: Worker, view: RequestView) -> None:
        try:
            with trio.move_on_after(self._settings.prefill_drain):
                async with trio.open_nursery() as nursery:
                    if leg.call is not None and not leg.call.ended:
                        nursery.start_soon(_abort, leg.worker, leg.attempt_id, self._settings.abort_after)
                    await leg.finish()
                    nursery.cancel_scope.cancel()
            leg.leave()
            handoff = _handoff_of(leg)
            if handoff is not None:
                await self._release(handoff, through, view)
        finally:
            _drop_prefill(leg)

    async def _release(self, handoff: Handoff, through: Worker, view: RequestView) -> None:
        try:
            for messenger in islice((through, *self._stand_ins(through)), _MAX_MESSENGERS):
                if await self._release_through(messenger, handoff, view):
                    handoff.end(HandoffState.RELEASED)
                    return
        finally:
            handoff.end(HandoffState.LAPSED)

    async def _release_through(self, messenger: Worker, handoff: Handoff, view: RequestView) -> bool:
        has_met = messenger.has_met(handoff.prefill_worker, engine_id=handoff.params.engine_id)
        for notice in range(1 if has_met else 2):
            if notice:
                await trio.sleep(self._settings.release_repeat_after)
            # What is older than its lease has been freed, and its blocks may be somebody else's by now.
            if not handoff.is_fresh(trio.current_time(), fraction=1.0):
                return False
            if not await self._send_release(messenger, handoff, view):
                return False
        return True

    async def _send_release(self, messenger: Worker, handoff: Handoff, view: RequestView) -> bool:
        message = release_leg(view, attempt_id=f"release-{self._new_id()}", kv_params=handoff.params.text)
        with trio.move_on_after(self._settings.release_timeout):
            try:
                call = await messenger.client.generate(message, control=True)
            except RouterError:
                return False
            try:
                while await call.receive() is not None:
                    pass
            except RpcError as exc:
                # A refusal is the success: the worker has looked at the handoff and sent its owner word.
                return is_refusal(exc)
            finally:
                call.cancel()
            # A worker that admitted the leg has moved the blocks instead, which frees them as well.
            return True
        return False

    async def _finish_decode(self, leg: DecodeLeg, view: RequestView) -> None:
        handoff = leg.handoff
        try:
            with trio.move_on_after(self._settings.decode_first_frame) as bound:
                try:
                    await leg.first_frame()
                except RouterError as exc:
                    _log.debug("%s, which was left, failed: %s", leg.attempt_id, exc)
            leg.leave()
            if handoff is not None and not handoff.ended and not bound.cancelled_caught:
                await self._release(handoff, leg.worker, view)
        finally:
            _drop_decode(leg)


def _handoff_of(leg: PrefillLeg) -> Handoff | None:
    try:
        leg.harvest()
    except RouterError:
        return None  # aborted in time: no complete frame, or one that hands nothing over
    return leg.handoff


def _drop_prefill(leg: PrefillLeg) -> None:
    leg.leave()
    handoff = leg.handoff or _handoff_of(leg)
    if handoff is not None:
        handoff.end(HandoffState.LAPSED)


def _drop_decode(leg: DecodeLeg) -> None:
    leg.leave()
    if leg.handoff is not None:
        leg.handoff.end(HandoffState.LAPSED)


async def _abort(worker: Worker, attempt_id: str, after: float) -> None:
    await trio.sleep(after)
    try:
        await worker.client.abort([attempt_id])
    except (GRPCError, RouterError) as exc:
        # The read beside this decides; a worker that cannot be told is left to its own ending.
        _log.debug("abort of %s on %s failed: %s", attempt_id, worker.name, exc)
