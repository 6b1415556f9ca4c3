"""grpcio's client calls our server."""

from __future__ import annotations

from functools import partial

import grpc
import pytest
import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from trio_router.http2.settings import Http2Settings
from trio_router.protocol.codec import decode, encode
from trio_router.protocol.messages import (
    GenerateRequest,
    GenerateResponse,
    GenerateStreamChunk,
    HealthBase,
    ServiceHealthRequest,
    ServiceHealthResponse,
    ServingStatus,
    VllmEngineBase,
)
from trio_router.rpc.server import ServerSettings
from trio_router.rpc.servercall import ServerCall

PATIENCE = 30.0
CALL = "/test.Service/Call"
OTHER = "/test.Service/Other"
CHECK = "/grpc.health.v1.Health/Check"
GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"

in_thread = trio.to_thread.run_sync
FAILURES = [status for status in Status if status is not Status.OK]


def code(status: Status) -> grpc.StatusCode:
    return next(c for c in grpc.StatusCode if c.value[0] == status.value)


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


class TestShapes:
    async def test_a_unary_method_of_a_generated_base_answers(self, open_server):
        async with open_server(Health()) as (client, _):
            reply = await in_thread(client.unary, CHECK, encode(ServiceHealthRequest(service="engine")))
        assert decode(ServiceHealthResponse, reply).status is ServingStatus.NOT_SERVING

    async def test_a_streaming_method_of_a_generated_base_answers_in_order(self, open_server):
        request = GenerateRequest(request_id="r")
        request.sampling_params.max_tokens = 500
        async with open_server(Engine()) as (client, _):
            replies = await in_thread(lambda: list(client.stream(GENERATE, encode(request))))
        assert [list(decode(GenerateResponse, reply).chunk.token_ids) for reply in replies] == [[n] for n in range(500)]

    async def test_a_method_that_a_base_does_not_override_is_unimplemented(self, open_server):
        async with open_server(Health()) as (client, _):
            for path in ("/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/List", "/nobody.Knows/This"):
                with pytest.raises(grpc.RpcError) as caught:
                    await in_thread(lambda path=path: list(client.stream(path)))
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    async def test_requests_may_stream_with_the_replies_or_before_them(self, open_server):
        async def total(call: ServerCall) -> None:
            size = 0
            while (message := await call.receive()) is not None:
                size += len(message)
            await call.send(b"%d" % size)

        messages = [bytes([n]) * n for n in range(200)]
        async with open_server(raw={CALL: echo, OTHER: total}) as (client, _):
            both = client.channel.stream_stream(CALL)
            assert await in_thread(lambda: list(both(iter(messages), timeout=PATIENCE))) == messages
            before = client.channel.stream_unary(OTHER)
            assert await in_thread(lambda: before(iter(messages), timeout=PATIENCE)) == b"19900"


class TestStatuses:
    @pytest.mark.parametrize("status", FAILURES, ids=lambda status: status.name)
    async def test_every_status_arrives_with_message_and_details(self, open_server, status):
        async def fail(call: ServerCall) -> None:
            if await call.receive() == b"late":
                await call.send(b"first")
            raise GRPCError(status, "größer % als\n10", b"\x00\xffdetails")

        def outcome(client, request: bytes):
            call = client.stream(CALL, request)
            replies = []
            with pytest.raises(grpc.RpcError):
                replies.extend(call)
            return replies, call.code(), call.details(), dict(call.trailing_metadata())

        async with open_server(raw={CALL: fail}) as (client, _):
            for request in (b"at once", b"late"):
                _, told, message, trailers = await in_thread(outcome, client, request)
                assert (told, message) == (code(status), "größer % als\n10")
                assert trailers["grpc-status-details-bin"] == b"\x00\xffdetails"

    async def test_a_request_still_on_its_way_does_not_hide_the_answer(self, open_server):
        """The server answers, then asks for silence with RST_STREAM (RFC 9113 8.1)."""
        async with open_server(Health()) as (client, _):
            for _attempt in range(5):
                with pytest.raises(grpc.RpcError) as caught:
                    await in_thread(client.unary, "/nobody.Knows/This", bytes(3_000_000))
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    async def test_a_compressed_request_is_refused_in_words(self, open_server):
        async with open_server(raw={CALL: echo}) as (client, _):
            with pytest.raises(grpc.RpcError) as caught:
                await in_thread(partial(client.unary, CALL, bytes(1000), compression=grpc.Compression.Gzip))
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert "gzip" in caught.value.details()
            assert await in_thread(client.unary, CALL, b"plain") == b"plain"

    async def test_a_message_over_the_limit_is_refused_and_harms_nothing_else(self, open_server):
        limit = ServerSettings(http2=Http2Settings(max_message_bytes=4 << 20))
        async with open_server(raw={CALL: echo}, settings=limit) as (client, _):
            with pytest.raises(grpc.RpcError) as caught:
                await in_thread(client.unary, CALL, bytes((4 << 20) + 1))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "max_message_bytes (4194304)" in caught.value.details()
            assert len(await in_thread(client.unary, CALL, bytes(4 << 20))) == 4 << 20


