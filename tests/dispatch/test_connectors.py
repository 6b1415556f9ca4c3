"""What each connector's legs carry: the plan alone. Their bytes are in `test_leg_matrix.py`."""

from __future__ import annotations

import json

import pytest

from trio_router.dispatch.connectors import (
    DEFAULT_BOOTSTRAP_PORT,
    Connector,
    PrefillSide,
    connector_of,
    effective_engine_id,
    plan_legs,
)


@pytest.mark.parametrize(
    ("name", "connector"),
    [
        ("NixlConnector", Connector.NIXL),
        ("MooncakeConnector", Connector.MOONCAKE),
        ("MooncakeStoreConnector", Connector.STORE),
        ("SharedStorageConnector", Connector.STORE),
        ("FlexKVConnectorV1", Connector.STORE),
        ("HF3FSKVConnector", Connector.STORE),
        ("MoRIIOConnector", Connector.MORIIO),
        ("", Connector.PASSTHROUGH),
        ("LMCacheConnector", Connector.PASSTHROUGH),
        ("nixlconnector", Connector.PASSTHROUGH),
        ("MultiConnector", Connector.PASSTHROUGH),
    ],
)
def test_a_connector_is_known_by_its_name_and_every_other_name_is_passthrough(name, connector):
    assert connector_of(name) is connector


def test_a_nixl_prefill_is_asked_with_exactly_two_booleans_and_its_answer_is_relayed():
    plan = plan_legs(PrefillSide(connector=Connector.NIXL, engine_id="e"), transfer_id="xfer-1")
    assert json.loads(plan.asks or "") == {"do_remote_decode": True, "do_remote_prefill": False}
    for reason in ("length", "stop"):
        assert plan.handed_over('{"odd":  1e2}', finish_reason=reason) == '{"odd":  1e2}'
    assert plan.handed_over(None, finish_reason="length") is None


def test_passthrough_asks_for_nothing_and_relays_what_comes():
    plan = plan_legs(PrefillSide(connector=Connector.PASSTHROUGH), transfer_id="xfer-1")
    assert plan.asks is None
    assert plan.handed_over('{"a":1}', finish_reason="stop") == '{"a":1}'


def test_a_store_carries_nothing_and_misses_nothing():
    plan = plan_legs(PrefillSide(connector=Connector.STORE, engine_id="e"), transfer_id="xfer-1")
    assert (plan.asks, plan.minted, plan.address) == (None, None, None)
    assert plan.handed_over('{"a":1}', finish_reason="length") is None
    assert not plan.wants_handoff


class TestMooncake:
    SIDE = PrefillSide(connector=Connector.MOONCAKE, engine_id="engine", host="10.0.0.1", bootstrap_port=9000)

    def test_both_legs_carry_one_minted_transfer_id(self):
        plan = plan_legs(self.SIDE, transfer_id="xfer-1")
        assert json.loads(plan.asks or "") == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": "xfer-1",
        }
        assert json.loads(plan.minted or "") == {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": "xfer-1",
            "remote_engine_id": "engine",
            "remote_bootstrap_addr": "http://10.0.0.1:9000",
        }
        assert plan.address is None

    @pytest.mark.parametrize(("reason", "kept"), [("length", True), ("stop", False), ("repetition", False)])
    def test_only_a_prefill_that_ended_by_its_length_has_kept_anything(self, reason, kept):
        plan = plan_legs(self.SIDE, transfer_id="xfer-1")
        handed_over = plan.handed_over('{"from": "the worker"}', finish_reason=reason)
        assert handed_over == (plan.minted if kept else None)

    def test_a_port_that_is_not_configured_is_the_usual_one(self):
        side = PrefillSide(connector=Connector.MOONCAKE, engine_id="e", host="fd00::1")
        minted = json.loads(plan_legs(side, transfer_id="x").minted or "")
        assert minted["remote_bootstrap_addr"] == f"http://[fd00::1]:{DEFAULT_BOOTSTRAP_PORT}"

    @pytest.mark.parametrize("dp_size", [0, 4])
    def test_behind_a_unix_socket_there_is_no_host_to_name_and_nothing_is_carried(self, dp_size):
        """A decode worker would look for `http://:8998`, and a servicer refuses an empty host."""
        side = PrefillSide(connector=Connector.MOONCAKE, engine_id="e", dp_size=dp_size, host="")
        plan = plan_legs(side, transfer_id="xfer-1")
        assert (plan.asks, plan.minted, plan.address) == (None, None, None)
        assert plan.wants_handoff

    def test_without_an_engine_to_name_decode_gets_the_typed_address_and_no_handoff(self):
        side = PrefillSide(connector=Connector.MOONCAKE, engine_id="e", dp_size=4, host="p", bootstrap_port=9000)
        plan = plan_legs(side, transfer_id="xfer-1")
        assert (plan.asks, plan.minted, plan.address) == (None, None, ("p", 9000))
        assert plan.handed_over(None, finish_reason="length") is None
        assert plan.wants_handoff


@pytest.mark.parametrize(
    ("engine_id", "dp_size", "rank", "effective"),
    [
        ("e", 0, None, "e"),
        ("e", 1, None, "e"),
        ("e", 1, 0, "e"),
        ("e", 1, 1, None),
        ("e", 4, 0, "e_dp0"),
        ("e", 4, 3, "e_dp3"),
        ("e", 4, 4, None),
        ("e", 4, -1, None),
        ("e", 4, None, None),
        ("e", -1, 0, None),
        ("", 0, None, None),
        ("", 4, 0, None),
    ],
)
def test_the_engine_to_name_is_the_ranks_and_none_where_it_cannot_be_told(engine_id, dp_size, rank, effective):
    assert effective_engine_id(engine_id, dp_size=dp_size, rank=rank) == effective
