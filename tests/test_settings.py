"""What the settings of a service become."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trio_router.config import SWITCH, Row, gather
from trio_router.dispatch.router import RouterSettings
from trio_router.errors import ConfigError
from trio_router.fleet.worker import WorkerRole, WorkerSpec
from trio_router.front.settings import HttpSettings, MediaSettings
from trio_router.media.mode import ProcessingMode
from trio_router.rows import SECTIONS
from trio_router.rpc.server import ServerSettings
from trio_router.settings import ListenSettings, ServiceSettings, TextSettings, service_settings

ROWS = [row for section in SECTIONS for row in section.rows]
PAIR = {"prefill": ["grpc://a:1"], "decode": ["grpc://b:2"]}
OTHER_TEXT = {
    "prefill": ["grpc://p:1"],
    "decode": ["grpc://d:1"],
    "worker_urls": ["grpc://w:1"],
    "worker_tls_ca": "/etc/ca.pem",
    "worker_tls_cert": "/etc/me.pem",
    "worker_tls_key": "/etc/me.key",
    "worker_tls_server_name": "workers.example",
    "host": "10.0.0.9",
    "prometheus_host": "10.0.0.9",
    "tokenizer_path": "/models/one",
    "chat_template": "/models/one.jinja",
    "on_missing_handoff": "fail",
    "on_empty_prefill": "decode-local",
    "handoff_fresh_fraction": "0.5",
    "log_level": "debug",
    "mm_processing": "worker",
    "mm_allowed_media_domains": ["cdn.example"],
    "mm_per_request_image_limit": "3",
}


def settings_of(**flags) -> ServiceSettings:
    return service_settings(gather(SECTIONS, flags=flags))


def test_without_settings_the_records_are_as_their_own_defaults_are():
    assert settings_of() == ServiceSettings(router=RouterSettings())


def another(row: Row) -> object:
    """A value that is right for the row and not its default."""
    if row.kind is SWITCH:
        return True
    if row.name in OTHER_TEXT:
        return OTHER_TEXT[row.name]
    return str(row.default + (0.5 if isinstance(row.default, float) else 1))


# One policy exists so far: its setting can only refuse the others.
@pytest.mark.parametrize("row", [row for row in ROWS if row.name != "policy"], ids=lambda row: row.name)
def test_no_setting_does_nothing(row):
    assert settings_of(**{row.name: another(row)}) != settings_of()


def test_the_names_of_settings_are_told_apart_whatever_their_section():
    names = [row.name for row in ROWS]
    assert sorted(set(names)) == sorted(names)


class TestWorkers:
    def test_each_flag_makes_workers_of_its_role_in_order(self):
        given = settings_of(prefill=["grpc://p:1 8998", "grpc://q:2", "grpc://r:3 none"], decode=["grpc://d:4"])
        assert given.router.workers == (
            WorkerSpec(url="grpc://p:1", role=WorkerRole.PREFILL, bootstrap_port=8998),
            WorkerSpec(url="grpc://q:2", role=WorkerRole.PREFILL),
            WorkerSpec(url="grpc://r:3", role=WorkerRole.PREFILL),
            WorkerSpec(url="grpc://d:4", role=WorkerRole.DECODE),
        )
        assert settings_of(worker_urls=["grpc://w:1"]).router.workers == (
            WorkerSpec(url="grpc://w:1", role=WorkerRole.PLAIN),
        )

    @pytest.mark.parametrize(
        ("flags", "told"),
        [
            ({"prefill": ["grpc://a:1 http"]}, "--prefill: 'grpc://a:1 http' is not URL or URL BOOTSTRAP_PORT"),
            ({"prefill": ["grpc://a:1 70000"]}, "--prefill: 'grpc://a:1 70000' is not URL or URL BOOTSTRAP_PORT"),
            ({"prefill": ["grpc://a:1 grpc://b:1"]}, "--prefill: 'grpc://a:1 grpc://b:1' is not URL or"),
            ({"prefill": ["grpc://a:1 1 2"]}, "--prefill: 'grpc://a:1 1 2' is not URL or URL BOOTSTRAP_PORT"),
            ({"decode": ["grpc://a:1 8998"]}, "--decode: 'grpc://a:1 8998' is not URL"),
            ({"decode": ["http://a:1"]}, "--decode: worker URL 'http://a:1' is not grpc://host:port"),
            ({"prefill": [" "]}, "--prefill: worker URL '' is not grpc://host:port"),
            ({"worker_urls": ["a:1"]}, "--worker-urls: worker URL 'a:1' is not grpc://host:port"),
        ],
    )
    def test_a_wrong_one_is_told_with_its_source(self, flags, told):
        with pytest.raises(ConfigError) as caught:
            settings_of(**flags)
        assert caught.value.message.startswith(told)


class TestRetries:
    def test_the_flags_count_attempts_and_milliseconds(self):
        retry = settings_of(
            retry_max_retries="3", retry_initial_backoff_ms="20", retry_max_backoff_ms="100"
        ).router.retry
        assert (retry.attempts, retry.initial_backoff, retry.max_backoff) == (3, 0.02, 0.1)

    def test_disabled_means_one_attempt_whatever_else_is_said(self):
        assert settings_of(retry_max_retries="3", disable_retries=True).router.retry.attempts == 1


class TestMedia:
    def test_by_default_workers_process_what_they_can_and_fetch_from_public_hosts(self):
        assert settings_of().front.media == MediaSettings()

    def test_the_domains_of_one_flag_may_be_several(self):
        policy = settings_of(mm_allowed_media_domains=["a.example, .b.example", "10.0.0.1"]).front.media.policy
        assert policy.allowed_domains == ("a.example", ".b.example", "10.0.0.1")

    @pytest.mark.parametrize("text", ["http://a.example", "a.example,", "*", "a.example:80"])
    def test_a_domain_that_no_host_could_equal_is_told(self, text):
        with pytest.raises(ConfigError, match=r"--mm-allowed-media-domains: '.*' is not a host, or \.domain"):
            settings_of(mm_allowed_media_domains=[text])

    @pytest.mark.parametrize(
        ("variables", "mode"),
        [
            ({"SMG_MM_PROCESSING": "worker"}, ProcessingMode.WORKER),
            ({"SMG_MM_PROCESSING": "worker", "TRIO_ROUTER_MM_PROCESSING": "router"}, ProcessingMode.ROUTER),
            ({"SMG_MM_PROCESSING": "worker", "TRIO_ROUTER_MM_PROCESSING": " "}, ProcessingMode.WORKER),
            ({"SMG_MM_PROCESSING": ""}, ProcessingMode.AUTO),
        ],
    )
    def test_variables_of_other_gateways_count_where_ours_are_not_set(self, variables, mode):
        assert service_settings(gather(SECTIONS, environ=variables)).front.media.mode is mode

    def test_a_wrong_one_is_told_by_its_name(self):
        with pytest.raises(ConfigError, match=r"mm_processing \(from SMG_MM_PROCESSING\): 'on' is not one of auto"):
            gather(SECTIONS, environ={"SMG_MM_PROCESSING": "on"})

    @pytest.mark.parametrize(("text", "limit"), [("1000", 1000), ("0", 268435456), ("many", 268435456)])
    def test_a_size_that_is_none_is_the_default_as_it_is_to_them(self, text, limit):
        for kind in ("image", "video"):
            found = gather(SECTIONS, environ={f"SMG_{kind.upper()}_MAX_INPUT_BYTES": text})
            policy = service_settings(found).front.media.policy
            assert getattr(policy, f"max_{kind}_bytes") == limit


class TestValidation:
    def test_a_pair_on_default_ports_is_fine(self):
        settings_of(**PAIR).validate()

    @pytest.mark.parametrize(
        ("flags", "told"),
        [
            ({}, "no workers"),
            ({"prefill": ["grpc://a:1"]}, "only prefill workers"),
            (PAIR | {"worker_tls_ca": "/ca.pem"}, "no worker's URL begins with grpcs://"),
            (
                PAIR | {"decode": ["grpcs://b:2"], "worker_tls_ca": "/none/ca.pem"},
                "TLS file /none/ca.pem: No such file",
            ),
            (PAIR | {"decode": ["grpcs://b:2"], "worker_tls_cert": "/x"}, "both its certificate file and its key file"),
            (PAIR | {"grpc_port": "30000"}, "grpc_port and port are both 30000"),
            (PAIR | {"prometheus_port": "30001"}, "prometheus_port and grpc_port are both 30001"),
            (
                PAIR | {"max_payload_size": "1073741825"},
                r"max_payload_size \(1.*\) is above http_max_bodies_bytes",
            ),
        ],
    )
    def test_what_cannot_work_together_is_refused(self, flags, told):
        with pytest.raises(ConfigError, match=told):
            settings_of(**flags).validate()

    def test_ports_may_be_equal_on_different_hosts_or_left_to_the_system(self):
        ListenSettings(port=0, grpc_port=0, prometheus_port=0).validate()
        ListenSettings(host="10.0.0.1", port=9, grpc_port=8, prometheus_host="127.0.0.1", prometheus_port=9).validate()

    def test_paths_must_lead_somewhere(self, tmp_path):
        good = TextSettings(tokenizer_path=tmp_path, chat_template=Path(__file__))
        good.validate()
        with pytest.raises(ConfigError, match=r"tokenizer_path: .* is not a directory"):
            replace(good, tokenizer_path=tmp_path / "none").validate()
        with pytest.raises(ConfigError, match=r"chat_template: .* is not a file"):
            replace(good, chat_template=tmp_path).validate()

    def test_a_home_directory_may_be_written_short(self):
        assert settings_of(tokenizer_path="~/model").text.tokenizer_path == Path.home() / "model"


class TestDescriptors:
    SETTINGS = settings_of(**PAIR)

    def test_every_client_and_every_worker_needs_some(self):
        more = replace(self.SETTINGS, front=replace(self.SETTINGS.front, http=HttpSettings(max_connections=4097)))
        assert more.descriptors == self.SETTINGS.descriptors + 1
        assert settings_of(**PAIR | {"decode": ["grpc://b:2", "grpc://c:3"]}).descriptors > self.SETTINGS.descriptors

    def test_a_process_that_may_have_enough_changes_nothing(self):
        assert self.SETTINGS.within(self.SETTINGS.descriptors) is self.SETTINGS

    @pytest.mark.parametrize("limit", [256, 1024, 4096])
    def test_one_that_may_not_takes_fewer_clients_of_both_kinds(self, limit):
        fitted = self.SETTINGS.within(limit)
        assert fitted.descriptors <= limit
        assert fitted.descriptors == fitted.within(limit).descriptors
        assert min(fitted.front.http.max_connections, fitted.grpc.max_connections) >= (limit - 100) // 4

    @pytest.mark.parametrize(("http", "grpc"), [(10, 5000), (5000, 10)])
    def test_what_one_kind_does_not_want_the_other_gets(self, http, grpc):
        settings = replace(
            self.SETTINGS,
            front=replace(self.SETTINGS.front, http=HttpSettings(max_connections=http)),
            grpc=ServerSettings(max_connections=grpc),
        )
        fitted = settings.within(1024)
        assert sorted([fitted.front.http.max_connections, fitted.grpc.max_connections])[0] == 10
        assert fitted.descriptors == 1024

    def test_a_hopeless_limit_still_lets_somebody_in(self):
        fitted = self.SETTINGS.within(10)
        assert fitted.front.http.max_connections >= 1
        assert fitted.grpc.max_connections >= 1
