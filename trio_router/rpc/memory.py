"""Bounded in-memory transports, so that whole clusters run in one process on virtual time.

The same two bounds as a socket pair: a writer is refused once the pipe holds `capacity_bytes`, a reader sees what
was written in order and then end of file. Closing one side breaks the other's writes, as a reset would.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import trio

from ..errors import LinkError
from .transport import ACCEPT_BACKLOG, Transport

DEFAULT_CAPACITY: Final = 65_536
"""Bytes one direction holds: the order of a loopback socket's buffer after the kernel has shrunk it."""


class _Pipe:
    """One direction."""

    __slots__ = ("capacity", "data", "reader_gone", "readers", "writer_gone", "writers")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.data = bytearray()
        self.reader_gone = False
        self.writer_gone = False
        self.readers = trio.lowlevel.ParkingLot()
        self.writers = trio.lowlevel.ParkingLot()


class MemoryTransport:
    """One end of a memory link."""

    __slots__ = ("_closed", "_incoming", "_outgoing", "peer")

    def __init__(self, incoming: _Pipe, outgoing: _Pipe, *, peer: str) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._closed = False
        self.peer = peer

    def __repr__(self) -> str:
        return f"<MemoryTransport {self.peer} {'closed' if self._closed else 'open'}>"

    async def establish(self) -> None:
        await trio.lowlevel.checkpoint()

    def recv_nowait(self, max_bytes: int) -> bytes | None:
        pipe = self._incoming
        if self._closed:
            raise LinkError(f"memory link to {self.peer} is closed")
        if not pipe.data:
            return b"" if pipe.writer_gone else None
        taken = bytes(pipe.data[:max_bytes])
        del pipe.data[:max_bytes]
        pipe.writers.unpark_all()
        return taken

    def send_nowait(self, data: bytes | bytearray | memoryview) -> int:
        pipe = self._outgoing
        if self._closed or pipe.reader_gone:
            raise LinkError(f"memory link to {self.peer} is closed")
        room = pipe.capacity - len(pipe.data)
        taken = data[:room]
        pipe.data += taken
        if taken:
            pipe.readers.unpark_all()
        return len(taken)

    async def wait_readable(self) -> None:
        pipe = self._incoming
        await trio.lowlevel.checkpoint()
        while not (pipe.data or pipe.writer_gone or self._closed):
            await pipe.readers.park()
        if self._closed:
            raise LinkError(f"memory link to {self.peer} is closed")

    async def wait_writable(self) -> None:
        pipe = self._outgoing
        await trio.lowlevel.checkpoint()
        while not (len(pipe.data) < pipe.capacity or pipe.reader_gone or self._closed):
            await pipe.writers.park()
        if self._closed:
            raise LinkError(f"memory link to {self.peer} is closed")

    def close(self) -> None:
        self._closed = True
        self._incoming.reader_gone = True
        self._outgoing.writer_gone = True
        for pipe in (self._incoming, self._outgoing):
            pipe.readers.unpark_all()
            pipe.writers.unpark_all()


def memory_link(
    capacity_bytes: int = DEFAULT_CAPACITY, *, left: str = "left", right: str = "right"
) -> tuple[MemoryTransport, MemoryTransport]:
    """Two ends of one pipe pair; `left` and `right` name the ends in messages."""
    there, back = _Pipe(capacity_bytes), _Pipe(capacity_bytes)
    return MemoryTransport(back, there, peer=right), MemoryTransport(there, back, peer=left)


class MemoryListener:
    """The accepting side of an address in a `MemoryNetwork`."""

    __slots__ = ("_forget", "_receive", "_send", "address")

    def __init__(self, address: str, *, forget: Callable[[MemoryListener], None]) -> None:
        self.address = address
        self._forget = forget
        send, receive = trio.open_memory_channel[MemoryTransport](ACCEPT_BACKLOG)
        self._send = send
        self._receive = receive

    def __repr__(self) -> str:
        return f"<MemoryListener {self.address}>"

    async def accept(self) -> Transport:
        try:
            return await self._receive.receive()
        except (trio.ClosedResourceError, trio.EndOfChannel) as exc:
            raise LinkError(f"listener {self.address} is closed") from exc

    def offer(self, transport: MemoryTransport) -> None:
        """Queue a peer's end; raises LinkError when the backlog is full, as a kernel would refuse."""
        try:
            self._send.send_nowait(transport)
        except trio.WouldBlock as exc:
            raise LinkError(f"cannot connect to {self.address}: backlog full") from exc

    def close(self) -> None:
        self._forget(self)
        self._send.close()
        # Whoever is in the queue has been told that the connection is made, so now it has to be told that it ended.
        with suppress(trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
            while True:
                self._receive.receive_nowait().close()
        self._receive.close()


class MemoryNetwork:
    """A little internet of memory links. `latency` seconds pass (on trio's clock) before a dial is answered."""

    def __init__(self, *, latency: float = 0.0, capacity_bytes: int = DEFAULT_CAPACITY) -> None:
        self._listeners: dict[str, MemoryListener] = {}
        self._ports = itertools.count(1)
        self._latency = latency
        self._capacity = capacity_bytes
        self._black_holes: set[str] = set()

    def listen(self, address: str = "memory:0") -> MemoryListener:
        """Bind an address; port 0 picks the next free number. Raises LinkError when it is taken."""
        host, _, port = address.rpartition(":")
        if port == "0":
            address = f"{host}:{next(self._ports)}"
        if address in self._listeners:
            raise LinkError(f"address {address} is in use")
        listener = MemoryListener(address, forget=self._forget)
        self._listeners[address] = listener
        return listener

    def black_hole(self, address: str) -> None:
        """From now on dialing this address gets no answer at all, not even a refusal."""
        self._black_holes.add(address)

    async def dial(self, address: str) -> Transport:
        """Connect to a bound address; raises LinkError when nobody listens there."""
        await trio.sleep(math.inf if address in self._black_holes else self._latency)
        listener = self._listeners.get(address)
        if listener is None:
            raise LinkError(f"cannot connect to {address}: nobody listens there")
        mine, theirs = memory_link(self._capacity, left="dialer", right=address)
        listener.offer(theirs)
        return mine

    def _forget(self, listener: MemoryListener) -> None:
        # Closed a second time, it may have a successor at its address.
        if self._listeners.get(listener.address) is listener:
            del self._listeners[listener.address]
