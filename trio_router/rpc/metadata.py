"""gRPC's use of HTTP headers as pure functions: requests, timeouts, metadata and statuses.

Source: gRPC over HTTP/2, "PROTOCOL-HTTP2"; names of statuses are grpclib's.
"""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Collection, Mapping
from enum import Enum, unique
from typing import Any, Final

from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.metadata import decode_grpc_message, encode_grpc_message

Headers = list[tuple[bytes, bytes]]
Metadata = Collection[tuple[str, str | bytes]]
MetadataLike = Mapping[str, str | bytes] | Metadata

CONTENT_TYPE: Final = b"application/grpc"
DETAILS_KEY: Final = b"grpc-status-details-bin"
USER_AGENT: Final = b"grpc-python-trio-router/0.1"

_UNITS: Final = {ord("H"): 3600.0, ord("M"): 60.0, ord("S"): 1.0, ord("m"): 1e-3, ord("u"): 1e-6, ord("n"): 1e-9}
# The wire allows eight digits; the finest unit that still fits keeps the most precision.
_MAX_TIMEOUT_DIGITS: Final = 8
_MAX_TIMEOUT: Final = 10**_MAX_TIMEOUT_DIGITS - 1
# What a peer accepts of all trailers together is not known (gRPC's core: 8 KiB, by default), so each part has a bound.
MAX_MESSAGE_BYTES: Final = 3072
"""A status message as it goes over the wire, escaped; a longer one is cut."""
MAX_DETAILS_BYTES: Final = 3072
"""Binary details; longer ones are left out, for a part of them would say something else."""

PUSHBACK_KEY: Final = "grpc-retry-pushback-ms"
"""Of the protocol's names the one that a handler sets: in how many milliseconds to try again (gRFC A6)."""
_RESERVED: Final = frozenset({"te", "content-type", "user-agent", "content-length", "connection", "host"})

# What an HTTP status says when a peer (or a proxy before it) did not answer in gRPC at all.
_FROM_HTTP: Final = {
    400: Status.INTERNAL,
    401: Status.UNAUTHENTICATED,
    403: Status.PERMISSION_DENIED,
    404: Status.UNIMPLEMENTED,
    429: Status.UNAVAILABLE,
    502: Status.UNAVAILABLE,
    503: Status.UNAVAILABLE,
    504: Status.UNAVAILABLE,
}
# What a RST_STREAM code says; codes that are not listed are INTERNAL.
_FROM_RESET: Final = {
    7: Status.UNAVAILABLE,
    8: Status.CANCELLED,
    11: Status.RESOURCE_EXHAUSTED,
    12: Status.PERMISSION_DENIED,
}


@unique
class Origin(Enum):
    """Who said that a call failed, which decides what may be done next."""

    PEER = "peer"
    """The other side answered with a status."""
    LOCAL = "local"
    """This side ended the call: its deadline, a limit, a cancel."""
    TRANSPORT = "transport"
    """The connection or the stream broke; the peer may or may not have acted."""
    REFUSED = "refused"
    """The peer said, or it is certain, that it never acted on the call: a retry is safe."""


class RpcError(GRPCError):
    """A call ended without success. `origin` says on whose word."""

    def __init__(self, status: Status, message: str | None = None, details: Any = None, *, origin: Origin) -> None:
        super().__init__(status, message, details)
        self.origin = origin

    def __str__(self) -> str:
        return f"{self.status.name}: {self.message or 'no message'} (said by: {self.origin.value})"


def request_headers(
    path: str, *, authority: str, metadata: MetadataLike = (), timeout: float | None = None, scheme: str = "http"
) -> Headers:
    """The header list that opens a call. Raises ValueError or TypeError for metadata gRPC cannot carry."""
    headers: Headers = [
        (b":method", b"POST"),
        (b":scheme", scheme.encode()),
        (b":path", path.encode()),
        (b":authority", authority.encode()),
        (b"te", b"trailers"),
        (b"content-type", CONTENT_TYPE),
        (b"user-agent", USER_AGENT),
    ]
    if timeout is not None:
        headers.append((b"grpc-timeout", encode_timeout(timeout)))
    headers.extend(encode_metadata(metadata))
    return headers


def encode_timeout(seconds: float) -> bytes:
    """Seconds as a `grpc-timeout` value, rounded up: a peer must not give up before this side does."""
    for unit, scale in (("n", 1e9), ("u", 1e6), ("m", 1e3), ("S", 1.0), ("M", 1 / 60), ("H", 1 / 3600)):
        value = max(0.0, seconds * scale)
        if value <= _MAX_TIMEOUT:
            return f"{math.ceil(value)}{unit}".encode()
    return f"{_MAX_TIMEOUT}H".encode()


def decode_timeout(value: bytes) -> float:
    """A `grpc-timeout` value in seconds; raises ValueError when it is not one."""
    digits, unit = value[:-1], value[-1:]
    if not digits.isdigit() or len(digits) > _MAX_TIMEOUT_DIGITS or unit[0] not in _UNITS:
        raise ValueError(f"grpc-timeout {value!r} is not up to eight digits and one of H M S m u n")
    return int(digits) * _UNITS[unit[0]]


def encode_metadata(metadata: MetadataLike) -> Headers:
    """User metadata as headers; `-bin` keys take bytes, all others printable ASCII."""
    pairs = metadata.items() if isinstance(metadata, Mapping) else metadata
    return [_encode_pair(key, value) for key, value in pairs]


