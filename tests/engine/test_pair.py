"""Prefill and decode together: what is handed over, what it costs, and what becomes of it when something goes wrong.

Times and outcomes are those measured on vLLM 0.32 workers over NIXL, in virtual seconds.
"""

from __future__ import annotations

import json

import pytest
import trio
from grpclib.const import Status

from trio_router.engine.blocks import chain_hashes
from trio_router.engine.settings import Faults
from trio_router.http2.frames import ErrorCode
from trio_router.protocol.codec import encode
from trio_router.protocol.messages import AbortRequest, HealthCheckRequest, VllmEngineStub
from trio_router.rpc.metadata import RpcError

PROMPT = list(range(300, 345))
GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture
async def pair(open_fleet):
    async with open_fleet(p={}, d={}, w={}) as fleet:
        yield fleet


async def make_acquaintance(fleet, *, prompt=(7, 8, 9)):
    """After this the decode worker has pulled from the prefill worker: it is warm."""
    await fleet.generate("d", list(prompt), kv=await fleet.prefill("p", list(prompt)))


async def keep_busy(fleet, name, *, tokens=4000):
    """Fill the window of a worker that has one place."""
    call = await fleet.call(name, fleet.request([1, 2], max_tokens=tokens, ignore_eos=True))
    await trio.sleep(0.01)
    return call


class TestHandingOver:
    async def test_a_pair_says_what_a_plain_worker_says_without_computing_the_prompt_twice(self, pair):
        prompts = [list(range(300 + i, 320 + 2 * i)) for i in range(60)]
        texts: dict[int, list[int]] = {}

        async def one(number):
            handoff = await pair.prefill("p", prompts[number])
            texts[number] = (await pair.generate("d", prompts[number], kv=handoff)).token_ids

        async with trio.open_nursery() as nursery:
            for number in range(60):
                nursery.start_soon(one, number)
        for number, prompt in enumerate(prompts):
            assert texts[number] == (await pair.generate("w", prompt)).token_ids
        decode, prefill = pair.workers["d"].counters, pair.workers["p"].counters
        assert (decode.pulls, decode.recomputed_prompt_tokens, decode.computed_prompt_tokens) == (60, 0, 0)
        assert decode.pulled_tokens + decode.prefix_hit_tokens == sum(len(prompt) for prompt in prompts)
        assert (prefill.pinned, prefill.pulled, prefill.lease_expired) == (60, 60, 0)
        assert len(pair.workers["p"].ledger) == 0
        assert pair.workers["p"].engine.core.cache.held_blocks == 0

    async def test_the_handoff_comes_as_json_with_the_legacy_pair_beside_it(self, pair):
        answer = await pair.generate("p", PROMPT, kv=PREFILL, stream=False, max_tokens=1)
        (pin,) = pair.workers["p"].ledger.values()
        handoff = json.loads(answer.complete.kv_transfer_params_json)
        assert handoff["remote_block_ids"] == [list(pin.blocks)]
        assert handoff["remote_engine_id"] == pair.workers["p"].engine_id
        mirror = answer.complete.kv_transfer_params
        assert (mirror.remote_host, mirror.remote_port) == ("p", 2)

    async def test_the_prefill_workers_cache_hits_are_what_a_decode_leg_reports(self, pair):
        await pair.generate("p", PROMPT[:40])
        handoff = await pair.prefill("p", PROMPT)
        assert handoff["remote_prefill_cached_tokens"] == 32
        assert (await pair.generate("d", PROMPT, kv=handoff)).complete.cached_tokens == 32

    async def test_blocks_are_freed_as_soon_as_they_are_pulled_and_not_when_the_answer_ends(self, pair):
        handoff = await pair.prefill("p", PROMPT)
        call = await pair.call("d", pair.request(PROMPT, kv=handoff, max_tokens=1000, ignore_eos=True))
        await call.receive()
        await trio.sleep(0.001)
        assert len(pair.workers["p"].ledger) == 0
        call.cancel()

    async def test_a_plain_worker_ignores_what_is_meant_for_a_connector(self, pair):
        answer = await pair.generate("w", PROMPT, kv=PREFILL, max_tokens=1)
        assert answer.kv is None
        handoff = await pair.prefill("p", PROMPT)
        await pair.generate("w", PROMPT, kv=handoff)
        assert len(pair.workers["p"].ledger) == 1

    @pytest.mark.parametrize("kv", [{}, {"do_remote_prefill": False}, {"do_remote_prefill": False, "remote_host": "p"}])
    async def test_what_is_no_handoff_is_computed_and_counted(self, pair, kv):
        answer = await pair.generate("d", PROMPT, kv=kv)
        assert answer.token_ids == (await pair.generate("w", PROMPT)).token_ids
        assert pair.workers["d"].counters.recomputed_prompt_tokens == len(PROMPT)

    async def test_an_aborted_prefill_leg_hands_nothing_over(self, pair):
        pair.workers["p"].faults = Faults(hold_prefill=True)
        call = await pair.call("p", pair.request(PROMPT, kv=PREFILL, request_id="x", stream=False, max_tokens=1))
        await trio.sleep(1)
        await VllmEngineStub(pair.channels["p"]).abort(AbortRequest(request_ids=["x"]))
        answer = await pair.read(call)
        assert (answer.complete.finish_reason, answer.kv) == ("abort", None)
        assert pair.workers["p"].engine.core.cache.held_blocks == 0

    async def test_several_choices_of_one_handoff_all_pull_but_only_the_first_in_time(self, pair):
        handoff = await pair.prefill("p", PROMPT)
        answer = await pair.generate("d", PROMPT, kv=handoff, n=3, temperature=1.0, seed=1, ignore_eos=True)
        assert [c.finish_reason for c in answer.completes] == ["length"] * 3
        assert pair.workers["p"].counters.pulled == 1
        assert pair.workers["p"].counters.stray_notices == 2


