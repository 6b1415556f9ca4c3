"""Who takes a request, and how the router learns what its workers are."""

from __future__ import annotations

import pytest
import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from trio_router.dispatch.router import RouterSettings
from trio_router.errors import BadRequest, LinkError, ModelNotFound, WorkerRejected, WorkerUnavailable
from trio_router.fleet.client import WorkerFacts
from trio_router.fleet.registry import ProbeSettings, Registry
from trio_router.fleet.worker import Worker, WorkerRole, WorkerSpec
from trio_router.observe.hooks import Observer
from trio_router.policy.breaker import BreakerSettings, BreakerState
from trio_router.policy.round_robin import RoundRobin
from trio_router.protocol.messages import GetModelInfoResponse
from trio_router.testing import collect
from trio_router.testing.recorder import Recorder
from trio_router.testing.scripted import a_request, chunk, decode_worker, open_scene, prefill_worker

PREFILL, DECODE, PLAIN = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.PLAIN


def facts(model: str = "tiny", **fields) -> WorkerFacts:
    return WorkerFacts(model=model, model_info=GetModelInfoResponse(served_model_name=model), **fields)


class FakeClient:
    """Plays a worker: each probe takes the next of `answers`, facts or an error; the last one stays."""

    def __init__(self, *answers) -> None:
        self.answers = list(answers)
        self.asked_at: list[float] = []
        self.is_healthy = True

    async def facts(self) -> WorkerFacts:
        self.asked_at.append(trio.current_time())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def healthy(self) -> bool:
        return self.is_healthy


def worker(name: str, role: WorkerRole, model: str | None = "tiny", *, ready: bool = True, client=None) -> Worker:
    made = Worker(WorkerSpec(url=f"grpc://{name}:1", role=role), client=client)
    made.facts = None if model is None else facts(model)
    made.ready = ready
    return made


def registry_of(*workers: Worker, observer: Observer | None = None) -> Registry:
    return Registry(
        workers,
        policies={role: RoundRobin() for role in WorkerRole},
        observer=observer or Observer(),
        clock=lambda: 0.0,
    )


class TestTaking:
    def test_a_slot_is_reserved_with_the_choice(self):
        one, other = worker("one", PLAIN), worker("other", PLAIN)
        registry = registry_of(one, other)
        leases = [registry.take(PLAIN) for _ in range(3)]
        assert (one.in_flight, other.in_flight) == (2, 1)
        for lease in leases:
            lease.release()
        assert (one.in_flight, other.in_flight) == (0, 0)

    def test_one_that_is_not_ready_is_never_taken(self):
        one, other = worker("one", PLAIN), worker("other", PLAIN, ready=False)
        registry = registry_of(one, other)
        assert {registry.take(PLAIN).worker for _ in range(4)} == {one}

    def test_one_the_request_has_failed_on_is_taken_only_when_nobody_else_is_left(self):
        registry = registry_of(worker("one", PLAIN), worker("other", PLAIN))
        assert {registry.take(PLAIN, failed=["one:1"]).worker.name for _ in range(4)} == {"other:1"}
        assert registry.take(PLAIN, failed=["one:1", "other:1"]).worker.name in ("one:1", "other:1")

    def test_nobody_ready_names_the_role_and_who_is_registered(self):
        registry = registry_of(worker("p", PREFILL), worker("d", DECODE, ready=False))
        with pytest.raises(WorkerUnavailable, match=r"no decode worker is ready \(registered: d:1\)"):
            registry.take(DECODE)

    @pytest.mark.parametrize("wanted", ["b", None])
    def test_each_role_takes_turns_of_its_own(self, wanted):
        registry = registry_of(*(worker(f"{role.value}{i}", role, "b") for role in (PREFILL, DECODE) for i in range(2)))
        taken = [registry.take(role, model=wanted).worker.name for _ in range(2) for role in (PREFILL, DECODE)]
        assert taken == ["prefill0:1", "decode0:1", "prefill1:1", "decode1:1"]


