"""A client that reads 1 KiB/s while its worker offers 100 MB: the worker is held back, nothing piles up between them,
and 50 other streams of the same worker's connection do not notice (invariant I9). On memory links and virtual time.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio

from trio_router.dispatch.router import Router, RouterSettings, open_router
from trio_router.engine.facts import model_info, server_info
from trio_router.engine.model import Model, load_model
from trio_router.engine.responses import ChoiceEncoder
from trio_router.engine.settings import WorkerSettings
from trio_router.fleet.worker import WorkerRole, WorkerSpec
from trio_router.front.app import HttpFront
from trio_router.front.grpc import GENERATE, grpc_server
from trio_router.front.texts import LoadedText
from trio_router.http2.connection import Connection
from trio_router.http2.streams import Role
from trio_router.protocol.codec import encode
from trio_router.protocol.messages import (
    GenerateComplete,
    GenerateRequest,
    GenerateResponse,
    GetModelInfoRequest,
    GetModelInfoResponse,
    GetServerInfoRequest,
    GetServerInfoResponse,
    HealthCheckRequest,
    HealthCheckResponse,
    SamplingParams,
    TokenizedInput,
    VllmEngineBase,
)
from trio_router.protocol.wire import get_string, get_varint
from trio_router.rpc.channel import open_channel
from trio_router.rpc.memory import MemoryNetwork
from trio_router.rpc.metadata import request_headers
from trio_router.rpc.server import Server
from trio_router.rpc.servercall import ServerCall
from trio_router.rpc.transport import Transport

OFFERED_BYTES = 100_000_000
READ_BYTES = 1024
"""Every second."""
SECONDS = 400
MAX_HELD_BYTES = 512 * 1024
"""Of one stream, from the worker's handler to the slow client: two 64 KiB pipes, two windows as large, one batch."""
NEIGHBOURS = 50
TOKENS = 20
STEP_SECONDS = 0.02


@dataclass
class Flood:
    """The stream of a slow reader, at its worker."""

    accepted_bytes: int = 0
    blocked: bool = False
    ended: bool = False


@dataclass
class FloodingWorker:
    """Gives a request for many tokens all of OFFERED_BYTES at once, every other one a token per step."""

    model: Model
    flood: Flood = field(default_factory=Flood)
    sent_at: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        encoder = ChoiceEncoder(index=0, prompt_tokens=8, cached_tokens=0)
        word = self.model.tokenizer.encode(" harbour")
        self.frame = encoder.chunk(word)
        # As a worker sends that is far ahead of its reader.
        self.flood_frame = encoder.chunk(word * 64)
        self.complete = encode(GenerateResponse(complete=GenerateComplete(finish_reason="length", prompt_tokens=8)))

    def server(self) -> Server:
        settings = WorkerSettings(name="flooding")
        return Server([_Engine(self.model, settings)], raw={GENERATE: self.generate})

    async def generate(self, call: ServerCall) -> None:
        request = await call.receive() or b""
        tokens = get_varint(request, (4, 8)) or 0
        if tokens > TOKENS:
            await self._flood(call)
        else:
            name = (get_string(request, (1,)) or "").rpartition("-")[0]
            for _ in range(tokens):
                await trio.sleep(STEP_SECONDS)
                self.sent_at[name].append(trio.current_time())
                await call.send(self.frame)
            await call.send(self.complete)

    async def _flood(self, call: ServerCall) -> None:
        flood = self.flood
        try:
            while flood.accepted_bytes < OFFERED_BYTES:
                flood.blocked = True
                await call.send(self.flood_frame)
                flood.blocked = False
                flood.accepted_bytes += len(self.flood_frame)
        finally:
            flood.ended = True


class _Engine(VllmEngineBase):
    def __init__(self, model: Model, settings: WorkerSettings) -> None:
        self._model = model
        self._settings = settings

    async def health_check(self, health_check_request: HealthCheckRequest) -> HealthCheckResponse:
        return HealthCheckResponse(healthy=True)

    async def get_model_info(self, get_model_info_request: GetModelInfoRequest) -> GetModelInfoResponse:
        return model_info(self._model, settings=self._settings)

    async def get_server_info(self, get_server_info_request: GetServerInfoRequest) -> GetServerInfoResponse:
        return server_info(self._settings, engine_id="flooding")


@dataclass
class Scene:
    """A router with both fronts before one flooding worker."""

    network: MemoryNetwork
    worker: FloodingWorker
    router: Router
    grpc: str = "router:grpc"
    http: str = "router:http"


@asynccontextmanager
async def open_scene() -> AsyncIterator[Scene]:
    network = MemoryNetwork()
    worker = FloodingWorker(load_model())
    spec = WorkerSpec(url="grpc://worker:1", role=WorkerRole.PLAIN)
    async with trio.open_nursery() as nursery:
        await nursery.start(worker.server().serve, network.listen("worker:1"))
        async with open_router(RouterSettings(workers=(spec,)), dialer=network.dial) as router:
            await router.wait_ready()
            scene = Scene(network, worker, router)
            await nursery.start(grpc_server(router).serve, network.listen(scene.grpc))
            front = HttpFront(router, LoadedText(worker.model.tokenizer))
            await nursery.start(front.serve, network.listen(scene.http))
            yield scene
            nursery.cancel_scope.cancel()


