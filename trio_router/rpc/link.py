"""One HTTP/2 connection on a transport: one reader task, one outbox, deadlines by one sweeper.

The link moves bytes between a transport and a sans-IO connection and tells each touched stream's owner. It knows
nothing of calls beyond the two methods of `StreamOwner`, and no owner's mistake can hurt another's stream.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Final, Protocol

import trio

from ..errors import LinkError
from ..http2.connection import Connection
from ..http2.streams import Stream
from .transport import Transport

RECV_BYTES: Final = 262_144
"""One read: large enough for every frame of one step of a few hundred streams, so that each is one wake-up."""

Flush = Callable[[], None]


class StreamOwner(Protocol):
    """Who a stream belongs to. Its methods are called by the link and must not raise or suspend."""

    def touched(self, flushes: dict[Flush, None]) -> None:
        """Something came for the stream, or it ended. Add to `flushes` what is to run once after this batch."""

    def drained(self) -> None:
        """What made the owner's last send report "full" has gone."""

    def expired(self) -> None:
        """The deadline given to `Link.watch` has passed."""


class Link:
    """A live connection. `run` owns its tasks; everything else is synchronous."""

    def __init__(
        self, transport: Transport, connection: Connection, *, on_stream: Callable[[Stream], None] | None = None
    ) -> None:
        self.connection = connection
        self.peer = transport.peer
        self.closed_because: LinkError | None = None
        self._transport = transport
        self._on_stream = on_stream
        self._unsent: memoryview | None = None
        self._flushing = False
        self._stuck = trio.lowlevel.ParkingLot()
        self._full: dict[StreamOwner, None] = {}
        self._finish_because: LinkError | None = None
        self._sweeper = _Sweeper()
        self._scope = trio.CancelScope()

    def __repr__(self) -> str:
        state = f"closed: {self.closed_because}" if self.closed_because else "open"
        return f"<Link {self.peer} {state}, {self.connection.open_streams} streams>"

    @property
    def usable(self) -> bool:
        """Whether a new call may be opened on it now."""
        return self.closed_because is None and self.connection.can_open

    @property
    def stuck(self) -> bool:
        """The transport takes nothing more for now."""
        return self._unsent is not None

    async def run(self) -> None:
        """Read until the connection ends, whoever ends it; then tell every open stream's owner. Never raises
        LinkError.
        """
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write_when_stuck)
                    nursery.start_soon(self._sweeper.run)
                    self.flush()
                    await self._read()
                    nursery.cancel_scope.cancel()
        finally:
            self._shut(LinkError(f"connection to {self.peer} was closed"))

    def flush(self) -> None:
        """Write what the connection has to say; what does not fit now is the writer task's. Never suspends or
        raises.
        """
        if self._unsent is not None or self._flushing or self.closed_because is not None:
            return
        self._flushing = True
        connection = self.connection
        try:
            while connection.has_output:
                data = connection.take_output()
                sent = self._transport.send_nowait(data)
                if sent != len(data):
                    self._unsent = memoryview(data)[sent:]
                    self._stuck.unpark_all()
                    break
                for stream in connection.take_drained():
                    self._tell_drained(stream.user)
        except LinkError as exc:
            self.close(exc)
        finally:
            self._flushing = False

    def when_drained(self, owner: StreamOwner) -> None:
        """Call `owner.drained()` once its stream and this link take data again. The owner's send has just reported
        full.
        """
        self._full[owner] = None

    def watch(self, owner: StreamOwner, *, deadline: float) -> None:
        """Call `owner.expired()` at `deadline` (trio's clock) unless it was forgotten before."""
        self._sweeper.add(owner, deadline=deadline)

    def forget(self, owner: StreamOwner) -> None:
        """The owner wants no `drained` or `expired` any more."""
        self._full.pop(owner, None)
        self._sweeper.discard(owner)

    def close(self, reason: LinkError) -> None:
        """End the connection now; `run` finishes and owners are told. The first reason is kept."""
        if self.closed_because is None:
            self._shut(reason)
            self._scope.cancel()

    def finish(self, reason: LinkError) -> None:
        """End the connection as soon as what is queued has been written."""
        if self._unsent is None:
            self.close(reason)
        else:
            self._finish_because = reason

    async def _read(self) -> None:
        transport, connection = self._transport, self.connection
        try:
            while True:
                # The one checkpoint of a batch: it keeps a busy peer from starving every other task.
                await transport.wait_readable()
                data = transport.recv_nowait(RECV_BYTES)
                if data is None:
                    continue
                if not data:
                    self._shut(LinkError(f"{self.peer} closed the connection"))
                    return
                self._hand_out(connection.receive(data))
                if connection.has_output:
                    self.flush()
                if connection.error is not None:
                    self._shut(LinkError(f"{self.peer} broke the protocol: {connection.error}"))
                    return
        except LinkError as exc:
            self._shut(exc)

    def _hand_out(self, touched: list[Stream]) -> None:
        flushes: dict[Flush, None] = {}
        for stream in touched:
            owner: StreamOwner | None = stream.user  # type: ignore[assignment]  # http2 lends the slot without a type
            if owner is not None:
                owner.touched(flushes)
            elif self._on_stream is not None and not stream.closed:
                self._on_stream(stream)
        for flush in flushes:
            flush()

    async def _write_when_stuck(self) -> None:
        transport = self._transport
        while True:
            if self._unsent is None:
                await self._stuck.park()
                continue
            try:
                await transport.wait_writable()
                sent = transport.send_nowait(self._unsent)
            except LinkError as exc:
                self.close(exc)
                return
            self._unsent = self._unsent[sent:] or None
            if self._unsent is None:
                self.flush()
                self._unstuck()
                if self._finish_because is not None:
                    self.finish(self._finish_because)

    def _unstuck(self) -> None:
        for owner in list(self._full):
            if self._unsent is not None:
                return
            self._tell_drained(owner)

    def _tell_drained(self, owner: object) -> None:
        if self._unsent is None and owner in self._full:
            del self._full[owner]
            owner.drained()

    def _shut(self, reason: LinkError) -> None:
        if self.closed_because is not None:
            return
        self.closed_because = reason
        self._transport.close()
        self._full.clear()
        self._hand_out(self.connection.connection_lost())


class _Sweeper:
    """Deadlines of many owners kept by one task: no scope and no timer per call."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, StreamOwner]] = []
        self._live: dict[StreamOwner, int] = {}
        self._numbers = itertools.count()
        self._changed = trio.Event()

    def add(self, owner: StreamOwner, *, deadline: float) -> None:
        number = next(self._numbers)
        self._live[owner] = number
        heapq.heappush(self._heap, (deadline, number, owner))
        if self._heap[0][1] == number:
            self._changed.set()

    def discard(self, owner: StreamOwner) -> None:
        self._live.pop(owner, None)

    async def run(self) -> None:
        while True:
            self._changed = trio.Event()
            with trio.move_on_at(self._next()):
                await self._changed.wait()
            now = trio.current_time()
            while self._heap and self._heap[0][0] <= now:
                _, number, owner = heapq.heappop(self._heap)
                if self._live.get(owner) == number:
                    del self._live[owner]
                    owner.expired()

    def _next(self) -> float:
        # Calls that ended in time leave their entry behind; drop those at the top, so that the heap stays small.
        while self._heap and self._live.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf
