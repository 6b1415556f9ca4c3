"""Limits and deadlines of the HTTP side: frozen records, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ..media.gate import MediaPolicy
from ..media.mode import ProcessingMode

KIB: Final = 1024
MIB: Final = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """How much of everything one HTTP/1.1 listener grants its clients. Seconds and bytes.

    The connection cap must stay below the process's descriptor limit, or accepting fails for everybody.
    """

    max_connections: int = 4096
    header_seconds: float = 10.0
    keep_alive_seconds: float = 60.0
    body_seconds: float = 30.0
    """For a body to arrive, plus one second for each `body_bytes_per_second` of it that has."""
    body_bytes_per_second: int = 16 * KIB
    write_stall_seconds: float = 120.0
    """A client that takes not one byte for this long is gone. It must be longer than the pauses in which a slow
    reader's kernel announces room (about a minute at 1 KiB/s over loopback)."""
    linger_seconds: float = 2.0
    """After a refusal, how long a client may go on sending before the connection is dropped under it."""
    max_header_bytes: int = 32 * KIB
    max_body_bytes: int = 64 * MIB
    max_bodies_bytes: int = 1024 * MIB
    """Of request bodies held at one time, over all connections, small ones left out."""
    small_body_bytes: int = 64 * KIB
    """Up to this size a body needs no share of that: a few clients that announce large ones and send nothing must not
    keep everybody else's requests out. Connections times this is what they can take in the worst case."""
    max_pipelined_bytes: int = 64 * KIB
    """Read ahead of the response under way; more stays in the kernel."""
    max_pending_bytes: int = MIB
    """Of a response, waiting for a full socket. A producer that goes on past "full" up to here loses its client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSettings:
    """Who processes media, and what may be fetched."""

    mode: ProcessingMode = ProcessingMode.AUTO
    policy: MediaPolicy = field(default_factory=MediaPolicy)
    resolve_seconds: float = 5.0
    """For the names of all hosts of a request: what a resolver needs to try a second server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontSettings:
    """The OpenAI side of the HTTP front."""

    http: HttpSettings = field(default_factory=HttpSettings)
    media: MediaSettings = field(default_factory=MediaSettings)
    request_seconds: float = 1800.0
    """The router's bound on one generation."""
    max_choices: int = 128
    """Of one request, over all its prompts."""
    max_response_chars: int = 32 * MIB
    """Text collected for one client that does not stream."""
    offload_bytes: int = 2048
    """Of a request's body, from which on its prompt is rendered and tokenized through `offload`."""
