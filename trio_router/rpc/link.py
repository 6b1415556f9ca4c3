"""One HTTP/2 connection on a transport: one reader task, one outbox, deadlines and keepalive by one sweeper.

The link moves bytes between a transport and a sans-IO connection and tells each touched stream's owner. It knows
nothing of calls beyond the methods of `StreamOwner`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Final, Protocol

import trio

from ..errors import LinkError
from ..http2.connection import Connection
from ..http2.core import GoAway
from ..http2.frames import ErrorCode
from ..http2.streams import Stream
from .keepalive import TOO_MANY_PINGS, Pace, PingLimits, PingStrikes, Verdict, Watch
from .sweeper import Expires, Sweeper
from .transport import Transport

_log: Final = logging.getLogger(__name__)

RECV_BYTES: Final = 262_144
"""One read: large enough for every frame of one step of a few hundred streams, so that each is one wake-up."""

EFFORT: Final = 2000
"""Frames of one read that are handled before other tasks have a turn, dear ones counted for several (`http2`): some 20
ms. One read of nothing but requests, or of settings that change thousands of windows, would take seconds at once."""

_LAST_READS: Final = 64
"""Reads after a failed write. A kernel holds less; a peer that goes on sending must not keep us here."""

_LAST_WORD: Final = b"the end."
"""The PING whose answer shows that the peer has read everything before it."""

_ALIVE: Final = b"alive???"
"""The PING of a keepalive. Anything that comes after it is answer enough."""

_PING_BYTES: Final = 17
"""A PING frame, header and all."""

Flush = Callable[[], None]


class StreamOwner(Expires, Protocol):
    """Who a stream belongs to. Its methods are called by the link and must not raise or suspend. `expired` is called
    when the deadline given to `Link.watch` has passed.
    """

    def touched(self, flushes: dict[Flush, None]) -> None:
        """Something came for the stream, or it ended. Add to `flushes` what is to run once after this batch."""

    def drained(self) -> None:
        """What made the owner's last send report "full" has gone."""

    def flush_failed(self, flush: Flush, error: Exception) -> None:
        """A flush raised that was to run after a batch in which the owner was touched."""


