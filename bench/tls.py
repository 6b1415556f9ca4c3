"""What does TLS cost, and a UNIX socket save? CPU microseconds of both ends together, beside plain TCP.

    python -m bench.tls [--scale 1.0] [--reps 5]

Client and server are ours, in one process, on real sockets. `step of N`: the server writes one message of 100 bytes
to each of N streams in one write and waits until all have come, as an engine does that sends a token a step; the figure
is per message. `unary` is a call from start to end, `1 MiB` a message of that size, `connect` a connection with its
handshakes. Medians of the repetitions, with (min..max); kinds of transport take turns within each repetition.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import trio
import trustme

from trio_router.rpc.channel import Channel, open_channel
from trio_router.rpc.endpoint import dial, listen
from trio_router.rpc.server import Server
from trio_router.rpc.servercall import ServerCall
from trio_router.rpc.tls import ClientTls, ServerTls
from trio_router.rpc.transport import Dialer, Listener

STEPS, ECHO = "/bench.Service/Steps", "/bench.Service/Echo"
SMALL, LARGE = bytes(100), bytes(1 << 20)


class Steps:
    """The streams of a step, and how many of its messages are still under way."""

    def __init__(self) -> None:
        self.start(0)

    def start(self, streams: int) -> None:
        self.calls: list[ServerCall] = []
        self.streams = streams
        self.missing = 0
        self.full = trio.Event()
        self.arrived = trio.Event()
        self.done = trio.Event()

    async def handler(self, call: ServerCall) -> None:
        await call.receive()
        self.calls.append(call)
        if len(self.calls) == self.streams:
            self.full.set()
        await self.done.wait()

    def sink(self, messages: list[bytes]) -> bool:
        self.missing -= len(messages)
        if self.missing == 0:
            self.arrived.set()
        return True

    async def run(self, count: int) -> None:
        for _ in range(count):
            self.arrived = trio.Event()
            self.missing = len(self.calls)
            for call in self.calls:
                call.send_nowait([SMALL])
            self.calls[0].flush()
            await self.arrived.wait()


async def echo(call: ServerCall) -> None:
    while (message := await call.receive()) is not None:
        await call.send(message)


async def per_step_message(channel: Channel, steps: Steps, *, streams: int, count: int) -> float:
    steps.start(streams)
    async with trio.open_nursery() as nursery:
        for _ in range(streams):
            call = await channel.call(STEPS, b"")
            nursery.start_soon(call.pump, steps.sink)
        await steps.full.wait()
        begin = time.process_time()
        await steps.run(count)
        spent = time.process_time() - begin
        steps.done.set()
    return spent / (streams * count) * 1e6


async def per_call(channel: Channel, _: Steps, *, message: bytes, count: int) -> float:
    begin = time.process_time()
    for _ in range(count):
        call = await channel.call(ECHO, message)
        while await call.receive() is not None:
            pass
    return (time.process_time() - begin) / count * 1e6


async def per_connection(address: str, dialer: Dialer, *, count: int) -> float:
    begin = time.process_time()
    for _ in range(count):
        async with open_channel(address, dialer=dialer) as channel:
            await channel.connect()
    return (time.process_time() - begin) / count * 1e6


@asynccontextmanager
async def serving(listener: Listener, steps: Steps) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        await nursery.start(Server(raw={STEPS: steps.handler, ECHO: echo}).serve, listener)
        yield
        nursery.cancel_scope.cancel()
    listener.close()


async def measure(listener: Listener, dialer: Dialer, *, scale: float) -> dict[str, float]:
    def count(number: int) -> int:
        return max(1, round(number * scale))

    cells: dict[str, Callable[[Channel, Steps], Awaitable[float]]] = {
        "step of 1": partial(per_step_message, streams=1, count=count(3000)),
        "step of 64": partial(per_step_message, streams=64, count=count(500)),
        "unary": partial(per_call, message=SMALL, count=count(1500)),
        "1 MiB": partial(per_call, message=LARGE, count=count(60)),
    }
    steps = Steps()
    async with serving(listener, steps):
        async with open_channel(listener.address, dialer=dialer) as channel:
            await channel.connect()
            found = {name: await cell(channel, steps) for name, cell in cells.items()}
        found["connect"] = await per_connection(listener.address, dialer, count=count(100))
    return found


async def main(*, scale: float, reps: int) -> None:
    samples: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        ca, files = trustme.CA(), Path(directory)
        issued = ca.issue_cert("127.0.0.1", "localhost")
        ca.cert_pem.write_to_path(files / "ca.pem")
        issued.private_key_and_cert_chain_pem.write_to_path(files / "server.pem")
        server_tls = ServerTls(cert_file=files / "server.pem", key_file=files / "server.pem")
        tls_dial = ClientTls(ca_file=files / "ca.pem").dialer(dial)
        for _ in range(reps):
            for name, address, secure in (
                ("tcp", "127.0.0.1:0", False),
                ("unix", f"unix:{files}/socket", False),
                ("tls", "127.0.0.1:0", True),
                ("tls on unix", f"unix:{files}/socket", True),
            ):
                below = await listen(address)
                listener = server_tls.listen(below) if secure else below
                found = await measure(listener, tls_dial if secure else dial, scale=scale)
                for cell, value in found.items():
                    samples.setdefault(cell, {}).setdefault(name, []).append(value)
    names = list(next(iter(samples.values())))
    print(f"{'CPU us, both ends':20}" + "".join(f"{name:>26}" for name in names) + f"{'tls : tcp':>12}")
    for cell, row in samples.items():
        medians = {name: statistics.median(values) for name, values in row.items()}
        shown = [f"{medians[name]:.1f} ({min(row[name]):.1f}..{max(row[name]):.1f})" for name in names]
        print(f"{cell:20}" + "".join(f"{text:>26}" for text in shown) + f"{medians['tls'] / medians['tcp']:>12.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of messages")
    parser.add_argument("--reps", type=int, default=5)
    options = parser.parse_args()
    trio.run(partial(main, scale=options.scale, reps=options.reps))
