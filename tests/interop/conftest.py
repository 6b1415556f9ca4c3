"""Both directions against other implementations: real sockets on loopback, ports chosen by the system, real clocks.

grpcio is gRPC's own C core. It blocks, so everything it does runs in threads; each of its calls carries a timeout, so
no thread outlives its test. grpclib is Python on h2 and asyncio; its loop runs in a thread of its own, and what a test
asks of it is cancelled when the test ends. The foreign side handles plain bytes: what the messages mean is judged
elsewhere.

What neither would ever say is said by scripts on h2, over memory links and on virtual time.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from types import MappingProxyType
from typing import Any, TypeVar

# Connections that fail on purpose are not news; read by grpcio when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
import grpclib.client
import grpclib.server
import h2.config
import h2.connection
import h2.events
import pytest
import trio
from grpclib.const import Cardinality, Handler, Status
from grpclib.encoding.base import CodecBase, StatusDetailsCodecBase
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, HeadersFrame, RstStreamFrame

from trio_router.errors import LinkError
from trio_router.rpc.channel import Channel, open_channel
from trio_router.rpc.memory import MemoryListener, MemoryNetwork
from trio_router.rpc.server import Server
from trio_router.rpc.transport import Transport, open_tcp_listener

PATIENCE = 30.0
"""Seconds after which a test is stuck; no test waits for it."""

STUCK = 1e6
"""Virtual seconds after which nothing can happen any more."""

Result = TypeVar("Result")
Event = TypeVar("Event", bound=h2.events.Event)
Headers = list[tuple[bytes, bytes]]

NONE: Mapping[str, object] = MappingProxyType({})
UNLIMITED = {"grpc.max_receive_message_length": -1, "grpc.max_send_message_length": -1}


class ForeignClient:
    """A grpcio channel. Every method blocks: use it in a thread."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel

    def unary(self, path: str, message: bytes = b"", *, timeout: float = PATIENCE, **options) -> bytes:
        return self.channel.unary_unary(path)(message, timeout=timeout, **options)

    def stream(self, path: str, message: bytes = b"", *, timeout: float = PATIENCE, **options):
        """The running call: an iterator over replies that can be cancelled and asked for its end."""
        return self.channel.unary_stream(path)(message, timeout=timeout, **options)


class ForeignHandlers(grpc.GenericRpcHandler):
    """Serves behaviours by path and cardinality."""

    def __init__(self, unary: dict[str, Callable], stream: dict[str, Callable]) -> None:
        self._handlers = {path: grpc.unary_unary_rpc_method_handler(f) for path, f in unary.items()}
        self._handlers |= {path: grpc.unary_stream_rpc_method_handler(f) for path, f in stream.items()}

    def service(self, handler_call_details):
        return self._handlers.get(handler_call_details.method)


@pytest.fixture
def open_server():
    """Our server on a port of its own, and grpcio's channel to it."""

    @contextmanager
    def foreign_client(address: str, options) -> Iterator[ForeignClient]:
        with grpc.insecure_channel(address, options=list((UNLIMITED | options).items())) as channel:
            yield ForeignClient(channel)

    @asynccontextmanager
    async def pair(*services, raw=None, options=NONE, **settings) -> AsyncIterator[tuple[ForeignClient, Server]]:
        listener = await open_tcp_listener("127.0.0.1", port=0)
        server = Server(services, raw=raw, **settings)
        try:
            with trio.fail_after(PATIENCE):
                async with trio.open_nursery() as nursery:
                    await nursery.start(server.serve, listener)
                    with foreign_client(listener.address, options) as client:
                        yield client, server
                    nursery.cancel_scope.cancel()
        finally:
            listener.close()

    return pair


@pytest.fixture
def open_foreign_server():
    """grpcio's server on a port of its own, and our channel to it."""

    @contextmanager
    def foreign_server(unary, stream, options, threads: int) -> Iterator[tuple[str, grpc.Server]]:
        with ThreadPoolExecutor(threads) as pool:
            handlers = [ForeignHandlers(unary, stream)]
            server = grpc.server(pool, handlers=handlers, options=list((UNLIMITED | options).items()))
            port = server.add_insecure_port("127.0.0.1:0")
            server.start()
            try:
                yield f"127.0.0.1:{port}", server
            finally:
                server.stop(0).wait(PATIENCE)

    @asynccontextmanager
    async def pair(
        *, unary=None, stream=None, options=NONE, threads=8, **settings
    ) -> AsyncIterator[tuple[Channel, grpc.Server]]:
        with foreign_server(unary or {}, stream or {}, options, threads) as (address, server):
            with trio.fail_after(PATIENCE):
                async with open_channel(address, **settings) as channel:
                    yield channel, server

    return pair


