"""One try of one request before workers that do what real ones do at their worst: what is retried, who is charged,
and what becomes of every handoff.
"""

from __future__ import annotations

import pytest
import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from trio_router.dispatch.handoff import HandoffSettings, OnEmptyPrefill
from trio_router.dispatch.retry import RetrySettings
from trio_router.dispatch.router import RouterSettings
from trio_router.errors import (
    DecodeFailed,
    HandoffInvalid,
    PrefillFailed,
    Unsupported,
    WorkerRejected,
    WorkerUnavailable,
)
from trio_router.fleet.worker import WorkerRole
from trio_router.http2.frames import ErrorCode
from trio_router.rpc.channel import ChannelSettings
from trio_router.rpc.memory import MemoryNetwork
from trio_router.testing import collect
from trio_router.testing.scripted import (
    a_request,
    answer,
    chunk,
    complete,
    decode_worker,
    hand_over,
    handoff_params,
    open_scene,
    plain_worker,
    prefill_worker,
)

ONCE = RouterSettings(retry=RetrySettings(attempts=1))
TWICE = RouterSettings(retry=RetrySettings(attempts=2))
HANDOFF = complete(kv_transfer_params_json=handoff_params())
GARBAGE = b"\x0a\xff\xff\xff\xff\x0f"


def send(*frames: bytes):
    """A script that sends frames and ends well; releases are refused as everywhere."""

    async def script(call, request):
        if request.sampling_params.max_tokens == 0:
            await answer(call, request)
        for frame in frames:
            await call.send(frame)

    return script


def refuse(status: Status, *, after: tuple[bytes, ...] = ()):
    async def script(call, request):
        if request.sampling_params.max_tokens == 0:
            await answer(call, request)
        for frame in after:
            await call.send(frame)
        raise GRPCError(status, "refused")

    return script


def break_off(*frames: bytes):
    """A script whose stream is reset after some frames, with no status."""

    async def script(call, request):
        if request.sampling_params.max_tokens == 0:
            await answer(call, request)
        for frame in frames:
            await call.send(frame)
        call._link.connection.reset(call._stream, ErrorCode.INTERNAL_ERROR)
        call._link.flush()
        await trio.sleep_forever()

    return script


def in_turn(*scripts):
    """One script after the other; the last one stays. Releases do not count."""
    left = list(scripts)

    async def script(call, request):
        if request.sampling_params.max_tokens == 0:
            await answer(call, request)
        await (left.pop(0) if len(left) > 1 else left[0])(call, request)

    return script


async def fail(scene, error, **changes):
    with pytest.raises(error) as caught:
        await collect(scene.router, a_request(**changes))
    await trio.sleep(5)
    assert scene.leaks() == []
    return caught.value


class TestWorkersFault:
    """What a worker does wrong is never called the client's doing."""

    @pytest.mark.parametrize("frames", [[GARBAGE], [b"\x12\x02\x0a\xff"], [HANDOFF, b"\x12\x02\x0a\xff"]])
    async def test_i12_a_prefill_answer_that_is_no_message_is_tried_again(self, autojump_clock, frames):
        async with open_scene(prefill_worker(in_turn(send(*frames), hand_over)), decode_worker()) as scene:
            assert await collect(scene.router, a_request()) == [7, 8]
            assert scene.recorder.failures == ["prefill_stream_error"]
            assert scene.recorder.blamed == ["prefill:1"]

    async def test_i12_a_prefill_that_keeps_sending_garbage_is_a_failed_prefill(self, autojump_clock):
        async with open_scene(prefill_worker(send(GARBAGE)), decode_worker(), router=TWICE) as scene:
            await fail(scene, PrefillFailed)

    @pytest.mark.parametrize("frame", [GARBAGE, b"\x12\x02\x0a\xff"])
    async def test_i12_a_first_decode_frame_that_is_no_message_is_tried_again(self, autojump_clock, frame):
        async with open_scene(prefill_worker(), decode_worker(in_turn(send(frame), answer))) as scene:
            assert await collect(scene.router, a_request()) == [7, 8]
            assert scene.recorder.failures == ["worker_stream_failed"]

    async def test_i12_garbage_in_mid_stream_is_the_streams_failure(self, autojump_clock):
        async with open_scene(plain_worker(send(chunk(1), GARBAGE, complete()))) as scene:
            error = await fail(scene, DecodeFailed)
            assert error.grpc_status is Status.INTERNAL
            assert [record.outcome.value for record in scene.recorder.records] == ["failed"]


