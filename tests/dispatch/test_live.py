"""How requests end, and that each ends once, with a record that is true (invariant I8)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from trio_router.dispatch.handoff import HandoffSettings
from trio_router.dispatch.retry import RetrySettings
from trio_router.dispatch.router import RouterSettings
from trio_router.errors import (
    ConfigError,
    RequestAborted,
    RequestTimeout,
    WorkerRejected,
    WorkerUnavailable,
)
from trio_router.observe.hooks import Outcome
from trio_router.testing import collect
from trio_router.testing.scripted import (
    Scene,
    a_request,
    answer,
    chunk,
    complete,
    decode_worker,
    handoff_params,
    open_scene,
    plain_worker,
    prefill_worker,
)


def told(scene: Scene) -> list[tuple[Outcome, str | None]]:
    return [(record.outcome, record.error_code) for record in scene.recorder.records]


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(60):
        while not condition():  # noqa: ASYNC110  # virtual time, and whatever is waited for has no event
            await trio.sleep(0.001)


async def drip(call, request):
    """A token every 100 ms, until aborted or left."""
    if request.sampling_params.max_tokens == 0:
        await answer(call, request)
    while True:
        await call.send(chunk(7))
        await trio.sleep(0.1)


class Abortable:
    """Streams until its worker is told to abort, and then ends as real workers do."""

    def __init__(self) -> None:
        self.aborted = trio.Event()

    async def on_abort(self) -> None:
        self.aborted.set()

    async def __call__(self, call, request):
        await call.send(chunk(7))
        await self.aborted.wait()
        await call.send(complete("abort"))


class TestRecords:
    async def test_a_good_end(self, autojump_clock):
        async with open_scene(plain_worker()) as scene:
            await collect(scene.router, a_request())
            assert told(scene) == [(Outcome.OK, None)]

    async def test_an_ending_in_error_is_passed_on_and_is_no_success(self, autojump_clock):
        async def script(call, request):
            await call.send(chunk(7))
            await call.send(complete("error"))

        async with open_scene(plain_worker(script)) as scene:
            assert await collect(scene.router, a_request()) == [7]
            assert told(scene) == [(Outcome.FAILED, "worker_stream_failed")]
            assert scene.recorder.records[0].finish_reason == "error"

    async def test_a_worker_that_aborts_by_itself_ended_the_stream_well(self, autojump_clock):
        async def script(call, request):
            await call.send(chunk(7))
            await call.send(complete("abort"))

        async with open_scene(plain_worker(script)) as scene:
            await collect(scene.router, a_request())
            assert told(scene) == [(Outcome.OK, None)]

    async def test_a_status_in_mid_stream(self, autojump_clock):
        async def script(call, request):
            await call.send(chunk(7))
            raise GRPCError(Status.UNAVAILABLE, "Cancelling all calls")

        async with open_scene(plain_worker(script)) as scene:
            with pytest.raises(WorkerRejected, match="Cancelling"):
                await collect(scene.router, a_request())
            assert told(scene) == [(Outcome.FAILED, "worker_stream_failed")]

    async def test_a_block_that_is_left_early_is_a_client_that_left(self, autojump_clock):
        async with open_scene(plain_worker()) as scene:
            async with scene.router.generate(a_request()) as stream:
                await anext(stream)
            assert told(scene) == [(Outcome.CLIENT_LEFT, None)]

    async def test_a_bug_in_the_callers_block(self, autojump_clock):
        async with open_scene(plain_worker()) as scene:
            with pytest.raises(ZeroDivisionError):
                await _raise_inside(scene, ZeroDivisionError())
            assert told(scene) == [(Outcome.FAILED, "internal_error")]

    async def test_an_error_of_the_family_in_the_callers_block(self, autojump_clock):
        async with open_scene(plain_worker()) as scene:
            with pytest.raises(WorkerUnavailable):
                await _raise_inside(scene, WorkerUnavailable("later", code="mine"))
            assert told(scene) == [(Outcome.FAILED, "mine")]

    async def test_what_goes_wrong_after_a_good_end_counts(self, autojump_clock):
        """The worker was done; the client did not get it."""
        async with open_scene(plain_worker()) as scene:
            with pytest.raises(WorkerUnavailable):
                await _raise_after(scene, WorkerUnavailable("later"))
            assert told(scene) == [(Outcome.FAILED, "no_available_workers")]

    async def test_nobody_to_try_is_no_attempt(self, autojump_clock):
        worker = plain_worker()
        async with open_scene(worker) as scene:
            worker.healthy = False
            await trio.sleep(60)
            with pytest.raises(WorkerUnavailable):
                await collect(scene.router, a_request())
            assert told(scene) == [(Outcome.FAILED, "no_available_workers")]
            assert scene.recorder.records[0].attempts == 0

    async def test_cached_tokens_are_those_of_the_worker_that_computed_the_prompt(self, autojump_clock):
        async def prefill(call, request):
            await call.send(complete(kv_transfer_params_json=handoff_params(), cached_tokens=16))

        async def decode(call, request):
            if request.sampling_params.max_tokens == 0:
                await answer(call, request)
            await call.send(chunk(7))
            # What came by transfer is cached, to a decode worker.
            await call.send(complete(cached_tokens=32))

        async with open_scene(prefill_worker(prefill), decode_worker(decode)) as scene:
            await collect(scene.router, a_request())
            await collect(scene.router, a_request(n=1))
            assert [record.cached_tokens for record in scene.recorder.records] == [16, 16]
        async with open_scene(plain_worker(decode)) as scene:
            await collect(scene.router, a_request())
            assert [record.cached_tokens for record in scene.recorder.records] == [32]


async def _raise_inside(scene: Scene, error: Exception) -> None:
    async with scene.router.generate(a_request()):
        raise error


async def _raise_after(scene: Scene, error: Exception) -> None:
    async with scene.router.generate(a_request()) as stream:
        async for _ in stream:
            pass
        raise error


async def _dawdle_after(scene: Scene) -> None:
    async with scene.router.generate(a_request(), timeout=1.0) as stream:
        async for _ in stream:
            pass
        await trio.sleep(5)


class TestDeadlines:
    @pytest.mark.parametrize("timeout", [0.0, -5.0])
    async def test_one_whose_time_was_up_before_it_came_costs_no_worker_anything(self, autojump_clock, timeout):
        prefill = prefill_worker()
        async with open_scene(prefill, decode_worker()) as scene:
            with pytest.raises(RequestTimeout):
                async with scene.router.generate(a_request(), timeout=timeout):
                    pass
            await trio.sleep(1)
            assert prefill.requests == []
            assert told(scene) == [(Outcome.TIMEOUT, "request_timeout")]
            assert scene.leaks() == []

    async def test_the_routers_own_limit_counts_whatever_the_client_asks(self, autojump_clock):
        async with open_scene(plain_worker(drip), router=RouterSettings(request_timeout=2.0)) as scene:
            began = trio.current_time()
            with pytest.raises(RequestTimeout):
                await collect(scene.router, a_request())
            assert trio.current_time() - began == pytest.approx(2.0)

    async def test_a_deadline_that_two_scopes_keep_is_a_timeout_whichever_notices_first(self, autojump_clock):
        """A front's scope around the request has the same deadline, but for rounding."""
        async with open_scene(plain_worker(drip)) as scene:
            for early in (0.0, 1e-9):
                with trio.move_on_after(1.0 - early):
                    async with scene.router.generate(a_request(), timeout=1.0) as stream:
                        async for _ in stream:
                            pass
            assert told(scene) == [(Outcome.TIMEOUT, "request_timeout")] * 2

    async def test_leaving_before_it_is_not_one(self, autojump_clock):
        async with open_scene(plain_worker(drip)) as scene:
            with trio.move_on_after(0.9):
                async with scene.router.generate(a_request(), timeout=1.0) as stream:
                    async for _ in stream:
                        pass
            assert told(scene) == [(Outcome.CLIENT_LEFT, None)]

    async def test_it_bounds_what_the_caller_does_after_the_stream_too(self, autojump_clock):
        async with open_scene(plain_worker()) as scene:
            with pytest.raises(RequestTimeout):
                await _dawdle_after(scene)
            assert told(scene) == [(Outcome.TIMEOUT, "request_timeout")]

    async def test_it_bounds_the_pauses_between_attempts(self, autojump_clock):
        async def refuse(call, request):
            raise GRPCError(Status.INTERNAL, "broken")

        retry = RetrySettings(attempts=100, initial_backoff=10.0)
        async with open_scene(plain_worker(refuse), router=RouterSettings(retry=retry)) as scene:
            with pytest.raises(RequestTimeout):
                async with scene.router.generate(a_request(), timeout=25.0):
                    pass
            assert scene.recorder.records[0].attempts == 2


