"""The bytes of each leg, cut from the client's own message: listed fields are replaced, every other byte is kept.

Editing in place instead of decoding and re-encoding keeps fields this build has never heard of, and the client's
own spelling of those it has (public routers have changed prompts by re-serialising them).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..errors import BadRequest
from ..pieces import Message
from ..protocol.varint import read_varint
from ..protocol.wire import field_bytes, field_varint, get_bodies, get_string, get_varint, splice
from .identity import EXTRA_MM_INPUTS, INPUT_IDS, MEDIA_REFS, MM_INPUTS, Edits, MediaView, count_ids, read_media

# Field numbers of GenerateRequest and of SamplingParams inside it.
REQUEST_ID: Final = (1,)
ORIGINAL_TEXT: Final = (2, 1)
STREAM: Final = (5,)
KV_PARAMS_TYPED: Final = (6,)
KV_PARAMS_JSON: Final = (8,)
RANK: Final = (9,)
_SAMPLING: Final = 4
MAX_TOKENS: Final = (_SAMPLING, 8)
MIN_TOKENS: Final = (_SAMPLING, 9)
STOP: Final = (_SAMPLING, 10)
STOP_TOKEN_IDS: Final = (_SAMPLING, 11)
IGNORE_EOS: Final = (_SAMPLING, 14)
N: Final = (_SAMPLING, 15)
PROMPT_LOGPROBS: Final = (_SAMPLING, 23)
# Of MultimodalInputs.
_PIXELS: Final = (2,)
_TENSORS: Final = (3,)


@dataclass(slots=True, kw_only=True)
class RequestView:
    """The few fields of a request that dispatch decides by, and its bytes. Nothing of it changes, but that the bytes
    are let go when no leg can be cut from them any more: with pictures in them they are many.
    """

    message: bytes
    client_id: str
    n: int
    rank: int | None = None
    """The data-parallel rank that the client asks for."""
    media: MediaView | None = None
    """What is to be fetched for it."""
    prompt_tokens: int = 0
    """Ids in its prompt, with one for each item of media. 0 for a text, which only a worker can count."""

    def forget_message(self) -> None:
        """No attempt will follow, and nothing is left to release."""
        self.message = b""


def parse_request(message: bytes, *, disaggregated: bool) -> RequestView:
    """Read what dispatch needs. Raises DecodeError for bytes that are no message, BadRequest for what no pair can
    serve.
    """
    view = RequestView(
        message=message,
        client_id=get_string(message, REQUEST_ID) or "",
        n=choices(message),
        rank=get_varint(message, RANK),
        media=read_media(message),
        prompt_tokens=count_ids(message),
    )
    if disaggregated:
        _check_pair(message)
    return view


def _check_pair(message: bytes) -> None:
    if get_varint(message, PROMPT_LOGPROBS) is not None:
        raise BadRequest("prompt_logprobs is not available behind a prefill/decode pair: leave it out")
    if get_varint(message, MAX_TOKENS) == 0:
        # The prefill leg, which is always for one token, would be computed before a decode worker refuses it.
        raise BadRequest("max_tokens is 0, and a request must generate at least 1 token: raise it, or leave it out")
    first = get_bodies(message, MM_INPUTS)
    if any(map(_lacks_pixels, [b"".join(first), *get_bodies(message, EXTRA_MM_INPUTS)])):
        # A worker refuses these by themselves, but not on a leg with KV params, which it takes for a decode leg: its
        # engine then has nothing to look at, and dies (seen on vLLM 0.32). Each attempt would be another worker's end.
        raise BadRequest(
            "mm_inputs have tensors without pixel_values, which a prefill worker needs: send both",
            code="invalid_multimodal_request",
        )


def _lacks_pixels(batch: bytes) -> bool:
    return bool(get_bodies(batch, _TENSORS)) and not get_bodies(batch, _PIXELS)


def client_streams(message: bytes) -> bool:
    """Whether the client wants delta frames as they come."""
    return bool(get_varint(message, STREAM))


def choices(message: bytes) -> int:
    """How many samples the client wants."""
    return get_varint(message, N) or 1


def prefill_leg(view: RequestView, *, attempt_id: str, kv_params: str | None, rank: int | None = None) -> Message:
    """The prefill leg: one token, no stop condition, no stream.

    A push connector keeps the prefill's blocks only when the request ended by its length cap, and a pull connector
    hands nothing over from an aborted one; any stop string, stop id, minimum or end-of-sequence token could end it
    otherwise. Everything else of the sampling parameters stays, since the first token is sampled with them. `rank` pins
    the leg to a data-parallel rank; None leaves the client's own choice.
    """
    return splice(
        view.message,
        {
            REQUEST_ID: field_bytes(1, attempt_id.encode()),
            STREAM: None,
            KV_PARAMS_TYPED: None,
            KV_PARAMS_JSON: None if kv_params is None else field_bytes(8, kv_params.encode()),
            MAX_TOKENS: field_varint(8, 1),
            MIN_TOKENS: None,
            STOP: None,
            STOP_TOKEN_IDS: None,
            IGNORE_EOS: field_varint(14, 1),
            N: field_varint(15, 1),
            **_pinned(rank),
        },
    )


def decode_leg(
    view: RequestView,
    *,
    attempt_id: str,
    kv_params: str | None,
    address: tuple[str, int] | None = None,
    rank: int | None = None,
    media: Edits | None = None,
) -> Message:
    """The decode leg: the client's request with the handoff on it. Always streamed, so that a first frame exists
    (I4). `address` is the typed host and port of an older push connector; `rank` as for the prefill leg. `media` are
    the fields of a media identity that stand in for the references.
    """
    return splice(
        view.message,
        {
            REQUEST_ID: field_bytes(1, attempt_id.encode()),
            STREAM: field_varint(5, 1),
            KV_PARAMS_TYPED: None if address is None else field_bytes(6, _typed(*address)),
            KV_PARAMS_JSON: None if kv_params is None else field_bytes(8, kv_params.encode()),
            **_pinned(rank),
            **(media or {}),
        },
    )


def plain_leg(view: RequestView, *, attempt_id: str, rank: int | None = None) -> Message:
    """The only leg of a request that a plain worker serves whole. It has no KV of anybody's to be told of."""
    return splice(
        view.message,
        {REQUEST_ID: field_bytes(1, attempt_id.encode()), STREAM: field_varint(5, 1), **_pinned(rank)},
    )


