"""Public cases of clients that leave between, in and before the legs, with either connector (A1 to A3)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio
from grpclib.const import Status

from trio_router.dispatch.retry import RetrySettings
from trio_router.dispatch.router import RouterSettings
from trio_router.engine.settings import Faults, WorkerSettings
from trio_router.errors import WorkerRejected
from trio_router.fleet.worker import WorkerRole
from trio_router.testing import Cluster, collect, open_cluster
from trio_router.testing.scripted import (
    Scene,
)

CONNECTORS = ("nixl", "mooncake")
ONCE = RouterSettings(retry=RetrySettings(attempts=1))
both_connectors = pytest.mark.parametrize("connector", CONNECTORS)


def decode_side(cluster: Cluster | Scene):
    """The router's record of its (first) decode worker."""
    return next(each for each in cluster.router.registry.workers if each.spec.role is WorkerRole.DECODE)


class TestClientGoneBetweenTheLegs:
    """A1: whoever holds the only reference to blocks gives them back."""

    @asynccontextmanager
    async def held_between_legs(self, cluster: Cluster) -> AsyncIterator[trio.CancelScope]:
        """A request whose prefill leg has ended and whose decode leg waits for a connection."""
        client, harvested = decode_side(cluster).client, trio.Event()

        async def connect() -> None:
            harvested.set()
            await trio.sleep_forever()

        client.connect = connect
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, cluster.router, cluster.request("a prompt of its own"))
            with trio.fail_after(10):
                await harvested.wait()
            del client.connect
            yield nursery.cancel_scope
            nursery.cancel_scope.cancel()

    @both_connectors
    @pytest.mark.parametrize("cold", [True, False], ids=["pair never met", "pair has met"])
    async def test_case_a1_what_nobody_will_fetch_is_released_within_a_second(self, autojump_clock, connector, cold):
        async with open_cluster(connector=connector) as cluster:
            if not cold:
                await collect(cluster.router, cluster.request())
            prefill, decode = cluster.prefill[0], cluster.decode[0]
            pulls, tokens = decode.counters.pulls, decode.counters.generated_tokens
            async with self.held_between_legs(cluster) as scope:
                assert len(prefill.ledger) == 1
                scope.cancel()
            assert cluster.router.in_flight == 0
            await trio.sleep(1)
            assert len(prefill.ledger) == 0
            assert (prefill.counters.released, prefill.counters.lease_expired) == (1, 0)
            assert (decode.counters.pulls, decode.counters.generated_tokens) == (pulls, tokens)
            assert cluster.recorder.handoffs[not cold :] == ["released"]
            assert cluster.leaks() == []

    @both_connectors
    async def test_case_a1_the_same_when_its_time_is_up_or_the_router_ends(self, autojump_clock, connector):
        for end in ("abort", "shut_down"):
            async with open_cluster(connector=connector) as cluster:
                with pytest.RaisesGroup(
                    pytest.RaisesExc(Exception, match=r"aborted|shutting down"), allow_unwrapped=True
                ):
                    async with self.held_between_legs(cluster):
                        if end == "abort":
                            await cluster.router.abort(["request-1"])
                        else:
                            cluster.router.shut_down()
                        await trio.sleep_forever()
                await trio.sleep(1)
                assert cluster.prefill[0].counters.released == 1
                assert cluster.recorder.handoffs == ["released"]
                assert cluster.leaks() == []

    @both_connectors
    @pytest.mark.parametrize("cold", [True, False], ids=["pair never met", "pair has met"])
    async def test_case_a1_a_decode_worker_that_answers_400_before_admission(self, autojump_clock, connector, cold):
        async with open_cluster(connector=connector) as cluster:
            if not cold:
                await collect(cluster.router, cluster.request())
            prefill, decode = cluster.prefill[0], cluster.decode[0]
            pulls, tokens = decode.counters.pulls, decode.counters.generated_tokens
            core = decode.engine.core
            core.settings = replace(core.settings, max_context_length=4)
            with pytest.raises(WorkerRejected) as caught:
                await collect(cluster.router, cluster.request("a prompt of its own"))
            assert (caught.value.status, caught.value.leg) == (Status.INVALID_ARGUMENT, "decode")
            await trio.sleep(1)
            assert len(prefill.ledger) == 0
            assert (prefill.counters.released, prefill.counters.lease_expired) == (1, 0)
            assert (decode.counters.pulls, decode.counters.generated_tokens) == (pulls, tokens)
            assert cluster.recorder.handoffs[not cold :] == ["released"]
            assert cluster.leaks() == []


class TestClientGoneInMidTransfer:
    """A2, with both connectors; the bound of 30 s has tests beside the janitor's."""

    @both_connectors
    async def test_case_a2_nothing_ends_the_leg_before_its_first_frame_and_that_ends_it_at_once(
        self, autojump_clock, connector
    ):
        async with open_cluster(connector=connector) as cluster:
            decode = cluster.decode[0]
            await collect(cluster.router, cluster.request())
            decode.faults = Faults(hold_pull=True)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(collect, cluster.router, cluster.request("another prompt", max_tokens=500))
                with trio.fail_after(10):
                    while not decode.engine.core.pulling:  # noqa: ASYNC110  # a foreign object without an event
                        await trio.sleep(0.001)
                nursery.cancel_scope.cancel()
            assert cluster.router.in_flight == 0
            await trio.sleep(25)
            assert decode.counters.aborts == 0
            decode.faults = Faults()
            await trio.sleep(0.1)
            assert decode.counters.aborts == 1
            assert cluster.recorder.handoffs == ["consumed", "consumed"]
            assert cluster.leaks() == []


@both_connectors
async def test_case_a3_ten_long_prefills_that_are_left_are_stopped_and_cost_the_next_request_nothing(
    autojump_clock, connector
):
    worker = WorkerSettings(name="slow", prefill_tokens_per_second=1_000.0)
    long = "the harbour and the garden " * 400
    async with open_cluster(connector=connector, worker=worker) as cluster:

        async def first_token() -> float:
            begin = trio.current_time()
            async with cluster.router.generate(cluster.request("short", max_tokens=1)) as stream:
                async for _ in stream:
                    return trio.current_time() - begin
            raise AssertionError

        await first_token()
        idle = await first_token()
        served = cluster.decode[0].counters.generates
        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(collect, cluster.router, cluster.request(f"{number} {long}"))
            await trio.sleep(0.5)
            nursery.cancel_scope.cancel()
        await trio.sleep(0.3)
        assert cluster.prefill[0].counters.aborts == 10
        # What is computed in a step is: nothing is left behind it.
        step = worker.max_batched_tokens / worker.prefill_tokens_per_second
        assert await first_token() <= idle + step
        assert cluster.decode[0].counters.generates == served + 1
        await trio.sleep(1)
        assert cluster.leaks() == []
