"""KV params: what a request asks of the connector, and what a finished prefill leg hands on.

Pure reading and writing of the dictionaries of the two connectors that move state. Malformed params are classified here
as real engines treat them: NIXL's are not refused, the engine dies of them; Mooncake's are ignored. Acting on that is
the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import betterproto
import msgspec

from ..errors import BadRequest
from ..protocol.messages import GenerateRequest
from .settings import Connector

KvParams = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSource:
    """Where a handoff lies: enough to release it. `request_id` is what the prefill worker's ledger has it under."""

    address: str
    engine_id: str
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """A handoff that can be pulled. `blocks` are the prefill worker's, in the order of the context."""

    address: str
    engine_id: str
    request_id: str | None
    """None when it was left out: the load then never ends."""
    blocks: tuple[int, ...]
    tp_size: int
    cached_tokens: int | None

    @property
    def source(self) -> RemoteSource | None:
        if self.request_id is None:
            return None
        return RemoteSource(address=self.address, engine_id=self.engine_id, request_id=self.request_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """State that a prefill worker will push to whoever asks for it by its transfer id."""

    address: str | None
    """Where to ask; None when the params have something there that is no address."""
    engine_id: str
    transfer_id: str

    @property
    def source(self) -> RemoteSource | None:
        if self.address is None:
            return None
        return RemoteSource(address=self.address, engine_id=self.engine_id, request_id=self.transfer_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """What a request's KV params ask the engine to do. All off for a plain request."""

    pin: bool = False
    """Keep the context's blocks for a decode worker."""
    transfer_id: str | None = None
    """Keep them under this id, to be pushed; None: return a handoff that tells where they are."""
    pull: Handoff | Transfer | None = None
    """Load the prompt's state from there before the first token."""
    fatal: str | None = None
    """Why the engine dies when it schedules this request (as vLLM 0.32 with its NIXL connector was seen to)."""
    offered: RemoteSource | None = None
    """The handoff named by the params, to be released if the request fails before its first token."""


NOTHING = Directive()


def parse_kv_params(request: GenerateRequest) -> KvParams | None:
    """The params of a request: JSON first, then the legacy pair. Raises BadRequest as the servicer does."""
    if request.kv_transfer_params_json is not None:
        try:
            params = msgspec.json.decode(request.kv_transfer_params_json)
        except msgspec.DecodeError as exc:
            raise BadRequest(f"Invalid kv_transfer_params_json: {exc}") from exc
        if not isinstance(params, dict):
            raise BadRequest("kv_transfer_params_json must be a JSON object")
        return params
    legacy = request.kv_transfer_params
    if betterproto.serialized_on_wire(legacy):
        if not legacy.remote_host or not 1 <= legacy.remote_port <= 65535:
            raise BadRequest("kv_transfer_params needs a remote_host and a remote_port from 1 to 65535")
        return {"remote_host": legacy.remote_host, "remote_port": legacy.remote_port}
    return None


def read_directive(params: Mapping[str, Any] | None, *, prompt_blocks: int, connector: Connector) -> Directive:
    """What the engine will do with these params, for a prompt that fills `prompt_blocks` blocks."""
    if not params or not connector.moves_state:
        return NOTHING
    if connector is Connector.MOONCAKE:
        return _read_mooncake(params)
    return _read_nixl(params, prompt_blocks=prompt_blocks)


def _read_mooncake(params: Mapping[str, Any]) -> Directive:
    transfer_id = params.get("transfer_id")
    pin = bool(params.get("do_remote_decode")) and isinstance(transfer_id, str) and bool(transfer_id)
    transfer = _read_transfer(params)
    return Directive(
        pin=pin,
        transfer_id=transfer_id if pin else None,
        pull=transfer,
        offered=None if transfer is None else transfer.source,
    )


def _read_transfer(params: Mapping[str, Any]) -> Transfer | None:
    """What a Mooncake decode leg asks for. None when a part is missing: the connector then does nothing at all."""
    names = [params.get(key) for key in _TRANSFER_KEYS]
    if not params.get("do_remote_prefill") or not all(isinstance(name, str) and name for name in names):
        return None
    transfer_id, engine_id, url = map(str, names)
    return Transfer(address=_bootstrap_address(url), engine_id=engine_id, transfer_id=transfer_id)


_TRANSFER_KEYS = ("transfer_id", "remote_engine_id", "remote_bootstrap_addr")


def _bootstrap_address(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    return _join(host, port) if parts.scheme == "http" else None


def _read_nixl(params: Mapping[str, Any], *, prompt_blocks: int) -> Directive:
    pin = bool(params.get("do_remote_decode"))
    if not params.get("do_remote_prefill"):
        return Directive(pin=pin)
    offered = _read_nixl_source(params)
    blocks, complaint = _read_blocks(params.get("remote_block_ids"), prompt_blocks=prompt_blocks)
    address = _read_address(params)
    engine_id = params.get("remote_engine_id")
    if complaint is None and (address is None or not isinstance(engine_id, str)):
        complaint = "remote_engine_id, remote_host or remote_port is missing"
    if complaint is not None or address is None or not isinstance(engine_id, str):
        return Directive(pin=pin, fatal=complaint, offered=offered)
    request_id, cached, tp_size = (params.get(key) for key in _OPTIONAL_KEYS)
    return Directive(
        pin=pin,
        offered=offered,
        pull=Handoff(
            address=address,
            engine_id=engine_id,
            request_id=request_id if isinstance(request_id, str) else None,
            blocks=blocks,
            tp_size=tp_size if isinstance(tp_size, int) else 1,
            cached_tokens=cached if isinstance(cached, int) else None,
        ),
    )


_OPTIONAL_KEYS = ("remote_request_id", "remote_prefill_cached_tokens", "tp_size")


def read_source(params: Mapping[str, Any] | None, *, connector: Connector) -> RemoteSource | None:
    """Whom to tell, and about what, when this handoff will not be used. None when the params do not say."""
    if not params or not connector.moves_state:
        return None
    if connector is Connector.MOONCAKE:
        transfer = _read_transfer(params)
        return None if transfer is None else transfer.source
    return _read_nixl_source(params)


def _read_nixl_source(params: Mapping[str, Any]) -> RemoteSource | None:
    if not params.get("do_remote_prefill"):
        return None
    address, engine_id, request_id = (
        _read_address(params),
        params.get("remote_engine_id"),
        params.get("remote_request_id"),
    )
    if address is None or not isinstance(engine_id, str) or not isinstance(request_id, str):
        return None
    return RemoteSource(address=address, engine_id=engine_id, request_id=request_id)


def _read_address(params: Mapping[str, Any]) -> str | None:
    return _join(params.get("remote_host"), params.get("remote_port"))


def _join(host: object, port: object) -> str | None:
    if not isinstance(host, str) or not host or not isinstance(port, int) or not 1 <= port <= 65535:
        return None
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _read_blocks(groups: object, *, prompt_blocks: int) -> tuple[tuple[int, ...], str | None]:
    """The block ids of the one cache group this engine has, or why the engine dies of them."""
    if not groups:
        return (), "remote_block_ids are missing"
    if not isinstance(groups, list) or not isinstance(groups[0], list):
        return (), "remote_block_ids are not a list of lists"
    blocks = groups[0]
    if not all(isinstance(block, int) for block in blocks):
        return (), "remote_block_ids hold something that is no number"
    if len(blocks) < prompt_blocks:
        return (), f"{len(blocks)} remote blocks cannot hold a prompt of {prompt_blocks}"
    return tuple(blocks), None


def handoff_params(
    *,
    address: str,
    engine_id: str,
    request_id: str,
    blocks: tuple[int, ...],
    num_tokens: int,
    cached_tokens: int,
    tp_size: int,
) -> KvParams:
    """What a finished prefill leg returns: every key that vLLM 0.32's NIXL connector was seen to set."""
    host, _, port = address.rpartition(":")
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(blocks)],
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": host.removeprefix("[").removesuffix("]"),
        "remote_port": int(port),
        "tp_size": tp_size,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": num_tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": cached_tokens,
    }