async def aborted(run: Callable[[], Awaitable[object]]) -> None:
    with pytest.raises(RequestAborted):
        await run()


class TestAborts:
    async def test_while_streaming_the_worker_is_asked_and_the_record_says_so(self, autojump_clock):
        script = Abortable()
        worker = plain_worker(script, on_abort=script.on_abort)
        async with open_scene(worker) as scene, trio.open_nursery() as nursery:
            nursery.start_soon(collect, scene.router, a_request("mine"))
            await until(lambda: len(worker.requests) == 1)
            await trio.sleep(0.01)
            assert await scene.router.abort(["mine", "other"]) == 1
            assert worker.aborted == [worker.requests[0].request_id]
            await until(lambda: scene.router.in_flight == 0)
            assert told(scene) == [(Outcome.ABORTED, "request_aborted")]

    @pytest.mark.parametrize("how", ["refused", "never answered"])
    async def test_i11_a_worker_that_cannot_be_told_keeps_no_request_alive(self, autojump_clock, how):
        async def refuse():
            raise GRPCError(Status.INTERNAL, "no")

        worker = plain_worker(drip, on_abort=refuse if how == "refused" else trio.sleep_forever)
        async with open_scene(worker) as scene, trio.open_nursery() as nursery:
            nursery.start_soon(aborted, lambda: collect(scene.router, a_request("mine")))
            await until(lambda: len(worker.requests) == 1)
            await trio.sleep(0.01)
            began = trio.current_time()
            assert await scene.router.abort(["mine"]) == 1
            await until(lambda: scene.router.in_flight == 0)
            assert trio.current_time() - began < 11
            assert told(scene) == [(Outcome.ABORTED, "request_aborted")]
            assert scene.leaks() == []

    async def test_case_g5_many_at_once_are_one_call_for_each_worker_side_by_side(self, autojump_clock):
        workers = [plain_worker(drip, name=name, on_abort=trio.sleep_forever) for name in ("one", "two")]
        async with open_scene(*workers) as scene, trio.open_nursery() as nursery:
            names = [f"r{number}" for number in range(6)]
            for name in names:
                nursery.start_soon(aborted, lambda name=name: collect(scene.router, a_request(name)))
            await until(lambda: sum(len(worker.requests) for worker in workers) == 6)
            await trio.sleep(0.01)
            began = trio.current_time()
            assert await scene.router.abort(names) == 6
            assert trio.current_time() - began == pytest.approx(10.0)
            assert [len(worker.aborted) for worker in workers] == [3, 3]

    async def test_a_pause_between_attempts_is_ended_too(self, autojump_clock):
        async def refuse(call, request):
            raise GRPCError(Status.INTERNAL, "broken")

        retry = RetrySettings(initial_backoff=100.0, max_backoff=100.0)
        async with open_scene(plain_worker(refuse), router=RouterSettings(retry=retry)) as scene:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(aborted, lambda: collect(scene.router, a_request("mine")))
                await trio.sleep(1)
                began = trio.current_time()
                await scene.router.abort(["mine"])
            assert trio.current_time() == began

    async def test_two_requests_of_one_id_are_both_ended(self, autojump_clock):
        async def never(call, request):
            await trio.sleep_forever()

        async with open_scene(plain_worker(never)) as scene, trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(aborted, lambda: collect(scene.router, a_request("mine")))
            await trio.sleep(0.1)
            assert await scene.router.abort(["mine"]) == 2


