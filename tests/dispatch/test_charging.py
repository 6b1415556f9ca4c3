"""Who is charged with what (cases D2, D3, D4): refusals and back-pressure are no faults, and a worker that keeps
failing is left alone, until it is well again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest
import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from trio_router.dispatch.retry import RetrySettings
from trio_router.dispatch.router import RouterSettings
from trio_router.engine.model import load_model
from trio_router.errors import DecodeFailed, RouterError, WorkerBusy, WorkerRejected, WorkerUnavailable
from trio_router.fleet.registry import ProbeSettings
from trio_router.front.app import HttpFront
from trio_router.policy.breaker import BreakerSettings, BreakerState
from trio_router.testing import collect
from trio_router.testing.scripted import (
    Scene,
    ScriptedWorker,
    a_request,
    answer,
    chunk,
    complete,
    decode_worker,
    hand_over,
    open_scene,
    plain_worker,
    prefill_worker,
)

THRESHOLD = 5
BREAKER = BreakerSettings(failures=THRESHOLD, first_pause=60.0, pause=60.0, successes=2)
ONCE = RouterSettings(retry=RetrySettings(attempts=1), breaker=BREAKER)
SETTINGS = RouterSettings(breaker=BREAKER)


def refuse(status: Status):
    async def script(call, request):
        raise GRPCError(status, "the request queue is full" if status is Status.UNAVAILABLE else "no")

    return script


def breaks_after(*frames: bytes, how: str):
    """Accepts, says something, and fails."""

    async def script(call, request):
        for frame in frames:
            await call.send(frame)
        if how == "status":
            raise GRPCError(Status.INTERNAL, "")
        if how == "garbage":
            await call.send(b"\x0a\xff\xff\xff\xff\x0f")
        if how == "finish reason":
            await call.send(complete("error"))

    return script


def state_of(scene: Scene, worker: ScriptedWorker) -> BreakerState:
    [known] = [each for each in scene.router.registry.workers if each.spec == worker.spec]
    return known.breaker.state(trio.current_time())


async def ask(scene: Scene, times: int) -> list[RouterError]:
    errors = []
    for _ in range(times):
        try:
            await collect(scene.router, a_request())
        except RouterError as error:
            errors.append(error)
    return errors


async def ask_all_at_once(scene: Scene, times: int) -> list[RouterError]:
    errors: list[RouterError] = []

    async def one() -> None:
        errors.extend(await ask(scene, 1))

    async with trio.open_nursery() as nursery:
        for _ in range(times):
            nursery.start_soon(one)
    return errors


async def test_case_d2_fifty_refusals_that_are_the_requests_fault_leave_the_breaker_closed(autojump_clock):
    for status in (Status.INVALID_ARGUMENT, Status.NOT_FOUND, Status.FAILED_PRECONDITION):
        worker = plain_worker(refuse(status))
        async with open_scene(worker, router=SETTINGS) as scene:
            errors = await ask(scene, 50)
            assert [(type(error), error.status) for error in errors] == [(WorkerRejected, status)] * 50
            assert len(worker.requests) == 50
            assert state_of(scene, worker) is BreakerState.CLOSED
            assert scene.recorder.breakers == []


class TestBackPressure:
    """D3: a worker without room is well."""

    async def test_case_d3_one_busy_worker_of_two_costs_no_request_anything(self, autojump_clock):
        busy, free = plain_worker(refuse(Status.UNAVAILABLE), name="busy"), plain_worker(name="free")
        async with open_scene(busy, free, router=SETTINGS) as scene:
            begin = trio.current_time()
            assert await ask(scene, 40) == []
            assert trio.current_time() == begin, "back-pressure must not make anybody wait"
            assert len(free.requests) == 40
            assert state_of(scene, busy) is BreakerState.CLOSED
            assert {record.outcome.value for record in scene.recorder.records} == {"ok"}

    @pytest.mark.parametrize("status", [Status.UNAVAILABLE, Status.RESOURCE_EXHAUSTED])
    @pytest.mark.parametrize("leg", ["regular", "prefill", "decode"])
    async def test_case_d3_busy_a_hundred_times_and_then_free_serves_at_once(self, autojump_clock, leg, status):
        left = [100]

        def busy_first(well):
            async def script(call, request):
                if request.sampling_params.max_tokens != 0 and left[0]:
                    left[0] -= 1
                    raise GRPCError(status, "the request queue is full")
                await well(call, request)

            return script

        if leg == "regular":
            workers = [plain_worker(busy_first(answer))]
        else:
            prefill, decode = prefill_worker(), decode_worker()
            chosen = prefill if leg == "prefill" else decode
            chosen.script = busy_first(chosen.script)
            workers = [prefill, decode]
        async with open_scene(*workers, router=SETTINGS) as scene:
            begin = trio.current_time()
            errors = await ask(scene, 100)
            assert [type(error) for error in errors] == [WorkerBusy] * 100
            assert {error.status for error in errors} == {status}
            assert {error.retry_after for error in errors} == {1.0}
            assert {error.error_code for error in errors} == {"worker_overload_protection_shed"}
            assert await collect(scene.router, a_request()) == [7, 8]
            assert trio.current_time() == begin
            assert all(state_of(scene, worker) is BreakerState.CLOSED for worker in workers)
            await trio.sleep(5)
            assert scene.leaks() == []

    async def test_case_d3_all_busy_is_said_at_once_and_each_was_asked_once(self, autojump_clock):
        workers = [plain_worker(refuse(Status.UNAVAILABLE), name=f"w{number}") for number in range(5)]
        async with open_scene(*workers, router=SETTINGS) as scene:
            begin = trio.current_time()
            [error] = await ask(scene, 1)
            assert trio.current_time() == begin
            assert error.retry_after == 1.0
            assert [len(worker.requests) for worker in workers] == [1] * 5

    async def test_case_d3_busy_beside_one_whose_breaker_opens_is_still_told_when_to_come_back(self, autojump_clock):
        """The one left had room in its queue and failed once too often: nobody is left to ask but the busy one."""
        busy, bad = (
            plain_worker(refuse(Status.UNAVAILABLE), name="busy"),
            plain_worker(refuse(Status.INTERNAL), name="bad"),
        )
        settings = RouterSettings(breaker=BreakerSettings(failures=1))
        async with open_scene(busy, bad, router=settings) as scene:
            for _ in range(3):
                [error] = await ask(scene, 1)
                assert error.retry_after is not None, error
                assert state_of(scene, busy) is BreakerState.CLOSED

    async def test_case_d3_those_that_were_busy_before_a_pause_may_have_room_after_it(self, autojump_clock):
        async def busy_once(call, request):
            busy.script = answer
            raise GRPCError(Status.UNAVAILABLE, "the request queue is full")

        busy, bad = plain_worker(busy_once, name="busy"), plain_worker(refuse(Status.INTERNAL), name="bad")
        async with open_scene(busy, bad) as scene:
            assert await ask(scene, 1) == []
            assert [len(worker.requests) for worker in (busy, bad)] == [2, 1]

    async def test_case_d3_who_goes_away_in_between_leaves_a_time_to_come_back_all_the_same(self, autojump_clock):
        """The second decode worker's breaker opens while a busy prefill worker is being asked for it."""

        async def hand_over_once(call, request):
            prefills.append(request)
            if len(prefills) == 1:
                await hand_over(call, request)
            else:
                for worker in scene.router.registry.workers:
                    if worker.name == "d2:1":
                        for _ in range(THRESHOLD):
                            worker.breaker.failed(trio.current_time())
                raise GRPCError(Status.UNAVAILABLE, "the request queue is full")

        prefills = []
        workers = [prefill_worker(hand_over_once, name=name) for name in ("p1", "p2")]
        workers += [decode_worker(refuse(Status.UNAVAILABLE), name="d1"), decode_worker(name="d2")]
        async with open_scene(*workers, router=SETTINGS) as scene:
            [error] = await ask(scene, 1)
            assert type(error) is WorkerUnavailable
            assert error.retry_after == 1.0

    @pytest.mark.parametrize(("status", "http"), [(Status.UNAVAILABLE, 503), (Status.RESOURCE_EXHAUSTED, 429)])
    @pytest.mark.parametrize("leg", ["prefill", "decode"])
    async def test_case_d3_over_http_all_busy_is_a_status_with_retry_after_at_once(
        self, autojump_clock, leg, status, http
    ):
        prefill, decode = prefill_worker(model="tiny-english"), decode_worker(model="tiny-english")
        (prefill if leg == "prefill" else decode).script = refuse(status)
        async with open_scene(prefill, decode, router=SETTINGS) as scene, http_front(scene) as address:
            for stream in (False, True):
                begin = trio.current_time()
                head, body = await post_chat(scene, address, stream=stream)
                assert trio.current_time() == begin
                assert head[0].split()[1] == str(http)
                assert "retry-after: 1" in head
                assert body["error"]["code"] == "worker_overload_protection_shed"
            for worker in (prefill, decode):
                assert state_of(scene, worker) is BreakerState.CLOSED


