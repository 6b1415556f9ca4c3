"""Pings on connections, on virtual time: who is found dead by them, who is told that they are too many, and what that
means for the calls that are under way.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from grpclib.const import Status

from trio_router.http2 import frames
from trio_router.http2.connection import Connection
from trio_router.http2.frames import ErrorCode
from trio_router.http2.streams import Role
from trio_router.rpc.channel import Channel, ChannelSettings, ChannelState, open_channel
from trio_router.rpc.keepalive import KeepaliveSettings, PingLimits
from trio_router.rpc.memory import MemoryNetwork
from trio_router.rpc.metadata import Origin, RpcError, request_headers, response_headers, status_trailers
from trio_router.rpc.server import Server, ServerSettings
from trio_router.rpc.servercall import ServerCall

CALL = "/test.Service/Call"
SILENT = "/test.Service/Silent"
OK = status_trailers(Status.OK, None)
RUDE = KeepaliveSettings(slow_interval=30.0)  # every 30 s for ever, as other clients do
CORE_DEFAULTS = PingLimits(interval=300.0, strikes=2)
OF_WORKERS = PingLimits(interval=10.0, strikes=2)


async def echo(call: ServerCall) -> None:
    while (message := await call.receive()) is not None:
        await call.send(message)


async def prefill(call: ServerCall) -> None:
    """Says nothing for as long as its request says."""
    await trio.sleep(float(await call.receive() or b"0"))
    await call.send(b"done")


@asynccontextmanager
async def open_pinging(
    *, limits: PingLimits = OF_WORKERS, keepalive: KeepaliveSettings | None = None
) -> AsyncIterator[tuple[Channel, Server]]:
    network = MemoryNetwork()
    listener = network.listen()
    server = Server(raw={CALL: echo, SILENT: prefill}, settings=ServerSettings(ping_limits=limits))
    settings = ChannelSettings(keepalive=keepalive or KeepaliveSettings())
    with trio.fail_after(1e5):
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, listener)
            async with open_channel(listener.address, dialer=network.dial, settings=settings) as channel:
                yield channel, server
            nursery.cancel_scope.cancel()


async def ended(call) -> RpcError:
    try:
        while await call.receive() is not None:
            pass
    except RpcError as exc:
        return exc
    raise AssertionError("the call ended well")


class TestSilence:
    @pytest.mark.parametrize("limits", [OF_WORKERS, CORE_DEFAULTS], ids=["workers", "defaults of gRPC's core"])
    async def test_case_g1_a_prefill_that_is_silent_for_400_s_survives(self, autojump_clock, limits):
        async with open_pinging(limits=limits) as (channel, _):
            call = await channel.call(SILENT, b"400")
            assert [await call.receive(), await call.receive()] == [b"done", None]
            assert trio.current_time() >= 400

    async def test_case_g1_pings_that_are_too_many_end_a_stream_and_are_halved(self, autojump_clock):
        """What other clients do to servers left at the defaults of gRPC's core."""
        ends = []
        async with open_pinging(limits=CORE_DEFAULTS, keepalive=RUDE) as (channel, _):
            for _ in range(4):
                begin = trio.current_time()
                error = await ended(await channel.call(SILENT, b"100000"))
                ends.append(trio.current_time() - begin)
                assert (error.status, error.origin) == (Status.UNAVAILABLE, Origin.TRANSPORT)
                assert "too_many_pings" in error.message
            # Five minutes apart is as seldom as this server wants them.
            call = await channel.call(SILENT, b"5000")
            assert [await call.receive(), await call.receive()] == [b"done", None]
        assert ends == [pytest.approx(seconds) for seconds in (130, 260, 520, 1040)]

    async def test_a_dead_peer_is_found_with_or_without_calls(self, scripted_server, autojump_clock):
        async with scripted_server() as (channel, _):
            (link,) = channel.links
            begin = trio.current_time()
            call = await channel.call(CALL, b"")
            error = await ended(call)
            assert trio.current_time() - begin == pytest.approx(50)  # 10 s to the first look, 30 s of silence, 10 s
            assert (error.status, error.origin) == (Status.UNAVAILABLE, Origin.TRANSPORT)
            assert "did not answer a ping within 10 s" in error.message
            assert str(link.closed_because) in error.message
        async with scripted_server() as (channel, _):
            (link,) = channel.links
            await trio.sleep(51)
            assert "did not answer a ping" in str(link.closed_because)
            assert channel.state is ChannelState.IDLE

    async def test_only_in_use_when_so_wanted(self, scripted_server, autojump_clock):
        async with scripted_server(keepalive=KeepaliveSettings(while_idle=False)) as (channel, _):
            (link,) = channel.links
            await trio.sleep(1000)
            assert link.usable
            error = await ended(await channel.call(CALL, b""))
            assert "did not answer a ping" in error.message

    async def test_or_not_at_all(self, scripted_server, autojump_clock):
        async with scripted_server(keepalive=None) as (channel, peer):
            call = await channel.call(CALL, b"")
            stream = await peer.request()
            await trio.sleep(50_000)
            peer.respond(stream, b"late")
            assert await call.receive() == b"late"
            assert peer.connection.pings_received == 0

    async def test_a_peer_that_is_slow_to_answer_but_talks_is_alive(self, scripted_server, autojump_clock):
        async with scripted_server() as (channel, peer):
            call = await channel.call(CALL, b"")
            stream = await peer.request()
            await trio.sleep(35)  # nobody has read the ping
            peer.connection.send_headers(stream, response_headers())
            peer.write(peer.connection.take_output())
            await trio.sleep(20)
            peer.end(stream, OK)
            assert await call.receive() is None