class TestModels:
    def test_a_worker_of_the_named_model_is_taken(self):
        registry = registry_of(worker("a", PLAIN, "a"), worker("b", PLAIN, "b"))
        assert [registry.take(PLAIN, model=name).worker.name for name in "abba"] == ["a:1", "b:1", "b:1", "a:1"]

    def test_a_model_nobody_serves_is_not_found(self):
        registry = registry_of(worker("a", PLAIN, "a"))
        with pytest.raises(ModelNotFound, match=r"no regular worker serves model 'z'; served: a"):
            registry.take(PLAIN, model="z")

    def test_a_model_whose_workers_are_all_down_is_unavailable_and_not_unknown(self):
        """404 would tell a client to give up."""
        registry = registry_of(worker("a", PLAIN, "a"), worker("b", PLAIN, "b", ready=False))
        with pytest.raises(WorkerUnavailable, match="no regular worker that serves model 'b' is ready"):
            registry.take(PLAIN, model="b")

    def test_with_several_models_a_request_must_name_one(self):
        """Whichever were taken, its ids may be another model's."""
        registry = registry_of(worker("a", PLAIN, "a"), worker("b", PLAIN, "b", ready=False))
        with pytest.raises(BadRequest, match="several models are served here: a, b"):
            registry.take(PLAIN)

    def test_the_models_are_those_that_every_leg_has_a_worker_for(self):
        registry = registry_of(
            worker("p1", PREFILL, "a"),
            worker("p2", PREFILL, "b"),
            worker("d1", DECODE, "b", ready=False),
            worker("d2", DECODE, "c"),
            worker("d3", DECODE, "a"),
            worker("d4", DECODE, None),
        )
        assert registry.models() == ["a"]

    def test_workers_of_no_common_model_are_not_ready(self):
        registry = registry_of(worker("p", PREFILL, "a"), worker("d", DECODE, "b"))
        assert not registry.ready
        assert registry.models() == []

    async def test_the_legs_of_a_pair_serve_the_same_model(self, autojump_clock):
        workers = [make(name=f"{role}-{model}", model=model) for model in ("a", "b") for role, make in MAKERS.items()]
        async with open_scene(*workers) as scene:
            for model in ("a", "b", "b", "a"):
                async with scene.router.generate(a_request(), model=model) as stream:
                    async for _ in stream:
                        pass
            assert {(r.prefill_worker, r.decode_worker) for r in scene.recorder.records} == {
                ("prefill-a:1", "decode-a:1"),
                ("prefill-b:1", "decode-b:1"),
            }
            with pytest.raises(BadRequest):
                await collect(scene.router, a_request())
            assert scene.leaks() == []

    async def test_a_model_without_a_prefill_worker_returns_the_decode_slot(self, autojump_clock):
        workers = [prefill_worker(model="a"), decode_worker(model="a"), decode_worker(name="d2", model="b")]
        async with open_scene(*workers) as scene:
            with pytest.raises(ModelNotFound, match="no prefill worker serves model 'b'; served: a"):
                async with scene.router.generate(a_request(), model="b"):
                    pass
            assert scene.leaks() == []

    def test_stand_ins_are_ready_workers_of_the_same_role_and_model(self):
        chosen = worker("chosen", DECODE, "a")
        registry = registry_of(
            worker("p", PREFILL, "a"),
            chosen,
            worker("other", DECODE, "a"),
            worker("down", DECODE, "a", ready=False),
            worker("b", DECODE, "b"),
        )
        assert [each.name for each in registry.stand_ins(chosen)] == ["other:1"]


MAKERS = {"prefill": prefill_worker, "decode": decode_worker}
DOWN = GRPCError(Status.UNAVAILABLE, "no")


class Watched:
    """A registry whose one worker is being watched."""

    def __init__(self, *answers, role: WorkerRole = PLAIN, others: tuple[Worker, ...] = ()) -> None:
        self.client = FakeClient(*answers)
        self.worker = worker("w", role, None, ready=False, client=self.client)
        self.recorder = Recorder()
        self.registry = registry_of(self.worker, *others, observer=self.recorder)

    async def run(self, seconds: float, **settings) -> None:
        with trio.move_on_after(seconds):
            await self.registry.watch(self.worker, settings=ProbeSettings(**settings))


