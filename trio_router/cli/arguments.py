"""Arguments to values by name. argparse sorts the words; `config` judges them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final, NoReturn

from ..config import SWITCH, Row
from ..errors import ConfigError
from .commands import Command


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")


def parse_flags(command: Command, arguments: Sequence[str]) -> dict[str, Any]:
    """Sort arguments by the rows they are for, values still as text. Raises ConfigError for what is no option."""
    parser = _Parser(prog=f"trio-router {command.name}", add_help=False, allow_abbrev=False)
    rows = [row for section in command.sections for row in section.rows if row.flag]
    for row in rows:
        parser.add_argument(row.option, dest=row.name, **_PARSING[_shape(row)])
    if command.layered:
        parser.add_argument("--config")
    known, unknown = parser.parse_known_args(arguments)
    if unknown:
        options = [*(row.option for row in rows), "--config", "--help"]
        near = get_close_matches(unknown[0].partition("=")[0], options, n=1)
        hint = f"did you mean {near[0]}?" if near else f"see trio-router {command.name} --help"
        raise ConfigError(f"unknown argument {unknown[0]!r}; {hint}")
    flags = {name: value for name, value in vars(known).items() if value is not None}
    for row in rows:
        if row.words > 1 and row.name in flags:
            flags[row.name] = [" ".join(words) for words in flags[row.name]]
    return flags


def _shape(row: Row) -> str:
    if row.kind is SWITCH:
        return "switch"
    if not row.many:
        return "one"
    return {0: "all", 1: "repeated"}.get(row.words, "phrases")


# Every option has its place in one of these shapes; argparse only sorts the words, `config` judges them.
_PARSING: Final[Mapping[str, Mapping[str, Any]]] = {
    "switch": {"action": "store_const", "const": True},
    "one": {},
    "repeated": {"action": "append"},
    "all": {"action": "extend", "nargs": "+"},
    "phrases": {"action": "append", "nargs": "+"},
}
