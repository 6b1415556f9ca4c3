"""A server and a channel joined by memory links, on whatever clock the test uses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
import trio

from trio_router.http2.settings import Http2Settings
from trio_router.rpc.channel import Channel, ChannelSettings, open_channel
from trio_router.rpc.memory import MemoryNetwork
from trio_router.rpc.server import Server, ServerSettings

OpenPair = Callable[..., AbstractAsyncContextManager[tuple[Channel, Server]]]


@pytest.fixture
def open_pair() -> OpenPair:
    @asynccontextmanager
    async def pair(
        *services, raw=None, server_http2=None, client_http2=None, capacity_bytes=65_536
    ) -> AsyncIterator[tuple[Channel, Server]]:
        network = MemoryNetwork(capacity_bytes=capacity_bytes)
        listener = network.listen("memory:0")
        server = Server(services, raw=raw, settings=ServerSettings(http2=server_http2 or Http2Settings()))
        settings = ChannelSettings(http2=client_http2 or Http2Settings())
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, listener)
            async with open_channel(listener.address, dialer=network.dial, settings=settings) as channel:
                yield channel, server
            nursery.cancel_scope.cancel()

    return pair