class TestWrongState:
    """A wrong handoff is not refused. It reads as wrong text."""

    async def reuse_blocks(self, pair, handoff):
        """Make the prefill worker overwrite the blocks of a handoff that it does not hold any more."""
        promised = set(handoff["remote_block_ids"][0])
        for start in range(400, 1000, 40):
            core = pair.workers["p"].engine.core
            await pair.generate("p", list(range(start, start + 60)), max_tokens=1)
            if not promised & set(core.cache.match(chain_hashes(PROMPT, block_size=16))) and start > 440:
                return
        raise AssertionError("the blocks were never reused")

    async def test_a_handoff_past_its_lease_is_not_refused_and_poisons_the_decode_cache(self, open_fleet):
        async with open_fleet(p={"num_blocks": 8, "max_context_length": 128}, d={}, w={}) as pair:
            right = (await pair.generate("w", PROMPT, ignore_eos=True)).token_ids
            handoff = await pair.prefill("p", PROMPT)
            await trio.sleep(31)
            assert pair.workers["p"].counters.lease_expired == 1
            await self.reuse_blocks(pair, handoff)
            answer = await pair.generate("d", PROMPT, kv=handoff, ignore_eos=True)
            assert answer.complete.finish_reason == "length"
            assert answer.token_ids != right
            assert (await pair.generate("d", PROMPT, ignore_eos=True)).token_ids != right

    async def test_a_handoff_used_twice_is_not_refused(self, open_fleet):
        async with open_fleet(p={"num_blocks": 8, "max_context_length": 128}, d={}, d2={}, w={}) as pair:
            right = (await pair.generate("w", PROMPT, ignore_eos=True)).token_ids
            handoff = await pair.prefill("p", PROMPT)
            assert (await pair.generate("d", PROMPT, kv=handoff, ignore_eos=True)).token_ids == right
            await self.reuse_blocks(pair, handoff)
            second = await pair.generate("d2", PROMPT, kv=handoff, ignore_eos=True)
            assert second.complete.finish_reason == "length"
            assert second.token_ids != right

    async def test_blocks_in_the_wrong_order_or_too_many_of_them_read_wrong(self, pair):
        right = (await pair.generate("w", PROMPT, ignore_eos=True)).token_ids
        for change in (lambda b: b[::-1], lambda b: [*b, 0], lambda b: [*b, 1000]):
            handoff = await pair.prefill("p", PROMPT)
            handoff["remote_block_ids"] = [change(handoff["remote_block_ids"][0])]
            answer = await pair.generate("d", PROMPT, kv=handoff, ignore_eos=True)
            assert answer.token_ids != right
            assert pair.workers["d"].engine.core.cache.forget()


