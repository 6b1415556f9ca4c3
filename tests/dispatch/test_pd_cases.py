"""Public cases of prefill/decode dispatch, with either connector, on reference and scripted workers (A4 to A16)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from trio_router.dispatch.handoff import HandoffSettings, OnEmptyPrefill, OnMissingHandoff
from trio_router.dispatch.retry import RetrySettings
from trio_router.dispatch.router import RouterSettings
from trio_router.engine.model import load_model
from trio_router.engine.settings import Faults
from trio_router.errors import HandoffMissing, PrefillFailed, WorkerRejected, WorkerUnavailable
from trio_router.fleet.worker import WorkerRole
from trio_router.front.app import HttpFront
from trio_router.http2.frames import ErrorCode
from trio_router.protocol.messages import GenerateRequest
from trio_router.rpc.memory import MemoryNetwork
from trio_router.testing import Cluster, collect, open_cluster
from trio_router.testing.scripted import (
    Scene,
    a_request,
    answer,
    chunk,
    complete,
    decode_worker,
    hand_over,
    handoff_params,
    open_scene,
    prefill_worker,
)

CONNECTORS = ("nixl", "mooncake")
ONCE = RouterSettings(retry=RetrySettings(attempts=1))
both_connectors = pytest.mark.parametrize("connector", CONNECTORS)


def decode_side(cluster: Cluster | Scene):
    """The router's record of its (first) decode worker."""
    return next(each for each in cluster.router.registry.workers if each.spec.role is WorkerRole.DECODE)


FAIL = RouterSettings(handoff=HandoffSettings(on_missing=OnMissingHandoff.FAIL))


async def end_stopped(call, request) -> None:
    await call.send(complete("stop"))


async def hand_nothing_over(call, request) -> None:
    await call.send(complete("length"))


NOTHING_COMES = [
    ("nixl", {"connector": "NixlConnector"}, hand_nothing_over),
    ("mooncake", {"connector": "MooncakeConnector"}, end_stopped),
    ("mooncake", {"connector": "MooncakeConnector", "engine_id": ""}, hand_nothing_over),
    ("mooncake", {"connector": "MooncakeConnector", "data_parallel_size": 2}, hand_nothing_over),
    ("passthrough", {"connector": "FancyConnector"}, hand_nothing_over),
]
nothing_comes = pytest.mark.parametrize(("mode", "fields", "script"), NOTHING_COMES)


class TestNothingHandedOver:
    """A7: never silently."""

    @nothing_comes
    async def test_case_a7_decode_recomputes_and_it_is_counted_by_mode(self, autojump_clock, mode, fields, script):
        prefill, decode = prefill_worker(script, **fields), decode_worker()
        async with open_scene(prefill, decode) as scene:
            assert await collect(scene.router, a_request()) == [7, 8]
            assert [connector for connector, _ in scene.recorder.pairs] == [mode]
            assert scene.recorder.handoffs == []
        assert decode.requests[0].kv_transfer_params_json is None

    @nothing_comes
    async def test_case_a7_when_it_must_not_decode_never_hears_of_it(self, autojump_clock, mode, fields, script):
        prefill, decode = prefill_worker(script, **fields), decode_worker()
        async with open_scene(prefill, decode, router=FAIL) as scene:
            with pytest.raises(HandoffMissing) as caught:
                await collect(scene.router, a_request())
            assert caught.value.http_status == 502
            assert decode.requests == []
            assert scene.leaks() == []

    @pytest.mark.parametrize(("mode", "fields", "script"), NOTHING_COMES[2:])
    async def test_case_a7_where_nothing_was_asked_for_it_stays_a_502(self, autojump_clock, mode, fields, script):
        """Such a worker does as it is told: no breaker may open for it."""
        prefill = prefill_worker(script, **fields)
        async with open_scene(prefill, decode_worker(), router=FAIL) as scene:
            for _ in range(20):
                with pytest.raises(HandoffMissing):
                    await collect(scene.router, a_request())
            assert len(prefill.requests) == 20, "another try finds the same"
            assert scene.recorder.breakers == []

    async def test_case_a7_a_store_misses_nothing(self, autojump_clock):
        async with open_scene(
            prefill_worker(end_stopped, connector="FlexKVConnector"), decode_worker(), router=FAIL
        ) as s:
            assert await collect(s.router, a_request()) == [7, 8]
            assert s.recorder.missing == []

    @both_connectors
    async def test_case_a7_what_comes_is_used_and_nothing_is_computed_twice(self, autojump_clock, connector):
        async with open_cluster(connector=connector, router=FAIL) as cluster:
            for number in range(5):
                assert await collect(cluster.router, cluster.request(f"prompt {number} about the garden"))
            assert [each for each, _ in cluster.recorder.pairs] == [connector] * 5
            assert cluster.decode[0].counters.recomputed_prompt_tokens == 0
            assert cluster.decode[0].counters.pulls == 5

    async def test_case_a7_over_http_it_is_a_502(self, autojump_clock):
        async with open_cluster(router=FAIL) as cluster, front_of(cluster) as address:
            cluster.prefill[0].faults = Faults(drop_handoff=True)
            status, body = await post(cluster, address, "/v1/completions", {"prompt": "hello", "max_tokens": 4})
            assert status == 502
            assert body["error"]["code"] == HandoffMissing.code


