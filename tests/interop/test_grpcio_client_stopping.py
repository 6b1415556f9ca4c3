"""grpcio's client, while our server drains and stops."""

from __future__ import annotations

import grpc
import pytest
import trio
from grpclib.const import Status

from trio_router.errors import LinkError
from trio_router.rpc.server import Server
from trio_router.rpc.servercall import ServerCall
from trio_router.rpc.transport import open_tcp_listener

PATIENCE = 30.0
CALL = "/test.Service/Call"
OTHER = "/test.Service/Other"
in_thread = trio.to_thread.run_sync


def code(status: Status) -> grpc.StatusCode:
    return next(c for c in grpc.StatusCode if c.value[0] == status.value)


async def echo(call: ServerCall) -> None:
    while (message := await call.receive()) is not None:
        await call.send(message)


class TestStopping:
    async def test_a_draining_server_finishes_its_streams_and_takes_no_more(self, open_server):
        begun, go_on = trio.Event(), trio.Event()

        async def slow(call: ServerCall) -> None:
            await call.send(b"early")
            begun.set()
            await go_on.wait()
            for number in range(100):
                await call.send(b"%d" % number)

        def until_refused(client):
            for _ in range(1000):  # what the client sends before it knows is served
                try:
                    client.unary(OTHER, b"too late")
                except grpc.RpcError as error:
                    return error.code()
            raise AssertionError("the client was never told")

        async with open_server(raw={CALL: slow, OTHER: echo}) as (client, server):
            call = await in_thread(client.stream, CALL)
            await begun.wait()
            server.drain()
            assert await in_thread(until_refused, client) is grpc.StatusCode.UNAVAILABLE
            go_on.set()
            assert await in_thread(list, call) == [b"early", *(b"%d" % number for number in range(100))]
            assert call.code() is grpc.StatusCode.OK

    async def test_calls_that_race_with_a_drain_end_well_or_can_be_retried(self, open_server):
        """GOAWAY names the last request that is served; a client may repeat all later ones elsewhere."""
        served = []

        async def note(call: ServerCall) -> None:
            served.append(await call.receive())
            if len(served) == 20:
                server.drain()
            await call.send(b"ok")

        results = []

        def call_many(client):
            calls = [(n, client.channel.unary_unary(CALL).future(b"%d" % n, timeout=PATIENCE)) for n in range(100)]
            for number, call in calls:
                results.append((b"%d" % number, call.code()))

        async with open_server(raw={CALL: note}) as (client, server):
            await in_thread(call_many, client)
        finished = {name for name, told in results if told is grpc.StatusCode.OK}
        assert finished == set(served)
        assert {told for _, told in results} <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}

    async def test_connections_that_are_drained_lose_no_call(self, open_server):
        """A server that goes on, and asks its clients to come back on a new connection again and again, as one behind a
        balancer does: every call is served once and ends well.

        Hardly any is refused for it, but some may be: gRPC's core answers our PING before it writes the requests that
        it has made until then. It repeats them.
        """
        calls, every = 500, 40
        served = []

        async def note(call: ServerCall) -> None:
            served.append(await call.receive())
            if len(served) % every == 0:
                for link in server._links:
                    link.connection.drain()
                    link.finish(LinkError("come back on another connection"))
            await call.send(b"ok")

        def call_many(client):
            futures = [client.channel.unary_unary(CALL).future(b"%d" % n, timeout=PATIENCE) for n in range(calls)]
            return {future.code() for future in futures}

        async with open_server(raw={CALL: note}) as (client, server):
            for _ in range(3):
                assert await in_thread(call_many, client) == {grpc.StatusCode.OK}
        assert sorted(served) == sorted(3 * [b"%d" % n for n in range(calls)])

    async def test_a_server_that_stops_under_load_ends_every_call(self):
        sent = 0
        busy = trio.Event()

        async def talk(call: ServerCall) -> None:
            nonlocal sent
            while True:
                await call.send(bytes(1000))
                sent += 1
                if server.calls_in_flight == 200 and sent > 2000:
                    busy.set()
                elif sent > 10 * server.calls_in_flight:
                    await busy.wait()  # for those who have not come yet

        def read_all(calls):
            ends = []
            for call in calls:
                with pytest.raises(grpc.RpcError):
                    list(call)
                ends.append(call.code())
            return ends

        listener = await open_tcp_listener("127.0.0.1", port=0)
        server = Server(raw={CALL: talk})
        with trio.fail_after(PATIENCE), grpc.insecure_channel(listener.address) as channel:
            async with trio.open_nursery() as nursery:
                await nursery.start(server.serve, listener)
                calls = [channel.unary_stream(CALL)(b"", timeout=PATIENCE) for _ in range(200)]
                await busy.wait()
                nursery.cancel_scope.cancel()
            listener.close()
            assert server.calls_in_flight == 0
            ends = await in_thread(read_all, calls)
        assert len(ends) == 200
        assert set(ends) <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}

    async def test_a_server_that_drains_under_load_finishes_every_call_it_has_taken(self, open_server):
        """Two hundred streams are in the middle; each is served to its end, and the drain ends with the last."""
        busy = trio.Event()

        async def talk(call: ServerCall) -> None:
            for number in range(100):
                await call.send(b"%d" % number)
                if number == 10 and server.calls_in_flight == 200:
                    busy.set()
                if number == 50:
                    await busy.wait()

        def read_all(client):
            calls = [client.stream(CALL) for _ in range(200)]
            return [list(call) for call in calls]

        async def drain() -> None:
            await busy.wait()
            server.drain()

        async with open_server(raw={CALL: talk}) as (client, server), trio.open_nursery() as nursery:
            nursery.start_soon(drain)
            replies = await in_thread(read_all, client)
        assert replies == [[b"%d" % number for number in range(100)]] * 200
