"""The worker's gRPC services over one engine: Generate as bytes in and out, the rest as messages.

It decides nothing about tokens and blocks; it checks requests, words refusals, and sees to it that whatever ends a
call, the engine hears of it.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Final

import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from ..errors import RouterError
from ..protocol.codec import decode
from ..protocol.messages import (
    AbortRequest,
    AbortResponse,
    EmbedRequest,
    EmbedResponse,
    FlushCacheRequest,
    FlushCacheResponse,
    GenerateRequest,
    GetCountersRequest,
    GetCountersResponse,
    GetLoadsRequest,
    GetLoadsResponse,
    GetModelInfoRequest,
    GetModelInfoResponse,
    GetServerInfoRequest,
    GetServerInfoResponse,
    GetTokenizerChunk,
    GetTokenizerRequest,
    HealthBase,
    HealthCheckRequest,
    HealthCheckResponse,
    ReferenceWorkerBase,
    ServiceHealthListRequest,
    ServiceHealthListResponse,
    ServiceHealthRequest,
    ServiceHealthResponse,
    ServingStatus,
    VllmEngineBase,
)
from ..rpc.server import Server, Service
from ..rpc.servercall import ServerCall
from .facts import LoadBook, counters_reply, loads_reply, model_info, server_info
from .handoff import KvParams, parse_kv_params, read_source
from .intake import log_line, make_sequences, take_order
from .model import Model
from .replies import FrameSink, Replies
from .scheduler import Engine, EngineDead
from .sequence import EngineFailure, Sequence
from .vision.processor import MediaProcessor
from .vision.sight import Sight, references_of, sight_of_batches, sight_of_references

GENERATE_PATH: Final = "/vllm.grpc.engine.VllmEngine/Generate"
ENGINE_SERVICE: Final = "vllm.grpc.engine.VllmEngine"
TOKENIZER_CHUNK_BYTES: Final = 65_536
FLUSH_RETRY_SECONDS: Final = 0.1

# Others read these lines; the name is part of the worker's interface.
_log: Final = logging.getLogger("trio_router.engine")


class Servicer:
    """All services of one worker, sharing its engine."""

    def __init__(self, engine: Engine, *, model: Model, media: MediaProcessor, rng: random.Random) -> None:
        """`rng` names requests internally and draws for faults and unseeded sampling."""
        self._engine = engine
        self._media = media
        self._model = model
        self._rng = rng
        self._book = LoadBook()
        self._touched: list[FrameSink] = []
        engine.after_step.append(self._after_step)

    def server(self) -> Server:
        """A server for everything this worker offers."""
        services: list[Service] = [
            _EngineService(self._engine, model=self._model, book=self._book),
            _HealthService(self._engine),
            _CountersService(self._engine),
        ]
        return Server(services, raw={GENERATE_PATH: self._generate})

    def _after_step(self) -> None:
        # All tokens of a step are queued first: one write for each connection, whatever the number of streams.
        for sink in self._touched:
            sink.flush()
        self._touched.clear()
        self._book.note_tokens(self._engine.core.counters.generated_tokens, now=trio.current_time())

    async def _generate(self, call: ServerCall) -> None:
        # A reset that came in the same write as the request ends the handler here, before it has done anything.
        await trio.lowlevel.checkpoint()
        data = await call.receive()
        if data is None:
            raise GRPCError(Status.INVALID_ARGUMENT, "the call ended without a request message")
        request = decode(GenerateRequest, data)
        _log.info("%s", log_line(request))
        replies, sequences = await self._take(request, call=call)
        # With media in it a request is megabytes, and a stream may be long.
        del data, request
        try:
            await replies.done.wait()
        finally:
            self._engine.leave(sequences)
        self._note_first_output(sequences)
        if replies.failure is not None:
            raise GRPCError(Status.INTERNAL, replies.failure.value or None)

    async def _take(self, request: GenerateRequest, *, call: ServerCall) -> tuple[Replies, list[Sequence]]:
        """Look at the media, check and submit. Whatever fails here also releases the handoff that is offered."""
        counters = self._engine.core.counters
        params: KvParams | None = None
        taken = False
        try:
            params = parse_kv_params(request)
            sight = await self._look(request, params=params)
            replies, sequences = self._admit(request, params=params, sight=sight, call=call)
            taken = True
        except (RouterError, GRPCError) as exc:
            counters.refused += 1
            if isinstance(exc, EngineDead):
                raise GRPCError(Status.INTERNAL, EngineFailure.DEAD.value) from exc
            raise
        finally:
            # Also where the caller has left while its media were fetched.
            if not taken:
                self._release(params)
        counters.generates += 1
        return replies, sequences

    async def _look(self, request: GenerateRequest, *, params: KvParams | None) -> Sight:
        settings = self._engine.core.settings.media

        def warn(message: str) -> None:
            _log.warning("request %s: %s", request.request_id, message)

        references = references_of(request, settings=settings)
        if references is None:
            return sight_of_batches(request, params=params, settings=settings, warn=warn)
        processed = await self._media.process(references, prompt=request.tokenized.input_ids)
        sight = sight_of_references(processed, params=params, settings=settings, warn=warn)
        change = self._engine.faults.change_identity
        if change is not None and sight.identity is not None:
            sight = replace(sight, identity=change(sight.identity))
        return sight

    def _admit(
        self, request: GenerateRequest, *, params: KvParams | None, sight: Sight, call: ServerCall
    ) -> tuple[Replies, list[Sequence]]:
        engine = self._engine
        settings = engine.core.settings
        order = take_order(request, params=params, model=self._model, settings=settings, sight=sight)
        self._apply_faults()
        replies = Replies(
            call,
            choices=order.plan.n,
            streaming=order.streaming,
            touched=self._touched.append,
            identity=sight.identity,
        )
        sequences = make_sequences(
            order,
            outlet=replies,
            model=self._model,
            settings=settings,
            new_id=lambda: f"{self._rng.getrandbits(32):08x}",
            next_rank=engine.core.next_rank,
            draw_seed=lambda: self._rng.getrandbits(63),
        )
        engine.submit(sequences)
        return replies, sequences

    def _release(self, params: KvParams | None) -> None:
        source = read_source(params, connector=self._engine.core.settings.kv_connector)
        if source is not None:
            self._engine.release(source)

    def _apply_faults(self) -> None:
        faults = self._engine.faults
        if faults.refuse_admission:
            raise GRPCError(Status.UNAVAILABLE, "the request queue is full")
        if faults.raise_rate and self._rng.random() < faults.raise_rate:
            raise GRPCError(Status.INTERNAL, EngineFailure.RAISED.value)

    def _note_first_output(self, sequences: list[Sequence]) -> None:
        first = sequences[0]
        if first.generated:
            self._book.note_first_output(prompt_tokens=first.prompt_length, cached_tokens=first.cached_tokens)


class _EngineService(VllmEngineBase):
    """Every method of the engine's service but Generate."""

    def __init__(self, engine: Engine, *, model: Model, book: LoadBook) -> None:
        self._engine = engine
        self._model = model
        self._book = book

    async def embed(self, embed_request: EmbedRequest) -> EmbedResponse:
        raise GRPCError(Status.INVALID_ARGUMENT, "This model does not support embeddings")

    async def health_check(self, health_check_request: HealthCheckRequest) -> HealthCheckResponse:
        healthy = not self._engine.core.dead
        return HealthCheckResponse(healthy=healthy, message="Health" if healthy else "Engine is not alive")

    async def abort(self, abort_request: AbortRequest) -> AbortResponse:
        self._engine.abort(frozenset(abort_request.request_ids))
        return AbortResponse()

    async def get_model_info(self, get_model_info_request: GetModelInfoRequest) -> GetModelInfoResponse:
        return model_info(self._model, settings=self._engine.core.settings)

    async def get_server_info(self, get_server_info_request: GetServerInfoRequest) -> GetServerInfoResponse:
        return server_info(self._engine.core.settings, engine_id=self._engine.core.engine_id)

    async def get_loads(self, get_loads_request: GetLoadsRequest) -> GetLoadsResponse:
        return loads_reply(self._engine.core, book=self._book, now=trio.current_time())

    async def get_tokenizer(
        self, smg_grpc_common_get_tokenizer_request: GetTokenizerRequest
    ) -> AsyncIterator[GetTokenizerChunk]:
        archive = self._model.bundle
        for start in range(0, len(archive), TOKENIZER_CHUNK_BYTES):
            end = start + TOKENIZER_CHUNK_BYTES
            digest = self._model.bundle_sha256 if end >= len(archive) else ""
            yield GetTokenizerChunk(data=archive[start:end], sha256=digest)

    async def flush_cache(self, smg_grpc_common_flush_cache_request: FlushCacheRequest) -> FlushCacheResponse:
        patience = smg_grpc_common_flush_cache_request.timeout_s
        if not (math.isfinite(patience) and patience >= 0):
            raise GRPCError(Status.INVALID_ARGUMENT, f"timeout_s must be finite and not negative, got {patience}")
        cache = self._engine.core.cache
        deadline = trio.current_time() + patience
        while not cache.forget():
            if not patience:
                return FlushCacheResponse(success=False, message="not flushed: requests may be in flight")
            if trio.current_time() >= deadline:
                raise GRPCError(Status.DEADLINE_EXCEEDED, f"the cache was in use for all of {patience:g} s")
            await trio.sleep(FLUSH_RETRY_SECONDS)
        return FlushCacheResponse(success=True, message="flushed")


