"""The gRPC front: the same VllmEngine service the workers speak, for clients, and the standard health service.

Generate is a raw handler: a worker's frames go to the client as the bytes they came in.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Final

import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from ..dispatch.aggregate import Aggregator
from ..dispatch.legs import choices, client_streams
from ..dispatch.router import Router
from ..errors import BadRequest, DecodeError, RequestAborted, RouterError, WorkerUnavailable
from ..observe.hooks import Observer
from ..protocol.codec import encode
from ..protocol.messages import (
    AbortRequest,
    AbortResponse,
    GenerateComplete,
    GenerateResponse,
    GetModelInfoRequest,
    GetModelInfoResponse,
    GetServerInfoRequest,
    GetServerInfoResponse,
    GetTokenizerChunk,
    GetTokenizerRequest,
    HealthBase,
    HealthCheckRequest,
    HealthCheckResponse,
    ServiceHealthRequest,
    ServiceHealthResponse,
    ServingStatus,
    VllmEngineBase,
)
from ..protocol.wire import get_string
from ..rpc.server import Server, ServerSettings
from ..rpc.servercall import ServerCall
from .references import ReferenceDesk
from .respond import grpc_reply

SERVICE: Final = "vllm.grpc.engine.VllmEngine"
GENERATE: Final = f"/{SERVICE}/Generate"
TOKENIZER_CHUNK_BYTES: Final = 65_536
"""The size workers use for the same call."""

REQUEST_ID: Final = (1,)
MAX_CHOICES: Final = 128
"""Of an aborted request: a client may ask for four thousand million, and only a worker would have refused that."""


def grpc_server(
    router: Router,
    *,
    settings: ServerSettings | None = None,
    media: ReferenceDesk | None = None,
    observer: Observer | None = None,
) -> Server:
    """A server that speaks for `router`; the caller runs `serve` on a listener of its own.

    `media` admits requests with media references; without it they pass as they are, as for callers that are trusted.
    """
    generate = _Generate(router, media=media, observer=observer or Observer())
    return Server([_Engine(router), _Health(router)], raw={GENERATE: generate.handle}, settings=settings)


class _Generate:
    """One Generate call: bytes in, bytes out."""

    def __init__(self, router: Router, *, media: ReferenceDesk | None, observer: Observer) -> None:
        self._router = router
        self._media = media
        self._observer = observer

    async def handle(self, call: ServerCall) -> None:
        try:
            await self._answer(call)
        except RouterError as exc:
            reply = grpc_reply(exc)
            call.trailing_metadata = reply.metadata
            raise GRPCError(reply.status, reply.message, reply.details) from exc

    async def _answer(self, call: ServerCall) -> None:
        message = await call.receive_request()
        if message is None:
            raise BadRequest("the call ended without a GenerateRequest")
        await self._admit(message)
        try:
            await self._relay(call, message)
        except RequestAborted:
            # What a worker does with an abort: an OK stream in which every choice ends with a frame that says so.
            for index in range(min(choices(message), MAX_CHOICES)):
                end = GenerateComplete(finish_reason="abort", index=index)
                await call.send(encode(GenerateResponse(complete=end)))

    async def _admit(self, message: bytes) -> None:
        if self._media is None:
            return
        try:
            await self._media.admit(message)
        except DecodeError:
            return  # the router's to tell, which keeps the account of such requests
        except RouterError as exc:
            request_id = get_string(message, REQUEST_ID) or ""
            self._observer.request_refused(request_id=request_id, client="grpc", code=exc.error_code)
            raise

    async def _relay(self, call: ServerCall, message: bytes) -> None:
        timeout = None if math.isinf(call.deadline) else call.deadline - trio.current_time()
        async with self._router.generate(message, timeout=timeout, client="grpc") as stream:
            if client_streams(message):
                call.on_drained = stream.resume
                await stream.pump(call.send_nowait, flush=call.flush)
            else:
                whole = Aggregator()
                await stream.pump(whole.feed)
                for frame in whole.frames(prompt_counts=stream.prompt_counts):
                    await call.send(frame)


class _Engine(VllmEngineBase):
    """The unary rest of the service. What a router has no answer to stays UNIMPLEMENTED."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._started_at = trio.current_time()

    async def abort(self, abort_request: AbortRequest) -> AbortResponse:
        await self._router.abort(abort_request.request_ids)
        return AbortResponse()

    async def health_check(self, health_check_request: HealthCheckRequest) -> HealthCheckResponse:
        ready = self._router.ready
        return HealthCheckResponse(healthy=ready, message="Health" if ready else "no worker is ready for every leg")

    async def get_model_info(self, get_model_info_request: GetModelInfoRequest) -> GetModelInfoResponse:
        for worker in self._router.registry.workers:
            if worker.ready and worker.facts is not None:
                return worker.facts.model_info
        raise WorkerUnavailable("no worker is ready, so the model is not known yet")

    async def get_server_info(self, get_server_info_request: GetServerInfoRequest) -> GetServerInfoResponse:
        # The KV and media fields stay empty: behind a router they are the business of its workers.
        return GetServerInfoResponse(
            active_requests=self._router.in_flight,
            uptime_seconds=trio.current_time() - self._started_at,
            server_type="trio-router",
        )

    async def get_tokenizer(self, get_tokenizer_request: GetTokenizerRequest) -> AsyncIterator[GetTokenizerChunk]:
        archive, sha256 = await self._router.tokenizer_bundle()
        for at in range(0, len(archive), TOKENIZER_CHUNK_BYTES):
            piece = archive[at : at + TOKENIZER_CHUNK_BYTES]
            is_last = at + TOKENIZER_CHUNK_BYTES >= len(archive)
            yield GetTokenizerChunk(data=piece, sha256=sha256 if is_last else "")


class _Health(HealthBase):
    """grpc.health.v1: serving while every leg has a ready worker."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def check(self, health_check_request: ServiceHealthRequest) -> ServiceHealthResponse:
        if health_check_request.service not in ("", SERVICE):
            raise GRPCError(Status.NOT_FOUND, f"no service {health_check_request.service!r} here")
        return ServiceHealthResponse(status=self._status())

    async def watch(self, health_check_request: ServiceHealthRequest) -> AsyncIterator[ServiceHealthResponse]:
        known = health_check_request.service in ("", SERVICE)
        yield ServiceHealthResponse(status=self._status() if known else ServingStatus(ServingStatus.SERVICE_UNKNOWN))

    def _status(self) -> ServingStatus:
        return ServingStatus(ServingStatus.SERVING if self._router.ready else ServingStatus.NOT_SERVING)
