"""A worker that takes requests and answers nothing, while its clients come and go: what it costs the router."""

from __future__ import annotations

import trio
import trio.testing
from grpclib.exceptions import GRPCError

from trio_router.dispatch.janitor import JanitorSettings
from trio_router.dispatch.router import RouterSettings
from trio_router.errors import RouterError
from trio_router.fleet.client import ABORTS_AT_ONCE
from trio_router.testing.scripted import a_request, decode_worker, open_scene, prefill_worker

LEAVING = 5000
MAX_JOBS = 300


def tasks() -> int:
    return trio.lowlevel.current_statistics().tasks_living


async def say_nothing(call, request) -> None:
    await trio.sleep_forever()


async def test_case_g5_aborts_do_not_pile_up_at_a_worker_that_never_answers_them(autojump_clock):
    """Five thousand clients leave within five seconds, all of them in prefill."""
    aborting = [0, 0]  # now, and at most

    async def hang() -> None:
        aborting[0] += 1
        aborting[1] = max(aborting)
        try:
            await trio.sleep_forever()
        finally:
            aborting[0] -= 1

    wedged = prefill_worker(say_nothing, on_abort=hang)
    settings = RouterSettings(janitor=JanitorSettings(max_jobs=MAX_JOBS))
    async with open_scene(wedged, decode_worker(), router=settings) as scene:
        before = tasks()
        most = 0

        async def come_and_go(number: int) -> None:
            with trio.move_on_after(0.05):
                async with scene.router.generate(a_request(f"request-{number}")):
                    raise AssertionError("nobody answers")

        for wave in range(50):
            async with trio.open_nursery() as clients:
                for number in range(LEAVING // 50):
                    clients.start_soon(come_and_go, wave * 1000 + number)
            await trio.sleep(0.05)
            assert scene.router.in_flight == 0
            most = max(most, tasks() - before)
        assert scene.router.janitor.jobs == MAX_JOBS
        # On the router's side a job and its Abort, at the worker a handler for each of those calls.
        assert MAX_JOBS < most <= 2 * MAX_JOBS + MAX_JOBS + ABORTS_AT_ONCE
        assert aborting[1] == ABORTS_AT_ONCE

        await trio.sleep(11)
        assert scene.leaks() == []
        assert tasks() <= before
        assert aborting[0] == 0
        assert len(wedged.ended) == LEAVING  # every leg was reset

        # And when it works again, nothing stands in its way.
        wedged.script, wedged.on_abort = prefill_worker().script, trio.lowlevel.checkpoint
        async with scene.router.generate(a_request("late")) as stream:
            assert [frame.is_complete async for frame in stream] == [False, False, True]


async def test_an_abort_that_has_no_turn_fails_when_its_time_is_up(autojump_clock):
    """And gives its place to nobody: what is left of a turn goes to those who still wait."""
    wedged = prefill_worker(on_abort=trio.sleep_forever)
    failed_at: list[float] = []
    async with open_scene(wedged, decode_worker()) as scene, trio.open_nursery() as nursery:
        client = scene.router.registry.workers[0].client
        begin = trio.current_time()

        async def abort(number: int) -> None:
            try:
                await client.abort([f"request-{number}"])
            except (GRPCError, RouterError):
                failed_at.append(trio.current_time() - begin)

        for number in range(ABORTS_AT_ONCE):
            nursery.start_soon(abort, number)
        await trio.sleep(5)
        for number in range(20):
            nursery.start_soon(abort, 100 + number)
        await trio.sleep(6)
        assert len(failed_at) == ABORTS_AT_ONCE
        assert len(wedged.aborted) == 2 * ABORTS_AT_ONCE
        await trio.sleep(5)
        assert failed_at == [10.0] * ABORTS_AT_ONCE + [15.0] * 20
