"""One try of one request: its leases, its legs, its handoff, and the synchronous exit that gives each to its next
owner.

The states and what leaving in each of them means are a table (invariants I2 to I5). Everything an attempt holds is
stored here and not in a waiting task's locals, so that a cancel at any point finds all of it.
"""

from __future__ import annotations

import logging
from enum import Enum, auto, unique
from typing import Final

import trio
from grpclib.const import Status

from ..errors import (
    DecodeFailed,
    HandoffInvalid,
    LinkError,
    PrefillFailed,
    RouterError,
    WorkerRejected,
    WorkerUnavailable,
)
from ..fleet.worker import Lease, Worker
from ..observe.hooks import Observer
from ..protocol.codec import decode
from ..protocol.messages import GenerateResponse
from ..protocol.wire import is_complete, scan_chunk
from ..rpc.call import ClientCall
from ..rpc.metadata import Origin, RpcError
from .connectors import Connector, connector_of, lease_seconds, prefill_params
from .handoff import Handoff, HandoffState, harvest, invalid_because, is_handoff
from .janitor import DecodeLeftover, Janitor, PrefillLeftover
from .legs import RequestView, decode_leg, plain_leg, prefill_leg
from .timeline import Timeline

_log: Final = logging.getLogger(__name__)


@unique
class AttemptState(Enum):
    """Where an attempt is. It only moves down this list, and may skip."""

    RESERVED = auto()
    """Slots are held; nothing has been sent."""
    PREFILLING = auto()
    """The prefill leg is open, or its frames have not been looked at yet."""
    HARVESTED = auto()
    """The prefill leg has ended and its handoff, if any, is here; decode has not been sent."""
    DISPATCHED = auto()
    """The decode leg is open and has produced no frame."""
    STREAMING = auto()
    """The decode leg has produced a frame."""
    ENDED = auto()
    """Nothing is held any more."""


