"""The leg that gives the client its tokens: its slot, its call, and what becomes of the handoff that it carries.

A leg belongs to an attempt until that is left, and then, if it carries a handoff and has not answered yet, to the
janitor; it knows neither.
"""

from __future__ import annotations

from typing import Final

import trio

from ..errors import DecodeError, DecodeFailed, LinkError, PrefillFailed
from ..fleet.worker import Lease
from ..pieces import Message
from ..protocol.codec import decode
from ..protocol.messages import GenerateResponse
from ..protocol.wire import scan_chunk
from ..rpc.call import ClientCall
from ..rpc.metadata import RpcError
from .failures import is_refusal, leg_error, may_have_run
from .handoff import FAILED_ENDINGS, Handoff, HandoffState

PAIRED: Final = "decode"
ALONE: Final = "worker"


class DecodeLeg:
    """One decode leg of a pair, or the only leg of a request that one worker serves whole."""

    def __init__(self, lease: Lease, *, attempt_id: str, name: str) -> None:
        self.worker = lease.worker
        self.attempt_id = attempt_id
        self.call: ClientCall | None = None
        self.handoff: Handoff | None = None
        self.name = name
        """What errors call it: PAIRED or ALONE."""
        self._lease = lease

    def __repr__(self) -> str:
        return f"<DecodeLeg {self.attempt_id} on {self.worker.name}: {self.call!r}, {self.handoff!r}>"

    async def send(self, message: Message, *, handoff: Handoff | None = None, fresh_fraction: float = 1.0) -> None:
        """Send the request, with the handoff that is in it if there is one.

        Raises PrefillFailed when the handoff has grown too old by then (I5), WorkerUnavailable when the worker cannot
        be reached; nothing has been offered then.
        """
        try:
            if handoff is not None:
                # Dialing may take long, and what counts is the age on leaving: after this the call opens at once.
                await self.worker.client.connect()
                if not handoff.is_fresh(trio.current_time(), fraction=fresh_fraction):
                    raise PrefillFailed(
                        f"the handoff grew too old before it could go to decode worker {self.worker.name}",
                        code="handoff_expired",
                    )
            self.call = await self.worker.client.generate(message)
        except LinkError as exc:
            raise leg_error(exc, leg=self.name, worker=self.worker.name, started=False) from exc
        if handoff is not None:
            handoff.offer()
            self.handoff = handoff

    async def first_frame(self) -> None:
        """Wait for the first frame that tells how the leg fares: a token or an end. It stays in the call's record.

        Afterwards it is known what became of the handoff; one that has not ended is the caller's to release. Raises
        WorkerRejected, DecodeFailed.
        """
        assert self.call is not None  # noqa: S101  # for the type checker: it has been sent
        worker, silent = self.worker.name, 0
        try:
            while (frame := await self.call.peek(silent)) is not None and _says_nothing(frame):
                silent += 1
            failure = None if frame is None else _failure_in(frame)
        except RpcError as exc:
            self._judge(exc)
            raise leg_error(exc, leg=self.name, worker=worker, started=silent > 0) from exc
        except DecodeError as exc:
            self._end_handoff(HandoffState.LAPSED)
            raise DecodeFailed(f"worker {worker} sent a frame that cannot be read: {exc}") from exc
        if frame is None or failure is not None:
            # It may have been consumed or not, and nobody will say: left alone (I3).
            self._end_handoff(HandoffState.LAPSED)
            if frame is None:
                raise DecodeFailed(f"worker {worker} ended the stream without a frame", code="no_responses_from_server")
            raise DecodeFailed(f"worker {worker} ended the request with finish reason {failure!r} and no token")
        self._lease.settle()
        if self.handoff is not None:
            self.worker.note_pull(self.handoff.prefill_worker, engine_id=self.handoff.params.engine_id)
            self._end_handoff(HandoffState.CONSUMED)

    def _judge(self, exc: RpcError) -> None:
        """What a call that failed before its first frame means for the handoff: ended, or still to be released."""
        if may_have_run(exc):
            # Whoever answers at that address next may be a new process that has met nobody.
            self.worker.forget()
            self._end_handoff(HandoffState.LAPSED)
        elif is_refusal(exc) and self.handoff is not None and self._has_met(self.handoff):
            # It has told the prefill engine. One that does not know that engine has dropped the notice.
            self._end_handoff(HandoffState.RELEASED)

    def _has_met(self, handoff: Handoff) -> bool:
        return self.worker.has_met(handoff.prefill_worker, engine_id=handoff.params.engine_id)

    def _end_handoff(self, state: HandoffState) -> None:
        if self.handoff is not None:
            self.handoff.end(state)

    def leave(self) -> None:
        """Return the slot and reset the call if it has not ended. Synchronous, idempotent."""
        if self.call is not None:
            self.call.cancel()
        self._lease.release()


def _says_nothing(frame: bytes) -> bool:
    """Whether it is a chunk without a token, as one comes before a failed end."""
    plain = scan_chunk(frame)
    return plain is not None and not plain[0]


def _failure_in(frame: bytes) -> str | None:
    """The finish reason of a first frame that gives the client nothing (I10). Raises DecodeError for no message."""
    if scan_chunk(frame) is not None:
        return None
    reason = decode(GenerateResponse, frame).complete.finish_reason
    return reason if reason in FAILED_ENDINGS else None
