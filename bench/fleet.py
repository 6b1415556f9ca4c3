"""Processes of a run: load workers, a router or a peer in front of them, and the client that reads the meters."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEER_LOG = Path(tempfile.gettempdir()) / "bench-peer.log"
"""What the last peer said."""
LISTENING = re.compile(r"listening on \w+://([^/ ]+)\S* \((.+)\)")
FRONTS = {"OpenAI API": "http", "gRPC": "grpc", "metrics": "metrics"}
START_SECONDS = 60.0
RUN_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One thing to measure. `front` says which client is used, and for our own router which of its ports.

    `command` starts a peer instead of our router, with `{port}`, `{extra_port}` and `{worker_port}` filled in. The peer
    is ready when it accepts connections or, with `ready_path`, when a GET of that answers with something that has an
    "id". Without a command, `relayed` False means that the client talks to the worker itself.
    """

    name: str
    front: str
    relayed: bool = True
    pair: bool = False
    command: str | None = None
    ready_path: str | None = None


@dataclass(slots=True)
class Running:
    """A started row: where the client goes, and whose CPU it reads. `addresses` are of all that listens, by name."""

    address: str
    pids: dict[str, int] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)


@contextmanager
def start(row: Row, *, pace: float | None) -> Iterator[Running]:
    """Workers and whatever the row puts before them; all are killed on the way out. `pace` is in milliseconds."""
    with ExitStack() as stack:
        paced = [] if pace is None else ["--pace", str(pace)]
        worker, said = _start(stack, "bench.load_worker", *paced, "--role", "decode" if row.pair else "plain")
        running = Running(said["grpc"], {"worker": worker.pid}, {"worker": said["grpc"]})
        if row.command is not None:
            running.address = _start_peer(stack, row, worker_address=said["grpc"], pids=running.pids)
        elif row.relayed:
            fleet = ["--worker-urls", f"grpc://{said['grpc']}"]
            if row.pair:
                prefill, prefill_said = _start(stack, "bench.load_worker", "--role", "prefill")
                running.pids["prefill worker"] = prefill.pid
                fleet = ["--decode", f"grpc://{said['grpc']}", "--prefill", f"grpc://{prefill_said['grpc']}"]
            router, addresses = _start_router(stack, *fleet)
            running.pids["router"] = router.pid
            running.address = addresses[row.front]
            running.addresses |= addresses
        yield running


def run_client(row: Row, running: Running, *, streams: int, tokens: int, least: int) -> dict[str, Any]:
    """Run the row's load client to its end and return what it reports. Raises RuntimeError when it fails."""
    module = "bench.clients.grpc" if row.front == "grpc" else "bench.clients.sse"
    pids = [f"--pid={name}={pid}" for name, pid in running.pids.items()]
    sizes = [f"--streams={streams}", f"--tokens={tokens}", f"--least={least}"]
    command = [sys.executable, "-m", module, running.address, *sizes, *pids]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"{row.name}, {streams} streams: {done.stderr.strip().splitlines()[-1:]}")
    outcome: dict[str, Any] = json.loads(done.stdout)
    return outcome


def _start(stack: ExitStack, module: str, *arguments: str) -> tuple[subprocess.Popen[str], dict[str, str]]:
    """Start one of our own processes and wait for its line."""
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    stack.callback(_end, process)
    line = process.stdout.readline() if process.stdout else ""
    if not line:
        raise RuntimeError(f"{module} did not start (exit status {process.wait()})")
    return process, json.loads(line)


def _start_router(stack: ExitStack, *fleet: str) -> tuple[subprocess.Popen[str], dict[str, str]]:
    """Start `trio-router serve` and wait until it says that it is ready; its addresses by front."""
    ports = ["--port", "0", "--grpc-port", "0", "--prometheus-port", "0"]
    command = [sys.executable, "-m", "trio_router", "serve", *fleet, *ports, "--log-level", "warning"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    stack.callback(_end, process)
    addresses: dict[str, str] = {}
    for line in process.stdout or ():
        listening = LISTENING.match(line)
        if listening is not None:
            addresses[FRONTS[listening[2]]] = listening[1]
        elif line.startswith("ready"):
            return process, addresses
    raise RuntimeError(f"the router did not start (exit status {process.wait()})")


def _start_peer(stack: ExitStack, row: Row, *, worker_address: str, pids: dict[str, int]) -> str:
    assert row.command is not None
    port, extra_port = _free_port(), _free_port()
    command = row.command.format(port=port, extra_port=extra_port, worker_port=worker_address.rpartition(":")[2])
    log = stack.enter_context(PEER_LOG.open("w"))
    peer = subprocess.Popen(shlex.split(command), cwd=ROOT, stdout=log, stderr=log)
    stack.callback(_end, peer)
    pids["router"] = peer.pid
    _wait_for(port, row=row)
    return f"127.0.0.1:{port}"


def _wait_for(port: int, *, row: Row) -> None:
    """Until the peer is ready; a peer that is still looking for its worker would answer with errors."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(("127.0.0.1", port), 1.0) as probe:
                if row.ready_path is None:
                    return
                probe.sendall(f"GET {row.ready_path} HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n".encode())
                with probe.makefile("rb") as answer:
                    if b'"id"' in answer.read():
                        return
        except OSError:
            pass
        time.sleep(0.2)  # another program: nothing tells when it listens
    raise RuntimeError(f"{row.name} was not ready within {START_SECONDS:g} s; see {PEER_LOG}")


def _end(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
