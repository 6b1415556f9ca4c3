"""What one client may make a server hold, and how large what it sends may be."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from trio_router.errors import TooLarge
from trio_router.http2 import frames
from trio_router.http2.frames import ErrorCode
from trio_router.http2.settings import Http2Settings
from trio_router.rpc.metadata import get
from trio_router.rpc.server import HANDLERS_PER_STREAM, UNREAD_TIMEOUT
from trio_router.rpc.servercall import ServerCall

CALL = "/test.Service/Call"
OTHER = "/test.Service/Other"


async def echo(call: ServerCall) -> None:
    while (message := await call.receive()) is not None:
        await call.send(message)


class TestBounds:
    """What one client may make a server hold."""

    async def test_handlers_that_are_slow_to_leave_are_bounded(self, scripted_client, autojump_clock):
        running = 0
        most = 0
        may_leave = trio.Event()

        async def slow(call: ServerCall) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                await trio.sleep_forever()
            finally:
                # What is tried: a handler that takes its time to leave. The test ends it.
                with trio.CancelScope(shield=True):
                    await may_leave.wait()
                running -= 1

        limit = 10
        http2 = Http2Settings(max_concurrent_streams=limit)
        async with scripted_client(raw={CALL: slow, OTHER: echo}, http2=http2) as (_, peer):
            refused = 0
            for _ in range(10):
                streams = [peer.call(CALL) for _ in range(limit)]
                await trio.testing.wait_all_tasks_blocked()
                peer.connection.receive(peer.transport.recv_nowait(1 << 20) or b"")
                refused += sum(stream.refused for stream in streams)
                for stream in streams:
                    peer.reset(stream, ErrorCode.CANCEL)
                await trio.testing.wait_all_tasks_blocked()
            assert most == HANDLERS_PER_STREAM * limit
            assert refused == 10 * limit - most
            may_leave.set()
            await trio.testing.wait_all_tasks_blocked()
            assert running == 0
            other = peer.call(OTHER, b"fine")
            await peer.until(lambda: other.closed)
            assert other.take() == [b"fine"]

    async def test_a_client_that_stops_reading_is_hung_up_on(self, scripted_client, autojump_clock):
        """Neither HTTP/2's windows nor pings end this one: it takes nothing off its socket any more."""

        async def talk(call: ServerCall) -> None:
            while True:
                await call.send(bytes(1000))

        async with scripted_client(raw={CALL: talk}, capacity_bytes=10_000) as (server, peer):
            peer.call(CALL)
            await trio.testing.wait_all_tasks_blocked()
            (link,) = server._links
            assert link.stuck
            await trio.sleep(UNREAD_TIMEOUT - 1)
            assert link.closed_because is None
            await trio.sleep(2)
            assert str(link.closed_because).endswith(f"has read nothing for {UNREAD_TIMEOUT:g} s")
            await trio.testing.wait_all_tasks_blocked()
            assert (server.calls_in_flight, server._links) == (0, {})

    async def test_a_client_that_reads_now_and_then_is_not(self, scripted_client, autojump_clock):
        async def talk(call: ServerCall) -> None:
            for _ in range(50):
                await call.send(bytes(1000))

        async with scripted_client(raw={CALL: talk}, capacity_bytes=10_000) as (_, peer):
            stream = peer.call(CALL)
            while not stream.closed:
                await trio.sleep(UNREAD_TIMEOUT - 1)
                await peer.read()
            assert (len(stream.messages), stream.reset_code) == (50, None)


class TestSizesOfHeaders:
    """What the client's SETTINGS_MAX_HEADER_LIST_SIZE does to answers; `peer` allows 400 bytes."""

    @pytest.fixture
    def small_client(self, scripted_client):
        @asynccontextmanager
        async def pair(**settings):
            http2 = Http2Settings(max_header_list_bytes=400)
            async with scripted_client(client_http2=http2, **settings) as (server, peer):
                yield server, peer

        return pair

    @pytest.mark.parametrize("replies", [0, 1])
    async def test_trailers_that_are_too_large_become_a_status_that_says_so(
        self, small_client, autojump_clock, replies
    ):
        async def wordy(call: ServerCall) -> None:
            for _ in range(replies):
                await call.send(b"reply")
            raise GRPCError(Status.ABORTED, "x" * 1000)

        async with small_client(raw={CALL: wordy, OTHER: echo}) as (_, peer):
            stream = peer.call(CALL)
            await peer.until(lambda: stream.closed)
            assert stream.take() == [b"reply"] * replies
            assert get(stream.trailers, b"grpc-status") == b"8"
            assert b"over the peer's limit of 400" in get(stream.trailers, b"grpc-message")

    async def test_initial_metadata_that_is_too_large_is_the_handlers_to_know(self, small_client, autojump_clock):
        caught = []

        async def wordy(call: ServerCall) -> None:
            try:
                call.send_headers(metadata={"big": "x" * 1000})
            except TooLarge as exc:
                caught.append(exc)
            await call.send(b"without")

        async with small_client(raw={CALL: wordy}) as (_, peer):
            stream = peer.call(CALL)
            await peer.until(lambda: stream.closed)
            assert (len(caught), stream.take()) == (1, [b"without"])
            assert get(stream.trailers, b"grpc-status") == b"0"

    async def test_a_client_that_takes_nothing_at_all_is_reset(self, scripted_client, autojump_clock):
        async with scripted_client(raw={CALL: echo}) as (_, peer):
            peer.write(frames.settings({6: 10}))
            stream = peer.call(CALL, b"hello")
            await peer.until(lambda: stream.closed)
            assert stream.reset_code == ErrorCode.ENHANCE_YOUR_CALM
