"""KV params as a prefill worker returns them: do they hand anything over, and may an engine see them? Pure.

Invariant I6. The worker's own text is what is relayed; reading it changes nothing about it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

# What a pull is made of. Any one of them, and an engine will take the whole for a pull.
_PULL_KEYS: Final = frozenset({"do_remote_prefill", "remote_block_ids", "remote_engine_id", "remote_request_id"})
_NO_OBJECT: Final[dict[str, Any]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvParams:
    """Params that were read once. `text` is byte for byte what the worker wrote."""

    text: str
    values: dict[str, Any]
    """Empty when the text is no JSON object; `unreadable` says why then."""
    unreadable: str | None = None

    @property
    def hand_over(self) -> bool:
        """Whether they hand anything over: `{}` and an explicit `do_remote_prefill: false` do not. Unreadable ones
        might.
        """
        if self.unreadable is not None:
            return True
        return bool(self.values) and self.values.get("do_remote_prefill") is not False

    @property
    def are_modern(self) -> bool:
        """Whether they have the shape whose rules are known. Params without these keys come from older engines."""
        return "tp_size" in self.values and "transfer_mode" in self.values

    @property
    def engine_id(self) -> str:
        """The engine that holds the blocks; empty where they do not say."""
        value = self.values.get("remote_engine_id")
        return value if isinstance(value, str) else ""

    def fault(self, *, prompt_tokens: int, block_size: int = 0) -> str | None:
        """Why they must not reach an engine; None when they may.

        Real engines die of params that lack or misshape these keys. Those of a pull are known by any of its own keys,
        whatever connector is said to have made them; params of another connector are only required to be a JSON object.
        A `block_size` of 0 is not known, and then nobody can tell whether the blocks suffice.
        """
        if self.unreadable is not None:
            return self.unreadable
        if not self.values.keys() & _PULL_KEYS:
            return None
        return next(filter(None, _faults(self, prompt_tokens=prompt_tokens, block_size=block_size)), None)

    @property
    def is_flat(self) -> bool:
        """Whether they name the blocks in one flat list, as engines did that had no request id or mode to send. A list
        like that among the newer keys is a mistake, of which engines die.
        """
        blocks = self.values.get("remote_block_ids")
        return not self.are_modern and isinstance(blocks, list) and bool(blocks) and all(map(_is_count, blocks))


def read_params(text: str) -> KvParams:
    """Read params; never raises."""
    try:
        values = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as exc:
        return KvParams(text=text, values=_NO_OBJECT, unreadable=f"not JSON: {exc}")
    if not isinstance(values, dict):
        return KvParams(text=text, values=_NO_OBJECT, unreadable=f"a JSON {type(values).__name__}, not an object")
    return KvParams(text=text, values=values)


def _faults(params: KvParams, *, prompt_tokens: int, block_size: int) -> Iterator[str | None]:
    values, old = params.values, params.is_flat
    yield None if values.get("do_remote_prefill") is True else "do_remote_prefill is not true"
    for key in ("remote_request_id", "remote_engine_id", "remote_host"):
        if not (old and key == "remote_request_id" and key not in values):
            yield None if _is_text(values.get(key)) else f"{key} is missing"
    yield None if _is_port(values.get("remote_port")) else "remote_port is not a port number"
    if old:
        return
    blocks = values.get("remote_block_ids")
    yield _block_fault(blocks)
    tokens = values.get("remote_num_tokens")
    if params.are_modern or tokens is not None:
        yield _tokens_fault(tokens, prompt_tokens=prompt_tokens)
    yield _coverage_fault(blocks, tokens or prompt_tokens, block_size=block_size)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_port(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 65536


def _block_fault(blocks: object) -> str | None:
    groups = blocks if isinstance(blocks, list) else []
    if not groups or not all(isinstance(group, list) and group for group in groups):
        return "remote_block_ids is not a list of lists of block ids"
    if not all(_is_count(block) for group in groups for block in group):
        return "remote_block_ids holds something that is no block id"
    return None


def _tokens_fault(tokens: Any, *, prompt_tokens: int) -> str | None:
    if not _is_count(tokens) or tokens == 0:
        return "remote_num_tokens is not a positive number"
    if prompt_tokens and tokens > prompt_tokens:
        return f"remote_num_tokens is {tokens} for a prompt of {prompt_tokens}"
    return None


def _coverage_fault(blocks: Any, tokens: Any, *, block_size: int) -> str | None:
    # An engine that is offered too few blocks dies.
    covered = max(len(group) for group in blocks) * block_size
    return None if block_size <= 0 or covered >= tokens else f"remote_block_ids cover {covered} of {tokens} tokens"
