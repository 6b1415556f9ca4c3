"""Does one slow reader hurt anybody? Two clients read 1 KiB/s, one over gRPC and one over SSE, while their worker
offers each of them 100 MB; 50 other streams of the same worker connection get a token every 20 ms.

    python bench/slow_reader.py [--seconds 30]

Real processes and sockets. First the 50 run alone, then beside the slow two. Three things are told: what the router
holds (its resident memory), whether the worker's writes block, and whether the 50 got their tokens as before. Wall time
on a machine that does other things, too, is uncertain; so gaps are judged against those of the first half.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import trio

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.clients.sse import make_request
from bench.fleet import Row, Running, start
from bench.load_worker import FLOOD_BYTES, FLOOD_TOKENS, FLOODS, GENERATE
from bench.measure import resident_bytes
from trio_router.http2.connection import Connection
from trio_router.http2.streams import Role
from trio_router.protocol.codec import encode
from trio_router.protocol.messages import GenerateRequest, SamplingParams, TokenizedInput
from trio_router.rpc.channel import Channel, open_channel
from trio_router.rpc.metadata import request_headers
from trio_router.rpc.transport import dial_tcp

NEIGHBOURS = 50
PACE_MS = 20.0
SETTLE_SECONDS = 3.0
READ_BYTES = 1024
READ_SECONDS = 1.0
MIB = 1024 * 1024

MAX_GROWTH_BYTES = 8 * MIB
"""Of the router: buffers of two streams and the allocator's own steps are far below it, one flood is far above."""
MAX_ACCEPTED_BYTES = 16 * MIB
"""Of a flood: kernels hold some megabytes for each of two sockets."""
MAX_GAP_RATIO = 3.0


