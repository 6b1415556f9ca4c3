"""Our channel calls grpcio's server, whose handlers run in its own threads."""

from __future__ import annotations

import threading
from contextlib import aclosing

import grpc
import pytest
import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from trio_router.dispatch.failures import is_too_large
from trio_router.errors import LinkError
from trio_router.protocol.codec import decode, encode
from trio_router.protocol.messages import (
    GenerateRequest,
    GenerateResponse,
    GenerateStreamChunk,
    HealthStub,
    ServiceHealthRequest,
    ServiceHealthResponse,
    ServingStatus,
    VllmEngineStub,
)
from trio_router.rpc.call import ClientCall
from trio_router.rpc.metadata import Origin, RpcError

PATIENCE = 30.0
CALL = "/test.Service/Call"
STREAM = "/test.Service/Stream"
CHECK = "/grpc.health.v1.Health/Check"
GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"
FAILURES = [status for status in Status if status is not Status.OK]


def code(status: Status) -> grpc.StatusCode:
    return next(c for c in grpc.StatusCode if c.value[0] == status.value)


def echo(request: bytes, context) -> bytes:
    return request


def numbers(request: bytes, context):
    for number in range(int(request)):
        yield b"%d" % number


async def read_all(call: ClientCall) -> list[bytes]:
    replies = []
    while (reply := await call.receive()) is not None:
        replies.append(reply)
    return replies


class TestShapes:
    async def test_a_unary_stub_gets_its_reply(self, open_foreign_server):
        def check(request: bytes, context) -> bytes:
            assert decode(ServiceHealthRequest, request).service == "engine"
            return encode(ServiceHealthResponse(status=ServingStatus.NOT_SERVING))

        async with open_foreign_server(unary={CHECK: check}) as (channel, _):
            reply = await HealthStub(channel).check(ServiceHealthRequest(service="engine"), timeout=PATIENCE)
        assert reply.status is ServingStatus.NOT_SERVING

    async def test_a_streaming_stub_yields_the_replies_in_order(self, open_foreign_server):
        def generate(request: bytes, context):
            for token in range(decode(GenerateRequest, request).sampling_params.max_tokens):
                yield encode(GenerateResponse(chunk=GenerateStreamChunk(token_ids=[token])))

        request = GenerateRequest(request_id="r")
        request.sampling_params.max_tokens = 500
        async with (
            open_foreign_server(stream={GENERATE: generate}) as (channel, _),
            aclosing(VllmEngineStub(channel).generate(request)) as replies,
        ):
            tokens = [list(reply.chunk.token_ids) async for reply in replies]
        assert tokens == [[number] for number in range(500)]

    async def test_a_pump_gets_the_replies_in_order(self, open_foreign_server):
        async with open_foreign_server(stream={STREAM: numbers}) as (channel, _):
            call = await channel.call(STREAM, b"500")
            replies: list[bytes] = []
            await call.pump(lambda batch: bool(replies.extend(batch)) or True)
        assert [int(reply) for reply in replies] == list(range(500))

    async def test_an_unknown_method_is_unimplemented(self, open_foreign_server):
        async with open_foreign_server() as (channel, _):
            with pytest.raises(GRPCError) as caught:
                await HealthStub(channel).check(ServiceHealthRequest())
            assert caught.value.status is Status.UNIMPLEMENTED


class TestStatuses:
    @pytest.mark.parametrize("status", FAILURES, ids=lambda status: status.name)
    async def test_every_status_arrives_with_message_and_details(self, open_foreign_server, status):
        def fail(request: bytes, context):
            if request == b"late":
                yield b"first"
            context.set_trailing_metadata((("grpc-status-details-bin", b"\x00\xffdetails"),))
            context.abort(code(status), "größer % als\n10")

        async with open_foreign_server(stream={STREAM: fail}) as (channel, _):
            for request, replies in ((b"at once", []), (b"late", [b"first"])):
                call = await channel.call(STREAM, request, timeout=PATIENCE)
                with pytest.raises(RpcError) as caught:
                    await call.pump(lambda batch, replies=replies: [replies.remove(m) for m in batch] != [])
                error = caught.value
                assert (error.status, error.message) == (status, "größer % als\n10")
                assert error.details == b"\x00\xffdetails"
                assert error.origin is Origin.PEER
                assert replies == []

    async def test_a_crashed_handler_is_unknown(self, open_foreign_server):
        def crash(request: bytes, context):
            raise ZeroDivisionError("oh")

        async with open_foreign_server(unary={CALL: crash}) as (channel, _):
            with pytest.raises(RpcError, match="oh") as caught:
                await (await channel.call(CALL, b"")).receive()
            assert (caught.value.status, caught.value.origin) == (Status.UNKNOWN, Origin.PEER)


