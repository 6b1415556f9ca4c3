"""Our channel calls grpclib's server, whose handlers run in its asyncio loop."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from contextlib import aclosing

import pytest
import trio
from grpclib.config import Configuration
from grpclib.const import Status
from grpclib.encoding.proto import ProtoCodec
from grpclib.exceptions import GRPCError
from grpclib.server import Stream

from trio_router.errors import LinkError
from trio_router.protocol.messages import (
    GenerateRequest,
    GenerateResponse,
    GenerateStreamChunk,
    HealthBase,
    HealthStub,
    ServiceHealthRequest,
    ServiceHealthResponse,
    ServingStatus,
    VllmEngineBase,
    VllmEngineStub,
)
from trio_router.rpc.call import ClientCall
from trio_router.rpc.metadata import Origin, RpcError

PATIENCE = 30.0
CALL = "/test.Service/Call"
OTHER = "/test.Service/Other"
FAILURES = [status for status in Status if status is not Status.OK]


async def echo(stream: Stream) -> None:
    async for message in stream:
        await stream.send_message(message)


async def for_ever() -> None:
    await asyncio.Event().wait()


async def read_all(call: ClientCall) -> list[bytes]:
    replies = []
    while (reply := await call.receive()) is not None:
        replies.append(reply)
    return replies


async def happens(event: threading.Event) -> bool:
    return await trio.to_thread.run_sync(event.wait, PATIENCE)


class Health(HealthBase):
    async def check(self, health_check_request: ServiceHealthRequest) -> ServiceHealthResponse:
        assert health_check_request.service == "engine"
        return ServiceHealthResponse(status=ServingStatus.NOT_SERVING)


class Engine(VllmEngineBase):
    async def generate(self, generate_request: GenerateRequest):
        for token in range(generate_request.sampling_params.max_tokens or 0):
            yield GenerateResponse(chunk=GenerateStreamChunk(token_ids=[token]))


class TestShapes:
    async def test_unary(self, open_grpclib_server):
        async with open_grpclib_server(raw={CALL: echo}) as (channel, _):
            assert await read_all(await channel.call(CALL, b"hello")) == [b"hello"]

    async def test_replies_that_stream(self, open_grpclib_server):
        async def count(stream: Stream) -> None:
            for number in range(int(await stream.recv_message())):
                await stream.send_message(b"%d" % number)

        async with open_grpclib_server(raw={CALL: count}) as (channel, _):
            call = await channel.call(CALL, b"500")
            replies: list[bytes] = []
            await call.pump(lambda batch: bool(replies.extend(batch)) or True)
        assert [int(reply) for reply in replies] == list(range(500))

    async def test_requests_that_stream(self, open_grpclib_server):
        async def total(stream: Stream) -> None:
            await stream.send_message(b"%d" % sum([len(message) async for message in stream]))

        async with open_grpclib_server(raw={CALL: total}) as (channel, _):
            call = await channel.start(CALL)
            for number in range(200):
                await call.send(bytes(number), end=number == 199)
            assert await read_all(call) == [b"19900"]

    async def test_both_stream_and_each_reply_waits_for_its_request(self, open_grpclib_server):
        async with open_grpclib_server(raw={CALL: echo}) as (channel, _):
            call = await channel.start(CALL)
            for number in range(100):
                await call.send(b"%d" % number)
                assert await call.receive() == b"%d" % number
            call.end_sending()
            assert await call.receive() is None

    async def test_a_call_without_any_message(self, open_grpclib_server):
        async with open_grpclib_server(raw={CALL: echo}) as (channel, _):
            call = await channel.start(CALL)
            call.end_sending()
            assert await call.receive() is None

    async def test_the_generated_stubs_here_meet_the_generated_bases_of_grpclibs_users(self, open_grpclib_server):
        request = GenerateRequest(request_id="r")
        request.sampling_params.max_tokens = 100
        async with open_grpclib_server(Health(), Engine(), codec=ProtoCodec()) as (channel, _):
            reply = await HealthStub(channel).check(ServiceHealthRequest(service="engine"), timeout=PATIENCE)
            assert reply.status is ServingStatus.NOT_SERVING
            async with aclosing(VllmEngineStub(channel).generate(request)) as replies:
                tokens = [token async for reply in replies for token in reply.chunk.token_ids]
            assert tokens == list(range(100))

    async def test_an_unknown_method_is_unimplemented(self, open_grpclib_server):
        async with open_grpclib_server() as (channel, _):
            with pytest.raises(RpcError, match="Method not found") as caught:
                await (await channel.call("/nobody.Knows/This", b"")).receive()
            assert (caught.value.status, caught.value.origin) == (Status.UNIMPLEMENTED, Origin.PEER)


class TestStatuses:
    @pytest.mark.parametrize("status", FAILURES, ids=lambda status: status.name)
    async def test_every_status_arrives_with_message_and_details(self, open_grpclib_server, status):
        async def fail(stream: Stream) -> None:
            if await stream.recv_message() == b"late":
                await stream.send_message(b"first")
            raise GRPCError(status, "größer % als\n10", b"\x00\xffdetails")

        async with open_grpclib_server(raw={CALL: fail}) as (channel, _):
            for request, replies in ((b"at once", []), (b"late", [b"first"])):
                call = await channel.call(CALL, request, timeout=PATIENCE)
                for reply in replies:
                    assert await call.receive() == reply
                with pytest.raises(RpcError) as caught:
                    await call.receive()
                error = caught.value
                assert (error.status, error.message) == (status, "größer % als\n10")
                assert error.details == b"\x00\xffdetails"
                assert error.origin is Origin.PEER

    async def test_a_request_still_on_its_way_does_not_hide_the_answer(self, open_grpclib_server):
        """grpclib answers and then resets with NO_ERROR, while this side waits for credit to send on."""

        async def refuse(stream: Stream) -> None:
            await stream.recv_message()
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "not so much")

        async with open_grpclib_server(raw={CALL: refuse}) as (channel, _):
            call = await channel.start(CALL)
            while not call.ended:
                await call.send(bytes(100_000))
            with pytest.raises(RpcError, match="not so much") as caught:
                await call.receive()
            assert (caught.value.status, caught.value.origin) == (Status.RESOURCE_EXHAUSTED, Origin.PEER)

    # grpclib logs the mistake of a handler; that is what this handler is for.
    async def test_a_crashed_handler_is_unknown(self, open_grpclib_server, caplog):
        async def crash(stream: Stream) -> None:
            raise ZeroDivisionError("oh")

        async with open_grpclib_server(raw={CALL: crash}) as (channel, _):
            with pytest.raises(RpcError, match="Internal Server Error") as caught:
                await (await channel.call(CALL, b"")).receive()
            assert (caught.value.status, caught.value.origin) == (Status.UNKNOWN, Origin.PEER)


class TestDeadlines:
    async def test_the_server_is_told_and_this_side_keeps_it_too(self, open_grpclib_server):
        left: list[float] = []
        noticed = threading.Event()

        async def wait(stream: Stream) -> None:
            left.append(stream.deadline.time_remaining())
            try:
                await for_ever()
            finally:
                noticed.set()

        async with open_grpclib_server(raw={CALL: wait}) as (channel, _):
            call = await channel.call(CALL, b"", timeout=0.3)
            with pytest.raises(RpcError) as caught:
                await call.receive()
            assert caught.value.status is Status.DEADLINE_EXCEEDED
            assert await happens(noticed)
        assert 0 < left[0] <= 0.3

    async def test_a_server_that_gives_up_first_is_believed(self, open_grpclib_server):
        async def impatient(stream: Stream) -> None:
            raise GRPCError(Status.DEADLINE_EXCEEDED, "mine was shorter")

        async with open_grpclib_server(raw={CALL: impatient}) as (channel, _):
            call = await channel.call(CALL, b"", timeout=PATIENCE)
            with pytest.raises(RpcError, match="mine was shorter") as caught:
                await call.receive()
            assert (caught.value.status, caught.value.origin) == (Status.DEADLINE_EXCEEDED, Origin.PEER)

    async def test_a_call_without_a_deadline_has_none(self, open_grpclib_server):
        async def tell(stream: Stream) -> None:
            await stream.send_message(repr(stream.deadline).encode())

        async with open_grpclib_server(raw={CALL: tell}) as (channel, _):
            assert await read_all(await channel.call(CALL, b"")) == [b"None"]


class TestLeaving:
    async def test_a_cancelled_call_ends_at_the_server_and_no_other_does(self, open_grpclib_server):
        gone = threading.Event()
        ended = []

        async def wait(stream: Stream) -> None:
            name = await stream.recv_message()
            await stream.send_message(b"here")
            try:
                await stream.recv_message()
            except asyncio.CancelledError:
                ended.append(name)
                gone.set()
                raise
            await stream.send_message(b"still here")

        async with open_grpclib_server(raw={CALL: wait}) as (channel, _):
            first, second = [await channel.start(CALL) for _ in range(2)]
            for call, name in ((first, b"first"), (second, b"second")):
                await call.send(name)
                assert await call.receive() == b"here"
            first.cancel()
            assert await happens(gone)
            second.end_sending()
            assert await read_all(second) == [b"still here"]
            assert ended == [b"first"]
            assert len(channel.links) == 1

    async def test_a_server_that_gives_the_call_up_is_heard_after_what_it_had_sent(self, open_grpclib_server):
        """Its reset says NO_ERROR and comes instead of trailers: a failure all the same."""

        async def give_up(stream: Stream) -> None:
            await stream.send_message(b"1")
            await stream.cancel()

        async with open_grpclib_server(raw={CALL: give_up}) as (channel, _):
            call = await channel.start(CALL)
            assert await call.receive() == b"1"
            with pytest.raises(RpcError, match="code 0") as caught:
                await call.receive()
            assert (caught.value.status, caught.value.origin) == (Status.INTERNAL, Origin.TRANSPORT)

    async def test_a_channel_that_closes_ends_its_handlers(self, open_grpclib_server):
        gone = threading.Event()

        async def wait(stream: Stream) -> None:
            await stream.send_message(b"here")
            try:
                await for_ever()
            finally:
                gone.set()

        async with open_grpclib_server(raw={CALL: wait}) as (channel, _):
            call = await channel.call(CALL, b"")
            assert await call.receive() == b"here"
            channel.close()
            assert await happens(gone)


class TestMetadata:
    async def test_text_and_binary_travel_both_ways(self, open_grpclib_server):
        seen = []

        async def handler(stream: Stream) -> None:
            await stream.recv_message()
            seen.extend(pair for pair in stream.metadata.items() if pair[0].startswith("x-"))
            await stream.send_initial_metadata(metadata=[("x-early", "1"), ("x-early-bin", b"\x01")])
            await stream.send_message(b"")
            trailing = [("x-cost", "7"), ("x-proof-bin", b"\xff\x00"), ("x-proof-bin", b"")]
            await stream.send_trailing_metadata(metadata=trailing)

        sent = [("x-text", "a b; c,d"), ("x-blob-bin", bytes(range(256))), ("x-blob-bin", b""), ("x-twice", "1")]
        async with open_grpclib_server(raw={CALL: handler}) as (channel, _):
            call = await channel.call(CALL, b"", metadata=sent)
            assert await read_all(call) == [b""]
        assert sorted(seen) == sorted(sent)
        assert call.initial_metadata == [("x-early", "1"), ("x-early-bin", b"\x01")]
        assert call.trailing_metadata == [("x-cost", "7"), ("x-proof-bin", b"\xff\x00"), ("x-proof-bin", b"")]


class TestSizes:
    @pytest.mark.parametrize("size", [0, 1, (4 << 20) - 5, 5 << 20, 32 << 20])
    async def test_a_message_of_any_size_goes_both_ways(self, open_grpclib_server, size):
        message = bytes(range(256)) * (size // 256) + bytes(size % 256)
        async with open_grpclib_server(raw={CALL: echo}) as (channel, _):
            assert await read_all(await channel.call(CALL, message)) == [message]

    async def test_a_call_that_is_not_read_stops_the_server_and_no_other_call(self, open_grpclib_server):
        offered = []

        async def offer(stream: Stream) -> None:
            while True:
                await stream.send_message(bytes(65_536))
                offered.append(1)

        async with open_grpclib_server(raw={CALL: offer, OTHER: echo}) as (channel, _):
            slow = await channel.call(CALL, b"")
            await slow.peek()
            for _attempt in range(50):
                assert await read_all(await channel.call(OTHER, bytes(100_000))) == [bytes(100_000)]
            assert len(offered) < 10
            slow.cancel()
            # All that came for the stream nobody read has been given back to the connection.
            for _attempt in range(5):
                assert await read_all(await channel.call(OTHER, bytes(5_000_000))) == [bytes(5_000_000)]

    async def test_a_server_that_does_not_read_stops_the_sender_and_no_other_call(
        self, open_grpclib_server, foreign_loop
    ):
        go_on = asyncio.Event()

        async def read_late(stream: Stream) -> None:
            await stream.send_message(b"here")
            await go_on.wait()
            await stream.send_message(b"%d" % sum([len(message) async for message in stream]))

        async def let_go() -> None:
            go_on.set()

        narrow = Configuration(http2_stream_window_size=1 << 16)
        async with open_grpclib_server(raw={CALL: read_late, OTHER: echo}, config=narrow) as (channel, _):
            slow = await channel.start(CALL)
            assert await slow.receive() == b"here"
            sent = 0
            while slow.send_nowait([bytes(10_000)]):
                slow.flush()
                sent += 1
            assert sent < 10
            for _attempt in range(20):
                assert await read_all(await channel.call(OTHER, bytes(100_000))) == [bytes(100_000)]
            slow.end_sending()
            await foreign_loop.run(let_go)
            assert await read_all(slow) == [b"%d" % (10_000 * (sent + 1))]


class TestSharing:
    async def test_two_hundred_and_fifty_streams_share_as_few_connections_as_the_server_allows(
        self, open_grpclib_server
    ):
        """h2's servers allow a hundred streams on one, and grpclib has no setting for it."""
        names: dict[bytes, object] = {}
        all_here = asyncio.Event()

        async def wait_for_all(stream: Stream) -> None:
            name = await stream.recv_message()
            names[name] = stream.peer.addr()
            if len(names) == 250:
                all_here.set()
            await all_here.wait()
            for number in range(10):
                await stream.send_message(name + b"%d" % number)

        replies: dict[int, list[bytes]] = {}

        async def one(channel, name: int) -> None:
            replies[name] = await read_all(await channel.call(CALL, b"%d/" % name))

        async with open_grpclib_server(raw={CALL: wait_for_all}) as (channel, _), trio.open_nursery() as nursery:
            for name in range(250):
                nursery.start_soon(one, channel, name)
        assert replies == {name: [b"%d/%d" % (name, number) for number in range(10)] for name in range(250)}
        assert sorted(Counter(names.values()).values()) == [66, 92, 92]  # eight of each are kept for control calls


