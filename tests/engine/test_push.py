"""Mooncake-like pairs: both legs know a transfer by an id, and the prefill worker pushes its state to whoever asks.

The rules are those read in vLLM 0.32's Mooncake connector; the legs are driven by hand, as a router would.
"""

from __future__ import annotations

import json

import pytest
import trio
from grpclib.const import Status

from trio_router.engine.settings import Faults
from trio_router.protocol.messages import (
    AbortRequest,
    GetServerInfoRequest,
    HealthCheckRequest,
    KvTransferParams,
    VllmEngineStub,
)
from trio_router.rpc.metadata import RpcError

PROMPT = list(range(300, 345))
MOONCAKE = {"connector": "mooncake"}


def prefill_params(transfer_id: str = "xfer-1") -> dict[str, object]:
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}


def decode_params(fleet, transfer_id: str = "xfer-1", **changes) -> dict[str, object]:
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": transfer_id,
        "remote_engine_id": fleet.workers["p"].engine_id,
        "remote_bootstrap_addr": "http://p:2",
        **changes,
    }


async def prefill(fleet, prompt=PROMPT, *, transfer_id="xfer-1", **about):
    """Run a prefill leg of one token."""
    kv = prefill_params(transfer_id)
    sampling = {"max_tokens": 1, "ignore_eos": True, **about}
    return await fleet.generate("p", prompt, kv=kv, stream=False, **sampling)


async def expect_error(fleet, kv, *, seconds, prompt=PROMPT, name="d"):
    """The load fails: an OK stream without a token, and an engine that goes on."""
    start = trio.current_time()
    answer = await fleet.generate(name, prompt, kv=kv)
    assert (answer.complete.finish_reason, answer.token_ids) == ("error", [])
    assert abs(trio.current_time() - start - seconds) < 0.01
    assert (await fleet.generate(name, prompt)).complete.finish_reason == "length"


async def make_acquaintance(fleet):
    await prefill(fleet, [7, 8, 9], transfer_id="hello")
    await fleet.generate("d", [7, 8, 9], kv=decode_params(fleet, "hello"))


@pytest.fixture
async def pair(open_fleet):
    async with open_fleet(p=MOONCAKE, d=MOONCAKE, d2=MOONCAKE, w={}) as fleet:
        yield fleet


@pytest.fixture
async def small_pair(open_fleet):
    """A prefill worker that must soon use its blocks again."""
    async with open_fleet(p={**MOONCAKE, "num_blocks": 8, "max_context_length": 128}, d=MOONCAKE, w={}) as fleet:
        yield fleet


class TestHandingOver:
    async def test_a_pair_says_what_a_plain_worker_says_without_computing_the_prompt_twice(self, pair):
        prompts = [list(range(300 + i, 320 + 2 * i)) for i in range(60)]
        texts: dict[int, list[int]] = {}

        async def one(number):
            transfer_id = f"xfer-{number}"
            await prefill(pair, prompts[number], transfer_id=transfer_id)
            answer = await pair.generate("d", prompts[number], kv=decode_params(pair, transfer_id))
            texts[number] = answer.token_ids

        async with trio.open_nursery() as nursery:
            for number in range(60):
                nursery.start_soon(one, number)
        for number, prompt in enumerate(prompts):
            assert texts[number] == (await pair.generate("w", prompt)).token_ids
        decode, handing = pair.workers["d"].counters, pair.workers["p"].counters
        assert (decode.pulls, decode.recomputed_prompt_tokens, decode.computed_prompt_tokens) == (60, 0, 0)
        assert decode.pulled_tokens + decode.prefix_hit_tokens == sum(len(prompt) for prompt in prompts)
        assert (handing.pinned, handing.pulled, handing.lease_expired) == (60, 60, 0)
        assert len(pair.workers["p"].ledger) == 0
        assert pair.workers["p"].engine.core.cache.held_blocks == 0

    async def test_the_completion_tells_nothing_of_what_is_kept(self, pair):
        answer = await prefill(pair)
        assert answer.complete.finish_reason == "length"
        assert answer.kv is None
        (pin,) = pair.workers["p"].ledger.values()
        assert (pin.request_id, len(pin.blocks)) == ("xfer-1", 3)

    async def test_a_lookup_that_comes_before_the_prefill_has_ended_waits_for_it(self, pair):
        pair.workers["p"].faults = Faults(hold_prefill=True)
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(prefill, pair)
            call = await pair.call("d", pair.request(PROMPT, kv=decode_params(pair)))
            await trio.sleep(3)
            assert not call.ended
            pair.workers["p"].faults = Faults()
            answer = await pair.read(call)
        assert answer.token_ids == (await pair.generate("w", PROMPT)).token_ids
        assert 3 < answer.times[0] - start < 3.1
        assert len(pair.workers["p"].ledger) == 0

    async def test_another_prompt_than_that_of_the_transfer_shows_in_the_text(self, pair):
        other = [*PROMPT[:-1], 7]
        await prefill(pair)
        answer = await pair.generate("d", other, kv=decode_params(pair), ignore_eos=True)
        assert answer.complete.finish_reason == "length"
        assert answer.token_ids != (await pair.generate("w", other, ignore_eos=True)).token_ids

    async def test_of_two_prefills_with_one_id_the_later_is_handed_over(self, pair):
        other = [*PROMPT[:-1], 7]
        await prefill(pair, other)
        await prefill(pair)
        answer = await pair.generate("d", PROMPT, kv=decode_params(pair))
        assert answer.token_ids == (await pair.generate("w", PROMPT)).token_ids
        assert pair.workers["p"].engine.core.cache.held_blocks == 0

    async def test_kept_blocks_are_not_used_again_before_they_are_fetched(self, small_pair):
        await prefill(small_pair)
        for start in range(500, 520):
            await small_pair.generate("p", list(range(start, start + 60)), max_tokens=1)
        answer = await small_pair.generate("d", PROMPT, kv=decode_params(small_pair))
        assert answer.token_ids == (await small_pair.generate("w", PROMPT)).token_ids

    async def test_the_connector_tells_its_name(self, pair):
        info = await VllmEngineStub(pair.channels["p"]).get_server_info(GetServerInfoRequest())
        assert (info.kv_connector, info.kv_role) == ("MooncakeConnector", "kv_producer")
        assert info.kv_engine_id == pair.workers["p"].engine_id


