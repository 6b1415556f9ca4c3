"""A leg's failure as an error of the family, and whether another attempt may help."""

from __future__ import annotations

import re
from enum import Enum, auto, unique
from typing import Final

from grpclib.const import Status

from ..errors import (
    DecodeFailed,
    HandoffInvalid,
    HandoffMissing,
    LinkError,
    PrefillFailed,
    RouterError,
    TooLarge,
    WorkerBusy,
    WorkerRejected,
    WorkerUnavailable,
)
from ..rpc.metadata import Origin, RpcError

# The codes of the field's gateways: a leg that could not be started, and one that broke after it had said something.
_START_CODES: Final = {
    "prefill": "prefill_worker_failed_to_start",
    "decode": "decode_worker_failed_to_start",
    "worker": "start_generation_failed",
}
_STREAM_CODES: Final = {
    "prefill": "prefill_stream_error",
    "decode": "worker_stream_failed",
    "worker": "worker_stream_failed",
}


@unique
class Verdict(Enum):
    """What a failed attempt says of the worker it failed at."""

    REFUSED = auto()
    """The request cannot work anywhere. The worker is well."""
    BUSY = auto()
    """The worker is well and has no room: another may have some, and there is nothing to wait for before asking it."""
    FAILED = auto()
    """The worker, or the way to it, is at fault; elsewhere or later it may work."""


# Of a worker's own words before its first frame: its queues are full (vLLM's admission control, a media back end), or
# it is being shut down. Broken connections come with the same status, and from this side of them.
_BUSY: Final = frozenset({Status.UNAVAILABLE, Status.RESOURCE_EXHAUSTED})
# Statuses that speak of the worker's moment and not of the request.
_FAILED: Final = frozenset(
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
# With these a worker does not refuse a request: its engine has failed, and a dead one tells nobody anything.
_ENGINE_FAILED: Final = frozenset({Status.INTERNAL, Status.UNKNOWN})
# A gRPC server that takes no message of this size says so with the status of one that is busy. The words are those of
# gRPC's C core (whose default is 4 MiB), grpc-go and grpc-js, then of grpc-java, and of this package's own server.
_OVER_A_LIMIT: Final = re.compile(r"received message larger than max|exceeds maximum size|over max_message_bytes", re.I)


def leg_error(exc: RpcError | LinkError, *, leg: str, worker: str, started: bool) -> RouterError:
    """What a leg's call ended with, for the caller. `leg` is "prefill", "decode" or "worker"; `started` tells whether
    any frame had come.
    """
    code = (_STREAM_CODES if started else _START_CODES)[leg]
    named = f"{_kind(leg)} {worker}"
    if isinstance(exc, LinkError):
        return WorkerUnavailable(f"{named}: {exc.message}", code=code)
    if is_too_large(exc):
        return TooLarge(f"the request is too large for {named}: {exc.message}")
    if exc.origin is Origin.LOCAL and exc.status is Status.RESOURCE_EXHAUSTED:
        # A limit of this side's. Whoever computes the answer again, it becomes no smaller.
        return TooLarge(f"{named}: {exc.message}", code="response_too_large")
    message = exc.message or f"{named} gave no reason"
    busy = exc.origin is Origin.PEER and exc.status in _BUSY and not started
    kind = WorkerBusy if busy else WorkerRejected
    return kind(message, status=exc.status, leg=leg, details=exc.details, code=code)


def _kind(leg: str) -> str:
    return leg if leg == "worker" else f"{leg} worker"


def is_too_large(exc: RpcError) -> bool:
    """Whether the gRPC server of a worker would not take a message of this size: its engine knows nothing of it."""
    known = exc.origin is Origin.PEER and exc.status is Status.RESOURCE_EXHAUSTED
    return known and _OVER_A_LIMIT.search(exc.message or "") is not None


def is_refusal(exc: RpcError) -> bool:
    """Whether a worker itself looked at the request and would not take it."""
    return exc.origin is Origin.PEER and exc.status not in _ENGINE_FAILED and not is_too_large(exc)


def may_have_run(exc: RpcError | LinkError) -> bool:
    """Whether a worker may have begun on a request that failed so: it broke off without a word from the worker."""
    return isinstance(exc, RpcError) and exc.origin in (Origin.TRANSPORT, Origin.LOCAL)


def judge(error: RouterError) -> Verdict:
    """What an attempt that ended so says of the worker whose leg it was."""
    if isinstance(error, WorkerBusy):
        return Verdict.BUSY
    if isinstance(error, WorkerRejected):
        return Verdict.FAILED if error.status in _FAILED else Verdict.REFUSED
    if isinstance(error, HandoffMissing):
        return Verdict.FAILED if error.asked else Verdict.REFUSED
    failed = isinstance(error, (WorkerUnavailable, PrefillFailed, DecodeFailed, HandoffInvalid))
    return Verdict.FAILED if failed else Verdict.REFUSED


def shed(error: WorkerBusy, *, retry_after: float) -> WorkerBusy:
    """What the client is told when every worker is busy: the last one's status, and when to come back."""
    told = WorkerBusy(
        f"no {_kind(error.leg)} can take it now; the last one said: {error.message}",
        status=error.status,
        leg=error.leg,
        details=error.details,
        code="worker_overload_protection_shed",
    )
    told.retry_after = retry_after
    return told
