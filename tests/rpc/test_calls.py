"""Calls between our own client and server over memory links, on virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
import trio.testing
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from trio_router.errors import LinkError
from trio_router.http2.settings import Http2Settings
from trio_router.rpc.metadata import Origin, RpcError
from trio_router.rpc.server import Server
from trio_router.rpc.servercall import ServerCall

ECHO = "/test.Service/Echo"
COUNT = "/test.Service/Count"
BEGIN = "/test.Service/Begin"


async def echo(call: ServerCall) -> None:
    while (message := await call.receive()) is not None:
        await call.send(message)


async def wait_for_ever(call: ServerCall) -> None:
    await trio.sleep_forever()


async def count_up(call: ServerCall) -> None:
    until = int((await call.receive() or b"0").decode())
    for number in range(until):
        await call.send(b"%d" % number)


async def test_a_request_gets_its_reply_and_an_end(open_pair, autojump_clock):
    async with open_pair(raw={ECHO: echo}) as (channel, server):
        call = await channel.call(ECHO, b"hello")
        assert await call.receive() == b"hello"
        assert await call.receive() is None
        assert call.ended
        assert call.error is None
        assert server.calls_in_flight == 0


async def test_a_stream_of_replies_arrives_in_order(open_pair, autojump_clock):
    async with open_pair(raw={COUNT: count_up}) as (channel, _):
        call = await channel.call(COUNT, b"500")
        received = []
        while (message := await call.receive()) is not None:
            received.append(int(message))
        assert received == list(range(500))


async def test_pump_hands_over_every_message_in_order(open_pair, autojump_clock):
    async with open_pair(raw={COUNT: count_up}) as (channel, _):
        call = await channel.call(COUNT, b"500")
        received: list[bytes] = []

        def sink(batch: list[bytes]) -> bool:
            received.extend(batch)
            return True

        await call.pump(sink)
        assert [int(m) for m in received] == list(range(500))


async def test_pump_after_receive_misses_and_repeats_nothing(open_pair, autojump_clock):
    async with open_pair(raw={COUNT: count_up}) as (channel, _):
        call = await channel.call(COUNT, b"50")
        received = [await call.peek(), await call.receive()]
        assert received == [b"0", b"0"]
        await trio.testing.wait_all_tasks_blocked()
        rest: list[bytes] = []
        await call.pump(lambda batch: bool(rest.extend(batch)) or True)
        assert [int(m) for m in rest] == list(range(1, 50))


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.OK], ids=lambda s: s.name)
async def test_every_status_comes_back_with_message_and_details(open_pair, autojump_clock, status):
    async def fail(call: ServerCall) -> None:
        raise GRPCError(status, "größer % als", b"\x00\x01details")

    async with open_pair(raw={ECHO: fail}) as (channel, _):
        call = await channel.call(ECHO, b"")
        with pytest.raises(RpcError) as caught:
            await call.receive()
        assert (caught.value.status, caught.value.message) == (status, "größer % als")
        assert caught.value.details == b"\x00\x01details"
        assert caught.value.origin is Origin.PEER


async def test_a_handlers_bug_is_internal_and_tells_the_client_nothing(open_pair, autojump_clock, caplog):
    async def broken(call: ServerCall) -> None:
        raise ZeroDivisionError("secret")

    async with open_pair(raw={ECHO: broken}) as (channel, _):
        call = await channel.call(ECHO, b"")
        with pytest.raises(RpcError) as caught:
            await call.receive()
        assert caught.value.status is Status.INTERNAL
        assert "secret" not in str(caught.value)
        assert "secret" in caplog.text
        with pytest.raises(RpcError) as caught:
            await (await channel.call("/test.Service/Nothing", b"")).receive()
        assert caught.value.status is Status.UNIMPLEMENTED


async def test_a_deadline_ends_the_call_on_both_sides(open_pair, autojump_clock):
    left: list[float] = []

    async def sleepy(call: ServerCall) -> None:
        try:
            await trio.sleep_forever()
        finally:
            left.append(trio.current_time())

    async with open_pair(raw={ECHO: sleepy}) as (channel, server):
        begin = trio.current_time()
        call = await channel.call(ECHO, b"", timeout=3.0)
        with pytest.raises(RpcError) as caught:
            await call.receive()
        assert caught.value.status is Status.DEADLINE_EXCEEDED
        await trio.testing.wait_all_tasks_blocked()
        assert server.calls_in_flight == 0
        assert [t - begin for t in left] == [pytest.approx(3.0)]


async def test_cancelling_a_call_cancels_its_handler_and_no_other(open_pair, autojump_clock):
    gone: list[bytes] = []

    async def wait(call: ServerCall) -> None:
        name = await call.receive()
        try:
            await call.send(b"started")
            await trio.sleep(10)
            await call.send(b"done")
        except trio.Cancelled:
            gone.append(name)
            raise

    async with open_pair(raw={ECHO: wait}) as (channel, server):
        first, second = await channel.call(ECHO, b"first"), await channel.call(ECHO, b"second")
        assert await first.receive() == b"started"
        first.cancel()
        first.cancel()
        assert [await second.receive(), await second.receive(), await second.receive()] == [b"started", b"done", None]
        assert gone == [b"first"]
        with pytest.raises(RpcError, match="cancelled"):
            await first.receive()
        assert server.calls_in_flight == 0


async def test_messages_that_came_before_a_cancel_can_still_be_taken(open_pair, autojump_clock):
    async with open_pair(raw={COUNT: count_up}) as (channel, _):
        call = await channel.call(COUNT, b"3")
        assert await call.receive() == b"0"
        await trio.testing.wait_all_tasks_blocked()
        call.cancel()
        assert call.take_nowait() == [b"1", b"2"]
        assert call.take_nowait() == []


async def test_a_sinks_error_ends_its_own_call_only(open_pair, autojump_clock):
    async with open_pair(raw={COUNT: count_up}) as (channel, server):
        broken, healthy = await channel.call(COUNT, b"100"), await channel.call(COUNT, b"100")

        def raise_always(batch: list[bytes]) -> bool:
            raise KeyError("client is broken")

        received: list[bytes] = []
        async with trio.open_nursery() as nursery:

            async def pump_broken() -> None:
                with pytest.raises(KeyError, match="client is broken"):
                    await broken.pump(raise_always)

            nursery.start_soon(pump_broken)
            await healthy.pump(lambda batch: bool(received.extend(batch)) or True)
        assert len(received) == 100
        assert broken.ended
        await trio.testing.wait_all_tasks_blocked()
        assert server.calls_in_flight == 0


async def test_a_sink_may_cancel_its_own_pump_from_inside(open_pair, autojump_clock):
    async with open_pair(raw={COUNT: count_up}) as (channel, _):
        call = await channel.call(COUNT, b"100")
        batches: list[list[bytes]] = []
        with trio.CancelScope() as scope:

            def sink(batch: list[bytes]) -> bool:
                batches.append(batch)
                scope.cancel()
                return True

            await call.pump(sink)
        assert scope.cancelled_caught
        assert len(batches) == 1
        call.cancel()


async def test_a_full_sink_stops_its_peer_within_a_window_and_resume_goes_on(open_pair, autojump_clock):
    """Invariant I9: what a sink that said full must still take is bounded by the stream window."""
    sent = 0

    async def offer(call: ServerCall) -> None:
        nonlocal sent
        await call.receive()
        for _ in range(1000):
            await call.send(bytes(1024))
            sent += 1

    async with open_pair(raw={COUNT: offer, ECHO: echo}) as (channel, _):
        slow = await channel.call(COUNT, b"")
        received = 0
        room = False

        def sink(batch: list[bytes]) -> bool:
            nonlocal received
            received += sum(map(len, batch))
            return room

        async with trio.open_nursery() as nursery:
            nursery.start_soon(slow.pump, sink)
            await trio.testing.wait_all_tasks_blocked()
            assert received <= 2 * 65_536
            assert sent < 1000
            # The stalled stream must not freeze its link.
            other = await channel.call(ECHO, b"x" * 100_000)
            assert await other.receive() == b"x" * 100_000
            room = True
            slow.resume()
        assert received == 1000 * 1024


async def test_a_message_larger_than_every_window_arrives_both_ways(open_pair, autojump_clock):
    async with open_pair(
        raw={ECHO: echo}, server_http2=replace(Http2Settings.for_test(), max_message_bytes=1_000_000)
    ) as (channel, _):
        big = bytes(range(256)) * 2000
        call = await channel.call(ECHO, big)
        assert await call.receive() == big
        assert await call.receive() is None


async def test_a_message_over_the_limit_is_refused_with_the_limit_named(open_pair, autojump_clock):
    async with open_pair(raw={ECHO: echo}, client_http2=Http2Settings(max_message_bytes=1000)) as (channel, _):
        call = await channel.call(ECHO, bytes(1001))
        with pytest.raises(RpcError, match="1000") as caught:
            await call.receive()
        assert caught.value.status is Status.RESOURCE_EXHAUSTED
        again = await channel.call(ECHO, bytes(1000))
        assert await again.receive() == bytes(1000)


async def test_many_calls_share_one_link(open_pair, autojump_clock):
    async with open_pair(raw={COUNT: count_up}) as (channel, _):
        totals: list[int] = []

        async def one() -> None:
            call = await channel.call(COUNT, b"20")
            seen = 0
            while await call.receive() is not None:
                seen += 1
            totals.append(seen)

        async with trio.open_nursery() as nursery:
            for _ in range(200):
                nursery.start_soon(one)
        assert totals == [20] * 200
        assert len(channel.links) == 1


async def test_a_lost_link_fails_its_calls_and_the_next_call_dials_again(open_pair, autojump_clock):
    async def wait(call: ServerCall) -> None:
        await trio.sleep_forever()

    async with open_pair(raw={ECHO: echo, COUNT: wait}) as (channel, server):
        call = await channel.call(COUNT, b"")
        await trio.testing.wait_all_tasks_blocked()
        channel.links[0].close(LinkError("pulled"))
        with pytest.raises(RpcError, match="pulled") as caught:
            await call.receive()
        assert caught.value.status is Status.UNAVAILABLE
        await trio.testing.wait_all_tasks_blocked()
        assert server.calls_in_flight == 0
        assert await (await channel.call(ECHO, b"again")).receive() == b"again"


async def test_draining_lets_calls_end_and_refuses_new_ones(open_pair, autojump_clock):
    async def slow(call: ServerCall) -> None:
        await trio.sleep(5)
        await call.send(b"late")

    async with open_pair(raw={ECHO: slow}) as (channel, server):
        call = await channel.call(ECHO, b"")
        await trio.testing.wait_all_tasks_blocked()
        server.drain()
        assert await call.receive() == b"late"
        assert await call.receive() is None
        with pytest.raises(LinkError):
            await channel.call(ECHO, b"")


async def test_metadata_travels_both_ways(open_pair, autojump_clock):
    seen: list[object] = []

    async def handler(call: ServerCall) -> None:
        seen.extend(call.metadata)
        call.trailing_metadata = {"cost": "7", "proof-bin": b"\xff\x00"}

    async with open_pair(raw={ECHO: handler}) as (channel, _):
        call = await channel.call(ECHO, b"", metadata={"traceparent": "00-ab-cd-01", "blob-bin": b"\x00\x01\x02"})
        assert await call.receive() is None
        assert seen == [("traceparent", "00-ab-cd-01"), ("blob-bin", b"\x00\x01\x02")]
        assert call.trailing_metadata == [("cost", "7"), ("proof-bin", b"\xff\x00")]


async def test_a_handler_may_begin_its_answer_before_its_first_reply(open_pair, autojump_clock):
    async def begin(call: ServerCall) -> None:
        call.send_headers(metadata=[("x-early", "1"), ("x-early-bin", b"\xff")])
        begun.set()
        if await call.receive() == b"fail":
            raise GRPCError(Status.ABORTED, "after all")
        await call.send(b"reply")

    for message, expected in ((b"", Status.OK), (b"fail", Status.ABORTED)):
        begun = trio.Event()
        async with open_pair(raw={BEGIN: begin}) as (channel, _):
            call = await channel.start(BEGIN)
            await begun.wait()
            await trio.testing.wait_all_tasks_blocked()
            assert call.initial_metadata == [("x-early", "1"), ("x-early-bin", b"\xff")]
            await call.send(message, end=True)
            if expected is Status.OK:
                assert [await call.receive(), await call.receive()] == [b"reply", None]
            else:
                with pytest.raises(RpcError, match="after all"):
                    await call.receive()
            assert call.trailing_metadata == []


async def test_an_answer_begins_once_and_with_metadata_that_can_be_sent(open_pair, autojump_clock):
    async def begin(call: ServerCall) -> None:
        with pytest.raises(ValueError, match="reserved"):
            call.send_headers(metadata={"grpc-status": "0"})
        call.send_headers()
        with pytest.raises(RuntimeError, match="begun already"):
            call.send_headers()
        await call.send(b"reply")

    async with open_pair(raw={BEGIN: begin}) as (channel, _):
        call = await channel.call(BEGIN, b"")
        assert [await call.receive(), await call.receive()] == [b"reply", None]
        assert call.initial_metadata == []


async def test_who_has_left_is_not_answered(open_pair, autojump_clock):
    async def wait(call: ServerCall) -> None:
        try:
            await trio.sleep_forever()
        finally:
            call.send_headers(metadata={"x-late": "1"})
            told.append(call.gone)

    told: list[bool] = []
    async with open_pair(raw={BEGIN: wait}) as (channel, _):
        call = await channel.call(BEGIN, b"")
        await trio.testing.wait_all_tasks_blocked()
        call.cancel()
        await trio.testing.wait_all_tasks_blocked()
    assert told == [True]


async def test_two_tasks_in_one_call_are_told_so(open_pair, autojump_clock):
    async with open_pair(raw={ECHO: wait_for_ever}) as (channel, _):
        call = await channel.call(ECHO, b"")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call.receive)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await call.receive()
            nursery.cancel_scope.cancel()


async def test_case_d8_a_black_hole_is_given_up_after_the_connect_timeout(autojump_clock):
    """Without a bound of its own a dial waits for the kernel's two minutes."""
    from trio_router.rpc.channel import ChannelSettings, open_channel
    from trio_router.rpc.memory import MemoryNetwork

    network = MemoryNetwork()
    network.black_hole("memory:7")
    settings = ChannelSettings(connect_timeout=4.0)
    async with open_channel("memory:7", dialer=network.dial, settings=settings) as channel:
        begin = trio.current_time()
        with pytest.raises(LinkError, match="4 s"):
            await channel.call(ECHO, b"")
        assert trio.current_time() - begin == pytest.approx(4.0)


async def test_the_server_survives_peers_that_speak_no_http2(autojump_clock):
    from trio_router.rpc.memory import MemoryNetwork

    network = MemoryNetwork()
    listener = network.listen()
    async with trio.open_nursery() as nursery:
        await nursery.start(Server(raw={ECHO: echo}).serve, listener)
        stranger = await network.dial(listener.address)
        stranger.send_nowait(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await trio.testing.wait_all_tasks_blocked()
        while data := stranger.recv_nowait(65_536):
            pass
        assert data == b""
        nursery.cancel_scope.cancel()
