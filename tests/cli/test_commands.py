"""What commands print."""

from __future__ import annotations

import sys

import pytest

from trio_router.cli.commands import announce, say


class Unread:
    """A standard output whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


def test_a_server_goes_on_when_nobody_reads_what_it_announces(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Unread())
    announce("listening")
    announce("ready")
    sys.stdout.flush()
    sys.stdout.close()


def test_other_commands_end_then(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Unread())
    with pytest.raises(BrokenPipeError):
        say("an answer")