class TestStopping:
    async def test_a_server_that_closes_leaves_its_calls_without_an_end_and_their_deadline_ends_them(
        self, open_grpclib_server, foreign_loop
    ):
        cancelled = threading.Event()

        async def wait(stream: Stream) -> None:
            await stream.send_message(b"here")
            try:
                await for_ever()
            finally:
                cancelled.set()

        async def close(server) -> None:
            server.close()
            await server.wait_closed()

        async with open_grpclib_server(raw={CALL: wait}) as (channel, server):
            call = await channel.call(CALL, b"", timeout=0.3)
            assert await call.receive() == b"here"
            await foreign_loop.run(close, server)
            assert cancelled.is_set()
            with pytest.raises(RpcError) as caught:
                await call.receive()
            assert (caught.value.status, caught.value.origin) == (Status.DEADLINE_EXCEEDED, Origin.LOCAL)

    async def test_a_server_that_dies_under_load_fails_every_call(self, open_grpclib_server, foreign_loop):
        received: set[ClientCall] = set()
        errors: list[RpcError] = []
        busy = trio.Event()

        async def talk(stream: Stream) -> None:
            while True:
                await stream.send_message(bytes(1000))

        async def read(channel) -> None:
            call = await channel.call(CALL, b"")
            try:
                while await call.receive() is not None:
                    received.add(call)
                    if len(received) == 200:
                        busy.set()
            except RpcError as exc:
                errors.append(exc)

        async def kill(server) -> None:
            server.kill()

        async with open_grpclib_server(raw={CALL: talk}) as (channel, server):
            async with trio.open_nursery() as nursery:
                for _ in range(200):
                    nursery.start_soon(read, channel)
                await busy.wait()
                await foreign_loop.run(kill, server)
            assert len(errors) == 200
            assert {(error.status, error.origin) for error in errors} == {(Status.UNAVAILABLE, Origin.TRANSPORT)}
            with pytest.raises(LinkError):
                await channel.call(CALL, b"")
