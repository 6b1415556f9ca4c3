"""Reconnecting: how often a peer is dialed, how long a call waits for it, and what can be seen of all that."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import pairwise

import pytest
import trio
import trio.testing
from grpclib.const import Status

from trio_router.errors import LinkError
from trio_router.http2 import frames
from trio_router.http2.settings import Http2Settings
from trio_router.protocol.messages import HealthBase, HealthStub, ServiceHealthRequest, ServiceHealthResponse
from trio_router.rpc.backoff import BackoffSettings
from trio_router.rpc.channel import Channel, ChannelSettings, StateChange, connect_channel, open_channel
from trio_router.rpc.memory import MemoryNetwork
from trio_router.rpc.metadata import Origin, RpcError
from trio_router.rpc.server import Server, ServerSettings
from trio_router.rpc.servercall import ServerCall
from trio_router.rpc.transport import Transport

CALL = "/test.Service/Call"
ADDRESS = "memory:7"
BACKOFF = BackoffSettings(initial=1.0, multiplier=2.0, maximum=8.0, jitter=0.25)


async def echo(call: ServerCall) -> None:
    while (message := await call.receive()) is not None:
        await call.send(message)


async def wait(call: ServerCall) -> None:
    await trio.sleep_forever()


class Health(HealthBase):
    async def check(self, health_check_request: ServiceHealthRequest) -> ServiceHealthResponse:
        return ServiceHealthResponse(status=1)


class Network(MemoryNetwork):
    """Notes when it was dialed, and how many dials are under way at most."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.dials: list[float] = []
        self.dialing = self.most = 0

    async def dial(self, address: str) -> Transport:
        self.dials.append(trio.current_time())
        self.dialing += 1
        self.most = max(self.most, self.dialing)
        try:
            return await super().dial(address)
        finally:
            self.dialing -= 1


class Scene:
    """A channel, its network, and a peer that can be started and stopped."""

    def __init__(self, network: Network, nursery: trio.Nursery) -> None:
        self.network = network
        self.server = Server(raw={CALL: echo})
        self.states: list[StateChange] = []
        self.channel: Channel
        self._nursery = nursery
        self._scope = trio.CancelScope()

    async def start(self) -> None:
        async def serve(*, task_status) -> None:
            listener = self.network.listen(ADDRESS)
            with trio.CancelScope() as self._scope:
                await self.server.serve(listener, task_status=task_status)
            listener.close()

        await self._nursery.start(serve)

    async def stop(self) -> None:
        self._scope.cancel()
        await trio.testing.wait_all_tasks_blocked()

    async def say(self, **options) -> bytes | None:
        return await (await self.channel.call(CALL, b"hello", **options)).receive()

    def seen(self) -> list[tuple[str, str | None]]:
        return [(change.state.value, change.reason) for change in self.states]


@asynccontextmanager
async def open_scene(*, network: Network | None = None, chance: float = 0.5, **options) -> AsyncIterator[Scene]:
    async with trio.open_nursery() as nursery:
        scene = Scene(network or Network(), nursery)
        async with open_channel(
            ADDRESS,
            dialer=scene.network.dial,
            settings=ChannelSettings(**{"backoff": BACKOFF, **options}),
            on_state=scene.states.append,
            chance=lambda: chance,
        ) as channel:
            scene.channel = channel
            yield scene
        nursery.cancel_scope.cancel()


async def knock(scene: Scene, *, until: float, every: float) -> list[tuple[float, str]]:
    """Try a call again and again; when and how each failed."""
    failures = []
    while trio.current_time() < until:
        try:
            await scene.say()
        except LinkError as exc:
            failures.append((trio.current_time(), exc.message))
        await trio.sleep(every)
    return failures


