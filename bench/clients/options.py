"""The command line and the result line that the load clients share."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a client is to do. `processes` are the pids whose CPU it reads, by name."""

    address: str
    streams: int
    tokens: int
    least: int
    processes: dict[str, int]

    @property
    def warm_up_tokens(self) -> int:
        return min(self.tokens, 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What it cost. Seconds; `reads` are the batches (gRPC) or reads of a socket (SSE) that the tokens came in, and
    `events` the server-sent events.
    """

    tokens: int
    requests: int
    wall: float
    cpu: dict[str, float]
    reads: int
    events: int = 0


def take_job(description: str | None) -> Job:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--least", type=int, default=20_000, help="measured tokens, over all rounds")
    parser.add_argument("--pid", action="append", default=[], metavar="NAME=PID", help="read this process's CPU time")
    options = parser.parse_args()
    named = (item.split("=", 1) for item in options.pid)
    return Job(
        address=options.address,
        streams=options.streams,
        tokens=options.tokens,
        least=options.least,
        processes={name: int(pid) for name, pid in named},
    )


def report(outcome: Outcome) -> None:
    sys.stdout.write(json.dumps(asdict(outcome)) + "\n")