class TestCodes:
    """The machine codes of the field's gateways."""

    @pytest.mark.parametrize(
        ("script", "code"),
        [
            (refuse(Status.INTERNAL), "prefill_worker_failed_to_start"),
            (refuse(Status.UNAVAILABLE), "worker_overload_protection_shed"),
            (refuse(Status.UNAVAILABLE, after=(chunk(),)), "prefill_stream_error"),
            (refuse(Status.UNAVAILABLE, after=(HANDOFF,)), "prefill_stream_error"),
            (send(), "prefill_stream_error"),
            (send(complete("error")), "prefill_stream_error"),
        ],
    )
    async def test_of_a_failed_prefill(self, autojump_clock, script, code):
        async with open_scene(prefill_worker(script), decode_worker(), router=ONCE) as scene:
            assert (await fail(scene, Exception)).error_code == code

    @pytest.mark.parametrize(
        ("script", "code"),
        [
            (refuse(Status.INTERNAL), "decode_worker_failed_to_start"),
            (refuse(Status.RESOURCE_EXHAUSTED), "worker_overload_protection_shed"),
            (refuse(Status.UNAVAILABLE, after=(chunk(),)), "worker_stream_failed"),
            (send(), "no_responses_from_server"),
            (send(chunk(), complete("error")), "worker_stream_failed"),
        ],
    )
    async def test_of_a_failed_decode(self, autojump_clock, script, code):
        async with open_scene(prefill_worker(), decode_worker(script), router=ONCE) as scene:
            assert (await fail(scene, Exception)).error_code == code

    async def test_of_a_worker_that_cannot_be_reached(self, autojump_clock):
        worker = plain_worker()
        async with open_scene(worker, router=ONCE) as scene:
            worker.stop()
            await trio.testing.wait_all_tasks_blocked()
            error = await fail(scene, WorkerUnavailable)
            assert error.error_code == "start_generation_failed"
            assert error.http_status == 503

    async def test_a_stream_that_breaks_after_its_first_frame_is_not_tried_again(self, autojump_clock):
        worker = plain_worker(break_off(chunk(1)))
        async with open_scene(worker) as scene:
            error = await fail(scene, WorkerRejected)
            assert error.error_code == "worker_stream_failed"
            assert error.leg == "worker"
            assert len(worker.requests) == 1
            assert scene.recorder.failures == []