class TestPauses:
    async def test_a_dead_peer_is_dialed_ever_more_seldom_however_often_it_is_called(self, autojump_clock):
        async with open_scene() as scene:
            failures = await knock(scene, until=40, every=0.125)
        assert scene.network.dials == [0, 1, 3, 7, 15, 23, 31, 39]
        assert len(failures) == 320
        assert all("nobody listens" in message for _, message in failures)

    @pytest.mark.parametrize(("chance", "dials"), [(0.0, [0, 0.75, 2.25, 5.25]), (1.0, [0, 1.25, 3.75, 8.75])])
    async def test_chance_spreads_the_dials_of_several_routers(self, autojump_clock, chance, dials):
        async with open_scene(chance=chance) as scene:
            await knock(scene, until=dials[-1] + 0.1, every=0.125)
        assert scene.network.dials == [pytest.approx(at, abs=0.126) for at in dials]

    async def test_nobody_dials_when_nobody_calls(self, autojump_clock):
        async with open_scene() as scene:
            with pytest.raises(LinkError):
                await scene.say()
            await trio.sleep(1000)
            assert len(scene.network.dials) == 1
            assert len(scene.states) == 2

    async def test_in_a_pause_a_call_fails_at_once_and_says_why_and_how_long(self, autojump_clock):
        async with open_scene() as scene:
            with pytest.raises(LinkError):
                await scene.say()
            await trio.sleep(0.25)
            begin = trio.current_time()
            for _ in range(100):
                with pytest.raises(LinkError, match=r"nobody listens there; not tried again for 0\.75 s"):
                    await scene.say()
            with pytest.raises(LinkError):
                await scene.channel.connect()
            assert trio.current_time() == begin
            assert len(scene.network.dials) == 1

    async def test_a_peer_that_returns_is_found_by_the_first_call_after_the_pause(self, autojump_clock):
        async with open_scene() as scene:
            await knock(scene, until=6, every=0.25)
            await scene.start()
            failures = await knock(scene, until=20, every=0.25)
            assert failures[-1][0] < 7
            assert scene.network.dials == [0, 1, 3, 7]

    async def test_a_link_that_lasted_makes_the_next_pause_a_first_one(self, autojump_clock):
        async with open_scene() as scene:
            await knock(scene, until=6, every=0.25)
            await scene.start()
            await knock(scene, until=40, every=1)
            await scene.stop()
            begin = trio.current_time()
            scene.network.dials.clear()
            await knock(scene, until=begin + 4, every=0.125)
            assert scene.network.dials == [begin, begin + 1, begin + 3]

    async def test_a_peer_that_greets_everybody_and_hangs_up_is_not_hammered(self, autojump_clock):
        async with open_scene() as scene, trio.open_nursery() as nursery:
            listener = scene.network.listen(ADDRESS)

            async def greet_and_hang_up() -> None:
                while True:
                    transport = await listener.accept()
                    transport.send_nowait(frames.settings({}))
                    await trio.sleep(0.01)
                    transport.close()

            async def call() -> None:
                with pytest.raises((LinkError, RpcError)):
                    await scene.say()

            nursery.start_soon(greet_and_hang_up)
            while trio.current_time() < 60:
                await call()
                await trio.sleep(0.1)
            # The first loss is taken for an accident; after that the pauses are those of failures.
            pauses = [later - earlier for earlier, later in pairwise(scene.network.dials)]
            assert pauses == [pytest.approx(pause, abs=0.25) for pause in (0.1, 1, 2, 4, 8, 8, 8, 8, 8, 8)]
            nursery.cancel_scope.cancel()

    async def test_a_link_that_was_made_ends_the_pause_that_another_one_brought(self, autojump_clock):
        async with open_scene(network=Network(latency=0.5)) as scene:
            with pytest.raises(LinkError):
                await scene.say()
            http2 = Http2Settings(max_concurrent_streams=1)
            scene.server = Server(raw={CALL: echo}, settings=ServerSettings(http2=http2))
            await scene.start()
            await trio.sleep(1)
            await scene.channel.start(CALL)
            (first,) = scene.channel.links

            async with trio.open_nursery() as nursery:
                nursery.start_soon(scene.channel.start, CALL)
                await trio.sleep(0.25)
                first.close(LinkError("lost soon after a failure: a pause of a second"))
            begin = trio.current_time()
            await scene.channel.start(CALL)
            assert trio.current_time() - begin == pytest.approx(0.5)

    async def test_one_that_asks_for_another_connection_gets_it_at_once(self, autojump_clock):
        """GOAWAY without an error is how servers end connections that have grown old."""
        async with open_scene() as scene:
            for _ in range(20):
                await scene.start()
                assert await scene.say() == b"hello"
                scene.server.drain()
                await trio.testing.wait_all_tasks_blocked()
                scene.server = Server(raw={CALL: echo})
            assert len(scene.network.dials) == 20
            assert set(scene.network.dials) == {0.0}