class TestNothingIsKept:
    """Only a prefill that ended at its length limit leaves something behind."""

    async def expect_nothing(self, pair):
        assert len(pair.workers["p"].ledger) == 0
        assert pair.workers["p"].engine.core.cache.held_blocks == 0
        await expect_error(pair, decode_params(pair), seconds=5.0)

    async def test_after_a_stop(self, pair):
        first = (await pair.generate("w", PROMPT, max_tokens=1, ignore_eos=True)).token_ids[0]
        answer = await prefill(pair, stop_token_ids=[first])
        assert (answer.complete.finish_reason, answer.kv) == ("stop", None)
        await self.expect_nothing(pair)

    async def test_after_an_abort(self, pair):
        pair.workers["p"].faults = Faults(hold_prefill=True)
        kv = prefill_params()
        call = await pair.call("p", pair.request(PROMPT, kv=kv, request_id="x", stream=False, max_tokens=1))
        await trio.sleep(1)
        await VllmEngineStub(pair.channels["p"]).abort(AbortRequest(request_ids=["x"]))
        assert (await pair.read(call)).complete.finish_reason == "abort"
        await self.expect_nothing(pair)

    async def test_after_an_error(self, pair):
        pair.workers["p"].faults = Faults(error_rate=1.0)
        assert (await prefill(pair)).complete.finish_reason == "error"
        await self.expect_nothing(pair)

    async def test_when_a_fault_drops_it(self, pair):
        pair.workers["p"].faults = Faults(drop_handoff=True)
        assert (await prefill(pair)).complete.finish_reason == "length"
        await self.expect_nothing(pair)

    @pytest.mark.parametrize("transfer_id", [None, "", 7])
    async def test_without_a_transfer_id(self, pair, transfer_id):
        answer = await prefill(pair, transfer_id=transfer_id)
        assert (answer.complete.finish_reason, answer.kv) == ("length", None)
        assert len(pair.workers["p"].ledger) == 0
        assert pair.workers["p"].engine.core.cache.held_blocks == 0


