"""A gRPC load client in a process of its own: opens streams, counts their frames, and reads what others paid.

    python -m bench.clients.grpc ADDRESS --streams 64 --tokens 200 --least 40000 --pid router=123

Streams share connections, 16 on each. Rounds of `--streams` calls are repeated until `--least` tokens have come; a
short round before them is not measured. Prints one line of JSON.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

import trio

from bench.clients.options import Job, Outcome, report, take_job
from bench.measure import Meter
from trio_router.protocol.codec import encode
from trio_router.protocol.messages import GenerateRequest, SamplingParams, TokenizedInput
from trio_router.rpc.channel import Channel, open_channel

GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"
STREAMS_PER_CONNECTION = 16
PROMPT = list(range(300, 332))


@dataclass(slots=True)
class Count:
    """What has come."""

    frames: int = 0
    batches: int = 0

    def take(self, messages: list[bytes]) -> bool:
        self.frames += len(messages)
        self.batches += 1
        return True


async def play_round(channels: list[Channel], *, streams: int, tokens: int) -> Count:
    """`streams` calls at once, each to its end. Raises whatever a call fails with, and if frames are missing."""
    request = GenerateRequest(
        tokenized=TokenizedInput(input_ids=PROMPT),
        sampling_params=SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
        stream=True,
    )
    count = Count()

    async def play(number: int) -> None:
        request.request_id = f"load-{number}"
        call = await channels[number % len(channels)].call(GENERATE, encode(request))
        await call.pump(count.take)

    async with trio.open_nursery() as nursery:
        for number in range(streams):
            nursery.start_soon(play, number)
    if count.frames != streams * (tokens + 1):
        raise AssertionError(f"{count.frames} frames came, {streams * (tokens + 1)} were due")
    return count


async def run(job: Job) -> Outcome:
    meter = Meter(job.processes)
    async with AsyncExitStack() as stack:
        wanted = max(1, job.streams // STREAMS_PER_CONNECTION)
        channels = [await stack.enter_async_context(open_channel(job.address)) for _ in range(wanted)]
        await play_round(channels, streams=job.streams, tokens=job.warm_up_tokens)
        tokens = batches = 0
        meter.start()
        begun, own = time.perf_counter(), time.process_time()
        while tokens < job.least:
            count = await play_round(channels, streams=job.streams, tokens=job.tokens)
            batches += count.batches
            tokens += job.streams * job.tokens
        wall, own = time.perf_counter() - begun, time.process_time() - own
        return Outcome(
            tokens=tokens, requests=tokens // job.tokens, wall=wall, cpu=meter.stop() | {"client": own}, reads=batches
        )


if __name__ == "__main__":
    job = take_job(__doc__)
    report(trio.run(run, job))
