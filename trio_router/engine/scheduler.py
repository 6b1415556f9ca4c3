"""The engine in time: steps that take as long as they say, pulls, leases and heartbeats.

It owns the tasks; the core owns the state. Nothing here knows gRPC, and every method but `run` returns at once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable
from typing import Final

import trio

from ..errors import WorkerUnavailable
from ..rpc.transport import Dialer, Listener
from .core import Core, Step
from .exports import Exports
from .handoff import Handoff, RemoteSource
from .peers import Peers, PullFailed
from .sequence import Phase, Sequence
from .settings import Connector, Faults
from .sidechannel import serve_side_channel

HEARTBEATS_PER_LEASE: Final = 6

_log: Final = logging.getLogger(__name__)


class EngineDead(WorkerUnavailable):
    """The engine has died; the worker answers, but will never generate again."""

    code = "engine_dead"


class Engine:
    """Drives one core. `submit` and the other methods may be called once `run` has started."""

    def __init__(self, core: Core, *, dialer: Dialer, draw: Callable[[], float]) -> None:
        self.core = core
        self.after_step: list[Callable[[], None]] = []
        """Called when the tokens of a step have been put: whoever batches output sends it then."""
        self._dialer = dialer
        self._draw = draw
        self._peers: Peers | None = None
        self._exports = Exports(core, changed=self._wake_up)
        self._reading: set[Sequence] = set()
        self._wake = trio.Event()
        self._pins_changed = trio.Event()
        self._handoff_queued = trio.Event()
        self._unheld = trio.Event()

    def __repr__(self) -> str:
        return f"<Engine {self.core!r}>"

    # ---- from outside

    @property
    def faults(self) -> Faults:
        return self.core.faults

    def set_faults(self, faults: Faults) -> None:
        """Replace what is wrong with this worker, from now on."""
        self.core.faults = faults
        self._look_again()

    def _wake_up(self) -> None:
        self._wake.set()

    def kill(self) -> None:
        """The engine dies now, with everything in it."""
        self.core.die()
        self._wake.set()

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Queue the choices of one request. Raises EngineDead."""
        if self.core.dead:
            raise EngineDead("the engine is dead")
        for sequence in sequences:
            self.core.submit(sequence)
            if sequence.pull is not None:
                self._handoff_queued.set()
        self._wake.set()

    def abort(self, external_ids: Collection[str]) -> int:
        """End every request that goes by one of these ids; returns how many sequences that were."""
        core = self.core
        found = [s for s in (*core.waiting, *core.pulling, *core.running) if s.external_id in external_ids]
        core.counters.aborts += len({id(s.outlet) for s in found if s.phase is not Phase.FINISHED})
        return sum(self._drop(sequence) for sequence in found)

    def leave(self, sequences: Iterable[Sequence]) -> None:
        """The caller has gone: end what has not ended, and release the handoffs that nobody will pull."""
        left = [sequence for sequence in sequences if sequence.phase is not Phase.FINISHED]
        if left:
            self.core.counters.aborts += 1
            for sequence in left:
                self._drop(sequence)

    def _drop(self, sequence: Sequence) -> bool:
        # A pull under way runs to its end, and that frees the blocks over there; one that has not begun never will.
        unread = sequence.phase is Phase.WAITING or (sequence.phase is Phase.PULLING and sequence not in self._reading)
        handoff = sequence.pull
        if not self.core.abort(sequence):
            return False
        if unread and handoff is not None and handoff.source is not None:
            self.release(handoff.source)
        self._look_again()
        return True

    def _look_again(self) -> None:
        """Something that steps or held pulls may wait for has changed."""
        self._wake.set()
        self._unheld.set()
        self._unheld = trio.Event()

    def release(self, source: RemoteSource) -> None:
        """Tell the prefill worker that a handoff offered to this one will not be used. A dead engine tells nobody."""
        if self._peers is not None and not self.core.dead:
            self._peers.release(source)

    # ---- tasks

    async def run(self, transfer_listener: Listener) -> None:
        """Run until the engine dies. Other workers' pulls end with it; its pins stay where they are."""
        async with trio.open_nursery() as nursery:
            self._peers = Peers(nursery, settings=self.core.settings, dialer=self._dialer, counters=self.core.counters)
            if self.core.settings.moves_state:
                nursery.start_soon(self._serve_transfers, transfer_listener)
                nursery.start_soon(self._expire_leases)
            if self.core.settings.kv_connector is Connector.NIXL:
                nursery.start_soon(self._send_heartbeats, self._peers)
            await self._step(nursery, peers=self._peers)
            transfer_listener.close()
            nursery.cancel_scope.cancel()

    async def _step(self, nursery: trio.Nursery, *, peers: Peers) -> None:
        core = self.core
        due = -math.inf
        while not core.dead:
            now = trio.current_time()
            step = None
            if not core.faults.hang:
                for sequence in core.admit(now=now):
                    nursery.start_soon(self._pull, sequence, peers, name=f"pull {sequence.internal_id}")
                step = core.plan(now=now)
            if step is not None:
                seconds = core.seconds(step)
                # Pace against the schedule, not against the moment of waking, or every late wake-up would slow the
                # rate; but never owe more than one step, or a stall would be followed by a burst.
                due = (due if due >= now - seconds else now) + seconds
                if due > now:
                    await trio.sleep_until(due)
                else:
                    await trio.lowlevel.checkpoint()
                self._finish_step(step, peers=peers)
            elif not core.dead:
                await self._idle()
                due = -math.inf

    def _finish_step(self, step: Step, *, peers: Peers) -> None:
        counters = self.core.counters
        pinned = counters.pinned
        self.core.perform(step, now=trio.current_time())
        if counters.pinned != pinned:
            self._pins_changed.set()
            self._exports.push()
        peers.send_deferred()
        for callback in self.after_step:
            callback()

    async def _idle(self) -> None:
        """Wait for something to change, or for a delayed sequence to become ready."""
        self._wake = trio.Event()
        ready = None if self.core.faults.hang else self.core.next_ready
        with trio.move_on_at(math.inf if ready is None else ready):
            await self._wake.wait()

    async def _pull(self, sequence: Sequence, peers: Peers) -> None:
        core = self.core
        handoff = sequence.pull
        if handoff is None or (isinstance(handoff, Handoff) and handoff.request_id is None):
            # Never answered; the sequence stays where it is until somebody aborts it.
            return
        while core.faults.hold_pull and sequence.phase is Phase.PULLING:
            await self._unheld.wait()
        held = sequence.computed // core.cache.block_size
        missing = len(sequence.blocks) - held
        self._reading.add(sequence)
        try:
            if sequence.phase is not Phase.PULLING:
                raise PullFailed("the request was ended before its pull began")
            if core.faults.load_error_rate and self._draw() < core.faults.load_error_rate:
                raise PullFailed("injected")
            data = await peers.load(handoff, count=missing)
            core.loaded(sequence, data=data, now=trio.current_time())
        except PullFailed:
            core.load_failed(sequence, now=trio.current_time())
        finally:
            self._reading.discard(sequence)
        self._wake.set()

    async def _expire_leases(self) -> None:
        while True:
            self._pins_changed = trio.Event()
            expiry = self.core.ledger.next_expiry
            with trio.move_on_at(math.inf if expiry is None else expiry):
                await self._pins_changed.wait()
            if self.core.expire_pins(now=trio.current_time()):
                self._wake.set()

    async def _send_heartbeats(self, peers: Peers) -> None:
        interval = self.core.settings.lease / HEARTBEATS_PER_LEASE
        while True:
            await self._handoff_queued.wait()
            self._handoff_queued = trio.Event()
            while True:
                await trio.sleep(interval)
                sources = [s.directive.offered for s in self.core.waiting if s.pull is not None]
                if not sources:
                    break
                peers.renew(source for source in sources if source is not None)

    async def _serve_transfers(self, listener: Listener) -> None:
        await serve_side_channel(listener, exporter=self._exports)
