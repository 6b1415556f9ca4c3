"""Stubs whose calls the peer never acted on: which are made again, and which are told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from grpclib.const import Cardinality

from trio_router.http2 import frames
from trio_router.protocol.messages import HealthBase, HealthStub, ServiceHealthRequest, ServiceHealthResponse
from trio_router.rpc.channel import Channel, open_channel
from trio_router.rpc.memory import MemoryNetwork
from trio_router.rpc.metadata import Origin, RpcError
from trio_router.rpc.server import Server
from trio_router.rpc.servercall import ServerCall
from trio_router.rpc.transport import Transport

ADDRESS = "memory:7"


class Network(MemoryNetwork):
    """Notes what was dialed."""

    def __init__(self) -> None:
        super().__init__()
        self.dials: list[str] = []

    async def dial(self, address: str) -> Transport:
        self.dials.append(address)
        return await super().dial(address)


class Health(HealthBase):
    async def check(self, health_check_request: ServiceHealthRequest) -> ServiceHealthResponse:
        return ServiceHealthResponse(status=1)


class TestRefusedStubs:
    """A stub's call that the peer says it never acted on is made again: nobody else could know that this is safe."""

    @asynccontextmanager
    async def refusing(self, times: int, *, code: int = 7) -> AsyncIterator[tuple[HealthStub, Channel, list[float]]]:
        """Stubs to a peer that refuses its first calls."""
        network = Network()
        listener = network.listen(ADDRESS)
        seen: list[float] = []

        async def check(call: ServerCall) -> None:
            seen.append(call.deadline)
            if len(seen) <= times:
                call._link.connection.reset(call._stream, code)
                call._link.flush()
                return
            await call.receive()
            await call.send(b"\x08\x01")

        server = Server(raw={"/grpc.health.v1.Health/Check": check})
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, listener)
            async with open_channel(ADDRESS, dialer=network.dial) as channel:
                yield HealthStub(channel), channel, seen
            nursery.cancel_scope.cancel()

    async def test_it_is_made_once_more_within_its_own_time(self, autojump_clock):
        async with self.refusing(1) as (stub, _, seen):
            begin = trio.current_time()
            assert await stub.check(ServiceHealthRequest(), timeout=10) == ServiceHealthResponse(status=1)
            assert seen == [pytest.approx(begin + 10)] * 2

    async def test_only_once(self, autojump_clock):
        async with self.refusing(2) as (stub, _, seen):
            with pytest.raises(RpcError) as caught:
                await stub.check(ServiceHealthRequest())
            assert caught.value.origin is Origin.REFUSED
            assert len(seen) == 2

    async def test_not_when_the_peer_may_have_acted(self, autojump_clock):
        async with self.refusing(1, code=2) as (stub, _, seen):
            with pytest.raises(RpcError):
                await stub.check(ServiceHealthRequest())
            assert len(seen) == 1

    async def test_not_what_was_sent_in_pieces(self, autojump_clock):
        """The messages are not kept."""
        async with self.refusing(1) as (_, channel, seen):
            async with channel.request(
                "/grpc.health.v1.Health/Check", Cardinality.STREAM_UNARY, ServiceHealthRequest, ServiceHealthResponse
            ) as stream:
                await stream.send_message(ServiceHealthRequest())
                await stream.end()
                with pytest.raises(RpcError):
                    await stream.recv_message()
            assert len(seen) == 1

    async def test_it_goes_to_another_link_when_this_one_is_told_to_go(self, autojump_clock):
        network = Network()
        listener = network.listen(ADDRESS)
        async with trio.open_nursery() as nursery, open_channel(ADDRESS, dialer=network.dial) as channel:
            nursery.start_soon(channel.connect)
            old = await listener.accept()
            old.send_nowait(frames.settings({}))
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(Server([Health()]).serve, listener)
            old.send_nowait(frames.goaway(0, 0, b""))  # crosses with the call
            assert await HealthStub(channel).check(ServiceHealthRequest()) == ServiceHealthResponse(status=1)
            assert len(network.dials) == 2
            nursery.cancel_scope.cancel()
