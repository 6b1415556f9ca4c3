"""A worker: what is configured, what it said of itself, and how much of it is in use."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum, unique
from typing import Final
from urllib.parse import urlsplit

import trio

from ..errors import ConfigError
from ..policy.breaker import Breaker, BreakerSettings
from ..rpc.transport import UNIX_SCHEME
from .client import WorkerClient, WorkerFacts


@unique
class WorkerRole(StrEnum):
    """Which leg a worker serves."""

    PREFILL = "prefill"
    DECODE = "decode"
    PLAIN = "regular"


_WITH_RANK: Final = re.compile(r"(?P<url>grpcs?://[^/?#]+:[0-9]+)@(?P<rank>[0-9]{1,6})")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A worker as configured. `bootstrap_port` belongs to push connectors.

    `url` is grpc://host:port, grpcs://host:port for TLS, or unix:/path (grpc+unix:/path means the same). An `@rank`
    behind the port pins requests to that data-parallel rank of the worker: one entry for each rank.
    """

    url: str
    role: WorkerRole
    bootstrap_port: int | None = None

    def __post_init__(self) -> None:
        self.address  # noqa: B018  # a wrong URL is told where it is written, not at the first request

    @property
    def tls(self) -> bool:
        """Whether the worker speaks TLS."""
        return urlsplit(self.url).scheme == "grpcs"

    @property
    def rank(self) -> int | None:
        """The data-parallel rank that it is pinned to."""
        found = _WITH_RANK.fullmatch(self.url)
        return int(found["rank"]) if found else None

    @property
    def name(self) -> str:
        """What logs and metrics call it."""
        return self.address if self.rank is None else f"{self.address}@{self.rank}"

    @property
    def host(self) -> str:
        """The host by itself, an IPv6 address without brackets; empty for a UNIX socket."""
        return "" if self.address.startswith(UNIX_SCHEME) else self.address.rpartition(":")[0].strip("[]")

    @property
    def address(self) -> str:
        """`host:port` or `unix:path` to dial. Raises ConfigError when the URL is not one of a gRPC worker."""
        pinned = _WITH_RANK.fullmatch(self.url)
        try:
            parts = urlsplit(pinned["url"] if pinned else self.url)
            port = parts.port
        except ValueError as exc:
            raise ConfigError(f"worker URL {self.url!r}: {exc}") from exc
        if parts.username is not None or parts.password is not None:
            shown = f"grpc://…@{parts.netloc.rpartition('@')[2]}"
            raise ConfigError(
                f"worker URL {shown}: workers take no credentials; a data-parallel rank is grpc://host:port@N"
            )
        has_more = bool(parts.query or parts.fragment)
        if parts.scheme in ("unix", "grpc+unix") and parts.path and not parts.netloc and not has_more:
            return f"{UNIX_SCHEME}{parts.path}"
        has_more = has_more or parts.path not in ("", "/")
        if parts.scheme not in ("grpc", "grpcs") or not parts.hostname or not port or has_more:
            raise ConfigError(f"worker URL {self.url!r} is not grpc://host:port, grpcs://host:port or unix:/path")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        return f"{host}:{port}"


class Worker:
    """A registered worker."""

    def __init__(self, spec: WorkerSpec, *, client: WorkerClient, breaker: BreakerSettings | None = None) -> None:
        self.spec = spec
        self.client = client
        self.name = spec.name
        self.rank = spec.rank
        self.host = spec.host
        self.breaker = Breaker(breaker or BreakerSettings())
        self.facts: WorkerFacts | None = None
        self.ready = False
        self.trouble: str | None = None
        """Why the last probe failed, in words for an operator."""
        self.in_flight = 0
        self.tokens_in_flight = 0
        """Prompt tokens of its legs, media taken to be of usual sizes."""
        self.trying = 0
        """Of those, how many have been sent to find out whether it is well again, and have not told yet."""
        self.doubted = trio.Event()
        """Set when there is reason to ask it soon how it is."""
        self._met: dict[str, str] = {}
        self._said: set[str] = set()

    def __repr__(self) -> str:
        state = "ready" if self.ready else "not ready"
        return f"<Worker {self.spec.role} {self.name} {state}, {self.in_flight} in flight>"

    # A decode worker that never pulled from a prefill engine drops the first word it is asked to pass on to it.

    def note_pull(self, prefill_worker: str, *, engine_id: str) -> None:
        """It has pulled KV from this engine of that worker."""
        self._met[prefill_worker] = engine_id

    def has_met(self, prefill_worker: str, *, engine_id: str) -> bool:
        """Whether it has pulled from this very engine: one that was restarted is a stranger."""
        return self._met.get(prefill_worker) == engine_id

    def forget(self, prefill_worker: str | None = None) -> None:
        """Take it that it has not met this prefill worker, or any. Saying a word once too often harms nothing."""
        if prefill_worker is None:
            self._met.clear()
        else:
            self._met.pop(prefill_worker, None)

    def doubt(self) -> None:
        """Its connection has changed: it may be gone, or have come back as another process."""
        if self.ready:
            self.doubted.set()

    def first_time(self, what: str) -> bool:
        """True the first time it is asked about `what`: for a warning that is worth one line a worker."""
        if what in self._said:
            return False
        self._said.add(what)
        return True


class Lease:
    """A counted slot on a worker, from selection to the end of the leg. Returned exactly once, by `release`.

    `tries` is set for a leg by which it is found out whether the worker is well again. `tokens` is about how long its
    prompt is.
    """

    __slots__ = ("_held", "_tokens", "_tries", "worker")

    def __init__(self, worker: Worker, *, tries: bool = False, tokens: int = 0) -> None:
        self.worker = worker
        self._held = True
        self._tries = tries
        self._tokens = tokens
        worker.in_flight += 1
        worker.tokens_in_flight += tokens
        worker.trying += tries

    def __repr__(self) -> str:
        return f"<Lease on {self.worker.name} {'held' if self._held else 'released'}>"

    def settle(self) -> None:
        """The leg goes well so far, and may go on for long: it is no try any more."""
        if self._tries:
            self._tries = False
            self.worker.trying -= 1

    def release(self) -> None:
        """Return the slot; a no-op when that has been done."""
        self.settle()
        if self._held:
            self._held = False
            self.worker.in_flight -= 1
            self.worker.tokens_in_flight -= self._tokens
