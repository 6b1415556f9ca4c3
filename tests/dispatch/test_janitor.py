"""Jobs that outlive their request: bounded, and each handoff in them accounted for (invariants I3, I4, I11)."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from trio_router.dispatch.handoff import Handoff, HandoffSettings
from trio_router.dispatch.janitor import JanitorSettings
from trio_router.dispatch.legs import RequestView, parse_request
from trio_router.dispatch.prefill import PrefillLeg
from trio_router.dispatch.retry import RetrySettings
from trio_router.dispatch.router import RouterSettings
from trio_router.fleet.worker import WorkerRole
from trio_router.observe.hooks import Observer
from trio_router.protocol.codec import encode
from trio_router.testing import Cluster, collect, open_cluster
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

HANDOFF = complete(kv_transfer_params_json=handoff_params())


class Gate:
    """A script that stops before its n-th word until it is let on; releases are refused as everywhere."""

    def __init__(self, *frames: bytes, hold_before: int = 0) -> None:
        self.frames = frames
        self.hold_before = hold_before
        self.entered = trio.Event()
        self.opened = trio.Event()
        self.ended_at: float | None = None

    async def __call__(self, call, request):
        if request.sampling_params.max_tokens == 0:
            await answer(call, request)
        try:
            for number, frame in enumerate(self.frames):
                if number == self.hold_before:
                    self.entered.set()
                    await self.opened.wait()
                await call.send(frame)
        finally:
            self.ended_at = trio.current_time()


async def run(scene: Scene) -> None:
    async with scene.router.generate(a_request(), model="tiny") as stream:
        async for _ in stream:
            pass


@asynccontextmanager
async def left_at(scene: Scene, gate: Gate):
    """A request whose client left when `gate` was reached."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, scene)
        with trio.fail_after(5):
            await gate.entered.wait()
            # Until the router has read what came before.
            await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    yield trio.current_time()


def settings(**changes) -> RouterSettings:
    return RouterSettings(janitor=JanitorSettings(**changes), retry=RetrySettings(attempts=1))


async def refuse(call, request):
    raise GRPCError(Status.INVALID_ARGUMENT, "max_tokens must be at least 1, got 0.")


async def dead_engine(call, request):
    raise GRPCError(Status.INTERNAL, "EngineCore encountered an issue")


async def silence(call, request):
    await trio.sleep_forever()


class TestPrefillLegs:
    async def test_i4_one_that_ends_soon_by_itself_is_not_aborted_and_what_it_hands_over_is_released(
        self, autojump_clock
    ):
        """An Abort in the last milliseconds of a prefill leaves its blocks pinned, and no word of them."""
        gate = Gate(HANDOFF)
        prefill, decode = prefill_worker(gate), decode_worker()
        async with open_scene(prefill, decode) as scene, left_at(scene, gate):
            await trio.sleep(JanitorSettings().abort_after * 0.9)
            gate.opened.set()
            await trio.sleep(2)
            assert prefill.aborted == []
            assert scene.recorder.handoffs == ["released"]
            assert scene.leaks() == []

    async def test_i4_one_that_is_left_is_aborted_soon_and_read_to_its_end(self, autojump_clock):
        gate = Gate(HANDOFF)
        prefill, decode = prefill_worker(gate), decode_worker()
        async with open_scene(prefill, decode) as scene, left_at(scene, gate):
            await trio.sleep(JanitorSettings().abort_after * 0.9)
            assert scene.router.in_flight == 0, "whatever its leg still needs"
            await trio.sleep(JanitorSettings().abort_after * 0.2)
            assert prefill.aborted == [prefill.requests[0].request_id]
            await trio.sleep(5)
            assert prefill.ended == [], "reset although it may still hand over"
            gate.opened.set()
            await trio.sleep(2)
            assert scene.recorder.handoffs == ["released"]
            assert len(decode.releases) == 2
            assert scene.leaks() == []

    async def test_i11_one_that_never_ends_is_reset_at_the_bound(self, autojump_clock):
        gate = Gate(HANDOFF)
        prefill, bound = prefill_worker(gate), settings(prefill_drain=3.0)
        async with open_scene(prefill, decode_worker(), router=bound) as scene, left_at(scene, gate) as left:
            await trio.sleep(20)
            assert gate.ended_at == pytest.approx(left + 3.0)
            assert scene.recorder.handoffs == []
            assert scene.leaks() == []

    async def test_an_abort_that_is_never_answered_keeps_nobody(self, autojump_clock):
        gate = Gate(HANDOFF)
        prefill = prefill_worker(gate, on_abort=trio.sleep_forever)
        async with open_scene(prefill, decode_worker()) as scene, left_at(scene, gate):
            gate.opened.set()
            await trio.sleep(2)
            assert scene.recorder.handoffs == ["released"]
            assert scene.leaks() == []

    async def test_its_slot_is_held_until_its_end(self, autojump_clock):
        gate = Gate(HANDOFF)
        async with open_scene(prefill_worker(gate), decode_worker()) as scene, left_at(scene, gate):
            assert {w.name: w.in_flight for w in scene.router.registry.workers} == {"prefill:1": 1, "decode:1": 0}
            gate.opened.set()
            await trio.sleep(0.1)
            assert all(worker.in_flight == 0 for worker in scene.router.registry.workers)

    async def test_i1_an_aborted_answer_is_not_released(self, autojump_clock):
        gate = Gate(complete("abort"))
        decode = decode_worker()
        async with open_scene(prefill_worker(gate), decode) as scene, left_at(scene, gate):
            gate.opened.set()
            await trio.sleep(2)
            assert decode.requests == []
            assert scene.recorder.handoffs == []


class TestDecodeLegs:
    @pytest.mark.parametrize(
        ("frame", "end"),
        [(chunk(7), "consumed"), (complete("stop"), "consumed"), (complete("error"), "lapsed")],
    )
    async def test_i4_one_that_is_left_is_reset_after_its_first_frame(self, autojump_clock, frame, end):
        gate = Gate(frame, *[chunk(8)] * 5)
        decode = decode_worker(gate)
        async with open_scene(prefill_worker(), decode) as scene, left_at(scene, gate):
            await trio.sleep(10)
            assert gate.ended_at is None
            assert scene.router.in_flight == 0
            gate.opened.set()
            await trio.sleep(0.1)
            assert scene.recorder.handoffs == [end]
            assert scene.leaks() == []

    async def test_i4_an_empty_chunk_is_no_sign_that_the_transfer_is_over(self, autojump_clock):
        gate = Gate(chunk(), chunk(7), hold_before=1)
        async with open_scene(prefill_worker(), decode_worker(gate)) as scene, left_at(scene, gate):
            await trio.sleep(5)
            assert gate.ended_at is None
            gate.opened.set()
            await trio.sleep(0.1)
            assert scene.recorder.handoffs == ["consumed"]

    async def test_i11_one_that_never_answers_is_reset_at_the_bound(self, autojump_clock):
        gate = Gate(chunk(7))
        decode = decode_worker(gate)
        async with open_scene(prefill_worker(), decode) as scene, left_at(scene, gate) as left:
            await trio.sleep(60)
            assert gate.ended_at == pytest.approx(left + 30.0)
            assert scene.recorder.handoffs == ["lapsed"]
            assert decode.releases == [], "it may have been consumed"
            assert scene.leaks() == []

    async def test_one_without_a_handoff_is_reset_at_once(self, autojump_clock):
        async def no_handoff(call, request):
            await call.send(complete())

        for prefill in ([prefill_worker(no_handoff)], []):
            gate = Gate(chunk(7))
            worker = decode_worker(gate) if prefill else plain_worker(gate)
            async with open_scene(*prefill, worker) as scene, left_at(scene, gate) as left:
                assert scene.router.janitor.jobs == 0
                await trio.sleep(0.01)
                assert gate.ended_at == left
                assert scene.leaks() == []

    async def test_i3_a_cold_worker_that_refuses_a_leg_that_was_left_is_told_again(self, autojump_clock):
        gate = Gate(chunk(7))

        async def refuse_late(call, request):
            if request.sampling_params.max_tokens == 0:
                await answer(call, request)
            gate.entered.set()
            await gate.opened.wait()
            raise GRPCError(Status.UNAVAILABLE, "the request queue is full")

        decode = decode_worker(refuse_late)
        async with open_scene(prefill_worker(), decode) as scene, left_at(scene, gate):
            gate.opened.set()
            await trio.sleep(2)
            assert len(decode.releases) == 2
            assert scene.recorder.handoffs == ["released"]

    async def test_what_pulled_after_the_client_left_has_met_all_the_same(self, autojump_clock):
        gate = Gate(chunk(7))
        async with open_scene(prefill_worker(), decode_worker(gate)) as scene, left_at(scene, gate):
            gate.opened.set()
            await trio.sleep(0.1)
            [decode] = [each for each in scene.router.registry.workers if each.spec.role is WorkerRole.DECODE]
            assert decode.has_met("prefill:1", engine_id="engine-1")


