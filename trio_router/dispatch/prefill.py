"""The prefill leg: its slot, its call, its answer, and the handoff in that.

A leg belongs to an attempt until that is left, then to the janitor; it knows neither, nor what a decode leg is.
"""

from __future__ import annotations

import logging
from typing import Final

import trio

from ..errors import HandoffInvalid, LinkError
from ..fleet.worker import Lease, Worker
from ..rpc.call import ClientCall
from ..rpc.metadata import RpcError
from .connectors import Connector, Plan, PrefillSide, connector_of, plan_legs
from .failures import leg_error
from .handoff import Handoff, HandoffBook, HandoffState, Harvest, PrefillAnswer, harvest
from .kvparams import KvParams, read_params
from .legs import RequestView, prefill_leg

_log: Final = logging.getLogger(__name__)


class PrefillLeg:
    """One prefill leg, from its lease on. What it was told of its worker stays as it was when the leg began."""

    def __init__(
        self, lease: Lease, *, view: RequestView, attempt_id: str, transfer_id: str, book: HandoffBook
    ) -> None:
        self.worker = lease.worker
        self.attempt_id = attempt_id
        self.call: ClientCall | None = None
        self.handoff: Handoff | None = None
        self.plan = plan_legs(side_of(lease.worker, rank=view.rank), transfer_id=transfer_id)
        self._view = view
        self._block_size = lease.worker.facts.block_size if lease.worker.facts else 0
        self._lease = lease
        self._book = book
        self._answer = PrefillAnswer()
        self._completed_at = 0.0
        _warn_of(self.plan, lease.worker)

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

    async def run(self) -> None:
        """Send the request and read the answer to its end. Raises WorkerRejected, WorkerUnavailable."""
        message = prefill_leg(self._view, attempt_id=self.attempt_id, kv_params=self.plan.asks, rank=self.worker.rank)
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
            self._add(frame)

    def _take_arrived(self, call: ClientCall) -> None:
        for frame in call.take_nowait():
            self._add(frame)

    def _add(self, frame: bytes) -> None:
        self._answer.add(frame)
        if self._answer.last is frame:
            # A handoff's lease runs from here, however long the worker takes to end the stream.
            self._completed_at = trio.current_time()

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
        text = self.plan.handed_over(found.kv_params, finish_reason=found.finish_reason)
        params = None if text is None else read_params(text)
        if params is None or not params.hand_over:
            return found
        self.handoff = self._book.issue(
            params,
            attempt_id=self.attempt_id,
            connector=self.plan.connector,
            prefill_worker=self.worker.name,
            now=self._completed_at,
        )
        if self.plan.relays:
            self._check(params, self.handoff, prompt_tokens=found.prompt_tokens)
        return found

    def _check(self, params: KvParams, handoff: Handoff, *, prompt_tokens: int) -> None:
        reason = params.fault(prompt_tokens=prompt_tokens, block_size=self._block_size)
        if reason is not None:
            # Not to be released either: the notice would carry the same params to an engine.
            handoff.end(HandoffState.INVALID)
            raise HandoffInvalid(f"prefill worker {self.worker.name} returned a handoff that is {reason}")
        if not params.are_modern and self.worker.first_time("older handoff"):
            _log.warning(
                "prefill worker %s returns handoffs of an older or foreign shape; they are relayed unchecked",
                self.worker.name,
            )

    def leave(self) -> None:
        """Return the slot and reset the call if it has not ended. Synchronous, idempotent."""
        if self.call is not None:
            self.call.cancel()
        self._lease.release()


def connector_at(worker: Worker) -> Connector:
    """The KV connector of a worker, by what it last said."""
    return connector_of(worker.facts.kv_connector if worker.facts else "")


def side_of(worker: Worker, *, rank: int | None) -> PrefillSide:
    """What the plan of a prefill leg depends on. `rank` is the client's choice, for a worker that is not pinned."""
    facts, spec = worker.facts, worker.spec
    return PrefillSide(
        connector=connector_at(worker),
        engine_id=facts.kv_engine_id if facts else "",
        dp_size=facts.data_parallel_size if facts else 0,
        rank=rank if worker.rank is None else worker.rank,
        host=worker.host,
        bootstrap_port=spec.bootstrap_port,
    )


def _warn_of(plan: Plan, worker: Worker) -> None:
    """What an operator should know of a plan that hands nothing over, once a worker."""
    if plan.connector is Connector.PASSTHROUGH and worker.first_time("connector"):
        name = worker.facts.kv_connector if worker.facts else ""
        _log.warning(
            "prefill worker %s has KV connector %r, which is not known here: it is asked for no handoff, and decode"
            " workers compute prompts again unless it returns one unasked",
            worker.name,
            name,
        )
    if plan.connector is Connector.MOONCAKE and plan.minted is None and worker.first_time("engine id"):
        _log.warning(
            "it is not known what a transfer from prefill worker %s must name (no kv_engine_id; or several"
            " data-parallel ranks and none pinned: give its URL with @rank; or a UNIX socket, which has no host):"
            " decode workers compute prompts again",
            worker.name,
        )
