"""Real processes on real sockets: workers and routers as an operator starts them, ports chosen by the system."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import pytest
import trio

from trio_router.protocol.messages import GetCountersRequest, GetCountersResponse, ReferenceWorkerStub
from trio_router.rpc.channel import open_channel

START_SECONDS = 30


class Process:
    """A `trio-router` command; lines of its output are kept, so that a failure can show them."""

    def __init__(self, *arguments: str) -> None:
        self.arguments = arguments
        self.lines: list[str] = []
        self._seen = threading.Condition()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trio_router", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._seen:
                self.lines.append(line)
                self._seen.notify_all()

    def find(self, pattern: str) -> str:
        """Wait for a line and return the pattern's first group."""

        def match() -> re.Match[str] | None:
            return next((found for line in self.lines if (found := re.search(pattern, line))), None)

        with self._seen:
            assert self._seen.wait_for(match, timeout=START_SECONDS), (
                f"{self.arguments}: no {pattern!r} in {self.lines}"
            )
            found = match()
        assert found is not None
        return found.group(1)

    def stop(self) -> int:
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=20)
        return self.kill()

    def kill(self) -> int:
        """End it as a crash would, if it has not ended."""
        self._process.kill()
        code = self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return code


@contextmanager
def started(*arguments: str) -> Iterator[Process]:
    process = Process(*arguments)
    try:
        yield process
    finally:
        process.stop()


def prefill_flags(worker: Process, *, connector: str) -> list[str]:
    """What a router is told of a prefill worker: a connector that pushes is found by its transfer port."""
    url = worker.find(r"(grpc://\S+)")
    return ["--prefill", url, worker.find(r"transfers on \S+:(\d+)")] if connector == "mooncake" else ["--prefill", url]


def start_router(stack: ExitStack, *flags: str) -> Process:
    """A router on ports that the system chooses."""
    ports = ("--port", "0", "--grpc-port", "0", "--prometheus-port", "0")
    return stack.enter_context(started("serve", *flags, *ports))


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Addresses of two prefill, two decode and one plain worker, and of the two routers before them."""

    prefill: list[str]
    decode: list[str]
    plain: str
    http: str
    grpc: str
    metrics: str
    plain_http: str

    def counters(self, addresses: list[str]) -> list[GetCountersResponse]:
        return counters_of(addresses)


def counters_of(addresses: list[str]) -> list[GetCountersResponse]:
    """What workers count, each asked once."""
    return trio.run(_counters, addresses)


async def _counters(addresses: list[str]) -> list[GetCountersResponse]:
    found = []
    for address in addresses:
        async with open_channel(address) as channel:
            found.append(await ReferenceWorkerStub(channel).get_counters(GetCountersRequest(), timeout=10))
    return found


@pytest.fixture(scope="module", params=["nixl", "mooncake"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    connector = request.param
    with ExitStack() as stack:

        def worker(role: str) -> Process:
            flags = ("--role", role, "--connector", connector, "--port", "0", "--inter-token-ms", "2")
            return stack.enter_context(started("worker", *flags))

        processes = [worker(role) for role in ("prefill", "prefill", "decode", "decode", "plain")]
        addresses = [process.find(r"grpc://(\S+)") for process in processes]
        pairs = start_router(
            stack,
            *(flag for process in processes[:2] for flag in prefill_flags(process, connector=connector)),
            *(flag for address in addresses[2:4] for flag in ("--decode", f"grpc://{address}")),
        )
        plain = start_router(stack, "--worker-urls", f"grpc://{addresses[4]}")
        yield Fleet(
            prefill=addresses[:2],
            decode=addresses[2:4],
            plain=addresses[4],
            http=pairs.find(r"(http://\S+) \(OpenAI"),
            grpc=pairs.find(r"grpc://(\S+)"),
            metrics=pairs.find(r"(http://\S+/metrics)"),
            plain_http=plain.find(r"(http://\S+) \(OpenAI"),
        )
