"""Workers whose every answer is a test's decision: the real wire, and nothing behind it.

For what a reference worker never does: malformed handoffs, streams that break, restarts under another engine id.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from ..dispatch.router import Router, RouterSettings
from ..fleet.client import GENERATE
from ..fleet.worker import WorkerRole, WorkerSpec
from ..protocol.codec import decode, encode
from ..protocol.messages import (
    AbortRequest,
    AbortResponse,
    GenerateComplete,
    GenerateRequest,
    GenerateResponse,
    GenerateStreamChunk,
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
from ..rpc.memory import MemoryNetwork
from ..rpc.server import Server
from ..rpc.servercall import ServerCall
from ..scopes import plain_errors
from .recorder import Recorder, open_counted_router, router_leaks, said

Script = Callable[[ServerCall, GenerateRequest], Awaitable[None]]
PROMPT_TOKENS = 40


def chunk(*token_ids: int, index: int = 0, **fields: Any) -> bytes:
    """A delta frame."""
    made = GenerateStreamChunk(
        token_ids=list(token_ids),
        index=index,
        prompt_tokens=PROMPT_TOKENS,
        completion_tokens=len(token_ids),
        **fields,
    )
    return encode(GenerateResponse(chunk=made))


def complete(reason: str = "length", *, index: int = 0, **fields: Any) -> bytes:
    """A frame that ends a choice."""
    made = GenerateComplete(finish_reason=reason, index=index, prompt_tokens=PROMPT_TOKENS, **fields)
    return encode(GenerateResponse(complete=made))


def handoff_params(**changes: Any) -> str:
    """KV params as a NIXL prefill worker returns them; a change to None leaves the key out."""
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "engine-1",
        "remote_request_id": "request-1",
        "remote_host": "prefill",
        "remote_port": 2,
        "tp_size": 1,
        "remote_num_tokens": PROMPT_TOKENS,
        "transfer_mode": "pull",
        **changes,
    }
    return json.dumps({key: value for key, value in params.items() if value is not None})


def a_request(name: str = "request", *, n: int = 1, max_tokens: int = 8, stream: bool = True) -> GenerateRequest:
    """A request for a prompt of PROMPT_TOKENS ids."""
    return GenerateRequest(
        request_id=name,
        tokenized=TokenizedInput(input_ids=list(range(1, PROMPT_TOKENS + 1))),
        sampling_params=SamplingParams(max_tokens=max_tokens, n=n),
        stream=stream,
    )


async def hand_over(call: ServerCall, request: GenerateRequest) -> None:
    """A prefill leg that ends well."""
    await call.send(complete(kv_transfer_params_json=handoff_params()))


async def answer(call: ServerCall, request: GenerateRequest) -> None:
    """A decode leg that ends well; as a real worker's, it refuses `max_tokens` 0."""
    if request.sampling_params.max_tokens == 0:
        raise GRPCError(Status.INVALID_ARGUMENT, "max_tokens must be at least 1, got 0.")
    await call.send(chunk(7))
    await call.send(chunk(8))
    await call.send(complete(output_ids=[8], completion_tokens=1))


