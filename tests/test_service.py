"""A whole router process on memory links and virtual time: what it serves, and how it goes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h11
import msgspec
import pytest
import trio
import trio.testing
from grpclib.exceptions import GRPCError

import trio_router.engine.assets
from trio_router.demo.client import ChatFailed, stream_chat
from trio_router.dispatch.router import RouterSettings
from trio_router.engine.settings import Faults, WorkerSettings
from trio_router.engine.worker import Worker, open_worker
from trio_router.errors import ConfigError, LinkError, RouterError
from trio_router.fleet.client import WorkerFacts
from trio_router.fleet.worker import WorkerRole, WorkerSpec
from trio_router.media.mode import WorkerMedia
from trio_router.media.specs import ModelFacts
from trio_router.observe.hooks import Observer, Outcome, RequestRecord
from trio_router.offload import inline
from trio_router.protocol.messages import (
    GenerateRequest,
    GetModelInfoRequest,
    GetModelInfoResponse,
    GetServerInfoResponse,
    HealthCheckRequest,
    SamplingParams,
    TokenizedInput,
    VllmEngineStub,
)
from trio_router.rpc.channel import open_channel
from trio_router.rpc.memory import MemoryNetwork
from trio_router.service import (
    LAST_WORDS,
    Service,
    media_facts,
    model_facts,
    open_service,
)
from trio_router.settings import ListenSettings, ServiceSettings, TextSettings

ASSETS = Path(trio_router.engine.assets.__file__).parent
HTTP, GRPC, METRICS = "router:30000", "router:30001", "metrics:29000"
LISTEN = ListenSettings(host="router", prometheus_host="metrics")
TOKEN_SECONDS = 0.05


class Ended(Observer):
    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    def request_ended(self, record: RequestRecord) -> None:
        self.records.append(record)


@dataclass(kw_only=True)
class Process:
    """A service, its workers and the network between them."""

    service: Service
    network: MemoryNetwork
    workers: list[Worker]
    ended: Ended
    events: list[Any] = field(default_factory=list)

    async def chat(self, text: str = "Tell me about the sea.", *, max_tokens: int = 20) -> None:
        request = {
            "model": "tiny-english",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        await stream_chat(HTTP, request, dialer=self.network.dial, on_event=self.events.append)

    async def generate(self, *, max_tokens: int) -> None:
        async with open_channel(GRPC, dialer=self.network.dial) as channel:
            request = GenerateRequest(
                tokenized=TokenizedInput(input_ids=[5, 6, 7], original_text="x"),
                sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                stream=True,
            )
            async for _frame in VllmEngineStub(channel).generate(request):
                pass

    async def healthy(self) -> bool:
        async with open_channel(GRPC, dialer=self.network.dial) as channel:
            return (await VllmEngineStub(channel).health_check(HealthCheckRequest())).healthy

    async def get(self, address: str, path: str) -> tuple[int, bytes]:
        transport = await self.network.dial(address)
        connection = h11.Connection(our_role=h11.CLIENT)
        head = h11.Request(method="GET", target=path, headers=[("host", "router"), ("connection", "close")])
        transport.send_nowait(connection.send(head) + connection.send(h11.EndOfMessage()))
        status, body = 0, b""
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                while (data := transport.recv_nowait(65536)) is None:
                    await transport.wait_readable()
                connection.receive_data(data)
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
        transport.close()
        return status, body


@pytest.fixture
async def network() -> MemoryNetwork:
    return MemoryNetwork()


@asynccontextmanager
async def running(network: MemoryNetwork, *, workers: bool = True, **changes: Any) -> AsyncIterator[Process]:
    specs = (
        WorkerSpec(url="grpc://prefill:1", role=WorkerRole.PREFILL),
        WorkerSpec(url="grpc://decode:1", role=WorkerRole.DECODE),
    )
    settings = ServiceSettings(router=RouterSettings(workers=specs), listen=LISTEN)
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(worker(network, role)) for role in ("prefill", "decode") if workers]
        ended = Ended()

        async def listen(host: str, port: int) -> Any:
            return network.listen(f"{host}:{port}")

        service = open_service(
            replace(settings, **changes), observer=ended, listen=listen, dialer=network.dial, offload=inline
        )
        yield Process(service=await stack.enter_async_context(service), network=network, workers=opened, ended=ended)


def worker(network: MemoryNetwork, role: str) -> Any:
    return open_worker(
        WorkerSettings(name=role, role=role, inter_token_seconds=TOKEN_SECONDS),
        listener=network.listen(f"{role}:1"),
        transfer_listener=network.listen(f"{role}:2"),
        dialer=network.dial,
    )


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # virtual time, and whatever is waited for has no event
        await trio.sleep(0.01)


class TestServing:
    async def test_a_chat_comes_through_both_legs(self, network, autojump_clock):
        async with running(network) as process:
            await process.service.wait_ready()
            await process.chat()
            [record] = process.ended.records
            assert (record.prefill_worker, record.decode_worker) == ("prefill:1", "decode:1")
            assert process.workers[1].counters.pulls == 1
            assert len(process.events) > 10

    async def test_grpc_clients_find_the_workers_service(self, network, autojump_clock):
        async with running(network) as process:
            await process.service.wait_ready()
            async with open_channel(GRPC, dialer=network.dial) as channel:
                stub = VllmEngineStub(channel)
                assert (await stub.health_check(HealthCheckRequest())).healthy
                assert (await stub.get_model_info(GetModelInfoRequest())).served_model_name == "tiny-english"
            await process.generate(max_tokens=4)
            assert [record.finish_reason for record in process.ended.records] == ["length"]

    async def test_metrics_are_scraped_on_their_own_port(self, network, autojump_clock):
        async with running(network) as process:
            await process.service.wait_ready()
            await process.chat()
            status, body = await process.get(METRICS, "/metrics")
        assert status == 200
        assert b'smg_router_requests_total{backend_type="pd"' in body
        assert b'trio_router_handoffs_total{outcome="consumed"} 1.0' in body
        assert b'smg_worker_health{worker="decode:1"} 1.0' in body

    async def test_what_is_refused_is_counted_once_whoever_refuses_it(self, network, autojump_clock):
        async with running(network) as process:
            await process.service.wait_ready()
            with pytest.raises(ChatFailed):
                await process.chat(max_tokens=-1)
            await process.get(HTTP, "/nowhere")
            async with open_channel(GRPC, dialer=network.dial) as channel:
                call = await channel.call("/vllm.grpc.engine.VllmEngine/Generate", b"\xff\xff")
                with pytest.raises(GRPCError, match="data ends in the middle"):
                    await call.receive()
            _, body = await process.get(METRICS, "/metrics")
        counted = {line for line in body.decode().splitlines() if line.startswith("trio_router_requests_refused_total")}
        assert counted == {
            'trio_router_requests_refused_total{code="invalid_request_parameters",endpoint="chat"} 1.0',
            'trio_router_requests_refused_total{code="route_not_found",endpoint="http"} 1.0',
            'trio_router_requests_refused_total{code="malformed_message",endpoint="generate"} 1.0',
        }
        assert b'trio_router_http_responses_total{status="404"} 1.0' in body
        assert process.ended.records == []

    async def test_not_ready_says_how_many_workers_are(self, network, autojump_clock):
        async with running(network, workers=False) as process:
            status, body = await process.get(HTTP, "/readiness")
            assert status == 503
            assert msgspec.json.decode(body) == {
                "status": "not ready",
                "reason": "insufficient healthy workers",
                "healthy_workers": 0,
                "total_workers": 2,
            }

    async def test_workers_may_come_after_the_router(self, network, autojump_clock):
        async with running(network, workers=False) as process:
            await trio.sleep(5)
            async with worker(network, "prefill"), worker(network, "decode"):
                with trio.fail_after(5):
                    await process.service.wait_ready()
                await process.chat()
                assert (await process.get(HTTP, "/readiness"))[0] == 200


class TestText:
    async def test_a_template_of_the_operator_s_comes_before_the_model_s(self, network, autojump_clock, tmp_path):
        template = tmp_path / "shout.jinja"
        template.write_text("{% for message in messages %}{{ message.content | upper }}{% endfor %}")
        counts = []
        for text in (TextSettings(), TextSettings(chat_template=template)):
            async with running(MemoryNetwork(), text=text) as process:
                await process.service.wait_ready()
                await process.chat("hello")
                counts.append(process.ended.records[0].prompt_tokens)
        assert counts[1] < counts[0]

    @pytest.mark.parametrize("source", [b"{% for", b"{{ messages | no_such_filter }}", b"\xff\xfe"])
    @pytest.mark.parametrize("path", [None, ASSETS])
    async def test_a_template_that_is_none_is_told_to_the_operator_and_not_to_clients(
        self, network, autojump_clock, tmp_path, source, path
    ):
        template = tmp_path / "broken.jinja"
        template.write_bytes(source)
        with pytest.raises(ConfigError, match=r"chat_template: .*broken\.jinja"):
            async with running(network, text=TextSettings(tokenizer_path=path, chat_template=template)):
                raise AssertionError("it serves")

    async def test_a_local_tokenizer_needs_no_worker(self, network, autojump_clock, monkeypatch):
        async def refuse(_: object) -> None:
            raise AssertionError("the workers were asked for a tokenizer")

        monkeypatch.setattr("trio_router.fleet.client.WorkerClient.tokenizer_bundle", refuse)
        async with running(network, text=TextSettings(tokenizer_path=ASSETS)) as process:
            await process.service.wait_ready()
            await process.chat()
        assert process.ended.records[0].outcome is Outcome.OK

    async def test_the_http_front_asks_for_sampling_defaults(self, network, autojump_clock, monkeypatch):
        asked: list[str] = []
        monkeypatch.setattr("trio_router.service.sampling_defaults", lambda _, model: asked.append(model) or {})
        async with running(network) as process:
            await process.service.wait_ready()
            await process.chat()
        assert asked == ["tiny-english"]

    async def test_the_http_front_refuses_by_the_context_length(self, network, autojump_clock, monkeypatch):
        monkeypatch.setattr("trio_router.service.context_length", lambda _, model: 3)
        async with running(network) as process:
            await process.service.wait_ready()
            with pytest.raises(ChatFailed, match="the model's context 3"):
                await process.chat()


class TestMediaFacts:
    @staticmethod
    def worker(model: str = "tiny", *, role: WorkerRole = WorkerRole.DECODE, **server: str) -> Any:
        info = GetModelInfoResponse(model_type="qwen3_vl", architectures=["Qwen3VLForConditionalGeneration"])
        facts = WorkerFacts(model=model, model_info=info, server_info=GetServerInfoResponse(**server))
        return SimpleNamespace(facts=facts, ready=False, spec=SimpleNamespace(role=role))

    @staticmethod
    def router(*workers: Any) -> Any:
        return SimpleNamespace(registry=SimpleNamespace(workers=[SimpleNamespace(facts=None), *workers]))

    def test_every_worker_of_the_model_counts_ready_or_not(self):
        said = {"mm_processor": "inprocess", "mm_media_ref_schemes": "https,data", "mm_item_limits": "image=8"}
        router = self.router(
            self.worker(role=WorkerRole.PREFILL, **said), self.worker(), self.worker("other", mm_processor="smg")
        )
        assert model_facts(router, "tiny") == ModelFacts(
            name="tiny", model_type="qwen3_vl", architectures=("Qwen3VLForConditionalGeneration",)
        )
        assert media_facts(router, "tiny") == (
            WorkerMedia(
                mm_processor="inprocess",
                schemes=frozenset({"https", "data"}),
                item_limits="image=8",
                leg="prefill",
            ),
            WorkerMedia(leg="decode"),
        )

    def test_a_model_that_nobody_serves_has_a_name_and_no_workers(self):
        router = self.router(self.worker("other"))
        assert (model_facts(router, "tiny"), media_facts(router, "tiny")) == (ModelFacts(name="tiny"), ())

    async def test_a_picture_for_workers_without_eyes_is_refused_and_counted(self, network, autojump_clock):
        async with running(network) as process:
            await process.service.wait_ready()
            part = {"type": "image_url", "image_url": {"url": "https://media.example/x.png"}}
            request = {"model": "tiny-english", "messages": [{"role": "user", "content": [part]}]}
            with pytest.raises(ChatFailed, match="model_not_opted_in"):
                await stream_chat(HTTP, request, dialer=network.dial, on_event=process.events.append)
            _, body = await process.get(METRICS, "/metrics")
        counted = 'smg_mm_processing_total{mode="router",model="tiny-english",reason="model_not_opted_in"} 1.0'
        assert counted in body.decode()


class TestDraining:
    async def test_what_runs_may_finish_and_nothing_new_comes_in(self, network, autojump_clock):
        async with running(network) as process, trio.open_nursery() as nursery:
            await process.service.wait_ready()
            nursery.start_soon(process.chat)
            await until(lambda: len(process.events) > 3)
            process.service.drain(grace=60)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(LinkError, match="nobody listens"):
                await process.network.dial(HTTP)
            with pytest.raises(LinkError, match="nobody listens"):
                await process.network.dial(GRPC)
            assert (await process.get(METRICS, "/health"))[0] == 200
            with trio.fail_after(5):
                await process.service.wait_ended()
            assert process.events[-1]["choices"][0]["finish_reason"] == "length"
            assert process.ended.records[0].outcome is Outcome.OK

    async def test_without_anything_running_it_ends_at_once(self, network, autojump_clock):
        async with running(network) as process:
            await process.service.wait_ready()
            began = trio.current_time()
            process.service.drain(grace=60)
            await process.service.wait_ended()
            assert trio.current_time() == began

    async def test_case_f4_it_is_not_ready_first_and_serves_whoever_has_not_heard(self, network, autojump_clock):
        """A balancer goes on sending until it has asked, and must not be refused meanwhile."""
        async with running(network) as process, trio.open_nursery() as nursery:
            await process.service.wait_ready()
            nursery.start_soon(process.chat)
            process.service.drain(grace=60, settle=5)
            for _ in range(4):
                await trio.sleep(1)
                status, body = await process.get(HTTP, "/readiness")
                assert (status, msgspec.json.decode(body)["reason"]) == (503, "draining")
                assert not await process.healthy()
                await process.chat(max_tokens=2)
                await process.generate(max_tokens=2)
            await trio.sleep(1.1)
            for address in (HTTP, GRPC):
                with pytest.raises(LinkError, match="nobody listens"):
                    await process.network.dial(address)
            with trio.fail_after(5):
                await process.service.wait_ended()
        assert {record.outcome for record in process.ended.records} == {Outcome.OK}

    async def test_case_f4_what_is_cut_off_is_told_why(self, network, autojump_clock):
        async with running(network) as process, trio.open_nursery() as nursery:
            await process.service.wait_ready()
            nursery.start_soon(
                partial(cut_off, partial(process.chat, max_tokens=4000), expected=ChatFailed, match="shutting down")
            )
            nursery.start_soon(
                partial(cut_off, partial(process.generate, max_tokens=4000), expected=GRPCError, match="shutting down")
            )
            await until(lambda: process.service.router.in_flight == 2 and len(process.events) > 3)
            began = trio.current_time()
            process.service.drain(grace=3)
            await process.service.wait_ended()
            assert trio.current_time() - began == pytest.approx(3, abs=0.01)
            assert process.service.router.in_flight == 0
            assert [(record.outcome, record.error_code) for record in process.ended.records] == [
                (Outcome.FAILED, "shutting_down")
            ] * 2

    async def test_case_f4_a_silent_worker_and_a_client_that_never_reads_delay_nothing(self, network, autojump_clock):
        async with running(network) as process, trio.open_nursery() as nursery:
            await process.service.wait_ready()
            chat = partial(process.chat, max_tokens=4000)
            nursery.start_soon(partial(cut_off, chat, expected=RouterError))
            await until(lambda: len(process.events) > 3)
            process.workers[1].faults = Faults(hang=True)
            deaf = await network.dial(HTTP)
            body = msgspec.json.encode({"model": "tiny-english", "prompt": "x", "max_tokens": 10, "stream": True})
            deaf.send_nowait(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
            deaf.send_nowait(b"content-length: %d\r\n\r\n" % len(body) + body)
            await until(lambda: process.service.router.in_flight == 2)
            began = trio.current_time()
            process.service.drain(grace=3)
            await process.service.wait_ended()
            assert trio.current_time() - began <= 3 + LAST_WORDS

    async def test_a_client_that_takes_nothing_is_cut_off_in_the_end(self, network, autojump_clock):
        async with running(network) as process:
            await process.service.wait_ready()
            deaf = await network.dial(HTTP)
            body = msgspec.json.encode(
                {"model": "tiny-english", "prompt": "x", "max_tokens": 4000, "stream": True, "ignore_eos": True}
            )
            deaf.send_nowait(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
            deaf.send_nowait(b"content-length: %d\r\n\r\n" % len(body) + body)
            await trio.sleep(100)
            assert process.service.router.in_flight == 1
            began = trio.current_time()
            process.service.drain(grace=3)
            await process.service.wait_ended()
            assert trio.current_time() - began == pytest.approx(3 + LAST_WORDS)
            assert process.service.router.in_flight == 0

    async def test_a_second_word_changes_nothing(self, network, autojump_clock):
        async with running(network) as process, trio.open_nursery() as nursery:
            await process.service.wait_ready()
            nursery.start_soon(partial(cut_off, partial(process.chat, max_tokens=4000), expected=RouterError))
            await until(lambda: len(process.events) > 3)
            began = trio.current_time()
            process.service.drain(grace=3)
            process.service.drain(grace=60, settle=60)
            await process.service.wait_ended()
            assert trio.current_time() - began == pytest.approx(3, abs=0.01)

    async def test_stop_ends_everything_at_once(self, network, autojump_clock):
        async with running(network) as process, trio.open_nursery() as nursery:
            await process.service.wait_ready()
            nursery.start_soon(partial(cut_off, partial(process.chat, max_tokens=4000), expected=RouterError))
            await until(lambda: len(process.events) > 3)
            began = trio.current_time()
            process.service.drain(grace=60)
            process.service.stop()
            await process.service.wait_ended()
            assert trio.current_time() == began
        assert process.service.router.in_flight == 0
        assert [record.error_code for record in process.ended.records] == ["shutting_down"]
        assert not any(each.ledger for each in process.workers)

    async def test_leaving_the_block_is_stopping(self, network, autojump_clock):
        async with trio.open_nursery() as nursery:
            async with running(network) as process:
                await process.service.wait_ready()
                chat = partial(process.chat, max_tokens=4000)
                nursery.start_soon(partial(cut_off, chat, expected=RouterError))
                await until(lambda: len(process.events) > 3)
            assert [record.error_code for record in process.ended.records] == ["shutting_down"]


async def cut_off(run: Callable[[], Awaitable[None]], *, expected: type[Exception], match: str | None = None) -> None:
    """Run what a shutdown will cut off."""
    with pytest.raises(expected, match=match):
        await run()
