"""The filters that chat templates may use, metered.

Most are the template engine's own, counted; those that can make much out of little are written here, counting first;
`tojson` is the transformers library's. Not listed is what can grow without end and no chat template uses, such as
`wordwrap` and `urlize`: a template that names one does not compile.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import nodes
from jinja2.filters import FILTERS
from jinja2.runtime import Context
from jinja2.utils import pass_context

from trio_router.text.metering import Meter, check_add, check_percent, check_width

# Turn their value into text, which is to be counted in full.
_TEXT_FILTERS = (
    *("capitalize", "e", "escape", "forceescape", "lower", "safe", "string", "striptags"),
    *("title", "trim", "truncate", "upper", "urlencode", "wordcount"),
)
# Go through their value once, at most.
_LIST_FILTERS = (
    *("abs", "attr", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items", "last"),
    *("length", "list", "map", "max", "min", "reject", "rejectattr", "reverse", "round", "select", "selectattr"),
    *("sort", "unique"),
)

# Put into templates by their compiler; a template cannot write these names.
_EACH_TURN = "each turn"
_JOINED = "joined text"


def metered_loop(items: nodes.Expr) -> nodes.Expr:
    """The expression that a `for` goes through, each of its turns counted."""
    return nodes.Filter(items, _EACH_TURN, [], [], None, None, lineno=items.lineno)


def metered_concat(parts: list[nodes.Expr], *, line: int) -> nodes.Expr:
    """The expression `a ~ b ~ c`, counted."""
    return nodes.Filter(nodes.List(parts, lineno=line), _JOINED, [], [], None, None, lineno=line)


def chat_filters() -> dict[str, Callable[..., Any]]:
    """All filters by name."""
    return {
        **{name: _counted(FILTERS[name], as_text=True) for name in _TEXT_FILTERS},
        **{name: _counted(FILTERS[name], as_text=False) for name in _LIST_FILTERS},
        _EACH_TURN: _each_turn,
        _JOINED: _joined,
        "tojson": _tojson,
        "join": _join,
        "replace": _replace,
        "indent": _indent,
        "center": _center,
        "format": _format,
        "sum": _sum,
    }


def _counted(function: Callable[..., Any], *, as_text: bool) -> Callable[..., Any]:
    # The engine marks what a filter wants as its first argument; only the mark's name is needed here.
    wanted: str = getattr(getattr(function, "jinja_pass_arg", None), "name", "nothing")

    @pass_context
    def counted(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = Meter.of(context)
        if as_text:
            meter.measure(value)
        elif isinstance(value, str):
            meter.make(len(value))
        else:
            meter.work(1 + (len(value) if hasattr(value, "__len__") else 0))
        leading: dict[str, tuple[Any, ...]] = {
            "nothing": (),
            "context": (context,),
            "eval_context": (context.eval_ctx,),
            "environment": (context.environment,),
        }
        result = function(*leading[wanted], value, *args, **kwargs)
        # Some answer with a generator, which has done nothing yet.
        return meter.each(result) if isinstance(result, Iterator) else result

    return counted


@pass_context
def _each_turn(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    return Meter.of(context).each(items)


@pass_context
def _joined(context: Context, values: list[object]) -> str:
    Meter.of(context).measure(values)
    return "".join(map(str, values))


@pass_context
def _tojson(
    context: Context,
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Spaces after the marks, other alphabets as they are, no HTML escapes: what models were trained on.
    meter = Meter.of(context)
    for width in (indent, *map(len, filter(None, (separators or ())))):
        check_width(len(width) if isinstance(width, str) else width)
    meter.measure(value)
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    meter.make(len(text))
    return text


@pass_context
def _join(context: Context, value: Iterable[Any], d: object = "", attribute: str | int | None = None) -> str:
    meter = Meter.of(context)
    if attribute is not None:
        value = FILTERS["map"](context, value, attribute=attribute)
    items = list(meter.each(value))
    meter.measure(items)
    separator = str(d)
    meter.make(len(separator) * len(items))
    return separator.join(map(str, items))


@pass_context
def _replace(context: Context, value: object, old: object, new: object, count: int | None = None) -> str:
    meter = Meter.of(context)
    meter.measure([value, old, new])
    text, before, after = str(value), str(old), str(new)
    meter.make(len(text) + text.count(before) * len(after))
    return text.replace(before, after, -1 if count is None else count)


@pass_context
def _indent(context: Context, value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    padding = width if isinstance(width, int) else len(width)
    Meter.of(context).make(len(value) + (value.count("\n") + 1) * max(0, padding))
    return str(FILTERS["indent"](value, width, first, blank))


@pass_context
def _center(context: Context, value: object, width: int = 80) -> str:
    Meter.of(context).measure(value)
    check_width(width)
    return str(value).center(width)


@pass_context
def _format(context: Context, value: object, *args: object, **kwargs: object) -> str:
    text, arguments = str(value), kwargs or args
    check_percent(Meter.of(context), text, arguments)
    return text % arguments


@pass_context
def _sum(context: Context, value: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    meter = Meter.of(context)
    if attribute is not None:
        value = FILTERS["map"](context, value, attribute=attribute)
    total = start
    for item in meter.each(value):
        check_add(meter, total, item)
        total = total + item
    return total