class TestWatching:
    async def test_the_first_good_probe_makes_a_worker_ready(self, autojump_clock):
        watched = Watched(DOWN, DOWN, facts("m"))
        await watched.run(5.0)
        assert watched.client.asked_at[:3] == pytest.approx([0.0, 0.25, 0.5])
        assert watched.registry.models() == ["m"]
        assert watched.recorder.readiness == [("w:1", True)]

    async def test_it_takes_several_bad_ones_in_a_row_to_lose_it(self, autojump_clock):
        watched = Watched(facts(), DOWN, DOWN, facts(), DOWN, LinkError("gone"), DOWN, facts())
        await watched.run(61.0)
        assert watched.recorder.readiness == [("w:1", True), ("w:1", False), ("w:1", True)]
        assert watched.client.asked_at[:8] == pytest.approx([0.0, 10.0, 10.25, 10.5, 20.5, 20.75, 21.0, 21.25])

    async def test_one_that_is_doubted_is_asked_at_once_and_no_more_often_for_it(self, autojump_clock):
        watched = Watched(facts())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watched.run, 25.0)
            await trio.sleep(3)
            for _ in range(5):
                watched.worker.doubt()
            await trio.sleep(2)
        assert watched.client.asked_at == pytest.approx([0.0, 3.0, 13.0, 23.0])

    async def test_another_engine_at_its_address_has_a_closed_breaker(self, autojump_clock):
        watched = Watched(facts(kv_engine_id="one"), facts(kv_engine_id="two"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watched.run, 15.0)
            await trio.sleep(1)
            for _ in range(BreakerSettings().failures):
                watched.registry.note_failure(watched.worker)
            assert watched.worker.breaker.state(0.0) is BreakerState.OPEN
            await trio.sleep(10)
            assert watched.worker.breaker.state(0.0) is BreakerState.CLOSED

    async def test_a_worker_that_flaps_between_two_probes_stays(self, autojump_clock):
        watched = Watched(facts(), *[DOWN, facts()] * 10)
        await watched.run(150.0)
        assert watched.recorder.readiness == [("w:1", True)]

    async def test_an_engine_that_calls_itself_unhealthy_counts_as_bad(self, autojump_clock):
        watched = Watched(facts())
        watched.client.is_healthy = False
        await watched.run(30.0)
        assert not watched.worker.ready
        assert watched.recorder.readiness == []

    async def test_what_it_serves_is_asked_anew_every_time(self, autojump_clock):
        watched = Watched(facts("old"), facts("new"))
        await watched.run(11.0)
        assert watched.registry.models() == ["new"]

    async def test_those_who_wait_are_told(self, autojump_clock):
        watched = Watched(DOWN, DOWN, facts())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watched.run, 5.0)
            with trio.fail_after(1):
                await watched.registry.wait_ready()
        assert watched.registry.ready

    async def test_why_a_worker_is_not_ready_is_said_once_until_it_is_well(self, autojump_clock, caplog):
        silent = GRPCError(Status.DEADLINE_EXCEEDED, "no answer")
        watched = Watched(DOWN, silent, DOWN, facts(), silent, DOWN)
        await watched.run(30.0)
        assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
            f"worker w:1: {DOWN.message}",
            "worker w:1: no answer",
        ]
        assert watched.worker.trouble == DOWN.message

    async def test_a_worker_may_say_itself_that_it_is_not_well(self, autojump_clock):
        watched = Watched(facts())
        watched.client.is_healthy = False
        await watched.run(1.0)
        assert watched.worker.trouble == "it says that it is not healthy"
        watched.client.is_healthy = True
        await watched.run(1.0)
        assert watched.worker.trouble is None

    async def test_i12_a_bug_in_a_probe_ends_neither_the_watch_nor_the_router(self, autojump_clock, caplog):
        watched = Watched(facts(), *[ZeroDivisionError()] * 3, facts())
        await watched.run(45.0)
        assert watched.recorder.readiness == [("w:1", True), ("w:1", False), ("w:1", True)]
        assert caplog.text.count("probing w:1 failed inside") == 3