class Attempt:
    """A try on a pair (`prefill` given) or on one worker. Enter nothing, await `first_frame`, and always `leave`."""

    def __init__(
        self,
        view: RequestView,
        *,
        attempt_id: str,
        decode: Lease,
        prefill: Lease | None,
        janitor: Janitor,
        observer: Observer,
        timeline: Timeline,
        fresh_fraction: float,
    ) -> None:
        self.state = AttemptState.RESERVED
        self.attempt_id = attempt_id
        self.call: ClientCall | None = None
        self.handoff: Handoff | None = None
        self.blamed = (prefill or decode).worker
        """The worker whose leg is under way, or failed."""
        self._view = view
        self._prefill = prefill
        self._decode = decode
        self._janitor = janitor
        self._observer = observer
        self._timeline = timeline
        self._fresh_fraction = fresh_fraction
        self._prefill_call: ClientCall | None = None
        self._prefill_frames: list[bytes] = []

    def __repr__(self) -> str:
        legs = f"{self._prefill.worker.name} then " if self._prefill else ""
        return f"<Attempt {self.attempt_id} on {legs}{self._decode.worker.name}: {self.state.name}>"

    @property
    def workers(self) -> list[Worker]:
        """The workers this attempt may have requests on."""
        return [lease.worker for lease in (self._prefill, self._decode) if lease is not None]

    async def first_frame(self) -> None:
        """Run the legs until the client's first frame is here; it stays in the call's record.

        Raises a RouterError that says what went wrong; `retryable` tells whether another attempt may help.
        """
        if self._prefill is not None:
            self._timeline.prefill_worker = self._prefill.worker.name
        self._timeline.decode_worker = self._decode.worker.name
        if self._prefill is None:
            message = plain_leg(self._view, attempt_id=self.attempt_id)
        else:
            kv_params = await self._run_prefill(self._prefill)
            message = decode_leg(self._view, attempt_id=self.attempt_id, kv_params=kv_params)
        await self._run_decode(message)

    def leave(self) -> None:
        """Give everything held to its next owner. Synchronous, idempotent, and right in every state."""
        state, self.state = self.state, AttemptState.ENDED
        _EXITS[state](self)
        for lease in (self._prefill, self._decode):
            if lease is not None:
                lease.release()

    # The prefill leg

    async def _run_prefill(self, lease: Lease) -> str | None:
        worker = lease.worker
        connector = connector_of(worker.facts.kv_connector if worker.facts else "")
        asked = prefill_params(connector)
        self._timeline.prefill_started_at = trio.current_time()
        message = prefill_leg(self._view, attempt_id=self.attempt_id, kv_params=asked)
        try:
            self._prefill_call = await worker.client.generate(message)
            self.state = AttemptState.PREFILLING
            while (frame := await self._prefill_call.receive()) is not None:
                self._prefill_frames.append(frame)
        except (RpcError, LinkError) as exc:
            raise _leg_error(exc, leg="prefill", worker=worker) from exc
        # No checkpoint from the last frame to here, nor from here to `self.handoff`: there is an owner at every
        # moment (I2).
        self.state = AttemptState.HARVESTED
        found = harvest(self._prefill_frames)
        if found.completes > 1:
            _log.warning(
                "%s: the prefill leg sent %d complete frames; the last counts", self.attempt_id, found.completes
            )
        self._timeline.prefill_ended_at = trio.current_time()
        self._timeline.prompt_tokens, self._timeline.cached_tokens = found.prompt_tokens, found.cached_tokens
        kv_params = found.kv_params if is_handoff(found.kv_params) else None
        if kv_params is not None:
            self.handoff = self._make_handoff(kv_params)
        lease.release()
        if kv_params is None and asked is not None:
            self._observer.handoff_missing(worker=worker.name)
        self._check_handoff(connector, prompt_tokens=found.prompt_tokens)
        return kv_params

    def _make_handoff(self, kv_params: str) -> Handoff:
        assert self._prefill is not None  # noqa: S101  # for the type checker: only prefill legs make handoffs
        worker = self._prefill.worker
        lease = lease_seconds(connector_of(worker.facts.kv_connector if worker.facts else ""))
        return Handoff(kv_params, prefill_worker=worker.name, issued_at=trio.current_time(), lease=lease)

    def _check_handoff(self, connector: Connector, *, prompt_tokens: int) -> None:
        if self.handoff is None or connector is not Connector.NIXL or self._prefill is None:
            return
        facts = self._prefill.worker.facts
        reason = invalid_because(
            self.handoff.kv_params, prompt_tokens=prompt_tokens, block_size=facts.block_size if facts else 0
        )
        if reason is not None:
            # Not releasable either: the notice would carry the same params to an engine.
            self._janitor.end_handoff(self.handoff, HandoffState.INVALID)
            raise HandoffInvalid(f"prefill worker {self._prefill.worker.name} returned a handoff that is {reason}")

    # The decode leg

    async def _run_decode(self, message: bytes) -> None:
        worker = self._decode.worker
        handoff = self.handoff
        if handoff is not None and not handoff.is_fresh(trio.current_time(), fraction=self._fresh_fraction):
            raise PrefillFailed("the handoff grew too old before decode could be dispatched", code="handoff_expired")
        self.blamed = worker
        try:
            self._timeline.decode_started_at = trio.current_time()
            call = await worker.client.generate(message)
            self.call = call
            self.state = AttemptState.DISPATCHED
            if handoff is not None:
                handoff.move(HandoffState.OFFERED)
            self._report_dispatch()
            frame = await _first_telling(call)
        except (RpcError, LinkError) as exc:
            self._judge_refusal(exc)
            raise _leg_error(exc, leg="decode" if self._prefill else "worker", worker=worker) from exc
        if frame is None:
            raise DecodeFailed(
                f"worker {worker.name} ended the stream without a frame", code="no_responses_from_server"
            )
        self._check_first(frame, worker)
        self.state = AttemptState.STREAMING
        self._timeline.first_frame_at = trio.current_time()
        if handoff is not None:
            worker.met.add(handoff.prefill_worker)
            self._janitor.end_handoff(handoff, HandoffState.CONSUMED)

    def _report_dispatch(self) -> None:
        started, ended = self._timeline.prefill_started_at, self._timeline.prefill_ended_at
        if self._prefill is not None and started is not None and ended is not None:
            facts = self._prefill.worker.facts
            connector = connector_of(facts.kv_connector if facts else "")
            self._observer.pair_dispatched(connector=connector.value, prefill_seconds=ended - started)

    def _judge_refusal(self, exc: RpcError | LinkError) -> None:
        """What a decode leg that failed before its first frame means for the handoff it carried."""
        handoff = self.handoff
        if handoff is None or handoff.state is not HandoffState.OFFERED:
            return  # never offered: leaving releases it
        told = isinstance(exc, RpcError) and exc.origin is Origin.PEER
        if told and handoff.prefill_worker in self._decode.worker.met:
            self._janitor.end_handoff(handoff, HandoffState.RELEASED)
        elif told or (isinstance(exc, RpcError) and exc.origin is Origin.REFUSED):
            # A worker that never met the prefill worker drops the first notice, and one that never saw the leg sends
            # none.
            self._janitor.release(handoff, decode_worker=self._decode.worker, view=self._view)
        else:
            # It may have been consumed: leave it alone (I3).
            self._janitor.end_handoff(handoff, HandoffState.LAPSED)

    def _check_first(self, frame: bytes, worker: Worker) -> None:
        if not is_complete(frame):
            return
        reason = decode(GenerateResponse, frame).complete.finish_reason
        if reason in _FAILED_FIRST:
            if self.handoff is not None:
                self._janitor.end_handoff(self.handoff, HandoffState.LAPSED)
            raise DecodeFailed(f"worker {worker.name} ended the request with finish reason {reason!r} and no token")

    # Leaving

    def _leave_nothing(self) -> None:
        pass

    def _leave_prefilling(self) -> None:
        call = self._prefill_call
        if call is None or self._prefill is None:
            return
        self._prefill_frames.extend(call.take_nowait())
        if call.ended and not self._prefill_frames:
            return
        leftover = PrefillLeftover(
            call=call,
            attempt_id=self.attempt_id,
            lease=self._keep(self._prefill),
            decode_worker=self._decode.worker,
            view=self._view,
            frames=self._prefill_frames,
            make_handoff=self._make_handoff,
        )
        self._janitor.finish_prefill(leftover)

    def _leave_harvested(self) -> None:
        if self.handoff is not None and not self.handoff.ended:
            self._janitor.release(self.handoff, decode_worker=self._decode.worker, view=self._view)

    def _leave_dispatched(self) -> None:
        call, handoff = self.call, self.handoff
        if call is None or call.ended:
            return
        if handoff is None or handoff.ended:
            call.cancel()
            return
        leftover = DecodeLeftover(
            call=call, attempt_id=self.attempt_id, lease=self._keep(self._decode), handoff=handoff
        )
        self._janitor.finish_decode(leftover)

    def _leave_streaming(self) -> None:
        if self.call is not None:
            self.call.cancel()

    def _keep(self, lease: Lease) -> Lease:
        """Move a lease to whoever takes the leg over: `leave` then releases only what is left here."""
        return lease.move()


