"""The commands there are, as a table: what each is told, what it says of itself, and what runs.

Nothing here runs before a command is chosen and its settings are whole.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import trio

from ..config import Section, Values, effective_toml
from ..demo.run import demo
from ..observe.log import set_up_logging
from ..rows import SECTIONS
from ..settings import log_settings, service_settings
from .demo_options import DEMO_SECTIONS, demo_settings
from .descriptors import fit_descriptors
from .serve import serve
from .worker import WORKER_SECTIONS, run_worker, worker_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A subcommand. `run` gets the effective values and returns the exit status."""

    name: str
    summary: str
    about: str
    examples: str
    sections: tuple[Section, ...]
    run: Callable[[Values], int]
    layered: bool = False
    """Whether a file and the environment count besides flags."""


def say(line: str) -> None:
    """Print a line at once: whoever started this process may be waiting for it."""
    print(line, flush=True)  # noqa: T201  # a command's output


def announce(line: str) -> None:
    """Print a line if anybody still reads: a server that serves must not end because of it."""
    try:
        say(line)
    except OSError:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  # for the rest of the process


def _serve(values: Values) -> int:
    settings = service_settings(values)
    settings.validate()
    set_up_logging(settings.log)
    trio.run(partial(serve, fit_descriptors(settings), say=announce))
    return 0


def _check_config(values: Values) -> int:
    service_settings(values).validate()
    sys.stdout.write(effective_toml(SECTIONS, values))
    return 0


def _worker(values: Values) -> int:
    settings = worker_settings(values)
    set_up_logging(log_settings(values))
    trio.run(partial(run_worker, settings, say=announce))
    return 0


def _demo(values: Values) -> int:
    set_up_logging(log_settings(values))
    return trio.run(partial(demo, demo_settings(values), say=say, out=sys.stdout))


_LAYERS: Final = (
    "Each setting may also stand in a TOML file (--config) or in a variable TRIO_ROUTER_<NAME>; a flag counts more than"
    " a variable, a variable more than the file. `trio-router check-config` shows what would count, and why."
)

COMMANDS: Final = (
    Command(
        name="demo",
        summary="see it work: a router and four toy workers in one process",
        about="Start two prefill and two decode workers and a router in one process, send a chat through its HTTP port,"
        " print the answer as it comes and then where the time went. The workers simulate an engine; the protocol, the"
        " sockets and the handoff of state between workers are real. Then it keeps serving, until Ctrl-C.",
        examples="""\
            trio-router demo
            trio-router demo --once --prompt "Tell me about the sea." --max-tokens 60
            trio-router demo --connector mooncake
            trio-router demo --image sample
            trio-router demo --once --json""",
        sections=DEMO_SECTIONS,
        run=_demo,
    ),
    Command(
        name="serve",
        summary="run the router in front of workers",
        about=f"Route OpenAI-compatible HTTP and gRPC requests to workers: pairs of prefill and decode workers, or"
        f" workers that serve whole requests. {_LAYERS}",
        examples="""\
            trio-router serve --prefill grpc://10.0.0.1:50051 --prefill grpc://10.0.0.2:50051 --decode grpc://10.0.0.3:50051
            trio-router serve --worker-urls grpc://127.0.0.1:50051 --port 8000
            trio-router serve --config router.toml --log-json""",
        sections=SECTIONS,
        run=_serve,
        layered=True,
    ),
    Command(
        name="worker",
        summary="run a reference worker, for trials and tests",
        about="Serve the vLLM gRPC interface with a simulated engine: a small English model whose text depends on every"
        " token of the context, a block cache, and a real transfer of state from prefill to decode workers.",
        examples="""\
            trio-router worker --role prefill --port 50051
            trio-router worker --role decode --port 50052 --inter-token-ms 20""",
        sections=WORKER_SECTIONS,
        run=_worker,
    ),
    Command(
        name="check-config",
        summary="show the settings `serve` would use, and where each comes from",
        about="Take the same options as `serve`, check them, and print the effective settings as a TOML file. Exit"
        f" status 0 when they are usable, 2 when they are not. {_LAYERS}",
        examples="""\
            trio-router check-config --config router.toml
            trio-router check-config --prefill grpc://10.0.0.1:50051 --decode grpc://10.0.0.2:50051 > router.toml""",
        sections=SECTIONS,
        run=_check_config,
        layered=True,
    ),
)