class FixedText:
    ready = True

    def __init__(self) -> None:
        self.tokenizer = load_model().tokenizer

    async def get(self, model: str):
        return self.tokenizer


@asynccontextmanager
async def http_front(scene: Scene) -> AsyncIterator[str]:
    async with trio.open_nursery() as nursery:
        listener = scene.network.listen("http:1")
        await nursery.start(HttpFront(scene.router, FixedText()).serve, listener)
        yield listener.address
        nursery.cancel_scope.cancel()


async def post_chat(scene: Scene, address: str, *, stream: bool) -> tuple[list[str], dict]:
    message = {"role": "user", "content": "hello"}
    body = msgspec.json.encode({"model": "tiny-english", "messages": [message], "stream": stream})
    client = await scene.network.dial(address)
    client.send_nowait(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        + f"content-length: {len(body)}\r\n\r\n".encode()
        + body
    )
    received = b""
    while True:
        await client.wait_readable()
        piece = client.recv_nowait(65_536)
        if piece == b"":
            break
        received += piece or b""
    head, _, rest = received.partition(b"\r\n\r\n")
    return head.decode().lower().split("\r\n"), msgspec.json.decode(rest)


class TestFailing:
    """D4: a worker that accepts and then fails is remembered, however far it came."""

    @pytest.mark.parametrize("how", ["status", "end", "garbage", "finish reason"])
    @pytest.mark.parametrize("frames", [(), (chunk(),), (chunk(7),), (chunk(7), chunk(8))], ids=len)
    @pytest.mark.parametrize("settings", [ONCE, SETTINGS], ids=["no retries", "retries"])
    async def test_case_d4_it_is_tried_no_more_often_than_its_threshold(self, autojump_clock, frames, how, settings):
        bad, good = plain_worker(breaks_after(*frames, how=how), name="bad"), plain_worker(name="good")
        async with open_scene(bad, good, router=settings) as scene:
            await ask(scene, 30)
            assert len(bad.requests) == THRESHOLD
            assert state_of(scene, bad) is BreakerState.OPEN
            assert scene.recorder.breakers == [(bad.address, "open")]
            assert await ask(scene, 10) == []

    async def test_a_refusal_says_that_the_worker_is_well(self, autojump_clock):
        """It has looked at the request: its failures before that were not the last word."""
        worker = plain_worker(refuse(Status.INTERNAL))
        async with open_scene(worker, router=ONCE) as scene:
            for _ in range(3):
                worker.script = refuse(Status.INTERNAL)
                await ask(scene, THRESHOLD - 1)
                worker.script = refuse(Status.INVALID_ARGUMENT)
                await ask(scene, 1)
            assert state_of(scene, worker) is BreakerState.CLOSED
            assert len(worker.requests) == 3 * THRESHOLD

    async def test_case_d4_a_prefill_worker_that_fails_is_left_alone_and_its_decode_worker_is_not(self, autojump_clock):
        bad, good = prefill_worker(breaks_after(how="end"), name="bad"), prefill_worker(name="good")
        decode = decode_worker()
        async with open_scene(bad, good, decode, router=SETTINGS) as scene:
            assert await ask(scene, 60) == []
            assert len(bad.requests) == THRESHOLD
            assert state_of(scene, decode) is BreakerState.CLOSED

    async def test_streams_that_end_well_close_it_again(self, autojump_clock):
        bad, good = plain_worker(breaks_after(chunk(7), how="end"), name="bad"), plain_worker(name="good")
        async with open_scene(bad, good, router=ONCE) as scene:
            await ask(scene, 2 * THRESHOLD)
            bad.script = answer
            await trio.sleep(61)
            for state in (BreakerState.HALF_OPEN, BreakerState.CLOSED):
                assert await ask(scene, 2) == []
                assert state_of(scene, bad) is state
            assert [state for _, state in scene.recorder.breakers] == ["open", "closed"]

    async def test_half_open_it_is_opened_again_by_a_stream_that_breaks(self, autojump_clock):
        bad, good = plain_worker(breaks_after(chunk(7), how="end"), name="bad"), plain_worker(name="good")
        async with open_scene(bad, good, router=ONCE) as scene:
            await ask(scene, 2 * THRESHOLD)
            await trio.sleep(61)
            await ask(scene, 20)
            assert len(bad.requests) == THRESHOLD + 1

    async def test_d4_half_open_it_is_tried_by_few_at_a_time_while_there_are_others(self, autojump_clock):
        """One whose every leg takes seconds to fail would hold up half of what comes in them, at each new try."""

        async def fail_slowly(call, request):
            await trio.sleep(5)

        bad, good = plain_worker(fail_slowly, name="bad"), plain_worker(name="good")
        async with open_scene(bad, good, router=SETTINGS) as scene:
            await ask_all_at_once(scene, 2 * THRESHOLD)
            assert state_of(scene, bad) is BreakerState.OPEN
            tried = len(bad.requests)
            await trio.sleep(61)
            assert await ask_all_at_once(scene, 100) == []
            assert len(bad.requests) - tried == BREAKER.successes

    async def test_half_open_and_alone_it_takes_whatever_comes(self, autojump_clock):
        async def fail_slowly(call, request):
            await trio.sleep(5)

        worker = plain_worker(fail_slowly)
        async with open_scene(worker, router=ONCE) as scene:
            await ask_all_at_once(scene, THRESHOLD)
            await trio.sleep(61)
            worker.script = answer
            assert await ask_all_at_once(scene, 50) == []
            assert state_of(scene, worker) is BreakerState.CLOSED

    async def test_a_stream_that_goes_on_and_on_is_no_try_any_more(self, autojump_clock):
        async def begin(call, request):
            await call.send(chunk(7))
            await trio.sleep_forever()

        bad, good = plain_worker(breaks_after(how="end"), name="bad"), plain_worker(name="good")
        async with open_scene(bad, good, router=SETTINGS) as scene:
            await ask(scene, 2 * THRESHOLD)
            bad.script, tried = begin, len(bad.requests)
            await trio.sleep(61)
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(ask, scene, 1)
                    await trio.sleep(0.1)
                assert len(bad.requests) - tried == 10
                nursery.cancel_scope.cancel()

    async def test_a_client_that_leaves_its_stream_says_nothing_of_the_worker(self, autojump_clock):
        async def endless(call, request):
            while True:
                await call.send(chunk(7))
                await trio.sleep(0.1)

        worker = plain_worker(endless)
        async with open_scene(worker, router=ONCE) as scene:
            for _ in range(20):
                with trio.move_on_after(1):
                    await collect(scene.router, a_request())
            assert state_of(scene, worker) is BreakerState.CLOSED

    async def test_an_aborted_stream_is_no_fault(self, autojump_clock):
        worker = plain_worker(answer)

        async def aborted(call, request):
            await call.send(chunk(7))
            await call.send(complete("abort"))

        worker.script = aborted
        async with open_scene(worker, router=ONCE) as scene:
            await ask(scene, 20)
            assert len(worker.requests) == 20

    async def test_a_worker_that_was_away_and_is_back_begins_anew_and_that_is_told(self, autojump_clock):
        bad, good = plain_worker(breaks_after(how="end"), name="bad"), plain_worker(name="good")
        quick = RouterSettings(retry=RetrySettings(attempts=1), breaker=BREAKER, probe=ProbeSettings(interval=1.0))
        async with open_scene(bad, good, router=quick) as scene:
            await ask(scene, 2 * THRESHOLD)
            assert state_of(scene, bad) is BreakerState.OPEN
            bad.healthy = False
            await trio.sleep(5)
            bad.healthy, bad.script = True, answer
            await trio.sleep(5)
            assert await ask(scene, 2) == []
            assert len(bad.requests) == THRESHOLD + 1
            assert [state for _, state in scene.recorder.breakers] == ["open", "closed"]


async def test_a_failure_in_mid_stream_is_told_to_its_client(autojump_clock):
    worker = plain_worker(breaks_after(chunk(7), how="end"))
    async with open_scene(worker, router=ONCE) as scene:
        with pytest.raises(DecodeFailed):
            await collect(scene.router, a_request())
        with suppress(RouterError):
            await collect(scene.router, a_request())
        assert [record.outcome.value for record in scene.recorder.records] == ["failed", "failed"]
