"""Clients that leave, at every phase: nothing of the request stays anywhere (acceptance 4, cases A1, A2, A3)."""

from __future__ import annotations

from collections.abc import Callable

import trio
import trio.testing

from trio_router.engine.settings import Faults
from trio_router.testing import Cluster, collect, open_cluster


async def leave_when(cluster: Cluster, condition: Callable[[], bool], *, max_tokens: int = 200) -> None:
    """Start a request, wait until `condition`, and cancel its task, as a front does when its client leaves."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(collect, cluster.router, cluster.request(max_tokens=max_tokens))
        with trio.fail_after(60):
            while not condition():  # noqa: ASYNC110  # looks at a foreign object, which has no event for this
                await trio.sleep(0.0005)
        nursery.cancel_scope.cancel()


async def assert_at_rest_within_a_second(cluster: Cluster) -> None:
    await trio.sleep(1)
    assert cluster.leaks() == []
    assert sum(worker.counters.lease_expired for worker in cluster.workers) == 0
    assert await collect(cluster.router, cluster.request())  # the fleet still serves


async def test_case_a3_leaving_during_prefill_stops_it_and_decode_never_hears_of_it(autojump_clock):
    async with open_cluster() as cluster:
        cluster.prefill[0].faults = Faults(hold_prefill=True)
        await leave_when(cluster, lambda: cluster.prefill[0].counters.generates == 1)
        await trio.sleep(1)
        assert cluster.prefill[0].counters.aborts == 1
        assert cluster.decode[0].counters.generates == 0
        assert cluster.recorder.handoffs == []
        cluster.prefill[0].faults = Faults()
        await assert_at_rest_within_a_second(cluster)


async def test_case_a1_leaving_between_the_legs_releases_the_handoff(autojump_clock):
    async with open_cluster() as cluster:
        await collect(cluster.router, cluster.request())  # the pair has met
        pulls = cluster.decode[0].counters.pulls
        # The prefill worker has answered; the router's reader has not run yet.
        await leave_when(cluster, lambda: cluster.prefill[0].counters.pinned == 2)
        await trio.sleep(1)
        assert cluster.recorder.handoffs[-1] in {"released", "consumed"}
        assert cluster.prefill[0].counters.lease_expired == 0
        assert cluster.decode[0].counters.pulls - pulls <= 1
        await assert_at_rest_within_a_second(cluster)


async def test_case_a2_leaving_before_decodes_first_frame_resets_only_after_it(autojump_clock):
    async with open_cluster() as cluster:
        decode = cluster.decode[0]
        decode.faults = Faults(hold_pull=True)
        await leave_when(cluster, lambda: bool(decode.engine.core.pulling))
        await trio.sleep(5)
        # The client has long gone; the leg goes on, since nothing may end it in mid-transfer.
        assert cluster.router.in_flight == 0
        assert decode.counters.aborts == 0
        assert cluster.router.janitor.jobs == 1
        decode.faults = Faults()
        await trio.sleep(1)
        assert decode.counters.aborts == 1
        assert cluster.recorder.handoffs == ["consumed"]
        await assert_at_rest_within_a_second(cluster)


async def test_a_decode_leg_that_never_shows_a_frame_is_reset_at_the_bound(autojump_clock):
    async with open_cluster() as cluster:
        decode = cluster.decode[0]
        decode.faults = Faults(hold_pull=True)
        await leave_when(cluster, lambda: bool(decode.engine.core.pulling))
        await trio.sleep(29)
        assert decode.counters.aborts == 0
        await trio.sleep(2)
        assert decode.counters.aborts == 1
        assert cluster.router.janitor.jobs == 0


async def test_leaving_while_streaming_ends_the_decode_leg(autojump_clock):
    async with open_cluster() as cluster:
        decode = cluster.decode[0]
        await leave_when(cluster, lambda: decode.counters.generated_tokens >= 10)
        await trio.sleep(0.1)
        assert decode.counters.aborts == 1
        assert decode.counters.generated_tokens < 30
        assert cluster.recorder.handoffs == ["consumed"]
        assert [record.outcome.value for record in cluster.recorder.records] == ["client_left"]
        await assert_at_rest_within_a_second(cluster)


async def test_leaving_the_block_early_is_leaving(autojump_clock):
    async with open_cluster() as cluster:
        async with cluster.router.generate(cluster.request(max_tokens=500)) as stream:
            async for _ in stream:
                break
        await trio.sleep(0.1)
        assert cluster.decode[0].counters.aborts == 1
        await assert_at_rest_within_a_second(cluster)
