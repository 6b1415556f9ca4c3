"""What a token costs on its way from a worker's frame to a client's event: CPU microseconds per token.

    python bench/events.py [--tokens 200000]

Frames go through the real sink, detokenizer and body framing into a transport that takes everything, so the numbers
hold no kernel and no task switch. "batch" is how many frames one read of the worker's link brings for a stream.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import trio

import trio_router.engine.assets
from trio_router.front.exchange import Exchange
from trio_router.front.openai.choice import TextRules
from trio_router.front.openai.events import EventStream
from trio_router.front.openai.shapes import ChatShape
from trio_router.front.openai.sinks import EventSink, FrameSink, TextSink
from trio_router.front.outbox import Outbox
from trio_router.front.wire import HttpRequest, Wire
from trio_router.protocol.codec import encode
from trio_router.protocol.messages import GenerateResponse, GenerateStreamChunk
from trio_router.text.bundle import read_directory
from trio_router.text.tokenizer import Tokenizer, load

ENGLISH = "Streams of tokens pass the router on their way to the client, and each of them is written at once. "
CHINESE = "令牌流经路由器,到达客户端。😀"


class Sponge:
    """A transport that takes everything."""

    peer = "sponge"

    def __init__(self) -> None:
        self.taken = 0
        self.sends = 0

    def send_nowait(self, data: bytes) -> int:
        self.taken += len(data)
        self.sends += 1
        return len(data)


def frames_of(text: str, *, tokenizer: Tokenizer, count: int) -> list[bytes]:
    ids = tokenizer.encode(text)
    chunks = [
        encode(GenerateResponse(chunk=GenerateStreamChunk(token_ids=[token], prompt_tokens=900, completion_tokens=1)))
        for token in ids
    ]
    return (chunks * (count // len(chunks) + 1))[:count]


def event_sink(rules: TextRules, transport: Sponge, nursery: trio.Nursery) -> FrameSink:
    wire = Wire(max_header_bytes=4096)
    wire.feed(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    wire.next_head()
    wire.read_body(bytearray())
    outbox = Outbox(transport, nursery=nursery, stall_seconds=60, max_pending_bytes=1 << 20, on_broken=lambda: None)
    request = HttpRequest(method="GET", path="/")
    exchange = Exchange(request, wire=wire, outbox=outbox, clock=time.time, close=lambda: False, release=lambda: None)
    shape = ChatShape(response_id="chatcmpl-" + "0" * 32, created=1_700_000_000, model="tiny-english")
    return EventSink(EventStream(exchange), shape=shape, first_index=0, n=1, rules=rules)


def measure(sink: Callable[[list[bytes]], bool], frames: list[bytes], *, batch: int) -> float:
    batches = [frames[at : at + batch] for at in range(0, len(frames), batch)]
    begin = time.process_time()
    for messages in batches:
        sink(messages)
    return (time.process_time() - begin) / len(frames) * 1e6


async def main(tokens: int) -> None:
    tokenizer = load(read_directory(Path(trio_router.engine.assets.__file__).parent))
    cases = {
        "english": (ENGLISH, TextRules(tokenizer=tokenizer)),
        "english, a stop string": (ENGLISH, TextRules(tokenizer=tokenizer, stops=("nowhere",))),
        "chinese and emoji": (CHINESE, TextRules(tokenizer=tokenizer)),
    }
    print(f"{'us per token':28}{'batch 1':>10}{'batch 8':>10}{'batch 64':>10}{'batch 1000':>12}{'not streamed':>14}")
    async with trio.open_nursery() as nursery:
        for name, (text, rules) in cases.items():
            frames = frames_of(text, tokenizer=tokenizer, count=tokens)
            costs = [
                min(measure(event_sink(rules, Sponge(), nursery), frames, batch=batch) for _ in range(3))
                for batch in (1, 8, 64, 1000)
            ]
            whole = min(
                measure(TextSink(first_index=0, n=1, rules=rules, max_chars=1 << 40), frames, batch=8) for _ in range(3)
            )
            print(f"{name:28}{costs[0]:10.2f}{costs[1]:10.2f}{costs[2]:10.2f}{costs[3]:12.2f}{whole:14.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200_000)
    trio.run(main, parser.parse_args().tokens)
