"""Both directions against gRPC's own C core: real sockets on loopback, ports chosen by the system, real clocks.

grpcio blocks, so everything it does runs in threads; each of its calls carries a timeout, so no thread outlives its
test. The foreign side handles plain bytes: what the messages mean is judged elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from types import MappingProxyType

# Connections that fail on purpose are not news; read by grpcio when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
import pytest
import trio

from trio_router.rpc.channel import Channel, open_channel
from trio_router.rpc.server import Server
from trio_router.rpc.transport import open_tcp_listener

PATIENCE = 30.0
"""Seconds after which a test is stuck; no test waits for it."""

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
