"""One HTTP/2 connection on a transport: one reader task, one outbox, deadlines by one sweeper.

The link moves bytes between a transport and a sans-IO connection and tells each touched stream's owner. It knows
nothing of calls beyond the methods of `StreamOwner`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Protocol

import trio

from ..errors import LinkError
from ..http2.connection import Connection
from ..http2.streams import Stream
from .sweeper import Sweeper
from .transport import Transport

_log: Final = logging.getLogger(__name__)

RECV_BYTES: Final = 262_144
"""One read: large enough for every frame of one step of a few hundred streams, so that each is one wake-up."""

_LAST_READS: Final = 64
"""Reads after a failed write. A kernel holds less; a peer that goes on sending must not keep us here."""

_LAST_WORD: Final = b"the end."
"""The PING whose answer shows that the peer has read everything before it."""

Flush = Callable[[], None]


class StreamOwner(Protocol):
    """Who a stream belongs to. Its methods are called by the link and must not raise or suspend."""

    def touched(self, flushes: dict[Flush, None]) -> None:
        """Something came for the stream, or it ended. Add to `flushes` what is to run once after this batch."""

    def drained(self) -> None:
        """What made the owner's last send report "full" has gone."""

    def flush_failed(self, flush: Flush, error: Exception) -> None:
        """A flush raised that was to run after a batch in which the owner was touched."""

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
        self.stuck = False  # the transport takes nothing more for now, and `_unsent` is what it left
        self._transport = transport
        self._on_stream = on_stream
        self._unsent: memoryview | None = None
        self._flushing = False
        self._writer_lot = trio.lowlevel.ParkingLot()
        self._full: dict[StreamOwner, Stream] = {}
        self._write_error: LinkError | None = None
        self._reading = trio.CancelScope()
        self._finish_because: LinkError | None = None
        self._asked_to_finish = False
        self._greeting = trio.Event()
        self._sweeper = Sweeper()
        self._scope = trio.CancelScope()

    def __repr__(self) -> str:
        state = f"closed: {self.closed_because}" if self.closed_because else "open"
        return f"<Link {self.peer} {state}, {self.connection.open_streams} streams>"

    @property
    def usable(self) -> bool:
        """Whether a new call may be opened on it now."""
        return self.closed_because is None and self._write_error is None and self.connection.can_open

    @property
    def loss(self) -> LinkError:
        """Why open streams have been lost; they hear of a broken rule before the connection is closed over it."""
        return self.closed_because or LinkError(f"{self.peer} broke the protocol: {self.connection.error}")

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
        except* Exception as group:  # noqa: BLE001  # the edge of a connection: a bug here must not end the others
            _log.error("connection to %s failed", self.peer, exc_info=group)
            self._shut(LinkError(f"connection to {self.peer} failed inside: {group.exceptions[0]!r}"))
        finally:
            self._shut(LinkError(f"connection to {self.peer} was closed"))

    async def greeted(self) -> None:
        """Return once the peer's limits are known; raises LinkError when the connection ends before."""
        await self._greeting.wait()
        if self.closed_because is not None:
            raise LinkError(f"cannot connect to {self.peer}: {self.closed_because}") from self.closed_because

    def flush(self) -> None:
        """Write what the connection has to say; what does not fit now is the writer task's. Never suspends or
        raises.
        """
        if self.stuck or self._flushing or self._write_error or self.closed_because:
            return
        self._flushing = True
        connection = self.connection
        try:
            while connection.has_output or self._owes_last_word():
                data = connection.take_output()
                sent = self._transport.send_nowait(data)
                if sent != len(data):
                    self._unsent = memoryview(data)[sent:]
                    self.stuck = True
                    self._writer_lot.unpark_all()
                    break
                for stream in connection.take_drained():
                    self._tell_drained(stream.user)
        except LinkError as exc:
            self._write_failed(exc)
        finally:
            self._flushing = False

    def _owes_last_word(self) -> bool:
        if self._finish_because is None or self._asked_to_finish or self.connection.open_streams:
            return False
        self._asked_to_finish = True
        self.connection.ping(_LAST_WORD)
        return True

    def when_drained(self, owner: StreamOwner, stream: Stream) -> None:
        """Call `owner.drained()` once its stream and this link take data again, both. A send has just reported full."""
        self._full[owner] = stream

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
        """End the connection when its streams have ended and the peer has read all of them; that takes as long as the
        peer does.

        Not when it has been written: a socket that is closed while its peer still sends destroys what is on its way.
        """
        if self._finish_because is None:
            self._finish_because = reason
            self.flush()

    async def _read(self) -> None:
        transport = self._transport
        try:
            with self._reading:
                while self.closed_because is None:
                    # The one checkpoint of a batch: it keeps a busy peer from starving every other task.
                    await transport.wait_readable()
                    self._take(transport.recv_nowait(RECV_BYTES))
            # Writing has failed. What the peer said before it left is still to be had, and calls may have ended well.
            for _ in range(_LAST_READS):
                if self.closed_because is not None or not self._take(transport.recv_nowait(RECV_BYTES)):
                    break
        except LinkError as exc:
            self._shut(self._write_error or exc)
        if self._write_error is not None:
            self._shut(self._write_error)

    def _take(self, data: bytes | None) -> bool:
        """Act on what has arrived; False when nothing has."""
        if data is None:
            return False
        connection = self.connection
        if not data:
            self._shut(LinkError(f"{self.peer} closed the connection"))
            return False
        self._hand_out(connection.receive(data))
        if connection.has_output or self._finish_because is not None:
            self.flush()
        if connection.error is not None:
            self._shut(self.loss)
        elif self._finish_because is not None and _LAST_WORD in connection.pings_acked:
            self._shut(self._finish_because)
        elif self._on_stream is None and connection.goaway_received and not connection.open_streams:
            self._shut(LinkError(f"{self.peer} is going away"))
        elif connection.greeted:
            self._greeting.set()
        return True

    def _write_failed(self, error: LinkError) -> None:
        self._write_error = error
        self._unsent = None
        self.stuck = False
        self._reading.cancel()

    def _hand_out(self, touched: list[Stream]) -> None:
        flushes: dict[Flush, None] = {}
        for stream in touched:
            owner: StreamOwner | None = stream.user  # type: ignore[assignment]  # http2 lends the slot without a type
            if owner is not None:
                owner.touched(flushes)
            elif self._on_stream is not None and not stream.closed:
                self._on_stream(stream)
        for flush in flushes:
            try:
                flush()
            except Exception as exc:  # noqa: BLE001  # a sink's fault ends the calls that named it; pump() raises it
                for stream in touched:
                    owner = stream.user  # type: ignore[assignment]  # as above
                    if owner is not None:
                        owner.flush_failed(flush, exc)

    async def _write_when_stuck(self) -> None:
        transport = self._transport
        while True:
            if self._unsent is None:
                await self._writer_lot.park()
                continue
            try:
                await transport.wait_writable()
                sent = transport.send_nowait(self._unsent)
            except LinkError as exc:
                self._write_failed(exc)
                return
            self._unsent = self._unsent[sent:] or None
            self.stuck = self._unsent is not None
            if not self.stuck:
                self.flush()
                for owner in list(self._full):
                    self._tell_drained(owner)

    def _tell_drained(self, owner: object) -> None:
        if not self.stuck and owner in self._full and not self._full[owner].queued_bytes:
            del self._full[owner]
            owner.drained()

    def _shut(self, reason: LinkError) -> None:
        if self.closed_because is not None:
            return
        self.closed_because = reason
        self._greeting.set()
        self._transport.close()
        self._full.clear()
        self._hand_out(self.connection.connection_lost())
