"""Injected faults: what a test can tell a worker to do wrong, changed while it runs."""

from __future__ import annotations

import pytest
import trio
from grpclib.const import Status

from trio_router.engine.settings import Faults
from trio_router.rpc.metadata import RpcError

PROMPT = list(range(300, 340))


@pytest.fixture
async def fleet(open_fleet):
    async with open_fleet(p={}, d={}) as fleet:
        yield fleet


async def test_an_error_ending_is_an_ok_stream_without_tokens(fleet):
    fleet.workers["p"].faults = Faults(error_rate=1.0)
    answer = await fleet.generate("p", PROMPT)
    assert (answer.complete.finish_reason, answer.token_ids) == ("error", [])
    fleet.workers["p"].faults = Faults()
    assert (await fleet.generate("p", PROMPT)).complete.finish_reason == "length"


async def test_a_rate_hits_some_and_the_same_ones_every_time(open_fleet):
    async def reasons():
        async with open_fleet(w={"seed": 3}) as fleet:
            fleet.workers["w"].faults = Faults(error_rate=0.5)
            return [(await fleet.generate("w", PROMPT)).complete.finish_reason for _ in range(20)]

    first = await reasons()
    assert set(first) == {"error", "length"}
    assert await reasons() == first


async def test_an_exception_is_internal_without_details(fleet):
    fleet.workers["p"].faults = Faults(raise_rate=1.0)
    with pytest.raises(RpcError) as caught:
        await fleet.generate("p", PROMPT)
    assert (caught.value.status, caught.value.message or "") == (Status.INTERNAL, "")


async def test_a_full_queue_is_unavailable_and_releases_the_handoff(fleet):
    await fleet.generate("d", PROMPT, kv=await fleet.prefill("p", PROMPT))
    fleet.workers["d"].faults = Faults(refuse_admission=True)
    with pytest.raises(RpcError) as caught:
        await fleet.generate("d", PROMPT, kv=await fleet.prefill("p", PROMPT))
    assert caught.value.status is Status.UNAVAILABLE
    await trio.sleep(0.01)
    assert fleet.workers["p"].counters.released == 1


async def test_a_hang_stops_steps_and_nothing_else(fleet):
    call = await fleet.call("p", fleet.request(PROMPT, max_tokens=10, ignore_eos=True))
    await trio.sleep(0.02)
    fleet.workers["p"].faults = Faults(hang=True)
    await trio.sleep(100)
    steps = fleet.workers["p"].counters.steps
    queued = await fleet.call("p", fleet.request(PROMPT))
    await trio.sleep(100)
    assert fleet.workers["p"].counters.steps == steps
    assert not call.ended
    fleet.workers["p"].faults = Faults()
    assert len((await fleet.read(call)).token_ids) == 10
    assert (await fleet.read(queued)).complete.finish_reason == "length"


async def test_a_dropped_handoff_leaves_no_params_and_no_pins(fleet):
    fleet.workers["p"].faults = Faults(drop_handoff=True)
    answer = await fleet.generate("p", PROMPT, kv={"do_remote_decode": True}, stream=False, max_tokens=1)
    assert answer.kv is None
    assert len(fleet.workers["p"].ledger) == 0


async def test_a_held_prefill_waits_for_the_gate(fleet):
    fleet.workers["p"].faults = Faults(hold_prefill=True)
    call = await fleet.call("p", fleet.request(PROMPT, kv={"do_remote_decode": True}, stream=False, max_tokens=1))
    await trio.sleep(50)
    assert not call.ended
    fleet.workers["p"].faults = Faults()
    assert (await fleet.read(call)).kv is not None


async def test_the_first_frame_comes_late(fleet):
    fleet.workers["d"].faults = Faults(first_frame_delay_seconds=7.0)
    start = trio.current_time()
    answer = await fleet.generate("d", PROMPT, kv=await fleet.prefill("p", PROMPT), max_tokens=3, ignore_eos=True)
    assert [round(at - start) for at in answer.times] == [7, 7, 7, 7]
    assert len(fleet.workers["p"].ledger) == 0, "the pull did not wait"


async def test_a_delay_that_is_over_while_the_prefill_is_held_keeps_nobody_busy(fleet):
    worker = fleet.workers["p"]
    worker.faults = Faults(first_frame_delay_seconds=1.0)
    call = await fleet.call("p", fleet.request(PROMPT, kv={"do_remote_decode": True}, stream=False, max_tokens=1))
    await trio.sleep(0.5)
    worker.faults = Faults(hold_prefill=True)
    # An engine that went round without waiting would let no time pass on this clock.
    await trio.sleep(50)
    assert not call.ended
    worker.faults = Faults()
    assert (await fleet.read(call)).kv is not None