class FixedText:
    ready = True

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer

    async def get(self, model: str):
        return self.tokenizer


@asynccontextmanager
async def front_of(behind: Cluster | Scene) -> AsyncIterator[str]:
    async with trio.open_nursery() as nursery:
        listener = behind.network.listen("http:1")
        await nursery.start(HttpFront(behind.router, FixedText(load_model().tokenizer)).serve, listener)
        yield listener.address
        nursery.cancel_scope.cancel()


async def post(cluster: Cluster, address: str, path: str, fields: dict) -> tuple[int, dict]:
    status, body = await send(cluster.network, address, path, fields)
    return status, msgspec.json.decode(body)


async def send(network: MemoryNetwork, address: str, path: str, fields: dict) -> tuple[int, bytes]:
    body = msgspec.json.encode({"model": "tiny-english", **fields})
    client = await network.dial(address)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    client.send_nowait(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    received = b""
    while True:
        await client.wait_readable()
        piece = client.recv_nowait(65_536)
        if piece == b"":
            break
        received += piece or b""
    head, _, rest = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), rest


ABSENT = object()
CAPS = {
    "max_tokens": [ABSENT, None, 5],
    "min_tokens": [ABSENT, 2],
    "stop": [ABSENT, None, ["END", "."]],
    "stop_token_ids": [ABSENT, [7, 8]],
    "ignore_eos": [ABSENT, True],
    "stream": [ABSENT, None, False, True],
    "stream_options": [ABSENT, {"include_usage": True}],
}
ENDPOINTS = {
    "/v1/completions": {"prompt": "the harbour"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "the harbour"}]},
}


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_case_a8_over_http_prefill_is_capped_and_what_was_absent_stays_absent(autojump_clock, path):
    """Each field in turn is what it may be, among defaults and among all of them."""
    prefill, decode = prefill_worker(model="tiny-english"), decode_worker(model="tiny-english")
    everything = {name: values[-1] for name, values in CAPS.items()}
    async with open_scene(prefill, decode) as scene, front_of(scene) as address:
        for name, values in CAPS.items():
            for value in values:
                for others in ({}, everything):
                    fields = {**ENDPOINTS[path], **others, name: value}
                    fields = {key: each for key, each in fields.items() if each is not ABSENT}
                    if "stream_options" in fields and not fields.get("stream"):
                        del fields["stream_options"]
                    prefill.requests.clear()
                    decode.requests.clear()
                    await send(scene.network, address, path, fields)
                    [first], [second] = prefill.requests, decode.requests
                    params = first.sampling_params
                    assert (params.max_tokens, params.min_tokens, params.n, params.ignore_eos) == (1, 0, 1, True)
                    assert (params.stop, params.stop_token_ids, first.stream) == ([], [], False)
                    kept = second.sampling_params
                    assert kept.max_tokens == fields.get("max_tokens"), fields
                    assert kept.min_tokens == fields.get("min_tokens", 0)
                    assert kept.stop == (fields.get("stop") or [])
                    assert kept.stop_token_ids == fields.get("stop_token_ids", [])
                    assert kept.ignore_eos == fields.get("ignore_eos", False)
                    assert second.stream
                    assert first.tokenized == second.tokenized


