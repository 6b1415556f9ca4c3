"""The entry point: chooses the command, gathers its values, and turns errors into one line and an exit status."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Final

import trio_router

from ..config import Values, gather, misspelt_variables
from ..errors import ConfigError, RouterError
from .arguments import parse_flags
from .commands import COMMANDS, Command
from .help import command_help, overview

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0, 1 when it failed, 2 when it was told something wrong."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What a terminal cannot show is no reason to fail.
            stream.reconfigure(errors="replace")
    try:
        status = _dispatch(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        return status
    except ConfigError as exc:
        return _complain(exc.message, status=EXIT_USAGE)
    except RouterError as exc:
        return _complain(exc.message, status=EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has enough of it; the interpreter must not trip over the rest when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as exc:
        return _complain(str(exc), status=EXIT_FAILED)


def _complain(message: str, *, status: int) -> int:
    one_line = " ".join(message.split())
    print(f"trio-router: {one_line}", file=sys.stderr)  # noqa: T201  # a command's output
    return status


def _dispatch(arguments: list[str]) -> int:
    first = arguments[0] if arguments else ""
    if first in ("-h", "--help", "help"):
        return _print(overview(COMMANDS))
    if first in ("-V", "--version"):
        return _print(f"trio-router {trio_router.__version__}\n")
    command = next((command for command in COMMANDS if command.name == first), None)
    if command is None:
        names = [known.name for known in COMMANDS]
        near = get_close_matches(first, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(names)} (see trio-router --help)"
        raise ConfigError(f"no command {first!r}; {hint}" if first else f"no command given; {hint}")
    if any(word in ("-h", "--help") for word in arguments[1:]):
        return _print(command_help(command))
    return command.run(_values(command, arguments[1:]))


def _print(text: str) -> int:
    sys.stdout.write(text)
    return 0


def _values(command: Command, arguments: list[str]) -> Values:
    flags = parse_flags(command, arguments)
    if not command.layered:
        return gather(command.sections, flags=flags)
    for name, meant in misspelt_variables(command.sections, environ=os.environ).items():
        _complain(f"note: the environment variable {name} is no setting; {meant} is", status=0)
    file = flags.pop("config", None)
    return gather(command.sections, file=file and Path(file), environ=os.environ, flags=flags)
