"""Every rule about handoffs and retries, broken on purpose (I3, I5, I6, I10): something here must see it.

A scene returns complaints: none with the code as it is, and at least one with the rule taken out. Rules that the life
of a handoff or a cancel at every step show have their broken copies beside those searches.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
import trio
import trio.testing
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from trio_router.dispatch import attempt, attempts, decode, failures, legs, prefill
from trio_router.dispatch.attempt import Attempt
from trio_router.dispatch.connectors import Plan, plan_legs
from trio_router.dispatch.decode import DecodeLeg
from trio_router.dispatch.failures import Verdict
from trio_router.dispatch.handoff import Handoff, HandoffState
from trio_router.dispatch.janitor import Janitor
from trio_router.dispatch.kvparams import KvParams
from trio_router.dispatch.retry import RetrySettings
from trio_router.dispatch.router import RouterSettings
from trio_router.engine.settings import Faults
from trio_router.errors import RouterError
from trio_router.fleet.registry import Registry
from trio_router.fleet.worker import Worker, WorkerRole
from trio_router.http2.frames import ErrorCode
from trio_router.policy.breaker import BreakerSettings, BreakerState
from trio_router.policy.retry_budget import RetryBudget
from trio_router.testing import collect, open_cluster
from trio_router.testing.scripted import (
    a_request,
    answer,
    chunk,
    complete,
    decode_worker,
    hand_over,
    handoff_params,
    open_scene,
    plain_worker,
    prefill_worker,
)

Scene = Callable[[], Awaitable[list[str]]]


def complaints(**wrong: bool) -> list[str]:
    return [what.replace("_", " ") for what, is_so in wrong.items() if is_so]


async def try_to(scene, times: int = 1, **request: Any) -> list[RouterError]:
    errors = []
    for _ in range(times):
        try:
            await collect(scene.router, a_request(**request))
        except RouterError as error:
            errors.append(error)
    return errors


# Scenes


async def a_cold_pair_refused(connector: str = "nixl") -> list[str]:
    """A decode worker refuses that has never met the prefill worker."""
    async with open_cluster(connector=connector) as cluster:
        core = cluster.decode[0].engine.core
        core.settings = replace(core.settings, max_context_length=4)
        with suppress(RouterError):
            await collect(cluster.router, cluster.request())
        await trio.sleep(1)
        return cluster.leaks() + complaints(it_is_not_told=len(cluster.recorder.handoffs) != 1)


async def a_cold_pair_left_between_its_legs() -> list[str]:
    """Nothing has been sent to the decode worker: all that it hears of the handoff is what a release says."""
    async with open_cluster() as cluster:
        [known] = [each for each in cluster.router.registry.workers if each.spec.role is WorkerRole.DECODE]
        known.client.connect = trio.sleep_forever
        with trio.move_on_after(1):
            await collect(cluster.router, cluster.request())
        await trio.sleep(2)
        return cluster.leaks() + complaints(not_released=cluster.recorder.handoffs != ["released"])


async def a_warm_pair_refused() -> list[str]:
    """One that has met it has told it already: another notice is one too many."""
    async with open_cluster() as cluster:
        await collect(cluster.router, cluster.request())
        core = cluster.decode[0].engine.core
        core.settings = replace(core.settings, max_context_length=4)
        with suppress(RouterError):
            await collect(cluster.router, cluster.request("What is there to say about the hills and the rain?"))
        await trio.sleep(1)
        return cluster.leaks() + complaints(
            notices_to_nobody=cluster.prefill[0].counters.stray_notices > 0,
            it_is_not_told=cluster.recorder.handoffs != ["consumed", "released"],
        )


async def a_leg_that_may_have_pulled() -> list[str]:
    """It broke off or failed without a token: its handoff is left alone."""
    wrong = []
    for how in ("reset", "error", "nothing"):

        async def script(call, request, how=how):
            if request.sampling_params.max_tokens == 0:
                await answer(call, request)
            if how == "reset":
                call._link.connection.reset(call._stream, ErrorCode.INTERNAL_ERROR)
                call._link.flush()
                await trio.sleep_forever()
            if how == "error":
                await call.send(complete("error"))

        worker = decode_worker(script)
        once = RouterSettings(retry=RetrySettings(attempts=1))
        async with open_scene(prefill_worker(), worker, router=once) as scene:
            await try_to(scene)
            await trio.sleep(5)
            wrong += complaints(released_all_the_same=bool(worker.releases))
            wrong += complaints(not_lapsed=scene.recorder.handoffs != ["lapsed"])
    return wrong


async def a_restarted_decode_worker() -> list[str]:
    """Who broke off may be another process next, which has met nobody."""
    calls = []

    async def script(call, request):
        if request.sampling_params.max_tokens != 0:
            calls.append(request)
            if len(calls) == 2:
                call._link.connection.reset(call._stream, ErrorCode.INTERNAL_ERROR)
                call._link.flush()
                await trio.sleep_forever()
            if len(calls) == 3:
                raise GRPCError(Status.INVALID_ARGUMENT, "no")
        await answer(call, request)

    worker = decode_worker(script)
    once = RouterSettings(retry=RetrySettings(attempts=1))
    async with open_scene(prefill_worker(), worker, router=once) as scene:
        await try_to(scene, 3)
        await trio.sleep(5)
        return complaints(the_stranger_was_not_told_twice=len(worker.releases) != 2)


async def slots_while_prefilling() -> list[str]:
    """The decode slot is held before prefill begins."""
    held: list[int] = []

    async def script(call, request):
        held.append(sum(worker.in_flight for worker in scene.router.registry.workers))
        await hand_over(call, request)

    async with open_scene(prefill_worker(script), decode_worker()) as scene:
        await try_to(scene)
        return complaints(one_slot_only=held != [2])


async def retries_with_mooncake() -> list[str]:
    async def script(call, request):
        if request.sampling_params.max_tokens == 0:
            await answer(call, request)
        await call.send(complete("error"))

    workers = [prefill_worker(connector="MooncakeConnector"), decode_worker(script)]
    async with open_scene(*workers) as scene:
        await try_to(scene)
        params = [json.loads(each.kv_transfer_params_json) for each in workers[1].requests]
        transfers = [each["transfer_id"] for each in params]
        ids = [each.request_id for each in workers[1].requests]
        return complaints(
            a_transfer_twice=len(set(transfers)) < len(transfers),
            an_attempt_twice=len(set(ids)) < len(ids),
            no_retries=len(ids) < 3,
        )


async def a_handoff_that_kills() -> list[str]:
    bad = complete(kv_transfer_params_json=handoff_params(remote_block_ids=[1, 2]))

    async def script(call, request):
        await call.send(bad)

    worker = decode_worker()
    async with open_scene(prefill_worker(script), worker) as scene:
        errors = await try_to(scene)
        await trio.sleep(5)
        return complaints(
            it_reached_an_engine=any(each.kv_transfer_params_json for each in worker.requests),
            not_told=not scene.recorder.handoffs or set(scene.recorder.handoffs) != {"invalid"},
            no_error=not errors,
        )


async def a_handoff_that_is_none() -> list[str]:
    wrong = []
    for text in ("{}", '{"do_remote_prefill": false}'):

        async def script(call, request, text=text):
            await call.send(complete(kv_transfer_params_json=text))

        worker = decode_worker()
        async with open_scene(prefill_worker(script), worker) as scene:
            await try_to(scene)
            wrong += complaints(it_reached_an_engine=any(e.kv_transfer_params_json for e in worker.requests))
            wrong += complaints(not_counted=not scene.recorder.missing)
    return wrong


async def a_push_that_ended_by_a_stop() -> list[str]:
    async def script(call, request):
        await call.send(complete("stop"))

    worker = decode_worker()
    async with open_scene(prefill_worker(script, connector="MooncakeConnector"), worker) as scene:
        await try_to(scene)
        return complaints(decode_waits_for_nothing=any(each.kv_transfer_params_json for each in worker.requests))


async def clients_who_bring_params() -> list[str]:
    """What a client made up reaches no engine of a pair."""
    request = a_request(n=2)
    request.kv_transfer_params_json = '{"do_remote_prefill": true}'

    async def two(call, request):
        for index in range(2):
            await call.send(complete(index=index))

    worker = decode_worker(two)
    async with open_scene(prefill_worker(), worker) as scene:
        await collect(scene.router, request)
        return complaints(they_reached_one=any(each.kv_transfer_params_json for each in worker.requests))


async def several_samples() -> list[str]:
    async def two(call, request):
        for index in range(request.sampling_params.n):
            await call.send(complete(index=index))

    first, worker = prefill_worker(), decode_worker(two)
    async with open_scene(first, worker) as scene:
        await try_to(scene, n=2)
        return complaints(
            a_handoff_is_shared=any(each.kv_transfer_params_json for each in worker.requests),
            prefill_ran=bool(first.requests),
        )


async def refusals() -> list[str]:
    async def script(call, request):
        raise GRPCError(Status.INVALID_ARGUMENT, "no")

    worker = plain_worker(script)
    async with open_scene(worker, router=RouterSettings(breaker=BreakerSettings(failures=5))) as scene:
        await try_to(scene, 20)
        return complaints(
            tried_again=len(worker.requests) != 20,
            charged=scene.router.registry.workers[0].breaker.state(trio.current_time()) is not BreakerState.CLOSED,
        )


async def back_pressure() -> list[str]:
    async def script(call, request):
        raise GRPCError(Status.UNAVAILABLE, "the request queue is full")

    busy, free = plain_worker(script, name="busy"), plain_worker(name="free")
    async with open_scene(busy, free, router=RouterSettings(breaker=BreakerSettings(failures=5))) as scene:
        begin = trio.current_time()
        errors = await try_to(scene, 20)
        free.script = script
        errors += await try_to(scene)
        return complaints(
            waited=trio.current_time() > begin,
            failed=len(errors) != 1,
            without_a_time_to_come_back=any(error.retry_after is None for error in errors),
            charged=any(
                each.breaker.state(trio.current_time()) is not BreakerState.CLOSED
                for each in scene.router.registry.workers
            ),
        )


async def a_failure_in_an_ok_stream() -> list[str]:
    """A failed KV load: no token, finish reason `error`, status OK."""
    async with open_cluster(decode=2) as cluster:
        cluster.decode[0].faults = Faults(load_error_rate=1.0)
        answers = [await collect(cluster.router, cluster.request()) for _ in range(4)]
        return complaints(a_client_saw_it=not all(answers), no_retry=not cluster.recorder.failures)


async def a_stream_that_breaks() -> list[str]:
    """Nothing is tried again after the first byte."""

    async def script(call, request):
        await call.send(chunk(7))
        raise GRPCError(Status.INTERNAL, "")

    worker, other = plain_worker(script, name="bad"), plain_worker(name="good")
    async with open_scene(worker, other, router=RouterSettings(breaker=BreakerSettings(failures=5))) as scene:
        errors = await try_to(scene, 20)
        return complaints(
            tried_again=len(worker.requests) + len(other.requests) > 20,
            not_charged=len(worker.requests) > 5,
            not_told=len(errors) != len(worker.requests),
        )


async def a_fleet_that_always_fails() -> list[str]:
    async def script(call, request):
        return

    worker = plain_worker(script)
    retry = RetrySettings(attempts=5, budget_share=0.1, budget_floor=0.0)
    settings = RouterSettings(retry=retry, breaker=BreakerSettings(failures=10_000))
    async with open_scene(worker, router=settings) as scene:
        await try_to(scene, 100)
        return complaints(too_many_retries=len(worker.requests) > 100 + 10 + 10)


# Rules


@dataclass(frozen=True)
class Broken:
    """A rule, where it is in the code, and what stands there instead."""

    rule: str
    scene: Scene
    where: Any
    name: str
    instead: Any


async def never_ask_twice(self, messenger, handoff, view):
    return await self._send_release(messenger, handoff, view)


def always_release(self, exc):
    pass


def forget_nothing(self, exc):
    if failures.may_have_run(exc):
        self._end_handoff(HandoffState.LAPSED)
    elif self.handoff is not None and self._has_met(self.handoff):
        self._end_handoff(HandoffState.RELEASED)


def one_transfer_id(side, *, transfer_id):
    return plan_legs(side, transfer_id="xfer-always")


def whatever_the_reason(self, kv_params, *, finish_reason):
    return kv_params if self.relays else self.minted


def keep_the_clients(view, *, attempt_id, kv_params, address=None, rank=None, media=None):
    return legs.plain_leg(view, attempt_id=attempt_id, rank=rank)


def prefill_anyway(self, wanted):
    return self._take(WorkerRole.PREFILL, wanted)


real_init = Attempt.__init__


def late_slot(self, view, *, decode, **rest):
    real_init(self, view, decode=decode, **rest)
    decode.worker.in_flight -= 1  # as if it were taken when prefill has ended
    decode._held = False


def no_attempt_ids(view, *, attempt_id, **rest):
    return legs.decode_leg(view, attempt_id=view.client_id, **rest)


BROKEN = [
    Broken(
        "I3: a cold pair is told twice", a_cold_pair_left_between_its_legs, Janitor, "_release_through", never_ask_twice
    ),
    Broken(
        "I3: only a refusal by a warm worker has released it",
        a_cold_pair_refused,
        DecodeLeg,
        "_has_met",
        lambda self, handoff: True,
    ),
    Broken(
        "I3: a refusal by a warm worker has released it",
        a_warm_pair_refused,
        Worker,
        "has_met",
        lambda self, prefill_worker, *, engine_id: False,
    ),
    Broken(
        "I3: what may have been consumed is left alone", a_leg_that_may_have_pulled, DecodeLeg, "_judge", always_release
    ),
    Broken(
        "I3: each end is told",
        a_leg_that_may_have_pulled,
        Handoff,
        "end",
        lambda self, state: None,
    ),
    Broken("I3: who broke off has met nobody", a_restarted_decode_worker, DecodeLeg, "_judge", forget_nothing),
    Broken("I5: the decode slot is reserved first", slots_while_prefilling, Attempt, "__init__", late_slot),
    Broken("I5: a retry has a new transfer id", retries_with_mooncake, prefill, "plan_legs", one_transfer_id),
    Broken("I5: a retry has a new attempt id", retries_with_mooncake, attempt, "decode_leg", no_attempt_ids),
    Broken(
        "I6: malformed params reach no engine",
        a_handoff_that_kills,
        KvParams,
        "fault",
        lambda self, *, prompt_tokens, block_size=0: None,
    ),
    Broken(
        "I6: params that hand nothing over are no handoff",
        a_handoff_that_is_none,
        KvParams,
        "hand_over",
        property(bool),
    ),
    Broken("A push ends by its length", a_push_that_ended_by_a_stop, Plan, "handed_over", whatever_the_reason),
    Broken(
        "A pair's legs carry only the router's params",
        clients_who_bring_params,
        attempt,
        "decode_leg",
        keep_the_clients,
    ),
    Broken("Several samples share no handoff", several_samples, attempts.Attempts, "_reserve_prefill", prefill_anyway),
    Broken("I10: a refusal is not retried", refusals, attempts, "judge", lambda error: Verdict.FAILED),
    Broken(
        "I10: back-pressure is charged to nobody",
        back_pressure,
        attempts,
        "judge",
        lambda error: Verdict.FAILED,
    ),
    Broken(
        "I10: back-pressure goes elsewhere",
        back_pressure,
        Registry,
        "has_room_beside",
        lambda self, worker, *, busy, media=None: False,
    ),
    Broken(
        "I10: who is shed is told when to come back",
        back_pressure,
        attempts,
        "shed",
        lambda error, *, retry_after: error,
    ),
    Broken("I10: an OK stream may be a failure", a_failure_in_an_ok_stream, decode, "_failure_in", lambda frame: None),
    Broken(
        "I10: a stream that breaks is charged",
        a_stream_that_breaks,
        Attempt,
        "_note_stream",
        lambda self, well: None,
    ),
    Broken("I10: retries have a budget", a_fleet_that_always_fails, RetryBudget, "take", lambda self, now: True),
]
SCENES = list(dict.fromkeys(broken.scene for broken in BROKEN))


def run(scene: Scene) -> list[str]:
    return trio.run(scene, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_nothing_is_wrong_as_things_are(scene):
    assert run(scene) == []


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.rule)
def test_a_broken_rule_is_seen(monkeypatch, broken):
    monkeypatch.setattr(broken.where, broken.name, broken.instead)
    assert run(broken.scene) != []