class TestSeveralSamples:
    """A9: a handoff has one consumer."""

    @both_connectors
    async def test_case_a9_three_samples_share_nothing(self, autojump_clock, connector):
        async with open_cluster(connector=connector) as cluster:
            request = cluster.request(max_tokens=5, n=3)
            request.sampling_params.temperature = 0.8
            async with cluster.router.generate(request) as stream:
                ended = [frame.message().complete.index async for frame in stream if frame.is_complete]
            assert sorted(ended) == [0, 1, 2]
            assert cluster.prefill[0].counters.generates == 0
            assert cluster.decode[0].counters.pulls == 0
            assert cluster.recorder.skipped == ["several_samples"]
            assert cluster.leaks() == []

    async def test_case_a9_only_where_all_that_are_ready_write_to_a_store_is_there_a_prefill_leg(self, autojump_clock):
        async def three(call, request):
            for index in range(request.sampling_params.n):
                await call.send(complete(index=index))

        store = prefill_worker(hand_nothing_over, name="store", connector="SharedStorageConnector")
        pull = prefill_worker(name="pull")
        async with open_scene(store, pull, decode_worker(three)) as scene:
            request = a_request(n=3)
            for _ in range(2):
                await collect(scene.router, request)
            assert store.requests == pull.requests == []
            pull.healthy = False
            await trio.sleep(60)
            await collect(scene.router, request)
            assert [each.sampling_params.n for each in store.requests] == [1]
            assert scene.recorder.skipped == ["several_samples"] * 2
            store.healthy, pull.healthy = False, True
            await trio.sleep(60)
            await collect(scene.router, request)
            assert len(store.requests) == 1
            assert pull.requests == []

    @both_connectors
    async def test_case_a9_each_prompt_of_a_batch_has_a_handoff_of_its_own(self, autojump_clock, connector):
        prompts = ["the harbour at night", "a garden in spring", "the road over the mountains"]
        async with open_cluster(connector=connector) as cluster, front_of(cluster) as address:
            fields = {"prompt": prompts, "max_tokens": 6, "temperature": 0}
            status, together = await post(cluster, address, "/v1/completions", fields)
            assert status == 200
            assert cluster.prefill[0].counters.pinned == 3
            assert cluster.decode[0].counters.pulls == 3
            assert cluster.recorder.handoffs == ["consumed"] * 3
            for index, prompt in enumerate(prompts):
                _, alone = await post(cluster, address, "/v1/completions", {**fields, "prompt": prompt})
                [text] = [each["text"] for each in together["choices"] if each["index"] == index]
                assert text == alone["choices"][0]["text"]
            assert cluster.leaks() == []


def fails_first(times: int, failure, then):
    left = [times]

    async def script(call, request):
        if request.sampling_params.max_tokens == 0:
            await answer(call, request)
        if left[0]:
            left[0] -= 1
            await failure(call, request)
        else:
            await then(call, request)

    return script


async def internal(call, request) -> None:
    raise GRPCError(Status.INTERNAL, "")


async def reset(call, request) -> None:
    call._link.connection.reset(call._stream, ErrorCode.INTERNAL_ERROR)
    call._link.flush()
    await trio.sleep_forever()


async def end_silently(call, request) -> None:
    pass


LOCAL = RouterSettings(handoff=HandoffSettings(on_empty_prefill=OnEmptyPrefill.DECODE_LOCAL))