class TestFailedLoads:
    async def test_an_id_that_nobody_knows(self, pair):
        await expect_error(pair, decode_params(pair, "xfer-unknown"), seconds=5.0)
        assert pair.workers["d"].counters.failed_pulls == 1

    @pytest.mark.parametrize("name", ["d", "d2"])
    async def test_a_transfer_is_there_once(self, pair, name):
        await prefill(pair)
        await pair.generate("d", PROMPT, kv=decode_params(pair))
        await expect_error(pair, decode_params(pair), seconds=5.0, name=name)

    async def test_how_long_it_waits_is_a_setting(self, open_fleet):
        async with open_fleet(p=MOONCAKE, d={**MOONCAKE, "handshake_seconds": 0.5}) as fleet:
            await expect_error(fleet, decode_params(fleet), seconds=0.5)

    async def test_a_transfer_that_comes_after_its_lookup_was_given_up_stays(self, pair):
        await expect_error(pair, decode_params(pair), seconds=5.0)
        await prefill(pair)
        assert len(pair.workers["p"].ledger) == 1, "not pushed to somebody who has gone"
        answer = await pair.generate("d", PROMPT, kv=decode_params(pair))
        assert answer.token_ids == (await pair.generate("w", PROMPT)).token_ids

    async def test_another_engine_answers(self, pair):
        await prefill(pair)
        await expect_error(pair, decode_params(pair, remote_engine_id="somebody"), seconds=0.0)
        assert len(pair.workers["p"].ledger) == 1

    @pytest.mark.parametrize(
        ("address", "seconds"),
        [("http://p:99", 5.0), ("http://p", 0.0), ("p:2", 0.0), ("http://p:0", 0.0), ("http://[p", 0.0)],
    )
    async def test_an_address_where_nobody_is(self, pair, address, seconds):
        await prefill(pair)
        await expect_error(pair, decode_params(pair, remote_bootstrap_addr=address), seconds=seconds)

    async def test_a_black_hole_answers(self, pair):
        pair.network.black_hole("p:2")
        await expect_error(pair, decode_params(pair), seconds=5.0)

    async def test_the_transfer_is_shorter_than_the_prompt(self, pair):
        await prefill(pair, PROMPT[:20])
        await expect_error(pair, decode_params(pair), seconds=0.0)

    async def test_the_prefill_engine_dies_while_it_is_waited_for(self, pair):
        call = await pair.call("d", pair.request(PROMPT, kv=decode_params(pair)))
        await trio.sleep(1)
        pair.workers["p"].kill_engine()
        answer = await pair.read(call)
        assert answer.complete.finish_reason == "error"

    async def test_it_was_injected(self, pair):
        await prefill(pair)
        pair.workers["d"].faults = Faults(load_error_rate=1.0)
        await expect_error(pair, decode_params(pair), seconds=0.0)


class TestIgnored:
    """What the connector has no use for is no load: the prompt is computed, and the engine lives."""

    async def expect_recomputed(self, pair, request):
        answer = await pair.send("d", request)
        assert answer.token_ids == (await pair.generate("w", PROMPT)).token_ids
        assert pair.workers["d"].counters.recomputed_prompt_tokens == len(PROMPT)
        assert pair.workers["d"].counters.pulls == 0
        assert (await VllmEngineStub(pair.channels["d"]).health_check(HealthCheckRequest())).healthy

    async def test_the_typed_pair(self, pair):
        await prefill(pair)
        request = pair.request(PROMPT)
        request.kv_transfer_params = KvTransferParams(remote_host="p", remote_port=2)
        await self.expect_recomputed(pair, request)

    @pytest.mark.parametrize("missing", ["transfer_id", "remote_engine_id", "remote_bootstrap_addr"])
    async def test_params_with_a_hole(self, pair, missing):
        await prefill(pair)
        await self.expect_recomputed(pair, pair.request(PROMPT, kv={**decode_params(pair), missing: None}))

    async def test_a_handoff_of_another_connector(self, open_fleet):
        async with open_fleet(p={}, d=MOONCAKE, w={}) as fleet:
            await self.expect_recomputed(fleet, fleet.request(PROMPT, kv=await fleet.prefill("p", PROMPT)))

    @pytest.mark.parametrize("connector", ["store", "none"])
    async def test_everything_where_no_connector_moves_state(self, open_fleet, connector):
        async with open_fleet(p={"connector": connector}, d={"connector": connector}, w={}) as fleet:
            for kv in (prefill_params(), {"do_remote_decode": True}):
                assert (await fleet.generate("p", PROMPT, kv=kv, stream=False, max_tokens=1)).kv is None
            assert len(fleet.workers["p"].ledger) == 0
            # With NIXL a handoff without blocks would be the end of the engine.
            await self.expect_recomputed(fleet, fleet.request(PROMPT, kv={"do_remote_prefill": True}))
            info = await VllmEngineStub(fleet.channels["p"]).get_server_info(GetServerInfoRequest())
            known = {"store": ("MooncakeStoreConnector", "kv_producer", fleet.workers["p"].engine_id)}
            told = (info.kv_connector, info.kv_role, info.kv_engine_id)
            assert told == known.get(connector, ("", "", ""))


