"""The typed client: every call but Generate has a deadline of its own, and facts are what workers say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from trio_router.errors import LinkError, WorkerUnavailable
from trio_router.fleet import client as client_module
from trio_router.fleet.client import ABORT_TIMEOUT, INFO_TIMEOUT, TOKENIZER_TIMEOUT, WorkerClient
from trio_router.protocol.messages import (
    AbortRequest,
    AbortResponse,
    GetModelInfoRequest,
    GetModelInfoResponse,
    GetServerInfoRequest,
    GetServerInfoResponse,
    GetTokenizerChunk,
    GetTokenizerRequest,
    HealthCheckRequest,
    HealthCheckResponse,
    VllmEngineBase,
)
from trio_router.rpc.channel import open_channel
from trio_router.rpc.memory import MemoryNetwork
from trio_router.rpc.server import Server


class Worker(VllmEngineBase):
    """Answers as told; a `stuck` one answers nothing."""

    def __init__(self) -> None:
        self.stuck = False
        self.model = GetModelInfoResponse(served_model_name="served", model_path="/path")
        self.info = GetServerInfoResponse(kv_connector="NixlConnector", kv_engine_id="e", block_size=16)
        self.chunks: list[GetTokenizerChunk] = []
        self.aborted: list[str] = []
        self.streaming = False

    async def _maybe_stuck(self) -> None:
        if self.stuck:
            await trio.sleep_forever()

    async def abort(self, abort_request: AbortRequest) -> AbortResponse:
        self.aborted += abort_request.request_ids
        await self._maybe_stuck()
        return AbortResponse()

    async def health_check(self, health_check_request: HealthCheckRequest) -> HealthCheckResponse:
        await self._maybe_stuck()
        return HealthCheckResponse(healthy=False)

    async def get_model_info(self, get_model_info_request: GetModelInfoRequest) -> GetModelInfoResponse:
        await self._maybe_stuck()
        return self.model

    async def get_server_info(self, get_server_info_request: GetServerInfoRequest) -> GetServerInfoResponse:
        return self.info

    async def get_tokenizer(
        self, smg_grpc_common_get_tokenizer_request: GetTokenizerRequest
    ) -> AsyncIterator[GetTokenizerChunk]:
        self.streaming = True
        try:
            for chunk in self.chunks:
                yield chunk
            await self._maybe_stuck()
        finally:
            self.streaming = False


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[Worker, WorkerClient]]:
    network, worker = MemoryNetwork(), Worker()
    async with trio.open_nursery() as nursery:
        await nursery.start(Server([worker]).serve, network.listen("worker:1"))
        async with open_channel("worker:1", dialer=network.dial) as channel:
            yield worker, WorkerClient(channel)
        nursery.cancel_scope.cancel()


class TestFacts:
    async def test_both_infos_make_them(self, autojump_clock):
        async with opened() as (worker, client):
            facts = await client.facts()
        assert (facts.model, facts.kv_connector, facts.kv_engine_id, facts.block_size) == (
            "served",
            "NixlConnector",
            "e",
            16,
        )
        assert facts.model_info == worker.model
        assert facts.max_num_seqs == 0, "not told is unknown"

    @pytest.mark.parametrize(
        ("info", "model"),
        [
            (GetModelInfoResponse(model_path="/path"), "/path"),
            (GetModelInfoResponse(), "unknown"),
        ],
    )
    async def test_a_model_without_a_served_name_goes_by_its_path(self, autojump_clock, info, model):
        async with opened() as (worker, client):
            worker.model = info
            assert (await client.facts()).model == model

    async def test_health_is_the_workers_own_word(self, autojump_clock):
        async with opened() as (_, client):
            assert await client.healthy() is False


class TestDeadlines:
    @pytest.mark.parametrize(
        ("call", "seconds"),
        [
            (lambda client: client.facts(), INFO_TIMEOUT),
            (lambda client: client.healthy(), INFO_TIMEOUT),
            (lambda client: client.abort(["a", "b"]), ABORT_TIMEOUT),
            (lambda client: client.tokenizer_bundle(), TOKENIZER_TIMEOUT),
        ],
    )
    async def test_i11_a_worker_that_never_answers_is_given_up(self, autojump_clock, call, seconds):
        async with opened() as (worker, client):
            worker.stuck = True
            began = trio.current_time()
            with pytest.raises(GRPCError) as caught:
                await call(client)
            assert caught.value.status is Status.DEADLINE_EXCEEDED
            assert trio.current_time() - began == pytest.approx(seconds)

    async def test_a_worker_that_cannot_be_reached(self, autojump_clock):
        async with open_channel("nobody:1", dialer=MemoryNetwork().dial) as channel:
            client = WorkerClient(channel)
            with pytest.raises(LinkError):
                await client.connect()
            with pytest.raises(LinkError):
                await client.generate(b"")
            with pytest.raises(GRPCError) as caught:
                await client.healthy()
            assert caught.value.status is Status.UNAVAILABLE


class TestTokenizer:
    async def test_the_pieces_are_joined_and_the_last_hash_counts(self, autojump_clock):
        async with opened() as (worker, client):
            worker.chunks = [GetTokenizerChunk(data=b"ab"), GetTokenizerChunk(data=b"c", sha256="hash")]
            assert await client.tokenizer_bundle() == (b"abc", "hash")

    async def test_i9_a_bundle_without_end_is_given_up_and_its_call_ended(self, autojump_clock, monkeypatch):
        monkeypatch.setattr(client_module, "TOKENIZER_MAX_BYTES", 100)
        async with opened() as (worker, client):
            worker.chunks = [GetTokenizerChunk(data=b"x" * 60)] * 1000
            with pytest.raises(WorkerUnavailable, match="over 100 bytes") as caught:
                await client.tokenizer_bundle()
            assert caught.value.error_code == "tokenizer_load_failed"
            await trio.testing.wait_all_tasks_blocked()
            assert not worker.streaming


async def test_an_abort_names_the_requests(autojump_clock):
    async with opened() as (worker, client):
        await client.abort(["a", "b"])
        assert worker.aborted == ["a", "b"]