class TestPrefillNotToBeHad:
    """A10: an explicit policy, and never a whole prompt dumped on a decode worker because a prefill worker failed."""

    @pytest.mark.parametrize("settings", [RouterSettings(), LOCAL], ids=["fail", "decode-local"])
    @pytest.mark.parametrize("failure", [internal, reset, end_silently])
    async def test_case_a10_one_that_fails_twice_is_tried_again(self, autojump_clock, failure, settings):
        prefill, decode = prefill_worker(fails_first(2, failure, hand_over)), decode_worker()
        async with open_scene(prefill, decode, router=settings) as scene:
            assert await collect(scene.router, a_request()) == [7, 8]
            assert scene.recorder.records[0].attempts == 3
            assert [bool(each.kv_transfer_params_json) for each in decode.requests] == [True]
            assert scene.recorder.skipped == []

    @pytest.mark.parametrize(("failure", "error"), [(internal, WorkerRejected), (end_silently, PrefillFailed)])
    async def test_case_a10_one_that_always_fails_is_the_clients_error(self, autojump_clock, failure, error):
        decode = decode_worker()
        async with open_scene(prefill_worker(failure), decode) as scene:
            with pytest.raises(error):
                await collect(scene.router, a_request())
            assert decode.requests == []

    async def test_case_a10_an_empty_pool_fails_at_once_by_default(self, autojump_clock):
        prefill, decode = prefill_worker(), decode_worker()
        async with open_scene(prefill, decode) as scene:
            prefill.healthy = False
            await trio.sleep(60)
            begin = trio.current_time()
            with pytest.raises(WorkerUnavailable, match="no prefill worker is ready"):
                await collect(scene.router, a_request())
            assert trio.current_time() == begin
            assert not scene.router.ready
            assert decode.requests == []
            assert scene.leaks() == []

    async def test_case_a10_an_empty_pool_is_served_by_decode_where_that_is_wanted_and_it_is_counted(
        self, autojump_clock
    ):
        prefill, decode = prefill_worker(), decode_worker()
        async with open_scene(prefill, decode, router=LOCAL) as scene:
            prefill.healthy = False
            await trio.sleep(60)
            assert scene.router.ready
            assert await collect(scene.router, a_request()) == [7, 8]
            assert scene.recorder.skipped == ["empty_prefill_pool"]
            assert decode.requests[0].kv_transfer_params_json is None
            prefill.healthy = True
            await trio.sleep(10)
            assert await collect(scene.router, a_request()) == [7, 8]
            assert scene.recorder.skipped == ["empty_prefill_pool"]
            assert scene.leaks() == []

    async def test_case_a10_the_pool_is_that_of_the_requests_model(self, autojump_clock):
        workers = [prefill_worker(model="a"), decode_worker(model="a", name="da"), decode_worker(model="b", name="db")]
        async with open_scene(*workers, router=LOCAL) as scene:
            assert sorted(scene.router.models()) == ["a", "b"]
            for model in ("b", "a"):
                async with scene.router.generate(a_request(), model=model) as stream:
                    async for _ in stream:
                        pass
            assert scene.recorder.skipped == ["empty_prefill_pool"]


def own_handoff(ids: list[str]):
    """A prefill leg whose handoff is known by its request."""

    async def script(call, request):
        ids.append(request.request_id)
        await call.send(complete(kv_transfer_params_json=handoff_params(remote_request_id=request.request_id)))

    return script


def reference_of(request: GenerateRequest) -> str:
    params = json.loads(request.kv_transfer_params_json or "{}")
    return params.get("transfer_id") or params["remote_request_id"]


class TestOneUse:
    """A15: after any decode attempt that may have consumed it, a retry starts again at prefill."""

    @pytest.mark.parametrize("connector", ["NixlConnector", "MooncakeConnector"])
    @pytest.mark.parametrize("failure", [reset, end_silently, internal, "error", "abort"], ids=str)
    async def test_case_a15_no_reference_is_ever_offered_twice(self, autojump_clock, connector, failure):
        async def consume_and_fail(call, request):
            if isinstance(failure, str):
                await call.send(chunk())
                await call.send(complete(failure))
            else:
                await failure(call, request)

        prefills: list[str] = []
        prefill = prefill_worker(own_handoff(prefills), connector=connector)
        workers = [decode_worker(fails_first(20, consume_and_fail, answer), name=f"d{number}") for number in (1, 2)]
        async with open_scene(prefill, *workers) as scene:
            for _ in range(20):
                with trio.fail_after(60):
                    try:
                        await collect(scene.router, a_request())
                    except Exception:  # noqa: BLE001  # five tries may all have failed; references are what counts
                        await trio.sleep(1)
            await trio.sleep(5)
            offers = [each for worker in workers for each in worker.requests if each not in worker.releases]
            references = [reference_of(each) for each in offers]
            assert len(references) == len(set(references)) == len(prefill.requests) >= 20
            assert len(set(prefills)) == len(prefills)
            # Nor is one that was offered released as if it had not been, unless its worker refused it.
            if failure is not internal:
                assert scene.recorder.handoffs.count("released") == 0
            assert scene.leaks() == []
            assert len(scene.router.handoffs) == 0

    @both_connectors
    async def test_case_a15_decode_workers_that_die_after_the_pull(self, autojump_clock, connector):
        """The reference workers reject what they have seen before."""
        async with open_cluster(decode=2, connector=connector) as cluster:
            cluster.decode[0].faults = Faults(error_rate=1.0)
            for number in range(6):
                assert await collect(cluster.router, cluster.request(f"prompt {number}"))
            assert cluster.prefill[0].counters.pinned == len(cluster.recorder.handoffs)
            assert cluster.recorder.handoffs.count("consumed") == 6
            await trio.sleep(500)
            assert len(cluster.prefill[0].ledger) == 0
