"""Messages around the 4 MiB that gRPC's other implementations stop at, and around the limit that is kept here."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from grpclib.const import Status

from trio_router.http2.settings import Http2Settings
from trio_router.rpc.memory import MemoryTransport
from trio_router.rpc.metadata import Origin, RpcError
from trio_router.rpc.servercall import ServerCall

UPLOAD = "/test.Service/Upload"
DOWNLOAD = "/test.Service/Download"
TICK = "/test.Service/Tick"
MIB = 1 << 20
LIMIT = 64 * MIB
# Of 251 bytes, so that no piece that a frame or a window cuts off begins as another one does.
PATTERN = bytes(range(251))


def message_of(size: int) -> bytes:
    return (PATTERN * (size // len(PATTERN) + 1))[:size]


def digest(message: bytes) -> bytes:
    return b"%d %s" % (len(message), hashlib.sha256(message).hexdigest().encode())


async def upload(call: ServerCall) -> None:
    await call.send(digest(await call.receive() or b""))


async def download(call: ServerCall) -> None:
    await call.send(message_of(int(await call.receive() or b"0")))


async def tick(call: ServerCall) -> None:
    while (message := await call.receive()) is not None:
        await call.send(message)


@pytest.fixture
def with_defaults(open_pair):
    """A channel with default settings; its pipes are larger than those of other tests, for quickness only."""

    @asynccontextmanager
    async def connect() -> AsyncIterator:
        assert Http2Settings().max_message_bytes == LIMIT
        raw = {UPLOAD: upload, DOWNLOAD: download, TICK: tick}
        async with open_pair(raw=raw, capacity_bytes=MIB) as (channel, _):
            yield channel

    return connect


async def only(call) -> bytes:
    """The one reply of a call that ends well."""
    reply = await call.receive()
    assert await call.receive() is None
    return reply


class TestWhatPasses:
    @pytest.mark.parametrize("size", [4 * MIB - 1, 4 * MIB, 4 * MIB + 1, LIMIT])
    async def test_case_g2_a_request(self, with_defaults, autojump_clock, size):
        message = message_of(size)
        async with with_defaults() as channel:
            assert await only(await channel.call(UPLOAD, message)) == digest(message)

    @pytest.mark.parametrize("size", [4 * MIB - 1, 4 * MIB, 4 * MIB + 1, LIMIT])
    async def test_case_g2_a_reply(self, with_defaults, autojump_clock, size):
        async with with_defaults() as channel:
            reply = await only(await channel.call(DOWNLOAD, b"%d" % size))
        assert digest(reply) == digest(message_of(size))


def too_much(path: str) -> bytes:
    """What to send to have a message of one byte over the limit go that way."""
    return bytes(LIMIT + 1) if path == UPLOAD else b"%d" % (LIMIT + 1)


class TestWhatDoesNot:
    @pytest.mark.parametrize(
        ("path", "origin"), [(UPLOAD, Origin.PEER), (DOWNLOAD, Origin.LOCAL)], ids=["a request", "a reply"]
    )
    async def test_case_g2_a_byte_over_the_limit_names_it_and_harms_no_other_stream(
        self, with_defaults, autojump_clock, path, origin
    ):
        async with with_defaults() as channel:
            beside = await channel.start(TICK)
            await beside.send(b"before")
            assert await beside.receive() == b"before"
            call = await channel.call(path, too_much(path))
            with pytest.raises(RpcError, match=rf"{LIMIT + 1} bytes is over max_message_bytes \({LIMIT}\)") as caught:
                await call.receive()
            assert (caught.value.status, caught.value.origin) == (Status.RESOURCE_EXHAUSTED, origin)
            await beside.send(b"after")
            assert await beside.receive() == b"after"
            beside.end_sending()
            assert await beside.receive() is None
            again = await channel.call(UPLOAD, b"fine")
            assert await only(again) == digest(b"fine")
            (link,) = channel.links
            assert link.connection.open_streams == 0

    async def test_case_g2_what_is_refused_is_not_carried_over_first(self, with_defaults, autojump_clock, monkeypatch):
        """The length stands in front of a message: the rest of it need not come."""
        carried = 0
        send = MemoryTransport.send_nowait

        def counted(self, data):
            nonlocal carried
            taken = send(self, data)
            carried += taken
            return taken

        monkeypatch.setattr(MemoryTransport, "send_nowait", counted)
        async with with_defaults() as channel:
            for path in (UPLOAD, DOWNLOAD):
                call = await channel.call(path, too_much(path))
                with pytest.raises(RpcError):
                    await call.receive()
            await trio.sleep(1)
        assert carried < 4 * MIB
