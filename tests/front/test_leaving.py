"""A client that leaves cancels what is being done for it, in every phase of an exchange."""

from __future__ import annotations

import pytest
import trio

from trio_router.front.exchange import BodyWriter, Exchange


async def test_leaving_cancels_a_handler_that_has_not_answered(autojump_clock, start, request_bytes, make_gate) -> None:
    gate = make_gate()
    client = await (await start(gate)).connect()
    await client.send(request_bytes("GET", "/"))
    await gate.entered.wait()
    at = trio.current_time()

    client.leave()
    await gate.ended.wait()

    assert gate.outcome == "stopped"
    assert trio.current_time() == at


async def test_leaving_is_noticed_behind_pipelined_requests(autojump_clock, start, request_bytes, make_gate) -> None:
    gate = make_gate()
    client = await (await start(gate)).connect()
    await client.send(request_bytes("GET", "/") * 3)
    await gate.entered.wait()

    client.leave()
    await gate.ended.wait()

    assert gate.outcome == "stopped"


@pytest.fixture
def streaming(make_gate):
    """A gate that streams a little, then waits; it shows its writer."""
    writers: list[BodyWriter] = []

    async def stream(exchange: Exchange) -> None:
        writers.append(exchange.start_stream())
        writers[0].write_nowait(b"first")
        await trio.sleep_forever()

    return make_gate(stream), writers


async def test_leaving_cancels_a_stream_that_has_nothing_new(autojump_clock, start, request_bytes, streaming) -> None:
    stream, _writers = streaming
    client = await (await start(stream)).connect()
    await client.send(request_bytes("GET", "/"))
    await client.until(b"first")

    client.leave()
    await stream.ended.wait()

    assert stream.outcome == "stopped"


async def test_writing_to_a_client_that_left_is_dropped_and_cancels_the_handler(
    autojump_clock, start, request_bytes, streaming
) -> None:
    stream, writers = streaming
    client = await (await start(stream)).connect()
    await client.send(request_bytes("GET", "/"))
    await client.until(b"first")
    client.leave()

    # From outside the handler's task and before the watcher has run, as a pump's sink would.
    assert writers[0].write_nowait(b"x") is False
    assert writers[0].full
    await stream.ended.wait()

    assert stream.outcome == "stopped"


async def test_leaving_while_the_response_is_blocked_cancels(autojump_clock, start, request_bytes, make_gate) -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.respond(200, body=b"x" * 100_000)

    big = make_gate(answer)
    client = await (await start(big, capacity=4096)).connect()
    await client.send(request_bytes("GET", "/"))
    await big.entered.wait()
    await trio.testing.wait_all_tasks_blocked()
    assert big.outcome == "running"

    client.leave()
    await big.ended.wait()

    assert big.outcome == "stopped"


async def test_what_a_cancelled_handler_raises_ends_its_connection_only(
    autojump_clock, start, request_bytes, caplog
) -> None:
    async def stubborn(exchange: Exchange) -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("cleanup failed")

    site = await start(stubborn)
    client = await site.connect()
    await client.send(request_bytes("GET", "/"))
    await trio.testing.wait_all_tasks_blocked()

    client.leave()
    await trio.testing.wait_all_tasks_blocked()

    assert site.server.connections == 0
    assert "cleanup failed" in caplog.text
