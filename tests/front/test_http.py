"""The server: accepting, the connection cap, shutting down."""

from __future__ import annotations

import errno

import pytest
import trio

from trio_router.front.exchange import Exchange
from trio_router.front.http import HttpServer
from trio_router.front.settings import HttpSettings
from trio_router.rpc.memory import MemoryNetwork
from trio_router.rpc.transport import Transport


async def ok(exchange: Exchange) -> None:
    await exchange.respond(200, body=b"ok")


class Slow:
    """Answers after `seconds`, streaming a first piece at once."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.cancelled = 0

    async def __call__(self, exchange: Exchange) -> None:
        try:
            writer = exchange.start_stream()
            writer.write_nowait(b"begun ")
            await trio.sleep(self.seconds)
            await writer.finish(b"done")
        except trio.Cancelled:
            self.cancelled += 1
            raise


class ExhaustedListener:
    """Fails like a process without descriptors, a few times."""

    def __init__(self, inner, *, failures: int) -> None:
        self._inner = inner
        self.failures = failures
        self.address = inner.address

    async def accept(self) -> Transport:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return await self._inner.accept()

    def close(self) -> None:
        self._inner.close()


async def test_accept_errors_do_not_end_the_server(nursery, autojump_clock) -> None:
    network = MemoryNetwork()
    listener = ExhaustedListener(network.listen("a:1"), failures=5)
    server = HttpServer(ok, settings=HttpSettings())
    await nursery.start(server.serve, listener)

    link = await network.dial("a:1")
    link.send_nowait(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    await link.wait_readable()

    assert (link.recv_nowait(65536) or b"").endswith(b"ok")
    assert listener.failures == 0
    nursery.cancel_scope.cancel()


async def test_over_the_cap_an_idle_connection_gives_way(autojump_clock, start) -> None:
    site = await start(ok, max_connections=2)
    first, second = await site.connect(), await site.connect()
    await first.request("GET", "/")
    await second.request("GET", "/")

    third = await site.connect()

    assert (await third.request("GET", "/")).status == 200
    assert await first.is_closed()
    assert (await second.request("GET", "/")).status == 200
    assert trio.current_time() < 1


async def test_over_the_cap_a_new_client_waits_for_the_busy_ones(autojump_clock, start) -> None:
    site = await start(Slow(5), max_connections=2)
    busy = [await site.connect(), await site.connect()]
    for client in busy:
        await client.send(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
    await trio.testing.wait_all_tasks_blocked()
    third = await site.connect()
    await third.send(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    await trio.testing.wait_all_tasks_blocked()
    assert site.server.connections == 2

    assert (await third.response()).body == b"begun done"
    assert trio.current_time() == pytest.approx(10)


async def test_draining_closes_idle_connections_and_the_listener_at_once(autojump_clock, start) -> None:
    site = await start(ok)
    client = await site.connect()
    await client.request("GET", "/")

    site.server.drain(grace=30)
    await site.done.wait()

    assert await client.is_closed()
    assert trio.current_time() < 1
    with pytest.raises(Exception, match="nobody listens"):
        await site.connect()


async def test_draining_lets_a_response_under_way_finish(autojump_clock, start) -> None:
    site = await start(Slow(10))
    client = await site.connect()
    await client.send(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n" * 2)
    await client.until(b"begun ")

    site.server.drain(grace=30)
    rest = await client.to_end()
    await site.done.wait()

    assert rest.startswith(b"\r\n4\r\ndone\r\n0\r\n\r\n")
    assert trio.current_time() == pytest.approx(20)


async def test_responses_begun_while_draining_announce_the_close(autojump_clock, start) -> None:
    site = await start(ok)
    client = await site.connect()
    await client.send(b"GET / HTTP/1.1\r\n")
    await trio.testing.wait_all_tasks_blocked()
    site.server.drain(grace=30)

    await client.send(b"host: a\r\n\r\n")

    assert (await client.response()).header("connection") == "close"
    assert await client.is_closed()


async def test_draining_cancels_what_outlives_the_grace(autojump_clock, start) -> None:
    slow = Slow(1000)
    site = await start(slow)
    client = await site.connect()
    await client.send(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    await client.until(b"begun ")

    site.server.drain(grace=30)
    await site.done.wait()

    assert slow.cancelled == 1
    assert trio.current_time() == pytest.approx(30)
    assert not (await client.to_end()).endswith(b"0\r\n\r\n")


async def test_a_stalled_client_cannot_hold_up_the_shutdown(autojump_clock, start) -> None:
    async def flood(exchange: Exchange) -> None:
        await exchange.respond(200, body=b"x" * 1_000_000)

    site = await start(flood, capacity=4096)
    client = await site.connect()
    await client.send(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    await trio.testing.wait_all_tasks_blocked()

    site.server.drain(grace=3)
    await site.done.wait()

    assert trio.current_time() == pytest.approx(3)


async def test_no_connection_outlives_a_cancelled_server(autojump_clock, start) -> None:
    slow = Slow(1000)
    site = await start(slow)
    for _ in range(5):
        client = await site.connect()
        await client.send(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        await client.until(b"begun ")

    site.scope.cancel()
    await site.done.wait()

    assert (site.server.connections, slow.cancelled) == (0, 5)


async def test_responses_are_counted_by_status(autojump_clock, start) -> None:
    site = await start(ok, max_body_bytes=10)
    good, large, garbled = await site.connect(), await site.connect(), await site.connect()

    await good.request("GET", "/")
    await good.request("GET", "/")
    await large.request("POST", "/", body=b"x" * 11)
    await garbled.send(b"nonsense\r\n\r\n")
    await garbled.response()

    assert site.server.responses == {200: 2, 413: 1, 400: 1}
