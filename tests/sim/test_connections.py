"""A whole router and the connections to its workers: lost, refused, full, and made again."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
import trio
import trio.testing

from trio_router.dispatch.janitor import JanitorSettings
from trio_router.dispatch.retry import RetrySettings
from trio_router.dispatch.router import RouterSettings
from trio_router.errors import RouterError, WorkerUnavailable
from trio_router.http2.frames import ErrorCode
from trio_router.http2.settings import Http2Settings
from trio_router.policy.breaker import BreakerSettings, BreakerState
from trio_router.protocol.codec import encode
from trio_router.protocol.messages import GenerateRequest
from trio_router.rpc import server as rpc_server
from trio_router.rpc.keepalive import PingLimits
from trio_router.rpc.memory import MemoryNetwork
from trio_router.rpc.server import ServerSettings
from trio_router.rpc.servercall import ServerCall
from trio_router.testing import scripted
from trio_router.testing.scripted import a_request, answer, decode_worker, hand_over, open_scene, prefill_worker


@pytest.fixture
def serving(monkeypatch):
    """Have scripted workers serve with other settings than their own."""

    def use(settings: ServerSettings) -> None:
        monkeypatch.setattr(
            scripted, "Server", lambda services, *, raw: rpc_server.Server(services, raw=raw, settings=settings)
        )

    return use


async def tokens(scene, name: str = "request") -> list[bool]:
    async with scene.router.generate(a_request(name)) as stream:
        return [frame.is_complete async for frame in stream]


DONE = [False, False, True]


async def test_a_restarted_worker_is_used_again_and_its_absence_is_told(autojump_clock):
    prefill, decode = prefill_worker(), decode_worker()
    async with open_scene(prefill, decode) as scene:
        assert await tokens(scene) == DONE
        decode.stop()
        scene.recorder.connections.clear()
        await trio.sleep(60)
        with pytest.raises(RouterError):
            await tokens(scene)
        absence = [change[1:] for change in scene.recorder.connections if change[0] == decode.address]
        states = [state for state, _ in absence]
        assert states[:3] == ["idle", "connecting", "backoff"]
        assert set(states[3:]) == {"connecting", "backoff"}
        assert all("nobody listens" in reason for state, reason in absence if state == "backoff")
        scene.recorder.connections.clear()
        await scene.start(decode)
        await trio.sleep(6)  # the longest pause between attempts, and its jitter
        assert await tokens(scene) == DONE
        assert [change for change in scene.recorder.connections if change[0] == decode.address] == [
            (decode.address, "connecting", None),
            (decode.address, "ready", None),
        ]


async def test_a_dead_worker_is_dialed_seldom_while_requests_keep_coming(autojump_clock, monkeypatch):
    dials: list[str] = []
    dial = MemoryNetwork.dial

    async def noted(network: MemoryNetwork, address: str):
        dials.append(address)
        return await dial(network, address)

    monkeypatch.setattr(MemoryNetwork, "dial", noted)
    dead, alive = decode_worker(name="dead"), decode_worker(name="alive")
    async with open_scene(prefill_worker(), dead, alive) as scene:
        dials.clear()
        dead.stop()
        for number in range(200):
            assert await tokens(scene, f"request-{number}") == DONE
            await trio.sleep(0.1)
        assert 5 < dials.count(dead.address) < 20


@pytest.mark.parametrize("interval", [10.0, 300.0], ids=["of inference servers", "of gRPC's core"])
async def test_case_g1_a_request_whose_prefill_takes_400_s_is_served(autojump_clock, serving, interval):
    async def slowly(call: ServerCall, request: GenerateRequest) -> None:
        await trio.sleep(400)
        await hand_over(call, request)

    serving(ServerSettings(ping_limits=PingLimits(interval=interval)))
    async with open_scene(prefill_worker(slowly), decode_worker()) as scene:
        begin = trio.current_time()
        assert await tokens(scene) == DONE
        assert trio.current_time() - begin >= 400
        assert scene.recorder.failures == []


async def test_case_g1_of_a_worker_that_complains_of_pings_streams_go_on_and_new_requests_move(autojump_clock):
    """GOAWAY in mid-stream: what the worker has begun it finishes, what it has not seen goes over a new connection."""
    links = []
    go_on = trio.Event()

    async def first_waits(call: ServerCall, request: GenerateRequest) -> None:
        links.append(call._link)
        if len(links) == 1:
            await call.send(scripted.chunk(7))
            await go_on.wait()
        await answer(call, request)

    async with open_scene(prefill_worker(), decode_worker(first_waits)) as scene, trio.open_nursery() as nursery:
        served = []

        async def request(name: str) -> None:
            served.append((name, await tokens(scene, name)))

        nursery.start_soon(request, "early")
        await trio.testing.wait_all_tasks_blocked()
        links[0].connection.go_away(ErrorCode.ENHANCE_YOUR_CALM, b"too_many_pings")
        for number in range(5):
            nursery.start_soon(request, f"late-{number}")  # some cross with the GOAWAY
        links[0].flush()
        await trio.sleep(5)
        assert sorted(name for name, _ in served) == [f"late-{number}" for number in range(5)]
        go_on.set()
        await trio.sleep(1)
        assert served[-1] == ("early", [False, *DONE])
        assert dict(served[:-1]) == {f"late-{number}": DONE for number in range(5)}
        assert len(set(links)) == 2
        assert scene.leaks() == []


async def test_a_release_gets_through_when_decode_legs_use_every_stream(autojump_clock, serving):
    """The request whose decode leg finds no room, and no other connection, has a handoff to give back."""

    async def hold(call: ServerCall, request: GenerateRequest) -> None:
        if request.sampling_params.max_tokens == 0:
            await answer(call, request)
        await trio.sleep_forever()

    serving(ServerSettings(http2=Http2Settings(max_concurrent_streams=40)))
    decode = decode_worker(hold)
    settings = RouterSettings(retry=RetrySettings(attempts=1))
    async with open_scene(prefill_worker(), decode, router=settings) as scene:
        client = next(w.client for w in scene.router.registry.workers if w.name == decode.address)
        for number in range(32):
            await client.generate(encode(a_request(f"held-{number}")))
        scene.network.black_hole(decode.address)
        with pytest.raises(WorkerUnavailable, match="no answer within 10 s"):
            await tokens(scene)
        await trio.sleep(1)
        assert len(decode.releases) == 2  # twice, since the pair has never met
        assert scene.recorder.handoffs == ["released"]
        assert scene.leaks() == []


async def test_aborts_get_through_when_requests_use_every_stream(autojump_clock, serving):
    """With 40 streams to a connection and one connection to a worker, 32 requests are all it takes."""
    begun = trio.Event()

    async def hold(call: ServerCall, request: GenerateRequest) -> None:
        begun.set()
        await trio.sleep_forever()

    serving(ServerSettings(http2=Http2Settings(max_concurrent_streams=40)))
    prefill, decode = prefill_worker(hold), decode_worker()
    settings = RouterSettings(janitor=JanitorSettings(prefill_drain=5.0))
    async with open_scene(prefill, decode, router=settings) as scene, AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())

        async def request(name: str, scope: trio.CancelScope) -> None:
            with scope:
                await tokens(scene, name)

        scopes = [trio.CancelScope() for _ in range(32)]
        for number, scope in enumerate(scopes):
            nursery.start_soon(request, f"request-{number}", scope)
        await trio.testing.wait_all_tasks_blocked()
        (link,) = scene.router.registry.workers[0].client._channel.links
        assert link.connection.open_streams == 32
        scene.network.black_hole(prefill.address)  # no other connection can be made
        for scope in scopes[:3]:
            scope.cancel()
        await trio.sleep(0.2)
        assert len(prefill.aborted) == 3
        nursery.cancel_scope.cancel()
    assert prefill.aborted


async def test_a_worker_that_dies_gets_no_requests_from_then_on(autojump_clock):
    """With the probes' usual interval of ten seconds it got them for half a minute."""
    prefill, decode = prefill_worker(), decode_worker()
    async with open_scene(prefill, decode) as scene:
        assert await tokens(scene) == DONE
        decode.stop()
        await trio.sleep(2)
        assert not scene.router.ready
        with pytest.raises(WorkerUnavailable, match="no decode worker is ready"):
            await tokens(scene)