class TestDeadlines:
    async def test_the_handler_knows_the_deadline_and_is_cancelled(self, open_server):
        deadlines, ended = [], trio.Event()

        async def wait(call: ServerCall) -> None:
            deadlines.append(call.deadline)
            try:
                await trio.sleep_forever()
            finally:
                ended.set()

        async with open_server(raw={CALL: wait}) as (client, server):
            begin = trio.current_time()
            with pytest.raises(grpc.RpcError) as caught:
                await in_thread(partial(client.unary, CALL, timeout=0.5))
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await ended.wait()
            assert begin < deadlines[0] < begin + PATIENCE
            assert server.calls_in_flight == 0

    async def test_a_call_without_a_deadline_has_none(self, open_server):
        seen = []

        async def note(call: ServerCall) -> None:
            seen.append(call.deadline)
            await call.send(b"")

        async with open_server(raw={CALL: note}) as (client, _):
            await in_thread(lambda: client.channel.unary_unary(CALL)(b""))
        assert seen == [float("inf")]


class TestLeaving:
    async def test_a_client_that_cancels_ends_its_handler_and_no_other(self, open_server):
        ended = []

        async def wait(call: ServerCall) -> None:
            name = await call.receive()
            try:
                await call.send(b"here")
                await trio.sleep_forever()
            except trio.Cancelled:
                ended.append(name)
                gone.set()
                raise

        gone = trio.Event()
        async with open_server(raw={CALL: wait, OTHER: echo}) as (client, server):
            calls = [await in_thread(client.stream, CALL, name) for name in (b"first", b"second")]
            for call in calls:
                assert await in_thread(next, call) == b"here"
            calls[0].cancel()
            await gone.wait()
            assert ended == [b"first"]
            assert server.calls_in_flight == 1
            assert await in_thread(client.unary, OTHER, b"fine") == b"fine"
            calls[1].cancel()

    async def test_a_channel_that_closes_ends_all_its_handlers(self, open_server):
        gone = trio.Event()

        async def wait(call: ServerCall) -> None:
            try:
                await call.send(b"here")
                await trio.sleep_forever()
            finally:
                gone.set()

        async with open_server(raw={CALL: wait}) as (client, server):
            call = await in_thread(client.stream, CALL)
            assert await in_thread(next, call) == b"here"
            client.channel.close()
            await gone.wait()
            assert server.calls_in_flight == 0

    async def test_a_server_that_aborts_ends_the_stream_after_what_it_had_sent(self, open_server):
        async def give_up(call: ServerCall) -> None:
            await call.send(b"1")
            await call.send(b"2")
            raise GRPCError(Status.ABORTED, "enough")

        def read(client):
            call = client.stream(CALL)
            replies = [next(call), next(call)]
            with pytest.raises(grpc.RpcError):
                next(call)
            return replies, call.code(), call.details()

        async with open_server(raw={CALL: give_up}) as (client, _):
            assert await in_thread(read, client) == ([b"1", b"2"], grpc.StatusCode.ABORTED, "enough")

    async def test_a_server_that_is_cancelled_ends_its_calls(self, open_server):
        scopes = []

        async def wait(call: ServerCall) -> None:
            await call.send(b"here")
            with trio.CancelScope() as scope:
                scopes.append(scope)
                await trio.sleep_forever()
            call.leave()

        async with open_server(raw={CALL: wait}) as (client, _):
            call = await in_thread(client.stream, CALL)
            assert await in_thread(next, call) == b"here"
            scopes[0].cancel()
            with pytest.raises(grpc.RpcError) as caught:
                await in_thread(next, call)
            assert caught.value.code() is grpc.StatusCode.CANCELLED