class TestHandoffs:
    """I3: every handoff that came ends in exactly one way, and is told so once."""

    @pytest.mark.parametrize(
        ("script", "end"),
        [
            (answer, "consumed"),
            (send(), "lapsed"),
            (send(complete("error")), "lapsed"),
            (send(chunk(), complete("abort")), "lapsed"),
            (break_off(), "lapsed"),
            (break_off(chunk()), "lapsed"),
            (refuse(Status.UNAVAILABLE), "released"),
            (refuse(Status.INVALID_ARGUMENT), "released"),
            (refuse(Status.INTERNAL), "released"),
            (send(GARBAGE), "lapsed"),
        ],
    )
    async def test_i3_by_how_its_decode_leg_ended(self, autojump_clock, script, end):
        async with open_scene(prefill_worker(), decode_worker(script), router=ONCE) as scene:
            try:
                await collect(scene.router, a_request())
            except Exception:  # noqa: BLE001  # how the request ends is not what is looked at
                await trio.sleep(5)
            assert scene.recorder.handoffs == [end]
            assert scene.leaks() == []

    async def test_i3_a_warm_worker_that_refused_has_released_it_already(self, autojump_clock):
        decode = decode_worker(in_turn(answer, refuse(Status.UNAVAILABLE)))
        async with open_scene(prefill_worker(), decode, router=ONCE) as scene:
            await collect(scene.router, a_request())
            await fail(scene, WorkerRejected)
            assert decode.releases == []
            assert scene.recorder.handoffs == ["consumed", "released"]

    async def test_i3_a_cold_worker_that_refused_is_told_again(self, autojump_clock):
        decode = decode_worker(refuse(Status.UNAVAILABLE))
        async with open_scene(prefill_worker(), decode, router=ONCE) as scene:
            await fail(scene, WorkerRejected)
            assert len(decode.releases) == 2
            assert scene.recorder.handoffs == ["released"]

    async def test_i3_an_engine_that_may_be_dead_has_not_released_anything_by_failing(self, autojump_clock):
        """A dead engine fails every request with INTERNAL and tells the prefill worker nothing."""
        decode = decode_worker(in_turn(answer, refuse(Status.INTERNAL)))
        async with open_scene(prefill_worker(), decode, router=ONCE) as scene:
            await collect(scene.router, a_request())
            await fail(scene, WorkerRejected)
            assert len(decode.releases) == 1

    async def test_i2_a_handoff_on_a_prefill_leg_that_then_broke_is_released(self, autojump_clock):
        decode = decode_worker()
        async with open_scene(prefill_worker(in_turn(break_off(HANDOFF), hand_over)), decode) as scene:
            assert await collect(scene.router, a_request()) == [7, 8]
            await trio.sleep(2)
            assert sorted(scene.recorder.handoffs) == ["consumed", "released"]
            assert scene.recorder.blamed == ["prefill:1"]
            assert scene.leaks() == []

    async def test_i6_a_malformed_handoff_of_a_leg_that_was_left_reaches_no_engine_either(self, autojump_clock):
        """The release carries the params, and the notice takes them to the engine."""
        bad = complete(kv_transfer_params_json=handoff_params(remote_block_ids=[1, 2]))
        decode = decode_worker()
        async with open_scene(prefill_worker(break_off(bad)), decode, router=ONCE) as scene:
            await fail(scene, WorkerRejected)
            assert decode.requests == []
            assert scene.recorder.handoffs == ["invalid"]

    @pytest.mark.parametrize("connector", ["", "LMCacheConnector"])
    async def test_i6_the_shape_decides_and_not_the_connectors_name(self, autojump_clock, connector):
        bad = send(complete(kv_transfer_params_json=handoff_params(remote_request_id=None)))
        decode = decode_worker()
        async with open_scene(prefill_worker(bad, connector=connector), decode, router=ONCE) as scene:
            await fail(scene, HandoffInvalid)
            assert decode.requests == []

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"remote_num_tokens": 41}, "41 for a prompt of 40"),
            ({"remote_block_ids": [[1, 2]]}, "cover 32 of 40 tokens"),
            ({"remote_block_ids": None}, "list of lists"),
        ],
    )
    async def test_i6_a_handoff_is_held_against_the_prompt_and_its_workers_blocks(
        self, autojump_clock, changes, reason
    ):
        bad = send(complete(kv_transfer_params_json=handoff_params(**changes)))
        decode = decode_worker()
        async with open_scene(prefill_worker(bad), decode, router=ONCE) as scene:
            assert reason in (await fail(scene, HandoffInvalid)).message
            assert scene.recorder.blamed == ["prefill:1"]
            assert decode.requests == []

    @pytest.mark.parametrize("nothing", ["{}", '{"do_remote_prefill": false}', ""])
    async def test_i6_what_hands_nothing_over_is_not_relayed(self, autojump_clock, nothing):
        """An engine dies of `{}` on a leg without pixels."""
        decode = decode_worker()
        async with open_scene(prefill_worker(send(complete(kv_transfer_params_json=nothing))), decode) as scene:
            assert await collect(scene.router, a_request()) == [7, 8]
            assert scene.recorder.missing == ["prefill:1"]
            assert scene.recorder.handoffs == []
        assert decode.requests[0].kv_transfer_params_json is None

    async def test_i6_older_shapes_are_relayed_with_one_warning(self, autojump_clock, caplog):
        old = (
            '{"do_remote_prefill": true,  "remote_block_ids": [1, 2, 3], "remote_engine_id": "e", "remote_host": "h",'
            ' "remote_port": 5}'
        )
        decode = decode_worker()
        async with open_scene(prefill_worker(send(complete(kv_transfer_params_json=old))), decode) as scene:
            for _ in range(3):
                await collect(scene.router, a_request())
        assert [each.kv_transfer_params_json for each in decode.requests] == [old] * 3
        assert [record.levelname for record in caplog.records if "older" in record.message] == ["WARNING"]

    async def test_case_a7_a_connector_nobody_knows_is_warned_of_once(self, autojump_clock, caplog):
        worker = prefill_worker(send(complete()), connector="FancyConnector")
        async with open_scene(worker, decode_worker()) as scene:
            for _ in range(3):
                await collect(scene.router, a_request())
        assert [r.levelname for r in caplog.records if "FancyConnector" in r.message] == ["WARNING"]
        assert scene.recorder.missing == [], "nothing was asked for"

    async def test_of_several_complete_frames_the_last_counts_with_a_warning(self, autojump_clock, caplog):
        first = complete(kv_transfer_params_json=handoff_params(remote_request_id="first"))
        decode = decode_worker()
        async with open_scene(prefill_worker(send(first, HANDOFF)), decode) as scene:
            await collect(scene.router, a_request())
        assert "request-1" in (decode.requests[0].kv_transfer_params_json or "")
        assert "2 complete frames" in caplog.text


