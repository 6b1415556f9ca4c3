"""Search for bytes that break a target, for as long as you like.

    pip install atheris
    python -m tests.fuzz http2_server --seconds 1800 [--corpus DIRECTORY]

The search is guided by coverage of our own code and hpack's and h11's. A finding is written as `crash-*` to the current
directory: after the repair it goes to `tests/fuzz/corpus/TARGET/`, under a name that says what it was.
"""

from __future__ import annotations

import argparse
import sys

import atheris

with atheris.instrument_imports(include=["trio_router", "hpack", "h11"]):
    from .targets import CORPUS, TARGETS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--seconds", type=int, default=1800)
    parser.add_argument("--corpus", help="a directory that keeps what the search has found useful")
    options = parser.parse_args()
    arguments = [
        sys.argv[0],
        f"-max_total_time={options.seconds}",
        "-max_len=2000",
        "-timeout=20",
        "-rss_limit_mb=1000",
    ]
    arguments += [options.corpus] if options.corpus else []
    kept = CORPUS / options.target
    arguments += [str(kept)] if kept.is_dir() else []
    atheris.Setup(arguments, TARGETS[options.target])
    atheris.Fuzz()


main()
