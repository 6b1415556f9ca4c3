"""How settings are found, and how a wrong one is told."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_router.config import (
    COUNT,
    PORT,
    SECONDS,
    SWITCH,
    TEXT,
    Row,
    Section,
    choice,
    effective_toml,
    gather,
    misspelt_variables,
)
from trio_router.errors import ConfigError

SECTIONS = (
    Section(
        name="listen",
        title="listening",
        rows=(
            Row(name="port", kind=PORT, default=30000, help=""),
            Row(name="host", kind=TEXT, default="127.0.0.1", help=""),
            Row(name="log_json", kind=SWITCH, default=False, help=""),
        ),
    ),
    Section(
        name="requests",
        title="requests",
        rows=(
            Row(name="timeout_secs", kind=SECONDS, default=1800.0, help=""),
            Row(name="tries", kind=COUNT, default=5, help=""),
            Row(name="policy", kind=choice("fair", "greedy"), default="fair", help=""),
            Row(name="decode", kind=TEXT, many=True, default=[], help=""),
            Row(name="template", kind=TEXT, help=""),
        ),
    ),
)


def written(directory: Path, text: str) -> Path:
    path = directory / "router.toml"
    path.write_text(text)
    return path


def complaint(**layers) -> str:
    with pytest.raises(ConfigError) as caught:
        gather(SECTIONS, **layers)
    return caught.value.message


class TestLayers:
    def test_without_any_layer_every_setting_has_its_default(self):
        values = gather(SECTIONS)
        assert dict(values) == {
            "port": 30000,
            "host": "127.0.0.1",
            "log_json": False,
            "timeout_secs": 1800.0,
            "tries": 5,
            "policy": "fair",
            "decode": [],
            "template": None,
        }
        assert {values.source(name) for name in values} == {"default"}

    def test_each_layer_counts_more_than_the_one_below_and_says_so(self, tmp_path):
        file = written(tmp_path, '[listen]\nport = 1\nhost = "file"\nlog_json = true\n')
        environ = {"TRIO_ROUTER_PORT": "2", "TRIO_ROUTER_HOST": "variable"}
        values = gather(SECTIONS, file=file, environ=environ, flags={"port": "3"})
        assert [values[name] for name in ("port", "host", "log_json")] == [3, "variable", True]
        sources = [values.source(name) for name in ("port", "host", "log_json", "tries")]
        assert sources == ["--port", "TRIO_ROUTER_HOST", f"{file} [listen]", "default"]

    def test_a_list_replaces_the_list_of_the_layer_below(self, tmp_path):
        file = written(tmp_path, '[requests]\ndecode = ["a", "b"]\n')
        assert gather(SECTIONS, file=file)["decode"] == ["a", "b"]
        assert gather(SECTIONS, file=file, environ={"TRIO_ROUTER_DECODE": " c , d,"})["decode"] == ["c", "d"]
        assert gather(SECTIONS, file=file, flags={"decode": ["e"]})["decode"] == ["e"]

    def test_a_false_or_zero_of_a_higher_layer_counts(self, tmp_path):
        file = written(tmp_path, "[listen]\nlog_json = true\nport = 7\n")
        values = gather(SECTIONS, file=file, environ={"TRIO_ROUTER_LOG_JSON": "false", "TRIO_ROUTER_PORT": "0"})
        assert values["log_json"] is False
        assert values["port"] == 0

    def test_a_variable_that_is_set_to_nothing_is_not_set(self):
        assert gather(SECTIONS, environ={"TRIO_ROUTER_PORT": " "})["port"] == 30000

    def test_a_service_link_of_a_container_platform_is_no_setting(self):
        assert gather(SECTIONS, environ={"TRIO_ROUTER_PORT": "tcp://10.96.0.7:30000"})["port"] == 30000


class TestWrongValues:
    @pytest.mark.parametrize(
        ("name", "text", "expects"),
        [
            ("port", "70000", "a port number (0 to 65535; 0 lets the system choose)"),
            ("port", "-1", "a port number"),
            ("port", "http", "a port number"),
            ("tries", "0", "a whole number of at least 1"),
            ("tries", "2.5", "a whole number of at least 1"),
            ("timeout_secs", "0", "a number of seconds above 0"),
            ("timeout_secs", "nan", "a number of seconds above 0"),
            ("timeout_secs", "inf", "a number of seconds above 0"),
            ("timeout_secs", "1 hour", "a number of seconds above 0"),
            ("policy", "random", "one of fair, greedy"),
            ("log_json", "yes", "true or false"),
            ("host", "caf\udce9", "a text in UTF-8, not empty"),
        ],
    )
    def test_the_error_names_setting_source_value_and_remedy(self, name, text, expects):
        variable = f"TRIO_ROUTER_{name.upper()}"
        told = complaint(environ={variable: text})
        assert told.startswith(f"{name} (from {variable}): {text!r} is not {expects}")
        flag = "--" + name.replace("_", "-")
        assert complaint(flags={name: text}).startswith(f"{flag}: {text!r} is not {expects}")

    @pytest.mark.parametrize(
        ("table", "line", "shown"),
        [
            ("listen", 'port = "30000"', "'30000'"),
            ("listen", "port = 3.5", "3.5"),
            ("listen", "port = true", "True"),
            ("listen", "log_json = 1", "1"),
            ("listen", 'host = ""', "''"),
            ("requests", 'decode = "grpc://a:1"', "'grpc://a:1'"),
            ("requests", "decode = [1]", "[1]"),
        ],
    )
    def test_a_file_has_types_and_is_held_to_them(self, tmp_path, table, line, shown):
        file = written(tmp_path, f"[{table}]\n{line}\n")
        name = line.split()[0]
        assert complaint(file=file).startswith(f"{name} (from {file} [{table}]): {shown} is not ")

    def test_a_very_long_value_is_shown_in_part(self):
        told = complaint(environ={"TRIO_ROUTER_PORT": "9" * 10_000})
        assert len(told) < 250

    def test_a_wrong_value_under_a_right_one_is_not_looked_at(self):
        assert gather(SECTIONS, environ={"TRIO_ROUTER_PORT": "x"}, flags={"port": "5"})["port"] == 5


class TestFiles:
    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("[listen]\nprot = 1\n", "unknown setting 'prot' in [listen]; did you mean port?"),
            (
                "[requests]\ntimeout-secs = 1\n",
                "unknown setting 'timeout-secs' in [requests]; did you mean timeout_secs?",
            ),
            ("[requests]\nport = 1\n", "unknown setting 'port' in [requests]; port belongs in [listen]"),
            ("[requests]\nhosst = 1\n", "unknown setting 'hosst' in [requests]; did you mean host in [listen]?"),
            ("[listen]\nzzz = 1\n", "unknown setting 'zzz' in [listen]; [listen] has port, host, log_json"),
            ("port = 1\n", "setting 'port' belongs in the table [listen]"),
            ("[lisen]\nport = 1\n", "unknown table [lisen]; did you mean [listen]?"),
            ("[zzz]\n", "unknown table [zzz]; there are [listen], [requests]"),
            ("listen = 1\n", "listen must be a table, written [listen]"),
        ],
    )
    def test_a_key_that_is_not_known_is_refused_with_the_nearest_that_is(self, tmp_path, text, told):
        file = written(tmp_path, text)
        assert complaint(file=file) == f"{file}: {told}"

    def test_a_file_that_is_not_there_or_not_toml_is_told_with_its_path(self, tmp_path):
        assert complaint(file=tmp_path / "none.toml") == f"--config {tmp_path}/none.toml: No such file or directory"
        assert complaint(file=tmp_path) == f"--config {tmp_path}: Is a directory"
        file = written(tmp_path, "[listen\n")
        assert complaint(file=file).startswith(f"--config {file} is not TOML: ")
        file.write_bytes(b"\xff\xfe")
        assert complaint(file=file).startswith(f"--config {file} is not TOML: ")
        file.write_text(f"[listen]\nport = {'9' * 5000}\n")
        assert complaint(file=file).startswith(f"--config {file} is not TOML: ")
        file.write_text(f"a = {'[' * 5000}{']' * 5000}\n")
        assert complaint(file=file) == f"--config {file}: it is nested too deeply"


class TestEffectiveSettings:
    def test_they_are_shown_with_where_each_came_from(self):
        shown = effective_toml(SECTIONS, gather(SECTIONS, flags={"port": "5"}, environ={"TRIO_ROUTER_TRIES": "2"}))
        lines = [" ".join(line.split()) for line in shown.splitlines()]
        assert "port = 5 # --port" in lines
        assert "tries = 2 # TRIO_ROUTER_TRIES" in lines
        assert "timeout_secs = 1800 # default" in lines
        assert "# template = # default" in lines

    @given(
        host=st.text(min_size=1),
        urls=st.lists(st.text(min_size=1)),
        seconds=st.floats(min_value=1e-6, max_value=1e9, exclude_min=True),
        switch=st.booleans(),
    )
    def test_as_a_file_they_give_the_same_settings_again(self, tmp_path_factory, host, urls, seconds, switch):
        file = tmp_path_factory.mktemp("toml") / "again.toml"
        values = gather(SECTIONS, flags={"host": host, "decode": urls, "log_json": switch, "timeout_secs": seconds})
        file.write_text(effective_toml(SECTIONS, values))
        assert dict(gather(SECTIONS, file=file)) == dict(values)
        assert tomllib.loads(file.read_text())["requests"]["decode"] == urls


def test_misspelt_variables_are_found_and_strangers_left_alone():
    environ = {
        "TRIO_ROUTER_PROT": "1",
        "TRIO_ROUTER_PORT": "1",
        "TRIO_ROUTER_SERVICE_HOST": "10.0.0.1",
        "TRIO_ROUTER_PORT_30000_TCP_ADDR": "10.0.0.1",
        "HOME": "/",
    }
    assert misspelt_variables(SECTIONS, environ=environ) == {"TRIO_ROUTER_PROT": "TRIO_ROUTER_PORT"}