class TestFailedLoads:
    """They end an OK stream with the reason "error", without a token, and the decode engine goes on."""

    async def expect_error(self, pair, handoff, *, seconds):
        start = trio.current_time()
        answer = await pair.generate("d", PROMPT, kv=handoff)
        assert answer.complete.finish_reason == "error"
        assert answer.token_ids == []
        # As the servicer does it: the delta of the last output comes first, empty as it is.
        assert [chunk.completion_tokens for chunk in answer.chunks] == [0]
        assert abs(trio.current_time() - start - seconds) < 0.01
        assert pair.workers["d"].counters.failed_pulls == 1
        assert (await pair.generate("d", PROMPT)).complete.finish_reason == "length"

    async def test_another_engine_answers(self, pair):
        handoff = await pair.prefill("p", PROMPT)
        await self.expect_error(pair, {**handoff, "remote_engine_id": "somebody"}, seconds=0.0)

    async def test_nobody_answers(self, pair):
        handoff = await pair.prefill("p", PROMPT)
        await self.expect_error(pair, {**handoff, "remote_port": 99}, seconds=5.0)

    async def test_a_black_hole_answers(self, pair):
        handoff = await pair.prefill("p", PROMPT)
        pair.network.black_hole("p:2")
        await self.expect_error(pair, handoff, seconds=5.0)

    async def test_the_parallelism_differs(self, pair):
        handoff = await pair.prefill("p", PROMPT)
        await self.expect_error(pair, {**handoff, "tp_size": 2}, seconds=0.0)

    async def test_there_are_no_such_blocks(self, pair):
        handoff = await pair.prefill("p", PROMPT)
        await self.expect_error(pair, {**handoff, "remote_block_ids": [[1, 2, 999_999]]}, seconds=0.0)

    async def test_the_prefill_engine_has_died(self, pair):
        await make_acquaintance(pair)
        handoff = await pair.prefill("p", PROMPT)
        pair.workers["p"].kill_engine()
        await trio.sleep(0.1)
        await self.expect_error(pair, handoff, seconds=5.0)

    async def test_it_was_injected(self, pair):
        handoff = await pair.prefill("p", PROMPT)
        pair.workers["d"].faults = Faults(load_error_rate=1.0)
        await self.expect_error(pair, handoff, seconds=0.0)


class TestDeadlyHandoffs:
    """Some requests kill the engine: the process answers, but never generates again."""

    @pytest.mark.parametrize(
        "change",
        [
            {"remote_block_ids": None},
            {"remote_block_ids": [1, 2, 3]},
            {"remote_block_ids": [[1, 2]]},
            {"remote_engine_id": None},
        ],
    )
    async def test_malformed_params(self, pair, change):
        handoff = await pair.prefill("p", PROMPT)
        bystander = await pair.call("d", pair.request([1, 2, 3], max_tokens=1000, ignore_eos=True))
        await trio.sleep(0.1)
        for attempt in (pair.request(PROMPT, kv={**handoff, **change}), pair.request([1])):
            with pytest.raises(RpcError, match="EngineCore encountered an issue") as caught:
                await pair.send("d", attempt)
            assert caught.value.status is Status.INTERNAL
        with pytest.raises(RpcError, match="EngineCore"):
            await pair.read(bystander)
        health = await VllmEngineStub(pair.channels["d"]).health_check(HealthCheckRequest())
        assert (health.healthy, health.message) == (False, "Engine is not alive")

    async def test_a_missing_request_id_hangs_and_kills_when_the_client_gives_up(self, pair):
        handoff = await pair.prefill("p", PROMPT)
        del handoff["remote_request_id"]
        call = await pair.call("d", pair.request(PROMPT, kv=handoff))
        await trio.sleep(100)
        assert not call.ended
        assert not pair.workers["d"].engine.core.dead
        call.cancel()
        await trio.sleep(0.1)
        assert pair.workers["d"].engine.core.dead


