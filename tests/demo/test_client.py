"""The demo's own client, against a scripted server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from trio_router.demo.client import ChatFailed, stream_chat
from trio_router.errors import LinkError
from trio_router.rpc.memory import MemoryNetwork
from trio_router.rpc.transport import Transport

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ONE, TWO, DONE = b'data: {"n": 1}\n\n', b'data: {"n": 2}\n\n', b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def ask(script: Callable[[Transport], Awaitable[None]], *, body: bytes = b"") -> list[Any]:
    """Send a request to a server that plays `script`, and return the events."""
    network = MemoryNetwork(capacity_bytes=1024)
    events: list[Any] = []
    listener = network.listen("router:1")

    async def serve() -> None:
        transport = await listener.accept()
        seen = b""
        while b'"end"}' not in seen:
            await transport.wait_readable()
            seen += transport.recv_nowait(65536) or b""
        await script(transport)
        transport.close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        try:
            request = {"pad": "x" * 5000, "z": "end"}
            await stream_chat("router:1", request, dialer=network.dial, on_event=events.append)
        finally:
            nursery.cancel_scope.cancel()
    return events


def plays(*writes: bytes) -> Callable[[Transport], Awaitable[None]]:
    async def script(transport: Transport) -> None:
        for data in writes:
            assert transport.send_nowait(data) == len(data)
            await trio.sleep(1)

    return script


async def failure(*writes: bytes) -> str:
    with pytest.RaisesGroup(pytest.RaisesExc((ChatFailed, LinkError)), flatten_subgroups=True) as caught:
        await ask(plays(*writes))
    return str(caught.value.exceptions[0])


async def test_events_come_decoded_and_in_order_up_to_the_end_mark(autojump_clock):
    stream = HEAD + chunk(ONE) + chunk(TWO + DONE)
    assert await ask(plays(stream)) == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize("at", range(len(HEAD), len(HEAD + chunk(ONE + TWO)), 3))
async def test_a_split_anywhere_changes_nothing(autojump_clock, at):
    stream = HEAD + chunk(ONE + TWO) + chunk(DONE)
    assert await ask(plays(stream[:at], stream[at:])) == [{"n": 1}, {"n": 2}]


async def test_keep_alive_comments_are_passed_over(autojump_clock):
    assert await ask(plays(HEAD + chunk(b": still here\n\n" + ONE + DONE))) == [{"n": 1}]


async def test_an_error_status_is_told_with_its_body(autojump_clock):
    answer = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nbusy"
    assert await failure(answer) == "HTTP 503: busy"


async def test_an_error_event_ends_the_chat(autojump_clock):
    event = b'data: {"error": {"message": "the engine died"}}\n\n'
    assert await failure(HEAD + chunk(ONE + event)) == "the stream failed: the engine died"


async def test_a_stream_without_its_end_mark_is_a_failure(autojump_clock):
    assert await failure(HEAD + chunk(ONE) + b"0\r\n\r\n") == "HTTP 200: the stream ended early"
    assert "closed the connection" in await failure(HEAD + chunk(ONE))


async def test_what_is_not_http_is_a_failure(autojump_clock):
    assert (await failure(b"SSH-2.0-OpenSSH\r\n\r\n")).startswith("the router's answer is not HTTP")


async def test_a_router_that_is_not_there_is_a_link_error(autojump_clock):
    with pytest.raises(LinkError, match="nobody listens"):
        await stream_chat("router:1", {}, dialer=MemoryNetwork().dial, on_event=print)