class TestDeadlines:
    async def test_the_server_is_told_and_this_side_keeps_it_too(self, open_foreign_server):
        left: list[float] = []
        noticed, ended = threading.Event(), threading.Event()

        def wait(request: bytes, context) -> bytes:
            left.append(context.time_remaining())
            context.add_callback(noticed.set)
            ended.wait(PATIENCE)
            return b"too late"

        async with open_foreign_server(unary={CALL: wait}) as (channel, _):
            call = await channel.call(CALL, b"", timeout=0.5)
            with pytest.raises(RpcError) as caught:
                await call.receive()
            assert caught.value.status is Status.DEADLINE_EXCEEDED
            assert await trio.to_thread.run_sync(noticed.wait, PATIENCE)
            ended.set()
        assert left[0] < PATIENCE

    async def test_a_server_that_gives_up_first_is_believed(self, open_foreign_server):
        def impatient(request: bytes, context) -> bytes:
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "mine was shorter")

        async with open_foreign_server(unary={CALL: impatient}) as (channel, _):
            call = await channel.call(CALL, b"", timeout=PATIENCE)
            with pytest.raises(RpcError, match="mine was shorter") as caught:
                await call.receive()
            assert (caught.value.status, caught.value.origin) == (Status.DEADLINE_EXCEEDED, Origin.PEER)


class TestLeaving:
    async def test_a_cancelled_call_ends_at_the_server_and_no_other_does(self, open_foreign_server):
        gone, go_on = threading.Event(), threading.Event()

        def wait(request: bytes, context):
            if request == b"first":
                context.add_callback(gone.set)
            yield b"here"
            go_on.wait(PATIENCE)
            yield b"still here"

        async with open_foreign_server(stream={STREAM: wait}) as (channel, _):
            first, second = await channel.call(STREAM, b"first"), await channel.call(STREAM, b"second")
            assert [await first.receive(), await second.receive()] == [b"here", b"here"]
            first.cancel()
            assert await trio.to_thread.run_sync(gone.wait, PATIENCE)
            go_on.set()
            assert await read_all(second) == [b"still here"]
            assert len(channel.links) == 1

    # The generated method wraps a second generator that ends when it is collected: at once, but trio says so.
    @pytest.mark.filterwarnings(r"ignore:Async generator .*_unary_stream' was garbage collected:ResourceWarning")
    async def test_leaving_a_streaming_stub_early_cancels_it_at_the_server(self, open_foreign_server):
        gone = threading.Event()

        def for_ever(request: bytes, context):
            context.add_callback(gone.set)
            while context.is_active():
                yield encode(GenerateResponse(chunk=GenerateStreamChunk(token_ids=[7])))

        async with open_foreign_server(stream={GENERATE: for_ever}) as (channel, _):
            async with aclosing(VllmEngineStub(channel).generate(GenerateRequest())) as replies:
                async for _reply in replies:
                    break
            assert await trio.to_thread.run_sync(gone.wait, PATIENCE)

    async def test_a_server_that_aborts_is_heard_after_what_it_had_sent(self, open_foreign_server):
        def give_up(request: bytes, context):
            yield b"1"
            yield b"2"
            context.abort(grpc.StatusCode.ABORTED, "enough")

        async with open_foreign_server(stream={STREAM: give_up}) as (channel, _):
            call = await channel.call(STREAM, b"")
            assert [await call.receive(), await call.receive()] == [b"1", b"2"]
            with pytest.raises(RpcError, match="enough") as caught:
                await call.receive()
            assert caught.value.status is Status.ABORTED

    async def test_a_server_that_cancels_the_call_is_heard(self, open_foreign_server):
        def cancel(request: bytes, context):
            yield b"1"
            context.cancel()

        async with open_foreign_server(stream={STREAM: cancel}) as (channel, _):
            call = await channel.call(STREAM, b"")
            assert await call.receive() == b"1"
            with pytest.raises(RpcError) as caught:
                await call.receive()
            assert caught.value.status is Status.CANCELLED