@dataclass
class ScriptedWorker:
    """One worker; everything may be changed while it runs. `script` plays every Generate."""

    role: WorkerRole
    script: Script
    name: str = ""
    model: str = "tiny"
    connector: str = "NixlConnector"
    engine_id: str = "engine-1"
    block_size: int = 16
    data_parallel_size: int = 0
    rank: int | None = None
    """The data-parallel rank in its URL."""
    bootstrap_port: int | None = None
    healthy: bool = True
    mm_processor: str = ""
    """What it says it processes media with; empty: it does not."""
    mm_schemes: str = ""
    requests: list[GenerateRequest] = field(default_factory=list)
    received: list[bytes] = field(default_factory=list)
    """The same requests as they came."""
    aborted: list[str] = field(default_factory=list)
    on_abort: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
    """Runs before an Abort is answered."""
    ended: list[str] = field(default_factory=list)
    """Requests whose handler has ended, however."""
    _running: trio.CancelScope | None = None

    @property
    def address(self) -> str:
        """Where it is dialed."""
        return f"{self.name or self.role.value}:1"

    @property
    def spec(self) -> WorkerSpec:
        """How an operator would tell the router of it."""
        pinned = "" if self.rank is None else f"@{self.rank}"
        return WorkerSpec(url=f"grpc://{self.address}{pinned}", role=self.role, bootstrap_port=self.bootstrap_port)

    @property
    def releases(self) -> list[GenerateRequest]:
        """The requests that were made to be refused."""
        return [each for each in self.requests if each.sampling_params.max_tokens == 0]

    async def serve(
        self, network: MemoryNetwork, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve until stopped. It may be started again: that is a restart."""
        listener = network.listen(self.address)
        server = Server([_Engine(self)], raw={GENERATE: self._generate})
        try:
            with trio.CancelScope() as self._running:
                await server.serve(listener, task_status=task_status)
        finally:
            listener.close()

    def stop(self) -> None:
        """Die: every connection ends."""
        if self._running is not None:
            self._running.cancel()

    async def _generate(self, call: ServerCall) -> None:
        message = await call.receive() or b""
        request = decode(GenerateRequest, message)
        self.received.append(message)
        self.requests.append(request)
        try:
            await self.script(call, request)
        finally:
            self.ended.append(request.request_id)


class _Engine(VllmEngineBase):
    def __init__(self, worker: ScriptedWorker) -> None:
        self._worker = worker

    async def abort(self, abort_request: AbortRequest) -> AbortResponse:
        self._worker.aborted.extend(abort_request.request_ids)
        await self._worker.on_abort()
        return AbortResponse()

    async def health_check(self, health_check_request: HealthCheckRequest) -> HealthCheckResponse:
        return HealthCheckResponse(healthy=self._worker.healthy)

    async def get_model_info(self, get_model_info_request: GetModelInfoRequest) -> GetModelInfoResponse:
        return GetModelInfoResponse(served_model_name=self._worker.model)

    async def get_server_info(self, get_server_info_request: GetServerInfoRequest) -> GetServerInfoResponse:
        worker = self._worker
        return GetServerInfoResponse(
            kv_connector=worker.connector,
            kv_engine_id=worker.engine_id,
            data_parallel_size=worker.data_parallel_size,
            block_size=worker.block_size,
            mm_processor=worker.mm_processor,
            mm_media_ref_schemes=worker.mm_schemes,
        )


def prefill_worker(script: Script = hand_over, **fields: Any) -> ScriptedWorker:
    """A prefill worker, by default one that hands over."""
    return ScriptedWorker(role=WorkerRole.PREFILL, script=script, **fields)


def decode_worker(script: Script = answer, **fields: Any) -> ScriptedWorker:
    """A decode worker, by default one that answers."""
    return ScriptedWorker(role=WorkerRole.DECODE, script=script, **fields)


def plain_worker(script: Script = answer, **fields: Any) -> ScriptedWorker:
    """A plain worker, by default one that answers."""
    return ScriptedWorker(role=WorkerRole.PLAIN, script=script, **fields)


@dataclass(kw_only=True)
class Scene:
    """A router before scripted workers."""

    router: Router
    network: MemoryNetwork
    recorder: Recorder
    _nursery: trio.Nursery

    async def start(self, worker: ScriptedWorker) -> None:
        """Have a worker served at its address. After `ScriptedWorker.stop`, that is a restart."""
        await self._nursery.start(worker.serve, self.network)

    def leaks(self) -> list[str]:
        """What has not returned to rest (invariant I8)."""
        return said(router_leaks(self.router))


@asynccontextmanager
async def open_scene(
    *workers: ScriptedWorker,
    router: RouterSettings | None = None,
    network: MemoryNetwork | None = None,
    nursery: trio.Nursery | None = None,
) -> AsyncIterator[Scene]:
    """Serve the workers, and open a router that has found every one of them ready.

    The workers run in `nursery`, if one is given, and so outlive a block that is cancelled.
    """
    network = network or MemoryNetwork()
    recorder = Recorder()
    settings = replace(router or RouterSettings(), workers=tuple(worker.spec for worker in workers))
    with plain_errors():
        async with trio.open_nursery() as own:
            home = nursery or own
            for worker in workers:
                await home.start(worker.serve, network)
            async with open_counted_router(settings, network=network, recorder=recorder) as running:
                await running.registry.wait_ready(every_worker=True)
                yield Scene(router=running, network=network, recorder=recorder, _nursery=home)
            own.cancel_scope.cancel()
