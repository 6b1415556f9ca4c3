"""Clients that leave, and clients that are slow: what the router notices of them."""

from __future__ import annotations

import msgspec
import pytest
import trio

from trio_router.front.app import HttpFront

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Say hello"}]}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["waiting for a worker", "streaming", "between tokens"])
async def test_case_c4_leaving_cancels_the_request_at_once(
    autojump_clock, serve, scripted, frames, request_bytes, stream: bool, phase: str
) -> None:
    chunks = frames.text("Hello world")
    script = {
        "waiting for a worker": [30.0, *chunks],
        "streaming": [*chunks[:3], 30.0],
        "between tokens": [step for chunk in chunks for step in (chunk, 10.0)],
    }[phase]
    router = scripted(script)
    site = await serve(router)
    client = await site.connect()
    body = msgspec.json.encode({**HELLO, "stream": stream})
    await client.send(request_bytes("POST", CHAT, body=body))
    await trio.sleep(1)
    assert router.outcomes == ["open"]

    client.leave()
    await trio.sleep(0.1)

    assert router.outcomes == ["cancelled"]
    assert router.ended_at == [1.0]
    assert site.server.connections == 0


async def test_leaving_while_a_tokenizer_is_loaded_cancels(
    autojump_clock, launch, scripted, frames, request_bytes
) -> None:
    class SlowText:
        ready = False
        left = False

        async def get(self, model: str) -> None:
            try:
                await trio.sleep(100)
            except trio.Cancelled:
                self.left = True
                raise

    texts = SlowText()
    front = HttpFront(scripted(frames.text("x")), texts)
    client = await (await launch(front, server=front.server)).connect()
    await client.send(request_bytes("POST", CHAT, body=msgspec.json.encode(HELLO)))
    await trio.sleep(1)

    client.leave()
    await trio.sleep(0.1)

    assert texts.left


async def test_case_c9_a_slow_reader_throttles_its_worker_and_memory_stays_flat(
    autojump_clock, serve, scripted, frames, request_bytes, tokenizer
) -> None:
    [token] = tokenizer.encode(" this")
    batch = [frames.chunk([token])] * 50
    offered = 200_000
    router = scripted([batch] * (offered // 50) + [frames.complete("length")])
    site = await serve(router, capacity=4096)
    client = await site.connect()
    body = msgspec.json.encode({**HELLO, "stream": True})
    await client.send(request_bytes("POST", CHAT, body=body))

    received = bytearray()
    for _ in range(60):
        await trio.sleep(1)
        received += client.transport.recv_nowait(1024) or b""

    [stream] = router.streams
    events_bytes = 200
    # The worker may run ahead by its window and what the transport holds, whatever it has to offer.
    assert len(received) >= 50 * 1024
    assert stream.sent_bytes < 2 * 65536 + len(received) + 4096
    assert offered * events_bytes > 100 * stream.sent_bytes
    assert site.server.pending_bytes < 65536
    assert router.outcomes == ["open"]


async def test_a_slow_reader_gets_everything_in_the_end(
    autojump_clock, serve, scripted, frames, read_events, content, request_bytes
) -> None:
    text = "word " * 5_000
    script = frames.text(text, "length")
    router = scripted([script[i : i + 40] for i in range(0, len(script), 40)])
    client = await (await serve(router, capacity=2048)).connect()
    body = msgspec.json.encode({**HELLO, "stream": True, "stream_options": {"include_usage": True}})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(slow_down, client)
        await client.send(
            b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body
        )
        response = await client.response()
        nursery.cancel_scope.cancel()

    events = read_events(response.body)
    assert content(events) == text
    assert events[-1] == "[DONE]"
    assert events[-2]["usage"]["completion_tokens"] == len(script) - 1
    assert router.outcomes == ["ok"]


async def slow_down(client) -> None:
    """Let the client read only now and then."""
    read = client.transport.wait_readable

    async def later() -> None:
        await trio.sleep(0.5)
        await read()

    client.transport = Slowed(client.transport, later)
    await trio.sleep_forever()


class Slowed:
    def __init__(self, transport, wait) -> None:
        self._transport = transport
        self.wait_readable = wait
        self.wait_writable = transport.wait_writable
        self.send_nowait = transport.send_nowait
        self.recv_nowait = transport.recv_nowait


async def test_a_stalled_reader_is_dropped_and_its_request_cancelled(
    autojump_clock, serve, scripted, frames, request_bytes
) -> None:
    script = frames.text("word " * 5_000, "length")
    router = scripted([script[i : i + 40] for i in range(0, len(script), 40)])
    site = await serve(router, capacity=2048, write_stall_seconds=120.0)
    stalled = await site.connect()
    await stalled.send(request_bytes("POST", CHAT, body=msgspec.json.encode({**HELLO, "stream": True})))

    await trio.sleep(100)
    other = await site.connect()
    assert (await other.request("GET", "/health")).status == 200
    assert router.outcomes == ["open"]
    await trio.sleep(60)

    assert router.outcomes == ["cancelled"]
