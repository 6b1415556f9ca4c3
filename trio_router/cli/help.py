"""What `--help` says, made from the tables of commands and rows. Pure but for the width of the terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence

from ..config import SWITCH, Row
from .commands import Command


def overview(commands: Sequence[Command]) -> str:
    """What `trio-router --help` says."""
    width = _width()
    column = max(len(command.name) for command in commands)
    lines = [
        "usage: trio-router COMMAND [OPTION...]",
        "",
        *_wrap("A router for LLM inference with separate prefill and decode workers.", width=width),
        "",
        "commands:",
        *(f"  {command.name:<{column}}  {command.summary}" for command in commands),
        "",
        "`trio-router COMMAND --help` tells its options; `trio-router --version` the version.",
        "First time here? Run: trio-router demo",
    ]
    return "\n".join(lines) + "\n"


def command_help(command: Command) -> str:
    """What `trio-router COMMAND --help` says."""
    width = _width()
    lines = [f"usage: trio-router {command.name} [OPTION...]", "", *_wrap(command.about, width=width)]
    for section in command.sections:
        rows = [row for row in section.rows if row.flag]
        if rows:
            lines += ["", f"{section.title}:"]
            for row in rows:
                lines += _option_help(row.option + _metavar(row), _described(row), width=width)
    rare = [row for section in command.sections for row in section.rows if not row.flag]
    if rare:
        lines += ["", "only in the file or the environment:"]
        for row in rare:
            lines += _option_help(f"{row.name} = {row.kind.metavar}", _described(row), width=width)
    general = [("--config FILE", "TOML file with settings")] if command.layered else []
    lines += ["", "general:"]
    for option, text in (*general, ("-h, --help", "show this and exit")):
        lines += _option_help(option, text, width=width)
    lines += ["", "examples:", *textwrap.indent(textwrap.dedent(command.examples), "  ").splitlines()]
    return "\n".join(lines) + "\n"


def _metavar(row: Row) -> str:
    if row.kind is SWITCH:
        return ""
    names = row.metavars or (row.kind.metavar,)
    optional = "".join(f" [{name}]" for name in names[1:])
    return f" {names[0]}{'...' if row.many and row.words == 0 else ''}{optional}"


def _described(row: Row) -> str:
    text = row.help if row.alias is None else f"{row.help}; {row.alias} is read, too"
    match row.default:
        case None | [] | False:
            return text
        case float():
            return f"{text} (default {row.default:g})"
        case str() if " " in row.default:
            return f'{text} (default "{row.default}")'
        case _:
            return f"{text} (default {row.default})"


def _option_help(option: str, text: str, *, width: int) -> Iterator[str]:
    indent, column = 2, 36
    wrapped = _wrap(text, width=width - column)
    head = " " * indent + option
    if len(head) > column - 2:
        yield head
        head = ""
    for line in wrapped:
        yield f"{head:<{column}}{line}"
        head = ""


def _wrap(text: str, *, width: int) -> list[str]:
    return textwrap.wrap(text, width=width, break_on_hyphens=False, break_long_words=False)


def _width() -> int:
    return max(60, min(100, shutil.get_terminal_size().columns))
