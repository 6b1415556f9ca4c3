"""What docs/grpc-on-trio.md shows is run, and what it says of settings and limits is so."""

from __future__ import annotations

import dataclasses
import importlib
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from trio_router import rpc

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "grpc-on-trio.md").read_text()
# Rows of tables: the name of a setting or a constant, and its default.
ROW = re.compile(r"^\| `((?:rpc|http2|\w+Settings|\w+Limits)\.[\w.]+)` \| ([^|]+?) \|", re.MULTILINE)
LIMITS = dict(ROW.findall(PAGE))
UNITS = {"": 1, "s": 1, "KiB": 1 << 10, "MiB": 1 << 20}
SETTINGS = [getattr(rpc, name) for name in rpc.__all__ if name.endswith(("Settings", "Limits"))]


def fields_of(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


@pytest.fixture
def certificates(tmp_path, monkeypatch, authority, server_pair, client_pair):
    """The files that the page speaks of, in the working directory."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(authority.ca_file, "ca.pem")
    for name, pair in (("server", server_pair), ("client", client_pair)):
        shutil.copy(pair.cert_file, f"{name}.pem")
        shutil.copy(pair.key_file, f"{name}.key")


def test_every_block_prints_what_is_shown_below_it(monkeypatch, capsys, certificates):
    monkeypatch.syspath_prepend(ROOT / "examples")
    names: dict[str, Any] = {"__name__": "grpc_on_trio"}
    blocks = list(re.finditer(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", PAGE, flags=re.DOTALL))
    assert len(blocks) > 10
    for block in blocks:
        line = PAGE.count("\n", 0, block.start(1))
        code = "\n" * line + block[1]
        exec(compile(code, "docs/grpc-on-trio.md", "exec"), names)  # noqa: S102  # our own page
        assert capsys.readouterr().out == (block[2] or ""), f"the block at line {line + 1}"


@pytest.mark.parametrize("name", LIMITS)
def test_a_setting_or_limit_has_the_default_that_is_shown(name):
    owner, _, field = name.rpartition(".")
    if owner.startswith(("rpc.", "http2.")):
        value = getattr(importlib.import_module(f"trio_router.{owner}"), field)
    else:
        value = getattr(getattr(rpc, owner)(), field)
    shown = re.fullmatch(r"([\d.]+)(?: (s|KiB|MiB))?", LIMITS[name])
    if shown is None:
        assert LIMITS[name] == str(value).lower()
    else:
        assert float(shown[1]) * UNITS[shown[2] or ""] == value


@pytest.mark.parametrize("settings", SETTINGS)
def test_every_setting_is_shown(settings):
    plain = {name for name, value in fields_of(settings()).items() if not dataclasses.is_dataclass(value)}
    shown = {name.rpartition(".")[2] for name in LIMITS if name.startswith(f"{settings.__name__}.")}
    assert shown == plain


def test_what_the_page_links_to_exists():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
    headings = re.findall(r"^## (.*)$", PAGE, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for anchor in re.findall(r"\]\(#([^)]+)\)", PAGE):
        assert anchor in anchors, anchor
