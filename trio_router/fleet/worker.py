"""A worker: what is configured, what it said of itself, and how much of it is in use."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, unique
from urllib.parse import urlsplit

from ..errors import ConfigError
from .client import WorkerClient, WorkerFacts


@unique
class WorkerRole(StrEnum):
    """Which leg a worker serves."""

    PREFILL = "prefill"
    DECODE = "decode"
    PLAIN = "regular"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A worker as configured. `url` is grpc://host:port; `bootstrap_port` belongs to push connectors."""

    url: str
    role: WorkerRole
    bootstrap_port: int | None = None

    def __post_init__(self) -> None:
        self.address  # noqa: B018  # a wrong URL is told where it is written, not at the first request

    @property
    def address(self) -> str:
        """`host:port` to dial. Raises ConfigError when the URL is not one of a gRPC worker."""
        parts = urlsplit(self.url)
        try:
            port = parts.port
        except ValueError as exc:
            raise ConfigError(f"worker URL {self.url!r}: {exc}") from exc
        if parts.scheme == "grpcs":
            raise ConfigError(f"worker URL {self.url!r}: TLS to workers is not built yet; use grpc://")
        if parts.scheme != "grpc" or not parts.hostname or port is None or parts.path not in ("", "/"):
            raise ConfigError(f"worker URL {self.url!r} is not grpc://host:port")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        return f"{host}:{port}"


class Worker:
    """A registered worker. Its address, as `host:port`, is its name in logs and metrics."""

    def __init__(self, spec: WorkerSpec, *, client: WorkerClient) -> None:
        self.spec = spec
        self.client = client
        self.name = spec.address
        self.facts: WorkerFacts | None = None
        self.ready = False
        self.in_flight = 0
        # Prefill workers this one has pulled KV from: a pair that never met needs its first release said twice.
        self.met: set[str] = set()

    def __repr__(self) -> str:
        state = "ready" if self.ready else "not ready"
        return f"<Worker {self.spec.role} {self.name} {state}, {self.in_flight} in flight>"


class Lease:
    """A counted slot on a worker, from selection to the end of the leg. Returned exactly once, by `release`."""

    __slots__ = ("_held", "worker")

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._held = True
        worker.in_flight += 1

    def __repr__(self) -> str:
        return f"<Lease on {self.worker.name} {'held' if self._held else 'released'}>"

    def move(self) -> Lease:
        """Hand the slot to a new owner: the returned lease holds it, this one holds nothing any more."""
        moved = Lease(self.worker)
        self.release()
        return moved

    def release(self) -> None:
        if self._held:
            self._held = False
            self.worker.in_flight -= 1
