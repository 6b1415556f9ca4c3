"""What an HTTP client can do wrong before its request means anything, and how the server says that it is busy."""

from __future__ import annotations

from grpclib.const import Status

from ..errors import BadRequest, RouterError


class MalformedHttp(BadRequest):
    """The bytes are not an HTTP/1.1 request."""

    code = "malformed_http"


class HeadersTooLarge(MalformedHttp):
    """The request line and headers (or one chunk header) are over the limit."""

    http_status = 431
    code = "headers_too_large"


class RequestTooSlow(RouterError):
    """The request did not arrive within its deadline."""

    grpc_status = Status.DEADLINE_EXCEEDED
    http_status = 408
    code = "request_read_timeout"


class BodiesBusy(RouterError):
    """The bodies being handled already fill their budget; the same request can be sent again later."""

    grpc_status = Status.RESOURCE_EXHAUSTED
    http_status = 429
    code = "body_budget_exhausted"
    retry_after: float = 1.0


class UnsupportedMedia(BadRequest):
    """The body comes in a coding that is not read here."""

    http_status = 415
    code = "unsupported_content_encoding"


class NoSuchRoute(BadRequest):
    """Nothing is served at the path."""

    grpc_status = Status.UNIMPLEMENTED
    http_status = 404
    code = "route_not_found"


class MethodNotAllowed(BadRequest):
    """The path exists, but not for this method; `allowed` are the methods it has."""

    grpc_status = Status.UNIMPLEMENTED
    http_status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, *, allowed: list[str]) -> None:
        super().__init__(message)
        self.allowed = allowed


class ClientGone(RouterError):
    """The client has left, or takes no more bytes; nobody is there to be told."""

    grpc_status = Status.CANCELLED
    http_status = 499
    code = "client_gone"
