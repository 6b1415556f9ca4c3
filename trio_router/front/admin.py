"""The metrics listener: /metrics in Prometheus' text form, /health, and pages of JSON that the service gives it.

Must not know what is measured, nor what the pages show.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import msgspec
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
    """Serves a registry of metrics, and what `pages` return, as JSON, at their paths. Keep it on loopback or an inner
    network: it has no keys.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        pages: Mapping[str, Callable[[], object]] | None = None,
        settings: HttpSettings | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._registry = registry
        self._server = HttpServer(self.handle, settings=settings or HttpSettings(max_connections=64), clock=clock)
        self._routes: dict[str, dict[str, Route]] = {
            "/metrics": {"GET": self._metrics},
            "/health": {"GET": alive},
            **{path: {"GET": partial(_show, page)} for path, page in (pages or {}).items()},
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


async def _show(page: Callable[[], object], exchange: Exchange) -> None:
    body = msgspec.json.format(msgspec.json.encode(page()), indent=2) + b"\n"
    await exchange.respond(200, headers=((b"content-type", b"application/json"),), body=body)
