"""The decode worker's end of the side channel: one connection for each prefill worker it has met.

Pulls wait for their contents; notices do not wait for anything. A prefill worker is *cold* until the handshake is
done. A release for a cold one cannot be sent: it stays behind, as on the real connector, until the engine's next
step or the next release finds the handshake done.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, unique
from typing import Final

import trio

from ..errors import LinkError, ProtocolViolation, RouterError
from ..rpc.transport import Dialer
from .blocks import SLOT_BYTES
from .counters import Counters
from .handoff import Handoff, RemoteSource, Transfer
from .settings import WorkerSettings
from .sidechannel import Contents, FramePipe, Hello, Lookup, Pulled, Read, Release, Renew, Welcome, Withdraw

_REDIAL_SECONDS: Final = 0.5
"""Pause between attempts to reach a side channel; a refused connection is not yet a failed load."""


class PullFailed(RouterError):
    """A handoff could not be loaded; the message says why. The request ends with finish reason "error"."""

    code = "kv_load_failed"


@unique
class PeerState(Enum):
    COLD = "cold"
    WARM = "warm"
    LOST = "lost"


@dataclass(slots=True)
class _Waiting:
    """A read or lookup that has no answer yet."""

    done: trio.Event
    data: bytes | None = None


class Peer:
    """One prefill worker: address, engine, connection. `run` ends when the connection does."""

    def __init__(self, address: str, *, engine_id: str, settings: WorkerSettings, dialer: Dialer) -> None:
        self.address = address
        self.engine_id = engine_id
        self.state = PeerState.COLD
        self.settled = trio.Event()
        """Set once the handshake has succeeded or failed."""
        self.why_lost = ""
        self._settings = settings
        self._dialer = dialer
        self._pipe: FramePipe | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}

    def __repr__(self) -> str:
        return f"<Peer {self.engine_id} at {self.address} {self.state.value}, {len(self._waiting)} reads>"

    async def run(self) -> None:
        """Connect, then hand out answers until the connection ends. Never raises RouterError."""
        try:
            with trio.move_on_after(self._settings.handshake_seconds) as handshake:
                pipe = await self._dial()
            if handshake.cancelled_caught:
                raise LinkError(f"no side channel at {self.address} within {self._settings.handshake_seconds:g} s")
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(pipe.write)
                    await self._shake_hands(pipe)
                    while True:
                        self._take(await pipe.receive())
            finally:
                pipe.close()
        except* (LinkError, ProtocolViolation, PullFailed) as group:
            self.why_lost = str(group.exceptions[0])
        finally:
            self._lose()

    async def _dial(self) -> FramePipe:
        while True:
            try:
                return FramePipe(await self._dialer(self.address))
            except LinkError:
                await trio.sleep(_REDIAL_SECONDS)

    async def _shake_hands(self, pipe: FramePipe) -> None:
        pipe.post(Hello(engine_id=self.engine_id, tp_size=self._settings.tp_size))
        welcome: object = None
        with trio.move_on_after(self._settings.handshake_seconds):
            welcome = await pipe.receive()
        if not isinstance(welcome, Welcome):
            raise PullFailed(f"{self.address} did not answer the handshake")
        if welcome.engine_id != self.engine_id:
            raise PullFailed(f"{self.address} is engine {welcome.engine_id}, not {self.engine_id}")
        if welcome.tp_size != self._settings.tp_size:
            raise PullFailed(f"{self.address} has tp_size {welcome.tp_size}, this worker {self._settings.tp_size}")
        if welcome.block_bytes != self._settings.block_size * SLOT_BYTES:
            raise PullFailed(f"{self.address} has blocks of {welcome.block_bytes} bytes, which do not fit here")
        self._pipe = pipe
        self.state = PeerState.WARM
        self.settled.set()

    def _take(self, frame: object) -> None:
        if not isinstance(frame, Contents):
            raise ProtocolViolation(f"{self.address} sent {frame!r} where only contents can come")
        waiting = self._waiting.pop(frame.number, None)
        if waiting is not None:
            waiting.data = frame.data
            waiting.done.set()

    def _lose(self) -> None:
        self.state = PeerState.LOST
        self.settled.set()
        for waiting in self._waiting.values():
            waiting.done.set()
        self._waiting.clear()

    async def read(self, blocks: tuple[int, ...], *, request_id: str) -> bytes:
        """The contents of the peer's blocks. Raises PullFailed when the peer is lost or has no such block."""
        return await self._ask(lambda number: Read(number=number, blocks=blocks, request_id=request_id))

    async def look_up(self, transfer_id: str, *, count: int) -> bytes:
        """The last `count` blocks of a transfer, for which it waits as long as it is let.

        Raises PullFailed when the peer is lost or the transfer has not as many.
        """
        return await self._ask(lambda number: Lookup(number=number, transfer_id=transfer_id, count=count))

    async def _ask(self, question: Callable[[int], Read | Lookup]) -> bytes:
        await self.settled.wait()
        if self.state is not PeerState.WARM or self._pipe is None:
            raise PullFailed(self.why_lost or f"{self.address} is gone")
        number = next(self._numbers)
        waiting = self._waiting[number] = _Waiting(trio.Event())
        self._pipe.post(question(number))
        try:
            await waiting.done.wait()
        finally:
            if self._waiting.pop(number, None) is not None:
                self.post(Withdraw(number=number))
        if waiting.data is None:
            raise PullFailed(self.why_lost or f"{self.address} has no such blocks")
        return waiting.data

    def post(self, notice: Pulled | Release | Renew | Withdraw) -> None:
        """Send a notice to a warm peer; to any other it is lost."""
        if self.state is PeerState.WARM and self._pipe is not None:
            self._pipe.post(notice)