class TestWaiting:
    async def test_case_d8_a_black_hole_costs_one_connect_timeout_and_one_socket(self, autojump_clock):
        """Calls come all the time; the dials are the schedule's."""
        network = Network()
        network.black_hole(ADDRESS)
        async with open_scene(network=network, connect_timeout=5.0) as scene, trio.open_nursery() as nursery:
            waited: list[float] = []

            async def call() -> None:
                begin = trio.current_time()
                with pytest.raises(LinkError):
                    await scene.say()
                waited.append(trio.current_time() - begin)

            while trio.current_time() < 60:
                for _ in range(10):
                    nursery.start_soon(call)
                await trio.sleep(0.25)
        assert len(waited) == 2400
        assert max(waited) <= 5.0
        assert sum(1 for seconds in waited if seconds == 0) > 1000  # in the pauses
        assert network.most == 1
        assert network.dials == [0, 6, 13, 22, 35, 48]

    async def test_a_call_waits_no_longer_than_its_own_deadline(self, autojump_clock):
        network = Network()
        network.black_hole(ADDRESS)
        async with open_scene(network=network, connect_timeout=5.0) as scene:
            for patient in (False, True):
                begin = trio.current_time()
                with pytest.raises(RpcError) as caught:
                    await scene.say(timeout=2.0, wait_for_ready=patient)
                assert (caught.value.status, caught.value.origin) == (Status.DEADLINE_EXCEEDED, Origin.REFUSED)
                assert trio.current_time() - begin == pytest.approx(2.0)

    async def test_a_call_that_waits_until_ready_outlasts_pauses(self, autojump_clock):
        async with open_scene() as scene, trio.open_nursery() as nursery:
            replies: list[float] = []

            async def call() -> None:
                assert await scene.say(timeout=100, wait_for_ready=True) == b"hello"
                replies.append(trio.current_time())

            for _ in range(50):
                nursery.start_soon(call)
            await trio.sleep(16)
            await scene.start()
            await trio.sleep(30)
            assert replies == [23] * 50
            assert scene.network.dials == [0, 1, 3, 7, 15, 23]

    @pytest.mark.parametrize(("timeout", "fails_after"), [(None, 10), (3, 3), (60, 60)])
    async def test_but_not_its_deadline_or_without_one_the_connect_timeout(self, autojump_clock, timeout, fails_after):
        async with open_scene() as scene:
            with pytest.raises((LinkError, RpcError), match="nobody listens there"):
                await scene.say(timeout=timeout, wait_for_ready=True)
            assert trio.current_time() == pytest.approx(fails_after)

    async def test_a_second_link_that_cannot_be_made_harms_only_who_needs_it(self, autojump_clock):
        http2 = Http2Settings(max_concurrent_streams=16)
        async with open_scene() as scene:
            scene.server = Server(raw={CALL: echo}, settings=ServerSettings(http2=http2))
            listener = scene.network.listen(ADDRESS)
            scene._nursery.start_soon(scene.server.serve, listener)
            calls = [await scene.channel.start(CALL) for _ in range(8)]
            scene.network._listeners.clear()
            for _ in range(20):
                with pytest.raises(LinkError, match="nobody listens there"):
                    await scene.channel.start(CALL)
            assert len(scene.network.dials) == 2
            assert scene.channel.state == "ready"
            await calls[0].send(b"hello", end=True)
            assert [await calls[0].receive(), await calls[0].receive()] == [b"hello", None]
            assert await scene.say() == b"hello"

    async def test_closing_wakes_those_who_wait_for_a_pause_to_end(self, autojump_clock):
        async with open_scene() as scene, trio.open_nursery() as nursery:
            woken_at: list[float] = []

            async def call() -> None:
                with pytest.raises(LinkError, match="closed"):
                    await scene.say(timeout=1000, wait_for_ready=True)
                woken_at.append(trio.current_time())

            with pytest.raises(LinkError):
                await scene.say()
            nursery.start_soon(call)
            await trio.sleep(0.5)
            scene.channel.close()
            await trio.sleep(10)
            assert woken_at == [0.5]


