"""What one rendering of a foreign template may still use, and what its operators and methods are about to use.

Every loop turn, call and filter costs steps, every text made costs characters; what could grow without end is counted
before it is made. The bounds are far above what real templates need: they stop accidents and plain attacks with a clear
error, but are no proof against every way to waste time. This module must not know the template engine beyond its
context and its errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.runtime import Context

# A conversation of 1,000 turns costs the templates in the field some 20,000 steps; this many take about a second.
MAX_STEPS = 1_000_000
# A prompt of a million tokens has some 5 million characters.
MAX_TEXT_CHARACTERS = 32 * 1024 * 1024
MAX_TOTAL_CHARACTERS = 4 * MAX_TEXT_CHARACTERS
MAX_NUMBER_BITS = 4096
MAX_WIDTH = 9999

# The variable that holds the meter. No template can write this name: it has a space.
_KEY = "the meter"

# A width that is computed, or has more digits than MAX_WIDTH.
_WIDE_PERCENT_FORMAT = re.compile(r"%[^%a-zA-Z]*(?:\*|\d{5})")
_WIDE_BRACE_FORMAT = re.compile(r"\{[^{}]*:[^{}]*(?:\{|\d{5})")


class TooCostly(TemplateRuntimeError):
    """The template has used up one of its bounds; the message names it."""


class Meter:
    """The steps and characters that one rendering has left."""

    __slots__ = ("_characters", "_steps")

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._characters = MAX_TOTAL_CHARACTERS

    @staticmethod
    def of(context: Context) -> Meter:
        """The meter of the rendering that this context belongs to."""
        meter: Meter = context.parent[_KEY]
        return meter

    def variables(self) -> dict[str, object]:
        """What a rendering's variables must contain for its work to be counted here."""
        return {_KEY: self}

    def work(self, steps: int = 1) -> None:
        """Count steps; raises TooCostly."""
        self._steps -= steps
        if self._steps < 0:
            raise TooCostly(f"the template takes more than {MAX_STEPS} steps")

    def make(self, characters: int) -> None:
        """Count a text of this length, preferably before it exists; raises TooCostly."""
        self._characters -= characters
        if self._characters < 0 or characters > MAX_TEXT_CHARACTERS:
            raise TooCostly("the template makes too much text")

    def measure(self, value: object) -> None:
        """Count a value's whole content before it becomes text: lists can share what text has to repeat."""
        waiting = [value]
        while waiting:
            item = waiting.pop()
            self.work()
            if isinstance(item, str):
                self.make(len(item))
            elif isinstance(item, Mapping):
                waiting += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple | set | frozenset):
                waiting += item

    def each(self, items: Iterable[Any]) -> Iterator[Any]:
        """The same items, each of them counted when it is taken."""
        for item in items:
            self.work()
            yield item


def check_width(width: object) -> None:
    """Refuse a number of columns that no prompt needs."""
    if isinstance(width, int) and width > MAX_WIDTH:
        raise TooCostly(f"the template pads text to more than {MAX_WIDTH} columns")


def check_brace_format(text: str) -> None:
    """Refuse a text for `str.format` that could pad without end."""
    if _WIDE_BRACE_FORMAT.search(text):
        raise SecurityError("the template formats text to a computed or very large width")


def check_add(meter: Meter, left: object, right: object) -> None:
    """Count `left + right`."""
    if isinstance(left, str) and isinstance(right, str):
        meter.make(len(left) + len(right))
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        meter.work(len(left) + len(right))


def check_percent(meter: Meter, left: object, right: object) -> None:
    """Count `left % right`, if that is text formatting."""
    if isinstance(left, str):
        if _WIDE_PERCENT_FORMAT.search(left):
            raise SecurityError("the template formats text to a computed or very large width")
        meter.measure([left, right])


def _check_multiply(meter: Meter, left: object, right: object) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
        return
    for repeated, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(repeated, str | bytes):
            meter.make(len(repeated) * max(0, times))
        elif isinstance(times, int) and isinstance(repeated, list | tuple):
            meter.work(len(repeated) * max(0, times))


def _check_power(meter: Meter, left: object, right: object) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))


def _check_bits(bits: int) -> None:
    if bits > MAX_NUMBER_BITS:
        raise TooCostly(f"the template computes a number of more than {MAX_NUMBER_BITS} bits")


OPERATORS: Mapping[str, Callable[[Meter, object, object], None]] = {
    "+": check_add,
    "*": _check_multiply,
    "**": _check_power,
    "%": check_percent,
}

_Arguments = tuple[Any, ...]


def _pad(meter: Meter, owner: Any, arguments: _Arguments) -> _Arguments:
    for argument in arguments:
        check_width(argument)
    return arguments


def _replace(meter: Meter, owner: Any, arguments: _Arguments) -> _Arguments:
    if len(arguments) >= 2:
        old, new = arguments[:2]
        meter.make(len(owner) + owner.count(old) * len(new))
    return arguments


def _join(meter: Meter, owner: Any, arguments: _Arguments) -> _Arguments:
    if not arguments:
        return arguments
    items = list(meter.each(arguments[0]))
    meter.measure(items)
    meter.make(len(owner) * len(items))
    return (items, *arguments[1:])


def _refuse(meter: Meter, owner: Any, arguments: _Arguments) -> _Arguments:
    raise SecurityError("the template calls a method that is not supported in chat templates")


# Methods of text and numbers whose result can be much larger than what they are called on. Each check returns the
# arguments to call with: a generator that it had to go through is a list afterwards.
METHODS: Mapping[str, Callable[[Meter, Any, _Arguments], _Arguments]] = {
    "center": _pad,
    "ljust": _pad,
    "rjust": _pad,
    "zfill": _pad,
    "replace": _replace,
    "join": _join,
    "expandtabs": _refuse,
    "translate": _refuse,
    "to_bytes": _refuse,
}
