"""What each KV connector wants on the two legs: pure functions from what is known of the prefill worker.

A connector is recognised by the name its prefill worker reports. An unknown name is passthrough: nothing is asked for,
and what a prefill leg returns is relayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, unique
from typing import Final

import msgspec

DEFAULT_BOOTSTRAP_PORT: Final = 8998
"""Where a Mooncake prefill worker's bootstrap server listens when the configuration names no port (vLLM's default)."""


@unique
class Connector(StrEnum):
    """How KV blocks travel between a pair; the values are those of the metrics' `mode` label."""

    NIXL = "nixl"
    """The decode worker pulls, with the params that the prefill worker returned."""
    MOONCAKE = "mooncake"
    """The prefill worker pushes; both legs carry a transfer id that the router minted."""
    STORE = "store"
    """Both sides use one store by the prompt's contents; the legs carry nothing."""
    PASSTHROUGH = "passthrough"
    MORIIO = "moriio"
    """Needs both legs at one time and a request id of its own form; not to be had over gRPC."""


_BY_NAME: Final = {
    "NixlConnector": Connector.NIXL,
    "MooncakeConnector": Connector.MOONCAKE,
    "MooncakeStoreConnector": Connector.STORE,
    "SharedStorageConnector": Connector.STORE,
    "MoRIIOConnector": Connector.MORIIO,
}
_STORE_PREFIXES: Final = ("FlexKV", "HF3FS")

# Exactly these keys, in these words: an engine pins a prefill's blocks when asked so.
_KEEP: Final = {"do_remote_decode": True, "do_remote_prefill": False}
_KEEP_JSON: Final = msgspec.json.encode(_KEEP).decode()


def connector_of(name: str) -> Connector:
    """The connector a worker's `kv_connector` names."""
    if name.startswith(_STORE_PREFIXES):
        return Connector.STORE
    return _BY_NAME.get(name, Connector.PASSTHROUGH)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSide:
    """What a plan depends on. `host` is the prefill worker's own, where a bootstrap server would be; `rank` is the
    data-parallel rank its leg is sent to, None where the engine chooses. `dp_size` 0 means that it is not known.
    """

    connector: Connector
    engine_id: str = ""
    dp_size: int = 0
    rank: int | None = None
    host: str = ""
    bootstrap_port: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the legs of one attempt carry.

    `asks` goes on the prefill leg as KV params. The decode leg gets one of: the prefill worker's answer as it came
    (`relays`); `minted`, which was settled before prefill began; the typed pair `address`, which hands nothing over and
    only tells an older Mooncake where its peer is; nothing.
    """

    connector: Connector
    asks: str | None = None
    relays: bool = False
    minted: str | None = None
    address: tuple[str, int] | None = None

    @property
    def wants_handoff(self) -> bool:
        """Whether a decode leg without a handoff computes its prompt a second time."""
        return self.connector is not Connector.STORE

    def handed_over(self, kv_params: str | None, *, finish_reason: str) -> str | None:
        """The params to offer a decode worker, given what the prefill leg answered; None when there are none.

        A push connector keeps the blocks only of a prefill that ended by its length: after any other ending a decode
        worker would wait for nothing.
        """
        if self.relays:
            return kv_params
        return self.minted if finish_reason == "length" else None


def plan_legs(side: PrefillSide, *, transfer_id: str) -> Plan:
    """What to put on the legs of one sample's attempt. `transfer_id` must never have been used before (I5)."""
    match side.connector:
        case Connector.NIXL:
            return Plan(connector=Connector.NIXL, asks=_KEEP_JSON, relays=True)
        case Connector.MOONCAKE:
            return _plan_mooncake(side, transfer_id=transfer_id)
        case Connector.PASSTHROUGH:
            return Plan(connector=Connector.PASSTHROUGH, relays=True)
        case Connector.STORE | Connector.MORIIO:
            return Plan(connector=side.connector)


def _plan_mooncake(side: PrefillSide, *, transfer_id: str) -> Plan:
    host = side.host
    if not host:
        return Plan(connector=Connector.MOONCAKE)  # behind a UNIX socket: no decode worker could find it
    port = side.bootstrap_port or DEFAULT_BOOTSTRAP_PORT
    engine_id = effective_engine_id(side.engine_id, dp_size=side.dp_size, rank=side.rank)
    if engine_id is None:
        return Plan(connector=Connector.MOONCAKE, address=(host, port))
    fetch = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": transfer_id,
        "remote_engine_id": engine_id,
        "remote_bootstrap_addr": f"http://{f'[{host}]' if ':' in host else host}:{port}",
    }
    return Plan(
        connector=Connector.MOONCAKE,
        asks=msgspec.json.encode({**_KEEP, "transfer_id": transfer_id}).decode(),
        minted=msgspec.json.encode(fetch).decode(),
    )


def effective_engine_id(engine_id: str, *, dp_size: int, rank: int | None) -> str | None:
    """The engine as a transfer must name it: with data parallelism each rank is an engine of its own.

    None, so that nothing is minted, where that cannot be told: no id, a size that is none, a rank that was left to the
    engine or does not exist. A guess would make a decode worker wait for an engine that has nothing for it.
    """
    if not engine_id or dp_size < 0:
        return None
    if dp_size <= 1:
        return engine_id if rank in (None, 0) else None
    return f"{engine_id}_dp{rank}" if rank is not None and 0 <= rank < dp_size else None