class TestRoom:
    @asynccontextmanager
    async def full(self, limit: int, **options) -> AsyncIterator[Scene]:
        """Every stream that bulk calls may have is in use, on one link, and no other can be made."""
        async with open_scene(**options) as scene:
            http2 = Http2Settings(max_concurrent_streams=limit)
            scene.server = Server([Health()], raw={CALL: wait}, settings=ServerSettings(http2=http2))
            listener = scene.network.listen(ADDRESS)
            scene._nursery.start_soon(scene.server.serve, listener)
            await scene.channel.connect()
            scene.network._listeners.clear()
            with suppress(LinkError):
                while True:
                    await scene.channel.call(CALL, b"")
            yield scene

    async def test_control_calls_get_through_when_bulk_calls_use_all_streams(self, autojump_clock):
        async with self.full(100) as scene:
            (link,) = scene.channel.links
            assert link.connection.open_streams == 92
            control = [await scene.channel.call(CALL, b"", control=True) for _ in range(8)]
            assert link.connection.open_streams == 100
            with pytest.raises(LinkError):
                await scene.channel.call(CALL, b"", control=True)
            control[0].cancel()
            with pytest.raises(LinkError):  # its stream is no bulk call's
                await scene.channel.call(CALL, b"")
            stub = HealthStub(scene.channel.control)
            assert await stub.check(ServiceHealthRequest(), timeout=5) == ServiceHealthResponse(status=1)
            assert len(scene.network.dials) == 2

    async def test_of_few_streams_half_are_kept(self, autojump_clock):
        for limit, bulk in ((1, 1), (2, 1), (5, 3), (16, 8), (17, 9)):
            async with self.full(limit) as scene:
                (link,) = scene.channel.links
                assert link.connection.open_streams == bulk

    async def test_links_are_bounded(self, autojump_clock):
        async with open_scene(max_links=3) as scene:
            http2 = Http2Settings(max_concurrent_streams=2)
            scene.server = Server(raw={CALL: wait}, settings=ServerSettings(http2=http2))
            await scene.start()
            for _ in range(3):
                await scene.channel.call(CALL, b"")
            for _ in range(3):
                with pytest.raises(LinkError, match="all 3 connections to memory:7 are full"):
                    await scene.channel.call(CALL, b"")
            assert len(scene.network.dials) == 3
            for _ in range(3):
                await scene.channel.call(CALL, b"", control=True)

    async def test_a_peer_that_allows_no_stream_at_all_is_not_dialed_for_ever(self, autojump_clock):
        async with open_scene() as scene, trio.open_nursery() as nursery:
            listener = scene.network.listen(ADDRESS)

            async def allow_nothing() -> None:
                while True:
                    (await listener.accept()).send_nowait(frames.settings({3: 0}))

            nursery.start_soon(allow_nothing)
            for _ in range(3):
                with pytest.raises(LinkError, match="takes no calls"):
                    await scene.say()
            assert len(scene.network.dials) == 1
            nursery.cancel_scope.cancel()


