"""Settings that cannot work are refused by name, when they are made."""

from __future__ import annotations

import pytest

from trio_router.engine.settings import Role, WorkerSettings
from trio_router.errors import ConfigError


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"role": "both"}, "prefill, decode, plain"),
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
    ("role", "kv_role", "connector"),
    [("prefill", "kv_producer", True), ("decode", "kv_consumer", True), ("plain", "", False)],
)
def test_a_role_may_be_given_by_its_name(role, kv_role, connector):
    settings = WorkerSettings(name="w", role=role)
    assert settings.role is Role(role)
    assert (settings.kv_role, settings.has_connector) == (kv_role, connector)