class TestReplacing:
    async def test_a_dead_link_is_replaced_and_the_calls_of_another_go_on(self, autojump_clock):
        """Two links, since each takes four bulk calls; the first of them freezes."""
        network = MemoryNetwork()
        listener = network.listen()
        async with open_channel(listener.address, dialer=network.dial) as channel, trio.open_nursery() as nursery:
            talking: list[Connection] = []

            async def freeze(*, task_status) -> None:
                transport = await listener.accept()
                transport.send_nowait(frames.settings({3: 8}))
                task_status.started()
                await trio.sleep_forever()

            async def talk(*, task_status=trio.TASK_STATUS_IGNORED) -> None:
                transport = await listener.accept()
                connection = Connection(Role.SERVER)
                talking.append(connection)
                while True:
                    transport.send_nowait(connection.take_output())
                    with trio.move_on_after(1) as pause:
                        await transport.wait_readable()
                        for stream in connection.receive(transport.recv_nowait(1 << 20) or b""):
                            if not stream.closed:
                                connection.send_headers(stream, response_headers())
                    if pause.cancelled_caught:
                        for stream in list(connection._core.streams.values()):
                            connection.send_messages(stream, [b"token"])

            nursery.start_soon(channel.connect)
            await nursery.start(freeze)
            await trio.testing.wait_all_tasks_blocked()
            doomed = [await channel.call(CALL, b"") for _ in range(4)]
            nursery.start_soon(talk)
            other = await channel.call(CALL, b"")
            assert len(channel.links) == 2
            errors = [await ended(call) for call in doomed]
            assert ["did not answer a ping" in error.message for error in errors] == [True] * 4
            for _ in range(50):
                assert await other.receive() == b"token"
            assert await (await channel.call(CALL, b"")).receive() == b"token"
            assert len(talking) == 1
            nursery.cancel_scope.cancel()

    async def test_the_next_call_makes_a_new_link_at_once(self, autojump_clock):
        network = MemoryNetwork()
        listener = network.listen()
        async with open_channel(listener.address, dialer=network.dial) as channel, trio.open_nursery() as nursery:
            nursery.start_soon(channel.connect)
            frozen = await listener.accept()
            frozen.send_nowait(frames.settings({}))
            await trio.testing.wait_all_tasks_blocked()
            await ended(await channel.call(CALL, b""))
            begin = trio.current_time()
            nursery.start_soon(Server(raw={CALL: echo}).serve, listener)
            assert await (await channel.call(CALL, b"again")).receive() == b"again"
            assert trio.current_time() == begin
            nursery.cancel_scope.cancel()

    async def test_case_g1_streams_below_a_goaway_finish_and_those_above_are_made_again(
        self, scripted_server, autojump_clock
    ):
        """A server that complains and lets its streams finish, which gRPC's core does not."""
        async with scripted_server(keepalive=RUDE) as (channel, peer):
            first = await channel.call(CALL, b"")
            served = await peer.request()
            peer.connection.go_away(ErrorCode.ENHANCE_YOUR_CALM, b"too_many_pings")
            second = await channel.call(CALL, b"")  # crosses with the GOAWAY
            peer.flush()
            error = await ended(second)
            assert (error.status, error.origin) == (Status.UNAVAILABLE, Origin.REFUSED)
            with trio.move_on_after(50):
                while True:
                    await peer.read()
            assert peer.connection.pings_received == 0  # the open link, too, is pinged half as often
            peer.respond(served, b"reply")
            peer.end(served, OK)
            assert [await first.receive(), await first.receive()] == [b"reply", None]

    async def test_an_impatient_server_is_one_whatever_else_it_says_in_its_goaway(
        self, scripted_server, autojump_clock
    ):
        """Only `too_many_pings` is about pings."""
        for debug, pings in ((b"too many pongs", 2), (b"too_many_pings", 1)):
            async with scripted_server(keepalive=RUDE) as (channel, peer):
                await channel.call(CALL, b"")
                await peer.request()
                peer.connection.go_away(ErrorCode.ENHANCE_YOUR_CALM, debug)
                peer.flush()
                with trio.move_on_after(100):
                    while True:
                        await peer.read()
                assert peer.connection.pings_received == pings