def grpc_request(name: str, *, tokens: int) -> bytes:
    request = GenerateRequest(
        request_id=name,
        tokenized=TokenizedInput(input_ids=[5, 6, 7]),
        sampling_params=SamplingParams(max_tokens=tokens),
        stream=True,
    )
    return encode(request)


def http_request(name: str, *, tokens: int) -> bytes:
    body = {"model": "tiny-english", "prompt": "Once", "stream": True, "max_tokens": tokens, "rid": name}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: router\r\ncontent-length: {len(data)}\r\n"
    return f"{head}content-type: application/json\r\n\r\n".encode() + data


async def read_slowly(transport: Transport, *, take: Callable[[bytes], None]) -> None:
    """1 KiB/s, for ever."""
    while True:
        await trio.sleep(1)
        await transport.wait_readable()
        data = transport.recv_nowait(READ_BYTES)
        assert data != b"", "the router gave the slow client up"
        take(data or b"")


async def slow_grpc_connection(scene: Scene) -> None:
    """A client whose socket is read slowly."""
    transport = await scene.network.dial(scene.grpc)
    connection = Connection(Role.CLIENT)
    stream = connection.open_stream(request_headers(GENERATE, authority="router"))
    connection.send_messages(stream, [grpc_request("slow", tokens=10**7)], end_stream=True)

    def take(data: bytes) -> None:
        connection.receive(data)
        stream.take()
        stream.credit()
        transport.send_nowait(connection.take_output())

    transport.send_nowait(connection.take_output())
    await read_slowly(transport, take=take)


async def slow_grpc_stream(scene: Scene) -> None:
    """A client that reads its connection at once and one of its streams slowly, so that only flow control helps."""
    async with open_channel(scene.grpc, dialer=scene.network.dial) as channel:
        call = await channel.call(GENERATE, grpc_request("slow", tokens=10**7))
        while True:
            await trio.sleep(len(scene.worker.flood_frame) / READ_BYTES)
            assert await call.receive() is not None


async def slow_sse(scene: Scene) -> None:
    """A client of server-sent events whose socket is read slowly."""
    transport = await scene.network.dial(scene.http)
    transport.send_nowait(http_request("slow", tokens=10**7))
    await read_slowly(transport, take=lambda data: None)


async def grpc_neighbour(scene: Scene, name: str, arrivals: list[float]) -> None:
    def take(messages: list[bytes]) -> bool:
        arrivals.extend([trio.current_time()] * len(messages))
        return True

    async with open_channel(scene.grpc, dialer=scene.network.dial) as channel:
        call = await channel.call(GENERATE, grpc_request(name, tokens=TOKENS))
        await call.pump(take)


async def sse_neighbour(scene: Scene, name: str, arrivals: list[float]) -> None:
    transport = await scene.network.dial(scene.http)
    transport.send_nowait(http_request(name, tokens=TOKENS))
    ended = False
    while not ended:
        await transport.wait_readable()
        data = transport.recv_nowait(65_536) or b""
        arrivals.extend([trio.current_time()] * data.count(b"data: {"))
        ended = data.endswith(b"0\r\n\r\n")
    transport.close()


Slow = Callable[[Scene], Awaitable[None]]
Neighbour = Callable[[Scene, str, list[float]], Awaitable[None]]


@pytest.mark.parametrize("neighbour", [grpc_neighbour, sse_neighbour])
@pytest.mark.parametrize("slow", [slow_grpc_connection, slow_grpc_stream, slow_sse])
class TestI9BoundedMemory:
    async def test_a_slow_reader_holds_its_worker_back_and_nobody_else(
        self, slow: Slow, neighbour: Neighbour, autojump_clock: trio.testing.MockClock
    ) -> None:
        async with open_scene() as scene:
            flood = scene.worker.flood
            async with trio.open_nursery() as slow_client:
                slow_client.start_soon(slow, scene)
                await trio.sleep(1)
                settled = flood.accepted_bytes
                assert 0 < settled < MAX_HELD_BYTES
                await check_neighbours(scene, neighbour)
                for _ in range(SECONDS):
                    await trio.sleep(1.003)
                    # What its client has read has been replaced, and no more.
                    assert flood.accepted_bytes < settled + MAX_HELD_BYTES
                    assert flood.blocked
                slow_client.cancel_scope.cancel()
            assert scene.worker.flood.accepted_bytes > settled, "the slow client got nothing"


async def check_neighbours(scene: Scene, neighbour: Neighbour) -> None:
    """All of them get every token at the moment their worker sends it."""
    arrivals: dict[str, list[float]] = {f"neighbour{number}": [] for number in range(NEIGHBOURS)}
    async with trio.open_nursery() as nursery:
        for name, arrived in arrivals.items():
            nursery.start_soon(neighbour, scene, name, arrived)
    for name, arrived in arrivals.items():
        sent = scene.worker.sent_at[name]
        assert len(sent) == TOKENS
        assert arrived[:TOKENS] == sent