class TestVisibility:
    async def test_every_change_of_state_is_told_once_with_its_reason(self, autojump_clock):
        async with open_scene() as scene:
            assert scene.channel.state == "idle"
            with pytest.raises(LinkError):
                await scene.say()
            assert scene.channel.state == "backoff"
            assert "backoff (cannot connect to memory:7: nobody listens there)" in repr(scene.channel)
            await scene.start()
            await trio.sleep(2)
            for _ in range(3):
                await scene.say()
            assert scene.channel.state == "ready"
            await trio.sleep(20)
            await scene.stop()
            assert scene.channel.state == "idle"
            with pytest.raises(LinkError):
                await scene.say()
        assert scene.channel.state == "closed"
        assert scene.seen() == [
            ("connecting", None),
            ("backoff", "cannot connect to memory:7: nobody listens there"),
            ("connecting", None),
            ("ready", None),
            ("idle", "memory:7 closed the connection"),
            ("connecting", None),
            ("backoff", "cannot connect to memory:7: nobody listens there"),
            ("closed", None),
        ]
        assert {change.address for change in scene.states} == {ADDRESS}

    async def test_closing_is_told_as_such_whatever_there_is_to_close(self, autojump_clock):
        async with open_scene() as scene:
            await scene.start()
            await scene.say()
            scene.channel.close()
            assert scene.seen()[-1] == ("closed", None)
            await trio.testing.wait_all_tasks_blocked()
        async with open_scene() as dialing, trio.open_nursery() as nursery:
            dialing.network.black_hole(ADDRESS)

            async def call() -> None:
                with pytest.raises(LinkError, match="closed"):
                    await dialing.say()

            nursery.start_soon(call)
            await trio.sleep(1)
            dialing.channel.close()
        for seen in (scene.seen(), dialing.seen()):
            assert [state for state, _ in seen].count("closed") == 1
            assert seen[-1] == ("closed", None)

    async def test_a_dial_that_is_cancelled_with_its_nursery_is_no_failure(self, autojump_clock):
        network = Network()
        network.black_hole(ADDRESS)
        states: list[StateChange] = []
        async with trio.open_nursery() as nursery:
            channel = connect_channel(nursery, ADDRESS, dialer=network.dial, on_state=states.append)
            nursery.start_soon(channel.connect)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert "backoff" not in [change.state for change in states]

    async def test_a_link_lost_after_a_second_one_could_not_be_made_leaves_no_pause_behind(self, autojump_clock):
        async with open_scene() as scene:
            http2 = Http2Settings(max_concurrent_streams=2)
            scene.server = Server(raw={CALL: echo}, settings=ServerSettings(http2=http2))
            await scene.start()
            await scene.channel.start(CALL)
            scene.network._listeners.clear()
            with pytest.raises(LinkError):
                await scene.channel.start(CALL)
            await trio.sleep(30)
            await scene.stop()
            assert scene.channel.state == "idle"

    async def test_a_dialers_mistake_is_no_state_of_the_peer(self, autojump_clock):
        async def dial(address: str) -> Transport:
            raise ZeroDivisionError(address)

        states: list[StateChange] = []
        async with open_channel(ADDRESS, dialer=dial, on_state=states.append) as channel:
            with pytest.raises(ZeroDivisionError):
                await channel.connect()
            assert [change.state for change in states] == ["connecting", "idle"]

    async def test_a_link_that_only_finishes_its_calls_is_shown_and_not_counted(self, scripted_server, autojump_clock):
        async with scripted_server() as (channel, peer):
            await channel.call(CALL, b"")
            await peer.request()
            assert channel.state == "ready"
            peer.connection.go_away()
            peer.flush()
            await trio.testing.wait_all_tasks_blocked()
            assert channel.state == "idle"
            assert len(channel.links) == 1
            assert "1 streams" in repr(channel)
