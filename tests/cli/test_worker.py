"""Options of a reference worker, as its engine gets them."""

from __future__ import annotations

import pytest

from trio_router.cli.worker import WORKER_SECTIONS, worker_settings
from trio_router.config import gather
from trio_router.engine.settings import Connector, Role
from trio_router.errors import ConfigError


def settings_of(**flags):
    return worker_settings(gather(WORKER_SECTIONS, flags=flags)).worker


def test_a_worker_pulls_and_is_one_rank_unless_it_is_told_otherwise():
    settings = settings_of(role="prefill")
    assert (settings.role, settings.connector, settings.dp_size) == (Role.PREFILL, Connector.NIXL, 1)
    assert settings.lease == 30.0


def test_connector_and_ranks_are_chosen_by_flags():
    settings = settings_of(role="decode", connector="mooncake", dp_size="4")
    assert (settings.connector, settings.dp_size, settings.lease) == (Connector.MOONCAKE, 4, 480.0)
    assert settings_of(role="decode", connector="mooncake", lease_secs="2").lease == 2.0


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [({"connector": "smoke"}, "one of nixl, mooncake, store, none"), ({"dp_size": "0"}, "at least 1")],
)
def test_what_is_none_of_them_is_refused_by_name(flags, complaint):
    with pytest.raises(ConfigError, match=complaint):
        settings_of(**flags)
