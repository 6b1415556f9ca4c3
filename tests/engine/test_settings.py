"""Settings that cannot work are refused by name, when they are made."""

from __future__ import annotations

import pytest

from trio_router.engine.settings import Connector, Role, WorkerSettings
from trio_router.errors import ConfigError


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"role": "both"}, "prefill, decode, plain"),
        ({"connector": "carrier pigeon"}, "nixl, mooncake, store, none"),
        ({"dp_size": 0}, "dp_size"),
        ({"block_size": 0}, "block_size"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"prefill_tokens_per_second": 0.0}, "prefill_tokens_per_second"),
        ({"lease_seconds": float("nan")}, "lease_seconds"),
        ({"inter_token_seconds": -1.0}, "inter_token_seconds"),
        ({"num_blocks": 511}, "cannot hold one context"),
    ],
)
def test_a_setting_that_cannot_work_is_named(change, names):
    with pytest.raises(ConfigError, match=names):
        WorkerSettings(name="w", **change)


@pytest.mark.parametrize(
    ("role", "kv_role", "moves_state"),
    [("prefill", "kv_producer", True), ("decode", "kv_consumer", True), ("plain", "", False)],
)
def test_a_role_may_be_given_by_its_name(role, kv_role, moves_state):
    settings = WorkerSettings(name="w", role=role)
    assert settings.role is Role(role)
    assert (settings.kv_role, settings.moves_state) == (kv_role, moves_state)


@pytest.mark.parametrize(
    ("connector", "class_name", "kv_role", "moves_state", "lease"),
    [
        ("nixl", "NixlConnector", "kv_consumer", True, 30.0),
        ("mooncake", "MooncakeConnector", "kv_consumer", True, 480.0),
        ("store", "MooncakeStoreConnector", "kv_consumer", False, 30.0),
        ("none", "", "", False, 30.0),
    ],
)
def test_a_connector_has_a_name_for_others_and_a_lease(connector, class_name, kv_role, moves_state, lease):
    settings = WorkerSettings(name="w", role="decode", connector=connector)
    assert settings.connector is Connector(connector)
    assert (settings.kv_connector.class_name, settings.kv_role) == (class_name, kv_role)
    assert (settings.moves_state, settings.lease) == (moves_state, lease)
    assert WorkerSettings(name="w", connector=connector, lease_seconds=2.0).lease == 2.0


def test_a_plain_worker_has_no_connector_whatever_it_is_given():
    settings = WorkerSettings(name="w", role="plain", connector="mooncake")
    assert settings.kv_connector is Connector.NONE
