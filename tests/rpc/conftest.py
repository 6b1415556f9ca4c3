"""Servers, channels and scripted peers joined by memory links, on whatever clock the test uses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import pytest
import trio

from trio_router.http2.connection import Connection
from trio_router.http2.settings import Http2Settings
from trio_router.http2.streams import Role, Stream
from trio_router.rpc.channel import Channel, ChannelSettings, open_channel
from trio_router.rpc.memory import MemoryNetwork
from trio_router.rpc.metadata import Headers, request_headers, response_headers
from trio_router.rpc.server import Server, ServerSettings
from trio_router.rpc.tls import ClientTls, ServerTls
from trio_router.rpc.transport import Transport

STUCK = 1e6
"""Virtual seconds after which nothing can happen any more: a test that hangs fails at once instead."""

OpenPair = Callable[..., AbstractAsyncContextManager[tuple[Channel, Server]]]


@pytest.fixture
def server_tls(server_pair) -> ServerTls:
    return ServerTls(**server_pair._asdict())


@pytest.fixture
def client_tls(authority) -> ClientTls:
    return ClientTls(ca_file=authority.ca_file)


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
        with trio.fail_after(STUCK):
            async with trio.open_nursery() as nursery:
                await nursery.start(server.serve, listener)
                async with open_channel(listener.address, dialer=network.dial, settings=settings) as channel:
                    yield channel, server
                nursery.cancel_scope.cancel()

    return pair


@dataclass
class Peer:
    """The other end of a connection, doing what a test says: HTTP/2 by the sans-IO core, or any bytes at all."""

    transport: Transport
    connection: Connection

    def flush(self) -> None:
        while self.connection.has_output:
            self.write(self.connection.take_output())

    def write(self, data: bytes) -> None:
        assert self.transport.send_nowait(data) == len(data), "the test says more than the pipe holds"

    def close(self) -> None:
        self.transport.close()

    async def read(self) -> list[Stream]:
        """Whatever comes next; no streams at the end of the connection."""
        await self.transport.wait_readable()
        touched = self.connection.receive(self.transport.recv_nowait(1 << 20) or b"")
        self.flush()
        return touched

    async def until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            await self.read()

    async def until_closed(self) -> None:
        """Go on until the other end hangs up."""
        while (data := self.transport.recv_nowait(1 << 20)) != b"":
            self.connection.receive(data or b"")
            self.flush()
            await self.transport.wait_readable()

    async def request(self) -> Stream:
        """The next request, as far as it has come."""
        while True:
            for stream in await self.read():
                if stream.user is None:
                    stream.user = self
                    return stream

    def respond(self, stream: Stream, *messages: bytes, headers: Headers | None = None) -> None:
        """Response headers and messages; no end."""
        self.connection.send_headers(stream, response_headers() if headers is None else headers)
        self.connection.send_messages(stream, list(messages))
        self.flush()

    def end(self, stream: Stream, trailers: Headers) -> None:
        self.connection.send_headers(stream, trailers, end_stream=True)
        self.flush()

    def reset(self, stream: Stream, code: int) -> None:
        self.connection.reset(stream, code)
        self.flush()

    def call(self, path: str, *messages: bytes, end: bool = True, headers: Headers | None = None) -> Stream:
        """Open a request as a client would."""
        stream = self.connection.open_stream(headers or request_headers(path, authority="test"))
        self.connection.send_messages(stream, list(messages), end_stream=end)
        self.flush()
        return stream


@pytest.fixture
def scripted_server() -> Callable[..., AbstractAsyncContextManager[tuple[Channel, Peer]]]:
    """A channel, and the far end of its first connection."""

    @asynccontextmanager
    async def pair(*, http2=None, client_http2=None, **settings) -> AsyncIterator[tuple[Channel, Peer]]:
        network = MemoryNetwork(capacity_bytes=1 << 20)
        listener = network.listen()
        channel_settings = ChannelSettings(http2=client_http2 or Http2Settings(), **settings)
        with trio.fail_after(STUCK):
            async with open_channel(listener.address, dialer=network.dial, settings=channel_settings) as channel:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(channel.connect)
                    peer = Peer(await listener.accept(), Connection(Role.SERVER, settings=http2 or Http2Settings()))
                    peer.flush()
                yield channel, peer

    return pair


@pytest.fixture
def scripted_client() -> Callable[..., AbstractAsyncContextManager[tuple[Server, Peer]]]:
    """A server, and the near end of a connection to it."""

    @asynccontextmanager
    async def pair(
        *services, raw=None, http2=None, client_http2=None, capacity_bytes=1 << 20
    ) -> AsyncIterator[tuple[Server, Peer]]:
        network = MemoryNetwork(capacity_bytes=capacity_bytes)
        listener = network.listen()
        server = Server(services, raw=raw, settings=ServerSettings(http2=http2 or Http2Settings()))
        with trio.fail_after(STUCK):
            async with trio.open_nursery() as nursery:
                await nursery.start(server.serve, listener)
                transport = await network.dial(listener.address)
                peer = Peer(transport, Connection(Role.CLIENT, settings=client_http2 or Http2Settings()))
                peer.flush()
                await peer.read()
                yield server, peer
                nursery.cancel_scope.cancel()

    return pair
