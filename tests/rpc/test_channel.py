"""When a channel dials, for whom, and what it makes of peers that are not what it hoped for."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from grpclib.const import Status

from trio_router.errors import LinkError
from trio_router.http2 import frames
from trio_router.http2.settings import Http2Settings
from trio_router.rpc.channel import Channel, ChannelSettings, connect_channel, open_channel
from trio_router.rpc.memory import MemoryNetwork
from trio_router.rpc.metadata import Origin, RpcError
from trio_router.rpc.server import Server, ServerSettings
from trio_router.rpc.servercall import ServerCall

CALL = "/test.Service/Call"


async def echo(call: ServerCall) -> None:
    while (message := await call.receive()) is not None:
        await call.send(message)


class Network(MemoryNetwork):
    """Counts dials."""

    dials = 0

    async def dial(self, address: str):
        self.dials += 1
        return await super().dial(address)


class TestDialing:
    async def test_calls_that_wait_for_the_same_dial_fail_with_it(self, autojump_clock):
        network = Network()
        network.black_hole("memory:7")
        failed_at = []

        async def call() -> None:
            with pytest.raises(LinkError, match="4 s"):
                await channel.call(CALL, b"")
            failed_at.append(trio.current_time() - begin)

        async with open_channel(
            "memory:7", dialer=network.dial, settings=ChannelSettings(connect_timeout=4.0)
        ) as channel:
            begin = trio.current_time()
            async with trio.open_nursery() as nursery:
                for _ in range(50):
                    nursery.start_soon(call)
        assert failed_at == [pytest.approx(4.0)] * 50
        assert network.dials == 1

    async def test_a_calls_timeout_counts_from_its_beginning_and_not_from_the_connection(self, autojump_clock):
        network = Network()
        network.black_hole("memory:7")
        async with open_channel("memory:7", dialer=network.dial) as channel:
            begin = trio.current_time()
            for open_call in (channel.call(CALL, b"", timeout=1.0), channel.start(CALL, timeout=1.0)):
                with pytest.raises(RpcError) as caught:
                    await open_call
                assert (caught.value.status, caught.value.origin) == (Status.DEADLINE_EXCEEDED, Origin.REFUSED)
            assert trio.current_time() - begin == pytest.approx(2.0)

    async def test_the_peer_is_told_what_is_left_of_the_timeout(self, autojump_clock):
        deadlines = []

        async def note(call: ServerCall) -> None:
            deadlines.append(call.deadline)

        network = MemoryNetwork(latency=1.5)
        listener = network.listen()
        async with trio.open_nursery() as nursery:
            await nursery.start(Server(raw={CALL: note}).serve, listener)
            async with open_channel(listener.address, dialer=network.dial) as channel:
                begin = trio.current_time()
                assert await (await channel.call(CALL, b"", timeout=4.0)).receive() is None
            nursery.cancel_scope.cancel()
        assert deadlines == [pytest.approx(begin + 4.0)]

    async def test_a_caller_that_leaves_does_not_end_the_dial_that_others_wait_for(self, autojump_clock):
        network = Network(latency=3.0)
        listener = network.listen()
        async with trio.open_nursery() as nursery:
            await nursery.start(Server(raw={CALL: echo}).serve, listener)
            async with open_channel(listener.address, dialer=network.dial) as channel:
                begin = trio.current_time()

                async def impatient() -> None:
                    with trio.move_on_after(1):
                        await channel.call(CALL, b"")

                async with trio.open_nursery() as callers:
                    callers.start_soon(impatient)
                    await trio.testing.wait_all_tasks_blocked()
                    assert await (await channel.call(CALL, b"patient")).receive() == b"patient"
                assert trio.current_time() - begin == pytest.approx(3.0)
            nursery.cancel_scope.cancel()
        assert network.dials == 1

    async def test_a_dialers_own_mistake_reaches_its_caller(self, autojump_clock):
        async def dial(address: str):
            raise ZeroDivisionError(address)

        async with open_channel("memory:7", dialer=dial) as channel:
            for _ in range(2):
                with pytest.raises(ZeroDivisionError, match="memory:7"):
                    await channel.call(CALL, b"")

    async def test_a_closed_channel_dials_no_more(self, autojump_clock):
        network = Network()
        listener = network.listen()
        async with trio.open_nursery() as nursery:
            await nursery.start(Server(raw={CALL: echo}).serve, listener)
            async with open_channel(listener.address, dialer=network.dial) as channel:
                call = await channel.call(CALL, b"")
                channel.close()
                with pytest.raises(RpcError, match="closed") as caught:
                    await call.receive()
                assert caught.value.status is Status.UNAVAILABLE
                with pytest.raises(LinkError, match="closed"):
                    await channel.call(CALL, b"")
            with pytest.raises(LinkError, match="closed"):
                await channel.call(CALL, b"")
            nursery.cancel_scope.cancel()

    async def test_closing_a_channel_wakes_who_waits_for_its_dial(self, autojump_clock):
        network = Network()
        network.black_hole("memory:7")
        async with trio.open_nursery() as nursery, open_channel("memory:7", dialer=network.dial) as channel:
            nursery.start_soon(self.expect_closed, channel)
            await trio.testing.wait_all_tasks_blocked()

    async def test_closing_ends_the_dial_itself_too(self, autojump_clock):
        """In a nursery of the caller's nothing else would, before the connect timeout."""
        network = Network()
        network.black_hole("memory:7")
        async with trio.open_nursery() as nursery:
            channel = connect_channel(nursery, "memory:7", dialer=network.dial)
            nursery.start_soon(self.expect_closed, channel)
            await trio.testing.wait_all_tasks_blocked()
            begin = trio.current_time()
            channel.close()
        assert trio.current_time() == begin

    async def expect_closed(self, channel: Channel) -> None:
        with pytest.raises(LinkError, match="closed"):
            await channel.call(CALL, b"")


