"""What one connection has still to say: straight to the transport while it takes it, else pending up to a bound.

It knows bytes only. Any task may write, synchronously; a task of the connection's nursery empties what did not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from ..errors import LinkError
from ..rpc.transport import Transport
from .faults import ClientGone

_SLICE_BYTES: Final = 65_536
_STALL_CHECKS: Final = 8


class Outbox:
    """The sending half of a connection.

    `on_broken` is called once when the client cannot be written to any more (reset, closed, stalled for
    `stall_seconds`, or run over `max_pending_bytes`); whatever is written after that is dropped. `on_drained` may be
    set to learn, each time, that nothing is pending any more.
    """

    __slots__ = (
        "_drained", "_max_pending", "_nursery", "_on_broken", "_pending", "_stall_seconds", "_transport",
        "broken", "on_drained", "sent_bytes",
    )  # fmt: skip

    def __init__(
        self,
        transport: Transport,
        *,
        nursery: trio.Nursery,
        stall_seconds: float,
        max_pending_bytes: int,
        on_broken: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._nursery = nursery
        self._stall_seconds = stall_seconds
        self._max_pending = max_pending_bytes
        self._on_broken = on_broken
        self._pending = bytearray()
        self._drained = trio.Event()
        self.on_drained: Callable[[], None] | None = None
        self.broken = False
        self.sent_bytes = 0

    def __repr__(self) -> str:
        return f"<Outbox pending={len(self._pending)}{' broken' if self.broken else ''}>"

    @property
    def pending_bytes(self) -> int:
        """Accepted and not yet taken by the transport."""
        return len(self._pending)

    def write(self, data: bytes) -> bool:
        """Send now what fits and keep the rest; False means full: stop producing until `on_drained`."""
        if self.broken:
            return False
        if self._pending:
            if len(self._pending) + len(data) > self._max_pending:
                self._break()
            else:
                self._pending += data
            return False
        try:
            sent = self._transport.send_nowait(data)
        except LinkError:
            self._break()
            return False
        self.sent_bytes += sent
        if sent == len(data):
            return True
        self._pending += memoryview(data)[sent:]
        self._drained = trio.Event()
        self._nursery.start_soon(self._empty)
        return False

    async def drain(self) -> None:
        """Wait until nothing is pending; raises ClientGone when that will never be. Ends within the stall deadline."""
        if self._pending and not self.broken:
            await self._drained.wait()
        if self.broken:
            raise ClientGone("the client is gone")

    async def _empty(self) -> None:
        pending = self._pending
        last_progress = trio.current_time()
        while pending:
            # A kernel may call a socket writable only when a third of it is free, so silence is no proof of a
            # stall: look now and then whether it takes anything at all.
            with trio.move_on_after(self._stall_seconds / _STALL_CHECKS):
                try:
                    await self._transport.wait_writable()
                except LinkError:
                    self._break()
                    return
            try:
                sent = self._transport.send_nowait(bytes(memoryview(pending)[:_SLICE_BYTES]))
            except LinkError:
                self._break()
                return
            if sent:
                del pending[:sent]
                self.sent_bytes += sent
                last_progress = trio.current_time()
            elif trio.current_time() - last_progress >= self._stall_seconds:
                self._break()
                return
        if self.broken:
            return
        self._drained.set()
        if self.on_drained is not None:
            self.on_drained()

    def _break(self) -> None:
        self.broken = True
        self._pending.clear()
        self._drained.set()
        self._on_broken()
