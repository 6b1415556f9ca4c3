"""Data parallel ranks: every request is of one, and what is handed over is of the rank that computed it."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
import trio
from grpclib.const import Status

from trio_router.protocol.messages import GetLoadsRequest, GetServerInfoRequest, VllmEngineStub
from trio_router.rpc.metadata import RpcError

PROMPT = list(range(300, 345))
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


async def send(fleet, name, *, rank, kv=PREFILL):
    request = fleet.request(PROMPT, kv=kv, stream=False, max_tokens=1, ignore_eos=True)
    request.data_parallel_rank = rank
    return await fleet.send(name, request)


@pytest.fixture
async def nixl(open_fleet):
    async with open_fleet(p={"dp_size": 3}, d={}, w={"dp_size": 3}) as fleet:
        yield fleet


@pytest.fixture
async def mooncake(open_fleet):
    changes = {"connector": "mooncake"}
    async with open_fleet(p={**changes, "dp_size": 3}, d=changes, w={}) as fleet:
        yield fleet


async def test_server_info_tells_how_many_and_the_base_of_their_ids(nixl):
    info = await VllmEngineStub(nixl.channels["p"]).get_server_info(GetServerInfoRequest())
    assert (info.data_parallel_size, info.kv_engine_id) == (3, nixl.workers["p"].engine_id)


async def test_loads_are_told_for_each_rank(open_fleet):
    async with open_fleet(p={"dp_size": 3, "max_num_seqs": 4}) as fleet:
        for rank in (0, 0, 1, 0, 2, 0, 0):
            request = fleet.request(PROMPT, max_tokens=4000, ignore_eos=True)
            request.data_parallel_rank = rank
            await fleet.call("p", request)
            await trio.sleep(0.01)
        reply = await VllmEngineStub(fleet.channels["p"]).get_loads(GetLoadsRequest())
        assert reply.dp_rank_count == 3
        assert [(load.dp_rank, load.num_running_reqs, load.num_waiting_reqs) for load in reply.loads] == [
            (0, 3, 2),
            (1, 1, 0),
            (2, 0, 1),
        ]


@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_a_pinned_request_is_handed_over_under_the_id_of_its_rank(nixl, rank):
    for _ in range(2):
        answer = await send(nixl, "p", rank=rank)
        assert answer.kv["remote_engine_id"] == f"{nixl.workers['p'].engine_id}_dp{rank}"
    assert (await nixl.generate("d", PROMPT, kv=answer.kv)).complete.finish_reason == "length"
    assert nixl.workers["d"].counters.pulls == 1
    assert len(nixl.workers["p"].ledger) == 1, "that of the first"


async def test_with_one_rank_the_id_has_no_suffix(open_fleet):
    async with open_fleet(p={}) as fleet:
        assert (await send(fleet, "p", rank=0)).kv["remote_engine_id"] == fleet.workers["p"].engine_id


async def test_requests_that_do_not_ask_take_turns(nixl):
    base = nixl.workers["p"].engine_id
    ids = Counter([(await nixl.prefill("p", PROMPT))["remote_engine_id"] for _ in range(9)])
    assert ids == {f"{base}_dp{rank}": 3 for rank in range(3)}


async def test_a_request_that_asks_takes_nobodys_turn(nixl):
    ranks = [(await send(nixl, "p", rank=rank)).kv["remote_engine_id"][-1] for rank in (None, 2, None, 2, None)]
    assert ranks == ["0", "2", "1", "2", "2"]


@pytest.mark.parametrize("rank", [-1, 3])
@pytest.mark.parametrize("name", ["p", "w"])
async def test_a_rank_that_is_not_there_is_refused(nixl, rank, name):
    with pytest.raises(RpcError, match=r"out of range \[0, 3\)") as caught:
        await send(nixl, name, rank=rank)
    assert caught.value.status is Status.INVALID_ARGUMENT


async def test_the_log_line_tells_what_was_asked_for(nixl, caplog):
    caplog.set_level(logging.INFO, logger="trio_router.engine")
    for rank in (None, 0, 2):
        await send(nixl, "p", rank=rank)
    assert [record.message.rpartition(" ")[2] for record in caplog.records if "Generate" in record.message] == [
        "dp_rank=None",
        "dp_rank=0",
        "dp_rank=2",
    ]


@pytest.mark.parametrize("named", ["_dp1", "", "_dp3"])
async def test_a_pull_that_names_another_rank_or_the_base_fails(nixl, named):
    kv = (await send(nixl, "p", rank=2)).kv
    kv["remote_engine_id"] = nixl.workers["p"].engine_id + named
    answer = await nixl.generate("d", PROMPT, kv=kv)
    assert (answer.complete.finish_reason, answer.token_ids) == ("error", [])
    assert len(nixl.workers["p"].ledger) == 1
    # Nor does a word about it reach the rank that holds it.
    for _ in range(2):
        with pytest.raises(RpcError, match="max_tokens"):
            await nixl.generate("d", PROMPT, kv=kv, max_tokens=0)
        await trio.sleep(1)
    assert len(nixl.workers["p"].ledger) == 1


def decode_params(fleet, suffix: str) -> dict[str, object]:
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": "xfer-1",
        "remote_engine_id": fleet.workers["p"].engine_id + suffix,
        "remote_bootstrap_addr": "http://p:2",
    }


async def test_a_lookup_that_names_the_rank_gets_the_state(mooncake):
    await send(mooncake, "p", rank=1, kv={**PREFILL, "transfer_id": "xfer-1"})
    answer = await mooncake.generate("d", PROMPT, kv=decode_params(mooncake, "_dp1"))
    assert answer.token_ids == (await mooncake.generate("w", PROMPT)).token_ids
    assert mooncake.workers["d"].counters.pulls == 1


@pytest.mark.parametrize(("named", "seconds"), [("_dp0", 5.0), ("", 0.0), ("_dp3", 0.0)])
async def test_a_lookup_that_names_another_rank_or_the_base_fails(mooncake, named, seconds):
    await send(mooncake, "p", rank=1, kv={**PREFILL, "transfer_id": "xfer-1"})
    start = trio.current_time()
    answer = await mooncake.generate("d", PROMPT, kv=decode_params(mooncake, named))
    assert (answer.complete.finish_reason, answer.token_ids) == ("error", [])
    assert abs(trio.current_time() - start - seconds) < 0.01
    assert len(mooncake.workers["p"].ledger) == 1
