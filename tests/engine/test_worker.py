"""Opening and leaving a worker."""

from __future__ import annotations

import random

import pytest
import trio

from trio_router.engine.model import load_model
from trio_router.engine.servicer import Servicer
from trio_router.engine.settings import WorkerSettings
from trio_router.engine.worker import open_worker
from trio_router.errors import LinkError
from trio_router.rpc.channel import open_channel
from trio_router.rpc.memory import MemoryNetwork
from trio_router.rpc.metadata import RpcError

PROMPT = list(range(300, 340))


def open_on(network, name):
    return open_worker(
        WorkerSettings(name=name, role="prefill"),
        listener=network.listen(f"{name}:1"),
        transfer_listener=network.listen(f"{name}:2"),
        dialer=network.dial,
    )


async def test_what_it_says_of_itself_is_true_while_it_is_open_and_its_addresses_are_free_afterwards():
    network = MemoryNetwork()
    async with open_on(network, "p") as worker:
        assert (worker.address, worker.transfer_address) == ("p:1", "p:2")
        for address in ("p:1", "p:2"):
            (await network.dial(address)).close()
    for address in ("p:1", "p:2"):
        with pytest.raises(LinkError):
            await network.dial(address)
        network.listen(address)


async def test_an_error_in_the_block_comes_out_as_it_is():
    with pytest.raises(KeyError, match="mine"):
        async with open_on(MemoryNetwork(), "p"):
            raise KeyError("mine")


async def test_leaving_ends_the_calls_under_way(open_fleet):
    async with open_fleet(w={}) as fleet, open_channel("p:1", dialer=fleet.network.dial) as channel:
        fleet.channels["p"] = channel
        async with open_on(fleet.network, "p"):
            call = await fleet.call("p", fleet.request(PROMPT, max_tokens=4000, ignore_eos=True))
            await trio.sleep(0.1)
            assert call.take_nowait()
        with pytest.raises(RpcError):
            await fleet.read(call)


async def test_a_seed_repeats_ids_engine_and_unseeded_text(open_fleet):
    async def run(seed):
        async with open_fleet(p={"seed": seed}) as fleet:
            handoff = await fleet.prefill("p", PROMPT)
            answer = await fleet.generate("p", PROMPT, temperature=1.0, max_tokens=20)
            return handoff["remote_engine_id"], handoff["remote_request_id"], answer.token_ids

    assert await run(1) == await run(1)
    assert all(a != b for a, b in zip(await run(1), await run(2), strict=True))


async def test_two_workers_of_one_seed_are_two_engines(open_fleet):
    async with open_fleet(p={}, p2={}) as fleet:
        assert fleet.workers["p"].engine_id != fleet.workers["p2"].engine_id


@pytest.mark.parametrize("blocks", [8, 9, 12])
async def test_a_cache_too_small_for_everybody_serves_everybody_in_turn(open_fleet, blocks):
    async with open_fleet(w={"num_blocks": blocks, "max_context_length": 128}, w2={}) as fleet:
        prompts = [list(range(300 + 20 * i, 316 + 20 * i)) for i in range(6)]
        calls = [await fleet.call("w", fleet.request(p, max_tokens=60, ignore_eos=True)) for p in prompts]
        for call, prompt in zip(calls, prompts, strict=True):
            alone = await fleet.generate("w2", prompt, max_tokens=60, ignore_eos=True)
            assert (await fleet.read(call)).token_ids == alone.token_ids
        assert fleet.workers["w"].engine.core.cache.held_blocks == 0


async def test_a_call_that_was_cancelled_before_it_began_has_not_happened(open_fleet, caplog):
    class Call:
        on_drained = None

        async def receive(self):
            raise AssertionError("too late")

    async with open_fleet(w={}) as fleet:
        engine = fleet.workers["w"].engine
        servicer = Servicer(engine, model=load_model(), media=None, rng=random.Random(1))
        with trio.CancelScope() as scope:
            scope.cancel()
            await servicer._generate(Call())
        assert scope.cancelled_caught
        assert engine.core.counters.generates == 0


async def test_an_engine_id_that_it_is_given_is_the_one_that_handoffs_name(open_fleet):
    async with open_fleet(p={"engine_id": "this-run"}) as fleet:
        assert fleet.workers["p"].engine_id == "this-run"
        assert (await fleet.prefill("p", PROMPT))["remote_engine_id"] == "this-run"
