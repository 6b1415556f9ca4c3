"""Frames of a Generate stream as bytes.

A chunk of one token is the worker's hottest output, so its bytes are put together from parts made once per choice;
everything else goes through the codec. Pure.
"""

from __future__ import annotations

import json
from typing import Final

from ..protocol.codec import encode
from ..protocol.messages import GenerateComplete, GenerateResponse, KvTransferParams, MediaIdentity
from ..protocol.varint import write_varint, written
from .handoff import KvParams
from .sequence import Finish

# GenerateResponse.chunk and the fields of GenerateStreamChunk, as tags.
_CHUNK: Final = b"\x0a"
_TOKEN_IDS: Final = b"\x0a"
_PROMPT_TOKENS: Final = b"\x10"
_COMPLETION_TOKENS: Final = b"\x18"
_CACHED_TOKENS: Final = b"\x20"
_INDEX: Final = b"\x38"

_MAX_ID_BYTES: Final = 5


class ChoiceEncoder:
    """Makes the frames of one choice; the counts that every frame repeats are fixed when it is made."""

    __slots__ = (
        "_after_count",
        "_before_count",
        "_heads",
        "_identity",
        "_tail",
        "cached_tokens",
        "index",
        "prompt_tokens",
    )

    def __init__(
        self, *, index: int, prompt_tokens: int, cached_tokens: int, identity: MediaIdentity | None = None
    ) -> None:
        """`identity` is that of the request's media, for the complete."""
        self._identity = identity
        self.index = index
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = cached_tokens
        self._before_count = _varint_field(_PROMPT_TOKENS, prompt_tokens)
        self._after_count = _varint_field(_CACHED_TOKENS, cached_tokens) + _varint_field(_INDEX, index)
        self._tail = self._before_count + _COMPLETION_TOKENS + b"\x01" + self._after_count
        # By the length of the token's own varint; every length in here is below 128.
        self._heads = [
            _CHUNK + bytes((2 + size + len(self._tail),)) + _TOKEN_IDS + bytes((size,))
            for size in range(_MAX_ID_BYTES + 1)
        ]

    def chunk(self, token_ids: list[int]) -> bytes:
        """A GenerateResponse with a chunk of these tokens, equal to the codec's."""
        if len(token_ids) == 1:
            token = written[token_ids[0]]
            return self._heads[len(token)] + token + self._tail
        packed = b"".join([written[token_id] for token_id in token_ids])
        ids = _TOKEN_IDS + write_varint(len(packed)) + packed if packed else b""
        count = _varint_field(_COMPLETION_TOKENS, len(token_ids))
        body = ids + self._before_count + count + self._after_count
        return _CHUNK + write_varint(len(body)) + body

    def complete(self, token_ids: list[int], *, finish: Finish) -> bytes:
        """A GenerateResponse that ends the choice. `token_ids` is the last delta when streaming, else everything."""
        complete = GenerateComplete(
            output_ids=token_ids,
            finish_reason=finish.reason.value,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=len(token_ids),
            cached_tokens=self.cached_tokens,
            index=self.index,
        )
        if isinstance(finish.matched, int):
            complete.matched_token_id = finish.matched
        elif finish.matched is not None:
            complete.matched_stop_str = finish.matched
        if finish.kv_params:
            complete.kv_transfer_params_json = json.dumps(finish.kv_params)
            mirror = _legacy_mirror(finish.kv_params)
            if mirror is not None:
                complete.kv_transfer_params = mirror
        if self._identity is not None:
            complete.media_identity = self._identity
        return encode(GenerateResponse(complete=complete))


def _varint_field(tag: bytes, value: int) -> bytes:
    return tag + write_varint(value) if value else b""


def _legacy_mirror(params: KvParams) -> KvTransferParams | None:
    """The two facts the first form of the protocol knew; set beside the JSON whenever they are there."""
    host, port = params.get("remote_host"), params.get("remote_port")
    if isinstance(host, str) and host and isinstance(port, int) and 1 <= port <= 65535:
        return KvTransferParams(remote_host=host, remote_port=port)
    return None
