"""What fuzzers have found, and a short search for more by hypothesis (`python -m tests.fuzz` is the long one)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .targets import CORPUS, TARGETS

FOUND = [(path.parent.name, path) for path in sorted(CORPUS.rglob("*")) if path.is_file()]


@pytest.mark.parametrize(("target", "path"), FOUND, ids=[f"{target}-{path.name}" for target, path in FOUND])
def test_what_was_found_once_is_harmless(target, path):
    TARGETS[target](path.read_bytes())


@pytest.mark.parametrize("target", sorted(TARGETS))
@given(data=st.binary(max_size=400))
def test_any_bytes_are_harmless(target, data):
    TARGETS[target](data)


def test_the_corpus_is_read():
    assert FOUND
    assert {target for target, _ in FOUND} <= set(TARGETS)
