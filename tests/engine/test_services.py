"""What a worker says about itself, and the calls that are not Generate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio
from grpclib.const import Status

from trio_router.engine.facts import LoadBook
from trio_router.engine.model import load_model
from trio_router.engine.vision.settings import MediaSettings
from trio_router.protocol.messages import (
    EmbedRequest,
    FlushCacheRequest,
    GetCountersRequest,
    GetLoadsRequest,
    GetModelInfoRequest,
    GetServerInfoRequest,
    GetTokenizerRequest,
    HealthCheckRequest,
    HealthStub,
    ReferenceWorkerStub,
    ServiceHealthListRequest,
    ServiceHealthRequest,
    ServingStatus,
    StartProfileRequest,
    StopProfileRequest,
    SubscribeKvEventsRequest,
    TokenizedInput,
    VllmEngineStub,
)
from trio_router.rpc.metadata import RpcError
from trio_router.text.bundle import unpack
from trio_router.text.tokenizer import load

ENGINE = "vllm.grpc.engine.VllmEngine"
PROMPT = list(range(300, 340))


@pytest.fixture
async def fleet(open_fleet):
    async with open_fleet(p={"block_size": 8, "max_num_seqs": 32}, w={"model_name": "other"}) as fleet:
        yield fleet


@pytest.fixture
def stub(fleet):
    return VllmEngineStub(fleet.channels["p"])


async def test_the_tokenizer_comes_in_slices_with_a_hash_on_the_last(stub):
    chunks = [chunk async for chunk in stub.get_tokenizer(GetTokenizerRequest())]
    assert all(len(chunk.data) == 65_536 for chunk in chunks[:-1])
    assert all(not chunk.sha256 for chunk in chunks[:-1])
    files = unpack(b"".join(chunk.data for chunk in chunks), sha256=chunks[-1].sha256)
    tokenizer = load(files)
    text = "The harbour wakes before the town does."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.template is not None


async def test_server_info_names_the_connector_and_the_shape_of_the_cache(fleet, stub):
    info = await stub.get_server_info(GetServerInfoRequest())
    assert (info.kv_connector, info.kv_role, info.kv_engine_id) == (
        "NixlConnector",
        "kv_producer",
        fleet.workers["p"].engine_id,
    )
    assert (info.block_size, info.max_num_seqs, info.data_parallel_size) == (8, 32, 1)
    assert info.mm_processor == ""
    plain = await VllmEngineStub(fleet.channels["w"]).get_server_info(GetServerInfoRequest())
    assert (plain.kv_connector, plain.kv_role, plain.kv_engine_id) == ("", "", "")


async def test_model_info_agrees_with_the_tokenizer(fleet, stub):
    info = await stub.get_model_info(GetModelInfoRequest())
    model = load_model()
    assert (info.served_model_name, info.vocab_size) == ("tiny-english", model.vocab_size)
    assert set(info.eos_token_ids) <= model.tokenizer.eos_token_ids
    assert info.max_req_input_len == info.max_context_length == 8192
    assert set(json.loads(info.default_sampling_params_json)) <= {"temperature", "top_p", "top_k"}
    assert not info.supports_vision
    other = await VllmEngineStub(fleet.channels["w"]).get_model_info(GetModelInfoRequest())
    assert other.served_model_name == "other"


async def test_what_it_says_of_media(open_fleet):
    sees, blind = (MediaSettings(processor="inprocess", language_model_only=blind) for blind in (False, True))
    local = MediaSettings(processor="inprocess", schemes=("data", "file"), allowed_local_path=Path("/tmp"), max_items=3)  # noqa: S108
    async with open_fleet(p={"media": sees}, d={"media": blind}, w={"media": local}, w2={}) as fleet:
        told = {}
        for name, channel in fleet.channels.items():
            server = await VllmEngineStub(channel).get_server_info(GetServerInfoRequest())
            model = await VllmEngineStub(channel).get_model_info(GetModelInfoRequest())
            told[name] = (
                *(server.mm_processor, server.mm_media_ref_schemes, server.mm_item_limits, server.mm_processor_source),
                *(model.supports_vision, model.model_type, model.served_model_name),
            )
        assert told == {
            "p": ("inprocess", "http,https,data", "image=8,video=2", "default", True, "qwen3_vl", "tiny-vl-english"),
            "d": ("", "", "", "", False, "qwen3_vl", "tiny-vl-english"),
            "w": ("inprocess", "data,file", "image=3,video=3", "default", True, "qwen3_vl", "tiny-vl-english"),
            "w2": ("", "", "", "", False, "tiny_english", "tiny-english"),
        }


async def test_health_is_told_three_ways_and_a_dead_engine_shows_in_all(fleet, stub):
    health = HealthStub(fleet.channels["p"])

    async def all_three():
        check = [(await health.check(ServiceHealthRequest(service=name))).status for name in ("", ENGINE)]
        watch = [reply.status async for reply in health.watch(ServiceHealthRequest(service=ENGINE))]
        listed = (await health.list(ServiceHealthListRequest())).statuses
        assert {name: reply.status for name, reply in listed.items()} == dict.fromkeys(("", ENGINE), check[0])
        return (*check, *watch, (await stub.health_check(HealthCheckRequest())).healthy)

    serving, not_serving = ServingStatus.SERVING, ServingStatus.NOT_SERVING
    assert await all_three() == (serving, serving, serving, True)
    fleet.workers["p"].kill_engine()
    assert await all_three() == (not_serving, not_serving, not_serving, False)
    assert (await stub.get_server_info(GetServerInfoRequest())).block_size == 8, "the rest still answers"
    counters = await ReferenceWorkerStub(fleet.channels["p"]).get_counters(GetCountersRequest())
    assert counters.engine_dead


async def test_an_unknown_service_is_not_found_or_told_as_data(fleet):
    health = HealthStub(fleet.channels["p"])
    with pytest.raises(RpcError) as caught:
        await health.check(ServiceHealthRequest(service="x"))
    assert caught.value.status is Status.NOT_FOUND
    replies = [reply.status async for reply in health.watch(ServiceHealthRequest(service="x"))]
    assert replies == [ServingStatus.SERVICE_UNKNOWN]


async def test_counters_and_loads_tell_of_work_under_way(fleet, stub):
    await fleet.prefill("p", PROMPT)
    calls = [await fleet.call("p", fleet.request([*PROMPT, i], max_tokens=2000, ignore_eos=True)) for i in range(40)]
    await trio.sleep(3)
    counters = await ReferenceWorkerStub(fleet.channels["p"]).get_counters(GetCountersRequest())
    assert (counters.running, counters.waiting, counters.pinned_requests, counters.pinned_blocks) == (32, 8, 1, 5)
    assert counters.generates == 41
    assert counters.free_blocks + fleet.workers["p"].engine.core.cache.held_blocks == counters.total_blocks == 4096
    (load,) = (await stub.get_loads(GetLoadsRequest())).loads
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (32, 8, 40)
    assert load.gen_throughput == pytest.approx(32 / 0.005, rel=0.01)
    assert load.max_total_num_tokens == 4096 * 8
    assert load.num_used_tokens == round(load.token_usage * 4096 * 8) > 0
    assert load.num_waiting_uncached_tokens == 8 * 41
    for call in calls:
        call.cancel()
    await trio.sleep(3)
    (load,) = (await stub.get_loads(GetLoadsRequest())).loads
    assert (load.num_total_reqs, load.gen_throughput) == (0, 0.0)


class TestLoadBook:
    def test_throughput_covers_the_last_two_seconds_whenever_it_is_asked(self):
        book = LoadBook()
        for step in range(50):
            book.note_tokens(step * 10, now=step / 10)
        assert book.throughput(now=4.9) == 100.0
        assert book.throughput(now=5.9) == 50.0
        assert book.throughput(now=20.0) == 0.0

    def test_the_hit_rate_covers_the_last_first_outputs(self):
        book = LoadBook()
        assert book.hit_rate == 0.0
        for _ in range(64):
            book.note_first_output(prompt_tokens=100, cached_tokens=100)
        for _ in range(32):
            book.note_first_output(prompt_tokens=100, cached_tokens=0)
        assert book.hit_rate == 0.5


class TestFlushCache:
    async def test_an_idle_cache_is_forgotten(self, fleet, stub):
        await fleet.generate("p", PROMPT)
        assert (await stub.flush_cache(FlushCacheRequest())).success
        assert (await fleet.generate("p", PROMPT)).complete.cached_tokens == 0

    async def test_a_cache_in_use_is_not(self, fleet, stub):
        call = await fleet.call("p", fleet.request(PROMPT, max_tokens=200, ignore_eos=True))
        await trio.sleep(0.1)
        reply = await stub.flush_cache(FlushCacheRequest())
        assert not reply.success
        assert "in flight" in reply.message
        with pytest.raises(RpcError) as caught:
            await stub.flush_cache(FlushCacheRequest(timeout_s=0.5))
        assert caught.value.status is Status.DEADLINE_EXCEEDED
        assert (await stub.flush_cache(FlushCacheRequest(timeout_s=5.0))).success
        assert call.take_nowait()

    @pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
    async def test_odd_timeouts_are_refused(self, stub, seconds):
        with pytest.raises(RpcError) as caught:
            await stub.flush_cache(FlushCacheRequest(timeout_s=seconds))
        assert caught.value.status is Status.INVALID_ARGUMENT


async def test_embed_is_refused_and_profiles_and_events_are_not_implemented(stub):
    with pytest.raises(RpcError) as caught:
        await stub.embed(EmbedRequest(tokenized=TokenizedInput(input_ids=[1])))
    assert caught.value.status is Status.INVALID_ARGUMENT
    for call in (stub.start_profile(StartProfileRequest()), stub.stop_profile(StopProfileRequest())):
        with pytest.raises(RpcError) as caught:
            await call
        assert caught.value.status is Status.UNIMPLEMENTED
    with pytest.raises(RpcError) as caught:
        await anext(stub.subscribe_kv_events(SubscribeKvEventsRequest()))
    assert caught.value.status is Status.UNIMPLEMENTED