class _HealthService(HealthBase):
    """grpc.health.v1 for the server as a whole and for the engine's service; both say the same."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def _status(self, service: str) -> ServingStatus:
        if service not in ("", ENGINE_SERVICE):
            return ServingStatus(ServingStatus.SERVICE_UNKNOWN)
        return ServingStatus(ServingStatus.NOT_SERVING if self._engine.core.dead else ServingStatus.SERVING)

    async def check(self, health_check_request: ServiceHealthRequest) -> ServiceHealthResponse:
        status = self._status(health_check_request.service)
        if status == ServingStatus.SERVICE_UNKNOWN:
            raise GRPCError(Status.NOT_FOUND, f"unknown service {health_check_request.service!r}")
        return ServiceHealthResponse(status=status)

    async def list(self, health_list_request: ServiceHealthListRequest) -> ServiceHealthListResponse:
        statuses = {name: ServiceHealthResponse(status=self._status(name)) for name in ("", ENGINE_SERVICE)}
        return ServiceHealthListResponse(statuses=statuses)

    async def watch(self, health_check_request: ServiceHealthRequest) -> AsyncIterator[ServiceHealthResponse]:
        # The real servicer's Watch is no subscription either: one message and the end.
        yield ServiceHealthResponse(status=self._status(health_check_request.service))


class _CountersService(ReferenceWorkerBase):
    """What no real worker tells."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def get_counters(self, get_counters_request: GetCountersRequest) -> GetCountersResponse:
        return counters_reply(self._engine.core)
