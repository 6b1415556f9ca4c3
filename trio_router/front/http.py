"""An HTTP/1.1 server on the package's transports: accepting, the connection cap, shutting down.

Must not know routes; a handler gets each exchange. What goes wrong in one connection ends that connection only.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

import trio

from ..errors import LinkError
from ..rpc.transport import Listener, Transport
from .connection import BodyBudget, Handler, HttpConnection, OnRefusal, nothing_to_add
from .settings import HttpSettings

_ACCEPT_PAUSE: Final = 0.1
_log = logging.getLogger(__name__)


class HttpServer:
    """Serves HTTP/1.1 to whoever a listener lets in.

    `clock` is wall time in seconds, for the date header. `on_refusal` is told the code of each refusal of a request
    that could not be read, and says which headers go with it.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        settings: HttpSettings,
        clock: Callable[[], float] = time.time,
        on_refusal: OnRefusal = nothing_to_add,
    ) -> None:
        self._handler = handler
        self._on_refusal = on_refusal
        self._settings = settings
        self._clock = clock
        self._budget = BodyBudget(settings.max_bodies_bytes)
        self._responses: Counter[int] = Counter()
        self._connections: dict[HttpConnection, None] = {}
        self._slots = trio.Semaphore(settings.max_connections)
        self._accepting: trio.CancelScope | None = None
        self._running: trio.CancelScope | None = None
        self.draining = False

    def __repr__(self) -> str:
        return f"<HttpServer connections={len(self._connections)}{' draining' if self.draining else ''}>"

    @property
    def connections(self) -> int:
        """Open now."""
        return len(self._connections)

    @property
    def responses(self) -> Mapping[int, int]:
        """How many responses have been sent, by status; refusals of unreadable requests included."""
        return self._responses

    @property
    def pending_bytes(self) -> int:
        """Of responses, waiting for clients to take them."""
        return sum(connection.pending_bytes for connection in self._connections)

    @property
    def held_body_bytes(self) -> int:
        """Of request bodies being read or handled now."""
        return self._budget.held_bytes

    async def serve(self, listener: Listener, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Accept and serve until `drain` (or cancellation) ends it; owns and closes the listener. Call it once."""
        with trio.CancelScope() as self._running:
            async with trio.open_nursery() as nursery:
                try:
                    with trio.CancelScope() as self._accepting:
                        task_status.started()
                        await self._accept(listener, nursery=nursery)
                finally:
                    listener.close()

    def drain(self, *, grace: float) -> None:
        """Shut down: accept nobody, close idle connections, let exchanges under way finish (each response then closes
        its connection); what is not done after `grace` seconds is cancelled. `serve` returns when all have ended."""
        self.draining = True
        if self._running is not None and self._accepting is not None:
            self._running.deadline = min(self._running.deadline, trio.current_time() + grace)
            self._accepting.cancel(reason="shutting down")
        for connection in list(self._connections):
            connection.close_when_idle()

    async def _accept(self, listener: Listener, *, nursery: trio.Nursery) -> None:
        while not self.draining:
            transport = await self._next_transport(listener)
            if transport is None:
                return
            try:
                if self._slots.value == 0:
                    self._close_one_idle()
                await self._slots.acquire()
            except trio.Cancelled:
                transport.close()
                raise
            nursery.start_soon(self._serve_one, transport)

    async def _next_transport(self, listener: Listener) -> Transport | None:
        failures = 0
        while True:
            try:
                return await listener.accept()
            except LinkError:
                return None
            except OSError as exc:
                # Out of descriptors, most likely: connections that end will give some back. Said once, not ten times
                # a second.
                failures += 1
                if failures == 1:
                    _log.warning("accepting connections fails, trying again: %s", exc)
                await trio.sleep(_ACCEPT_PAUSE)

    async def _serve_one(self, transport: Transport) -> None:
        connection = HttpConnection(
            transport,
            handler=self._handler,
            on_refusal=self._on_refusal,
            settings=self._settings,
            budget=self._budget,
            responses=self._responses,
            clock=self._clock,
        )
        self._connections[connection] = None
        try:
            await connection.run()
        except* Exception as errors:  # noqa: BLE001 - the edge of a connection: the others must not notice
            _log.error("connection of %s failed", transport.peer, exc_info=errors)
        finally:
            del self._connections[connection]
            self._slots.release()

    def _close_one_idle(self) -> None:
        """At the cap, a new client is worth more than a connection kept open without use; the oldest goes."""
        for connection in self._connections:
            if connection.is_idle:
                connection.close_when_idle()
                return
