"""Pings between our ends and gRPC's C core, a hundred times as often as by default: whose limits hold for whom."""

from __future__ import annotations

import threading

import grpc
import pytest
import trio
from grpclib.const import Status

from trio_router.rpc.channel import ChannelSettings
from trio_router.rpc.keepalive import KeepaliveSettings, PingLimits
from trio_router.rpc.metadata import RpcError
from trio_router.rpc.server import ServerSettings
from trio_router.rpc.servercall import ServerCall

CALL = "/test.Service/Call"
SILENCE = 1.0

in_thread = trio.to_thread.run_sync


def wait_silently(request: bytes, context) -> bytes:
    threading.Event().wait(SILENCE)
    return b"done"


def pinging(**settings) -> ChannelSettings:
    return ChannelSettings(keepalive=KeepaliveSettings(**{"allowed": 0.01, "timeout": 10.0, **settings}))


class TestOurPings:
    async def test_a_server_with_the_limits_of_a_worker_takes_them_for_ever(self, open_foreign_server):
        """Three intervals for one that is allowed, as by default: strikes count, and none is made."""
        limits = {
            "grpc.http2.min_ping_interval_without_data_ms": 50,
            "grpc.http2.max_ping_strikes": 1,
            "grpc.keepalive_permit_without_calls": 1,
        }
        settings = pinging(interval=0.15, slow_interval=0.15)
        async with open_foreign_server(unary={CALL: wait_silently}, options=limits, settings=settings) as (channel, _):
            for _ in range(2):
                call = await channel.call(CALL, b"")
                assert [await call.receive(), await call.receive()] == [b"done", None]
            (link,) = channel.links
            assert link.usable
            assert link.reads > 8  # mostly answers

    async def test_a_server_left_at_its_defaults_takes_three_and_then_seldom_ones(self, open_foreign_server):
        settings = pinging(interval=0.05)
        async with open_foreign_server(unary={CALL: wait_silently}, settings=settings) as (channel, _):
            call = await channel.call(CALL, b"")
            assert [await call.receive(), await call.receive()] == [b"done", None]
            (link,) = channel.links
            assert link.usable

    async def test_one_that_complains_is_believed(self, open_foreign_server):
        settings = pinging(interval=0.05, slow_interval=0.05)
        async with open_foreign_server(unary={CALL: wait_silently}, settings=settings) as (channel, _):
            call = await channel.call(CALL, b"")
            with pytest.raises(
                RpcError, match=r"too_many_pings|Too many pings"
            ) as caught:  # of the GOAWAY, or trailers
                await call.receive()
            assert caught.value.status is Status.UNAVAILABLE
            await channel.connect()  # at once
            assert len(channel.links) == 1
            assert channel._links._pace.interval == 0.1


# The core itself sends no more than one a second.
OFTEN = {
    "grpc.keepalive_time_ms": 100,
    "grpc.keepalive_timeout_ms": 10_000,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.max_pings_without_data": 0,
}


class TestTheirPings:
    @pytest.mark.parametrize("limits", [PingLimits(interval=0.5, strikes=1), PingLimits(interval=1000.0, strikes=0)])
    async def test_a_client_within_our_limits_is_served(self, open_server, limits):
        async def wait(call: ServerCall) -> None:
            while call._link.connection.pings_received < 4:
                await trio.lowlevel.checkpoint()
            await call.send(b"done")

        settings = ServerSettings(ping_limits=limits)
        async with open_server(raw={CALL: wait}, options=OFTEN, settings=settings) as (client, _):
            assert await in_thread(client.unary, CALL) == b"done"

    async def test_one_that_is_not_is_told_in_its_own_words(self, open_server):
        async def wait(call: ServerCall) -> None:
            await trio.sleep_forever()

        settings = ServerSettings(ping_limits=PingLimits(interval=1000.0, strikes=2))
        async with open_server(raw={CALL: wait}, options=OFTEN, settings=settings) as (client, server):
            with pytest.raises(grpc.RpcError) as caught:
                await in_thread(client.unary, CALL)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "too_many_pings" in caught.value.details()
            while server.calls_in_flight:
                await trio.lowlevel.checkpoint()

    async def test_pings_of_a_client_that_is_being_sent_tokens_are_never_too_many(self, open_server):
        """The core's clients ping for what they receive, too, to measure the path."""

        async def talk(call: ServerCall) -> None:
            while call._link.connection.pings_received < 4:
                await call.send(bytes(100))
                await trio.sleep(0.01)

        settings = ServerSettings(ping_limits=PingLimits(interval=1000.0, strikes=1))
        async with open_server(raw={CALL: talk}, options=OFTEN, settings=settings) as (client, _):
            assert len(await in_thread(lambda: list(client.stream(CALL)))) > 3

    async def test_our_own_pings_to_a_silent_client_are_answered(self, open_server):
        async def wait(call: ServerCall) -> None:
            await trio.sleep(SILENCE)
            await call.send(b"done")

        keepalive = KeepaliveSettings(interval=0.05, slow_interval=0.05, allowed=0.01, timeout=10.0)
        async with open_server(raw={CALL: wait}, settings=ServerSettings(keepalive=keepalive)) as (client, server):
            assert await in_thread(client.unary, CALL) == b"done"
            (link,) = server._links
            assert link.reads > 8