@dataclass(slots=True)
class Gaps:
    """Seconds between the batches of a stream, over all streams."""

    seconds: list[float] = field(default_factory=list)
    tokens: int = 0

    def quantile(self, share: float) -> float:
        """In milliseconds."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1e3 if ordered else math.nan


@dataclass(slots=True)
class Watched:
    """What was seen while the slow clients read."""

    resident: list[int] = field(default_factory=list)
    floods: list[list[dict[str, Any]]] = field(default_factory=list)
    ended: list[dict[str, Any]] = field(default_factory=list)


def generate_request(name: str, *, tokens: int) -> bytes:
    request = GenerateRequest(
        request_id=name,
        tokenized=TokenizedInput(input_ids=[300, 301, 302]),
        sampling_params=SamplingParams(max_tokens=tokens, ignore_eos=True),
        stream=True,
    )
    return encode(request)


async def neighbours(channel: Channel, *, seconds: float) -> Gaps:
    """50 paced streams, each to its end."""
    gaps = Gaps()
    tokens = int(seconds / PACE_MS * 1e3)

    async def play(number: int) -> None:
        last = trio.current_time()

        def take(messages: list[bytes]) -> bool:
            nonlocal last
            now = trio.current_time()
            gaps.seconds.append(now - last)
            gaps.tokens += len(messages)
            last = now
            return True

        call = await channel.call(GENERATE, generate_request(f"neighbour-{number}", tokens=tokens))
        await call.pump(take)

    async with trio.open_nursery() as nursery:
        for number in range(NEIGHBOURS):
            nursery.start_soon(play, number)
    expected = NEIGHBOURS * (tokens + 1)
    if gaps.tokens != expected:
        raise AssertionError(f"the neighbours got {gaps.tokens} of {expected} frames")
    return gaps


async def read_slowly(address: str, first: bytes, *, take: Callable[[bytes], bytes]) -> None:
    """Send `first`, then read 1 KiB/s for ever; `take` gets it and returns what is to be answered."""
    transport = await dial_tcp(address)
    try:
        transport.send_nowait(first)
        while True:
            await trio.sleep(READ_SECONDS)
            await transport.wait_readable()
            data = transport.recv_nowait(READ_BYTES)
            if data == b"":
                raise AssertionError("the router has given its slow client up")
            transport.send_nowait(take(data or b""))
    finally:
        transport.close()


async def slow_grpc(address: str) -> None:
    connection = Connection(Role.CLIENT)
    stream = connection.open_stream(request_headers(GENERATE, authority=address))
    connection.send_messages(stream, [generate_request("slow", tokens=FLOOD_TOKENS + 1)], end_stream=True)

    def take(data: bytes) -> bytes:
        connection.receive(data)
        stream.take()
        stream.credit()
        return connection.take_output()

    await read_slowly(address, connection.take_output(), take=take)


async def slow_sse(address: str) -> None:
    await read_slowly(address, make_request(address, tokens=FLOOD_TOKENS + 1), take=lambda data: b"")


async def told_floods(channel: Channel) -> list[dict[str, Any]]:
    call = await channel.call(FLOODS, b"")
    answer = await call.receive()
    floods: list[dict[str, Any]] = json.loads(answer or b"[]")
    return floods


async def watch(running: Running, channel: Channel, *, into: Watched) -> None:
    """Look once a second, for ever."""
    while True:
        await trio.sleep(1)
        into.resident.append(resident_bytes(running.pids["router"]))
        into.floods.append(await told_floods(channel))


async def play(running: Running, *, seconds: float) -> tuple[Gaps, Gaps, Watched]:
    """The neighbours alone, then beside the slow clients."""
    watched = Watched()
    addresses = running.addresses
    async with open_channel(addresses["worker"]) as to_worker, open_channel(addresses["grpc"]) as to_router:
        alone = await neighbours(to_router, seconds=seconds)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(slow_grpc, addresses["grpc"])
            nursery.start_soon(slow_sse, addresses["http"])
            await trio.sleep(SETTLE_SECONDS)
            nursery.start_soon(partial(watch, running, to_worker, into=watched))
            beside = await neighbours(to_router, seconds=seconds)
            nursery.cancel_scope.cancel()
        await trio.sleep(1)
        watched.ended = await told_floods(to_worker)
    return alone, beside, watched


def verdicts(alone: Gaps, beside: Gaps, watched: Watched) -> list[tuple[str, str, bool]]:
    """What was looked at, what was seen, and whether it is as it should be."""
    growth = max(watched.resident) - watched.resident[0]
    last = watched.floods[-1]
    accepted = [flood["accepted"] for flood in last]
    grown = [flood["accepted"] - first["accepted"] for flood, first in zip(last, watched.floods[0], strict=True)]
    blocked = [all(flood["blocked"] for flood in floods) for floods in watched.floods]
    ratio = beside.quantile(0.99) / alone.quantile(0.99)
    return [
        (
            "router's resident memory while they read",
            f"{watched.resident[0] / MIB:.1f} MiB at first, {growth / MIB:+.2f} MiB at most",
            growth <= MAX_GROWTH_BYTES,
        ),
        (
            f"the worker's writes: of {FLOOD_BYTES // 10**6} MB each it could send",
            " and ".join(f"{count / MIB:.2f} MiB" for count in accepted)
            + f", {sum(grown) / 1024:.0f} KiB of it in {len(watched.floods)} s",
            len(accepted) == 2 and max(accepted) <= MAX_ACCEPTED_BYTES,
        ),
        ("... and were blocked", f"in {sum(blocked)} of {len(blocked)} looks", 2 * sum(blocked) > len(blocked)),
        (
            f"{NEIGHBOURS} others: tokens",
            f"{beside.tokens} of {alone.tokens}",
            beside.tokens == alone.tokens,
        ),
        (
            "... ms between tokens, median / 99 % / most",
            f"alone {told(alone)}, beside {told(beside)}",
            ratio <= MAX_GAP_RATIO,
        ),
        (
            "a second after the slow two have left, the worker's calls",
            f"{sum(flood['ended'] for flood in watched.ended)} of {len(watched.ended)} have ended",
            all(flood["ended"] for flood in watched.ended),
        ),
    ]


def told(gaps: Gaps) -> str:
    return f"{gaps.quantile(0.5):.1f} / {gaps.quantile(0.99):.1f} / {gaps.quantile(1.0):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each half")
    options = parser.parse_args()
    with start(Row(name="router", front="grpc"), pace=PACE_MS) as running:
        alone, beside, watched = trio.run(partial(play, running, seconds=options.seconds))
    found = verdicts(alone, beside, watched)
    print("| | seen | verdict |\n|---|---|---|")
    for what, seen, good in found:
        print(f"| {what} | {seen} | {'good' if good else 'BAD'} |")
    sys.exit(0 if all(good for _, _, good in found) else 1)


if __name__ == "__main__":
    main()
