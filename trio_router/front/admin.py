"""The metrics listener: /metrics in Prometheus' text form, and /health. Must not know what is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import trio
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from ..rpc.transport import Listener
from .app import Route, alive, pick
from .exchange import Exchange
from .http import HttpServer
from .settings import HttpSettings

_METRICS_TYPE: Final = CONTENT_TYPE_LATEST.encode("ascii")


class AdminFront:
    """Serves a registry of metrics. Keep it on loopback or an inner network: it has no keys."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        settings: HttpSettings | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._registry = registry
        self._server = HttpServer(self.handle, settings=settings or HttpSettings(max_connections=64), clock=clock)
        self._routes: dict[str, dict[str, Route]] = {
            "/metrics": {"GET": self._metrics},
            "/health": {"GET": alive},
        }

    @property
    def server(self) -> HttpServer:
        """The server underneath."""
        return self._server

    async def serve(self, listener: Listener, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until drained or cancelled; owns the listener."""
        await self._server.serve(listener, task_status=task_status)

    def drain(self, *, grace: float) -> None:
        """Shut down as `HttpServer.drain`."""
        self._server.drain(grace=grace)

    async def handle(self, exchange: Exchange) -> None:
        """Answer one exchange. Raises the error family."""
        request = exchange.request
        await pick(self._routes.get(request.path), method=request.method, path=request.path)(exchange)

    async def _metrics(self, exchange: Exchange) -> None:
        body = generate_latest(self._registry)
        await exchange.respond(200, headers=((b"content-type", _METRICS_TYPE),), body=body)
