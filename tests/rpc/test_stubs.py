"""betterproto's generated stubs and service bases, unchanged, over our own client and server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import betterproto
import grpclib.const
import pytest
import trio
import trio.testing
from betterproto.grpc.grpclib_server import ServiceBase
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.metadata import Deadline

from trio_router.http2.settings import Http2Settings
from trio_router.protocol.codec import encode
from trio_router.protocol.messages import (
    AbortRequest,
    AbortResponse,
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
from trio_router.rpc.channel import open_channel
from trio_router.rpc.memory import MemoryNetwork
from trio_router.rpc.metadata import Origin, RpcError
from trio_router.rpc.servercall import ServerCall

CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"

# A generated streaming method wraps a second generator, which nobody closes: it ends when it is collected. That is at
# once, but trio says so whenever a generator ends that way.
early_exit = pytest.mark.filterwarnings(
    r"ignore:Async generator .*_unary_stream' was garbage collected:ResourceWarning"
)


def chunk(token: int) -> GenerateResponse:
    return GenerateResponse(chunk=GenerateStreamChunk(token_ids=[token]))


class Engine(VllmEngineBase):
    """Streams for ever when asked for no tokens; `left` tells how its generator was left."""

    def __init__(self) -> None:
        self.left: list[str] = []
        self.sent = 0

    async def generate(self, generate_request: GenerateRequest) -> AsyncIterator[GenerateResponse]:
        try:
            token = 0
            while token != (generate_request.sampling_params.max_tokens or -1):
                yield chunk(token)
                self.sent += 1
                token += 1
        except BaseException as exc:
            self.left.append(type(exc).__name__)
            raise
        else:
            self.left.append("finished")

    async def abort(self, abort_request: AbortRequest) -> AbortResponse:
        raise GRPCError(Status.NOT_FOUND, "no such request: " + ", ".join(abort_request.request_ids))


class Health(HealthBase):
    def __init__(self) -> None:
        self.asked: list[str] = []

    async def check(self, health_check_request: ServiceHealthRequest) -> ServiceHealthResponse:
        self.asked.append(health_check_request.service)
        return ServiceHealthResponse(status=ServingStatus.SERVING)


def request(tokens: int) -> GenerateRequest:
    message = GenerateRequest(request_id="r")
    message.sampling_params.max_tokens = tokens
    return message


class TestUnary:
    async def test_a_method_gets_its_reply(self, open_pair, autojump_clock):
        health = Health()
        async with open_pair(health) as (channel, server):
            reply = await HealthStub(channel).check(ServiceHealthRequest(service="engine"))
            assert reply.status is ServingStatus.SERVING
            assert health.asked == ["engine"]
            assert server.calls_in_flight == channel.links[0].connection.open_streams == 0

    async def test_several_services_share_a_server(self, open_pair, autojump_clock):
        async with open_pair(Health(), Engine()) as (channel, _):
            await HealthStub(channel).check(ServiceHealthRequest())
            async with aclosing(VllmEngineStub(channel).generate(request(2))) as replies:
                assert [reply async for reply in replies] == [chunk(0), chunk(1)]

    async def test_a_status_is_a_grpcerror(self, open_pair, autojump_clock):
        async with open_pair(Engine()) as (channel, _):
            with pytest.raises(GRPCError) as caught:
                await VllmEngineStub(channel).abort(AbortRequest(request_ids=["a", "b"]))
            assert (caught.value.status, caught.value.message) == (Status.NOT_FOUND, "no such request: a, b")

    async def test_a_method_the_service_does_not_override_is_unimplemented(self, open_pair, autojump_clock):
        async with open_pair(Engine(), Health()) as (channel, _):
            with pytest.raises(GRPCError) as caught:
                await VllmEngineStub(channel).health_check(ServiceHealthRequest())
            assert caught.value.status is Status.UNIMPLEMENTED
            async with aclosing(HealthStub(channel).watch(ServiceHealthRequest())) as replies:
                with pytest.raises(GRPCError) as caught:
                    await anext(replies)
            assert caught.value.status is Status.UNIMPLEMENTED

    @pytest.mark.parametrize("count", [0, 2, 3])
    async def test_any_number_of_replies_but_one_is_an_error(self, open_pair, autojump_clock, count):
        async def answer(call: ServerCall) -> None:
            for _ in range(count):
                await call.send(encode(ServiceHealthResponse()))

        async with open_pair(raw={CHECK: answer}) as (channel, server):
            with pytest.raises(GRPCError, match="without a reply" if count == 0 else "two replies") as caught:
                await HealthStub(channel).check(ServiceHealthRequest())
            assert caught.value.status is Status.INTERNAL
            await trio.testing.wait_all_tasks_blocked()
            assert server.calls_in_flight == channel.links[0].connection.open_streams == 0

    async def test_an_error_after_the_reply_is_an_error(self, open_pair, autojump_clock):
        async def answer(call: ServerCall) -> None:
            await call.send(encode(ServiceHealthResponse()))
            raise GRPCError(Status.DATA_LOSS, "forget it")

        async with open_pair(raw={CHECK: answer}) as (channel, _):
            with pytest.raises(GRPCError, match="DATA_LOSS"):
                await HealthStub(channel).check(ServiceHealthRequest())

    async def test_a_reply_that_is_no_message_is_the_peers_error(self, open_pair, autojump_clock):
        async def answer(call: ServerCall) -> None:
            await call.send(b"\xff\xff\xff")

        async with open_pair(raw={CHECK: answer, WATCH: answer}) as (channel, _):
            with pytest.raises(GRPCError, match="reply") as caught:
                await HealthStub(channel).check(ServiceHealthRequest())
            assert caught.value.status is Status.INTERNAL
            async with aclosing(HealthStub(channel).watch(ServiceHealthRequest())) as replies:
                with pytest.raises(GRPCError, match="reply"):
                    await anext(replies)

    async def test_a_request_that_is_no_message_is_the_callers_error(self, open_pair, autojump_clock):
        async with open_pair(Health()) as (channel, _):
            for message in (b"\xff\xff\xff", b"\x0a\xff"):
                call = await channel.call(CHECK, message)
                with pytest.raises(RpcError) as caught:
                    await call.receive()
                assert caught.value.status is Status.INVALID_ARGUMENT
            call = await channel.start(CHECK)
            call.end_sending()
            with pytest.raises(RpcError, match="without a request") as caught:
                await call.receive()
            assert caught.value.status is Status.INVALID_ARGUMENT

    async def test_nobody_listening_is_unavailable(self, autojump_clock):
        async with open_channel("memory:7", dialer=MemoryNetwork().dial) as channel:
            with pytest.raises(GRPCError, match="memory:7") as caught:
                await HealthStub(channel).check(ServiceHealthRequest())
            assert caught.value.status is Status.UNAVAILABLE
            assert isinstance(caught.value, RpcError)
            assert caught.value.origin is Origin.REFUSED
            async with aclosing(HealthStub(channel).watch(ServiceHealthRequest())) as replies:
                with pytest.raises(GRPCError) as caught:
                    await anext(replies)
            assert caught.value.status is Status.UNAVAILABLE


class TestServerStreaming:
    async def test_replies_come_in_order_and_the_generator_ends(self, open_pair, autojump_clock):
        engine = Engine()
        async with open_pair(engine) as (channel, server):
            async with aclosing(VllmEngineStub(channel).generate(request(200))) as replies:
                assert [reply async for reply in replies] == [chunk(token) for token in range(200)]
            assert engine.left == ["finished"]
            assert server.calls_in_flight == channel.links[0].connection.open_streams == 0

    async def test_a_handler_may_yield_nothing(self, open_pair, autojump_clock):
        class Silent(HealthBase):
            async def watch(self, health_check_request: ServiceHealthRequest) -> AsyncIterator[ServiceHealthResponse]:
                return
                yield

        async with (
            open_pair(Silent()) as (channel, _),
            aclosing(HealthStub(channel).watch(ServiceHealthRequest())) as replies,
        ):
            assert [reply async for reply in replies] == []

    async def test_a_handler_may_return_any_async_iterable(self, open_pair, autojump_clock):
        class Replies:
            def __init__(self) -> None:
                self.left = 3

            def __aiter__(self) -> Replies:
                return self

            async def __anext__(self) -> ServiceHealthResponse:
                self.left -= 1
                if self.left < 0:
                    raise StopAsyncIteration
                return ServiceHealthResponse()

        class Watched(HealthBase):
            def watch(self, health_check_request: ServiceHealthRequest) -> Replies:
                return Replies()

        async with (
            open_pair(Watched()) as (channel, _),
            aclosing(HealthStub(channel).watch(ServiceHealthRequest())) as replies,
        ):
            assert len([reply async for reply in replies]) == 3

    @early_exit
    @pytest.mark.parametrize("how", ["break", "error", "cancel", "deadline"])
    async def test_leaving_early_closes_the_handlers_generator(self, open_pair, autojump_clock, how):
        engine = Engine()
        async with open_pair(engine) as (channel, server):

            async def read(scope: trio.CancelScope) -> str:
                seen = 0
                async with aclosing(VllmEngineStub(channel).generate(GenerateRequest(), timeout=60)) as replies:
                    async for _reply in replies:
                        seen += 1
                        if seen < 3:
                            continue
                        if how == "break":
                            break
                        if how == "error":
                            raise KeyError("mine")
                        if how == "cancel":
                            scope.cancel()
                        elif seen == 3:
                            await trio.sleep(100)
                return "left"

            outcome = "cancelled"
            with trio.CancelScope() as scope:
                try:
                    outcome = await read(scope)
                except (KeyError, GRPCError) as exc:
                    outcome = str(exc)
            expected = {"break": "left", "error": "mine", "cancel": "cancelled", "deadline": "DEADLINE_EXCEEDED"}
            assert expected[how] in outcome
            await trio.testing.wait_all_tasks_blocked()
            assert len(engine.left) == 1
            assert engine.left[0] in ("Cancelled", "GeneratorExit")
            assert server.calls_in_flight == channel.links[0].connection.open_streams == 0
            # The same link serves the next call.
            async with aclosing(VllmEngineStub(channel).generate(request(1))) as replies:
                assert [reply async for reply in replies] == [chunk(0)]
            assert len(channel.links) == 1

    async def test_a_reader_that_rests_stops_the_handler(self, open_pair, autojump_clock):
        engine = Engine()
        small = Http2Settings(stream_window_bytes=500)
        async with (
            open_pair(engine, client_http2=small) as (channel, _),
            aclosing(VllmEngineStub(channel).generate(request(1000))) as replies,
        ):
            assert await anext(replies) == chunk(0)
            await trio.testing.wait_all_tasks_blocked()
            assert engine.sent < 200
            assert len([reply async for reply in replies]) == 999

    async def test_an_error_after_some_replies_comes_after_them(self, open_pair, autojump_clock):
        class Failing(HealthBase):
            async def watch(self, health_check_request: ServiceHealthRequest) -> AsyncIterator[ServiceHealthResponse]:
                yield ServiceHealthResponse(status=ServingStatus.SERVING)
                raise GRPCError(Status.ABORTED, "restarting")

        async with (
            open_pair(Failing()) as (channel, _),
            aclosing(HealthStub(channel).watch(ServiceHealthRequest())) as replies,
        ):
            assert (await anext(replies)).status is ServingStatus.SERVING
            with pytest.raises(GRPCError, match="restarting"):
                await anext(replies)


class TestDeadlines:
    @pytest.mark.parametrize(("of_stub", "of_call"), [(None, 3.0), (3.0, None), (300.0, 3.0), (1.0, 3.0)])
    async def test_a_timeout_may_be_given_with_the_call_or_with_the_stub(
        self, open_pair, autojump_clock, of_stub, of_call
    ):
        class Sleepy(HealthBase):
            async def check(self, health_check_request: ServiceHealthRequest) -> ServiceHealthResponse:
                await trio.sleep_forever()
                raise AssertionError

        async with open_pair(Sleepy()) as (channel, server):
            begin = trio.current_time()
            with pytest.raises(GRPCError) as caught:
                await HealthStub(channel, timeout=of_stub).check(ServiceHealthRequest(), timeout=of_call)
            assert caught.value.status is Status.DEADLINE_EXCEEDED
            assert trio.current_time() - begin == pytest.approx(3.0)
            await trio.testing.wait_all_tasks_blocked()
            assert server.calls_in_flight == 0

    async def test_a_grpclib_deadline_is_seconds_left_on_trios_clock(self, open_pair, autojump_clock):
        """grpclib's class reads the system's clock, which is not the one a call is timed by."""
        seen = []

        class Noting(HealthBase):
            async def check(self, health_check_request: ServiceHealthRequest) -> ServiceHealthResponse:
                seen.append(trio.current_effective_deadline() - trio.current_time())
                return ServiceHealthResponse()

        async with open_pair(Noting()) as (channel, _):
            stub = HealthStub(channel, deadline=Deadline.from_timeout(50))
            await stub.check(ServiceHealthRequest())
            await stub.check(ServiceHealthRequest(), timeout=7)
            await stub.check(ServiceHealthRequest(), timeout=700)
        assert seen == [pytest.approx(50, abs=10), pytest.approx(7, abs=1e-3), pytest.approx(50, abs=10)]

    async def test_a_deadline_that_has_passed_fails_the_call(self, open_pair, autojump_clock):
        async with open_pair(Health()) as (channel, _):
            with pytest.raises(GRPCError) as caught:
                await HealthStub(channel, deadline=Deadline.from_timeout(-1)).check(ServiceHealthRequest())
            assert caught.value.status is Status.DEADLINE_EXCEEDED


class TestMetadata:
    @pytest.mark.parametrize("metadata", [{"x-a": "1", "x-b-bin": b"\x00"}, [("x-a", "1"), ("x-b-bin", b"\x00")]])
    async def test_it_may_be_a_mapping_or_pairs(self, open_pair, autojump_clock, metadata):
        seen = []

        async def note(call: ServerCall) -> None:
            seen.append(call.metadata)
            await call.send(encode(ServiceHealthResponse()))

        async with open_pair(raw={CHECK: note}) as (channel, _):
            await HealthStub(channel, metadata=metadata).check(ServiceHealthRequest())
            await HealthStub(channel).check(ServiceHealthRequest(), metadata=metadata)
            await HealthStub(channel).check(ServiceHealthRequest())
        assert seen == [[("x-a", "1"), ("x-b-bin", b"\x00")]] * 2 + [[]]

    async def test_metadata_that_cannot_be_sent_is_refused_before_anything_is(self, open_pair, autojump_clock):
        health = Health()
        async with open_pair(health) as (channel, _):
            for metadata in ({"grpc-status": "0"}, {"x-a": b"1"}, {"x-a-bin": "1"}, {"x a": "1"}, {"x-a": " 1"}):
                with pytest.raises((ValueError, TypeError), match=next(iter(metadata))):
                    await HealthStub(channel).check(ServiceHealthRequest(), metadata=metadata)
            assert health.asked == []
            assert channel.links[0].connection.open_streams == 0


class CountStub(betterproto.ServiceStub):
    """What the plugin would generate for methods whose requests stream; the real services have none."""

    async def count(self, requests, **options) -> ServiceHealthResponse:
        return await self._stream_unary("/test.Count/Count", requests, AbortRequest, ServiceHealthResponse, **options)

    async def echo(self, requests, **options) -> AsyncIterator[ServiceHealthResponse]:
        async for reply in self._stream_stream(
            "/test.Count/Echo", requests, AbortRequest, ServiceHealthResponse, **options
        ):
            yield reply


class CountBase(ServiceBase):
    def __init__(self) -> None:
        self.seen: list[str] = []

    async def count(self, requests) -> ServiceHealthResponse:
        async for message in requests:
            self.seen.extend(message.request_ids)
        return ServiceHealthResponse(status=ServingStatus.SERVING)

    async def __rpc_count(self, stream) -> None:
        await stream.send_message(await self.count(stream.__aiter__()))

    async def __rpc_echo(self, stream) -> None:
        async for message in stream:
            await stream.send_message(ServiceHealthResponse(status=ServingStatus(len(message.request_ids))))

    def __mapping__(self):
        streaming = grpclib.const.Cardinality.STREAM_UNARY, grpclib.const.Cardinality.STREAM_STREAM
        return {
            path: grpclib.const.Handler(method, cardinality, AbortRequest, ServiceHealthResponse)
            for path, method, cardinality in (
                ("/test.Count/Count", self.__rpc_count, streaming[0]),
                ("/test.Count/Echo", self.__rpc_echo, streaming[1]),
            )
        }


class TestRequestsThatStream:
    @pytest.mark.parametrize("count", [0, 1, 300])
    async def test_the_handler_sees_them_all(self, open_pair, autojump_clock, count):
        service = CountBase()
        requests = [AbortRequest(request_ids=[f"{number}" * 100]) for number in range(count)]

        async def produce() -> AsyncIterator[AbortRequest]:
            for message in requests:
                await trio.lowlevel.checkpoint()
                yield message

        async with open_pair(service) as (channel, server):
            for source in (requests, produce()):
                reply = await CountStub(channel).count(source)
                assert reply.status is ServingStatus.SERVING
            assert service.seen == [message.request_ids[0] for message in requests] * 2
            assert server.calls_in_flight == channel.links[0].connection.open_streams == 0

    async def test_a_handler_that_answers_early_ends_the_call_for_both(self, open_pair, autojump_clock):
        class Impatient(CountBase):
            async def count(self, requests) -> ServiceHealthResponse:
                await anext(requests)
                return ServiceHealthResponse(status=ServingStatus.NOT_SERVING)

        async def endless() -> AsyncIterator[AbortRequest]:
            for _ in range(1000):
                yield AbortRequest(request_ids=["x" * 1000])

        async with open_pair(Impatient()) as (channel, server), aclosing(endless()) as requests:
            assert (await CountStub(channel).count(requests)).status is ServingStatus.NOT_SERVING
            assert server.calls_in_flight == channel.links[0].connection.open_streams == 0

    async def test_a_bidirectional_stub_is_refused_with_the_way_out(self, open_pair, autojump_clock):
        async with (
            open_pair(CountBase()) as (channel, _),
            aclosing(CountStub(channel).echo([AbortRequest()])) as replies,
        ):
            with pytest.raises(TypeError, match=r"/test.Count/Echo.*asyncio.*Channel\.start"):
                await anext(replies)

    async def test_a_bidirectional_method_can_be_called_the_way_the_refusal_says(self, open_pair, autojump_clock):
        async with open_pair(CountBase()) as (channel, _):
            call = await channel.start("/test.Count/Echo")
            replies = []
            async with trio.open_nursery() as nursery:

                async def send() -> None:
                    for number in range(3):
                        await call.send(encode(AbortRequest(request_ids=["x"] * number)), end=number == 2)

                nursery.start_soon(send)
                while (reply := await call.receive()) is not None:
                    replies.append(ServiceHealthResponse().parse(reply).status)
            assert replies == [0, 1, 2]
