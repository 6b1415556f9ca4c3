"""What must outlive its request: bounded jobs, each with a deadline, in one nursery that the router owns.

Three kinds (invariants I3 and I4): an abandoned prefill leg is aborted by RPC and read to its end; an orphaned
handoff is released by a decode leg that its worker refuses; an abandoned decode leg that carries a handoff is reset
only after its first frame. A request hands a job over synchronously and never waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio
from grpclib.exceptions import GRPCError

from ..errors import RouterError
from ..fleet.worker import Lease, Worker
from ..observe.hooks import Observer
from ..rpc.call import ClientCall
from ..rpc.metadata import Origin, RpcError
from .handoff import Handoff, HandoffState, harvest, is_handoff
from .legs import RequestView, release_leg

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JanitorSettings:
    """Bounds, in seconds and jobs. The waits are those of the field's gateways; the release's were measured on real
    pairs.
    """

    prefill_drain: float = 10.0
    decode_first_frame: float = 30.0
    release_timeout: float = 2.0
    # A decode worker that never met the prefill worker drops the first notice; the second, this much later, gets
    # through.
    release_repeat_after: float = 0.5
    max_jobs: int = 4096
    exit_grace: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLeftover:
    """A prefill leg that is left before its handoff was taken. `frames` were received and belong to it."""

    call: ClientCall
    attempt_id: str
    lease: Lease
    decode_worker: Worker
    view: RequestView
    frames: list[bytes]
    make_handoff: Callable[[str], Handoff]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLeftover:
    """A decode leg with a handoff on it that is left before its first frame."""

    call: ClientCall
    attempt_id: str
    lease: Lease
    handoff: Handoff


class Janitor:
    """Owns leftovers. `jobs` counts them; when `max_jobs` are running a leftover is dropped at once instead."""

    def __init__(
        self, nursery: trio.Nursery, *, settings: JanitorSettings, observer: Observer, new_id: Callable[[], str]
    ) -> None:
        self.jobs = 0
        self._nursery = nursery
        self._settings = settings
        self._observer = observer
        self._new_id = new_id
        self._idle = trio.lowlevel.ParkingLot()

    def __repr__(self) -> str:
        return f"<Janitor {self.jobs} jobs>"

    # Handing over: synchronous

    def finish_prefill(self, leftover: PrefillLeftover) -> None:
        """Abort the leg by RPC, read it to its end, release a handoff that still comes."""
        if not self._start(partial(self._finish_prefill, leftover)):
            leftover.call.cancel()
            leftover.lease.release()

    def release(self, handoff: Handoff, *, decode_worker: Worker, view: RequestView) -> None:
        """Tell the prefill worker, through the decode worker, that nobody will fetch this handoff."""
        if not self._start(partial(self._release, handoff, decode_worker, view)):
            self.end_handoff(handoff, HandoffState.LAPSED)

    def finish_decode(self, leftover: DecodeLeftover) -> None:
        """Reset the leg after its first frame, its end, or the bound, whichever is first."""
        if not self._start(partial(self._finish_decode, leftover)):
            leftover.call.cancel()
            leftover.lease.release()
            self.end_handoff(leftover.handoff, HandoffState.LAPSED)

    def end_handoff(self, handoff: Handoff, state: HandoffState) -> None:
        """Record what became of a handoff, once; later words on an ended one are ignored."""
        if not handoff.ended:
            handoff.move(state)
            self._observer.handoff_ended(outcome=state.value)

    async def wait_idle(self) -> None:
        """Return when no job is running."""
        while self.jobs:
            await self._idle.park()

    # Jobs

    def _start(self, job: Callable[[], Awaitable[None]]) -> bool:
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

    async def _finish_prefill(self, leftover: PrefillLeftover) -> None:
        call = leftover.call
        try:
            with trio.move_on_after(self._settings.prefill_drain):
                async with trio.open_nursery() as nursery:
                    if not call.ended:
                        nursery.start_soon(_abort, leftover.lease.worker, leftover.attempt_id)
                    await _read_to_end(call, leftover.frames)
                    nursery.cancel_scope.cancel()
        finally:
            call.cancel()
            leftover.lease.release()
        try:
            found = harvest([*leftover.frames, *call.take_nowait()])
        except RouterError:
            return  # aborted in time: no complete frame, or one that hands nothing over
        if found.kv_params is not None and is_handoff(found.kv_params):
            handoff = leftover.make_handoff(found.kv_params)
            await self._release(handoff, leftover.decode_worker, leftover.view)

    async def _release(self, handoff: Handoff, decode_worker: Worker, view: RequestView) -> None:
        notices = 1 if handoff.prefill_worker in decode_worker.met else 2
        released = False
        for notice in range(notices):
            if notice:
                await trio.sleep(self._settings.release_repeat_after)
            released |= await self._send_release(handoff, decode_worker, view)
        self.end_handoff(handoff, HandoffState.RELEASED if released else HandoffState.LAPSED)

    async def _send_release(self, handoff: Handoff, decode_worker: Worker, view: RequestView) -> bool:
        message = release_leg(view, attempt_id=f"release-{self._new_id()}", kv_params=handoff.kv_params)
        with trio.move_on_after(self._settings.release_timeout):
            try:
                call = await decode_worker.client.generate(message)
            except RouterError:
                return False
            try:
                await _read_to_end(call, [])
            finally:
                call.cancel()
            # A refusal is the success: the worker has looked at the handoff and sent its owner word. A worker that
            # admitted the leg has moved the blocks instead, which frees them as well.
            return call.error is None or call.error.origin is Origin.PEER
        return False

    async def _finish_decode(self, leftover: DecodeLeftover) -> None:
        call = leftover.call
        seen = False
        try:
            with trio.move_on_after(self._settings.decode_first_frame):
                try:
                    seen = await call.peek() is not None
                except RpcError as exc:
                    # Refused before admission: the worker has told the prefill worker, as in a release.
                    refused = exc.origin is Origin.PEER
                    self.end_handoff(leftover.handoff, HandoffState.RELEASED if refused else HandoffState.LAPSED)
        finally:
            call.cancel()
            leftover.lease.release()
            self.end_handoff(leftover.handoff, HandoffState.CONSUMED if seen else HandoffState.LAPSED)


async def _abort(worker: Worker, attempt_id: str) -> None:
    try:
        await worker.client.abort([attempt_id])
    except (GRPCError, RouterError) as exc:
        # The read beside this decides; a worker that cannot be told is left to its own ending.
        _log.debug("abort of %s on %s failed: %s", attempt_id, worker.name, exc)


async def _read_to_end(call: ClientCall, frames: list[bytes]) -> None:
    try:
        while (message := await call.receive()) is not None:
            frames.append(message)
    except RpcError:
        return