class TestSizes:
    @pytest.mark.parametrize("size", [0, 1, (4 << 20) - 5, 5 << 20, 32 << 20])
    async def test_a_message_of_any_size_goes_both_ways(self, open_server, size):
        message = bytes(range(256)) * (size // 256) + bytes(size % 256)
        async with open_server(raw={CALL: echo}) as (client, _):
            assert await in_thread(client.unary, CALL, message) == message

    async def test_a_client_that_does_not_read_stops_the_handler_and_no_other_stream(self, open_server):
        offered = 0

        async def offer(call: ServerCall) -> None:
            nonlocal offered
            while True:
                await call.send(bytes(65_536))
                offered += 1

        # Without its bandwidth estimate the foreign side's windows stay as small as the protocol begins with.
        narrow = {"grpc.http2.bdp_probe": 0, "grpc.http2.lookahead_bytes": 65_536}
        async with open_server(raw={CALL: offer, OTHER: echo}, options=narrow) as (client, _):
            slow = await in_thread(client.stream, CALL)
            assert len(await in_thread(next, slow)) == 65_536
            for _ in range(50):
                assert await in_thread(client.unary, OTHER, bytes(10_000)) == bytes(10_000)
            assert offered < 200
            slow.cancel()


class TestSharing:
    async def test_two_hundred_streams_share_one_connection(self, open_server):
        peers, all_here = set(), trio.Event()

        async def wait_for_all(call: ServerCall) -> None:
            peers.add(call.peer)
            name = await call.receive()
            if server.calls_in_flight == 200:
                all_here.set()
            await all_here.wait()
            for number in range(10):
                await call.send(name + b"%d" % number)

        def read_all(client):
            calls = [client.stream(CALL, b"%d/" % name) for name in range(200)]
            return [list(call) for call in calls]

        async with open_server(raw={CALL: wait_for_all}) as (client, server):
            replies = await in_thread(read_all, client)
        assert replies == [[b"%d/%d" % (name, number) for number in range(10)] for name in range(200)]
        assert len(peers) == 1

    async def test_a_thousand_streams_share_one_connection(self, open_server):
        peers, all_here = set(), trio.Event()

        async def wait_for_all(call: ServerCall) -> None:
            peers.add(call.peer)
            name = await call.receive()
            if server.calls_in_flight == 1000:
                all_here.set()
            await all_here.wait()
            await call.send(name)
            await call.send(name)

        def read_all(client):
            calls = [client.stream(CALL, b"%d" % name) for name in range(1000)]
            return [list(call) for call in calls]

        async with open_server(raw={CALL: wait_for_all}) as (client, server):
            replies = await in_thread(read_all, client)
        assert replies == [[b"%d" % name] * 2 for name in range(1000)]
        assert len(peers) == 1

    async def test_more_calls_than_the_server_takes_at_once_wait_their_turn(self, open_server):
        most = 0

        async def count(call: ServerCall) -> None:
            nonlocal most
            most = max(most, server.calls_in_flight)
            await trio.lowlevel.checkpoint()
            await call.send(b"")

        def call_all(client):
            calls = [client.channel.unary_unary(CALL).future(b"", timeout=PATIENCE) for _ in range(50)]
            return [call.result() for call in calls]

        few = ServerSettings(http2=Http2Settings(max_concurrent_streams=10))
        async with open_server(raw={CALL: count, OTHER: echo}, settings=few) as (client, server):
            await in_thread(client.unary, OTHER)  # from now on the client knows the limit
            assert await in_thread(call_all, client) == [b""] * 50
        assert 1 < most <= 10


class TestMetadata:
    async def test_text_and_binary_travel_both_ways(self, open_server):
        seen = []

        async def handler(call: ServerCall) -> None:
            seen.extend(pair for pair in call.metadata if pair[0].startswith("x-"))
            call.send_headers(metadata=[("x-early", "1"), ("x-early-bin", b"\x01")])
            call.trailing_metadata = [("x-cost", "7"), ("x-proof-bin", b"\xff\x00"), ("x-proof-bin", b"")]
            await call.send(b"")

        def ask(client):
            sent = (("x-text", "a b; c,d"), ("x-blob-bin", bytes(range(256))), ("x-blob-bin", b""), ("x-twice", "1"))
            _, call = client.channel.unary_unary(CALL).with_call(b"", timeout=PATIENCE, metadata=sent)
            early = [tuple(pair) for pair in call.initial_metadata() if pair[0].startswith("x-")]
            return sent, early, [tuple(pair) for pair in call.trailing_metadata()]

        async with open_server(raw={CALL: handler}) as (client, _):
            sent, early, trailers = await in_thread(ask, client)
        assert sorted(seen) == sorted(sent)
        assert early == [("x-early", "1"), ("x-early-bin", b"\x01")]
        assert trailers == [("x-cost", "7"), ("x-proof-bin", b"\xff\x00"), ("x-proof-bin", b"")]