class TestReleases:
    """When a prefill worker hears that nobody will come (one test for each row that was measured)."""

    async def released_after(self, fleet, *, patience=40.0):
        """Seconds until the prefill worker holds nothing any more, and what it counted."""
        start = trio.current_time()
        counters = fleet.workers["p"].counters
        while fleet.workers["p"].ledger:
            assert trio.current_time() - start < patience
            await trio.sleep(0.005)
        return trio.current_time() - start, counters

    async def refuse(self, fleet, handoff):
        with pytest.raises(RpcError, match="max_tokens") as caught:
            await fleet.generate("d", PROMPT, kv=handoff, max_tokens=0)
        assert caught.value.status is Status.INVALID_ARGUMENT

    @pytest.mark.parametrize("lease", [30.0, 6.0])
    async def test_nothing_happens_so_the_lease_runs_out(self, open_fleet, lease):
        async with open_fleet(p={"lease_seconds": lease}) as fleet:
            await fleet.prefill("p", PROMPT)
            seconds, counters = await self.released_after(fleet)
            assert lease <= seconds < lease + 0.01
            assert (counters.lease_expired, counters.released) == (1, 0)

    async def test_a_leg_of_one_token_pulls(self, pair):
        await pair.generate("d", PROMPT, kv=await pair.prefill("p", PROMPT), max_tokens=1)
        seconds, counters = await self.released_after(pair)
        assert seconds < 0.01
        assert counters.pulled == 1

    @pytest.mark.parametrize("busy", [False, True])
    async def test_a_refusal_by_a_warm_worker_releases_without_moving_anything(self, open_fleet, busy):
        async with open_fleet(p={}, d={"max_num_seqs": 1}) as fleet:
            await make_acquaintance(fleet)
            call = await keep_busy(fleet, "d") if busy else None
            await self.refuse(fleet, await fleet.prefill("p", PROMPT))
            seconds, counters = await self.released_after(fleet)
            assert seconds < 0.01
            assert counters.released == 1
            assert fleet.workers["d"].counters.pulls == 1, "only the acquaintance"
            if call is not None:
                call.cancel()

    async def test_a_refusal_by_a_cold_and_idle_worker_does_not_release_but_the_second_does(self, pair):
        handoff = await pair.prefill("p", PROMPT)
        await self.refuse(pair, handoff)
        await trio.sleep(5)
        assert len(pair.workers["p"].ledger) == 1
        await self.refuse(pair, handoff)
        seconds, counters = await self.released_after(pair)
        assert seconds < 0.01
        assert (counters.released, counters.stray_notices) == (1, 1), "the first notice goes out with the second"

    async def test_a_cold_workers_next_step_sends_the_notice_as_well(self, pair):
        await self.refuse(pair, await pair.prefill("p", PROMPT))
        await trio.sleep(1)
        await pair.generate("d", [1, 2, 3], max_tokens=1)
        seconds, counters = await self.released_after(pair)
        assert seconds < 0.01
        assert counters.released == 1

    @pytest.mark.parametrize("how", ["cancel", "abort"])
    async def test_a_queued_leg_that_is_left_releases(self, open_fleet, how):
        async with open_fleet(p={}, d={"max_num_seqs": 1}) as fleet:
            await make_acquaintance(fleet)
            busy = await keep_busy(fleet, "d")
            handoff = await fleet.prefill("p", PROMPT)
            queued = await fleet.call("d", fleet.request(PROMPT, kv=handoff, request_id="q"))
            await trio.sleep(1)
            assert len(fleet.workers["p"].ledger) == 1
            if how == "cancel":
                queued.cancel()
            else:
                await VllmEngineStub(fleet.channels["d"]).abort(AbortRequest(request_ids=["q"]))
            seconds, counters = await self.released_after(fleet)
            assert seconds < 0.01
            assert (counters.released, fleet.workers["d"].counters.pulls) == (1, 1)
            busy.cancel()

    async def test_a_saturated_worker_pulls_when_a_place_is_free_and_renews_until_then(self, open_fleet):
        async with open_fleet(p={}, d={"max_num_seqs": 1}) as fleet:
            busy = await keep_busy(fleet, "d", tokens=8000)
            handoff = await fleet.prefill("p", PROMPT)
            queued = await fleet.call("d", fleet.request(PROMPT, kv=handoff, max_tokens=2))
            await trio.sleep(39)
            assert len(fleet.workers["p"].ledger) == 1, "past its lease, but renewed"
            assert (await fleet.read(queued)).complete.finish_reason == "length"
            assert fleet.workers["p"].counters.pulled == 1
            assert fleet.workers["p"].counters.lease_expired == 0
            busy.cancel()

    async def test_a_leg_cancelled_while_it_pulls_pulls_to_the_end_and_frees(self, pair):
        await make_acquaintance(pair)
        handoff = await pair.prefill("p", PROMPT)
        pair.workers["d"].faults = Faults(hold_pull=True)
        call = await pair.call("d", pair.request(PROMPT, kv=handoff))
        await trio.sleep(0.1)
        pair.workers["d"].faults = Faults()
        await trio.lowlevel.checkpoint()
        call.cancel()
        _seconds, counters = await self.released_after(pair)
        assert counters.pulled + counters.released == 2, "the acquaintance and this one"
        await trio.sleep(1)
        assert pair.workers["d"].engine.core.cache.held_blocks == 0
        assert pair.workers["d"].engine.core.active == 0

    async def test_a_leg_cancelled_before_its_pull_begins_releases(self, pair):
        await make_acquaintance(pair)
        pair.workers["d"].faults = Faults(hold_pull=True)
        call = await pair.call("d", pair.request(PROMPT, kv=await pair.prefill("p", PROMPT)))
        await trio.sleep(1)
        call.cancel()
        seconds, counters = await self.released_after(pair)
        assert seconds < 0.01
        assert counters.released == 1
        assert pair.workers["d"].engine.core.cache.held_blocks == 0

    async def test_a_reset_in_the_same_write_as_the_request_is_never_noticed(self, pair, caplog):
        await make_acquaintance(pair)
        handoff = await pair.prefill("p", PROMPT)
        generates = pair.workers["d"].counters.generates
        link = pair.channels["d"].links[0]
        call = await pair.channels["d"].start(GENERATE)
        call.send_nowait([encode(pair.request(PROMPT, kv=handoff))], end=True)
        link.connection.reset(call._stream, ErrorCode.CANCEL)
        link.flush()
        await trio.sleep(29)
        assert len(pair.workers["p"].ledger) == 1
        assert pair.workers["d"].counters.generates == generates
        await trio.sleep(2)
        assert pair.workers["p"].counters.lease_expired == 1

    @pytest.mark.parametrize("how", ["abort", "refuse"])
    async def test_the_prefill_worker_itself_cannot_be_talked_into_it(self, pair, how):
        handoff = await pair.prefill("p", PROMPT, request_id="x")
        if how == "abort":
            await VllmEngineStub(pair.channels["p"]).abort(AbortRequest(request_ids=["x"]))
        else:
            with pytest.raises(RpcError, match="max_tokens"):
                await pair.generate("p", PROMPT, kv={**handoff, "remote_port": 2}, max_tokens=0)
        await trio.sleep(1)
        assert len(pair.workers["p"].ledger) == 1

    async def test_a_prefill_leg_that_still_runs_ends_at_once(self, pair):
        pair.workers["p"].faults = Faults(hold_prefill=True)
        call = await pair.call("p", pair.request(PROMPT, kv=PREFILL, stream=False, max_tokens=1))
        await trio.sleep(1)
        call.cancel()
        await trio.sleep(0.01)
        core = pair.workers["p"].engine.core
        assert (core.cache.held_blocks, len(core.ledger), core.counters.aborts) == (0, 0, 1)

    async def test_a_decode_worker_that_dies_in_the_queue_lets_the_lease_run_from_its_last_heartbeat(self, open_fleet):
        async with open_fleet(p={}, d={"max_num_seqs": 1}) as fleet:
            await keep_busy(fleet, "d", tokens=8000)
            handoff = await fleet.prefill("p", PROMPT)
            await fleet.call("d", fleet.request(PROMPT, kv=handoff))
            await trio.sleep(22)
            fleet.workers["d"].kill_engine()
            seconds, counters = await self.released_after(fleet)
            assert 27 < seconds < 29, "the last renewal was at 20 s"
            assert counters.lease_expired == 1