class TestTelling:
    async def test_a_pair_is_told_of_when_decode_has_been_sent(self, autojump_clock):
        async def slow(call, request):
            await trio.sleep(2)
            await hand_over(call, request)

        async with open_scene(prefill_worker(in_turn(send(), slow)), decode_worker(refuse(Status.ABORTED))) as scene:
            await fail(scene, WorkerRejected)
            assert scene.recorder.pairs == [("nixl", pytest.approx(2.0))] * 4, "the first attempt sent none"

    async def test_the_prompt_is_counted_by_the_worker_that_computed_it(self, autojump_clock):
        prefill = prefill_worker(send(complete(kv_transfer_params_json=handoff_params(), cached_tokens=5)))
        decode = decode_worker(send(chunk(7, cached_tokens=40), complete(cached_tokens=40)))
        async with open_scene(prefill, decode) as scene, scene.router.generate(a_request()) as stream:
            assert stream.prompt_counts == (40, 5)
        async with open_scene(plain_worker()) as scene, scene.router.generate(a_request()) as stream:
            assert stream.prompt_counts is None

    async def test_a_request_without_a_prefill_leg_is_no_pair(self, autojump_clock):
        async with open_scene(plain_worker()) as scene:
            await collect(scene.router, a_request())
            assert scene.recorder.pairs == []

    async def test_a_record_has_the_marks_of_the_last_attempt_only(self, autojump_clock):
        prefill = prefill_worker(in_turn(hand_over, send()))
        decode = decode_worker(refuse(Status.INTERNAL))
        async with open_scene(prefill, decode, router=TWICE) as scene:
            await fail(scene, PrefillFailed)
            [record] = scene.recorder.records
            assert record.prefill_started_at is not None
            assert record.decode_started_at is None
            assert (record.prefill_worker, record.attempts) == ("prefill:1", 2)


class TestMoriio:
    """Its connector must be refused whole, whichever worker has it."""

    @pytest.mark.parametrize(("role", "n"), [("prefill", 1), ("decode", 1), ("decode", 3)])
    async def test_it_is_refused_whoever_has_it_and_however_many_samples_are_wanted(self, autojump_clock, role, n):
        names = {each: "MoRIIOConnector" if each == role else "NixlConnector" for each in ("prefill", "decode")}
        prefill, decode = prefill_worker(connector=names["prefill"]), decode_worker(connector=names["decode"])
        async with open_scene(prefill, decode) as scene:
            error = await fail(scene, Unsupported, n=n)
            assert error.error_code == "moriio_grpc_pd_unsupported"
            assert prefill.requests == decode.requests == []

    async def test_a_decode_worker_with_it_serves_no_request_whole_either(self, autojump_clock):
        settings = RouterSettings(handoff=HandoffSettings(on_empty_prefill=OnEmptyPrefill.DECODE_LOCAL))
        prefill, decode = prefill_worker(), decode_worker(connector="MoRIIOConnector")
        async with open_scene(prefill, decode, router=settings) as scene:
            for worker in scene.router.registry.workers:
                worker.ready = worker.spec.role is WorkerRole.DECODE
            await fail(scene, Unsupported)
            assert decode.requests == []


