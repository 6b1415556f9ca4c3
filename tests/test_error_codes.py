"""The page of error codes against the source: neither has a code, or a status of one, that the other does not have."""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from grpclib.const import Status

import trio_router
from trio_router import errors
from trio_router.errors import RouterError, WorkerRejected
from trio_router.front.respond import HTTP_OF_GRPC

ROOT = Path(trio_router.__file__).parent
PAGE = (ROOT.parent / "docs" / "errors.md").read_text()

NOT_THE_ROUTER = {"engine", "demo", "testing"}
"""Programs of their own: the reference worker, the demo's client, tests."""
HTTP_ONLY = {"front", "text"}
"""Where nothing with a code is raised that a gRPC client could be told of."""
OF_THE_WORKER = "the worker's"

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Use(NamedTuple):
    """A class of the family that carries a code, and the package where it is given that."""

    cls: type[RouterError]
    package: str


class Row(NamedTuple):
    """A row of the page."""

    code: str
    http: str
    grpc: str


def modules() -> Iterator[tuple[ModuleType, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_generated = parts[0] == "protocol" and len(parts) > 2
        if parts[0] not in NOT_THE_ROUTER and not is_generated and parts[-1] not in ("__main__", "__init__"):
            yield importlib.import_module(".".join(("trio_router", *parts))), ast.parse(path.read_text())


def is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, RouterError)


def meanings(node: ast.expr, *, function: Function | None, module: ModuleType) -> list[object]:
    """What an expression may be: itself if it is a text; else what a name stands for in its module, or what any of the
    names stands for that its function assigns to it.
    """
    if isinstance(node, ast.Constant):
        return [node.value]
    if isinstance(node, ast.Attribute):
        return [getattr(each, node.attr, None) for each in meanings(node.value, function=function, module=module)]
    if not isinstance(node, ast.Name):
        return []
    if hasattr(module, node.id):
        found = getattr(module, node.id)
        return list(found.values()) if isinstance(found, Mapping) else [found]
    assigned = [
        each.value
        for each in ast.walk(function or ast.Module(body=[], type_ignores=[]))
        if isinstance(each, ast.Assign) and any(isinstance(to, ast.Name) and to.id == node.id for to in each.targets)
    ]
    names = [name for value in assigned for name in ast.walk(value) if isinstance(name, ast.Name)]
    return [each for name in names for each in meanings(name, function=None, module=module)]


def calls(tree: ast.AST, function: Function | None = None) -> Iterator[tuple[ast.Call, Function | None]]:
    """Every call, with the innermost function it is in."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            yield node, function
        yield from calls(node, node if isinstance(node, Function) else function)


@cache
def codes() -> dict[str, set[Use]]:
    """Every code that an error of the family may have."""
    found: dict[str, set[Use]] = defaultdict(set)
    for module, tree in modules():
        package = module.__name__.split(".")[1]
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and is_error(cls := getattr(module, node.name, None)):
                found[cls.code].add(Use(cls, package))
        for call, function in calls(tree):
            given = next((each.value for each in call.keywords if each.arg == "code"), None)
            classes = {each for each in meanings(call.func, function=function, module=module) if is_error(each)}
            if given is None or not classes:
                continue
            values = {each for each in meanings(given, function=function, module=module) if isinstance(each, str)}
            assert values, f"{module.__name__}:{call.lineno}: what code is this? Teach `meanings` to follow it"
            for value in values:
                found[value] |= {Use(cls, package) for cls in classes}
    return dict(found)


def rows() -> list[Row]:
    return [Row(*found) for found in re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|", PAGE, flags=re.MULTILINE)]


def statuses(code: str) -> tuple[set[str], set[str]]:
    """What the page must have in its two columns."""
    uses = codes()[code]
    http = {OF_THE_WORKER if issubclass(cls, WorkerRejected) else str(cls.http_status) for cls, _ in uses}
    grpc = {OF_THE_WORKER if issubclass(cls, WorkerRejected) else cls.grpc_status.name for cls, _ in uses}
    return http, {"-"} if {package for _, package in uses} <= HTTP_ONLY else grpc


def told(cell: str) -> set[str]:
    return set(re.split(r", or |, ", cell))


def test_every_code_has_one_row_and_every_row_a_code() -> None:
    assert sorted(row.code for row in rows()) == sorted(codes())


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.code)
def test_a_row_has_the_statuses_of_the_classes_that_carry_its_code(row: Row) -> None:
    assert (told(row.http), told(row.grpc)) == statuses(row.code)


def test_the_page_has_the_table_of_what_a_workers_status_is_over_http() -> None:
    table = re.findall(r"^\| (\d{3}) \| ([A-Z_, ]+) \|$", PAGE, flags=re.MULTILINE)
    shown = {Status[name]: int(http) for http, names in table for name in names.split(", ")}

    assert shown == dict(HTTP_OF_GRPC)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("BadRequest('x', code='one')", {"one"}),
        ("def f(a):\n    code = (TABLE if a else OTHER)[a]\n    raise BadRequest('x', code=code)", {"two", "three"}),
        ("raise errors.BadRequest('x', code=errors.TooLarge.code)", {"payload_too_large"}),
        ("def f(a):\n    kind = BadRequest if a else TooLarge\n    return kind('x', code='four')", {"four"}),
    ],
)
def test_codes_are_found_in_the_ways_they_are_given(source: str, expected: set[str], monkeypatch) -> None:
    module = ModuleType("trio_router.made_up")
    vars(module).update(vars(errors), TABLE={1: "two"}, OTHER={1: "three"}, errors=errors)
    monkeypatch.setattr(f"{__name__}.modules", lambda: iter([(module, ast.parse(source))]))

    assert set(codes.__wrapped__()) == expected
