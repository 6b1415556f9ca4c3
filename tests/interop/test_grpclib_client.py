"""grpclib's client calls our server. What a test asks of the client runs in its asyncio loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError

import pytest
import trio
from grpclib.client import Channel, StreamStreamMethod, StreamUnaryMethod, UnaryStreamMethod, UnaryUnaryMethod
from grpclib.config import Configuration
from grpclib.const import Cardinality, Status
from grpclib.encoding.proto import ProtoCodec
from grpclib.exceptions import GRPCError, StreamTerminatedError
from grpclib.metadata import Deadline

from trio_router.http2.settings import Http2Settings
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
from trio_router.rpc.server import ServerSettings
from trio_router.rpc.servercall import ServerCall

PATIENCE = 30.0
CALL = "/test.Service/Call"
OTHER = "/test.Service/Other"
FAILURES = [status for status in Status if status is not Status.OK]


async def echo(call: ServerCall) -> None:
    while (message := await call.receive()) is not None:
        await call.send(message)


class Health(HealthBase):
    async def check(self, health_check_request: ServiceHealthRequest) -> ServiceHealthResponse:
        assert health_check_request.service == "engine"
        return ServiceHealthResponse(status=ServingStatus.NOT_SERVING)


class Engine(VllmEngineBase):
    async def generate(self, generate_request: GenerateRequest):
        for token in range(generate_request.sampling_params.max_tokens or 0):
            yield GenerateResponse(chunk=GenerateStreamChunk(token_ids=[token]))


# What grpclib's user code does: each runs in the asyncio loop, with the channel first.


async def unary(channel: Channel, path: str, message: bytes = b"", **options) -> bytes:
    return await UnaryUnaryMethod(channel, path, bytes, bytes)(message, **options)


async def stream(channel: Channel, path: str, message: bytes = b"") -> list[bytes]:
    return await UnaryStreamMethod(channel, path, bytes, bytes)(message)


def open_both(channel: Channel, path: str, **options):
    return StreamStreamMethod(channel, path, bytes, bytes).open(**options)


class TestShapes:
    async def test_unary(self, open_server_for_grpclib):
        async with open_server_for_grpclib(raw={CALL: echo}) as (ask, _):
            assert await ask(unary, CALL, b"hello") == b"hello"

    async def test_replies_that_stream(self, open_server_for_grpclib):
        async def count(call: ServerCall) -> None:
            for number in range(int(await call.receive() or 0)):
                await call.send(b"%d" % number)

        async with open_server_for_grpclib(raw={CALL: count}) as (ask, _):
            assert await ask(stream, CALL, b"500") == [b"%d" % number for number in range(500)]

    async def test_requests_that_stream(self, open_server_for_grpclib):
        async def total(call: ServerCall) -> None:
            size = 0
            while (message := await call.receive()) is not None:
                size += len(message)
            await call.send(b"%d" % size)

        async def send_all(channel: Channel) -> bytes:
            method = StreamUnaryMethod(channel, CALL, bytes, bytes)
            return await method([bytes([number]) * number for number in range(200)])

        async with open_server_for_grpclib(raw={CALL: total}) as (ask, _):
            assert await ask(send_all) == b"19900"

    async def test_both_stream_and_each_reply_waits_for_its_request(self, open_server_for_grpclib):
        async def converse(channel: Channel) -> list[bytes]:
            replies = []
            async with open_both(channel, CALL) as call:
                for number in range(100):
                    await call.send_message(b"%d" % number)
                    replies.append(await call.recv_message())
                await call.end()
                assert await call.recv_message() is None
            return replies

        async with open_server_for_grpclib(raw={CALL: echo}) as (ask, _):
            assert await ask(converse) == [b"%d" % number for number in range(100)]

    async def test_a_call_without_any_message(self, open_server_for_grpclib):
        async def say_nothing(channel: Channel) -> list[bytes]:
            async with open_both(channel, CALL) as call:
                await call.send_request(end=True)
                return [message async for message in call]

        async with open_server_for_grpclib(raw={CALL: echo}) as (ask, _):
            assert await ask(say_nothing) == []

    async def test_the_generated_stubs_of_grpclibs_users_meet_the_generated_bases_here(self, open_server_for_grpclib):
        async def use_stubs(channel: Channel) -> tuple[ServingStatus, list[int]]:
            reply = await HealthStub(channel).check(ServiceHealthRequest(service="engine"))
            request = GenerateRequest(request_id="r")
            request.sampling_params.max_tokens = 100
            replies = [reply async for reply in VllmEngineStub(channel).generate(request)]
            return reply.status, [token for reply in replies for token in reply.chunk.token_ids]

        async with open_server_for_grpclib(Health(), Engine(), codec=ProtoCodec()) as (ask, _):
            assert await ask(use_stubs) == (ServingStatus.NOT_SERVING, list(range(100)))

    async def test_an_unknown_method_is_unimplemented(self, open_server_for_grpclib):
        async with open_server_for_grpclib() as (ask, _):
            with pytest.raises(GRPCError, match="no method /nobody") as caught:
                await ask(unary, "/nobody.Knows/This")
            assert caught.value.status is Status.UNIMPLEMENTED


class TestStatuses:
    @pytest.mark.parametrize("status", FAILURES, ids=lambda status: status.name)
    async def test_every_status_arrives_with_message_and_details(self, open_server_for_grpclib, status):
        async def fail(call: ServerCall) -> None:
            if await call.receive() == b"late":
                await call.send(b"first")
            raise GRPCError(status, "größer % als\n10", b"\x00\xffdetails")

        async def read(channel: Channel, request: bytes) -> tuple[list[bytes], GRPCError]:
            replies = []
            try:
                async with open_both(channel, CALL) as call:
                    await call.send_message(request, end=True)
                    async for message in call:
                        replies.append(message)  # noqa: PERF401  # what came before the error counts
            except GRPCError as exc:
                return replies, exc
            raise AssertionError("the call ended well")

        async with open_server_for_grpclib(raw={CALL: fail}) as (ask, _):
            for request, before in ((b"at once", []), (b"late", [b"first"])):
                replies, error = await ask(read, request)
                assert replies == before
                assert (error.status, error.message, error.details) == (status, "größer % als\n10", b"\x00\xffdetails")

    async def test_a_request_still_on_its_way_does_not_hide_the_answer(self, open_server_for_grpclib):
        """The server answers and asks for silence with RST_STREAM, while the client waits for credit to send on."""

        async def refuse(call: ServerCall) -> None:
            await call.receive()
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "not so much")

        async def send_for_ever(channel: Channel) -> None:
            async with open_both(channel, CALL) as call:
                while True:
                    await call.send_message(bytes(100_000))

        async with open_server_for_grpclib(raw={CALL: refuse}) as (ask, _):
            with pytest.raises(GRPCError, match="not so much"):
                await ask(send_for_ever)

    async def test_a_message_over_the_limit_is_refused_and_harms_nothing_else(self, open_server_for_grpclib):
        limit = ServerSettings(http2=Http2Settings(max_message_bytes=1 << 20))
        async with open_server_for_grpclib(raw={CALL: echo}, settings=limit) as (ask, _):
            with pytest.raises(GRPCError, match=r"max_message_bytes \(1048576\)") as caught:
                await ask(unary, CALL, bytes((1 << 20) + 1))
            assert caught.value.status is Status.RESOURCE_EXHAUSTED
            assert len(await ask(unary, CALL, bytes(1 << 20))) == 1 << 20


class TestDeadlines:
    async def test_the_handler_knows_the_deadline_and_is_cancelled_whoever_keeps_it_first(
        self, open_server_for_grpclib
    ):
        deadlines, ended = [], trio.Event()

        async def wait(call: ServerCall) -> None:
            deadlines.append(call.deadline)
            try:
                await trio.sleep_forever()
            finally:
                ended.set()

        async def ask_briefly(channel: Channel) -> None:
            await unary(channel, CALL, timeout=0.3)

        async with open_server_for_grpclib(raw={CALL: wait}) as (ask, server):
            begin = trio.current_time()
            with pytest.raises((asyncio.TimeoutError, GRPCError)) as caught:
                await ask(ask_briefly)
            assert getattr(caught.value, "status", Status.DEADLINE_EXCEEDED) is Status.DEADLINE_EXCEEDED
            await ended.wait()
            assert begin < deadlines[0] < begin + PATIENCE
            assert server.calls_in_flight == 0

    async def test_the_server_keeps_a_deadline_that_its_client_forgets(self, open_server_for_grpclib):
        class Forgotten(Deadline):
            """Says one thing to the peer and waits for another."""

            def __init__(self) -> None:
                self.answers = [PATIENCE, 0.05]

            def time_remaining(self) -> float:
                return self.answers.pop(0)

        async def wait(call: ServerCall) -> None:
            await trio.sleep_forever()

        async def forget(channel: Channel) -> None:
            call = channel.request(CALL, Cardinality.UNARY_UNARY, bytes, bytes, deadline=Forgotten())
            async with call:
                await call.send_message(b"")
                await call.recv_message()

        async with open_server_for_grpclib(raw={CALL: wait}) as (ask, server):
            with pytest.raises(GRPCError, match="the call's deadline has passed") as caught:
                await ask(forget)
            assert caught.value.status is Status.DEADLINE_EXCEEDED
            assert server.calls_in_flight == 0


class TestLeaving:
    @pytest.mark.parametrize("how", ["cancel", "leave the block", "cancel the task"])
    async def test_a_client_that_leaves_ends_its_handler_and_no_other(self, open_server_for_grpclib, how):
        """grpclib resets with NO_ERROR, whatever the reason."""
        ended, gone = [], trio.Event()

        async def wait(call: ServerCall) -> None:
            name = await call.receive()
            try:
                await call.send(b"here")
                await trio.sleep_forever()
            finally:
                ended.append(name)
                gone.set()

        async def stay(channel: Channel) -> None:
            async with open_both(channel, CALL) as call:
                await call.send_message(b"stays")
                await call.recv_message()
                staying.set()
                await call.recv_message()

        async def leave(channel: Channel) -> None:
            async with open_both(channel, CALL) as call:
                await call.send_message(b"leaves")
                await call.recv_message()
                if how == "cancel":
                    await call.cancel()
                elif how == "cancel the task":
                    asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)
                    await call.recv_message()
                else:
                    raise ZeroDivisionError

        async with open_server_for_grpclib(raw={CALL: wait, OTHER: echo}) as (ask, server):
            async with trio.open_nursery() as nursery:
                staying = asyncio.Event()
                nursery.start_soon(ask, stay)
                await ask(lambda _channel: staying.wait())
                try:
                    await ask(leave)
                except (CancelledError, ZeroDivisionError):
                    assert how != "cancel"
                await gone.wait()
                assert ended == [b"leaves"]
                assert server.calls_in_flight == 1
                assert await ask(unary, OTHER, b"fine") == b"fine"
                nursery.cancel_scope.cancel()
            while server.calls_in_flight:
                await trio.lowlevel.checkpoint()

    async def test_a_channel_that_closes_ends_all_its_handlers(self, open_server_for_grpclib):
        gone = trio.Event()

        async def wait(call: ServerCall) -> None:
            try:
                await call.send(b"here")
                await trio.sleep_forever()
            finally:
                gone.set()

        async def hang_up(channel: Channel) -> None:
            async with open_both(channel, CALL) as call:
                await call.send_message(b"")
                await call.recv_message()
                channel.close()

        async with open_server_for_grpclib(raw={CALL: wait}) as (ask, server):
            await ask(hang_up)
            await gone.wait()
            assert server.calls_in_flight == 0

    async def test_a_server_that_gives_a_call_up_ends_it_for_the_client(self, open_server_for_grpclib):
        async def give_up(call: ServerCall) -> None:
            await call.send(b"1")
            await call.receive()  # a client of grpclib's that is reset forgets what it has not read
            call.leave()

        async def read(channel: Channel) -> None:
            async with open_both(channel, CALL) as call:
                await call.send_request()
                replies.append(await call.recv_message())
                await call.send_message(b"read")
                await call.recv_message()

        replies: list[bytes] = []
        async with open_server_for_grpclib(raw={CALL: give_up}) as (ask, _):
            with pytest.raises(StreamTerminatedError, match="error_code: 8"):
                await ask(read)
        assert replies == [b"1"]


class TestMetadata:
    async def test_text_and_binary_travel_both_ways(self, open_server_for_grpclib):
        seen = []

        async def handler(call: ServerCall) -> None:
            seen.extend(pair for pair in call.metadata if pair[0].startswith("x-"))
            call.send_headers(metadata=[("x-early", "1"), ("x-early-bin", b"\x01")])
            call.trailing_metadata = [("x-cost", "7"), ("x-proof-bin", b"\xff\x00"), ("x-proof-bin", b"")]
            await call.send(b"")

        sent = [("x-text", "a b; c,d"), ("x-blob-bin", bytes(range(256))), ("x-blob-bin", b""), ("x-twice", "1")]

        async def talk(channel: Channel) -> list[list[tuple[str, str | bytes]]]:
            async with open_both(channel, CALL, metadata=sent) as call:
                await call.send_message(b"", end=True)
                await call.recv_message()
                await call.recv_trailing_metadata()
                return [list(metadata.items()) for metadata in (call.initial_metadata, call.trailing_metadata)]

        async with open_server_for_grpclib(raw={CALL: handler}) as (ask, _):
            headers, trailers = await ask(talk)
        assert headers == [("x-early", "1"), ("x-early-bin", b"\x01")]
        assert sorted(seen) == sorted(sent)
        assert trailers == [("x-cost", "7"), ("x-proof-bin", b"\xff\x00"), ("x-proof-bin", b"")]


class TestSizes:
    @pytest.mark.parametrize("size", [0, 1, (4 << 20) - 5, 5 << 20, 32 << 20])
    async def test_a_message_of_any_size_goes_both_ways(self, open_server_for_grpclib, size):
        message = bytes(range(256)) * (size // 256) + bytes(size % 256)
        async with open_server_for_grpclib(raw={CALL: echo}) as (ask, _):
            assert await ask(unary, CALL, message) == message

    async def test_a_client_that_does_not_read_stops_the_handler_and_no_other_stream(self, open_server_for_grpclib):
        offered = 0

        async def offer(call: ServerCall) -> None:
            nonlocal offered
            while True:
                await call.send(bytes(65_536))
                offered += 1

        async def read_one_and_talk_on(channel: Channel) -> None:
            async with open_both(channel, CALL) as slow:
                await slow.send_message(b"")
                assert len(await slow.recv_message()) == 65_536
                for _ in range(50):
                    assert await unary(channel, OTHER, bytes(10_000)) == bytes(10_000)
                await slow.cancel()

        # A stream's window is well below the connection's, which grpclib gives no credit for what nobody reads.
        narrow = Configuration(http2_stream_window_size=1 << 17)
        async with open_server_for_grpclib(raw={CALL: offer, OTHER: echo}, config=narrow) as (ask, _):
            await ask(read_one_and_talk_on)
            assert offered < 10


class TestSharing:
    async def test_two_hundred_and_fifty_streams_share_one_connection(self, open_server_for_grpclib):
        peers, all_here = set(), trio.Event()

        async def wait_for_all(call: ServerCall) -> None:
            peers.add(call.peer)
            name = await call.receive()
            if server.calls_in_flight == 250:
                all_here.set()
            await all_here.wait()
            for number in range(10):
                await call.send(name + b"%d" % number)

        async def read_all(channel: Channel) -> list[list[bytes]]:
            await unary(channel, OTHER)  # grpclib makes a connection for each of many first calls
            return await asyncio.gather(*(stream(channel, CALL, b"%d/" % name) for name in range(250)))

        async with open_server_for_grpclib(raw={CALL: wait_for_all, OTHER: echo}) as (ask, server):
            replies = await ask(read_all)
        assert replies == [[b"%d/%d" % (name, number) for number in range(10)] for name in range(250)]
        assert len(peers) == 1

    async def test_more_calls_than_the_server_takes_at_once_wait_their_turn(self, open_server_for_grpclib):
        most = 0

        async def count(call: ServerCall) -> None:
            nonlocal most
            most = max(most, server.calls_in_flight)
            await trio.lowlevel.checkpoint()
            await call.send(b"")

        async def call_all(channel: Channel) -> list[bytes]:
            await unary(channel, OTHER)  # from now on the client knows the limit
            return await asyncio.gather(*(unary(channel, CALL) for _ in range(50)))

        few = ServerSettings(http2=Http2Settings(max_concurrent_streams=10))
        async with open_server_for_grpclib(raw={CALL: count, OTHER: echo}, settings=few) as (ask, server):
            assert await ask(call_all) == [b""] * 50
        assert 1 < most <= 10


class TestStopping:
    async def test_grpclib_ends_its_calls_at_a_goaway_and_the_drain_ends_with_them(self, open_server_for_grpclib):
        """It hangs up at the word and lets no call finish; its next call dials anew."""
        waiting = trio.Event()

        async def wait(call: ServerCall) -> None:
            await call.send(b"here")
            waiting.set()
            await trio.sleep_forever()

        async def read(channel: Channel) -> None:
            with pytest.raises(StreamTerminatedError, match=r"GOAWAY|Connection lost"):
                await stream(channel, CALL)

        async with open_server_for_grpclib(raw={CALL: wait}) as (ask, server):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, read)
                await waiting.wait()
                server.drain()
            while server.calls_in_flight:
                await trio.lowlevel.checkpoint()
            with pytest.raises(OSError, match="Connect call failed"):
                await ask(unary, CALL)

    async def test_a_server_that_stops_under_load_ends_every_call(self, open_server_for_grpclib):
        ends: list[object] = []
        busy = trio.Event()
        sent = 0

        async def talk(call: ServerCall) -> None:
            nonlocal sent
            while True:
                await call.send(bytes(1000))
                sent += 1
                if server.calls_in_flight == 200 and sent > 2000:
                    busy.set()
                elif sent > 10 * server.calls_in_flight:
                    await busy.wait()  # for those who have not come yet

        async def read(channel: Channel) -> None:
            async with open_both(channel, CALL) as call:
                await call.send_message(b"")
                async for _ in call:
                    pass

        async def read_all(channel: Channel) -> list[object]:
            return await asyncio.gather(*(read(channel) for _ in range(200)), return_exceptions=True)

        async def collect(ask) -> None:
            ends.extend(await ask(read_all))

        async with trio.open_nursery() as nursery, open_server_for_grpclib(raw={CALL: talk}) as (ask, server):
            nursery.start_soon(collect, ask)
            await busy.wait()
        assert server.calls_in_flight == 0
        assert {type(end) for end in ends} == {StreamTerminatedError}
        assert len(ends) == 200
