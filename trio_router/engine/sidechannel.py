"""The side channel between workers: its frames, how they travel, and the prefill worker's end of it.

A frame is a four-byte big-endian length and a msgpack array. The side that pulls knows which blocks it wants and nobody
checks whether they still hold what was promised: as with RDMA, the memory is read as it is now. The side that looks a
transfer up is sent its state when there is one. Notices are about handoffs by request id; they need no answer.
"""

from __future__ import annotations

import logging
from typing import Final, Protocol

import msgspec
import trio

from ..errors import LinkError, ProtocolViolation
from ..rpc.transport import Listener, Transport

MAX_FRAME_BYTES: Final = 64 * 1024 * 1024
"""A context of a million tokens is 8 MiB; anything near this is not a frame of ours."""

_RECV_BYTES: Final = 262_144
_LENGTH_BYTES: Final = 4

_log: Final = logging.getLogger(__name__)


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """First frame of the worker that dials. All that follows is meant for the engine, or rank, that it names."""

    engine_id: str
    tp_size: int


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The answer to Hello: who really is here, and the shape of its memory."""

    engine_id: str
    tp_size: int
    block_bytes: int


class Read(msgspec.Struct, frozen=True, array_like=True, tag="read"):
    """Asks for the contents of blocks, in this order. `number` ties the answer to it."""

    number: int
    blocks: tuple[int, ...]
    request_id: str
    """The handoff they belong to."""


class Lookup(msgspec.Struct, frozen=True, array_like=True, tag="lookup"):
    """Asks for a transfer to be pushed: the last `count` blocks of it. Answered when its prefill has ended."""

    number: int
    transfer_id: str
    count: int


class Withdraw(msgspec.Struct, frozen=True, array_like=True, tag="withdraw"):
    """A Lookup is not waited for any more."""

    number: int


class Contents(msgspec.Struct, frozen=True, array_like=True, tag="contents"):
    """The answer to Read or Lookup; None when there are no such blocks."""

    number: int
    data: bytes | None


class Pulled(msgspec.Struct, frozen=True, array_like=True, tag="pulled"):
    """A handoff has been read completely: its blocks may be freed."""

    request_id: str


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """A handoff will not be read: its blocks may be freed."""

    request_id: str


class Renew(msgspec.Struct, frozen=True, array_like=True, tag="renew"):
    """These handoffs are still wanted: their leases start again."""

    request_ids: tuple[str, ...]


Frame = Hello | Welcome | Read | Lookup | Withdraw | Contents | Pulled | Release | Renew

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Frame)


class FramePipe:
    """Frames over a transport. `post` never waits; whoever owns the pipe runs `write` beside its reading."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._writer = trio.lowlevel.ParkingLot()
        self._waiting_for_room = trio.lowlevel.ParkingLot()

    def __repr__(self) -> str:
        return f"<FramePipe {self._transport.peer} {len(self._outgoing)} bytes to send>"

    def post(self, frame: Frame) -> None:
        """Queue a frame. Whether it arrives is not known; a broken pipe shows in `write` and `receive`."""
        body = _encoder.encode(frame)
        self._outgoing += len(body).to_bytes(_LENGTH_BYTES, "big")
        self._outgoing += body
        self._writer.unpark_all()

    async def write(self) -> None:
        """Send what is posted, for ever. Raises LinkError when the transport breaks."""
        while True:
            while self._outgoing:
                sent = self._transport.send_nowait(self._outgoing)
                del self._outgoing[:sent]
                if not sent:
                    await self._transport.wait_writable()
            self._waiting_for_room.unpark_all()
            await self._writer.park()

    async def flushed(self) -> None:
        """Wait until everything posted has been handed to the transport."""
        while self._outgoing:
            await self._waiting_for_room.park()

    async def receive(self) -> Frame:
        """The next frame. Raises LinkError at the end, ProtocolViolation for bytes that are no frame."""
        while True:
            frame = self._take()
            if frame is not None:
                return frame
            await self._transport.wait_readable()
            data = self._transport.recv_nowait(_RECV_BYTES)
            if data == b"":
                raise LinkError(f"{self._transport.peer} closed the side channel")
            if data is not None:
                self._incoming += data

    def _take(self) -> Frame | None:
        incoming = self._incoming
        if len(incoming) < _LENGTH_BYTES:
            return None
        end = _LENGTH_BYTES + int.from_bytes(incoming[:_LENGTH_BYTES], "big")
        if end > MAX_FRAME_BYTES:
            raise ProtocolViolation(f"{self._transport.peer} announces a side-channel frame of {end} bytes")
        if len(incoming) < end:
            return None
        body = bytes(incoming[_LENGTH_BYTES:end])
        del incoming[:end]
        try:
            return _decoder.decode(body)
        except msgspec.MsgspecError as exc:
            raise ProtocolViolation(
                f"{self._transport.peer} sent a side-channel frame that cannot be read: {exc}"
            ) from exc

    def close(self) -> None:
        self._transport.close()


