"""More connections than a server holds: those that nobody uses make room, and those that are used stay."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio
import trio.testing

from trio_router.errors import LinkError
from trio_router.http2 import Stream, frames
from trio_router.http2.connection import Connection
from trio_router.http2.streams import Role
from trio_router.rpc.call import ClientCall
from trio_router.rpc.channel import Channel, open_channel
from trio_router.rpc.memory import MemoryNetwork, MemoryTransport
from trio_router.rpc.server import HANDSHAKE_TIMEOUT, REQUEST_TIMEOUT, SILENCE_TOLERATED, Server, ServerSettings
from trio_router.rpc.servercall import ServerCall

ECHO = "/test.Service/Echo"
FLOOD = "/test.Service/Flood"


async def echo(call: ServerCall) -> None:
    while (message := await call.receive()) is not None:
        await call.send(message)


async def flood(call: ServerCall) -> None:
    """More than a client's window: the handler ends long before its answer has been read."""
    call.send_nowait([bytes(50_000)] * 4)


@dataclass
class Crowd:
    """A server and those who hold connections to it."""

    server: Server
    network: MemoryNetwork
    address: str
    stack: AsyncExitStack
    transports: list[MemoryTransport] = field(default_factory=list)

    async def arrive(self, count: int, *, greeting: bool) -> None:
        for _ in range(count):
            transport = await self.network.dial(self.address)
            self.transports.append(transport)
            if greeting:
                transport.send_nowait(Connection(Role.CLIENT).take_output())
        await trio.testing.wait_all_tasks_blocked()

    async def channel(self) -> Channel:
        return await self.stack.enter_async_context(open_channel(self.address, dialer=self.network.dial))

    def hung_up_on(self) -> list[int]:
        """Which of the connections have ended, in order of arrival."""
        ended = []
        for number, transport in enumerate(self.transports):
            while data := transport.recv_nowait(1 << 20):
                pass
            if data == b"":
                ended.append(number)
        return ended


@asynccontextmanager
async def serving(**settings) -> AsyncIterator[Crowd]:
    network = MemoryNetwork()
    listener = network.listen()
    server = Server(raw={ECHO: echo, FLOOD: flood}, settings=ServerSettings(**settings))
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, listener)
        async with AsyncExitStack() as stack:
            yield Crowd(server, network, listener.address, stack)
        nursery.cancel_scope.cancel()


async def echoes(channel: Channel) -> bool:
    return await reply(await channel.call(ECHO, b"fine")) == [b"fine"]


async def reply(call: ClientCall) -> list[bytes]:
    messages = []
    while (message := await call.receive()) is not None:
        messages.append(message)
    return messages


@pytest.mark.parametrize("greeting", [False, True], ids=["say nothing", "say no more than hello"])
async def test_as_many_silent_clients_as_there_may_be_lock_nobody_out(autojump_clock, greeting):
    """With the default settings."""
    async with serving() as crowd:
        await crowd.arrive(ServerSettings().max_connections, greeting=greeting)
        early = await crowd.channel()
        with pytest.raises(LinkError):
            await early.connect()  # they may be slow only
        await trio.sleep(SILENCE_TOLERATED)
        channels = [await crowd.channel() for _ in range(3)]
        assert [await echoes(channel) for channel in channels] == [True, True, True]
        assert crowd.hung_up_on() == [0, 1, 2]
        assert crowd.server._connections == ServerSettings().max_connections


async def test_those_who_say_nothing_are_gone_when_their_time_is_up(autojump_clock):
    async with serving() as crowd:
        await crowd.arrive(ServerSettings().max_connections, greeting=False)
        await trio.sleep(HANDSHAKE_TIMEOUT)
        await trio.testing.wait_all_tasks_blocked()
        assert crowd.server._connections == 0
        assert len(crowd.hung_up_on()) == ServerSettings().max_connections


async def test_who_has_not_said_hello_goes_before_those_who_have(autojump_clock):
    async with serving(max_connections=4) as crowd:
        await crowd.arrive(2, greeting=True)
        await crowd.arrive(2, greeting=False)
        await trio.sleep(SILENCE_TOLERATED)
        assert await echoes(await crowd.channel())
        assert crowd.hung_up_on() == [2]
        assert await echoes(await crowd.channel())
        assert crowd.hung_up_on() == [2, 3]
        assert await echoes(await crowd.channel())
        assert crowd.hung_up_on() == [0, 2, 3]


