"""The error family: who is at fault and what the caller may do next.

Every class names its gRPC status, its HTTP status and the machine code that clients read; only `front/respond.py`
turns them into replies. Nothing here knows a transport, a worker or a request: ids are carried as fields.
"""

from __future__ import annotations

from typing import ClassVar

from grpclib.const import Status


class RouterError(Exception):
    """Root of everything this package raises on purpose."""

    grpc_status: ClassVar[Status] = Status.INTERNAL
    http_status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    retry_after: float | None = None
    """Seconds after which another try makes sense, where that is known."""

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        # A subclass names the usual code; a raise site may name a finer one of the same kind.
        self.error_code = code or type(self).code


class BadRequest(RouterError):
    """The caller sent something that can never work; the message names the field and the remedy."""

    grpc_status = Status.INVALID_ARGUMENT
    http_status = 400
    code = "invalid_request_parameters"


class ModelNotFound(RouterError):
    """No registered worker serves the requested model."""

    grpc_status = Status.NOT_FOUND
    http_status = 404
    code = "model_not_found"


class TooLarge(RouterError):
    """A message or body is over a named limit."""

    grpc_status = Status.RESOURCE_EXHAUSTED
    http_status = 413
    code = "payload_too_large"


class Unsupported(RouterError):
    """The request is well formed but asks for something this build cannot do."""

    grpc_status = Status.UNIMPLEMENTED
    http_status = 501
    code = "not_implemented"


class WorkerUnavailable(RouterError):
    """No worker could take the request now; another try, later or elsewhere, may succeed."""

    grpc_status = Status.UNAVAILABLE
    http_status = 503
    code = "no_available_workers"


class WorkerRejected(RouterError):
    """A worker answered with a gRPC status of its own; it is passed on unchanged.

    `leg` is "prefill", "decode" or "worker"; `status` is the worker's.
    """

    code = "worker_stream_failed"

    def __init__(
        self, message: str, *, status: Status, leg: str, details: object = None, code: str | None = None
    ) -> None:
        super().__init__(message, code=code)
        self.status = status
        self.leg = leg
        self.details = details


class WorkerBusy(WorkerRejected):
    """A worker had no room for the request: it is well, and another one, or the same one later, may take it."""


class PrefillFailed(RouterError):
    """The prefill leg ended without a complete frame, or with finish reason `abort` or `error` (invariant I1)."""

    grpc_status = Status.INTERNAL
    http_status = 500
    code = "prefill_stream_error"


class DecodeFailed(RouterError):
    """The decode leg ended with finish reason `abort` or `error` before the client had its first byte."""

    grpc_status = Status.INTERNAL
    http_status = 500
    code = "worker_stream_failed"


class HandoffInvalid(RouterError):
    """The prefill worker returned KV params that an engine would die of (invariant I6); the message says why."""

    grpc_status = Status.INTERNAL
    http_status = 502
    code = "handoff_invalid"


class HandoffMissing(RouterError):
    """The prefill leg ended well and handed nothing over, and the operator wants no prompt computed twice.

    `asked` tells whether its worker had been asked for a handoff, and so is at fault.
    """

    grpc_status = Status.INTERNAL
    http_status = 502
    code = "pd_decode_missing_kv_transfer_params"

    def __init__(self, message: str, *, asked: bool) -> None:
        super().__init__(message)
        self.asked = asked


class RequestTimeout(RouterError):
    """The client's deadline, or the router's own bound on a request, has passed."""

    grpc_status = Status.DEADLINE_EXCEEDED
    http_status = 504
    code = "request_timeout"


class RequestAborted(RouterError):
    """The client asked for an abort of this request by its id."""

    grpc_status = Status.ABORTED
    http_status = 409
    code = "request_aborted"


class LinkError(RouterError):
    """A connection cannot be used: it was never made, is gone, or is being closed."""

    grpc_status = Status.UNAVAILABLE
    http_status = 503
    code = "worker_unreachable"


class ProtocolViolation(RouterError):
    """A peer broke the wire protocol; `h2_code` is the RFC 9113 section 7 code its connection ends with."""

    grpc_status = Status.INTERNAL
    http_status = 502
    code = "protocol_error"

    def __init__(self, message: str, *, h2_code: int = 1) -> None:
        super().__init__(message)
        self.h2_code = h2_code


class DecodeError(RouterError):
    """Bytes are not a message of the named type; the message says where they stop making sense."""

    grpc_status = Status.INVALID_ARGUMENT
    http_status = 400
    code = "malformed_message"


class ConfigError(RouterError):
    """A setting is wrong; the message names it, its value, and what would be right."""

    code = "invalid_configuration"
