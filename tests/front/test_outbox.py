"""What a connection has still to say."""

from __future__ import annotations

import pytest
import trio

from trio_router.front.faults import ClientGone
from trio_router.front.outbox import Outbox
from trio_router.rpc.memory import MemoryTransport, memory_link


@pytest.fixture
def box(nursery):
    events: list[str] = []

    def make(
        *, capacity: int = 100, limit: int = 1000, stall: float = 60.0
    ) -> tuple[Outbox, MemoryTransport, list[str]]:
        mine, theirs = memory_link(capacity)
        outbox = Outbox(
            mine,
            nursery=nursery,
            stall_seconds=stall,
            max_pending_bytes=limit,
            on_broken=lambda: events.append("broken"),
        )
        outbox.on_drained = lambda: events.append("drained")
        return outbox, theirs, events

    return make


async def test_what_fits_leaves_at_once(autojump_clock, box) -> None:
    outbox, theirs, events = box()

    assert outbox.write(b"hello")

    assert theirs.recv_nowait(100) == b"hello"
    assert events == []


async def test_the_rest_follows_in_order_when_there_is_room(autojump_clock, box) -> None:
    outbox, theirs, events = box()
    assert not outbox.write(b"a" * 150)
    assert not outbox.write(b"b" * 150)
    assert outbox.pending_bytes == 200

    received = b""
    while len(received) < 300:
        await theirs.wait_readable()
        received += theirs.recv_nowait(30) or b""

    await outbox.drain()
    assert received == b"a" * 150 + b"b" * 150
    assert events == ["drained"]
    assert outbox.write(b"c")


async def test_going_on_past_full_loses_the_client(autojump_clock, box) -> None:
    outbox, _theirs, events = box(limit=1000)
    outbox.write(b"a" * 100)
    for _ in range(9):
        outbox.write(b"b" * 100)
    assert not outbox.broken

    outbox.write(b"c" * 300)

    assert outbox.broken
    assert outbox.pending_bytes == 0
    assert events == ["broken"]
    assert outbox.write(b"d") is False


async def test_one_large_write_is_not_held_against_anybody(autojump_clock, box) -> None:
    outbox, _theirs, _events = box(limit=1000)

    outbox.write(b"a" * 50_000)

    assert not outbox.broken


async def test_a_closed_peer_breaks_it(autojump_clock, box) -> None:
    outbox, theirs, events = box()
    theirs.close()

    assert outbox.write(b"x") is False

    assert events == ["broken"]
    with pytest.raises(ClientGone):
        await outbox.drain()


async def test_a_peer_that_closes_while_bytes_are_pending_breaks_it(autojump_clock, box) -> None:
    outbox, theirs, events = box()
    outbox.write(b"a" * 150)
    await trio.testing.wait_all_tasks_blocked()

    theirs.close()
    with pytest.raises(ClientGone):
        await outbox.drain()

    assert events == ["broken"]


async def test_a_peer_that_takes_nothing_breaks_it_in_time(autojump_clock, box) -> None:
    outbox, _theirs, _events = box(stall=60.0)
    outbox.write(b"a" * 150)

    with pytest.raises(ClientGone):
        await outbox.drain()

    assert trio.current_time() == pytest.approx(60)


async def test_the_drained_callback_may_write_again(autojump_clock, box) -> None:
    outbox, theirs, _events = box()
    outbox.on_drained = lambda: outbox.write(b"b" * 250) and None
    outbox.write(b"a" * 150)

    received = b""
    while len(received) < 400:
        await theirs.wait_readable()
        received += theirs.recv_nowait(1000) or b""
        if received.startswith(b"a" * 150 + b"b"):
            outbox.on_drained = None

    assert received == b"a" * 150 + b"b" * 250


async def test_nobody_is_told_to_go_on_when_the_client_is_lost(autojump_clock, box) -> None:
    outbox, _theirs, events = box(limit=200)
    outbox.write(b"a" * 150)
    await trio.testing.wait_all_tasks_blocked()
    outbox.write(b"b" * 300)

    await trio.sleep(1000)

    assert events == ["broken"]
