"""The life of handoffs (I3, I5): never offered twice, never too old, always one outcome, none forgotten.

Once as a machine over the records alone, and once over the real router between workers that answer as the search
decides, on virtual time: clients that come and leave, legs that end in every way, a decode worker that goes away and
whose dialing takes longer than a handoff lives.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import trio
import trio.testing
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trio_router.dispatch.connectors import Connector
from trio_router.dispatch.decode import DecodeLeg
from trio_router.dispatch.handoff import Handoff, HandoffBook, HandoffSettings, HandoffState
from trio_router.dispatch.janitor import Janitor
from trio_router.dispatch.kvparams import read_params
from trio_router.dispatch.retry import RetrySettings
from trio_router.dispatch.router import RouterSettings
from trio_router.errors import RouterError
from trio_router.http2.frames import ErrorCode
from trio_router.policy.breaker import BreakerSettings
from trio_router.rpc.channel import ChannelSettings
from trio_router.rpc.memory import MemoryNetwork
from trio_router.testing import collect
from trio_router.testing.scripted import (
    Scene,
    ScriptedWorker,
    a_request,
    chunk,
    complete,
    decode_worker,
    handoff_params,
    open_scene,
    prefill_worker,
)

ENDS = (HandoffState.CONSUMED, HandoffState.RELEASED, HandoffState.LAPSED, HandoffState.INVALID)
POSSIBLE_ENDS = {
    HandoffState.ISSUED: {HandoffState.RELEASED, HandoffState.LAPSED, HandoffState.INVALID},
    HandoffState.OFFERED: {HandoffState.CONSUMED, HandoffState.RELEASED, HandoffState.LAPSED},
}


class Records(RuleBasedStateMachine):
    """HandoffBook and Handoff against a model of two dictionaries."""

    @initialize(fraction=st.sampled_from([0.0, 0.3, 0.7]), lease=st.sampled_from([1.0, 30.0, 480.0]))
    def begin(self, fraction: float, lease: float) -> None:
        self.now = 0.0
        self.told: list[HandoffState] = []
        self.settings = HandoffSettings(fresh_fraction=fraction, nixl_lease=lease)
        self.book = HandoffBook(settings=self.settings, on_end=self.told.append)
        self.states: dict[Handoff, HandoffState] = {}
        self.offers: dict[Handoff, float] = {}

    @rule(connector=st.sampled_from([Connector.NIXL, Connector.PASSTHROUGH, Connector.MOONCAKE]))
    def issue(self, connector: Connector) -> None:
        handoff = self.book.issue(
            read_params("{}"),
            attempt_id=str(len(self.states)),
            connector=connector,
            prefill_worker="p",
            now=self.now,
        )
        self.states[handoff] = HandoffState.ISSUED

    @rule(seconds=st.sampled_from([0.1, 0.5, 5.0, 20.0, 400.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    def any_of(self, data: st.DataObject) -> Handoff:
        return data.draw(st.sampled_from(list(self.states)))

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def offer_as_a_leg_does(self, data: st.DataObject) -> None:
        handoff = self.any_of(data)
        if handoff.is_fresh(self.now, fraction=self.settings.fresh_fraction):
            self.offer(handoff)

    def offer(self, handoff: Handoff) -> None:
        if self.states[handoff] is HandoffState.ISSUED:
            handoff.offer()
            assert handoff not in self.offers
            self.offers[handoff] = self.now
            self.states[handoff] = HandoffState.OFFERED
        else:
            with pytest.raises(RuntimeError):
                handoff.offer()

    @precondition(lambda self: self.states)
    @rule(data=st.data(), how=st.sampled_from(list(HandoffState)))
    def end(self, data: st.DataObject, how: HandoffState) -> None:
        handoff = self.any_of(data)
        state = self.states[handoff]
        if how not in ENDS or (state not in ENDS and how not in POSSIBLE_ENDS[state]):
            with pytest.raises(RuntimeError):
                handoff.end(how)
            return
        before = len(self.told)
        handoff.end(how)
        if state not in ENDS:
            self.states[handoff] = how
        assert self.told[before:] == ([] if state in ENDS else [how])

    @invariant()
    def the_book_holds_those_that_have_not_ended(self) -> None:
        if not hasattr(self, "book"):
            return
        living = [handoff for handoff, state in self.states.items() if state not in ENDS]
        assert list(self.book) == living
        assert {handoff: handoff.state for handoff in self.states} == self.states
        listed = self.book.live(now=self.now)
        assert [each.attempt_id for each in listed] == [handoff.attempt_id for handoff in living]
        for each, handoff in zip(listed, living, strict=True):
            assert each.age == self.now - handoff.issued_at
            assert each.age + each.left == pytest.approx(self.settings.lease(handoff.connector))
        for handoff, when in self.offers.items():
            age = when - handoff.issued_at
            assert age < self.settings.fresh_fraction * self.settings.lease(handoff.connector)

    def teardown(self) -> None:
        if not hasattr(self, "book"):
            return
        for handoff in self.book:
            handoff.end(HandoffState.LAPSED)
        assert len(self.book) == 0
        assert len(self.told) == len(self.states)


TestRecords = Records.TestCase
TestRecords.settings = settings(max_examples=80, stateful_step_count=40)


# The whole router

LEASE = 10.0
FRACTION = 0.7


class Gated:
    """Legs that wait for the search to say how they end."""

    def __init__(self) -> None:
        self.waiting: dict[str, Callable[[object], None]] = {}

    async def wait(self, name: str) -> object:
        said: list[object] = []
        event = trio.Event()

        def say(what: object) -> None:
            said.append(what)
            event.set()

        self.waiting[name] = say
        try:
            await event.wait()
        finally:
            del self.waiting[name]
        return said[0]

    def say(self, which: int, what: object) -> None:
        names = list(self.waiting)
        if names:
            self.waiting[names[which % len(names)]](what)


def reset(call) -> None:
    call._link.connection.reset(call._stream, ErrorCode.INTERNAL_ERROR)
    call._link.flush()


@dataclass
class World:
    """What workers saw and said; the assertions about offers are made as these arrive."""

    mooncake: bool
    prefills: Gated = field(default_factory=Gated)
    decodes: Gated = field(default_factory=Gated)
    handed_over_at: dict[str, float] = field(default_factory=dict)
    offered: set[str] = field(default_factory=set)
    noticed: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    release_mode: str = "refuse"

    async def prefill(self, call, request) -> None:
        how = await self.prefills.wait(request.request_id)
        if how == "refuse":
            raise GRPCError(Status.UNAVAILABLE, "the request queue is full")
        if how == "fail":
            raise GRPCError(Status.INTERNAL, "")
        if how in ("abort", "stop", "length"):
            await self.end_prefill(call, request, reason=str(how))
        if how in ("nothing", "malformed"):
            changes = {"remote_block_ids": [1]} if how == "malformed" else {"do_remote_prefill": False}
            await call.send(complete("stop", kv_transfer_params_json=handoff_params(**changes)))
        if how == "reset after":
            await self.end_prefill(call, request, reason="length")
            reset(call)
            await trio.sleep_forever()

    async def end_prefill(self, call, request, *, reason: str) -> None:
        if self.mooncake:
            reference = json.loads(request.kv_transfer_params_json)["transfer_id"]
            hands_over = reason == "length"
        else:
            reference = request.request_id
            hands_over = reason != "abort"
        if hands_over:
            self.handed_over_at[reference] = trio.current_time()
        await call.send(complete(reason, kv_transfer_params_json=handoff_params(remote_request_id=reference)))

    async def decode(self, call, request) -> None:
        params = json.loads(request.kv_transfer_params_json or "{}")
        reference = params.get("transfer_id") or params.get("remote_request_id")
        if request.sampling_params.max_tokens == 0:
            await self.release(reference)
        if reference is not None:
            self.check_offer(reference)
        how = await self.decodes.wait(request.request_id)
        if how == "refuse":
            raise GRPCError(Status.UNAVAILABLE, "the request queue is full")
        if how == "fail":
            raise GRPCError(Status.INTERNAL, "")
        if how == "error":
            await call.send(chunk())
            await call.send(complete("error"))
        if how == "reset":
            reset(call)
            await trio.sleep_forever()
        if how in ("answer", "stall"):
            await call.send(chunk(7))
            if how == "stall":
                await trio.sleep_forever()
            await call.send(complete(output_ids=[7]))

    def check_offer(self, reference: str) -> None:
        if reference in self.offered:
            self.wrong.append(f"{reference} was offered twice")
        if reference in self.noticed:
            self.wrong.append(f"{reference} was offered after its release")
        age = trio.current_time() - self.handed_over_at[reference]
        if age >= LEASE * FRACTION:
            self.wrong.append(f"{reference} was offered at the age of {age}")
        self.offered.add(reference)

    async def release(self, reference: str) -> None:
        if trio.current_time() - self.handed_over_at[reference] >= LEASE:
            self.wrong.append(f"{reference} was released after its lease")
        self.noticed.add(reference)
        if self.release_mode == "silence":
            await trio.sleep_forever()
        status = Status.INVALID_ARGUMENT if self.release_mode == "refuse" else Status.INTERNAL
        raise GRPCError(status, "max_tokens must be at least 1, got 0.")


class AdjustableNetwork(MemoryNetwork):
    delay = 0.0

    async def dial(self, address):
        await trio.sleep(self.delay)
        return await super().dial(address)


PREFILL_ENDS = ["length", "length", "length", "stop", "abort", "nothing", "malformed", "refuse", "fail", "reset after"]
DECODE_ENDS = ["answer", "answer", "stall", "refuse", "fail", "error", "reset", "nothing"]
WHICH = st.integers(0, 3)
STEPS = st.one_of(
    st.just(("come",)),
    st.just(("come",)),
    st.tuples(st.just("leave"), WHICH),
    st.tuples(st.just("prefill"), WHICH, st.sampled_from(PREFILL_ENDS)),
    st.tuples(st.just("prefill"), WHICH, st.just("length")),
    st.tuples(st.just("decode"), WHICH, st.sampled_from(DECODE_ENDS)),
    st.tuples(st.just("wait"), st.sampled_from([0.0, 0.2, 1.0, 4.0, 8.0])),
    st.tuples(st.just("dialing takes"), st.sampled_from([0.0, 3.0, 6.9, 8.0])),
    st.tuples(st.just("releases"), st.sampled_from(["refuse", "refuse", "silence", "fail"])),
    st.tuples(st.just("restart"), WHICH),
)
ROUTER = RouterSettings(
    handoff=HandoffSettings(fresh_fraction=FRACTION, nixl_lease=LEASE, mooncake_lease=LEASE),
    retry=RetrySettings(attempts=3),
    breaker=BreakerSettings(failures=1000),
    channel=ChannelSettings(connect_timeout=60.0),
)


class Play:
    """One run of the search's steps."""

    def __init__(self, scene: Scene, world: World, decodes: list[ScriptedWorker], network: AdjustableNetwork) -> None:
        self.scene, self.world, self.decodes, self.network = scene, world, decodes, network
        self.scopes: list[trio.CancelScope] = []

    async def client(self, *, task_status) -> None:
        with trio.CancelScope() as scope:
            self.scopes.append(scope)
            task_status.started()
            try:
                await collect(self.scene.router, a_request(f"r{len(self.scopes)}"))
            except RouterError:
                return

    async def step(self, nursery: trio.Nursery, step: tuple) -> None:
        match step:
            case ("come",):
                await nursery.start(self.client)
            case ("leave", which) if self.scopes:
                self.scopes[which % len(self.scopes)].cancel()
            case ("prefill", which, how):
                self.world.prefills.say(which, how)
            case ("decode", which, how):
                self.world.decodes.say(which, how)
            case ("wait", seconds):
                await trio.sleep(seconds)
            case ("dialing takes", seconds):
                self.network.delay = seconds
            case ("releases", mode):
                self.world.release_mode = mode
            case ("restart", which):
                worker = self.decodes[which % len(self.decodes)]
                worker.stop()
                await trio.testing.wait_all_tasks_blocked()
                await self.scene.start(worker)
        await trio.testing.wait_all_tasks_blocked()


async def whole_life(steps: list[tuple], *, mooncake: bool) -> list[str]:
    """Play the steps, let everything end, and return what was wrong."""
    world, network = World(mooncake=mooncake), AdjustableNetwork()
    connector = "MooncakeConnector" if mooncake else "NixlConnector"
    decodes = [decode_worker(world.decode, name=f"d{number}", connector=connector) for number in (1, 2)]
    prefill = prefill_worker(world.prefill, connector=connector)
    async with open_scene(prefill, *decodes, router=ROUTER, network=network) as scene:
        issued: list[Handoff] = []
        book, real = scene.router.handoffs, scene.router.handoffs.issue

        def issue(*args, **kwargs) -> Handoff:
            issued.append(real(*args, **kwargs))
            return issued[-1]

        book.issue = issue
        play = Play(scene, world, decodes, network)
        async with trio.open_nursery() as nursery:
            for step in steps:
                await play.step(nursery, step)
            nursery.cancel_scope.cancel()
        await trio.sleep(150)  # every bound of the janitor's has passed
        wrong = world.wrong + scene.leaks()
        wrong += [f"{handoff!r} is still in the book" for handoff in book]
        if len(scene.recorder.handoffs) != len(issued):
            wrong.append(f"{len(issued)} handoffs, told of {scene.recorder.handoffs}")
        wrong += [f"{handoff!r} has not ended" for handoff in issued if not handoff.ended]
    return wrong


def run(steps: list[tuple], *, mooncake: bool) -> list[str]:
    clock = trio.testing.MockClock(autojump_threshold=0)
    return trio.run(lambda: whole_life(steps, mooncake=mooncake), clock=clock)


@settings(max_examples=70, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(STEPS, min_size=4, max_size=30), mooncake=st.booleans())
def test_i3_i5_whatever_happens_each_handoff_has_one_life(steps, mooncake):
    assert run(steps, mooncake=mooncake) == []


SERVED = [("come",), ("prefill", 0, "length"), ("decode", 0, "answer"), ("wait", 1.0)]


class TestTheSearchItself:
    """With a rule broken, it tells."""

    def test_it_sees_a_second_offer(self, monkeypatch):
        real = DecodeLeg.send

        async def send_twice(self, message, *, handoff=None, fresh_fraction=1.0):
            await self.worker.client.generate(message)
            await real(self, message, handoff=handoff, fresh_fraction=fresh_fraction)

        monkeypatch.setattr(DecodeLeg, "send", send_twice)
        assert "twice" in "".join(run(SERVED, mooncake=False))

    @pytest.mark.parametrize("mooncake", [False, True])
    def test_it_sees_one_that_is_too_old(self, monkeypatch, mooncake):
        slow = [
            *SERVED * 2,
            ("dialing takes", 8.0),
            ("come",),
            ("restart", 0),
            ("restart", 1),
            ("prefill", 0, "length"),
            ("wait", 8.0),
            ("wait", 8.0),
            ("decode", 0, "answer"),
        ]
        assert run(slow, mooncake=mooncake) == []
        monkeypatch.setattr(Handoff, "is_fresh", lambda self, now, *, fraction: True)
        assert "age of" in "".join(run(slow, mooncake=mooncake))

    def test_it_sees_one_whose_end_is_told_to_nobody(self, monkeypatch):
        monkeypatch.setattr(Handoff, "end", lambda self, state: None)
        assert "told of" in "".join(run(SERVED, mooncake=True))

    def test_it_sees_one_that_is_forgotten(self, monkeypatch):
        monkeypatch.setattr(Janitor, "release", lambda self, handoff, *, through, view: None)
        steps = [("come",), ("prefill", 0, "length"), ("decode", 0, "fail"), ("wait", 1.0)]
        assert "in the book" in "".join(run(steps, mooncake=False))

    def test_it_sees_a_release_after_the_lease(self, monkeypatch):
        """The second notice to a worker that never met the other comes half a second after the first."""
        waits = [("wait", 8.0), ("wait", 1.0), *[("wait", 0.2)] * 4]
        steps = [("come",), ("prefill", 0, "length"), *waits, ("decode", 0, "refuse"), ("wait", 4.0)]
        assert run(steps, mooncake=False) == []
        real = Handoff.is_fresh

        def always_until_its_end(self, now, *, fraction):
            return fraction == 1.0 or real(self, now, fraction=fraction)

        monkeypatch.setattr(Handoff, "is_fresh", always_until_its_end)
        assert "after its lease" in "".join(run(steps, mooncake=False))
