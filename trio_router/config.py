"""How settings are found: a TOML file, over it the environment, over that flags. And how a wrong one is told.

Rows and layers only; it must not know what any setting means, nor who reads the records made from them. A row has one
name, from which its flag, its variable and its key in the file follow, so that knowing one is knowing all.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from .errors import ConfigError

ENV_PREFIX: Final = "TRIO_ROUTER_"
# A container platform that links services by variables sets TRIO_ROUTER_PORT=tcp://10.0.0.1:30000 for a service named
# "trio-router": not a setting of ours, and never a valid one.
_SERVICE_LINKS: Final = ("tcp://", "udp://", "sctp://")
# Above any duration or factor that is meant, below infinity.
_MANY: Final = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What values a setting takes. `expects` completes "... is not"; `metavar` stands for the value in help."""

    type: Any
    expects: str
    metavar: str


PORT: Final = Kind(
    type=Annotated[int, msgspec.Meta(ge=0, le=65535)],
    expects="a port number (0 to 65535; 0 lets the system choose)",
    metavar="PORT",
)
COUNT: Final = Kind(type=Annotated[int, msgspec.Meta(ge=1)], expects="a whole number of at least 1", metavar="N")
WHOLE: Final = Kind(type=Annotated[int, msgspec.Meta(ge=0)], expects="a whole number of at least 0", metavar="N")
BYTES: Final = Kind(type=Annotated[int, msgspec.Meta(ge=1)], expects="a number of bytes of at least 1", metavar="BYTES")
SECONDS: Final = Kind(
    type=Annotated[float, msgspec.Meta(gt=0, le=_MANY)], expects="a number of seconds above 0", metavar="SECONDS"
)
SECONDS_OR_NONE: Final = Kind(
    type=Annotated[float, msgspec.Meta(ge=0, le=_MANY)], expects="a number of seconds of at least 0", metavar="SECONDS"
)
MILLISECONDS: Final = Kind(
    type=Annotated[float, msgspec.Meta(ge=0, le=_MANY)], expects="a number of milliseconds of at least 0", metavar="MS"
)
AMOUNT: Final = Kind(type=Annotated[float, msgspec.Meta(ge=0, le=_MANY)], expects="a number of at least 0", metavar="N")
RATE: Final = Kind(type=Annotated[float, msgspec.Meta(gt=0, le=_MANY)], expects="a number above 0", metavar="RATE")
FACTOR: Final = Kind(
    type=Annotated[float, msgspec.Meta(ge=1, le=_MANY)], expects="a factor of at least 1", metavar="FACTOR"
)
FRACTION: Final = Kind(
    type=Annotated[float, msgspec.Meta(ge=0, le=1)], expects="a fraction from 0 to 1", metavar="FRACTION"
)
SWITCH: Final = Kind(type=bool, expects="true or false", metavar="BOOL")
# An argument or variable of bytes that are no UTF-8 comes with lone surrogates in it, which nothing can send on.
_UTF8: Final = r"\A[^\ud800-\udfff]+\Z"
TEXT: Final = Kind(
    type=Annotated[str, msgspec.Meta(pattern=_UTF8)],
    expects="a text in UTF-8, not empty",
    metavar="TEXT",
)
PATH: Final = Kind(type=Annotated[str, msgspec.Meta(min_length=1)], expects="a path", metavar="PATH")