class ForeignLoop:
    """An asyncio loop in a thread of its own. `at_end` is called there before the loop ends."""

    def __init__(self) -> None:
        self.at_end: list[Callable[[], object]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="asyncio")
        self._thread.start()

    async def run(self, function: Callable[..., Coroutine[Any, Any, Result]], *args: Any) -> Result:
        """Call an asyncio function over there and wait for it here; leaving early cancels it."""
        done = trio.Event()
        token = trio.lowlevel.current_trio_token()
        future = asyncio.run_coroutine_threadsafe(function(*args), self._loop)
        future.add_done_callback(lambda _: token.run_sync_soon(done.set))
        try:
            await done.wait()
        finally:
            future.cancel()  # does nothing once it has ended
        return future.result()

    def close(self) -> None:
        """End whatever still runs over there, then the thread."""
        asyncio.run_coroutine_threadsafe(self._finish(), self._loop).result(PATIENCE)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()

    async def _finish(self) -> None:
        for function in self.at_end:
            function()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # a transport that was closed lets go of its socket in the loop's next round


class RawMessages(CodecBase):
    """Messages as they are on the wire."""

    __content_subtype__ = "proto"

    def encode(self, message: bytes, message_type: object) -> bytes:
        return message

    def decode(self, data: bytes, message_type: object) -> bytes:
        return data


class RawDetails(StatusDetailsCodecBase):
    """Status details as they are on the wire."""

    def encode(self, status: Status, message: str | None, details: bytes) -> bytes:
        return details

    def decode(self, status: Status, message: str | None, data: bytes) -> bytes:
        return data


class GrpclibHandlers:
    """Serves grpclib's handlers by path; they may take and give as many messages as they like."""

    def __init__(self, handlers: dict[str, Callable]) -> None:
        self._handlers = handlers

    def __mapping__(self) -> dict[str, Handler]:
        return {path: Handler(f, Cardinality.STREAM_STREAM, bytes, bytes) for path, f in self._handlers.items()}


class GrpclibServer(grpclib.server.Server):
    """Knows its connections, to drop them as the end of its process would."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._protocols: list[grpclib.protocol.H2Protocol] = []

    def _protocol_factory(self) -> grpclib.protocol.H2Protocol:
        self._protocols.append(super()._protocol_factory())
        return self._protocols[-1]

    def kill(self) -> None:
        self.close()
        for protocol in self._protocols:
            protocol.processor.close("killed by a test")


@pytest.fixture
def foreign_loop() -> Iterator[ForeignLoop]:
    loop = ForeignLoop()
    yield loop
    loop.close()


@pytest.fixture
def open_server_for_grpclib(foreign_loop):
    """Our server on a port of its own, and `ask`, which runs a function of a grpclib channel to it."""

    async def connect(address: str, config, codec) -> grpclib.client.Channel:
        host, port = address.split(":")
        channel = grpclib.client.Channel(host, int(port), config=config, codec=codec, status_details_codec=RawDetails())
        foreign_loop.at_end.append(channel.close)
        return channel

    @asynccontextmanager
    async def pair(
        *services, raw=None, config=None, codec=None, **settings
    ) -> AsyncIterator[tuple[Callable[..., Awaitable[Any]], Server]]:
        listener = await open_tcp_listener("127.0.0.1", port=0)
        server = Server(services, raw=raw, **settings)
        try:
            with trio.fail_after(PATIENCE):
                async with trio.open_nursery() as nursery:
                    await nursery.start(server.serve, listener)
                    channel = await foreign_loop.run(connect, listener.address, config, codec or RawMessages())

                    async def ask(function: Callable[..., Coroutine[Any, Any, Result]], *args: Any) -> Result:
                        return await foreign_loop.run(function, channel, *args)

                    yield ask, server
                    nursery.cancel_scope.cancel()
        finally:
            listener.close()

    return pair


@pytest.fixture
def open_grpclib_server(foreign_loop):
    """grpclib's server on a port of its own, and our channel to it."""

    async def serve(services, config, codec) -> tuple[str, GrpclibServer]:
        server = GrpclibServer(services, config=config, codec=codec, status_details_codec=RawDetails())
        # Says which protocol it is: asyncio turns off Nagle's delay only for a socket that does.
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        sock.bind(("127.0.0.1", 0))
        await server.start(sock=sock)
        foreign_loop.at_end.append(server.kill)
        return f"127.0.0.1:{sock.getsockname()[1]}", server

    @asynccontextmanager
    async def pair(
        *services, raw=None, config=None, codec=None, **settings
    ) -> AsyncIterator[tuple[Channel, GrpclibServer]]:
        services = [*services, GrpclibHandlers(raw or {})]
        with trio.fail_after(PATIENCE):
            address, server = await foreign_loop.run(serve, services, config, codec or RawMessages())
            async with open_channel(address, **settings) as channel:
                yield channel, server

    return pair