class TestReleases:
    async def released(self, scene: Scene, gate: Gate) -> str:
        async with left_at(scene, gate):
            gate.opened.set()
            await trio.sleep(20)
            assert scene.leaks() == []
            [end] = scene.recorder.handoffs
            return end

    async def test_a_refusal_is_the_success(self, autojump_clock):
        gate, decode = Gate(HANDOFF), decode_worker()
        async with open_scene(prefill_worker(gate), decode) as scene:
            assert await self.released(scene, gate) == "released"
        assert {each.kv_transfer_params_json for each in decode.releases} == {handoff_params()}
        assert {each.sampling_params.max_tokens for each in decode.requests} == {0}

    async def test_each_has_an_id_of_its_own(self, autojump_clock):
        gate, decode = Gate(HANDOFF), decode_worker()
        async with open_scene(prefill_worker(gate), decode) as scene:
            await self.released(scene, gate)
        ids = {each.request_id for each in decode.releases}
        assert len(ids) == 2
        assert all(name.startswith("release-") for name in ids)

    async def test_a_cold_pair_hears_the_second_one_half_a_second_later(self, autojump_clock):
        times = []

        async def note(call, request):
            times.append(trio.current_time())
            await refuse(call, request)

        gate = Gate(HANDOFF)
        async with open_scene(prefill_worker(gate), decode_worker(note)) as scene:
            await self.released(scene, gate)
        assert times[1] - times[0] == pytest.approx(0.5)

    async def test_a_worker_that_admits_the_leg_has_moved_the_blocks_which_frees_them_too(self, autojump_clock):
        async def admit(call, request):
            await call.send(complete(output_ids=[1]))

        gate = Gate(HANDOFF)
        async with open_scene(prefill_worker(gate), decode_worker(admit)) as scene:
            assert await self.released(scene, gate) == "released"

    @pytest.mark.parametrize("script", [silence, dead_engine])
    async def test_nobody_who_can_be_told_leaves_it_to_its_lease(self, autojump_clock, script):
        gate = Gate(HANDOFF)
        async with open_scene(prefill_worker(gate), decode_worker(script)) as scene:
            assert await self.released(scene, gate) == "lapsed"

    async def test_i3_of_two_notices_to_a_cold_worker_both_must_get_through(self, autojump_clock):
        """The first one only makes it get to know the prefill worker."""
        for scripts in ([refuse, dead_engine], [dead_engine, refuse]):
            left = list(scripts)

            async def script(call, request, left=left):
                await left.pop(0)(call, request)

            gate = Gate(HANDOFF)
            async with open_scene(prefill_worker(gate), decode_worker(script)) as scene:
                assert await self.released(scene, gate) == "lapsed"

    @pytest.mark.parametrize("script", [silence, dead_engine])
    async def test_another_decode_worker_carries_the_word_when_the_chosen_one_cannot(self, autojump_clock, script):
        gate = Gate(HANDOFF)
        other, elsewhere = decode_worker(name="other"), decode_worker(name="elsewhere", model="another model")
        async with open_scene(prefill_worker(gate), decode_worker(script, name="chosen"), elsewhere, other) as scene:
            assert await self.released(scene, gate) == "released"
        assert len(other.releases) == 2
        assert elsewhere.requests == []

    async def test_a_decode_worker_that_is_gone_costs_no_prefill_worker_its_blocks(self, autojump_clock):
        chosen, other = decode_worker(name="chosen"), decode_worker(name="other")
        async with open_scene(prefill_worker(), chosen, other) as scene:
            chosen.stop()
            await trio.testing.wait_all_tasks_blocked()
            assert await collect(scene.router, a_request()) == [7, 8]
            await trio.sleep(5)
            assert sorted(scene.recorder.handoffs) == ["consumed", "released"]
            assert len(other.releases) == 2 or scene.recorder.blamed == ["chosen:1"]

    async def test_i3_what_is_older_than_its_lease_is_left_alone(self, autojump_clock, monkeypatch):
        monkeypatch.setattr(HandoffSettings, "lease", lambda settings, connector: 0.0)
        gate, decode = Gate(HANDOFF), decode_worker()
        async with open_scene(prefill_worker(gate), decode) as scene:
            assert await self.released(scene, gate) == "lapsed"
        assert decode.requests == []


@pytest.mark.parametrize("cold", [True, False], ids=["pair never met", "pair has met"])
async def test_a_release_reaches_the_prefill_worker_whether_or_not_the_pair_has_met(autojump_clock, cold):
    """A cold decode worker drops the first notice: the release must be said twice there (measured on real pairs)."""
    async with open_cluster() as cluster:
        if not cold:
            await collect(cluster.router, cluster.request())
        prefill = cluster.prefill[0]
        handoff, view = await prefill_only(cluster)
        assert len(prefill.ledger) == 1
        [decode] = [each for each in cluster.router.registry.workers if each.spec.role is WorkerRole.DECODE]
        cluster.router.janitor.release(handoff, through=decode, view=view)
        await trio.sleep(1)
        assert dict(prefill.ledger) == {}
        assert prefill.counters.released == 1
        assert prefill.counters.lease_expired == 0
        assert cluster.recorder.handoffs[-1] == "released"