async def test_the_first_of_two_reasons_counts(autojump_clock):
    async def never(call, request):
        await trio.sleep_forever()

    async with open_scene(plain_worker(never)) as scene, trio.open_nursery() as nursery:
        nursery.start_soon(shut_out, lambda: collect(scene.router, a_request("mine")))
        await trio.sleep(0.1)
        scene.router.shut_down()
        await scene.router.abort(["mine"])


async def test_of_the_routers_reason_and_a_leaving_at_one_moment_the_first_counts(autojump_clock):
    async def never(call, request):
        await trio.sleep_forever()

    async with open_scene(plain_worker(never)) as scene, trio.open_nursery() as nursery:
        nursery.start_soon(collect, scene.router, a_request())
        await trio.sleep(0.1)
        scene.router.shut_down()
        nursery.cancel_scope.cancel()
    assert told(scene) == [(Outcome.FAILED, "shutting_down")]


async def shut_out(run: Callable[[], Awaitable[object]]) -> None:
    with pytest.raises(WorkerUnavailable, match="shutting down") as caught:
        await run()
    assert caught.value.error_code == "shutting_down"
    assert caught.value.http_status == 503


class TestLeavingTheRouter:
    @pytest.mark.parametrize("cancelled", [False, True], ids=["left", "cancelled"])
    async def test_i8_requests_of_other_tasks_are_ended_with_a_reason(self, autojump_clock, cancelled):
        decode = decode_worker(drip)
        async with trio.open_nursery() as others:
            with trio.CancelScope() as scope:
                async with open_scene(prefill_worker(), decode, nursery=others) as scene:
                    others.start_soon(shut_out, lambda: collect(scene.router, a_request()))
                    await until(lambda: len(decode.requests) == 1)
                    await trio.sleep(0.5)
                    began = trio.current_time()
                    if cancelled:
                        scope.cancel()
                        await trio.sleep_forever()
            assert trio.current_time() == began
            assert told(scene) == [(Outcome.FAILED, "shutting_down")]
            assert scene.leaks() == []
            await trio.sleep(0.01)
            assert len(decode.ended) == 1
            others.cancel_scope.cancel()

    async def test_i3_a_prefill_under_way_still_finds_its_owner(self, autojump_clock):
        async def slow(call, request):
            await trio.sleep(2)
            await call.send(complete(kv_transfer_params_json=handoff_params()))

        prefill, decode = prefill_worker(slow), decode_worker()
        async with trio.open_nursery() as others:
            async with open_scene(prefill, decode, nursery=others) as scene:
                others.start_soon(shut_out, lambda: collect(scene.router, a_request()))
                await until(lambda: len(prefill.requests) == 1)
            assert len(prefill.aborted) == 1
            assert scene.recorder.handoffs == ["released"]
            assert scene.leaks() == []
            others.cancel_scope.cancel()

    async def test_nothing_new_is_taken_afterwards(self, autojump_clock):
        async with open_scene(plain_worker()) as scene:
            pass
        await shut_out(lambda: collect(scene.router, a_request()))
        assert scene.recorder.records == []

    async def test_i11_a_task_that_does_not_let_go_is_not_waited_for_for_ever(self, autojump_clock):
        async def stubborn(scene: Scene) -> None:
            async with scene.router.generate(a_request()):
                # What is tried: a caller who does not let go.
                with trio.CancelScope(shield=True, deadline=trio.current_time() + 1000):
                    await trio.sleep_forever()

        async with trio.open_nursery() as others:
            async with open_scene(plain_worker(drip), nursery=others) as scene:
                others.start_soon(stubborn, scene)
                await until(lambda: scene.router.in_flight == 1)
                await trio.sleep(0.1)
                began = trio.current_time()
            assert trio.current_time() - began == pytest.approx(5.0)
            await trio.sleep(2000)
            assert scene.leaks() == []
            others.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (RouterSettings(retry=RetrySettings(attempts=0)), "attempts"),
        (RouterSettings(handoff=HandoffSettings(fresh_fraction=1.0)), "fresh_fraction"),
        (RouterSettings(handoff=HandoffSettings(fresh_fraction=-0.1)), "fresh_fraction"),
    ],
)
async def test_settings_that_cannot_work_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        async with open_scene(plain_worker(), router=settings):
            pass
