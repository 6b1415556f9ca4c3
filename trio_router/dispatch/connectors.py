"""What each KV connector wants on the two legs: pure functions on KV params.

A connector is recognised by the name its prefill worker reports. This build knows the pull connector (NIXL) and
treats every other name as passthrough: nothing is asked for, and what a prefill leg returns is relayed.
"""

from __future__ import annotations

from enum import StrEnum, unique
from typing import Final

import msgspec


@unique
class Connector(StrEnum):
    """How KV blocks travel between a pair."""

    NIXL = "nixl"
    PASSTHROUGH = "passthrough"


_BY_NAME: Final = {"NixlConnector": Connector.NIXL}

# Exactly these two keys: a NIXL engine pins a prefill's blocks when asked in these words.
_NIXL_PREFILL: Final = msgspec.json.encode({"do_remote_decode": True, "do_remote_prefill": False}).decode()
_PREFILL_PARAMS: Final[dict[Connector, str | None]] = {
    Connector.NIXL: _NIXL_PREFILL,
    Connector.PASSTHROUGH: None,
}
_LEASE: Final[dict[Connector, float]] = {Connector.NIXL: 30.0, Connector.PASSTHROUGH: 30.0}


def connector_of(name: str) -> Connector:
    """The connector a worker's `kv_connector` names."""
    return _BY_NAME.get(name, Connector.PASSTHROUGH)


def prefill_params(connector: Connector) -> str | None:
    """KV params to put on the prefill leg, as JSON; None: the leg carries none and solicits nothing."""
    return _PREFILL_PARAMS[connector]


def lease_seconds(connector: Connector) -> float:
    """How long a prefill worker holds what it has handed off when nobody fetches it (vLLM's defaults)."""
    return _LEASE[connector]
