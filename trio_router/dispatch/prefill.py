"""The prefill leg: its slot, its call, its answer, and the handoff in that.

A leg belongs to an attempt until that is left, then to the janitor; it knows neither, nor what a decode leg is.
"""

from __future__ import annotations

import logging
from typing import Final

import trio

from ..errors import HandoffInvalid, LinkError
from ..fleet.worker import Lease
from ..observe.hooks import Observer
from ..rpc.call import ClientCall
from ..rpc.metadata import RpcError
from .connectors import Connector, connector_of, lease_seconds
from .failures import leg_error
from .handoff import Handoff, HandoffState, Harvest, PrefillAnswer, harvest
from .kvparams import read_params

_log: Final = logging.getLogger(__name__)


class PrefillLeg:
    """One prefill leg, from its lease on. What it was told of its worker stays as it was when the leg began."""

    def __init__(self, lease: Lease, *, attempt_id: str, observer: Observer) -> None:
        self.worker = lease.worker
        self.attempt_id = attempt_id
        self.call: ClientCall | None = None
        self.handoff: Handoff | None = None
        facts = lease.worker.facts
        self.connector = connector_of(facts.kv_connector if facts else "")
        self._block_size = facts.block_size if facts else 0
        self._lease = lease
        self._observer = observer
        self._answer = PrefillAnswer()
        if self.connector is Connector.PASSTHROUGH and lease.worker.first_time("connector"):
            name = facts.kv_connector if facts else ""
            _log.warning(
                "prefill worker %s has KV connector %r, which is not known here: it is asked for no handoff, and decode"
                " workers compute prompts again unless it returns one unasked",
                lease.worker.name,
                name,
            )

    def __repr__(self) -> str:
        return f"<PrefillLeg {self.attempt_id} on {self.worker.name}: {self.call!r}>"

    @property
    def has_more(self) -> bool:
        """Whether leaving it now would lose something: an answer to come, or one that nobody has looked at."""
        call = self.call
        if call is None:
            return False
        self._take_arrived(call)
        return not call.ended or self._answer.frames > 0

    async def run(self, message: bytes) -> None:
        """Send the request and read the answer to its end. Raises WorkerRejected, WorkerUnavailable."""
        try:
            self.call = await self.worker.client.generate(message)
            await self._read(self.call)
        except (RpcError, LinkError) as exc:
            started = self._answer.frames > 0
            raise leg_error(exc, leg="prefill", worker=self.worker.name, started=started) from exc

    async def finish(self) -> None:
        """Read whatever still comes, however it ends."""
        if self.call is not None:
            try:
                await self._read(self.call)
            except RpcError:
                return  # what came before counts all the same

    async def _read(self, call: ClientCall) -> None:
        # A frame that was received and not yet added would be nobody's; there is no checkpoint between the two (I2).
        while (frame := await call.receive()) is not None:
            self._answer.add(frame)

    def _take_arrived(self, call: ClientCall) -> None:
        for frame in call.take_nowait():
            self._answer.add(frame)

    def harvest(self) -> Harvest:
        """Look at the answer and take the handoff in it, if there is one: `handoff` has it then.

        Synchronous. Raises PrefillFailed for an answer that is none, HandoffInvalid for a handoff that must reach no
        engine (I6); that one has ended.
        """
        if self.call is not None:
            self._take_arrived(self.call)
        found = harvest(self._answer)
        if found.completes > 1:
            _log.warning(
                "%s: the prefill leg sent %d complete frames; the last counts", self.attempt_id, found.completes
            )
        params = None if found.kv_params is None else read_params(found.kv_params)
        if params is None or not params.hand_over:
            return found
        handoff = self.handoff = Handoff(
            params,
            prefill_worker=self.worker.name,
            issued_at=trio.current_time(),
            lease=lease_seconds(self.connector),
            on_end=lambda state: self._observer.handoff_ended(outcome=state.value),
        )
        reason = params.fault(prompt_tokens=found.prompt_tokens, block_size=self._block_size)
        if reason is not None:
            # Not to be released either: the notice would carry the same params to an engine.
            handoff.end(HandoffState.INVALID)
            raise HandoffInvalid(f"prefill worker {self.worker.name} returned a handoff that is {reason}")
        if not params.are_modern and self.worker.first_time("older handoff"):
            _log.warning(
                "prefill worker %s returns handoffs of an older or foreign shape; they are relayed unchecked",
                self.worker.name,
            )
        return found

    def leave(self) -> None:
        """Return the slot and reset the call if it has not ended. Synchronous, idempotent."""
        if self.call is not None:
            self.call.cancel()
        self._lease.release()
