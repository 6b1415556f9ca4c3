"""A source of tokens that costs next to nothing: it answers what a router asks of a vLLM worker, and Generate with
frames that were encoded before the run.

    python -m bench.load_worker [--role plain|prefill|decode] [--pace MS]

Saturated, it sends what the connection takes, at most `BURST_FRAMES` frames between two writes. Paced, every open
stream gets one token per step, and all frames of a step leave in one write for each connection, as they do from an
engine. Every message is a DATA frame of its own, as gRPC's own servers send them. The request's `max_tokens` says how
many tokens there are; one that wants more than `FLOOD_TOKENS` gets `FLOOD_BYTES` as fast as it takes them, whatever the
pace, and `FLOODS` tells how far that has come. Prints one line of JSON when it serves.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import AsyncIterator

import trio

from trio_router.engine.facts import model_info, server_info
from trio_router.engine.model import Model, load_model
from trio_router.engine.responses import ChoiceEncoder
from trio_router.engine.settings import WorkerSettings
from trio_router.protocol.codec import encode
from trio_router.protocol.messages import (
    AbortRequest,
    AbortResponse,
    GenerateComplete,
    GenerateResponse,
    GetLoadsRequest,
    GetLoadsResponse,
    GetModelInfoRequest,
    GetModelInfoResponse,
    GetServerInfoRequest,
    GetServerInfoResponse,
    GetTokenizerChunk,
    GetTokenizerRequest,
    HealthCheckRequest,
    HealthCheckResponse,
    SchedulerLoad,
    VllmEngineBase,
)
from trio_router.protocol.wire import get_varint
from trio_router.rpc.server import Server
from trio_router.rpc.servercall import ServerCall
from trio_router.rpc.transport import open_tcp_listener

GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"
MAX_TOKENS_FIELD = (4, 8)
STREAM_FIELD = (5,)
PROMPT_TOKENS = 2048
CACHED_TOKENS = 1536
BURST_FRAMES = 64
FLOODS = "/bench.Load/Floods"
"""Answers with JSON: for each flood its accepted bytes, whether it is blocked now, and whether it has ended."""
FLOOD_TOKENS = 1_000_000
FLOOD_BYTES = 100_000_000
TOKENIZER_CHUNK_BYTES = 65_536


class Frames:
    """All that is ever sent: one chunk per token of a text, and endings."""

    def __init__(self, model: Model) -> None:
        text = (model.directory / "corpus.txt").read_text(encoding="utf-8")
        encoder = ChoiceEncoder(index=0, prompt_tokens=PROMPT_TOKENS, cached_tokens=CACHED_TOKENS)
        self.chunks = [encoder.chunk([token_id]) for token_id in model.tokenizer.encode(text)]
        handoff = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(PROMPT_TOKENS // 16))],
            "remote_engine_id": "load",
            "remote_request_id": "load",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "transfer_mode": "read",
            "remote_num_tokens": PROMPT_TOKENS,
        }
        self.complete = self._complete(GenerateComplete())
        self.prefilled = self._complete(
            GenerateComplete(output_ids=[300], completion_tokens=1, kv_transfer_params_json=json.dumps(handoff))
        )

    @staticmethod
    def _complete(frame: GenerateComplete) -> bytes:
        frame.finish_reason = "length"
        frame.prompt_tokens, frame.cached_tokens = PROMPT_TOKENS, CACHED_TOKENS
        return encode(GenerateResponse(complete=frame))


class Stream:
    """One Generate call under way."""

    __slots__ = ("at", "call", "done", "full", "tokens")

    def __init__(self, call: ServerCall, *, tokens: int) -> None:
        self.call = call
        self.tokens = tokens
        self.at = 0
        self.full = False
        self.done = trio.Event()


class Flood:
    """A stream that is offered everything at once."""

    __slots__ = ("accepted", "blocked", "ended")

    def __init__(self) -> None:
        self.accepted = 0
        self.blocked = False
        self.ended = False

    async def run(self, call: ServerCall, chunks: list[bytes]) -> None:
        """Send until the client leaves, or all has been taken."""
        at = 0
        try:
            while self.accepted < FLOOD_BYTES:
                burst = chunks[at : at + BURST_FRAMES] or chunks[:BURST_FRAMES]
                at = (at + BURST_FRAMES) % len(chunks)
                fits = call.send_nowait(burst)
                call.flush()
                self.blocked = not fits
                await trio.lowlevel.checkpoint()
                if not fits:
                    await call.wait_drained()
                self.accepted += sum(map(len, burst))
        finally:
            self.ended = True


class Source:
    """Feeds all open streams from one task."""

    def __init__(self, frames: Frames, *, pace: float | None) -> None:
        """`pace` is the seconds of a step; None sends as fast as the peers take it."""
        self._frames = frames
        self._pace = pace
        self._streams: dict[Stream, None] = {}
        self._wake = trio.Event()
        self._floods: list[Flood] = []

    async def tell_floods(self, call: ServerCall) -> None:
        """The handler of FLOODS."""
        await call.receive()
        told = [{"accepted": flood.accepted, "blocked": flood.blocked, "ended": flood.ended} for flood in self._floods]
        await call.send(json.dumps(told).encode())

    async def generate(self, call: ServerCall) -> None:
        """The Generate handler."""
        request = await call.receive() or b""
        if not get_varint(request, STREAM_FIELD):
            await call.send(self._frames.prefilled)
            return
        tokens = get_varint(request, MAX_TOKENS_FIELD) or 16
        if tokens > FLOOD_TOKENS:
            self._floods.append(Flood())
            await self._floods[-1].run(call, self._frames.chunks)
            return
        stream = Stream(call, tokens=tokens)
        call.on_drained = lambda: self._drained(stream)
        self._streams[stream] = None
        self._wake.set()
        try:
            await stream.done.wait()
        finally:
            self._streams.pop(stream, None)

    async def run(self) -> None:
        """Send, for ever."""
        due = trio.current_time()
        while True:
            if self._pace is not None and self._streams:
                due = max(due + self._pace, trio.current_time())
                await trio.sleep_until(due)
                self._step(limit=1)
            elif any(not stream.full for stream in self._streams):
                self._step(limit=BURST_FRAMES)
                await trio.lowlevel.checkpoint()
            else:
                self._wake = trio.Event()
                await self._wake.wait()

    def _step(self, *, limit: int) -> None:
        """One frame per stream, in turns until there are `limit` frames; then one write per connection."""
        sent: dict[Stream, None] = {}
        count = 0
        progress = True
        while progress and count < limit:
            progress = False
            for stream in list(self._streams):
                if not stream.full:
                    progress = True
                    count += 1
                    sent[stream] = None
                    self._send_one(stream)
        for stream in sent:
            stream.call.flush()

    def _send_one(self, stream: Stream) -> None:
        chunks = self._frames.chunks
        stream.full = not stream.call.send_nowait([chunks[stream.at % len(chunks)]])
        stream.at += 1
        if stream.at == stream.tokens:
            stream.call.send_nowait([self._frames.complete])
            del self._streams[stream]
            stream.done.set()

    def _drained(self, stream: Stream) -> None:
        stream.full = False
        self._wake.set()


class Engine(VllmEngineBase):
    """What a router asks before it sends requests."""

    def __init__(self, model: Model, *, settings: WorkerSettings) -> None:
        self._model = model
        self._settings = settings

    async def health_check(self, health_check_request: HealthCheckRequest) -> HealthCheckResponse:
        return HealthCheckResponse(healthy=True, message="Health")

    async def abort(self, abort_request: AbortRequest) -> AbortResponse:
        return AbortResponse()

    async def get_model_info(self, get_model_info_request: GetModelInfoRequest) -> GetModelInfoResponse:
        return model_info(self._model, settings=self._settings)

    async def get_server_info(self, get_server_info_request: GetServerInfoRequest) -> GetServerInfoResponse:
        return server_info(self._settings, engine_id=self._settings.name)

    async def get_loads(self, get_loads_request: GetLoadsRequest) -> GetLoadsResponse:
        return GetLoadsResponse(version="load", dp_rank_count=1, loads=[SchedulerLoad()])

    async def get_tokenizer(
        self, smg_grpc_common_get_tokenizer_request: GetTokenizerRequest
    ) -> AsyncIterator[GetTokenizerChunk]:
        archive = self._model.bundle
        for start in range(0, len(archive), TOKENIZER_CHUNK_BYTES):
            end = start + TOKENIZER_CHUNK_BYTES
            digest = self._model.bundle_sha256 if end >= len(archive) else ""
            yield GetTokenizerChunk(data=archive[start:end], sha256=digest)


async def serve(*, role: str, pace: float | None) -> None:
    """Serve until killed."""
    model = load_model()
    settings = WorkerSettings(name=f"load-{role}", role=role)
    source = Source(Frames(model), pace=pace)
    server = Server([Engine(model, settings=settings)], raw={GENERATE: source.generate, FLOODS: source.tell_floods})
    listener = await open_tcp_listener("127.0.0.1", port=0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(source.run)
        await nursery.start(server.serve, listener)
        sys.stdout.write(json.dumps({"grpc": listener.address}) + "\n")
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", choices=["plain", "prefill", "decode"], default="plain")
    parser.add_argument("--pace", type=float, metavar="MS", help="one token per stream and step; default: saturated")
    options = parser.parse_args()
    pace = None if options.pace is None else options.pace / 1e3
    trio.run(lambda: serve(role=options.role, pace=pace))


if __name__ == "__main__":
    main()