class SlowNetwork(MemoryNetwork):
    delay = 0.0

    async def dial(self, address):
        await trio.sleep(self.delay)
        return await super().dial(address)


class TestFreshness:
    """I5: age counts at the moment of the offer."""

    async def test_i5_a_handoff_that_grew_old_while_decode_was_being_dialed_is_not_offered(self, autojump_clock):
        settings = RouterSettings(
            handoff=HandoffSettings(fresh_fraction=0.2),
            retry=RetrySettings(attempts=1),
            channel=ChannelSettings(connect_timeout=30.0),
        )
        decode = decode_worker()
        network = SlowNetwork()
        async with open_scene(prefill_worker(), decode, router=settings, network=network) as scene:
            network.delay = 7.0
            decode.stop()
            await trio.testing.wait_all_tasks_blocked()
            await scene.start(decode)
            error = await fail(scene, PrefillFailed)
            assert error.error_code == "handoff_expired"
            assert [each for each in decode.requests if each not in decode.releases] == []
            assert scene.recorder.blamed == ["decode:1"], "the time went on the way to decode"
            assert scene.recorder.handoffs == ["released"]

    async def test_i5_its_age_counts_from_its_own_frame_and_not_from_the_streams_end(self, autojump_clock):
        """The worker's lease runs from then on."""

        async def dawdle(call, request):
            await call.send(HANDOFF)
            await trio.sleep(25)

        decode = decode_worker()
        async with open_scene(prefill_worker(dawdle), decode, router=ONCE) as scene:
            error = await fail(scene, PrefillFailed)
            assert error.error_code == "handoff_expired"
            assert [each for each in decode.requests if each not in decode.releases] == []
            assert scene.recorder.handoffs == ["released"]


class TestCharging:
    """D4: a retry goes elsewhere, and the worker whose leg failed is the one it avoids."""

    async def test_case_a15_each_attempt_has_its_own_id_and_its_own_handoff(self, autojump_clock):
        prefill, decode = prefill_worker(), decode_worker(in_turn(send(complete("error")), answer))
        async with open_scene(prefill, decode) as scene:
            await collect(scene.router, a_request("mine"))
        ids = [each.request_id for each in (*prefill.requests, *decode.requests)]
        assert len(prefill.requests) == len(decode.requests) == 2
        assert len(set(ids)) == 2
        assert all(name.startswith("mine-") for name in ids)

    @pytest.mark.parametrize(
        ("given", "told"), [("a\nb\x1b[31m\x85é", "a?b?[31m?é"), ("x" * 100_000, "x" * 256)], ids=["lines", "long"]
    )
    async def test_a_clients_id_cannot_write_lines_of_its_own_into_a_workers_log(self, autojump_clock, given, told):
        """Workers log the id of each request as it came (vLLM servicer 0.14.1)."""
        prefill, decode = prefill_worker(), decode_worker()
        async with open_scene(prefill, decode) as scene:
            await collect(scene.router, a_request(given))
        for leg in (*prefill.requests, *decode.requests):
            assert leg.request_id.rpartition("-")[0] == told

    async def test_d4_a_prefill_that_failed_is_avoided_and_the_decode_worker_is_not(self, autojump_clock):
        bad, good = prefill_worker(send(), name="bad"), prefill_worker(name="good")
        async with open_scene(bad, good, decode_worker()) as scene:
            await collect(scene.router, a_request())
            [record] = scene.recorder.records
            assert record.workers_tried == ("bad:1",)
            assert record.prefill_worker == "good:1"
            assert record.attempts == 2

    async def test_d2_a_refusal_that_is_the_requests_fault_is_tried_once(self, autojump_clock):
        worker = plain_worker(refuse(Status.INVALID_ARGUMENT))
        async with open_scene(worker) as scene:
            await fail(scene, WorkerRejected)
            assert len(worker.requests) == 1


async def test_i9_a_prefill_leg_that_never_stops_talking_is_not_collected(autojump_clock):
    frame = complete("length", output_ids=list(range(2000)))

    async def talk(call, request):
        for _ in range(300):
            await call.send(frame)
        await call.send(HANDOFF)

    async with open_scene(prefill_worker(talk), decode_worker()) as scene:
        assert await collect(scene.router, a_request()) == [7, 8]
