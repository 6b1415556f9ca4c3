"""A call that is left at any step of the whole run leaves nothing behind on either side (invariants I8, I9).

Each scenario is run again for every k: at the k-th task step of the run, whichever task that is, its client leaves or
its connection breaks. Then nothing may be in flight, every byte of both connection windows must be accounted for, and
the next call must work, on the same link if that still stands.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress

import pytest
import trio
import trio.testing
from grpclib.exceptions import GRPCError

from trio_router.errors import LinkError
from trio_router.http2.settings import Http2Settings
from trio_router.protocol.messages import (
    GenerateRequest,
    GenerateResponse,
    GenerateStreamChunk,
    HealthBase,
    HealthStub,
    ServiceHealthRequest,
    ServiceHealthResponse,
    VllmEngineBase,
    VllmEngineStub,
)
from trio_router.rpc.call import ClientCall
from trio_router.rpc.channel import Channel
from trio_router.rpc.link import Link
from trio_router.rpc.server import Server
from trio_router.rpc.servercall import ServerCall
from trio_router.rpc.stub import StubStream

ECHO = "/test.Service/Echo"
COUNT = "/test.Service/Count"
# Streams of a few dozen bytes at a time, so that flow control stops everybody all the time.
NARROW = Http2Settings.for_test()

Scenario = Callable[[Channel], Awaitable[None]]


class AtStep(trio.abc.Instrument):
    """Calls `act` once, after the k-th task step from now."""

    def __init__(self, k: int, act: Callable[[], None]) -> None:
        self.left = k
        self.act = act

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.left -= 1
        if self.left == 0:
            self.act()


async def echo(call: ServerCall) -> None:
    while (message := await call.receive()) is not None:
        await call.send(message)


async def count(call: ServerCall) -> None:
    async with trio.open_nursery() as nursery:  # a handler that has tasks of its own
        nursery.start_soon(call.receive)
        for number in range(8):
            await call.send(bytes([number]) * 50)


class Health(HealthBase):
    async def check(self, health_check_request: ServiceHealthRequest) -> ServiceHealthResponse:
        await trio.lowlevel.checkpoint()
        return ServiceHealthResponse()


class Engine(VllmEngineBase):
    async def generate(self, generate_request: GenerateRequest) -> AsyncIterator[GenerateResponse]:
        for token in range(4):
            yield GenerateResponse(chunk=GenerateStreamChunk(token_ids=[token] * 50))
            await trio.lowlevel.checkpoint()


async def unary(channel: Channel) -> None:
    await HealthStub(channel).check(ServiceHealthRequest(service="x" * 100))


async def streaming(channel: Channel) -> None:
    async with aclosing(VllmEngineStub(channel).generate(GenerateRequest(), timeout=60)) as replies:
        assert len([reply async for reply in replies]) == 4


async def pumped(channel: Channel) -> None:
    call = await channel.call(COUNT, b"")
    received: list[bytes] = []
    try:
        await call.pump(lambda batch: bool(received.extend(batch)) or True)
        assert received == [bytes([number]) * 50 for number in range(8)]
    finally:
        call.cancel()


async def both_ways(channel: Channel) -> None:
    call = await channel.start(ECHO, timeout=60)

    async def send() -> None:
        for number in range(5):
            await call.send(bytes([number]) * 100, end=number == 4)

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            for number in range(5):
                assert await call.receive() == bytes([number]) * 100
            assert await call.receive() is None
    finally:
        call.cancel()


SCENARIOS: list[Scenario] = [unary, streaming, pumped, both_ways]


def leaks(channel: Channel, server: Server) -> list[str]:
    """What is still there of calls that have ended, in words."""
    found = []
    if server.calls_in_flight:
        found.append(f"{server.calls_in_flight} handlers")
    links: list[Link] = [*channel.links, *server._links]
    found += [f"a stream of {link}" for link in links if link.closed_because is None and link.connection.open_streams]
    owners = {link: [each for each in link._sweeper._live if isinstance(each, ClientCall)] for link in links}
    found += [f"an owner in {link}" for link in links if link._full or owners[link]]
    if len(links) == 2 and not any(link.closed_because for link in links):
        cores = [link.connection._core for link in links]
        for sender, receiver in (cores, reversed(cores)):
            window = receiver.settings.connection_window_bytes
            if sender.outbox.window + receiver.uncredited != window:
                found.append(f"{window - sender.outbox.window - receiver.uncredited} bytes of a connection's window")
    return found


async def leave_at(open_pair, scenario: Scenario, k: int, *, how: str, met: bool) -> tuple[bool, list[str]]:
    """One run; whether the scenario was still under way at step k, and what was left of it."""
    async with open_pair(
        Health(), Engine(), raw={ECHO: echo, COUNT: count}, server_http2=NARROW, client_http2=NARROW, capacity_bytes=300
    ) as (channel, server):
        if met:
            await unary(channel)
            await trio.testing.wait_all_tasks_blocked()
        left = trio.CancelScope()

        def act() -> None:
            if how == "cancel":
                left.cancel()
            for link in list(channel.links if how == "our end breaks" else server._links if how != "cancel" else ()):
                link.close(LinkError("broken by the test"))

        instrument = AtStep(k, act)
        trio.lowlevel.add_instrument(instrument)
        with left, suppress(GRPCError, LinkError):
            try:
                await scenario(channel)
            except* (GRPCError, LinkError):
                pass
        trio.lowlevel.remove_instrument(instrument)
        await trio.testing.wait_all_tasks_blocked()
        found = leaks(channel, server)
        links = list(channel.links)
        # A connection that breaks as it is made is a failed attempt, after which there is a pause.
        call = await channel.call(ECHO, b"x" * 1000, wait_for_ready=True)
        if [await call.receive(), await call.receive()] != [b"x" * 1000, None]:
            found.append("a link that serves no more")
        if how == "cancel" and links and channel.links != links:
            found.append("a link that was given up")
        await trio.testing.wait_all_tasks_blocked()
        return instrument.left <= 0, found + leaks(channel, server)


async def every_step(open_pair, scenario: Scenario, *, how: str, met: bool) -> tuple[int, dict[int, list[str]]]:
    """Run the scenario for every k; how many there were, and what leaked at which."""
    found: dict[int, list[str]] = {}
    for k in range(1, 2000):
        under_way, left = await leave_at(open_pair, scenario, k, how=how, met=met)
        if left:
            found[k] = left
        if not under_way:
            return k, found
    raise AssertionError("the scenario does not end")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("met", [True, False], ids=["met", "cold"])
@pytest.mark.parametrize("how", ["cancel", "our end breaks", "their end breaks"])
async def test_i8_leaving_at_any_step_leaks_nothing(open_pair, autojump_clock, scenario, how, met):
    steps, found = await every_step(open_pair, scenario, how=how, met=met)
    assert found == {}
    assert steps > 8, "the scenario has become too short to mean anything"


class TestTheSearchCanFail:
    async def test_it_finds_a_stub_that_does_not_cancel_its_call(self, open_pair, autojump_clock, monkeypatch):
        async def forget(self, *exc_info) -> None:
            return None

        monkeypatch.setattr(StubStream, "__aexit__", forget)
        _, found = await every_step(open_pair, streaming, how="cancel", met=True)
        assert any("handlers" in text for texts in found.values() for text in texts)

    async def test_it_finds_a_call_that_keeps_its_deadline(self, open_pair, autojump_clock, monkeypatch):
        monkeypatch.setattr(Link, "forget", lambda self, owner: None)
        _, found = await every_step(open_pair, streaming, how="cancel", met=True)
        assert any("an owner" in text for texts in found.values() for text in texts)

    async def test_it_finds_a_cancel_that_sends_no_reset(self, open_pair, autojump_clock, monkeypatch):
        end = ClientCall._end
        monkeypatch.setattr(ClientCall, "_end", lambda self, error, *, reset: end(self, error, reset=False))
        _, found = await every_step(open_pair, pumped, how="cancel", met=True)
        assert any("a stream" in text for texts in found.values() for text in texts)
