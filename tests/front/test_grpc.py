"""The gRPC front as its clients see it: the workers' own service, over a router and scripted workers."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from trio_router.errors import TooLarge, WorkerUnavailable
from trio_router.front.grpc import GENERATE, SERVICE, TOKENIZER_CHUNK_BYTES, grpc_server
from trio_router.http2.connection import Connection
from trio_router.http2.streams import Role
from trio_router.observe.hooks import Outcome
from trio_router.protocol.codec import decode, encode
from trio_router.protocol.messages import (
    AbortRequest,
    GenerateResponse,
    GetModelInfoRequest,
    GetServerInfoRequest,
    GetTokenizerRequest,
    HealthCheckRequest,
    HealthStub,
    ServiceHealthRequest,
    ServingStatus,
    VllmEngineStub,
)
from trio_router.rpc.call import ClientCall
from trio_router.rpc.channel import Channel, open_channel
from trio_router.rpc.metadata import RpcError, request_headers
from trio_router.testing.scripted import (
    Scene,
    ScriptedWorker,
    a_request,
    answer,
    chunk,
    complete,
    decode_worker,
    hand_over,
    open_scene,
    plain_worker,
    prefill_worker,
)


@asynccontextmanager
async def fronted(*workers: ScriptedWorker) -> AsyncIterator[tuple[Scene, Channel]]:
    async with open_scene(*workers) as scene, trio.open_nursery() as nursery:
        listener = scene.network.listen("front:1")
        await nursery.start(grpc_server(scene.router).serve, listener)
        async with open_channel("front:1", dialer=scene.network.dial) as channel:
            yield scene, channel
        nursery.cancel_scope.cancel()


async def frames_of(call: ClientCall) -> list[bytes]:
    frames = []
    while (frame := await call.receive()) is not None:
        frames.append(frame)
    return frames


async def generate(channel: Channel, request, **changes) -> list[bytes]:
    return await frames_of(await channel.call(GENERATE, encode(request), **changes))


def told(scene: Scene) -> list[tuple[Outcome, str]]:
    return [(record.outcome, record.client) for record in scene.recorder.records]


async def drip(call, request):
    while True:
        await call.send(chunk(7))
        await trio.sleep(0.1)


class TestStreaming:
    async def test_a_workers_frames_come_as_the_bytes_it_sent(self, autojump_clock):
        async with fronted(prefill_worker(), decode_worker()) as (scene, channel):
            frames = await generate(channel, a_request())
            assert frames == [chunk(7), chunk(8), complete(output_ids=[8], completion_tokens=1)]
            assert told(scene) == [(Outcome.OK, "grpc")]
            assert scene.recorder.records[0].output_tokens == 2

    async def test_a_workers_refusal_is_passed_on_with_its_details(self, autojump_clock):
        async def refuse(call, request):
            raise GRPCError(Status.INVALID_ARGUMENT, "temperature must be non-negative", b"\x08\x03")

        async with fronted(plain_worker(refuse)) as (_, channel):
            with pytest.raises(RpcError) as caught:
                await generate(channel, a_request())
            assert (caught.value.status, caught.value.message, caught.value.details) == (
                Status.INVALID_ARGUMENT,
                "temperature must be non-negative",
                b"\x08\x03",
            )

    async def test_case_d3_when_every_worker_is_busy_the_last_ones_status_is_told_and_when_to_come_back(
        self, autojump_clock
    ):
        async def busy(call, request):
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "worker is saturated", b"\x08\x08")

        async with fronted(plain_worker(busy, name="one"), plain_worker(busy, name="two")) as (_, channel):
            call = await channel.call(GENERATE, encode(a_request()))
            with pytest.raises(RpcError, match="worker is saturated") as caught:
                await frames_of(call)
            assert (caught.value.status, caught.value.details) == (Status.RESOURCE_EXHAUSTED, b"\x08\x08")
            trailers = dict(call.trailing_metadata)
            assert trailers["x-smg-error-code"] == "worker_overload_protection_shed"
            assert trailers["grpc-retry-pushback-ms"] == "1000"

    async def test_i12_what_is_no_request_is_refused_and_the_connection_goes_on(self, autojump_clock):
        async with fronted(plain_worker()) as (scene, channel):
            with pytest.raises(RpcError) as caught:
                await frames_of(await channel.call(GENERATE, b"\xff\xff\xff"))
            assert caught.value.status is Status.INVALID_ARGUMENT
            assert scene.recorder.records == [], "it never was a request"
            assert len(await generate(channel, a_request())) == 3

    async def test_a_call_without_a_message_is_refused(self, autojump_clock):
        async with fronted(plain_worker()) as (_, channel):
            call = await channel.start(GENERATE)
            call.end_sending()
            with pytest.raises(RpcError, match="without a GenerateRequest") as caught:
                await frames_of(call)
            assert caught.value.status is Status.INVALID_ARGUMENT
            assert dict(call.trailing_metadata)["x-smg-error-code"] == "invalid_request_parameters"

    async def test_a_bug_is_not_shown(self, autojump_clock, monkeypatch):
        def bug(*args, **kwargs):
            raise ZeroDivisionError("secret")

        monkeypatch.setattr("trio_router.dispatch.router.parse_request", bug)
        async with fronted(plain_worker()) as (_, channel):
            with pytest.raises(RpcError) as caught:
                await generate(channel, a_request())
            assert caught.value.status is Status.INTERNAL
            assert "secret" not in (caught.value.message or "")


class TestNotStreaming:
    async def test_the_answer_is_one_complete_frame_with_everything(self, autojump_clock):
        async with fronted(plain_worker()) as (_, channel):
            [frame] = await generate(channel, a_request(stream=False))
            whole = decode(GenerateResponse, frame).complete
            assert (whole.output_ids, whole.completion_tokens, whole.finish_reason) == ([7, 8], 2, "length")

    async def test_several_choices_are_a_frame_each_in_order(self, autojump_clock):
        async def two(call, request):
            for index in (1, 0):
                await call.send(chunk(10 + index, index=index))
                await call.send(complete("stop", index=index, output_ids=[10 + index]))

        async with fronted(plain_worker(two)) as (_, channel):
            frames = [decode(GenerateResponse, f) for f in await generate(channel, a_request(n=2, stream=False))]
            assert [(f.complete.index, f.complete.output_ids) for f in frames] == [(0, [10]), (1, [11])]

    async def test_case_c4_a_client_that_leaves_in_the_middle_ends_the_workers_stream(self, autojump_clock):
        worker = plain_worker(drip)
        async with fronted(worker) as (scene, channel):
            call = await channel.call(GENERATE, encode(a_request(stream=False)))
            await trio.sleep(1)
            call.cancel()
            await trio.sleep(0.2)
            assert len(worker.ended) == 1
            assert told(scene) == [(Outcome.CLIENT_LEFT, "grpc")]
            assert scene.leaks() == []

    async def test_a_failure_in_the_middle_gives_no_part_of_an_answer(self, autojump_clock):
        async def break_down(call, request):
            await call.send(chunk(7))
            raise GRPCError(Status.UNAVAILABLE, "Cancelling all calls")

        async with fronted(plain_worker(break_down)) as (_, channel):
            call = await channel.call(GENERATE, encode(a_request(stream=False)))
            with pytest.raises(RpcError) as caught:
                assert await call.receive() is None
            assert caught.value.status is Status.UNAVAILABLE


class TestDeadlines:
    @pytest.mark.parametrize("stream", [True, False])
    async def test_the_clients_deadline_ends_its_request_and_is_recorded_as_such(self, autojump_clock, stream):
        worker = plain_worker(drip)
        async with fronted(worker) as (scene, _):
            assert await status_of(scene, a_request(stream=stream), timeout=b"1500m") == b"4"
            await trio.sleep(0.2)
            assert told(scene)[-1] == (Outcome.TIMEOUT, "grpc")
            assert len(worker.ended) == 1
            assert scene.leaks() == []

    async def test_i4_no_leg_carries_it(self, autojump_clock):
        deadlines = []

        async def note(call, request):
            deadlines.append(call.deadline)
            await (answer(call, request) if len(deadlines) == 2 else hand_over(call, request))

        async with fronted(prefill_worker(note), decode_worker(note)) as (_, channel):
            await generate(channel, a_request(), timeout=30.0)
        assert deadlines == [float("inf")] * 2


async def status_of(scene: Scene, request, *, timeout: bytes) -> bytes:
    """The grpc-status a client gets that keeps no deadline itself."""
    transport = await scene.network.dial("front:1")
    connection = Connection(Role.CLIENT)
    headers = [*request_headers(GENERATE, authority="x"), (b"grpc-timeout", timeout)]
    stream = connection.open_stream(headers)
    connection.send_messages(stream, [encode(request)], end_stream=True)
    while not stream.remote_ended:
        transport.send_nowait(connection.take_output())
        await transport.wait_readable()
        connection.receive(transport.recv_nowait(65_536) or b"")
        stream.take()
        stream.credit()
    transport.close()
    return dict(stream.trailers or [])[b"grpc-status"]


class TestAborts:
    @pytest.mark.parametrize("stream", [True, False])
    async def test_before_the_first_frame_it_ends_as_a_worker_ends_it(self, autojump_clock, stream):
        async def never(call, request):
            await trio.sleep_forever()

        async with fronted(plain_worker(never)) as (scene, channel):
            call = await channel.call(GENERATE, encode(a_request("mine", stream=stream)))
            await trio.sleep(0.1)
            await VllmEngineStub(channel).abort(AbortRequest(request_ids=["mine", "nobody"]))
            [frame] = await frames_of(call)
            assert decode(GenerateResponse, frame).complete.finish_reason == "abort"
            assert told(scene) == [(Outcome.ABORTED, "grpc")]

    @pytest.mark.parametrize(("stream", "output"), [(True, []), (False, [7])])
    async def test_in_the_middle_the_workers_own_ending_comes_through(self, autojump_clock, stream, output):
        aborted = trio.Event()

        async def script(call, request):
            await call.send(chunk(7))
            await aborted.wait()
            await call.send(complete("abort"))

        async def on_abort():
            aborted.set()

        async with fronted(plain_worker(script, on_abort=on_abort)) as (scene, channel):
            call = await channel.call(GENERATE, encode(a_request("mine", stream=stream)))
            await trio.sleep(0.1)
            await VllmEngineStub(channel).abort(AbortRequest(request_ids=["mine"]))
            last = decode(GenerateResponse, (await frames_of(call))[-1]).complete
            assert (last.finish_reason, last.output_ids) == ("abort", output)
            assert told(scene) == [(Outcome.ABORTED, "grpc")]

    async def test_of_an_id_nobody_has_is_fine(self, autojump_clock):
        async with fronted(plain_worker()) as (_, channel):
            await VllmEngineStub(channel).abort(AbortRequest(request_ids=["nobody"]))

    async def test_every_choice_gets_its_end(self, autojump_clock):
        async def never(call, request):
            await trio.sleep_forever()

        async with fronted(plain_worker(never)) as (_, channel):
            call = await channel.call(GENERATE, encode(a_request("mine", n=3)))
            await trio.sleep(0.1)
            await VllmEngineStub(channel).abort(AbortRequest(request_ids=["mine"]))
            ends = [decode(GenerateResponse, frame).complete for frame in await frames_of(call)]
            assert [(end.index, end.finish_reason) for end in ends] == [(0, "abort"), (1, "abort"), (2, "abort")]


class TestInfo:
    async def test_the_model_is_the_workers(self, autojump_clock):
        async with fronted(plain_worker(model="mine")) as (_, channel):
            info = await VllmEngineStub(channel).get_model_info(GetModelInfoRequest())
            assert info.served_model_name == "mine"

    async def test_nothing_is_known_before_a_worker_is_ready(self, autojump_clock):
        worker = plain_worker()
        async with fronted(worker) as (_, channel):
            worker.healthy = False
            await trio.sleep(60)
            stub = VllmEngineStub(channel)
            with pytest.raises(GRPCError) as caught:
                await stub.get_model_info(GetModelInfoRequest())
            assert caught.value.status is Status.UNAVAILABLE
            health = await stub.health_check(HealthCheckRequest())
            assert (health.healthy, health.message) == (False, "no worker is ready for every leg")

    async def test_the_server_tells_its_requests_and_nothing_of_its_workers_connectors(self, autojump_clock):
        async with fronted(prefill_worker(), decode_worker(drip)) as (_, channel):
            call = await channel.call(GENERATE, encode(a_request()))
            await trio.sleep(0.5)
            info = await VllmEngineStub(channel).get_server_info(GetServerInfoRequest())
            assert (info.active_requests, info.server_type, info.kv_connector) == (1, "trio-router", "")
            assert info.uptime_seconds == pytest.approx(0.5, abs=0.1)
            call.cancel()


class TestTokenizer:
    async def test_it_comes_in_pieces_with_the_hash_on_the_last(self, autojump_clock, monkeypatch):
        archive = bytes(range(256)) * 600
        claimed = hashlib.sha256(archive).hexdigest()

        async def bundle(self):
            return archive, claimed

        monkeypatch.setattr("trio_router.dispatch.router.Router.tokenizer_bundle", bundle)
        async with fronted(plain_worker()) as (_, channel):
            pieces = [piece async for piece in VllmEngineStub(channel).get_tokenizer(GetTokenizerRequest())]
        assert b"".join(piece.data for piece in pieces) == archive
        assert [len(piece.data) for piece in pieces[:-1]] == [TOKENIZER_CHUNK_BYTES] * (len(pieces) - 1)
        assert [piece.sha256 for piece in pieces] == [""] * (len(pieces) - 1) + [claimed]

    @pytest.mark.parametrize(
        ("error", "status"),
        [
            (WorkerUnavailable("none", code="tokenizer_not_ready"), Status.UNAVAILABLE),
            (TooLarge("big"), Status.RESOURCE_EXHAUSTED),
        ],
    )
    async def test_without_one_the_error_says_what_kind_it_is(self, autojump_clock, monkeypatch, error, status):
        async def bundle(self):
            raise error

        monkeypatch.setattr("trio_router.dispatch.router.Router.tokenizer_bundle", bundle)
        async with fronted(plain_worker()) as (_, channel):
            with pytest.raises(GRPCError) as caught:
                [piece async for piece in VllmEngineStub(channel).get_tokenizer(GetTokenizerRequest())]
            assert caught.value.status is status


class TestHealthService:
    @pytest.mark.parametrize("service", ["", SERVICE])
    async def test_it_serves_while_every_leg_has_a_worker(self, autojump_clock, service):
        prefill = prefill_worker()
        async with fronted(prefill, decode_worker()) as (_, channel):
            stub = HealthStub(channel)
            assert (await stub.check(ServiceHealthRequest(service=service))).status == ServingStatus.SERVING
            prefill.healthy = False
            await trio.sleep(60)
            assert (await stub.check(ServiceHealthRequest(service=service))).status == ServingStatus.NOT_SERVING

    async def test_a_service_nobody_knows(self, autojump_clock):
        async with fronted(plain_worker()) as (_, channel):
            with pytest.raises(GRPCError) as caught:
                await HealthStub(channel).check(ServiceHealthRequest(service="other"))
            assert caught.value.status is Status.NOT_FOUND

    @pytest.mark.parametrize(
        ("service", "status"), [("", ServingStatus.SERVING), ("other", ServingStatus.SERVICE_UNKNOWN)]
    )
    async def test_watch_tells_once_as_the_workers_does(self, autojump_clock, service, status):
        async with fronted(plain_worker()) as (_, channel):
            replies = [reply async for reply in HealthStub(channel).watch(ServiceHealthRequest(service=service))]
            assert [reply.status for reply in replies] == [status]