def choice(*values: str) -> Kind:
    """One of a few words."""
    return Kind(type=Literal[values], expects=f"one of {', '.join(values)}", metavar="|".join(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One setting. `name` is its key in the file; the flag is the same with dashes, the variable in capitals.

    `many`: a list, which a flag fills by being repeated, a variable with commas. `words`: how many words a flag's value
    may have (they are joined by a space). `flag` False: too rare for the command line. `default` is what the value is
    when nobody gives one; None: nothing. `alias` is a variable that another gateway has for the same, read where ours
    is not set; `forgiving`: what is no value there is passed over, as it is by that gateway.
    """

    name: str
    kind: Kind
    help: str
    default: Any = None
    many: bool = False
    words: int = 1
    metavars: tuple[str, ...] = ()
    flag: bool = True
    alias: str | None = None
    forgiving: bool = False

    @property
    def option(self) -> str:
        """The flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return ENV_PREFIX + self.name.upper()


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Rows that make one record, and are one table of the file and one group of help."""

    name: str
    title: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """A setting's value and who gave it: "default", a flag, a variable or a file's path."""

    value: Any
    source: str


class Values(Mapping[str, Any]):
    """The effective settings by name, with where each came from."""

    def __init__(self, found: Mapping[str, Found]) -> None:
        self._found = dict(found)

    def __getitem__(self, name: str) -> Any:
        return self._found[name].value

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def source(self, name: str) -> str:
        """Who gave this value."""
        return self._found[name].source

    def wrong(self, name: str, reason: str) -> ConfigError:
        """An error about a setting whose value fits its kind and yet cannot be right."""
        return ConfigError(f"{_where(name, self.source(name))}: {reason}")


def gather(
    sections: Sequence[Section],
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Values:
    """Find every row's value: flags before the environment before the file before defaults.

    `flags` maps names to strings (lists of them for `many`, True for switches). A list replaces the list of the layer
    below. Raises ConfigError naming the setting, its source, its value and what would be right.
    """
    from_file = read_file(file, sections=sections) if file is not None else {}
    found: dict[str, Found] = {}
    for section in sections:
        for row in section.rows:
            found[row.name] = (
                _from_flags(row, flags or {})
                or _from_environment(row, environ or {})
                or _from_file(row, from_file, file=file, table=section.name)
                or Found(row.default, "default")
            )
    return Values(found)


def _from_flags(row: Row, flags: Mapping[str, Any]) -> Found | None:
    given = flags.get(row.name)
    return None if given is None else _convert(row, given, source=row.option, strict=False)


def _from_environment(row: Row, environ: Mapping[str, str]) -> Found | None:
    found = _from_variable(row, row.variable, environ)
    if found is not None or row.alias is None:
        return found
    try:
        return _from_variable(row, row.alias, environ)
    except ConfigError:
        if row.forgiving:
            return None
        raise


def _from_variable(row: Row, name: str, environ: Mapping[str, str]) -> Found | None:
    text = environ.get(name, "").strip()
    # Set to nothing means not set: compose files and unit files cannot unset.
    if not text or text.startswith(_SERVICE_LINKS):
        return None
    given = [item.strip() for item in text.split(",") if item.strip()] if row.many else text
    return _convert(row, given, source=name, strict=False)


def _from_file(row: Row, tables: Mapping[str, Any], *, file: Path | None, table: str) -> Found | None:
    given = tables.get(table, {}).get(row.name)
    return None if given is None else _convert(row, given, source=f"{file} [{table}]", strict=True)


def _convert(row: Row, given: Any, *, source: str, strict: bool) -> Found:
    items = given if row.many and isinstance(given, list) else [given]
    try:
        if row.many and items is not given:
            raise msgspec.ValidationError("not a list")
        values = [msgspec.convert(item, row.kind.type, strict=strict) for item in items]
    except msgspec.ValidationError:
        wanted = f"a list, each item {row.kind.expects}" if row.many else row.kind.expects
        raise ConfigError(f"{_where(row.name, source)}: {_shown(given)} is not {wanted}") from None
    return Found(values if row.many else values[0], source)


def _where(name: str, source: str) -> str:
    # A flag says by itself which setting it is.
    return source if source.startswith("--") else f"{name} (from {source})"


def _shown(value: Any) -> str:
    return repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."


def read_file(path: Path, *, sections: Iterable[Section]) -> dict[str, dict[str, Any]]:
    """Read a TOML file of these sections. Raises ConfigError for one that cannot be read or has keys unknown here."""
    try:
        with path.open("rb") as opened:
            tables = tomllib.load(opened)
    except OSError as exc:
        raise ConfigError(f"--config {path}: {exc.strerror}") from exc
    except ValueError as exc:  # bad UTF-8 and endless numbers, too
        raise ConfigError(f"--config {path} is not TOML: {exc}") from exc
    except RecursionError as exc:
        raise ConfigError(f"--config {path}: it is nested too deeply") from exc
    known = {section.name: [row.name for row in section.rows] for section in sections}
    for name, table in tables.items():
        if name not in known:
            raise ConfigError(f"{path}: {_unknown_table(name, known=known)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} must be a table, written [{name}]")
        for key in table:
            if key not in known[name]:
                raise ConfigError(f"{path}: unknown setting {key!r} in [{name}]; {_nearest(key, name, known=known)}")
    return tables


def _unknown_table(name: str, *, known: Mapping[str, Sequence[str]]) -> str:
    home = next((table for table, keys in known.items() if name in keys), None)
    if home is not None:
        return f"setting {name!r} belongs in the table [{home}]"
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean [{near[0]}]?" if near else f"there are {', '.join(f'[{table}]' for table in known)}"
    return f"unknown table [{name}]; {hint}"


def _nearest(key: str, table: str, *, known: Mapping[str, Sequence[str]]) -> str:
    normal = key.replace("-", "_").lower()
    home = next((name for name, keys in known.items() if normal in keys), None)
    if home is not None and home != table:
        return f"{normal} belongs in [{home}]"
    near = [normal] if home else get_close_matches(normal, known[table], n=1)
    if near:
        return f"did you mean {near[0]}?"
    everywhere = {name: section for section, keys in known.items() for name in keys}
    far = get_close_matches(normal, everywhere, n=1)
    if far:
        return f"did you mean {far[0]} in [{everywhere[far[0]]}]?"
    return f"[{table}] has {', '.join(known[table])}"


def misspelt_variables(sections: Iterable[Section], *, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that look like a setting and are none, with the one that was probably meant."""
    known = [row.variable for section in sections for row in section.rows]
    ours = [name for name in environ if name.startswith(ENV_PREFIX) and name not in known]
    near = {name: get_close_matches(name, known, n=1, cutoff=0.85) for name in sorted(ours)}
    return {name: matches[0] for name, matches in near.items() if matches}


def effective_toml(sections: Iterable[Section], values: Values) -> str:
    """The settings as a file that would give the same ones, each line saying where its value came from."""
    lines: list[tuple[str, str]] = []
    for section in sections:
        lines.append((f"[{section.name}]", ""))
        for row in section.rows:
            value = values[row.name]
            line = f"{row.name} = {_toml(value)}" if value is not None else f"# {row.name} ="
            lines.append((line, values.source(row.name)))
        lines.append(("", ""))
    column = min(max(len(line) for line, _ in lines), 48)
    return "\n".join(f"{line:<{column}}  # {source}" if source else line for line, source in lines).rstrip() + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, float):
        return f"{value:g}" if value == int(value) and abs(value) < 1e6 else repr(value)
    # A JSON string, number or boolean is TOML's too, but for one control character that TOML wants escaped.
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
