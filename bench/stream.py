"""What does a token cost in the router, by gRPC and by server-sent events, beside no relay and beside other relays?

    python bench/stream.py [--quick] [--save] [--pair] [--smg PATH] [--peer NAME=grpc|sse:COMMAND]

Three load shapes. `saturated`: the worker sends as fast as it can, so that many tokens of a stream come at once.
`paced`: one token per stream every 20 ms, all of a step in one write, as engines send. `short`: streams of one token,
which is the cost of a request. Streams have 200 tokens, so a token's figure has 1/200 of a request in it.

A figure is CPU time of the router process (all threads, user and system) divided by the tokens delivered, the median
of the repetitions with (min..max) and tokens per second of wall time. Repetitions are interleaved: every row is
measured before any row is measured again. Wall time is only an indication where the machine does other things, too;
compare figures of one run with each other, not with another day's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.fleet import Row, run_client, start

RESULTS = Path(__file__).resolve().parent / "results"
ASSETS = Path(__file__).resolve().parent.parent / "trio_router" / "engine" / "assets"
TOKENS = 200
PACE_MS = 20.0

Samples = dict[tuple[str, str, int], list[dict[str, Any]]]
"""What clients reported, by (shape, row, streams)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A load. `least` tokens are measured per cell; a paced cell is one round, which takes tokens * pace."""

    name: str
    tokens: int
    least: int
    pace: float | None = None
    unit: str = "token"


OWN_ROWS = (
    Row(name="no relay (cost of the worker)", front="grpc", relayed=False),
    Row(name="trio-router, gRPC", front="grpc"),
    Row(name="trio-router, SSE", front="http"),
)
PAIR_ROWS = (
    Row(name="trio-router, gRPC, pair", front="grpc", pair=True),
    Row(name="trio-router, SSE, pair", front="http", pair=True),
)


def shapes(*, quick: bool) -> list[Shape]:
    tokens = 50 if quick else TOKENS
    return [
        Shape(name="saturated", tokens=tokens, least=5_000 if quick else 40_000),
        Shape(name="paced", tokens=tokens, least=1, pace=PACE_MS),
        Shape(name="short", tokens=1, least=100 if quick else 1_000, unit="request"),
    ]


def smg_row(binary: str) -> Row:
    """The field's router in Rust. Its figure is of all its threads; it spreads over all cores."""
    command = (
        f"{binary} launch --worker-urls grpc://127.0.0.1:{{worker_port}} --model-path {ASSETS} --backend vllm"
        " --host 127.0.0.1 --port {port} --prometheus-port {extra_port} --policy round_robin --log-level warn"
        " --max-concurrent-requests 2000"
    )
    return Row(name="SMG, SSE", front="http", command=command, ready_path="/v1/models")


def peer_row(text: str) -> Row:
    """NAME=grpc:COMMAND or NAME=sse:COMMAND."""
    name, _, rest = text.partition("=")
    front, _, command = rest.partition(":")
    if not command or front not in ("grpc", "sse"):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=grpc:COMMAND or NAME=sse:COMMAND")
    return Row(name=name, front="http" if front == "sse" else "grpc", command=command)


def choose_rows(options: argparse.Namespace) -> list[Row]:
    rows = [*OWN_ROWS, *(PAIR_ROWS if options.pair else ()), *options.peer]
    if options.grpcio:
        rows.append(
            Row(
                name="grpc.aio, gRPC",
                front="grpc",
                command=f"{sys.executable} -m bench.peers.grpcio_relay {{port}} {{worker_port}}",
            )
        )
    if options.smg:
        rows.append(smg_row(options.smg))
    return [row for row in rows if not options.row or any(part in row.name for part in options.row)]


def measure(rows: Iterable[Row], chosen: list[Shape], *, streams: list[int], reps: int) -> Samples:
    """Every cell `reps` times, interleaved."""
    samples: Samples = {}
    for rep in range(reps):
        for shape in chosen:
            for row in rows:
                try:
                    with start(row, pace=shape.pace) as running:
                        for count in streams:
                            outcome = run_client(row, running, streams=count, tokens=shape.tokens, least=shape.least)
                            samples.setdefault((shape.name, row.name, count), []).append(outcome)
                except RuntimeError as exc:
                    print(f"failed: {exc}", file=sys.stderr)
        load = " ".join(f"{value:.1f}" for value in os.getloadavg())
        print(f"repetition {rep + 1} of {reps} done, load {load}", file=sys.stderr)
    return samples