async def prefill_only(cluster: Cluster) -> tuple[Handoff, RequestView]:
    """Run a prefill leg by itself: its handoff is what is held between the legs."""
    view = parse_request(encode(cluster.request("another prompt")), disaggregated=True)
    router = cluster.router
    leg = PrefillLeg(
        router.registry.take(WorkerRole.PREFILL),
        view=view,
        attempt_id="by-hand",
        transfer_id="xfer-by-hand",
        book=router.handoffs,
    )
    await leg.run()
    leg.harvest()
    leg.leave()
    assert leg.handoff is not None
    return leg.handoff, view


class TestBounds:
    async def test_i9_beyond_the_most_jobs_a_leftover_is_dropped_and_counted(self, autojump_clock, caplog):
        first, second = Gate(HANDOFF), Gate(HANDOFF, chunk(1), hold_before=1)
        left = [first, second]

        async def script(call, request):
            await left.pop(0)(call, request)

        prefill, decode = prefill_worker(script), decode_worker()
        one = settings(max_jobs=1)
        async with open_scene(prefill, decode, router=one) as scene, left_at(scene, first), left_at(scene, second):
            await trio.sleep(0.01)
            assert scene.router.janitor.jobs == 1
            assert scene.recorder.handoffs == ["lapsed"], "the one that had come"
            assert second.ended_at is not None, "reset at once"
            first.opened.set()
            await trio.sleep(2)
            assert scene.recorder.handoffs == ["lapsed", "released"]
            assert scene.leaks() == []
        assert "dropped" in caplog.text

    async def test_a_job_that_fails_ends_no_other(self, autojump_clock, caplog):
        async with open_scene(prefill_worker(), decode_worker()) as scene:
            janitor = scene.router.janitor

            async def bug():
                raise ZeroDivisionError

            janitor._start(bug)
            await trio.sleep(0.1)
            assert janitor.jobs == 0
            assert await collect(scene.router, a_request()) == [7, 8]
        assert "janitor job failed" in caplog.text

    async def test_the_count_of_jobs_is_told(self, autojump_clock):
        class Jobs(Observer):
            def __init__(self):
                self.counts = []

            def janitor_jobs(self, count):
                self.counts.append(count)

        jobs = Jobs()
        gate = Gate(HANDOFF)
        async with open_scene(prefill_worker(gate), decode_worker()) as scene:
            scene.router.janitor._observer = jobs
            async with left_at(scene, gate):
                gate.opened.set()
                await trio.sleep(5)
        assert jobs.counts == [1, 0]


class TestLeavingTheRouter:
    """`open_router` gives leftovers a bounded grace, whoever ends it."""

    @pytest.mark.parametrize("cancelled", [False, True], ids=["left", "cancelled"])
    async def test_i11_what_needs_less_than_the_grace_is_finished(self, autojump_clock, cancelled):
        gate, decode = Gate(HANDOFF), decode_worker()
        prefill = prefill_worker(gate)
        recorder = None
        async with trio.open_nursery() as nursery:

            async def let_on():
                await trio.sleep(4)
                gate.opened.set()

            with trio.CancelScope() as scope:
                async with open_scene(prefill, decode, nursery=nursery) as scene:
                    recorder = scene.recorder
                    async with left_at(scene, gate):
                        nursery.start_soon(let_on)
                        if cancelled:
                            scope.cancel()
                            await trio.sleep_forever()
            nursery.cancel_scope.cancel()
        assert len(decode.releases) == 2
        assert recorder.handoffs == ["released"]

    async def test_i11_what_needs_more_is_dropped_and_counted(self, autojump_clock):
        gate = Gate(chunk(7))
        async with trio.open_nursery() as nursery:
            opened = open_scene(prefill_worker(), decode_worker(gate), nursery=nursery)
            async with opened as scene, left_at(scene, gate):
                began = trio.current_time()
            assert trio.current_time() - began == pytest.approx(5.0)
            nursery.cancel_scope.cancel()
        assert scene.recorder.handoffs == ["lapsed"]
        assert scene.leaks() == []

    async def test_i3_a_release_that_is_cut_off_is_counted(self, autojump_clock):
        gate = Gate(HANDOFF)
        async with trio.open_nursery() as nursery:
            async with (
                open_scene(
                    prefill_worker(gate),
                    decode_worker(silence),
                    router=settings(release_timeout=100.0),
                    nursery=nursery,
                ) as scene,
                left_at(scene, gate),
            ):
                gate.opened.set()
                await trio.sleep(1)
            nursery.cancel_scope.cancel()
        assert scene.recorder.handoffs == ["lapsed"]
        assert scene.leaks() == []