def _encode_pair(key: str, value: str | bytes) -> tuple[bytes, bytes]:
    lowered = key.lower()
    if _is_protocols(lowered) or not _is_key(lowered):
        raise ValueError(f"metadata key {key!r} is reserved or not made of 0-9 a-z _ . -")
    if lowered.endswith("-bin"):
        if not isinstance(value, bytes):
            raise TypeError(f"metadata {key!r} is binary and takes bytes, not {type(value).__name__}")
        return lowered.encode(), b64encode(value).rstrip(b"=")
    if not isinstance(value, str):
        raise TypeError(f"metadata {key!r} takes str, not {type(value).__name__}; a key that ends in -bin takes bytes")
    if not value.isascii() or not value.isprintable() or value != value.strip():
        raise ValueError(
            f"metadata {key!r} has a value that is not printable ASCII without space around it; "
            "use a key that ends in -bin"
        )
    return lowered.encode(), value.encode()


def _is_protocols(key: str) -> bool:
    return key in _RESERVED or (key.startswith(("grpc-", ":")) and key != PUSHBACK_KEY)


def _is_key(key: str) -> bool:
    return bool(key) and all(c in "0123456789abcdefghijklmnopqrstuvwxyz_.-" for c in key)


def decode_metadata(headers: Headers) -> list[tuple[str, str | bytes]]:
    """What the peer's user code sent, in order; protocol headers left out, undecodable binary values dropped."""
    result: list[tuple[str, str | bytes]] = []
    for raw_key, raw_value in headers:
        key = raw_key.decode("latin-1")
        if _is_protocols(key):
            continue
        if key.endswith("-bin"):
            # Several values of one key may come as one, joined by commas.
            values = map(decode_binary, raw_value.split(b","))
            result.extend((key, value) for value in values if value is not None)
        else:
            result.append((key, raw_value.decode("latin-1")))
    return result


def decode_binary(value: bytes) -> bytes | None:
    """Base64 with or without padding, as both are on the wire; None when it is not base64."""
    try:
        return b64decode(value + b"=" * (-len(value) % 4), validate=True)
    except (Base64Error, ValueError):
        return None


def get(headers: Headers, name: bytes) -> bytes | None:
    """The first value of a header, or None."""
    for key, value in headers:
        if key == name:
            return value
    return None


def status_trailers(
    status: Status, message: str | None, *, details: bytes | None = None, metadata: MetadataLike = ()
) -> Headers:
    """The trailers that end a call. A long message is cut, long details are left out (see the limits above)."""
    trailers: Headers = [(b"grpc-status", str(status.value).encode())]
    if message:
        trailers.append((b"grpc-message", _encode_message(message)))
    if details and len(details) <= MAX_DETAILS_BYTES:
        trailers.append((DETAILS_KEY, b64encode(details).rstrip(b"=")))
    trailers.extend(encode_metadata(metadata))
    return trailers


def _encode_message(message: str) -> bytes:
    # A lone surrogate (JSON can carry one) is no character and has no encoding.
    message = message.encode(errors="replace").decode()
    encoded = encode_grpc_message(message[: MAX_MESSAGE_BYTES + 1])
    if len(encoded) > MAX_MESSAGE_BYTES:
        left = MAX_MESSAGE_BYTES - len(encode_grpc_message("…"))
        for at, character in enumerate(message):
            left -= len(encode_grpc_message(character))
            if left < 0:
                return encode_grpc_message(message[:at] + "…").encode()
    return encoded.encode()


def response_headers(metadata: MetadataLike = ()) -> Headers:
    """The headers that begin a successful answer."""
    return [(b":status", b"200"), (b"content-type", CONTENT_TYPE), *encode_metadata(metadata)]


def outcome(headers: Headers | None, *, trailers: Headers | None) -> RpcError | None:
    """What the peer's headers and trailers say of the call: None is OK. Absent or odd trailers are failures."""
    raw = get(trailers or [], b"grpc-status")
    if raw is None or raw == b"0":
        problem = not_grpc(headers)
        if problem is not None or raw is not None:
            return problem
        if trailers is None:
            return RpcError(Status.INTERNAL, "the stream ended without trailers", origin=Origin.TRANSPORT)
        return RpcError(Status.UNKNOWN, "the trailers carry no grpc-status", origin=Origin.TRANSPORT)
    message = get(trailers or [], b"grpc-message")
    text = decode_grpc_message(message.decode("latin-1")) if message is not None else None
    try:
        status = Status(int(raw))
    except ValueError:
        return RpcError(Status.UNKNOWN, f"unknown grpc-status {raw!r}: {text or ''}", origin=Origin.PEER)
    if status is Status.OK:
        return None
    packed = get(trailers or [], DETAILS_KEY)
    details = decode_binary(packed) if packed is not None else None
    return RpcError(status, text, details, origin=Origin.PEER)


def not_grpc(headers: Headers | None) -> RpcError | None:
    """What response headers that are no gRPC answer say of the call (a proxy's error page, say); else None."""
    http_status = get(headers or [], b":status")
    if http_status is None or http_status == b"200":
        return None
    code = int(http_status) if http_status.isdigit() else 0
    status = _FROM_HTTP.get(code, Status.UNKNOWN)
    return RpcError(status, f"the peer answered HTTP {code} instead of gRPC", origin=Origin.PEER)


def reset_outcome(code: int, *, refused: bool) -> RpcError:
    """What a stream reset means; NO_ERROR before trailers is a failure like any other."""
    status = _FROM_RESET.get(code, Status.INTERNAL)
    if refused:  # by a reset or by a GOAWAY
        return RpcError(status, f"the peer never acted on the call (HTTP/2 code {code})", origin=Origin.REFUSED)
    return RpcError(status, f"the peer reset the stream with HTTP/2 code {code}", origin=Origin.TRANSPORT)