class Peers:
    """Every prefill worker this one has to do with. Connections live in the nursery it is given."""

    def __init__(self, nursery: trio.Nursery, *, settings: WorkerSettings, dialer: Dialer, counters: Counters) -> None:
        self._nursery = nursery
        self._settings = settings
        self._dialer = dialer
        self._counters = counters
        self._peers: dict[tuple[str, str], Peer] = {}
        self._deferred: list[RemoteSource] = []

    def __repr__(self) -> str:
        return f"<Peers {list(self._peers.values())} {len(self._deferred)} deferred>"

    def _peer(self, address: str, *, engine_id: str) -> Peer:
        peer = self._peers.get((address, engine_id))
        if peer is None or peer.state is PeerState.LOST:
            peer = Peer(address, engine_id=engine_id, settings=self._settings, dialer=self._dialer)
            self._peers[address, engine_id] = peer
            self._nursery.start_soon(self._keep, peer, name=f"side channel at {address}")
        return peer

    async def _keep(self, peer: Peer) -> None:
        # Addresses come from requests: those that led nowhere must not pile up.
        key = (peer.address, peer.engine_id)
        try:
            await peer.run()
        finally:
            if self._peers.get(key) is peer:
                del self._peers[key]

    async def load(self, handoff: Handoff | Transfer, *, count: int) -> bytes:
        """The contents of the last `count` blocks of what was handed over, which ends it. Raises PullFailed."""
        if isinstance(handoff, Handoff):
            return await self._pull(handoff, count=count)
        return await self._receive(handoff, count=count)

    async def _pull(self, handoff: Handoff, *, count: int) -> bytes:
        """Read the blocks, then tell the prefill worker that it may free them all."""
        if handoff.tp_size != self._settings.tp_size:
            raise PullFailed(f"the handoff is for tp_size {handoff.tp_size}, this worker has {self._settings.tp_size}")
        peer = self._peer(handoff.address, engine_id=handoff.engine_id)
        data = await peer.read(handoff.blocks[-count:], request_id=handoff.request_id or "")
        self._check(data, count=count, address=handoff.address)
        if handoff.request_id is not None:
            peer.post(Pulled(request_id=handoff.request_id))
        return data

    async def _receive(self, transfer: Transfer, *, count: int) -> bytes:
        """Have a transfer pushed. The whole of it has a bound: nobody tells that an id will never be there."""
        if transfer.address is None:
            raise PullFailed("remote_bootstrap_addr is not http://host:port")
        with trio.move_on_after(self._settings.handshake_seconds):
            peer = self._peer(transfer.address, engine_id=transfer.engine_id)
            data = await peer.look_up(transfer.transfer_id, count=count)
            self._check(data, count=count, address=transfer.address)
            return data
        raise PullFailed(f"{transfer.address} has not sent {transfer.transfer_id} in time")

    def _check(self, data: bytes, *, count: int, address: str) -> None:
        if len(data) != count * self._settings.block_size * SLOT_BYTES:
            raise PullFailed(f"{address} sent {len(data)} bytes for {count} blocks")

    def release(self, source: RemoteSource) -> None:
        """Tell a prefill worker that a handoff will not be used: now if it is warm, else at a later occasion."""
        self._deferred.append(source)
        self._peer(source.address, engine_id=source.engine_id)
        self.send_deferred()

    def send_deferred(self) -> None:
        """Send what could not be sent before. Called by the engine's steps."""
        if not self._deferred:
            return
        later: list[RemoteSource] = []
        for source in self._deferred:
            peer = self._peers.get((source.address, source.engine_id))
            if peer is not None and peer.state is PeerState.COLD:
                later.append(source)
            elif peer is not None and peer.state is PeerState.WARM:
                peer.post(Release(request_id=source.request_id))
                self._counters.notices_sent += 1
        self._deferred = later

    def renew(self, sources: Iterable[RemoteSource]) -> None:
        """Ask for the leases of waiting handoffs to start again; makes the acquaintance of cold workers on the way."""
        by_peer: dict[Peer, list[str]] = {}
        for source in sources:
            peer = self._peer(source.address, engine_id=source.engine_id)
            by_peer.setdefault(peer, []).append(source.request_id)
        for peer, request_ids in by_peer.items():
            peer.post(Renew(request_ids=tuple(request_ids)))
