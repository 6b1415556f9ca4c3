"""Owners that make mistakes with a connection, and bytes that were damaged on the way."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
import trio
import trio.testing
from grpclib.const import Status

from trio_router.http2.connection import Connection
from trio_router.http2.streams import Role
from trio_router.rpc.call import open_call
from trio_router.rpc.channel import open_channel
from trio_router.rpc.link import Link
from trio_router.rpc.memory import MemoryNetwork, memory_link
from trio_router.rpc.metadata import RpcError, request_headers, response_headers, status_trailers
from trio_router.rpc.server import Server
from trio_router.rpc.servercall import ServerCall

CALL = "/test.Service/Call"
OTHER = "/test.Service/Other"
OK = status_trailers(Status.OK, None)


async def echo(call: ServerCall) -> None:
    while (message := await call.receive()) is not None:
        await call.send(message)


class TestMistakes:
    """No owner's mistake, and none of ours in the protocol, may hurt another's stream."""

    async def test_a_flush_that_fails_ends_the_calls_that_named_it(self, open_pair, autojump_clock):
        async with open_pair(raw={CALL: echo}) as (channel, _):
            calls = [await channel.start(CALL) for _ in range(3)]

            def broken() -> None:
                raise KeyError("client is broken")

            async def pump(call) -> None:
                with pytest.raises(KeyError, match="client is broken"):
                    await call.pump(lambda batch: True, flush=broken)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(pump, calls[0])
                nursery.start_soon(pump, calls[1])
                await trio.testing.wait_all_tasks_blocked()
                for call in calls:  # one write, so that the replies come in one batch
                    call.send_nowait([b"hello"])
                calls[0].flush()
            assert [call.ended for call in calls] == [True, True, False]
            assert await calls[2].receive() == b"hello"

    async def test_a_handlers_callback_that_fails_ends_its_own_call(self, scripted_client, autojump_clock, caplog):
        async def careless(call: ServerCall) -> None:
            call.on_drained = lambda: {}["missing"]
            while call.send_nowait([bytes(1000)]):
                pass
            call.flush()
            await trio.sleep_forever()

        async with scripted_client(raw={CALL: careless, OTHER: echo}) as (server, peer):
            stream = peer.call(CALL)
            await peer.until(lambda: sum(map(len, stream.messages)) >= 64_000)
            stream.take()
            stream.credit()
            peer.flush()
            await peer.until(lambda: stream.closed)
            assert stream.trailers is not None
            assert dict(stream.trailers)[b"grpc-status"] == b"13"
            assert "missing" in caplog.text
            assert server.calls_in_flight == 0
            other = peer.call(OTHER, b"fine")
            await peer.until(lambda: other.closed)
            assert other.take() == [b"fine"]

    async def test_a_fault_in_the_protocol_code_costs_its_connection_only(
        self, open_pair, autojump_clock, monkeypatch, caplog
    ):
        async with open_pair(raw={CALL: echo}) as (channel, server):
            call = await channel.start(CALL)
            receive = Connection.receive

            def faulty(connection: Connection, data: bytes, **portion):
                if b"trip" in data:
                    raise IndexError("a bug of ours")
                return receive(connection, data, **portion)

            monkeypatch.setattr(Connection, "receive", faulty)
            await call.send(b"trip")
            with pytest.raises(RpcError) as caught:
                await call.receive()
            assert caught.value.status is Status.UNAVAILABLE
            assert "a bug of ours" in caplog.text
            assert await (await channel.call(CALL, b"fine")).receive() == b"fine"
            assert server.calls_in_flight == 0


class TestDamage:
    """Bytes that a peer or a cable has spoilt: the call ends, one way or another, and nothing fails inside."""

    @staticmethod
    def spoil(data: bytes, *, seed: int) -> bytes:
        rng = random.Random(seed)
        spoilt = bytearray(data)
        for _ in range(rng.choice((1, 1, 3, 10))):
            at = rng.randrange(len(spoilt))
            spoilt[at : at + rng.choice((0, 1, 1, 1, 4))] = rng.randbytes(rng.choice((0, 1, 1, 1, 4)))
        return bytes(spoilt[: rng.choice((len(spoilt), len(spoilt), rng.randrange(len(spoilt) + 1)))])

    async def test_a_spoilt_answer_ends_the_call(self, autojump_clock, caplog):
        def answer() -> bytes:
            client, server = Connection(Role.CLIENT), Connection(Role.SERVER)
            client.send_messages(client.open_stream(request_headers(CALL, authority="a")), [b""], end_stream=True)
            (stream,) = server.receive(client.take_output())
            server.send_headers(stream, response_headers({"x-a": "1"}))
            server.send_messages(stream, [b"first", b"second", bytes(500)])
            server.send_headers(stream, status_trailers(Status.ABORTED, "told"), end_stream=True)
            server.go_away()
            return server.take_output()

        outcomes = set()
        for seed in range(400):
            near, far = memory_link(1 << 20)
            link = Link(near, Connection(Role.CLIENT))
            with trio.fail_after(1000):
                async with trio.open_nursery() as nursery:
                    call = open_call(link, request_headers(CALL, authority="a"), path=CALL, deadline=None)
                    call.send_nowait([b""], end=True)
                    nursery.start_soon(link.run)
                    await trio.testing.wait_all_tasks_blocked()
                    far.send_nowait(self.spoil(answer(), seed=seed))
                    far.close()
                    with suppress(RpcError):
                        while await call.receive() is not None:
                            pass
            outcomes.add(call.error and call.error.status)
            assert link.closed_because is not None
        assert "failed inside" not in caplog.text
        assert caplog.records == []
        assert {Status.ABORTED, Status.UNAVAILABLE, Status.INTERNAL} <= outcomes

    async def test_spoilt_requests_harm_no_other_client(self, open_pair, autojump_clock, caplog):
        def requests() -> bytes:
            client = Connection(Role.CLIENT)
            for path in (CALL, OTHER, CALL):
                stream = client.open_stream(request_headers(path, authority="a", metadata={"x-a": "1"}, timeout=5))
                client.send_messages(stream, [b"first", bytes(500)], end_stream=True)
            client.ping(b"12345678")
            client.reset(stream, 8)
            return client.take_output()

        network = MemoryNetwork(capacity_bytes=1 << 20)
        listener = network.listen()
        server = Server(raw={CALL: echo})
        with trio.fail_after(1e6):
            async with trio.open_nursery() as nursery:
                await nursery.start(server.serve, listener)
                async with open_channel(listener.address, dialer=network.dial) as channel:
                    for seed in range(400):
                        spoilt = await network.dial(listener.address)
                        spoilt.send_nowait(self.spoil(requests(), seed=seed))
                        await trio.testing.wait_all_tasks_blocked()
                        spoilt.close()
                        await trio.testing.wait_all_tasks_blocked()
                        assert server.calls_in_flight == 0
                    assert await (await channel.call(CALL, b"fine")).receive() == b"fine"
                    assert len(channel.links) == 1
                nursery.cancel_scope.cancel()
        assert caplog.records == []
