"""The only place where an error becomes a reply: HTTP status, code and body, or gRPC status.

It knows the error family and nothing of requests; what is not of the family is told to nobody but the log.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from http import HTTPStatus
from types import MappingProxyType
from typing import Final

import msgspec
from grpclib.const import Status

from ..errors import RouterError, WorkerRejected
from ..rpc.metadata import PUSHBACK_KEY
from .faults import MethodNotAllowed

HTTP_OF_GRPC: Final = MappingProxyType(
    {
        Status.OK: 500,  # an answer that claims success cannot be an error's status
        Status.INVALID_ARGUMENT: 400,
        Status.FAILED_PRECONDITION: 400,
        Status.OUT_OF_RANGE: 400,
        Status.CANCELLED: 400,
        Status.UNAUTHENTICATED: 401,
        Status.PERMISSION_DENIED: 403,
        Status.NOT_FOUND: 404,
        Status.ALREADY_EXISTS: 409,
        Status.ABORTED: 409,
        Status.RESOURCE_EXHAUSTED: 429,
        Status.UNIMPLEMENTED: 501,
        Status.UNAVAILABLE: 503,
        Status.DEADLINE_EXCEEDED: 504,
        Status.UNKNOWN: 500,
        Status.INTERNAL: 500,
        Status.DATA_LOSS: 500,
    }
)
"""HTTP status for a status that a worker's call ended with."""

MAX_MESSAGE_CHARS: Final = 1000
"""Of what a client is told. Messages quote what it sent, which may be megabytes, or what a worker said."""
INTERNAL_MESSAGE: Final = "internal error"
"""All that a client learns of an exception nobody planned."""

CODE_TRAILER: Final = "x-smg-error-code"
"""The machine code, where gRPC has no place for it. HTTP has a header of the same name."""

REASONS: Final = MappingProxyType({status.value: status.phrase for status in HTTPStatus})


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpReply:
    """An error as an HTTP response."""

    status: int
    code: str
    message: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcReply:
    """An error as the end of a gRPC call; `details` is what GRPCError takes, `metadata` goes into its trailers."""

    status: Status
    message: str
    details: object = None
    metadata: tuple[tuple[str, str], ...] = ()


def is_planned(error: BaseException) -> bool:
    """Tell an error of the family from a bug, which belongs in the log."""
    return isinstance(single(error), RouterError)


def http_reply(error: BaseException) -> HttpReply:
    """Map any exception to a JSON response in the OpenAI error shape."""
    leaf = single(error)
    if not isinstance(leaf, RouterError):
        return _http_reply(500, code=RouterError.code, message=INTERNAL_MESSAGE, extra=())
    status = HTTP_OF_GRPC[leaf.status] if isinstance(leaf, WorkerRejected) else leaf.http_status
    return _http_reply(status, code=leaf.error_code, message=_printable(leaf.message), extra=_extra_headers(leaf))


def grpc_reply(error: BaseException) -> GrpcReply:
    """Map any exception to a gRPC status; a worker's own status is passed on as it came."""
    leaf = single(error)
    if not isinstance(leaf, RouterError):
        return GrpcReply(status=Status.INTERNAL, message=INTERNAL_MESSAGE, metadata=((CODE_TRAILER, RouterError.code),))
    status, details = leaf.grpc_status, None
    if isinstance(leaf, WorkerRejected):
        status, details = leaf.status, leaf.details
    return GrpcReply(status=status, message=_clipped(leaf.message), details=details, metadata=_trailers(leaf))


def error_event(error: BaseException) -> bytes:
    """Map any exception to the JSON of an error event, for a stream that has begun."""
    leaf = single(error)
    message, code = INTERNAL_MESSAGE, RouterError.code
    if isinstance(leaf, RouterError):
        message, code = _printable(leaf.message), leaf.error_code
    return msgspec.json.encode({"error": {"message": message, "type": "internal_error", "code": code}})


def single(error: BaseException) -> BaseException:
    """The one error to report of a group: the first planned one, else the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [single(inner) for inner in error.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, RouterError)), leaves[0])


def _trailers(error: RouterError) -> tuple[tuple[str, str], ...]:
    code = (CODE_TRAILER, error.error_code.encode("ascii", "replace").decode())
    if error.retry_after is None:
        return (code,)
    # gRPC's own clients obey this by themselves, where they are set to retry.
    return (code, (PUSHBACK_KEY, str(max(1, math.ceil(error.retry_after * 1000)))))


def _extra_headers(error: RouterError) -> tuple[tuple[bytes, bytes], ...]:
    headers: list[tuple[bytes, bytes]] = []
    if error.retry_after is not None:
        # The header has whole seconds only, and 0 would invite a busy loop.
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after))))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", ", ".join(error.allowed).encode("ascii")))
    return tuple(headers)


def _http_reply(status: int, *, code: str, message: str, extra: tuple[tuple[bytes, bytes], ...]) -> HttpReply:
    body = msgspec.json.encode(
        {"error": {"type": REASONS.get(status, "Error"), "code": code, "message": message, "param": None}}
    )
    headers = ((b"content-type", b"application/json"), (CODE_TRAILER.encode(), code.encode("ascii", "replace")), *extra)
    return HttpReply(status=status, code=code, message=message, headers=headers, body=body)


def _printable(message: str) -> str:
    # A worker's status message may hold lone surrogates, which JSON cannot carry.
    return _clipped(message).encode("utf-8", "replace").decode("utf-8")


def _clipped(message: str) -> str:
    if len(message) <= MAX_MESSAGE_CHARS:
        return message
    # The end of a message may say what to do.
    half = MAX_MESSAGE_CHARS // 2
    return f"{message[:half]} ... {message[-half:]}"
