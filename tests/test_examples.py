"""The gRPC examples run as their users run them: programs of their own, on real sockets."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
PATIENCE = 40

SHOWN = """\
now: Report(place='Oslo', hour=12, celsius=4.0)
watch: Report(place='Oslo', hour=0, celsius=0.0)
watch: Report(place='Oslo', hour=1, celsius=0.5)
watch: Report(place='Oslo', hour=2, celsius=1.0)
mean: 15.0
follow: Report(place='Oslo', hour=12, celsius=4.0)
follow: Report(place='Bergen', hour=12, celsius=6.0)
refused: INVALID_ARGUMENT: name: is empty (said by: peer)
"""


@asynccontextmanager
async def running(*command: str) -> AsyncIterator[tuple[trio.Process, str]]:
    """A program that goes on serving, and the last word of its first line: its address."""
    run = partial(trio.run_process, [sys.executable, *command], stdout=subprocess.PIPE, check=False)
    async with trio.open_nursery() as nursery:
        process = await nursery.start(run)
        line = b""
        while not line.endswith(b"\n"):
            line += (chunk := await process.stdout.receive_some())
            assert chunk, "it ended before it served"
        yield process, line.split()[-1].decode()
        nursery.cancel_scope.cancel()


async def shown_by_client(address: str) -> str:
    client = [sys.executable, str(EXAMPLES / "grpc_client.py"), address]
    return (await trio.run_process(client, capture_stdout=True)).stdout.decode()


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_the_client_gets_its_answers_and_the_server_stops_when_told(tmp_path, kind):
    address = "127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/weather.sock"
    with trio.fail_after(PATIENCE):
        async with running(str(EXAMPLES / "grpc_server.py"), address) as (server, bound):
            assert await shown_by_client(bound) == SHOWN
            server.terminate()
            assert b"".join([chunk async for chunk in server.stdout]) == b"stopped\n"
            assert await server.wait() == 0


async def test_the_relay_passes_every_kind_of_call_on():
    with trio.fail_after(PATIENCE):
        async with (
            running(str(EXAMPLES / "grpc_server.py"), "127.0.0.1:0") as (_, upstream),
            running(str(EXAMPLES / "relay.py"), "127.0.0.1:0", upstream) as (_, address),
        ):
            assert await shown_by_client(address) == SHOWN


def test_the_generated_messages_are_current(tmp_path):
    """By the command that the documentation gives."""
    page = (ROOT / "docs" / "grpc-on-trio.md").read_text()
    command = next(line for line in page.splitlines() if line.startswith("python -m grpc_tools.protoc"))
    assert command in (EXAMPLES / "weather.proto").read_text()
    command = command.replace("betterproto_out=examples", f"betterproto_out={tmp_path}")
    subprocess.run([sys.executable, *shlex.split(command)[1:]], cwd=ROOT, check=True, timeout=60)
    generated = tmp_path / "weather" / "__init__.py"
    assert generated.read_text() == (EXAMPLES / "weather" / "__init__.py").read_text()
