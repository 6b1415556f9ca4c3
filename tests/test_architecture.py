"""The shape of the code, checked: who may import whom, what stays pure, how long things may grow."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import trio_router

ROOT = Path(trio_router.__file__).parent
NAME = "trio_router"

LEAVES = {"errors", "offload", "pieces", "scopes"}
"""May be imported by everyone and import nothing of ours."""

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "offload": set(),
    "pieces": set(),
    "scopes": set(),
    "observe": set(),
    "settings": {"config", "dispatch", "fleet", "front", "media", "observe", "policy", "rpc"},
    "rows": {"config", "dispatch", "fleet", "front", "media", "observe", "policy", "settings"},
    "config": set(),
    "protocol": set(),
    "http2": set(),
    "media": {"protocol"},
    "policy": set(),
    "text": set(),
    "rpc": {"http2", "protocol"},
    "fleet": {"media", "observe", "policy", "protocol", "rpc"},
    "dispatch": {"fleet", "media", "observe", "policy", "protocol", "rpc"},
    "front": {"dispatch", "fleet", "media", "observe", "protocol", "rpc", "text"},
    "engine": {"media", "observe", "protocol", "rpc", "text"},
    "service": {"dispatch", "fleet", "front", "media", "observe", "rpc", "settings", "text"},
    "testing": {"dispatch", "engine", "fleet", "front", "observe", "policy", "protocol", "rpc", "service", "text"},
    "demo": {"dispatch", "engine", "fleet", "front", "media", "observe", "rpc", "service", "settings", "text"},
    "cli": {
        *("config", "demo", "dispatch", "engine", "fleet", "front", "observe", "rows", "rpc", "service", "settings"),
        "text",
    },
    "__main__": {"cli"},
    "__init__": {"dispatch", "fleet", "observe", "protocol", "rpc"},
}
"""package or module at the top -> the others it may import. This table is the definition."""

PURE = ["http2", "media", "protocol", "policy", "text"]
PURE_MODULES = [
    *(
        f"dispatch/{name}.py"
        for name in (
            *("aggregate", "connectors", "fanout", "handoff", "identity", "kvparams", "legs", "retry", "timeline"),
        )
    ),
    *(f"rpc/{name}.py" for name in ("backoff", "keepalive")),
    *(
        f"engine/vision/{name}.py"
        for name in ("batches", "expansion", "grid", "identity", "items", "references", "sight", "visuals")
    ),
]
IMPURE_IMPORTS = {"trio", "socket", "time", "random", "logging", "asyncio", "threading"}

MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 60
HOT_LOOPS: dict[str, str] = {
    "http2/inbound.py:feed": "bench/http2.py",
}
"""Functions that may be longer, each with the benchmark that it is long for."""
SHIELDED_UNTIL_TOLD = {"dispatch/router.py": "its owner ends it within JanitorSettings.exit_grace of leaving"}
VAGUE_NAMES = {"utils", "helpers", "manager", "misc", "common_utils"}


def is_generated(path: Path) -> bool:
    parts = path.relative_to(ROOT).parts
    return parts[0] == "protocol" and len(parts) > 2


MODULES = sorted(path for path in ROOT.rglob("*.py") if not is_generated(path))


def top_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0].removesuffix(".py")


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Absolute names of what a module imports, wherever in it."""
    package = [NAME, *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == NAME:
                for alias in node.names:
                    yield f"{module}.{alias.name}", node.lineno
            else:
                yield module, node.lineno


def test_every_package_has_a_row():
    assert {top_of(path) for path in MODULES} <= set(ALLOWED)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_dependencies_go_one_way(path):
    me = top_of(path)
    allowed = ALLOWED[me] | LEAVES | {me}
    wrong = []
    for name, line in imports_of(path):
        parts = name.split(".")
        if parts[0] == NAME and len(parts) > 1 and parts[1] not in allowed:
            wrong.append(f"line {line}: {name}")
    assert not wrong, f"{path.relative_to(ROOT)} imports what {me!r} may not: {wrong}"


def test_the_table_has_no_circle():
    done: set[str] = set()

    def visit(package: str, path: tuple[str, ...]) -> None:
        assert package not in path, f"circle: {' -> '.join((*path, package))}"
        if package not in done:
            for other in ALLOWED[package]:
                visit(other, (*path, package))
            done.add(package)

    for package in ALLOWED:
        visit(package, ())


@pytest.mark.parametrize(
    "path",
    [p for p in MODULES if top_of(p) in PURE or str(p.relative_to(ROOT)) in PURE_MODULES],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_pure_parts_do_no_io_and_ask_no_clock(path):
    wrong = [f"line {line}: {name}" for name, line in imports_of(path) if name.split(".")[0] in IMPURE_IMPORTS]
    assert not wrong, wrong


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_and_functions_stay_short(path):
    text = path.read_text()
    relative = str(path.relative_to(ROOT))
    assert len(text.splitlines()) <= MAX_MODULE_LINES
    assert path.stem not in VAGUE_NAMES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if f"{relative}:{node.name}" not in HOT_LOOPS:
                assert length <= MAX_FUNCTION_LINES, f"{relative}:{node.name} has {length} lines"


def test_the_allowed_hot_loops_exist_and_name_their_benchmark():
    for where, bench in HOT_LOOPS.items():
        file, function = where.split(":")
        names = {n.name for n in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(n, ast.FunctionDef)}
        assert function in names
        assert (ROOT.parent / bench).exists() or not (ROOT.parent / "bench").exists()


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_module_says_what_it_is_for(path):
    if path.name == "__init__.py" and not path.read_text().strip():
        pytest.skip("an empty package file has nothing to explain")
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path.name} has no docstring"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_environment_and_flags_are_read_only_at_the_edge(path):
    if top_of(path) in {"config", "cli", "demo"}:
        return
    text = path.read_text()
    assert "os.environ" not in text
    assert "sys.argv" not in text


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_shield_has_a_deadline_and_its_reason(path):
    """Invariant I11: no bare shield anywhere."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and any(k.arg == "shield" for k in node.keywords):
            function = ast.unparse(node.func)
            has_deadline = any(k.arg == "deadline" for k in node.keywords) or function.endswith(
                ("move_on_after", "move_on_at", "fail_after", "fail_at")
            )
            assert has_deadline, f"line {node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.Assign) and any(ast.unparse(target).endswith(".shield") for target in node.targets):
            assert str(path.relative_to(ROOT)) in SHIELDED_UNTIL_TOLD, f"line {node.lineno}: {ast.unparse(node)}"