class Caller:
    """A worker that has dialled this one: whom it asks for, and the way back to it."""

    __slots__ = ("_pipe", "engine_id")

    def __init__(self, pipe: FramePipe) -> None:
        self._pipe = pipe
        self.engine_id = ""
        """The engine, or rank of it, that it named in its Hello."""

    def post(self, frame: Welcome | Contents) -> None:
        """Queue an answer; it is lost when the caller has gone."""
        self._pipe.post(frame)


class Exporter(Protocol):
    """What the prefill end needs of its engine. Called synchronously, between steps."""

    def welcome(self, *, caller: Caller) -> Welcome:
        """Who this is."""

    def read(self, read: Read, *, caller: Caller) -> bytes | None:
        """What the blocks hold now; None when there are no such blocks."""

    def look_up(self, lookup: Lookup, *, caller: Caller) -> None:
        """A transfer is wanted: now or, when its prefill has not ended, then."""

    def withdraw(self, number: int, *, caller: Caller) -> None:
        """A lookup of this caller's is not waited for any more."""

    def hung_up(self, caller: Caller) -> None:
        """The caller has gone, and waits for nothing."""

    def pulled(self, request_id: str, *, caller: Caller) -> None:
        """A handoff has been read."""

    def released(self, request_id: str, *, caller: Caller) -> None:
        """A handoff will not be read."""

    def renewed(self, request_ids: tuple[str, ...], *, caller: Caller) -> None:
        """Handoffs are still wanted."""


async def serve_side_channel(listener: Listener, *, exporter: Exporter) -> None:
    """Answer other workers until cancelled. One peer's broken connection or nonsense costs that peer only."""
    async with trio.open_nursery() as peers:
        while True:
            try:
                transport = await listener.accept()
            except LinkError:
                return
            peers.start_soon(_serve_peer, transport, exporter, name=f"side channel to {transport.peer}")


async def _serve_peer(transport: Transport, exporter: Exporter) -> None:
    pipe = FramePipe(transport)
    caller = Caller(pipe)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pipe.write)
            while True:
                _answer(await pipe.receive(), caller=caller, exporter=exporter)
                # A peer that does not read its answers gets no further ones to pile up here.
                await pipe.flushed()
    except* LinkError as group:
        _log.debug("side channel of %s: %s", transport.peer, group.exceptions[0])
    except* ProtocolViolation as group:
        _log.warning("side channel of %s: %s", transport.peer, group.exceptions[0])
    finally:
        exporter.hung_up(caller)
        pipe.close()


def _answer(frame: Frame, *, caller: Caller, exporter: Exporter) -> None:
    match frame:
        case Hello(engine_id=engine_id):
            caller.engine_id = engine_id
            caller.post(exporter.welcome(caller=caller))
        case Read(number=number):
            caller.post(Contents(number=number, data=exporter.read(frame, caller=caller)))
        case Lookup():
            exporter.look_up(frame, caller=caller)
        case Withdraw(number=number):
            exporter.withdraw(number, caller=caller)
        case Pulled(request_id=request_id):
            exporter.pulled(request_id, caller=caller)
        case Release(request_id=request_id):
            exporter.released(request_id, caller=caller)
        case Renew(request_ids=request_ids):
            exporter.renewed(request_ids, caller=caller)
        case Welcome() | Contents():
            raise ProtocolViolation(f"a {type(frame).__name__} came to a worker that asked for nothing")