_EXITS: Final = {
    AttemptState.RESERVED: Attempt._leave_nothing,
    AttemptState.PREFILLING: Attempt._leave_prefilling,
    AttemptState.HARVESTED: Attempt._leave_harvested,
    AttemptState.DISPATCHED: Attempt._leave_dispatched,
    AttemptState.STREAMING: Attempt._leave_streaming,
    AttemptState.ENDED: Attempt._leave_nothing,
}
# A first frame that is a complete with one of these has given the client nothing: a failure before the first byte
# (I10).
_FAILED_FIRST: Final = frozenset({"abort", "error"})

# Statuses that speak of the worker's moment and not of the request: elsewhere, or later, it may work.
_RETRYABLE: Final = frozenset(
    {
        Status.UNAVAILABLE,
        Status.RESOURCE_EXHAUSTED,
        Status.DEADLINE_EXCEEDED,
        Status.INTERNAL,
        Status.UNKNOWN,
        Status.CANCELLED,
        Status.ABORTED,
        Status.DATA_LOSS,
    }
)
_START_CODES: Final = {
    "prefill": "prefill_worker_failed_to_start",
    "decode": "decode_worker_failed_to_start",
    "worker": "start_generation_failed",
}


async def _first_telling(call: ClientCall) -> bytes | None:
    """The first frame that tells how the leg fares, a token or an end: an empty chunk comes before a failed end."""
    index = 0
    while (frame := await call.peek(index)) is not None:
        plain = scan_chunk(frame)
        if plain is None or plain[0]:
            return frame
        index += 1
    return None


def _leg_error(exc: RpcError | LinkError, *, leg: str, worker: Worker) -> RouterError:
    if isinstance(exc, LinkError):
        return WorkerUnavailable(f"{leg} worker {worker.name}: {exc.message}", code=_START_CODES[leg])
    return WorkerRejected(
        exc.message or f"{leg} worker {worker.name} gave no reason",
        status=exc.status,
        leg=leg,
        details=exc.details,
        code=_START_CODES[leg],
    )


def retryable(error: RouterError) -> bool:
    """Whether another attempt, on other workers where there are any, may succeed where this one failed."""
    if isinstance(error, WorkerRejected):
        return error.status in _RETRYABLE
    return isinstance(error, (WorkerUnavailable, PrefillFailed, DecodeFailed, HandoffInvalid))