async def test_a_worker_that_was_restarted_within_a_probes_interval_is_a_new_one_at_once(autojump_clock):
    """Its breaker is closed: with that of the process before it, the loss of another worker was a whole outage."""
    settings = RouterSettings(breaker=BreakerSettings(failures=1), retry=RetrySettings(attempts=1))
    prefill, decode = prefill_worker(), decode_worker()
    async with open_scene(prefill, decode, router=settings) as scene:
        assert await tokens(scene) == DONE
        decode.stop()
        with pytest.raises(RouterError):
            await tokens(scene)
        [worker] = [each for each in scene.router.registry.workers if each.name == decode.address]
        assert worker.breaker.state(trio.current_time()) is BreakerState.OPEN
        decode.engine_id = "engine-2"
        await scene.start(decode)
        await trio.sleep(2)
        assert await tokens(scene) == DONE


async def test_a_connection_that_is_lost_and_made_again_costs_a_probe_and_no_request(autojump_clock):
    prefill, decode = prefill_worker(), decode_worker()
    async with open_scene(prefill, decode) as scene:
        decode.stop()
        while decode.address in scene.network._listeners:  # it goes a moment later
            await trio.lowlevel.checkpoint()
        await scene.start(decode)
        for _ in range(5):
            assert await tokens(scene) == DONE
            await trio.sleep(0.1)
        assert scene.router.ready
