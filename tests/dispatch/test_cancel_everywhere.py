"""A request that is ended at any step of the whole run leaves nothing behind (invariants I2, I3, I4, I8).

The scenario is run again for every k: at the k-th task step of the run, whichever task that is, the client leaves, or
the router ends the request. Among the points this hits are the hard ones: the cancel that comes first with the frame
later in the same batch, and the frame that arrives after the task has left.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import trio
import trio.testing

from trio_router.dispatch.handoff import HandoffState
from trio_router.dispatch.janitor import Janitor
from trio_router.engine.settings import Faults, WorkerSettings
from trio_router.errors import RequestAborted, WorkerUnavailable
from trio_router.front.grpc import GENERATE, grpc_server
from trio_router.protocol.codec import encode
from trio_router.rpc.channel import open_channel
from trio_router.rpc.metadata import RpcError
from trio_router.testing import Cluster, collect, open_cluster
from trio_router.testing.steps import at_step

MAX_TOKENS = 4


async def cancel_scope(cluster: Cluster, k: int) -> bool:
    """Cancel the request's own scope at step k; True when the request was still under way."""
    with trio.CancelScope() as scope, at_step(k, scope.cancel):
        await collect(cluster.router, cluster.request(max_tokens=MAX_TOKENS))
    return scope.cancelled_caught


async def reset_call(cluster: Cluster, k: int) -> bool:
    """The same for a gRPC client that resets its call; True when it had not ended."""
    listener = cluster.network.listen("front:1")
    async with trio.open_nursery() as nursery:
        await nursery.start(grpc_server(cluster.router).serve, listener)
        async with open_channel(listener.address, dialer=cluster.network.dial) as channel:
            call = await channel.call(GENERATE, encode(cluster.request(max_tokens=MAX_TOKENS)))
            with at_step(k, call.cancel), suppress(RpcError):
                await call.pump(lambda batch: True)
            await trio.sleep(2)
        nursery.cancel_scope.cancel()
    return call.error is not None


async def abort(cluster: Cluster, k: int) -> bool:
    """Abort the request by its id at step k."""
    request = cluster.request(max_tokens=MAX_TOKENS)
    async with trio.open_nursery() as nursery:
        with at_step(k, lambda: nursery.start_soon(cluster.router.abort, [request.request_id])):
            try:
                await collect(cluster.router, request)
            except RequestAborted:
                return True
    return cluster.recorder.records[-1].outcome.value == "aborted"


async def shut_down(cluster: Cluster, k: int) -> bool:
    """Have the router end whatever is under way at step k."""
    try:
        with at_step(k, cluster.router.shut_down):
            await collect(cluster.router, cluster.request(max_tokens=MAX_TOKENS))
    except WorkerUnavailable:
        return True
    return False


OUTCOMES = {"ok", "client_left", "aborted", "failed"}


async def met(cluster: Cluster) -> None:
    """The pair has served a request before."""
    await collect(cluster.router, cluster.request("warm up", max_tokens=1))


async def cold(cluster: Cluster) -> None:
    """The pair has not exchanged anything yet."""


async def refused(cluster: Cluster) -> None:
    """The first decode worker refuses, so that there is a second attempt."""
    cluster.decode[0].faults = Faults(refuse_admission=True)


Way = Callable[[Cluster, int], Awaitable[bool]]
Scene = Callable[[Cluster], Awaitable[None]]


async def one_run(way: Way, k: int, *, scene: Scene, connector: str) -> tuple[bool, list[str]]:
    # A slow worker spreads the phases over steps of their own.
    worker = WorkerSettings(name="template", inter_token_seconds=0.002, prefill_tokens_per_second=5_000.0)
    async with open_cluster(worker=worker, decode=2 if scene is refused else 1, connector=connector) as cluster:
        await scene(cluster)
        before = len(cluster.recorder.records)
        was_under_way = await way(cluster, k)
        await trio.sleep(2)
        leaks = cluster.leaks()
        ended = [record.outcome.value for record in cluster.recorder.records[before:]]
        # A reset that overtakes its request leaves nothing to record; otherwise exactly one terminal state.
        if len(ended) > 1 or not OUTCOMES.issuperset(ended):
            leaks.append(f"terminal states {ended}")
        pinned = sum(worker.counters.pinned for worker in cluster.prefill)
        if len(cluster.recorder.handoffs) != pinned or len(cluster.router.handoffs):
            leaks.append(f"{pinned} handoffs, told of {cluster.recorder.handoffs}, {cluster.router.handoffs}")
        return was_under_way, leaks


def every_step(way: Way, *, scene: Scene, connector: str = "nixl") -> tuple[int, dict[int, list[str]]]:
    """Run the scenario for every k; returns how many there were, and what leaked at which."""
    leaks: dict[int, list[str]] = {}
    k = 0
    while True:
        k += 1
        clock = trio.testing.MockClock(autojump_threshold=0)
        was_under_way, found = trio.run(lambda k=k: one_run(way, k, scene=scene, connector=connector), clock=clock)
        if found:
            leaks[k] = found
        if not was_under_way:
            return k, leaks


RUNS = [
    (cancel_scope, met, "nixl"),
    (cancel_scope, cold, "nixl"),
    (cancel_scope, refused, "nixl"),
    (reset_call, met, "nixl"),
    (reset_call, cold, "nixl"),
    (abort, met, "nixl"),
    (shut_down, cold, "nixl"),
    (cancel_scope, met, "mooncake"),
    (cancel_scope, cold, "mooncake"),
    (cancel_scope, refused, "mooncake"),
    (reset_call, cold, "mooncake"),
    (abort, cold, "mooncake"),
]


@pytest.mark.parametrize(
    ("way", "scene", "connector"), RUNS, ids=[f"{way.__name__}-{scene.__name__}-{name}" for way, scene, name in RUNS]
)
def test_i8_an_end_at_any_step_leaks_nothing(way, scene, connector):
    steps, leaks = every_step(way, scene=scene, connector=connector)
    assert leaks == {}
    assert steps > 30, "the scenario has become too short to hit every phase"


class TestTheSearchItself:
    """It must be able to fail: with one rule broken it does."""

    def found(self) -> str:
        _, leaks = every_step(cancel_scope, scene=met)
        return "; ".join(text for found in leaks.values() for text in found)

    def test_it_finds_a_janitor_that_forgets_a_release(self, monkeypatch):
        def forget(self, handoff, *, through, view):
            handoff.end(HandoffState.LAPSED)

        async def forget_job(self, handoff, through, view):
            handoff.end(HandoffState.LAPSED)

        monkeypatch.setattr(Janitor, "release", forget)
        monkeypatch.setattr(Janitor, "_release", forget_job)
        assert "pinned" in self.found()

    def test_it_finds_a_handoff_that_nobody_accounts_for(self, monkeypatch):
        monkeypatch.setattr(Janitor, "finish_decode", lambda self, leg, *, view: leg.leave())
        assert "told of" in self.found()

    def test_it_finds_a_blind_reset_of_prefill(self, monkeypatch):
        monkeypatch.setattr(Janitor, "finish_prefill", lambda self, leg, *, through, view: leg.leave())
        assert "pinned" in self.found()
