"""One try of one request: its legs, its handoff, and the synchronous exit that gives each to its next owner.

The states and what leaving in each of them means are a table (invariants I2 to I5). Everything an attempt holds is
stored here and in its legs, not in a waiting task's locals, so that a cancel at any point finds all of it.
"""

from __future__ import annotations

from enum import Enum, auto, unique
from typing import Final

import trio

from ..errors import HandoffMissing, Unsupported
from ..fleet.registry import Registry
from ..fleet.worker import Lease, WorkerRole
from ..observe.hooks import Observer
from ..pieces import Message
from .connectors import Connector
from .decode import ALONE, PAIRED, DecodeLeg
from .handoff import Handoff, HandoffBook, Harvest, OnMissingHandoff
from .identity import Edits, IdentityOutcome, fault_of, identity_edits, judge
from .janitor import Janitor
from .legs import RequestView, decode_leg, plain_leg
from .prefill import PrefillLeg, connector_at
from .stream import GenerateStream
from .timeline import Timeline


@unique
class AttemptState(Enum):
    """Where an attempt is. It only moves down this list, and may skip."""

    RESERVED = auto()
    """Slots are held; nothing has been sent."""
    PREFILLING = auto()
    """The prefill leg is open, or its answer has not been looked at yet."""
    HARVESTED = auto()
    """The prefill leg has ended and its handoff, if any, is here; decode has not been sent."""
    DISPATCHED = auto()
    """The decode leg is open and has not told yet how it fares."""
    FAILED = auto()
    """The decode leg has failed before its first frame; the handoff has ended, or is to be released."""
    STREAMING = auto()
    """The decode leg has produced a frame."""
    ENDED = auto()
    """Nothing is held any more."""