class TestSizes:
    @pytest.mark.parametrize("size", [0, 1, (4 << 20) - 5, 5 << 20, 32 << 20])
    async def test_a_message_of_any_size_goes_both_ways(self, open_foreign_server, size):
        message = bytes(range(256)) * (size // 256) + bytes(size % 256)
        async with open_foreign_server(unary={CALL: echo}) as (channel, _):
            assert await read_all(await channel.call(CALL, message)) == [message]

    async def test_a_message_over_the_servers_limit_is_its_refusal(self, open_foreign_server):
        limit = {"grpc.max_receive_message_length": 1000}
        async with open_foreign_server(unary={CALL: echo}, options=limit) as (channel, _):
            with pytest.raises(RpcError, match="1000") as caught:
                await (await channel.call(CALL, bytes(1001))).receive()
            assert (caught.value.status, caught.value.origin) == (Status.RESOURCE_EXHAUSTED, Origin.PEER)

    async def test_case_g2_the_usual_limit_of_4_mib_is_told_from_being_busy(self, open_foreign_server):
        usual = {"grpc.max_receive_message_length": 4 << 20}
        async with open_foreign_server(unary={CALL: echo}, options=usual) as (channel, _):
            with pytest.raises(RpcError) as caught:
                await (await channel.call(CALL, bytes((4 << 20) + 1))).receive()
            assert is_too_large(caught.value)
            assert await read_all(await channel.call(CALL, bytes(4 << 20))) == [bytes(4 << 20)]

    async def test_a_call_that_is_not_read_stops_the_server_and_no_other_call(self, open_foreign_server):
        offered: list[int] = []
        stop = threading.Event()

        def offer(request: bytes, context):
            while not stop.is_set():
                yield bytes(65_536)
                offered.append(1)

        async with open_foreign_server(unary={CALL: echo}, stream={STREAM: offer}) as (channel, _):
            slow = await channel.call(STREAM, b"")
            await slow.peek()
            for _attempt in range(50):
                assert await read_all(await channel.call(CALL, bytes(100_000))) == [bytes(100_000)]
            assert len(offered) < 100
            stop.set()
            slow.cancel()
            # All that came for the stream nobody read has been given back to the connection.
            for _attempt in range(5):
                assert await read_all(await channel.call(CALL, bytes(5_000_000))) == [bytes(5_000_000)]


class TestSharing:
    async def test_two_hundred_streams_share_one_connection(self, open_foreign_server):
        peers: set[str] = set()
        all_here = threading.Barrier(200)

        def wait_for_all(request: bytes, context):
            peers.add(context.peer())
            all_here.wait(PATIENCE)
            for number in range(10):
                yield request + b"%d" % number

        replies: dict[int, list[bytes]] = {}

        async def one(channel, name: int) -> None:
            replies[name] = await read_all(await channel.call(STREAM, b"%d/" % name))

        async with (
            open_foreign_server(stream={STREAM: wait_for_all}, threads=201) as (channel, _),
            trio.open_nursery() as nursery,
        ):
            for name in range(200):
                nursery.start_soon(one, channel, name)
        assert replies == {name: [b"%d/%d" % (name, number) for number in range(10)] for name in range(200)}
        assert len(peers) == 1

    async def test_a_thousand_streams_share_one_connection(self, open_foreign_server):
        """All of them are open before any is answered; the server works on a few at a time."""
        go_on = threading.Event()
        peers: set[str] = set()

        def answer(request: bytes, context):
            go_on.wait(PATIENCE)
            peers.add(context.peer())
            yield request
            yield request

        async with open_foreign_server(stream={STREAM: answer}) as (channel, _):
            calls = [await channel.call(STREAM, b"%d" % name) for name in range(1000)]
            assert channel.links[0].connection.open_streams == 1000
            go_on.set()
            replies = [await read_all(call) for call in calls]
            assert len(channel.links) == 1
        assert replies == [[b"%d" % name] * 2 for name in range(1000)]
        assert len(peers) == 1

    async def test_streams_beyond_a_servers_limit_go_over_further_connections(self, open_foreign_server):
        peers: set[str] = set()
        all_here = threading.Barrier(25)

        def wait_for_all(request: bytes, context) -> bytes:
            peers.add(context.peer())
            all_here.wait(PATIENCE)
            return request

        limit = {"grpc.max_concurrent_streams": 10}
        async with open_foreign_server(unary={CALL: wait_for_all}, options=limit, threads=30) as (channel, _):
            calls = [await channel.call(CALL, b"%d" % number) for number in range(25)]
            assert [await call.receive() for call in calls] == [b"%d" % number for number in range(25)]
            assert len(channel.links) == len(peers) == 5  # half of each is kept for control calls


class TestMetadata:
    async def test_text_and_binary_travel_both_ways(self, open_foreign_server):
        seen = []

        def handler(request: bytes, context) -> bytes:
            seen.extend(tuple(pair) for pair in context.invocation_metadata() if pair[0].startswith("x-"))
            context.send_initial_metadata((("x-early", "1"), ("x-early-bin", b"\x01")))
            context.set_trailing_metadata((("x-cost", "7"), ("x-proof-bin", b"\xff\x00"), ("x-proof-bin", b"")))
            return b""

        sent = [("x-text", "a b; c,d"), ("x-blob-bin", bytes(range(256))), ("x-blob-bin", b""), ("x-twice", "1")]
        async with open_foreign_server(unary={CALL: handler}) as (channel, _):
            call = await channel.call(CALL, b"", metadata=sent)
            assert await read_all(call) == [b""]
        assert sorted(seen) == sorted(sent)
        assert [pair for pair in call.initial_metadata if pair[0].startswith("x-")] == [
            ("x-early", "1"),
            ("x-early-bin", b"\x01"),
        ]
        assert call.trailing_metadata == [("x-cost", "7"), ("x-proof-bin", b"\xff\x00"), ("x-proof-bin", b"")]


class TestStopping:
    async def test_a_stream_outlives_the_servers_goaway(self, open_foreign_server):
        begun, go_on = threading.Event(), threading.Event()

        def slow(request: bytes, context):
            yield b"early"
            begun.set()
            go_on.wait(PATIENCE)
            yield from (b"%d" % number for number in range(100))

        async with open_foreign_server(unary={CALL: echo}, stream={STREAM: slow}) as (channel, server):
            call = await channel.call(STREAM, b"")
            assert await call.receive() == b"early"
            stopped = server.stop(PATIENCE)
            while channel.links[0].usable:  # until the GOAWAY has come
                await trio.lowlevel.checkpoint()
            with pytest.raises(LinkError):
                await channel.call(CALL, b"too late")
            go_on.set()
            assert await read_all(call) == [b"%d" % number for number in range(100)]
            assert await trio.to_thread.run_sync(stopped.wait, PATIENCE)

    async def test_a_server_that_stops_at_once_fails_its_streams(self, open_foreign_server):
        go_on = threading.Event()

        def slow(request: bytes, context):
            yield b"early"
            go_on.wait(PATIENCE)

        async with open_foreign_server(stream={STREAM: slow}) as (channel, server):
            call = await channel.call(STREAM, b"")
            assert await call.receive() == b"early"
            server.stop(0)
            with pytest.raises(RpcError) as caught:
                await call.receive()
            assert caught.value.status in (Status.UNAVAILABLE, Status.CANCELLED)
            go_on.set()

    async def test_a_server_that_stops_under_load_fails_every_call(self, open_foreign_server):
        errors: list[RpcError] = []
        received: set[ClientCall] = set()
        busy = trio.Event()

        def talk(request: bytes, context):
            while context.is_active():
                yield bytes(1000)

        async def read(channel) -> None:
            call = await channel.call(STREAM, b"")
            try:
                while await call.receive() is not None:
                    received.add(call)
                    if len(received) == 100:
                        busy.set()
            except RpcError as exc:
                errors.append(exc)

        async with (
            open_foreign_server(stream={STREAM: talk}, threads=100) as (channel, server),
            trio.open_nursery() as nursery,
        ):
            for _ in range(100):
                nursery.start_soon(read, channel)
            await busy.wait()
            server.stop(0)
        assert len(errors) == 100
        assert {error.status for error in errors} <= {Status.UNAVAILABLE, Status.CANCELLED}

    async def test_a_server_that_stops_with_grace_under_load_finishes_every_call(self, open_foreign_server):
        busy = threading.Barrier(101)
        told = threading.Event()
        replies: list[int] = []

        def talk(request: bytes, context):
            for number in range(100):
                yield b"%d" % number
                if number == 50:
                    busy.wait(PATIENCE)
                    told.wait(PATIENCE)

        async def read(channel) -> None:
            replies.append(len(await read_all(await channel.call(STREAM, b""))))

        async with open_foreign_server(stream={STREAM: talk}, threads=100) as (channel, server):
            async with trio.open_nursery() as nursery:
                for _ in range(100):
                    nursery.start_soon(read, channel)
                await trio.to_thread.run_sync(busy.wait, PATIENCE)
                server.stop(PATIENCE)
                while channel.links[0].usable:  # until the GOAWAY has come
                    await trio.lowlevel.checkpoint()
                told.set()
            assert replies == [100] * 100

    async def test_a_connection_that_grew_old_is_replaced_without_losing_a_call(self, open_foreign_server):
        """The server's age limit sends GOAWAY while calls keep coming."""
        old = {"grpc.max_connection_age_ms": 100, "grpc.max_connection_age_grace_ms": 10_000}
        async with open_foreign_server(unary={CALL: echo}, options=old) as (channel, _):
            seen = set()
            while len(seen) < 3:
                call = await channel.call(CALL, b"again")
                assert await read_all(call) == [b"again"]
                seen.add(channel.links[-1])

    async def test_nobody_listening_is_unavailable(self, open_foreign_server):
        async with open_foreign_server() as (channel, server):
            server.stop(0).wait(PATIENCE)
            with pytest.raises(GRPCError) as caught:
                await HealthStub(channel).check(ServiceHealthRequest())
            assert caught.value.status is Status.UNAVAILABLE