class H2Peer:
    """One end of a memory link. h2 keeps its connection and judges what comes; what goes out need not be legal."""

    def __init__(self, transport: Transport, *, client: bool) -> None:
        config = h2.config.H2Configuration(
            client_side=client,
            header_encoding=None,
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
        )
        self.h2 = h2.connection.H2Connection(config)
        self.transport = transport
        self._events: list[h2.events.Event] = []
        self.h2.initiate_connection()
        self.flush()

    async def next(self, *kinds: type[Event]) -> Event:
        """The first event of these kinds that has not been asked for; others wait until they are."""
        while True:
            for event in self._events:
                if isinstance(event, kinds):
                    self._events.remove(event)
                    return event
            await self.transport.wait_readable()
            data = self.transport.recv_nowait(1 << 20)
            assert data, f"the connection ended before {kinds}"
            self._events += self.h2.receive_data(data)
            self.flush()

    async def ended(self) -> bool:
        """Read on to the end of the connection, whatever comes."""
        while self.transport.recv_nowait(1 << 20) != b"":
            await self.transport.wait_readable()
        return True

    def flush(self) -> None:
        data = self.h2.data_to_send()
        with suppress(LinkError):  # who has hung up may still have been saying something
            assert self.transport.send_nowait(data) == len(data), "the test says more than the pipe holds"

    def write(self, *frames: Frame) -> None:
        """Frames as they are, unknown to h2."""
        self.flush()
        for frame in frames:
            self.transport.send_nowait(frame.serialize())

    def headers(self, stream_id: int, headers: Headers, *, end: bool = False) -> None:
        flags = ["END_HEADERS", "END_STREAM"] if end else ["END_HEADERS"]
        self.write(HeadersFrame(stream_id, self.h2.encoder.encode(headers), flags=flags))

    def data(self, stream_id: int, data: bytes, *, end: bool = False, padding: int = 0) -> None:
        flags = ["END_STREAM"] * end + ["PADDED"] * bool(padding)
        self.write(DataFrame(stream_id, data, pad_length=padding, flags=flags))

    def reset(self, stream_id: int, code: int) -> None:
        self.write(RstStreamFrame(stream_id, error_code=code))

    def go_away(self, last_stream_id: int, *, code: int = 0, debug: bytes = b"") -> None:
        self.write(GoAwayFrame(0, last_stream_id=last_stream_id, error_code=code, additional_data=debug))


@pytest.fixture
def open_h2_server():
    """Our channel, the far end of its first connection, and the listener that takes further ones."""

    @asynccontextmanager
    async def pair(**settings) -> AsyncIterator[tuple[Channel, H2Peer, MemoryListener]]:
        network = MemoryNetwork(capacity_bytes=1 << 20)
        listener = network.listen()
        with trio.fail_after(STUCK):
            async with open_channel(listener.address, dialer=network.dial, **settings) as channel:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(channel.connect)
                    peer = H2Peer(await listener.accept(), client=False)
                yield channel, peer, listener

    return pair


@pytest.fixture
def h2_peer() -> type[H2Peer]:
    return H2Peer


@pytest.fixture
def open_server_for_h2():
    """Our server, and the near end of a connection to it."""

    @asynccontextmanager
    async def pair(*services, raw=None, **settings) -> AsyncIterator[tuple[H2Peer, Server]]:
        network = MemoryNetwork(capacity_bytes=1 << 20)
        listener = network.listen()
        server = Server(services, raw=raw, **settings)
        with trio.fail_after(STUCK):
            async with trio.open_nursery() as nursery:
                await nursery.start(server.serve, listener)
                yield H2Peer(await network.dial(listener.address), client=True), server
                nursery.cancel_scope.cancel()

    return pair
