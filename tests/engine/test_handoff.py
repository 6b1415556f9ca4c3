"""KV params: what is read from them, what an engine would die of, and what a prefill leg returns."""

from __future__ import annotations

import json

import pytest

from trio_router.engine.handoff import (
    NOTHING,
    RemoteSource,
    handoff_params,
    parse_kv_params,
    read_directive,
    read_source,
)
from trio_router.engine.settings import Connector
from trio_router.errors import BadRequest
from trio_router.protocol.messages import GenerateRequest, KvTransferParams

HANDED = handoff_params(
    address="10.1.2.3:5600",
    engine_id="engine",
    request_id="r-1",
    blocks=(7, 9, 8),
    num_tokens=45,
    cached_tokens=16,
    tp_size=2,
)


def test_what_a_prefill_leg_returns_is_what_a_decode_leg_pulls():
    directive = read_directive(json.loads(json.dumps(HANDED)), prompt_blocks=3, connector=Connector.NIXL)

    handoff = directive.pull
    assert (handoff.address, handoff.engine_id, handoff.request_id) == ("10.1.2.3:5600", "engine", "r-1")
    assert (handoff.blocks, handoff.tp_size, handoff.cached_tokens) == ((7, 9, 8), 2, 16)
    source = RemoteSource(address="10.1.2.3:5600", engine_id="engine", request_id="r-1")
    assert directive.offered == handoff.source == source
    assert directive.fatal is None
    assert not directive.pin


def test_the_returned_keys_are_those_seen_on_a_real_engine():
    assert set(HANDED) == {
        "do_remote_prefill",
        "do_remote_decode",
        "remote_block_ids",
        "remote_engine_id",
        "remote_request_id",
        "remote_host",
        "remote_port",
        "tp_size",
        "dcp_size",
        "pp_size",
        "remote_num_tokens",
        "remote_blocks_expiry_time",
        "transfer_mode",
        "remote_prefill_cached_tokens",
    }


def test_an_address_of_the_sixth_version_survives_the_round():
    params = handoff_params(
        address="[::1]:5600", engine_id="e", request_id="r", blocks=(1,), num_tokens=1, cached_tokens=0, tp_size=1
    )
    assert params["remote_host"] == "::1"
    assert read_directive(params, prompt_blocks=1, connector=Connector.NIXL).pull.address == "[::1]:5600"


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}, {"remote_host": "h", "remote_port": 1}])
def test_params_that_ask_for_nothing(params):
    assert read_directive(params, prompt_blocks=3, connector=Connector.NIXL) == NOTHING


def test_a_prefill_leg_asks_to_pin():
    directive = read_directive(
        {"do_remote_decode": True, "do_remote_prefill": False}, prompt_blocks=3, connector=Connector.NIXL
    )
    assert (directive.pin, directive.pull, directive.fatal) == (True, None, None)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"remote_block_ids": None}, "missing"),
        ({"remote_block_ids": []}, "missing"),
        ({"remote_block_ids": [7, 9, 8]}, "list of lists"),
        ({"remote_block_ids": [[7, 9]]}, "2 remote blocks"),
        ({"remote_block_ids": [["7", 9, 8]]}, "no number"),
        ({"remote_block_ids": "7"}, "list of lists"),
        ({"remote_engine_id": None}, "remote_engine_id"),
        ({"remote_host": ""}, "remote_host"),
        ({"remote_port": 0}, "remote_port"),
    ],
)
def test_a_malformed_handoff_is_fatal_and_says_why(change, why):
    directive = read_directive({**HANDED, **change}, prompt_blocks=3, connector=Connector.NIXL)
    assert why in directive.fatal
    assert directive.pull is None


def test_a_handoff_of_more_blocks_than_needed_or_without_a_request_id_is_taken():
    directive = read_directive({**HANDED, "remote_request_id": None}, prompt_blocks=2, connector=Connector.NIXL)
    assert directive.fatal is None
    assert directive.pull.request_id is None
    assert directive.offered is None


TRANSFER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "transfer_id": "xfer-1",
    "remote_engine_id": "engine",
    "remote_bootstrap_addr": "http://10.1.2.3:8998",
}