class Attempt:
    """A try on a pair (`prefill` given) or on one worker. Await `first_frame` once, and always `leave`."""

    def __init__(
        self,
        view: RequestView,
        *,
        attempt_id: str,
        transfer_id: str,
        decode: Lease,
        prefill: Lease | None,
        registry: Registry,
        janitor: Janitor,
        book: HandoffBook,
        observer: Observer,
        timeline: Timeline,
    ) -> None:
        self.state = AttemptState.RESERVED
        self.attempt_id = attempt_id
        self.handoff: Handoff | None = None
        self.blamed = (prefill or decode).worker
        """The worker whose leg is under way, or failed."""
        self.decode = DecodeLeg(decode, attempt_id=attempt_id, name=PAIRED if prefill else ALONE)
        self._prefill: PrefillLeg | None = None
        if prefill is not None:
            self._prefill = PrefillLeg(prefill, view=view, attempt_id=attempt_id, transfer_id=transfer_id, book=book)
        self._found: Harvest | None = None
        self._view = view
        self._registry = registry
        self._janitor = janitor
        self._settings = book.settings
        self._observer = observer
        self._timeline = timeline

    def __repr__(self) -> str:
        legs = f"{self._prefill.worker.name} then " if self._prefill else ""
        return f"<Attempt {self.attempt_id} on {legs}{self.decode.worker.name}: {self.state.name}>"

    async def first_frame(self) -> None:
        """Run the legs until the client's first frame is here; it stays in the record of `decode`'s call.

        Raises a RouterError that says what went wrong; `blamed` is the worker to avoid then.
        """
        self._timeline.decode_worker = self.decode.worker.name
        self._check_connectors()
        if self._prefill is not None:
            await self._run_prefill(self._prefill)
        await self._run_decode(self._decode_message())

    def _decode_message(self) -> Message:
        worker = self.decode.worker
        if worker.spec.role is WorkerRole.PLAIN:
            return plain_leg(self._view, attempt_id=self.attempt_id, rank=worker.rank)
        return decode_leg(
            self._view,
            attempt_id=self.attempt_id,
            kv_params=self.handoff.params.text if self.handoff else None,
            address=self._prefill.plan.address if self._prefill else None,
            rank=worker.rank,
            media=self._judge_media(),
        )

    def _judge_media(self) -> Edits | None:
        """The fields of the identity, if the decode leg may go by it (I7)."""
        media, found, prefill = self._view.media, self._found, self._prefill
        if media is None:
            return None
        identity = found.identity if found else None
        facts = self.decode.worker.facts
        length = facts.model_info.max_context_length if facts else 0
        fault = None if identity is None else fault_of(identity, media=media, context_length=length)
        outcome = judge(
            n=self._view.n,
            handed_over=self.handoff is not None,
            solicited=prefill is not None and prefill.plan.asks is not None,
            identity=identity,
            fault=fault,
        )
        self._observer.media_judged(request_id=self._timeline.request_id, outcome=outcome.value, detail=fault)
        if outcome is not IdentityOutcome.APPLIED or found is None or identity is None:
            return None
        return identity_edits(found.frame, identity)

    def stream(self, *, request_id: str) -> GenerateStream:
        """What the caller gets, once `first_frame` has returned."""
        assert self.decode.call is not None  # noqa: S101  # for the type checker: it has a first frame
        return GenerateStream(
            self.decode.call,
            request_id=request_id,
            timeline=self._timeline,
            choices=self._view.n,
            leg=self.decode.name,
            on_end=self._note_stream,
        )

    def _note_stream(self, well: bool) -> None:
        """The breaker hears of a decode leg when that has ended: a worker that always fails after its first token would
        otherwise be well again with each one.
        """
        worker = self.decode.worker
        if well:
            self._registry.note_success(worker)
        else:
            worker.forget()  # as before the first frame: whoever answers at that address next may have met nobody
            self._registry.note_failure(worker)

    def _check_connectors(self) -> None:
        """Refuse MoRI-IO for every request, also for one that a decode worker would serve whole: reading, its connector
        takes every prompt for loaded from a peer, KV params or none (vLLM 0.32.0), and the answer would be wrong.
        """
        if self.decode.worker.spec.role is WorkerRole.PLAIN:
            return
        for worker in (self._prefill.worker if self._prefill else None, self.decode.worker):
            if worker is not None and connector_at(worker) is Connector.MORIIO:
                raise Unsupported(
                    f"{worker.spec.role} worker {worker.name} uses MoRIIOConnector, which needs both legs at one time"
                    " and cannot be had over gRPC: start the workers with another KV connector",
                    code="moriio_grpc_pd_unsupported",
                )

    async def _run_prefill(self, leg: PrefillLeg) -> None:
        timeline = self._timeline
        timeline.prefill_worker = leg.worker.name
        timeline.prefill_started_at = trio.current_time()
        self.state = AttemptState.PREFILLING
        await leg.run()
        # No checkpoint from the last frame to here, nor from here to `self.handoff`: there is an owner at every
        # moment (I2).
        self.state = AttemptState.HARVESTED
        timeline.prefill_ended_at = trio.current_time()
        found = self._found = leg.harvest()
        self.handoff = leg.handoff
        timeline.prompt_tokens, timeline.cached_tokens = found.prompt_tokens, found.cached_tokens
        leg.leave()
        if self.handoff is None:
            self._go_without(leg)
        self._registry.note_success(leg.worker)

    def _go_without(self, leg: PrefillLeg) -> None:
        if leg.plan.asks is not None:
            self._observer.handoff_missing(worker=leg.worker.name)
        if leg.plan.wants_handoff and self._settings.on_missing is OnMissingHandoff.FAIL:
            raise HandoffMissing(
                f"prefill worker {leg.worker.name} ({leg.plan.connector}) handed nothing over, and --on-missing-handoff"
                " fail wants no prompt computed twice",
                asked=leg.plan.asks is not None,
            )

    async def _run_decode(self, message: Message) -> None:
        leg, timeline = self.decode, self._timeline
        self.blamed = leg.worker
        timeline.decode_started_at = trio.current_time()
        await leg.send(message, handoff=self.handoff, fresh_fraction=self._settings.fresh_fraction)
        self.state = AttemptState.DISPATCHED
        self._report_dispatch()
        try:
            await leg.first_frame()
        except Exception:
            self.state = AttemptState.FAILED
            raise
        self.state = AttemptState.STREAMING
        timeline.first_frame_at = trio.current_time()

    def _report_dispatch(self) -> None:
        started, ended = self._timeline.prefill_started_at, self._timeline.prefill_ended_at
        if self._prefill is not None and started is not None and ended is not None:
            self._observer.pair_dispatched(
                connector=self._prefill.plan.connector.value,
                prefill_seconds=ended - started,
                handoff_seconds=trio.current_time() - ended,
            )

    # Leaving

    def leave(self) -> None:
        """Give everything held to its next owner. Synchronous, idempotent, and right in every state."""
        state, self.state = self.state, AttemptState.ENDED
        _EXITS[state](self)

    def _leave_legs(self) -> None:
        if self._prefill is not None:
            self._prefill.leave()
        self.decode.leave()

    def _leave_prefilling(self) -> None:
        prefill, self._prefill = self._prefill, None
        if prefill is not None and prefill.has_more:
            self._janitor.finish_prefill(prefill, through=self.decode.worker, view=self._view)
        elif prefill is not None:
            prefill.leave()
        self.decode.leave()

    def _leave_with_handoff(self) -> None:
        self._leave_legs()
        if self.handoff is not None and not self.handoff.ended:
            self._janitor.release(self.handoff, through=self.decode.worker, view=self._view)

    def _leave_dispatched(self) -> None:
        if self.handoff is None:
            self._leave_legs()
        else:
            self._janitor.finish_decode(self.decode, view=self._view)

    def _leave_nothing(self) -> None:
        pass


_EXITS: Final = {
    AttemptState.RESERVED: Attempt._leave_legs,
    AttemptState.PREFILLING: Attempt._leave_prefilling,
    AttemptState.HARVESTED: Attempt._leave_with_handoff,
    AttemptState.DISPATCHED: Attempt._leave_dispatched,
    AttemptState.FAILED: Attempt._leave_with_handoff,
    AttemptState.STREAMING: Attempt._leave_legs,
    AttemptState.ENDED: Attempt._leave_nothing,
}