class TestServing:
    async def test_a_client_that_pings_too_often_is_told_so_and_left(self, scripted_client, autojump_clock):
        async with scripted_client(raw={SILENT: prefill}) as (server, peer):
            peer.call(SILENT, b"1000")
            for _ in range(4):
                await trio.sleep(9.9)
                assert server.calls_in_flight == 1
                peer.connection.ping(b"hello???")
                peer.flush()
                await trio.testing.wait_all_tasks_blocked()
            await peer.until_closed()
            goaway = peer.connection.goaway_received
            assert (goaway.code, goaway.debug) == (ErrorCode.ENHANCE_YOUR_CALM, b"too_many_pings")
            await trio.testing.wait_all_tasks_blocked()
            assert server.calls_in_flight == 0

    async def test_one_that_keeps_to_the_limit_may_ping_for_ever(self, scripted_client, autojump_clock):
        async with scripted_client(raw={CALL: echo}) as (_, peer):
            for _ in range(100):
                await trio.sleep(10)
                peer.connection.ping(b"hello???")
                peer.flush()
                await peer.until(lambda: peer.connection.pings_acked.pop() if peer.connection.pings_acked else None)
            assert peer.connection.goaway_received is None

    async def test_pings_beside_replies_are_no_strikes(self, scripted_client, autojump_clock):
        """Clients of gRPC's core answer every batch of messages with a ping, to measure the path."""

        async def talk(call: ServerCall) -> None:
            for number in range(100):
                await trio.sleep(1)
                await call.send(b"%d" % number)

        async with scripted_client(raw={CALL: talk}) as (_, peer):
            stream = peer.call(CALL)
            while not stream.closed:
                if any(stream.messages for stream in await peer.read()):
                    stream.take()
                    peer.connection.ping(b"how far?")
                    peer.flush()
            assert stream.trailers == OK
            await peer.until(lambda: len(peer.connection.pings_acked) == 100)

    @pytest.mark.parametrize("together", [True, False], ids=["in one read", "in a read of its own"])
    async def test_nor_are_pings_beside_requests(self, scripted_client, autojump_clock, together):
        async def listen(call: ServerCall) -> None:
            while await call.receive() is not None:
                pass

        async with scripted_client(raw={CALL: listen}) as (_, peer):
            stream = peer.call(CALL, end=False)
            for _ in range(100):
                peer.connection.send_messages(stream, [b""])
                if not together:
                    peer.flush()
                    await trio.testing.wait_all_tasks_blocked()
                peer.connection.ping(b"hello???")
                peer.flush()
                await trio.testing.wait_all_tasks_blocked()
            await peer.until(lambda: len(peer.connection.pings_acked) == 100 or peer.connection.goaway_received)
            assert peer.connection.goaway_received is None

    async def test_without_strikes_anybody_may_ping_at_will(self, autojump_clock):
        limits = PingLimits(interval=10_000.0, strikes=0)
        async with open_pinging(limits=limits, keepalive=RUDE) as (channel, _):
            call = await channel.call(SILENT, b"5000")
            assert [await call.receive(), await call.receive()] == [b"done", None]
            assert channel.links[0].reads > 100  # answers, and of those
            assert len(channel.links[0].connection.pings_acked) <= 1  # none is kept

    async def test_a_silent_client_is_pinged_and_one_that_has_died_is_left(self, autojump_clock):
        network = MemoryNetwork()
        listener = network.listen()
        server = Server(
            raw={SILENT: prefill},
            settings=ServerSettings(keepalive=KeepaliveSettings(interval=100.0, timeout=20.0)),
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, listener)
            async with open_channel(
                listener.address, dialer=network.dial, settings=ChannelSettings(keepalive=None)
            ) as channel:
                call = await channel.call(SILENT, b"1000")
                assert [await call.receive(), await call.receive()] == [b"done", None]
                assert channel.links[0].reads >= 5  # the server's pings
            dead = await network.dial(listener.address)
            client = Connection(Role.CLIENT)
            stream = client.open_stream(request_headers(SILENT, authority="test"))
            client.send_messages(stream, [b"1000"], end_stream=True)
            dead.send_nowait(client.take_output())
            begin = trio.current_time()
            await trio.sleep(1)
            assert server.calls_in_flight == 1
            while dead.recv_nowait(1 << 20) != b"":  # hung up on
                await dead.wait_readable()
            assert trio.current_time() - begin == pytest.approx(100 + 100 / 3 + 20)
            await trio.testing.wait_all_tasks_blocked()
            assert server.calls_in_flight == 0
            nursery.cancel_scope.cancel()
