"""The command as somebody at a terminal meets it: exit status, one line for an error, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib

import pytest

import trio_router
from trio_router.cli import main
from trio_router.cli.commands import COMMANDS

PAIR = ["--prefill", "grpc://10.0.0.1:50051", "--decode", "grpc://10.0.0.2:50051"]


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRIO_ROUTER_")}
    return subprocess.run(
        [sys.executable, "-m", "trio_router", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=clean | variables,
    )


def complaint(*arguments: str, **variables: str) -> str:
    done = run(*arguments, **variables)
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    return line.removeprefix("trio-router: ")


class TestAsking:
    @pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["help"]])
    def test_help_goes_to_stdout_and_is_no_failure(self, arguments, capsys):
        assert main(arguments) == 0
        shown = capsys.readouterr()
        assert shown.out.startswith("usage: trio-router COMMAND")
        assert shown.err == ""

    @pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
    def test_every_command_has_help_wherever_it_is_asked_for(self, command, capsys):
        assert main([command.name, "--help"]) == 0
        first = capsys.readouterr().out
        assert main([command.name, "--nonsense", "-h"]) == 0
        assert capsys.readouterr().out == first

    def test_the_version_is_the_package_s(self):
        done = run("--version")
        assert (done.returncode, done.stdout) == (0, f"trio-router {trio_router.__version__}\n")


class TestComplaints:
    def test_no_command_and_a_wrong_one_name_those_there_are(self):
        assert complaint() == ("no command given; commands: demo, serve, worker, check-config (see trio-router --help)")
        assert complaint("srve") == "no command 'srve'; did you mean serve?"

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (["serve"], "no workers: give --prefill and --decode URLs, or --worker-urls"),
            (["serve", "--prot", "1"], "unknown argument '--prot'; did you mean --port?"),
            (["serve", "--config", "/no/such.toml"], "--config /no/such.toml: No such file or directory"),
            (
                ["serve", *PAIR, "--port", "x"],
                "--port: 'x' is not a port number (0 to 65535; 0 lets the system choose)",
            ),
            (["serve", *PAIR, "--grpc-port", "30000"], "grpc_port and port are both 30000; give each its own, or 0"),
            (
                ["serve", *PAIR, "--tokenizer-path", "/no/such"],
                "tokenizer_path: /no/such is not a directory with tokenizer files",
            ),
            (["serve", *PAIR, "--on-missing-handoff", "x"], "--on-missing-handoff: 'x' is not one of recompute, fail"),
            (["serve", "--prefill", "grpc://x:1@a"], "--prefill: worker URL grpc://…@a: workers take no credentials"),
            (["serve", *PAIR, "--host", "203.0.113.1"], "port: cannot listen on 203.0.113.1:30000: "),
            (["worker", "--host", "no..name"], "port: cannot listen on no..name:50051: "),
            (["demo", "--prompt", "caf\udce9"], "--prompt: 'caf\\udce9' is not a text in UTF-8, not empty"),
            (["worker", "--role", "both"], "--role: 'both' is not one of prefill, decode, plain"),
            (["demo", "--image", "/no/such.png"], "--image: /no/such.png: No such file or directory"),
            (["demo", "--image", "ftp://x/y.png"], "--image: ftp: URLs are not taken; give a file, an http or https"),
            (["demo", "--image"], "--image: expected one argument"),
            (["demo", "--max-tokens", "0"], "--max-tokens: '0' is not a whole number of at least 1"),
        ],
    )
    def test_a_wrong_setting_is_one_line_and_status_2(self, arguments, told):
        assert complaint(*arguments).startswith(told)

    def test_a_wrong_variable_is_told_by_its_name(self):
        told = complaint("serve", *PAIR, TRIO_ROUTER_PORT="x")
        assert told.startswith("port (from TRIO_ROUTER_PORT): 'x' is not")

    def test_a_directory_without_a_tokenizer_is_a_failure_told_in_one_line(self, tmp_path):
        free = ("--port", "0", "--grpc-port", "0", "--prometheus-port", "0")
        done = run("serve", *PAIR, *free, "--tokenizer-path", str(tmp_path))
        assert done.returncode == 1
        [line] = done.stderr.splitlines()
        assert "No tokenizer files found" in line


class TestOutput:
    def test_a_terminal_that_cannot_show_a_character_gets_another(self):
        done = run("demo", "--once", "--max-tokens", "2", "--prompt", "caf\u00e9", PYTHONIOENCODING="ascii")
        assert (done.returncode, done.stderr) == (0, "")
        assert "you      caf?" in done.stdout
        assert done.stdout.isascii()

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")  # noqa: PTH110
    def test_output_that_cannot_be_written_is_a_failure_told_in_one_line(self):
        with open("/dev/full", "w") as full:  # noqa: PTH123  # a device
            done = subprocess.run(
                [sys.executable, "-m", "trio_router", "--help"],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=60,
                check=False,
            )
        assert done.returncode == 1
        assert done.stderr.splitlines() == ["trio-router: [Errno 28] No space left on device"]


class TestCheckConfig:
    def test_it_prints_a_file_that_serve_can_read_and_says_where_each_value_comes_from(self, tmp_path):
        file = tmp_path / "router.toml"
        file.write_text("[listen]\nport = 8000\nhost = '10.0.0.9'\n")
        done = run("check-config", *PAIR, "--config", str(file), "--host", "10.0.0.8", TRIO_ROUTER_LOG_LEVEL="debug")
        assert (done.returncode, done.stderr) == (0, "")
        settings = tomllib.loads(done.stdout)
        assert settings["listen"]["port"] == 8000
        assert settings["listen"]["host"] == "10.0.0.8"
        assert settings["log"]["log_level"] == "debug"
        assert settings["workers"]["prefill"] == ["grpc://10.0.0.1:50051"]
        sources = {line.split(" = ")[0]: line.rpartition("# ")[2] for line in done.stdout.splitlines() if " = " in line}
        assert sources["port"] == f"{file} [listen]"
        assert sources["host"] == "--host"
        assert sources["log_level"] == "TRIO_ROUTER_LOG_LEVEL"
        assert sources["grpc_port"] == "default"
        file.write_text(done.stdout)
        again = run("check-config", "--config", str(file))
        assert tomllib.loads(again.stdout) == settings

    def test_settings_that_cannot_work_are_refused(self, tmp_path):
        file = tmp_path / "router.toml"
        file.write_text("[listen]\nprot = 8000\n")
        told = complaint("check-config", *PAIR, "--config", str(file))
        assert told == f"{file}: unknown setting 'prot' in [listen]; did you mean port?"
        assert complaint("check-config").startswith("no workers")

    def test_a_misspelt_variable_is_noted(self):
        done = run("check-config", *PAIR, TRIO_ROUTER_GRPC_PROT="1")
        assert done.returncode == 0
        assert done.stderr == (
            "trio-router: note: the environment variable TRIO_ROUTER_GRPC_PROT is no setting;"
            " TRIO_ROUTER_GRPC_PORT is\n"
        )