async def test_of_connections_without_a_call_the_one_that_had_none_for_longest_goes(autojump_clock):
    async with serving(max_connections=3) as crowd:
        channels = [await crowd.channel() for _ in range(3)]
        for channel in channels:
            assert await echoes(channel)
            await trio.sleep(1)
        assert await echoes(channels[0])
        await trio.sleep(SILENCE_TOLERATED)
        assert await echoes(await crowd.channel())
        assert [channel.state for channel in channels] == ["ready", "idle", "ready"]


async def test_who_had_to_go_and_was_only_quiet_dials_again_for_its_next_call(autojump_clock):
    async with serving(max_connections=1) as crowd:
        one, two = await crowd.channel(), await crowd.channel()
        for _ in range(3):
            for channel in (one, two):
                assert await echoes(channel)
                await trio.sleep(SILENCE_TOLERATED)


async def test_a_call_under_way_keeps_its_connection_however_quiet_it_is(autojump_clock):
    async with serving(max_connections=2) as crowd:
        channels = [await crowd.channel() for _ in range(2)]
        calls = [await channel.start(ECHO) for channel in channels]
        await trio.sleep(3600)
        late = await crowd.channel()
        with pytest.raises(LinkError):
            await late.connect()
        for call in calls:
            await call.send(b"still here", end=True)
            assert await reply(call) == [b"still here"]


async def test_an_answer_that_is_still_being_read_keeps_its_connection(autojump_clock):
    """Its handler has ended long ago."""
    async with serving(max_connections=2) as crowd:
        reader, idle = await crowd.channel(), await crowd.channel()
        call = await reader.call(FLOOD, b"")
        await trio.testing.wait_all_tasks_blocked()
        assert crowd.server.calls_in_flight == 0
        await trio.sleep(1)
        assert await echoes(idle)
        await trio.sleep(SILENCE_TOLERATED)
        assert await echoes(await crowd.channel())
        assert idle.state == "idle"
        assert await reply(call) == [bytes(50_000)] * 4


async def one_request(call: ServerCall) -> None:
    """What generated code does for a method with one request."""
    await call.send(await call.receive_request() or b"")


@asynccontextmanager
async def stalling_client() -> AsyncIterator[tuple[Connection, Stream, MemoryTransport, Server]]:
    """A connection to a server, with a call opened on it and nothing of its request sent."""
    network = MemoryNetwork()
    listener = network.listen("memory:0")
    server = Server(raw={ECHO: one_request})
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, listener)
        transport = await network.dial(listener.address)
        connection = Connection(Role.CLIENT)
        headers = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", ECHO.encode()), (b":authority", b"test")]
        stream = connection.open_stream([*headers, (b"content-type", b"application/grpc"), (b"te", b"trailers")])
        transport.send_nowait(connection.take_output())
        yield connection, stream, transport, server
        nursery.cancel_scope.cancel()


def data(stream: Stream, payload: bytes) -> bytes:
    return frames.data_header(stream.id, len(payload), end_stream=False) + payload


async def hear(connection: Connection, transport: MemoryTransport, stream: Stream) -> None:
    """Read until the call has ended or has an answer."""
    while stream.trailers is None and not stream.messages:
        await transport.wait_readable()
        connection.receive(transport.recv_nowait(65_536) or b"")
        transport.send_nowait(connection.take_output())


class TestOwedRequests:
    """A call that was opened and asks for nothing keeps a handler, and its connection's place."""

    @pytest.mark.parametrize(
        "sent", [b"", b"\0\0", b"\0\0\0\0\x09half"], ids=["nothing", "half a prefix", "half of it"]
    )
    async def test_a_client_that_stops_in_its_request_is_told_so(self, autojump_clock, sent):
        async with stalling_client() as (connection, stream, transport, server):
            if sent:
                transport.send_nowait(data(stream, sent))
            began = trio.current_time()
            await hear(connection, transport, stream)
            # It is looked at once in this time: what came in between buys as much again.
            assert REQUEST_TIMEOUT <= trio.current_time() - began <= 2 * REQUEST_TIMEOUT + 1
            assert (b"grpc-status", b"4") in stream.trailers
            assert server.calls_in_flight == 0

    async def test_one_that_is_only_slow_is_waited_for(self, autojump_clock):
        message = b"\0\0\0\0\x04slow"
        async with stalling_client() as (connection, stream, transport, _):
            for byte in message:
                await trio.sleep(REQUEST_TIMEOUT * 0.9)
                transport.send_nowait(data(stream, bytes([byte])))
            await hear(connection, transport, stream)
            assert stream.messages == [b"slow"]
