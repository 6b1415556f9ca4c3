"""Help, as a newcomer reads it."""

from __future__ import annotations

import pytest

from trio_router.cli.commands import COMMANDS, Command
from trio_router.cli.help import command_help, overview

each_command = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)


@pytest.fixture(autouse=True, params=[40, 80, 300])
def columns(request, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(request.param))
    return request.param


def test_the_overview_names_every_command_and_where_to_begin():
    shown = overview(COMMANDS)
    for command in COMMANDS:
        assert f"  {command.name}" in shown
        assert command.summary in shown
    assert shown.endswith("First time here? Run: trio-router demo\n")


@each_command
def test_every_setting_is_explained_with_its_default(command: Command):
    words = " ".join(command_help(command).split())
    for section in command.sections:
        for row in section.rows:
            assert (row.option if row.flag else f"{row.name} =") in words
            assert " ".join(row.help.split()) in words
            assert row.alias is None or f"{row.alias} is read, too" in words
            if row.default and row.default is not True:
                default = f"{row.default:g}" if isinstance(row.default, float) else str(row.default)
                assert f"(default {default})" in words or f'(default "{default}")' in words


@each_command
def test_groups_come_with_titles_and_examples_at_the_end(command: Command):
    lines = command_help(command).splitlines()
    assert lines[0] == f"usage: trio-router {command.name} [OPTION...]"
    for section in command.sections:
        if any(row.flag for row in section.rows):
            assert f"{section.title}:" in lines
    examples = lines[lines.index("examples:") + 1 :]
    assert examples
    assert all(line.startswith(f"  trio-router {command.name}") for line in examples)


@each_command
def test_explanations_keep_to_the_terminal(command: Command, columns):
    lines = command_help(command).splitlines()
    wrapped = lines[: lines.index("examples:")]
    # A name that is longer than what is left of a line stands there whole.
    assert max(len(line) for line in wrapped if " " in line.strip()) <= max(60, min(100, columns))


def test_an_optional_word_and_a_list_are_shown_as_such():
    shown = command_help(next(command for command in COMMANDS if command.name == "serve"))
    assert "--prefill URL [BOOTSTRAP_PORT]" in shown
    assert "--worker-urls URL..." in shown