class TestLeasesAndReleases:
    @pytest.mark.parametrize(("changes", "lease"), [({}, 480.0), ({"lease_seconds": 6.0}, 6.0)])
    async def test_what_nobody_asks_for_is_freed_when_the_lease_ends(self, open_fleet, changes, lease):
        async with open_fleet(p={**MOONCAKE, **changes}, d=MOONCAKE) as fleet:
            await prefill(fleet)
            await trio.sleep(lease - 0.1)
            assert len(fleet.workers["p"].ledger) == 1
            await trio.sleep(0.2)
            assert len(fleet.workers["p"].ledger) == 0
            assert fleet.workers["p"].counters.lease_expired == 1
            await expect_error(fleet, decode_params(fleet), seconds=5.0)

    async def test_a_queued_leg_does_not_renew_the_lease(self, open_fleet):
        lease = {**MOONCAKE, "lease_seconds": 6.0}
        async with open_fleet(p=lease, d={**lease, "max_num_seqs": 1}) as fleet:
            busy = await fleet.call("d", fleet.request([1, 2], max_tokens=8000, ignore_eos=True))
            await trio.sleep(0.01)
            await prefill(fleet)
            queued = await fleet.call("d", fleet.request(PROMPT, kv=decode_params(fleet)))
            await trio.sleep(7)
            assert fleet.workers["p"].counters.lease_expired == 1
            busy.cancel()
            assert (await fleet.read(queued)).complete.finish_reason == "error"

    async def test_a_refusal_by_a_worker_that_knows_the_other_releases(self, pair):
        await make_acquaintance(pair)
        await prefill(pair)
        with pytest.raises(RpcError, match="max_tokens") as caught:
            await pair.generate("d", PROMPT, kv=decode_params(pair), max_tokens=0)
        assert caught.value.status is Status.INVALID_ARGUMENT
        await trio.sleep(0.01)
        assert len(pair.workers["p"].ledger) == 0
        assert pair.workers["p"].counters.released == 1
        assert pair.workers["d"].counters.pulls == 1, "only the acquaintance"

    async def test_a_refusal_by_a_cold_worker_releases_at_the_second_word(self, pair):
        await prefill(pair)
        for held in (1, 0):
            with pytest.raises(RpcError, match="max_tokens"):
                await pair.generate("d", PROMPT, kv=decode_params(pair), max_tokens=0)
            await trio.sleep(1)
            assert len(pair.workers["p"].ledger) == held

    @pytest.mark.parametrize("how", ["cancel", "abort"])
    async def test_a_queued_leg_that_is_left_releases(self, open_fleet, how):
        async with open_fleet(p=MOONCAKE, d={**MOONCAKE, "max_num_seqs": 1}) as fleet:
            await make_acquaintance(fleet)
            busy = await fleet.call("d", fleet.request([1, 2], max_tokens=4000, ignore_eos=True))
            await trio.sleep(0.01)
            await prefill(fleet)
            queued = await fleet.call("d", fleet.request(PROMPT, kv=decode_params(fleet), request_id="q"))
            await trio.sleep(1)
            assert len(fleet.workers["p"].ledger) == 1
            if how == "cancel":
                queued.cancel()
            else:
                await VllmEngineStub(fleet.channels["d"]).abort(AbortRequest(request_ids=["q"]))
            await trio.sleep(0.01)
            assert fleet.workers["p"].counters.released == 1
            busy.cancel()

    async def test_a_leg_cancelled_while_it_waits_for_the_push_takes_it_and_frees_both_ends(self, pair):
        pair.workers["p"].faults = Faults(hold_prefill=True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(prefill, pair)
            call = await pair.call("d", pair.request(PROMPT, kv=decode_params(pair)))
            await trio.sleep(1)
            call.cancel()
            await trio.sleep(1)
            pair.workers["p"].faults = Faults()
        await trio.sleep(0.01)
        for name in ("p", "d"):
            core = pair.workers[name].engine.core
            assert (core.cache.held_blocks, core.active, len(core.ledger)) == (0, 0, 0)

    async def test_a_decode_engine_that_dies_waiting_leaves_the_transfer_to_its_lease(self, pair):
        call = await pair.call("d", pair.request(PROMPT, kv=decode_params(pair)))
        await trio.sleep(1)
        pair.workers["d"].kill_engine()
        with pytest.raises(RpcError, match="EngineCore"):
            await pair.read(call)
        await trio.sleep(0.01)
        await prefill(pair)
        assert len(pair.workers["p"].ledger) == 1
        answer = await pair.generate("d2", PROMPT, kv=decode_params(pair))
        assert answer.complete.finish_reason == "length"


async def test_params_arrive_the_same_as_bytes_of_json(pair):
    await prefill(pair)
    kv = json.dumps(decode_params(pair), indent=2)
    assert (await pair.generate("d", PROMPT, kv=kv)).complete.finish_reason == "length"
    assert pair.workers["d"].counters.pulls == 1