def cost(outcome: dict[str, Any], *, process: str, per_request: bool) -> float:
    """CPU-microseconds of a process per token or request."""
    count: int = outcome["requests"] if per_request else outcome["tokens"]
    seconds: float = outcome["cpu"][process]
    return seconds / count * 1e6


def print_table(samples: Samples, shape: Shape, *, rows: list[Row], streams: list[int]) -> None:
    print(f"\n{shape.name}: CPU-us per {shape.unit} of the router process, median (min..max), {shape.unit}s/s")
    head = ["", *(f"{count} streams" for count in streams)]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        cells = [cell(samples.get((shape.name, row.name, count)), row, shape=shape) for count in streams]
        print(f"| {row.name} | {' | '.join(cells)} |")


def cell(outcomes: list[dict[str, Any]] | None, row: Row, *, shape: Shape) -> str:
    if not outcomes:
        return "-"
    process = "router" if row.relayed else "worker"
    per_request = shape.unit == "request"
    costs = [cost(outcome, process=process, per_request=per_request) for outcome in outcomes]
    count = "requests" if per_request else "tokens"
    rate = statistics.median(outcome[count] / outcome["wall"] for outcome in outcomes)
    text = f"{number(statistics.median(costs))} ({number(min(costs))}..{number(max(costs))}), {rate:,.0f}/s"
    events = [outcome["events"] / outcome["tokens"] for outcome in outcomes if outcome["events"]]
    # A client that is far behind gets several tokens in one event, which is cheaper: say so.
    if events and not per_request and statistics.median(events) < 0.9:
        text += f", {statistics.median(events):.2f} events/token"
    return text


def number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def save(samples: Samples, *, arguments: list[str]) -> Path:
    """All samples as they came."""
    RESULTS.mkdir(exist_ok=True)
    now = datetime.now(UTC)
    path = RESULTS / f"stream-{now:%Y%m%d-%H%M%S}.json"
    cells = [
        {"shape": shape, "row": row, "streams": streams, "outcomes": outcomes}
        for (shape, row, streams), outcomes in samples.items()
    ]
    about = {"at": now.isoformat(), "arguments": arguments, "python": sys.version.split()[0], "cpus": os.cpu_count()}
    path.write_text(json.dumps(about | {"cells": cells}, indent=1) + "\n")
    return path


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repetition of short streams: does it run?")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--streams", default="1,16,64,256", help="comma-separated")
    parser.add_argument("--shape", action="append", choices=["saturated", "paced", "short"], help="only these")
    parser.add_argument("--row", action="append", default=[], metavar="PART", help="only rows whose name has this part")
    parser.add_argument("--pair", action="store_true", help="also through a prefill/decode pair")
    parser.add_argument("--smg", metavar="PATH", default=shutil.which("smg"), help="the SMG binary; default: on PATH")
    parser.add_argument("--grpcio", action="store_true", help="also a relay of grpc.aio (needs grpcio)")
    parser.add_argument("--peer", action="append", type=peer_row, default=[], metavar="NAME=grpc|sse:COMMAND")
    parser.add_argument("--save", action="store_true", help=f"write all samples to {RESULTS.name}/")
    return parser.parse_args()


def main() -> None:
    options = parse()
    rows = choose_rows(options)
    streams = [int(part) for part in options.streams.split(",")]
    chosen = [shape for shape in shapes(quick=options.quick) if not options.shape or shape.name in options.shape]
    samples = measure(rows, chosen, streams=streams, reps=1 if options.quick else options.reps)
    for shape in chosen:
        print_table(samples, shape, rows=rows, streams=streams)
    if options.save:
        print(f"\nsamples: {save(samples, arguments=sys.argv[1:])}")


if __name__ == "__main__":
    main()
