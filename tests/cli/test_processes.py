"""Workers and a router as separate processes on real sockets: what they print, serve, and how they go."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from trio_router.demo.client import stream_chat
from trio_router.errors import LinkError
from trio_router.rpc.transport import dial_tcp

PORTS = ["--port", "0", "--grpc-port", "0", "--prometheus-port", "0"]


class Program:
    """A running `trio-router`, read line by line."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self._rest = b""

    async def line(self, beginning: str) -> str:
        """Read on to a line of this beginning, and return what follows it."""
        assert self.process.stdout is not None
        while True:
            for line in self.lines:
                if line.startswith(beginning):
                    return line.removeprefix(beginning)
            piece = await self.process.stdout.receive_some()
            assert piece, f"ended without {beginning!r}: {self.lines}"
            *whole, self._rest = (self._rest + piece).split(b"\n")
            self.lines += [line.decode() for line in whole]

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return await self.process.wait()


@asynccontextmanager
async def program(*arguments: str) -> AsyncIterator[Program]:
    command = [sys.executable, "-m", "trio_router", *arguments]
    process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield Program(process)
    finally:
        process.kill()
        # A test that is cancelled must not leave a process or a pipe behind.
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 10):
            await process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    await pipe.aclose()


@asynccontextmanager
async def router(
    *more: str, inter_token_ms: int = 20, worker: Sequence[str] = ()
) -> AsyncIterator[tuple[Program, list[Program]]]:
    """A router over one pair, ready. `worker` is for both workers."""
    speed = ["--inter-token-ms", str(inter_token_ms)]
    async with (
        program("worker", "--role", "prefill", "--port", "0", *worker) as prefill,
        program("worker", "--role", "decode", "--port", "0", *speed, *worker) as decode,
    ):
        urls = [
            (await each.line(f"ready: {role} worker on ")).split()[0]
            for role, each in (("prefill", prefill), ("decode", decode))
        ]
        async with program("serve", "--prefill", urls[0], "--decode", urls[1], *PORTS, *more) as serving:
            yield serving, [prefill, decode]


class Chat:
    """A streaming client; `begun` is set when the first tokens have come."""

    def __init__(self, address: str, *, max_tokens: int) -> None:
        self.address = address
        self.max_tokens = max_tokens
        self.events: list[Any] = []
        self.begun = trio.Event()

    async def run(self) -> None:
        request = {
            "model": "tiny-english",
            "messages": [{"role": "user", "content": "Tell me about the sea."}],
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        await stream_chat(self.address, request, dialer=dial_tcp, on_event=self._take)

    async def run_until_cut_off(self) -> None:
        with pytest.raises(LinkError):
            await self.run()

    def _take(self, event: Any) -> None:
        self.events.append(event)
        if len(self.events) == 3:
            self.begun.set()

    @property
    def finish_reason(self) -> str | None:
        return self.events[-1]["choices"][0]["finish_reason"]


async def address_of(serving: Program) -> str:
    return (await serving.line("listening on http://")).split()[0]


async def test_a_router_says_where_it_listens_and_finishes_its_streams_when_told_to_go():
    with trio.fail_after(60):
        async with router("--log-json") as (serving, workers):
            assert await serving.line("ready: ") == "tiny-english on 1 prefill and 1 decode workers"
            assert serving.lines[1].startswith("listening on grpc://127.0.0.1:")
            assert serving.lines[2].endswith("/metrics (metrics)")
            chat = Chat(await address_of(serving), max_tokens=50)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(chat.run)
                await chat.begun.wait()
                assert await serving.end() == 0
            assert chat.finish_reason == "length"
            assert serving.process.stderr is not None
            logged = [json.loads(line) for line in (await serving.process.stderr.receive_some(1 << 20)).splitlines()]
            [request] = [entry for entry in logged if entry["event"] == "request"]
            assert (request["outcome"], request["output_tokens"]) == ("ok", 50)
            assert [await each.end() for each in workers] == [0, 0]


async def test_a_second_signal_does_not_wait_for_streams():
    with trio.fail_after(60):
        async with router() as (serving, _):
            await serving.line("ready: ")
            chat = Chat(await address_of(serving), max_tokens=4000)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(chat.run_until_cut_off)
                await chat.begun.wait()
                serving.process.send_signal(signal.SIGINT)
                # The first signal has been taken when nobody new is let in; two at once could be seen as one.
                while await answers(chat.address):  # noqa: ASYNC110
                    await trio.sleep(0.01)
                assert await serving.end(signal.SIGINT) == 0


async def answers(address: str) -> bool:
    try:
        (await dial_tcp(address)).close()
    except LinkError:
        return False
    return True


async def test_a_worker_finishes_its_calls_when_told_to_go():
    with trio.fail_after(60):
        async with router() as (serving, [_, decode]):
            await serving.line("ready: ")
            chat = Chat(await address_of(serving), max_tokens=50)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(chat.run)
                await chat.begun.wait()
                assert await decode.end() == 0
            assert chat.finish_reason == "length"


async def test_a_pair_behind_tls_that_lets_only_its_router_in(authority, server_pair, client_pair):
    ca = ["--tls-client-ca", str(authority.ca_file)]
    theirs = ["--tls-cert", str(server_pair.cert_file), "--tls-key", str(server_pair.key_file), *ca]
    ca = ["--worker-tls-ca", str(authority.ca_file)]
    ours = ["--worker-tls-cert", str(client_pair.cert_file), "--worker-tls-key", str(client_pair.key_file), *ca]
    with trio.fail_after(60):
        async with router(*ours, worker=theirs) as (serving, _):
            await serving.line("ready: ")
            chat = Chat(await address_of(serving), max_tokens=5)
            await chat.run()
            assert chat.finish_reason == "length"


@pytest.mark.parametrize("option", ["--tls-cert", "--tls-key", "--tls-client-ca"])
async def test_half_of_what_tls_takes_is_refused(option):
    with trio.fail_after(60):
        async with program("worker", "--port", "0", option, "some.pem") as worker:
            assert await worker.process.wait() == 2
            assert b"TLS takes both tls_cert and tls_key" in await worker.process.stderr.receive_some()