class Link:
    """A live connection. `run` owns its tasks; everything else is synchronous.

    `on_stream` makes it a server's link: it is called with each new stream. `on_change` is called when the peer wants
    no further calls, and when the link has closed. `pace` says how the peer is pinged, `ping_limits` how it may ping. A
    transport that takes nothing for `write_timeout` seconds, although there is something, ends it.
    """

    def __init__(
        self,
        transport: Transport,
        connection: Connection,
        *,
        on_stream: Callable[[Stream], None] | None = None,
        on_change: Callable[[Link], None] | None = None,
        pace: Pace | None = None,
        ping_limits: PingLimits | None = None,
        write_timeout: float = math.inf,
    ) -> None:
        self.connection = connection
        self.peer = transport.peer
        self.reads = 0
        """How often something has been received."""
        self.closed_because: LinkError | None = None
        self.stuck = False  # the transport takes nothing more for now, and `_unsent` is what it left
        self._transport = transport
        self._on_stream = on_stream
        self._on_change = on_change
        self._pace = pace
        self._strikes = PingStrikes(ping_limits) if ping_limits is not None else None
        self._write_timeout = write_timeout
        self._written = 0  # bytes
        self._at_last_ping = (0, 0, 0)  # of the peer: pings, reads and bytes written up to there
        self._goaway: GoAway | None = None
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

    def has_room(self, *, keep: int = 0) -> bool:
        """Whether a new call may be opened that leaves `keep` streams, or half of what the peer allows, to others."""
        if not self.usable:
            return False
        connection = self.connection
        limit = connection.stream_limit
        return connection.open_streams < limit - min(keep, limit // 2)

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
                    if self._pace is not None:
                        _Keepalive(self, pace=self._pace).begin()
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
                self._written += sent
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
        # Not while a drain is under way: a request may be coming that the peer sent before it knew.
        connection = self.connection
        if self._finish_because is None or self._asked_to_finish or connection.open_streams or connection.draining:
            return False
        self._asked_to_finish = True
        self.connection.ping(_LAST_WORD)
        return True

    def when_drained(self, owner: StreamOwner, stream: Stream) -> None:
        """Call `owner.drained()` once its stream and this link take data again, both. A send has just reported full."""
        self._full[owner] = stream

    def watch(self, owner: Expires, *, deadline: float) -> None:
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
                    while self.connection.has_input and self.closed_because is None:
                        await trio.lowlevel.checkpoint()
                        self._act_on(b"")
            # Writing has failed. What the peer said before it left is still to be had, and calls may have ended well.
            for _ in range(_LAST_READS):
                while self.connection.has_input and self.closed_because is None:
                    self._act_on(b"")
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
        self.reads += 1
        if not data:
            unheard = self._on_stream is None and not self.connection.greeted
            hint = " before its first word; it may expect TLS" if unheard else ""
            self._shut(self._farewell(f"{self.peer} closed the connection{hint}"))
            return False
        self._act_on(data)
        return True

    def _act_on(self, data: bytes) -> None:
        """Handle a portion of what has arrived; `data` is new, or empty for the next portion of it."""
        connection = self.connection
        self._hand_out(connection.receive(data, effort=EFFORT))
        if connection.has_output or self._finish_because is not None:
            self.flush()
        if connection.error is not None:
            self._shut(self.loss)
        elif self._finish_because is not None and _LAST_WORD in connection.pings_acked:
            self._shut(self._finish_because)
        elif self._on_stream is None and connection.goaway_received:
            self._told_to_go(connection.goaway_received)
        elif self._strikes is not None and connection.pings_received != self._at_last_ping[0]:
            self._count_pings(self._strikes, size=len(data))
        elif connection.greeted:
            self._greeting.set()

    def _told_to_go(self, goaway: GoAway) -> None:
        if goaway is not self._goaway:
            self._goaway = goaway
            if self._pace is not None and goaway.code == ErrorCode.ENHANCE_YOUR_CALM and goaway.debug == TOO_MANY_PINGS:
                self._pace.slow_down()
            self._changed()
        if not self.connection.open_streams:
            self._shut(self._farewell(f"{self.peer} is going away"))

    def _farewell(self, what: str) -> LinkError:
        """Why the peer left, in its own words where it said any."""
        goaway = self.connection.goaway_received
        if goaway is None or goaway.code == ErrorCode.NO_ERROR:
            return LinkError(what)
        return LinkError(f"{what} (HTTP/2 code {goaway.code}: {goaway.debug.decode('latin-1') or 'no reason given'})")

    def _count_pings(self, strikes: PingStrikes, *, size: int) -> None:
        """End the connection of a peer that pings too often. What the last read brought, of `size` bytes, had pings."""
        connection = self.connection
        pings, reads, written = self._at_last_ping
        count = connection.pings_received - pings
        # Clients of gRPC's core measure the path with a ping for every batch of messages: those are no strikes. The
        # answers to the last read have been written by now, unless the peer is behind, who then goes free.
        size_of_pings = count * _PING_BYTES
        alone = self.reads == reads + 1 and size == size_of_pings and self._written == written + size_of_pings
        self._at_last_ping = (connection.pings_received, self.reads, self._written)
        if strikes.pinged(count, now=trio.current_time(), alone=alone):
            connection.go_away(ErrorCode.ENHANCE_YOUR_CALM, TOO_MANY_PINGS)
            self.flush()
            self._shut(LinkError(f"{self.peer} pinged too often"))

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
                with trio.move_on_after(self._write_timeout) as waiting:
                    await transport.wait_writable()
                if waiting.cancelled_caught:
                    raise LinkError(f"{self.peer} has read nothing for {self._write_timeout:g} s")
                sent = transport.send_nowait(self._unsent)
                self._written += sent
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
        self._changed()

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change(self)


class _Keepalive:
    """Looks at a link whenever its rules say so, pings for them, and closes it when they find it dead."""

    def __init__(self, link: Link, *, pace: Pace) -> None:
        self._link = link
        self._timeout = pace.settings.timeout
        self._watch = Watch(pace, now=trio.current_time())

    def begin(self) -> None:
        self._link.watch(self, deadline=self._watch.next_look)

    def expired(self) -> None:
        link = self._link
        connection = link.connection
        verdict = self._watch.look(trio.current_time(), reads=link.reads, busy=connection.open_streams > 0)
        if verdict is Verdict.DEAD:
            link.close(LinkError(f"{link.peer} did not answer a ping within {self._timeout:g} s"))
            return
        if verdict is Verdict.PING:
            connection.pings_acked.clear()  # the links' reads have shown what these would
            connection.ping(_ALIVE)
            link.flush()
        link.watch(self, deadline=self._watch.next_look)