class TestPeersThatSayLittle:
    async def test_a_peer_that_never_says_its_settings_is_given_up(self, autojump_clock):
        """A port that accepts and says nothing is no gRPC server, and no request has been lost on it."""
        network = Network()
        listener = network.listen()
        async with open_channel(
            listener.address, dialer=network.dial, settings=ChannelSettings(connect_timeout=4.0)
        ) as channel:
            begin = trio.current_time()
            with pytest.raises(LinkError, match="4 s"):
                await channel.call(CALL, b"")
            assert trio.current_time() - begin == pytest.approx(4.0)
            assert channel.links == []
            silent = await listener.accept()
            with trio.fail_after(1):
                while silent.recv_nowait(1 << 20) != b"":  # hung up on, too
                    await silent.wait_readable()

    async def test_a_peer_that_answers_in_http1_is_named_as_such(self, autojump_clock):
        network = Network()
        listener = network.listen()
        async with open_channel(listener.address, dialer=network.dial) as channel, trio.open_nursery() as nursery:

            async def answer() -> None:
                transport = await listener.accept()
                transport.send_nowait(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                transport.close()

            nursery.start_soon(answer)
            with pytest.raises(LinkError, match=r"HTTP/1"):
                await channel.call(CALL, b"")

    async def test_a_peer_that_hangs_up_at_once_is_unreachable(self, autojump_clock):
        network = Network()
        listener = network.listen()
        async with open_channel(listener.address, dialer=network.dial) as channel, trio.open_nursery() as nursery:

            async def hang_up() -> None:
                (await listener.accept()).close()

            nursery.start_soon(hang_up)
            with pytest.raises(LinkError, match="closed"):
                await channel.call(CALL, b"")
        assert network.dials == 1

    async def test_a_peer_that_goes_away_at_once_is_not_dialed_for_ever(self, autojump_clock):
        network = Network()
        listener = network.listen()
        async with open_channel(listener.address, dialer=network.dial) as channel, trio.open_nursery() as nursery:

            async def go_away() -> None:
                (await listener.accept()).send_nowait(frames.settings({}) + frames.goaway(0, 0, b""))

            nursery.start_soon(go_away)
            with pytest.raises(LinkError, match="going away"):
                await channel.call(CALL, b"")
        assert network.dials == 1


class TestMetadata:
    @pytest.mark.parametrize("how", ["call", "start"])
    async def test_more_than_the_peer_takes_is_refused_here_and_in_words(self, scripted_server, autojump_clock, how):
        """A peer that is sent more resets the stream, or ends the connection, and says nothing that explains it."""
        async with scripted_server(http2=Http2Settings(max_header_list_bytes=400)) as (channel, peer):
            large = {"trace": "x" * 400}
            with pytest.raises(
                RpcError, match=r"metadata: header list of \d+ bytes is over the peer's limit of 400"
            ) as no:
                await (
                    channel.call(CALL, b"", metadata=large) if how == "call" else channel.start(CALL, metadata=large)
                )
            assert (no.value.status, no.value.origin) == (Status.RESOURCE_EXHAUSTED, Origin.LOCAL)
            call = await channel.call(CALL, b"small")
            stream = await peer.request()
            peer.respond(stream, b"reply")
            assert await call.receive() == b"reply"


class TestSharing:
    @pytest.mark.parametrize(("limit", "links"), [(1, 20), (2, 20), (5, 7), (15, 3), (16, 3), (27, 2), (28, 1)])
    async def test_a_burst_keeps_the_peers_limit_on_each_connection(self, autojump_clock, limit, links):
        """The limit comes with the peer's SETTINGS; calls wait for them rather than being refused. Eight streams, or
        half of them, are for control calls.
        """
        network = Network()
        listener = network.listen()
        http2 = Http2Settings(max_concurrent_streams=limit)
        server = Server(raw={CALL: echo}, settings=ServerSettings(http2=http2))
        calls = []

        async def start(channel) -> None:
            calls.append(await channel.start(CALL))

        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, listener)
            async with open_channel(listener.address, dialer=network.dial) as channel:
                async with trio.open_nursery() as callers:
                    for _ in range(20):
                        callers.start_soon(start, channel)
                await trio.testing.wait_all_tasks_blocked()
                assert server.calls_in_flight == 20
                assert len(channel.links) == network.dials == links
                for call in calls:
                    await call.send(b"hello", end=True)
                    assert await call.receive() == b"hello"
                    assert await call.receive() is None
                # And a link with room is used again.
                assert await (await channel.call(CALL, b"again")).receive() == b"again"
                assert network.dials == links
            nursery.cancel_scope.cancel()

    async def test_a_link_that_its_peer_wants_to_end_is_closed_after_its_last_call(
        self, scripted_server, autojump_clock
    ):
        async with scripted_server() as (channel, peer):
            call = await channel.call(CALL, b"")
            stream = await peer.request()
            peer.connection.go_away()
            peer.respond(stream, b"late")
            await trio.testing.wait_all_tasks_blocked()
            assert [link.closed_because for link in channel.links] == [None]
            peer.end(stream, [(b"grpc-status", b"0")])
            assert [await call.receive(), await call.receive()] == [b"late", None]
            assert await peer.read() == []
            assert peer.transport.recv_nowait(1) == b""
