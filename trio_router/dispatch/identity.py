"""Whether a decode leg may go by what the prefill worker has made of the media, and the fields it gets then. Pure.

A media identity stands in for the references only where everything that a decode worker would otherwise compute comes
with the handoff (invariant I7). In every other case the leg keeps its references, and the worker processes the media
again: slower, and right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum, unique
from itertools import pairwise
from math import prod
from typing import Final

import betterproto

from ..errors import BadRequest
from ..protocol.codec import decode
from ..protocol.messages import MediaIdentity, MediaRefs, MultimodalInputs, TensorData
from ..protocol.varint import write_varint
from ..protocol.wire import field_bytes, get_bodies

# Field numbers of GenerateRequest, and of GenerateResponse.complete.media_identity inside its complete.
INPUT_IDS: Final = (2, 2)
MM_INPUTS: Final = (7,)
MEDIA_REFS: Final = (10,)
EXTRA_MM_INPUTS: Final = (11,)
_IDENTITY: Final = (2, 15)

GRIDS: Final = frozenset({"image_grid_thw", "video_grid_thw", "second_per_grid_ts", "video_second_per_grid"})
"""The tensors that positions are computed from: all that a leg without pixels may carry."""
_WIDTHS: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int64": 8, "uint32": 4}
_CONTINUED: Final = bytes(range(0x80, 0x100))
"""Bytes of a varint that are not its last."""
MAX_HASH_CHARS: Final = 256
MAX_ROW_VALUES: Final = 16
"""Values of a grid for one item; three are usual. It bounds what a worker can make a leg carry."""

Edits = Mapping[tuple[int, ...], bytes | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaView:
    """The references of a request: how many of each modality (the wire's numbers), and the schemes of their URLs."""

    counts: Mapping[int, int]
    schemes: frozenset[str]


def read_media(message: bytes) -> MediaView | None:
    """The references in a request's bytes; None when it has none at all. Raises DecodeError, BadRequest."""
    bodies = get_bodies(message, MEDIA_REFS)
    if not bodies:
        return None
    items = decode(MediaRefs, b"".join(bodies)).items
    if not items:
        raise BadRequest("media_refs carries no items: name what is to be fetched, or leave the field out")
    return MediaView(
        counts=Counter(int(item.modality) for item in items),
        schemes=frozenset(item.url.partition(":")[0].lower() if ":" in item.url[:16] else "" for item in items),
    )


def count_ids(message: bytes) -> int:
    """How many prompt ids a request has; those that are not packed, as nobody writes them, are not counted."""
    # A varint has one byte below 0x80, its last.
    return sum(len(ids.translate(None, delete=_CONTINUED)) for ids in get_bodies(message, INPUT_IDS))


@unique
class IdentityOutcome(StrEnum):
    """What became of the media of a decode leg; the values are a metric's labels."""

    APPLIED = "applied"
    """The identity stands in for the references."""
    SEVERAL_SAMPLES = "several_samples"
    NO_HANDOFF = "no_handoff"
    NOT_SOLICITED = "not_solicited"
    """None came, and the prefill leg had not asked for one: it carried no KV params."""
    MISSING = "missing"
    INVALID = "invalid"


def judge(
    *, n: int, handed_over: bool, solicited: bool, identity: MediaIdentity | None, fault: str | None
) -> IdentityOutcome:
    """What a decode leg that has references does, as a table: the first row that fits counts.

    `solicited` tells whether the prefill leg carried KV params, which is what makes a worker give an identity; `fault`
    is that of the identity, if there is one.
    """
    rows = (
        (n > 1, IdentityOutcome.SEVERAL_SAMPLES),
        (identity is None and solicited, IdentityOutcome.MISSING),
        (identity is None, IdentityOutcome.NOT_SOLICITED),
        (not handed_over, IdentityOutcome.NO_HANDOFF),
        (fault is not None, IdentityOutcome.INVALID),
    )
    return next((outcome for holds, outcome in rows if holds), IdentityOutcome.APPLIED)


def fault_of(identity: MediaIdentity, *, media: MediaView, context_length: int) -> str | None:
    """Why an identity must not be applied; None when it may. A `context_length` of 0 is not known.

    Workers accept several wrong ones without a word, and answer about other pictures, or with nonsense.
    """
    return next(filter(None, _faults(identity, media=media, context_length=context_length)), None)


def _unless(holds: bool, complaint: str) -> str | None:
    return None if holds else complaint


def _faults(identity: MediaIdentity, *, media: MediaView, context_length: int) -> Iterator[str | None]:
    ids, batches = identity.prompt_token_ids, batches_of(identity)
    yield _unless(bool(ids), "it has no prompt ids")
    fits = not context_length or len(ids) <= context_length
    yield _unless(fits, f"its {len(ids)} prompt ids are over the context of {context_length}")
    counts, asked = {int(batch.modality): len(batch.mm_hashes) for batch in batches}, dict(media.counts)
    yield _unless(len(counts) == len(batches), "it has two batches of one modality")
    yield _unless(counts == asked, f"it is of {counts} items by modality, and the request of {asked}")
    for batch in batches:
        yield from _batch_faults(batch, ids=ids)
    # Of such a mixture a worker takes only the batches with tensors; the others' hashes and placeholders vanish.
    with_grids = {bool(batch.model_specific_tensors) for batch in batches}
    yield _unless(len(with_grids) < 2, "some of its batches have grids and some have none")
    spans = sorted((place.offset, place.offset + place.length) for batch in batches for place in batch.mm_placeholders)
    yield _unless(_apart(spans), "its placeholders overlap")


def batches_of(identity: MediaIdentity) -> list[MultimodalInputs]:
    """Its batches, one for each modality, the first one first."""
    first = [identity.mm_inputs] if betterproto.serialized_on_wire(identity.mm_inputs) else []
    return [*first, *identity.extra_mm_inputs]


def _batch_faults(batch: MultimodalInputs, *, ids: list[int]) -> Iterator[str | None]:
    hashes, places = batch.mm_hashes, batch.mm_placeholders
    yield _unless(all(0 < len(each) <= MAX_HASH_CHARS for each in hashes), "a hash is empty or very long")
    yield _unless(len(places) == len(hashes), f"it has {len(places)} placeholders for {len(hashes)} hashes")
    inside = all(place.length and place.offset + place.length <= len(ids) for place in places)
    yield _unless(inside, "a placeholder is not inside its prompt")
    yield _unless(
        _apart([(place.offset, place.offset + place.length) for place in places]), "its placeholders are not in order"
    )
    yield _unless(not betterproto.serialized_on_wire(batch.pixel_values), "it carries pixels")
    token = batch.im_token_id
    known = token is None or all(token in ids[place.offset : place.offset + place.length] for place in places)
    yield _unless(known, "its im_token_id is missing in a placeholder")
    tensors = batch.model_specific_tensors
    for name, tensor in tensors.items():
        yield _tensor_fault(name, tensor, items=len(hashes))
    # Laid out otherwise, a grid would be one tensor for all items, and each of them be taken for the first.
    yield _unless(not batch.flat_keys and {*batch.batched_keys} >= tensors.keys(), "a grid is not laid out by items")
    stray = {*batch.batched_keys, *batch.keep_on_cpu_keys} - tensors.keys()
    yield _unless(not stray, f"it describes tensors that it does not have ({', '.join(sorted(stray))[:64]})")


def _tensor_fault(name: str, tensor: TensorData, *, items: int) -> str | None:
    if name not in GRIDS:
        return f"it carries the tensor {name[:64]!r}, which is no grid"
    shape, values = tensor.shape, prod(tensor.shape)
    if not shape or shape[0] != items or values > items * MAX_ROW_VALUES:
        return f"{name} of shape {shape[:8]} has not one row for each of {items} items"
    kind, payload = betterproto.which_one_of(tensor, "payload")
    data: bytes = payload if kind == "inline" and payload is not None else b""
    if kind != "inline" or tensor.dtype not in _WIDTHS or len(data) != values * _WIDTHS[tensor.dtype]:
        return f"{name} has not the bytes of {values} values of type {tensor.dtype[:16]!r}"
    return None


def _apart(spans: list[tuple[int, int]]) -> bool:
    return all(end <= after for (_, end), (after, _) in pairwise(spans))


def identity_edits(complete: bytes, identity: MediaIdentity) -> Edits:
    """The fields of a decode leg that goes by the identity in this `complete` frame: ids and batches are spliced in as
    the worker wrote them, also the parts that this build has never heard of.
    """
    ids = b"".join(get_bodies(complete, (*_IDENTITY, 1)))
    if len(ids.translate(None, delete=_CONTINUED)) != len(identity.prompt_token_ids):
        # Some were not packed, and have no body.
        ids = b"".join(write_varint(token) for token in identity.prompt_token_ids)
    first = b"".join(get_bodies(complete, (*_IDENTITY, 2)))
    extra = b"".join(field_bytes(11, body) for body in get_bodies(complete, (*_IDENTITY, 3)))
    return {
        INPUT_IDS: field_bytes(2, ids),
        MM_INPUTS: field_bytes(7, first) if first else None,
        EXTRA_MM_INPUTS: extra or None,
        MEDIA_REFS: None,
    }