def _pinned(rank: int | None) -> dict[tuple[int, ...], bytes | None]:
    return {} if rank is None else {RANK: field_varint(9, rank)}


def _typed(host: str, port: int) -> bytes:
    return field_bytes(1, host.encode()) + field_varint(2, port)


def release_leg(view: RequestView, *, attempt_id: str, kv_params: str) -> Message:
    """A decode leg made to be refused before admission (`max_tokens` 0), which tells the prefill worker to let go."""
    return splice(
        view.message,
        {
            REQUEST_ID: field_bytes(1, attempt_id.encode()),
            STREAM: field_varint(5, 1),
            KV_PARAMS_TYPED: None,
            KV_PARAMS_JSON: field_bytes(8, kv_params.encode()),
            MAX_TOKENS: field_varint(8, 0),
            # It is refused for its length before its prompt is looked at (vLLM 0.32: 15 of 15 were released by a leg of
            # one id, as fast as by the whole prompt), and so it passes where the whole was too large.
            **_shortened(view.message),
            # Media would be fetched before the refusal.
            MEDIA_REFS: None,
            MM_INPUTS: None,
            EXTRA_MM_INPUTS: None,
        },
    )


def _shortened(message: bytes) -> dict[tuple[int, ...], bytes | None]:
    ids = b"".join(get_bodies(message, INPUT_IDS))
    if not ids:
        return {}  # a text
    _, end = read_varint(ids, 0)
    return {INPUT_IDS: field_bytes(2, ids[:end]), ORIGINAL_TEXT: None}
