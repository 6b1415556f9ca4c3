from __future__ import annotations

import json

import pytest

from trio_router.dispatch.connectors import Connector, connector_of, prefill_params


def test_a_nixl_prefill_is_asked_with_exactly_two_booleans():
    assert json.loads(prefill_params(Connector.NIXL)) == {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.mark.parametrize("name", ["", "LMCacheConnector", "nixlconnector", "MultiConnector"])
def test_every_other_name_is_passthrough_and_solicits_nothing(name):
    assert connector_of(name) is Connector.PASSTHROUGH
    assert prefill_params(Connector.PASSTHROUGH) is None
