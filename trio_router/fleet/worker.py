"""A worker: what is configured, what it said of itself, and how much of it is in use."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, unique
from urllib.parse import urlsplit

from ..errors import ConfigError
from ..rpc.transport import UNIX_SCHEME
from .client import WorkerClient, WorkerFacts


@unique
class WorkerRole(StrEnum):
    """Which leg a worker serves."""

    PREFILL = "prefill"
    DECODE = "decode"
    PLAIN = "regular"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A worker as configured. `bootstrap_port` belongs to push connectors.

    `url` is grpc://host:port, grpcs://host:port for TLS, or unix:/path (grpc+unix:/path means the same).
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
    def address(self) -> str:
        """`host:port` or `unix:path` to dial. Raises ConfigError when the URL is not one of a gRPC worker."""
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError as exc:
            raise ConfigError(f"worker URL {self.url!r}: {exc}") from exc
        if parts.username is not None or parts.password is not None:
            raise ConfigError(f"worker URL grpc://…@{parts.hostname}:{port}: workers take no credentials")
        has_more = bool(parts.query or parts.fragment)
        if parts.scheme in ("unix", "grpc+unix") and parts.path and not parts.netloc and not has_more:
            return f"{UNIX_SCHEME}{parts.path}"
        has_more = has_more or parts.path not in ("", "/")
        if parts.scheme not in ("grpc", "grpcs") or not parts.hostname or not port or has_more:
            raise ConfigError(f"worker URL {self.url!r} is not grpc://host:port, grpcs://host:port or unix:/path")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        return f"{host}:{port}"


class Worker:
    """A registered worker. Its address is its name in logs and metrics."""

    def __init__(self, spec: WorkerSpec, *, client: WorkerClient) -> None:
        self.spec = spec
        self.client = client
        self.name = spec.address
        self.facts: WorkerFacts | None = None
        self.ready = False
        self.trouble: str | None = None
        """Why the last probe failed, in words for an operator."""
        self.in_flight = 0
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

    def first_time(self, what: str) -> bool:
        """True the first time it is asked about `what`: for a warning that is worth one line a worker."""
        if what in self._said:
            return False
        self._said.add(what)
        return True


class Lease:
    """A counted slot on a worker, from selection to the end of the leg. Returned exactly once, by `release`."""

    __slots__ = ("_held", "worker")

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._held = True
        worker.in_flight += 1

    def __repr__(self) -> str:
        return f"<Lease on {self.worker.name} {'held' if self._held else 'released'}>"

    def release(self) -> None:
        """Return the slot; a no-op when that has been done."""
        if self._held:
            self._held = False
            self.worker.in_flight -= 1