class TestMooncake:
    def read(self, params):
        return read_directive(params, prompt_blocks=3, connector=Connector.MOONCAKE)

    def test_a_decode_leg_asks_for_a_transfer_at_the_bootstrap_address(self):
        directive = self.read(TRANSFER)
        source = RemoteSource(address="10.1.2.3:8998", engine_id="engine", request_id="xfer-1")
        assert (directive.pull.address, directive.pull.engine_id) == ("10.1.2.3:8998", "engine")
        assert directive.pull.transfer_id == "xfer-1"
        assert directive.offered == directive.pull.source == source
        assert read_source(TRANSFER, connector=Connector.MOONCAKE) == source
        assert not directive.pin

    def test_an_address_of_the_sixth_version_keeps_its_brackets(self):
        assert self.read({**TRANSFER, "remote_bootstrap_addr": "http://[::1]:8998"}).pull.address == "[::1]:8998"

    def test_a_prefill_leg_asks_to_keep_its_blocks_under_an_id(self):
        directive = self.read({"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "xfer-1"})
        assert (directive.pin, directive.transfer_id, directive.pull) == (True, "xfer-1", None)

    @pytest.mark.parametrize("key", ["transfer_id", "remote_engine_id", "remote_bootstrap_addr", "do_remote_prefill"])
    @pytest.mark.parametrize("value", [None, "", 0, ["a"]])
    def test_anything_missing_makes_it_nothing_and_never_fatal(self, key, value):
        changed = {**TRANSFER, key: value}
        if key == "do_remote_prefill" and value:
            assert self.read(changed).pull is not None
        else:
            assert self.read(changed) == NOTHING
            assert read_source(changed, connector=Connector.MOONCAKE) is None

    @pytest.mark.parametrize(
        "url", ["10.1.2.3:8998", "http://10.1.2.3", "http://:8998", "https://h:1", "http://h:x", "x"]
    )
    def test_what_is_no_address_is_a_load_that_fails(self, url):
        directive = self.read({**TRANSFER, "remote_bootstrap_addr": url})
        assert directive.pull.address is None
        assert directive.offered is None

    @pytest.mark.parametrize("params", [HANDED, {"remote_host": "h", "remote_port": 1}, {"do_remote_decode": True}])
    def test_the_words_of_another_connector_mean_nothing(self, params):
        assert self.read(params) == NOTHING


@pytest.mark.parametrize("connector", [Connector.STORE, Connector.NONE])
@pytest.mark.parametrize("params", [HANDED, TRANSFER, {"do_remote_decode": True, "transfer_id": "x"}])
def test_without_a_connector_that_moves_state_nothing_means_anything(connector, params):
    assert read_directive(params, prompt_blocks=3, connector=connector) == NOTHING
    assert read_source(params, connector=connector) is None


class TestParsing:
    def test_json_wins_over_the_legacy_pair(self):
        request = GenerateRequest(
            kv_transfer_params_json='{"a": 1}', kv_transfer_params=KvTransferParams(remote_host="h", remote_port=1)
        )
        assert parse_kv_params(request) == {"a": 1}

    def test_the_legacy_pair_becomes_a_dictionary(self):
        request = GenerateRequest(kv_transfer_params=KvTransferParams(remote_host="h", remote_port=65535))
        assert parse_kv_params(request) == {"remote_host": "h", "remote_port": 65535}

    def test_absent_and_empty_are_told_apart(self):
        assert parse_kv_params(GenerateRequest()) is None
        assert parse_kv_params(GenerateRequest(kv_transfer_params_json="{}")) == {}

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [("", "Invalid"), ("{", "Invalid"), ("[]", "must be a JSON object"), ("null", "must be a JSON object")],
    )
    def test_anything_but_a_json_object_is_refused(self, text, complaint):
        with pytest.raises(BadRequest, match=complaint):
            parse_kv_params(GenerateRequest(kv_transfer_params_json=text))

    @pytest.mark.parametrize(("host", "port"), [("", 80), ("h", 0), ("h", 65536), ("", 0)])
    def test_half_a_legacy_pair_is_refused(self, host, port):
        request = GenerateRequest()
        request.kv_transfer_params = KvTransferParams(remote_host=host, remote_port=port)
        with pytest.raises(BadRequest, match="remote_host"):
            parse_kv_params(request)