class TestRestarts:
    """A decode worker drops the first word for a prefill engine that it does not know (any more)."""

    async def test_a_prefill_worker_with_another_engine_is_forgotten_by_everybody(self, autojump_clock):
        decode = worker("d", DECODE)
        watched = Watched(facts(kv_engine_id="one"), facts(kv_engine_id="two"), role=PREFILL, others=(decode,))
        decode.note_pull("w:1", engine_id="")
        decode.note_pull("other:1", engine_id="")
        await watched.run(5.0)
        assert decode.has_met("w:1", engine_id=""), "the same engine, or the first word of one"
        await watched.run(11.0)
        assert not decode.has_met("w:1", engine_id="")
        assert decode.has_met("other:1", engine_id="")

    async def test_a_decode_worker_with_another_engine_has_met_nobody(self, autojump_clock):
        watched = Watched(facts(kv_engine_id="one"), facts(kv_engine_id="one"), facts(kv_engine_id="two"), role=DECODE)
        watched.worker.note_pull("p:1", engine_id="e")
        await watched.run(11.0)
        assert watched.worker.has_met("p:1", engine_id="e")
        await watched.run(11.0)
        assert not watched.worker.has_met("p:1", engine_id="e")

    async def test_a_worker_that_was_away_may_be_another_process(self, autojump_clock):
        decode = worker("d", DECODE)
        watched = Watched(facts(), DOWN, DOWN, DOWN, facts(), role=PREFILL, others=(decode,))
        await watched.run(1.0)
        decode.note_pull("w:1", engine_id="e")
        watched.worker.note_pull("x:1", engine_id="e")
        await watched.run(60.0)
        assert not decode.has_met("w:1", engine_id="e")
        assert not watched.worker.has_met("x:1", engine_id="e")

    async def test_requests_go_on_with_a_worker_that_was_restarted(self, autojump_clock):
        prefill, decode = prefill_worker(), decode_worker()
        quick = RouterSettings(probe=ProbeSettings(interval=1.0))
        async with open_scene(prefill, decode, router=quick) as scene:
            assert await collect(scene.router, a_request()) == [7, 8]
            for each in (prefill, decode):
                each.stop()
                await trio.testing.wait_all_tasks_blocked()
                each.engine_id = "engine-2"
                await scene.start(each)
                await trio.sleep(2)  # its absence has been noticed, and its return
                assert await collect(scene.router, a_request()) == [7, 8]
            assert scene.recorder.failures == []

    async def test_a_decode_worker_that_broke_off_has_met_nobody_from_then_on(self, autojump_clock):
        """Whoever answers at its address next may be a new process, long before a probe tells."""
        worker = decode_worker()
        async with open_scene(prefill_worker(), worker) as scene:
            await collect(scene.router, a_request())
            [known] = [each for each in scene.router.registry.workers if each.spec.role is DECODE]
            assert known.has_met("prefill:1", engine_id="engine-1")

            async def die(call, request):
                worker.stop()
                await trio.sleep_forever()

            worker.script = die
            with pytest.raises(WorkerUnavailable):
                await collect(scene.router, a_request())
            assert not known.has_met("prefill:1", engine_id="engine-1")

    async def test_nor_has_one_that_broke_off_in_mid_stream(self, autojump_clock):
        worker = decode_worker()
        async with open_scene(prefill_worker(), worker) as scene:
            await collect(scene.router, a_request())
            [known] = [each for each in scene.router.registry.workers if each.spec.role is DECODE]

            async def die(call, request):
                await call.send(chunk(7))
                worker.stop()
                await trio.sleep_forever()

            worker.script = die
            with pytest.raises(WorkerRejected):
                await collect(scene.router, a_request())
            assert not known.has_met("prefill:1", engine_id="engine-1")
