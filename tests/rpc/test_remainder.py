"""Answers whose handlers have gone, and clients that do not read them."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from trio_router.http2.frames import ErrorCode
from trio_router.rpc.server import UNREAD_TIMEOUT
from trio_router.rpc.servercall import ServerCall

CALL = "/test.Service/Call"
OTHER = "/test.Service/Other"
MESSAGES = 200
WINDOW = 65_535


async def answer(call: ServerCall) -> None:
    """Says more than a window holds, and leaves."""
    call.send_nowait([bytes(1000)] * MESSAGES)


async def echo(call: ServerCall) -> None:
    while (message := await call.receive()) is not None:
        await call.send(message)


async def left_unread(server, peer):
    """A call that has ended for its server and not for its client; and the server's end of its link."""
    stream = peer.call(CALL)
    await peer.until(lambda: sum(map(len, stream.messages)) >= WINDOW - 2000)
    await trio.testing.wait_all_tasks_blocked()
    assert server.calls_in_flight == 0
    (link,) = server._links
    assert link.connection.open_streams == 1
    return stream, link


def is_forgotten(link) -> bool:
    return not (link._full or link._sweeper._live or link.connection.open_streams)


async def test_what_is_never_read_is_dropped_in_time(scripted_client, autojump_clock):
    async with scripted_client(raw={CALL: answer, OTHER: echo}) as (server, peer):
        stream, link = await left_unread(server, peer)
        start = trio.current_time()
        await peer.until(lambda: stream.closed)
        assert trio.current_time() - start == pytest.approx(UNREAD_TIMEOUT)
        assert stream.reset_code == ErrorCode.CANCEL
        assert is_forgotten(link)
        other = peer.call(OTHER, b"fine")
        await peer.until(lambda: other.closed)
        assert other.take() == [b"fine"]


async def test_who_reads_slowly_gets_all_of_it(scripted_client, autojump_clock):
    async with scripted_client(raw={CALL: answer}) as (server, peer):
        stream, link = await left_unread(server, peer)
        received = 0
        while not stream.closed:
            await trio.sleep(UNREAD_TIMEOUT * 0.9)
            received += len(stream.take())
            stream.credit()
            peer.flush()
            await peer.read()
        received += len(stream.take())
        assert (received, stream.reset_code) == (MESSAGES, None)
        await trio.testing.wait_all_tasks_blocked()
        assert is_forgotten(link)


async def test_nothing_remains_of_what_the_client_gave_up(scripted_client, autojump_clock):
    async with scripted_client(raw={CALL: answer}) as (server, peer):
        stream, link = await left_unread(server, peer)
        peer.reset(stream, ErrorCode.CANCEL)
        await trio.testing.wait_all_tasks_blocked()
        assert is_forgotten(link)


async def test_nothing_remains_of_what_was_read(scripted_client, autojump_clock):
    async with scripted_client(raw={CALL: answer}) as (server, peer):
        stream, link = await left_unread(server, peer)
        while not stream.closed:
            stream.take()
            stream.credit()
            peer.flush()
            await peer.read()
        await trio.testing.wait_all_tasks_blocked()
        assert is_forgotten(link)


async def test_a_connection_that_breaks_takes_it_along(scripted_client, autojump_clock):
    async with scripted_client(raw={CALL: answer}) as (server, peer):
        _stream, link = await left_unread(server, peer)
        peer.close()
        await trio.testing.wait_all_tasks_blocked()
        assert link.closed_because is not None
        assert not server._links
