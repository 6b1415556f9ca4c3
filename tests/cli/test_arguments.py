"""Arguments sorted by the settings they are for."""

from __future__ import annotations

import pytest

from trio_router.cli.arguments import parse_flags
from trio_router.cli.commands import COMMANDS, Command
from trio_router.config import SWITCH
from trio_router.errors import ConfigError

BY_NAME = {command.name: command for command in COMMANDS}
SERVE = BY_NAME["serve"]


def test_values_stay_text_and_lists_keep_their_order():
    flags = parse_flags(SERVE, ["--port", "8000", "--decode", "grpc://a:1", "--log-json", "--decode=grpc://b:2"])
    assert flags == {"port": "8000", "decode": ["grpc://a:1", "grpc://b:2"], "log_json": True}


def test_a_prefill_worker_may_have_a_second_word():
    flags = parse_flags(SERVE, ["--prefill", "grpc://a:1", "8998", "--prefill", "grpc://b:2", "--decode", "grpc://c:3"])
    assert flags["prefill"] == ["grpc://a:1 8998", "grpc://b:2"]


def test_plain_workers_are_given_in_a_row_or_one_by_one():
    flags = parse_flags(SERVE, ["--worker-urls", "grpc://a:1", "grpc://b:2", "--worker-urls", "grpc://c:3"])
    assert flags["worker_urls"] == ["grpc://a:1", "grpc://b:2", "grpc://c:3"]


def test_nothing_given_is_nothing_found():
    assert parse_flags(SERVE, []) == {}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--prot 1", "unknown argument '--prot'; did you mean --port?"),
        ("--retry-max-retry=1", "unknown argument '--retry-max-retry=1'; did you mean --retry-max-retries?"),
        ("--zzz", "unknown argument '--zzz'; see trio-router serve --help"),
        ("grpc://a:1", "unknown argument 'grpc://a:1'; see trio-router serve --help"),
        ("--port", "--port: expected one argument (see trio-router serve --help)"),
        ("--prefill", "--prefill: expected at least one argument (see trio-router serve --help)"),
        ("--log-json=yes", "--log-json: ignored explicit argument 'yes' (see trio-router serve --help)"),
        # An abbreviation that is fine today would be ambiguous with tomorrow's flag.
        ("--grpc 1", "unknown argument '--grpc'; did you mean --grpc-port?"),
    ],
)
def test_what_is_no_option_is_told_with_what_was_probably_meant(arguments, told):
    with pytest.raises(ConfigError) as caught:
        parse_flags(SERVE, arguments.split())
    assert caught.value.message == told


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_row_with_a_flag_can_be_given_by_it(command: Command):
    for section in command.sections:
        for row in section.rows:
            words = [row.option] if row.kind is SWITCH else [row.option, "x"]
            if row.flag:
                assert set(parse_flags(command, words)) == {row.name}
            else:
                with pytest.raises(ConfigError, match="unknown argument"):
                    parse_flags(command, words)


def test_only_layered_commands_read_a_file():
    assert parse_flags(SERVE, ["--config", "x.toml"]) == {"config": "x.toml"}
    with pytest.raises(ConfigError, match="unknown argument '--config'"):
        parse_flags(BY_NAME["worker"], ["--config", "x.toml"])
