"""What the router does with requests, workers and faults, on virtual time with reference workers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import trio
from grpclib.const import Status

from trio_router.dispatch.handoff import HandoffSettings
from trio_router.dispatch.retry import RetrySettings
from trio_router.dispatch.router import RouterSettings, open_router
from trio_router.engine.settings import Faults, WorkerSettings
from trio_router.errors import (
    BadRequest,
    ConfigError,
    DecodeError,
    DecodeFailed,
    HandoffInvalid,
    ModelNotFound,
    RequestAborted,
    RequestTimeout,
    WorkerRejected,
    WorkerUnavailable,
)
from trio_router.fleet.worker import WorkerRole, WorkerSpec
from trio_router.observe.hooks import Observer
from trio_router.protocol.codec import decode, encode
from trio_router.protocol.messages import GenerateRequest, GenerateResponse
from trio_router.rpc.memory import MemoryNetwork
from trio_router.testing import collect, open_cluster
from trio_router.testing.scripted import open_scene, plain_worker

PROMPTS = [f"Prompt number {i}: tell me about the " + "harbour and the garden " * (i % 7) for i in range(40)]


async def test_a_pair_answers_as_one_worker_would(autojump_clock):
    async with open_cluster(prefill=2, decode=2) as pairs, open_cluster(prefill=0, decode=0, plain=1) as plain:
        for prompt in PROMPTS[:8]:
            request = pairs.request(prompt, max_tokens=24)
            assert await collect(pairs.router, request) == await collect(plain.router, request)
        assert pairs.leaks() == plain.leaks() == []


async def test_many_at_once_recompute_nothing_and_share_the_workers(autojump_clock):
    async with open_cluster(prefill=2, decode=2) as cluster, open_cluster(prefill=0, decode=0, plain=1) as plain:
        texts: dict[str, list[int]] = {}

        async def one(prompt: str) -> None:
            texts[prompt] = await collect(cluster.router, cluster.request(prompt))

        async with trio.open_nursery() as nursery:
            for prompt in PROMPTS:
                nursery.start_soon(one, prompt)
        for prompt in PROMPTS:
            assert texts[prompt] == await collect(plain.router, plain.request(prompt))
        await trio.sleep(1)
        assert sum(w.counters.pulls for w in cluster.decode) == len(PROMPTS)
        assert sum(w.counters.recomputed_prompt_tokens for w in cluster.decode) == 0
        assert all(w.counters.generates > 0 for w in cluster.workers)
        pulled = sum(w.counters.pulled_tokens + w.counters.prefix_hit_tokens for w in cluster.decode)
        assert pulled == sum(len(cluster.model.tokenizer.encode(prompt)) for prompt in PROMPTS)
        assert cluster.recorder.handoffs == ["consumed"] * len(PROMPTS)
        assert cluster.leaks() == []


async def test_i1_a_failed_prefill_is_tried_again_and_never_recomputed(autojump_clock):
    async with open_cluster(prefill=2) as cluster:
        cluster.prefill[0].faults = Faults(error_rate=1.0)
        for _ in range(4):
            assert await collect(cluster.router, cluster.request())
        assert cluster.decode[0].counters.recomputed_prompt_tokens == 0
        assert "prefill_stream_error" in cluster.recorder.failures
        assert {name for record in cluster.recorder.records for name in record.workers_tried} == {
            cluster.prefill[0].address
        }
        assert {record.outcome.value for record in cluster.recorder.records} == {"ok"}
        assert cluster.leaks() == []


async def test_i10_attempts_are_bounded_and_the_last_error_is_told(autojump_clock):
    settings = RouterSettings(retry=RetrySettings(attempts=3))
    async with open_cluster(router=settings) as cluster:
        cluster.prefill[0].faults = Faults(raise_rate=1.0)
        with pytest.raises(WorkerRejected) as caught:
            await collect(cluster.router, cluster.request())
        assert caught.value.status is Status.INTERNAL
        assert caught.value.leg == "prefill"
        assert cluster.prefill[0].counters.refused == 3
        assert cluster.recorder.records[0].attempts == 3
        assert cluster.leaks() == []


async def test_a_refusal_that_is_the_requests_own_fault_is_not_tried_again(autojump_clock):
    async with open_cluster() as cluster:
        request = cluster.request()
        request.tokenized.input_ids = []
        with pytest.raises(WorkerRejected) as caught:
            await collect(cluster.router, request)
        assert caught.value.status is Status.INVALID_ARGUMENT
        assert cluster.prefill[0].counters.refused == 1
        assert cluster.leaks() == []


async def test_case_a15_a_failed_kv_load_starts_again_at_prefill_with_a_new_handoff(autojump_clock):
    async with open_cluster(decode=2) as cluster:
        cluster.decode[0].faults = Faults(load_error_rate=1.0)
        request = cluster.request()
        assert await collect(cluster.router, request)
        assert cluster.prefill[0].counters.pinned == 2
        assert cluster.decode[0].counters.failed_pulls == 1
        assert cluster.decode[1].counters.pulls == 1
        assert cluster.recorder.failures == ["worker_stream_failed"]
        assert cluster.recorder.handoffs == ["lapsed", "consumed"]


async def test_a_decode_refusal_before_admission_releases_the_handoff_and_goes_elsewhere(autojump_clock):
    async with open_cluster(decode=2) as cluster:
        for _ in range(2):
            await collect(cluster.router, cluster.request())  # both decode workers have met the prefill worker
        cluster.decode[0].faults = Faults(refuse_admission=True)
        assert await collect(cluster.router, cluster.request())
        await trio.sleep(1)
        assert cluster.recorder.handoffs == ["consumed", "consumed", "released", "consumed"]
        assert cluster.prefill[0].counters.released == 1
        assert cluster.leaks() == []


async def test_case_a7_a_missing_handoff_is_counted_and_decode_recomputes(autojump_clock):
    async with open_cluster() as cluster:
        cluster.prefill[0].faults = Faults(drop_handoff=True)
        assert await collect(cluster.router, cluster.request())
        assert cluster.recorder.missing == [cluster.prefill[0].address]
        assert cluster.decode[0].counters.recomputed_prompt_tokens > 0
        assert cluster.leaks() == []


async def test_case_a9_several_samples_skip_prefill_and_share_no_handoff(autojump_clock):
    async with open_cluster() as cluster:
        indices: dict[int, int] = {}
        request = cluster.request(max_tokens=5, n=3)
        request.sampling_params.temperature = 0.8  # engines refuse several greedy samples
        async with cluster.router.generate(request) as stream:
            async for frame in stream:
                if frame.is_complete:
                    index = frame.message().complete.index
                    indices[index] = indices.get(index, 0) + 1
        assert indices == {0: 1, 1: 1, 2: 1}
        assert cluster.prefill[0].counters.generates == 0
        assert cluster.decode[0].counters.pulls == 0
        assert cluster.leaks() == []


async def test_i5_a_handoff_that_grew_old_is_not_offered(autojump_clock, monkeypatch):
    settings = RouterSettings(handoff=HandoffSettings(fresh_fraction=0.0), retry=RetrySettings(attempts=2))
    async with open_cluster(router=settings) as cluster:
        with pytest.raises(Exception, match="too old") as caught:
            await collect(cluster.router, cluster.request())
        assert caught.value.error_code == "handoff_expired"
        await trio.sleep(1)
        assert cluster.recorder.handoffs == ["released", "released"]
        assert cluster.leaks() == []
        # Only the releases went there, and they were refused.
        assert cluster.decode[0].counters.generates == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [("remote_block_ids", None), ("remote_block_ids", [1, 2]), ("remote_request_id", None), ("do_remote_prefill", 1)],
)
async def test_i6_a_malformed_handoff_reaches_no_engine(autojump_clock, monkeypatch, key, value):
    from trio_router.dispatch import prefill

    real = prefill.harvest

    def spoil(answer):
        found = real(answer)
        params = {**json.loads(found.kv_params), key: value}
        return replace(found, kv_params=json.dumps(params))

    monkeypatch.setattr(prefill, "harvest", spoil)
    async with open_cluster(router=RouterSettings(retry=RetrySettings(attempts=2))) as cluster:
        with pytest.raises(HandoffInvalid, match=key):
            await collect(cluster.router, cluster.request())
        assert cluster.decode[0].counters.generates == 0
        assert not cluster.decode[0].engine.core.dead
        assert cluster.recorder.handoffs == ["invalid", "invalid"]


async def test_an_ending_in_error_before_the_first_token_is_an_error_for_the_client_in_the_end(autojump_clock):
    async with open_cluster(router=RouterSettings(retry=RetrySettings(attempts=2))) as cluster:
        cluster.decode[0].faults = Faults(error_rate=1.0)
        with pytest.raises(DecodeFailed, match="finish reason 'error'"):
            await collect(cluster.router, cluster.request())


async def test_a_dead_engine_is_avoided_by_retries_and_then_by_probes(autojump_clock):
    async with open_cluster(decode=2) as cluster:
        cluster.decode[0].kill_engine()
        for _ in range(3):
            assert await collect(cluster.router, cluster.request())
        await trio.sleep(60)
        ready = {worker.name: worker.ready for worker in cluster.router.registry.workers}
        assert ready[cluster.decode[0].address] is False
        failures = len(cluster.recorder.failures)
        for _ in range(4):
            assert await collect(cluster.router, cluster.request())
        assert len(cluster.recorder.failures) == failures


async def test_no_ready_worker_is_said_at_once_with_the_role_named(autojump_clock):
    async with open_cluster(router=RouterSettings(retry=RetrySettings(attempts=1))) as cluster:
        cluster.prefill[0].kill_engine()
        await trio.sleep(60)
        assert not cluster.router.ready
        with pytest.raises(WorkerUnavailable, match="no prefill worker is ready"):
            await collect(cluster.router, cluster.request())
        assert cluster.leaks() == []


async def test_a_model_nobody_serves_is_not_found(autojump_clock):
    async with open_cluster() as cluster:
        assert cluster.router.models() == ["tiny-english"]
        stranger = cluster.router.generate(cluster.request(), model="gpt-9")
        with pytest.raises(ModelNotFound, match=r"gpt-9.*tiny-english"):
            await stranger.__aenter__()
        assert cluster.leaks() == []


async def test_i4_the_clients_deadline_is_kept_here_and_its_legs_are_cleaned_up(autojump_clock):
    async with open_cluster(worker=WorkerSettings(name="slow", inter_token_seconds=0.5)) as cluster:
        begin = trio.current_time()

        async def run() -> None:
            async with cluster.router.generate(cluster.request(max_tokens=100), timeout=3.0) as stream:
                async for _ in stream:
                    pass

        with pytest.raises(RequestTimeout):
            await run()
        assert trio.current_time() - begin == pytest.approx(3.0)
        await trio.sleep(1)
        assert cluster.recorder.records[0].outcome.value == "timeout"
        assert cluster.leaks() == []


async def test_an_abort_before_the_first_frame_ends_the_request(autojump_clock):
    async with open_cluster() as cluster:
        cluster.prefill[0].faults = Faults(hold_prefill=True)
        request = cluster.request()

        async def run() -> None:
            with pytest.raises(RequestAborted):
                await collect(cluster.router, request)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await trio.sleep(0.1)
            assert await cluster.router.abort([request.request_id]) == 1
            assert await cluster.router.abort(["nobody"]) == 0
        await trio.sleep(1)
        assert cluster.prefill[0].counters.aborts == 1
        assert cluster.leaks() == []


async def test_an_abort_while_streaming_ends_with_finish_reason_abort(autojump_clock):
    async with open_cluster() as cluster:
        request = cluster.request(max_tokens=500)
        reasons = []
        async with cluster.router.generate(request) as stream:
            async for frame in stream:
                if frame.is_complete:
                    reasons.append(frame.message().complete.finish_reason)
                elif stream.timeline.frames == 3:
                    await cluster.router.abort([request.request_id])
        assert reasons == ["abort"]
        assert stream.timeline.frames < 100
        assert cluster.leaks() == []


async def test_i8_every_request_has_one_record_with_its_story(autojump_clock):
    async with open_cluster() as cluster:
        await collect(cluster.router, cluster.request(max_tokens=6))
        [record] = cluster.recorder.records
        assert record.outcome.value == "ok"
        assert record.prefill_worker == cluster.prefill[0].address
        assert record.decode_worker == cluster.decode[0].address
        times = [
            record.received_at,
            record.prefill_started_at,
            record.prefill_ended_at,
            record.decode_started_at,
            record.first_frame_at,
            record.ended_at,
        ]
        assert times == sorted(times)
        assert (record.finish_reason, record.attempts, record.output_tokens) == ("length", 1, 6)
        assert record.prompt_tokens == len(cluster.model.tokenizer.encode("Tell me about the harbour."))


async def test_errors_of_the_callers_block_leave_it_as_they_are(autojump_clock):
    async with open_cluster() as cluster:

        async def run() -> None:
            async with cluster.router.generate(cluster.request()) as stream:
                async for _ in stream:
                    raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await run()
        await trio.sleep(1)
        assert cluster.leaks() == []


async def test_what_cannot_become_a_request_is_told_once_and_has_no_record(autojump_clock):
    class Told(Observer):
        def __init__(self) -> None:
            self.events: list[object] = []

        def request_started(self) -> None:
            self.events.append("started")

        def request_refused(self, *, request_id: str, client: str, code: str) -> None:
            self.events.append((client, code))

    told = Told()
    workers = (WorkerSpec(url="grpc://nobody:1", role=WorkerRole.PLAIN),)
    async with open_router(RouterSettings(workers=workers), dialer=MemoryNetwork().dial, observer=told) as router:
        with pytest.raises(DecodeError):
            await collect(router, b"\xff\xff")
        router.shut_down()
        with pytest.raises(WorkerUnavailable):
            await collect(router, GenerateRequest())
    assert told.events == [("embedded", "malformed_message"), ("embedded", "shutting_down")]


async def test_requests_may_be_bytes_and_what_is_no_message_is_refused(autojump_clock):
    async with open_cluster() as cluster:
        assert await collect(cluster.router, encode(cluster.request())) == await collect(
            cluster.router, cluster.request()
        )
        with pytest.raises(DecodeError):
            await collect(cluster.router, b"\xff\xff")
        sampled = cluster.request()
        sampled.sampling_params.prompt_logprobs = 1
        with pytest.raises(BadRequest):
            await collect(cluster.router, sampled)


async def test_an_attempt_sends_its_own_id_on_both_legs(autojump_clock, caplog):
    caplog.set_level("INFO", logger="trio_router.engine")
    async with open_cluster() as cluster:
        request = cluster.request()
        await collect(cluster.router, request)
        ids = [record.message.split()[2] for record in caplog.records if record.message.startswith("Generate request")]
        assert len(ids) == 2
        assert ids[0] == ids[1]
        assert ids[0].startswith(request.request_id + "-")


async def test_the_tokenizer_comes_from_a_worker_with_its_hash(autojump_clock):
    import hashlib

    async with open_cluster() as cluster:
        archive, claimed = await cluster.router.tokenizer_bundle()
        assert hashlib.sha256(archive).hexdigest() == claimed


async def test_the_tokenizer_is_that_of_the_named_models_workers(autojump_clock):
    workers = [plain_worker(name=name, model=name) for name in ("a", "b")]
    async with open_scene(*workers) as scene:
        for worker in scene.router.registry.workers:

            async def bundle(name=worker.name):
                return name.encode(), "hash"

            worker.client.tokenizer_bundle = bundle
        assert (await scene.router.tokenizer_bundle("b"))[0] == b"b:1"
        assert (await scene.router.tokenizer_bundle())[0] == b"a:1"
        with pytest.raises(WorkerUnavailable) as caught:
            await scene.router.tokenizer_bundle("c")
        assert caught.value.error_code == "tokenizer_not_ready"


async def test_a_worker_that_gives_no_tokenizer_is_passed_over(autojump_clock):
    workers = [plain_worker(name=name) for name in ("a", "b")]
    async with open_scene(*workers) as scene:
        with pytest.raises(WorkerUnavailable, match="b:1: UNIMPLEMENTED"):
            await scene.router.tokenizer_bundle()


async def test_frames_carry_the_workers_bytes(autojump_clock):
    async with open_cluster() as cluster:
        async with cluster.router.generate(cluster.request(max_tokens=2)) as stream:
            frames = [frame async for frame in stream]
        assert [frame.is_complete for frame in frames] == [False, False, True]
        assert frames[-1].message() == decode(GenerateResponse, frames[-1].data)


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ([], "no workers"),
        (["prefill"], "only prefill"),
        (["decode"], "only decode"),
        (["prefill", "decode", "regular"], "mixed"),
    ],
)
async def test_a_fleet_that_cannot_serve_is_refused_before_anything_is_dialed(roles, message):
    workers = tuple(WorkerSpec(url=f"grpc://127.0.0.1:{i + 1}", role=WorkerRole(r)) for i, r in enumerate(roles))
    with pytest.raises(ConfigError, match=message):
        async with open_router(RouterSettings(workers=workers)):
            pass


@pytest.mark.parametrize("url", ["127.0.0.1:1", "http://x:1", "grpc://x", "grpc://x:y", "grpc://:1", "grpcs://x"])
def test_a_worker_url_is_checked_where_it_is_written(url):
    with pytest.raises(ConfigError, match="worker URL"):
        WorkerSpec(url=url, role=WorkerRole.PLAIN)


async def test_a_generate_request_without_an_id_gets_one(autojump_clock):
    async with open_cluster() as cluster:
        request: GenerateRequest = cluster.request()
        request.request_id = ""
        async with cluster.router.generate(request) as stream:
            assert stream.request_id
            async for _ in stream:
                pass
