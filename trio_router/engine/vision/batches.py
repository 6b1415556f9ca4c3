"""Media that come processed, as a decode worker gets them: batches of a request, read as the servicer reads them.

Pure. What is inconsistent is refused only where a real worker refuses it; the rest gives a wrong text there and here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import betterproto

from ...errors import BadRequest
from ...protocol.messages import Modality, MultimodalInputs
from .items import GRID_KEYS, Group, Placeholder, ProcessingFailed, Tensor, read_tensor, row_of

PRIMARY_KEY: Final = "pixel_values"
PRIMARY_VIDEO_KEY: Final = "pixel_values_videos"


def has_pixels(batch: MultimodalInputs) -> bool:
    return betterproto.serialized_on_wire(batch.pixel_values)


def is_preprocessed(batch: MultimodalInputs) -> bool:
    """Whether a batch has pixels or tensors, and not only hashes and placeholders."""
    return has_pixels(batch) or bool(batch.model_specific_tensors)


def check_pixels(batches: Iterable[MultimodalInputs], *, has_params: bool) -> None:
    """A leg without pixels must get its KV state from elsewhere. Raises BadRequest."""
    if not has_params and any(not has_pixels(batch) for batch in batches):
        raise BadRequest(
            "multimodal payload carries grid tensors but no pixel_values and no kv_transfer_params;"
            " a pixel-less leg requires remote KV"
        )


def read_batches(batches: Sequence[MultimodalInputs], *, prompt: Sequence[int]) -> tuple[Group, ...]:
    """Batches with pixels or tensors, as groups. Raises BadRequest, or ProcessingFailed where a real worker fails."""
    taken: set[str] = set()
    groups = []
    for batch in batches:
        kind = "video" if batch.modality == Modality.VIDEO else "image"
        tensors = {key: read_tensor(key, data) for key, data in batch.model_specific_tensors.items()}
        keys = {*tensors, *({_primary_key(batch, kind=kind)} if has_pixels(batch) else ())}
        if keys & taken:
            raise BadRequest(f"two batches have a tensor {min(keys & taken)!r}: one batch per modality is expected")
        taken |= keys
        groups.append(_group(batch, kind=kind, tensors=tensors, prompt=prompt))
    return tuple(groups)


def _primary_key(batch: MultimodalInputs, *, kind: str) -> str:
    if batch.encoder_input_key:
        return batch.encoder_input_key
    return PRIMARY_VIDEO_KEY if kind == "video" else PRIMARY_KEY


def _group(batch: MultimodalInputs, *, kind: str, tensors: Mapping[str, Tensor], prompt: Sequence[int]) -> Group:
    spans = tuple(_span(span.offset, span.length, batch=batch, prompt=prompt) for span in batch.mm_placeholders)
    hashes = tuple(batch.mm_hashes)
    if not hashes and has_pixels(batch):
        # An engine that is given none makes its own.
        pixels = hashlib.sha256(batch.pixel_values.inline).hexdigest()
        hashes = tuple(f"{pixels}-{index}" for index in range(len(spans)))
    if not hashes:
        raise ProcessingFailed("multimodal inputs without mm_hashes")
    if len(hashes) != len(spans):
        raise BadRequest(f"{len(hashes)} mm_hashes for {len(spans)} mm_placeholders")
    for key, sizes in batch.flat_keys.items():
        if sizes not in tensors:
            raise ProcessingFailed(f"flat_keys: no tensor {sizes!r} with the sizes of {key!r}")
    return Group(kind=kind, hashes=hashes, placeholders=spans, fields=_rows(batch, tensors=tensors, items=len(hashes)))


def _span(offset: int, length: int, *, batch: MultimodalInputs, prompt: Sequence[int]) -> Placeholder:
    if batch.im_token_id is None:
        return Placeholder(offset=offset, length=length)
    mask = [token == batch.im_token_id for token in prompt[offset : offset + length]]
    return Placeholder(offset=offset, length=length, is_embed=None if all(mask) else tuple(mask))


def _rows(batch: MultimodalInputs, *, tensors: Mapping[str, Tensor], items: int) -> tuple[dict[str, Tensor], ...]:
    """Of each item its own rows of what positions are computed from."""
    grids = {key: tensor for key, tensor in tensors.items() if key in GRID_KEYS and key in batch.batched_keys}
    for key, tensor in grids.items():
        if not tensor.shape or tensor.shape[0] != items:
            raise BadRequest(f"{key} has the shape {list(tensor.shape)}, not a row for each of {items} items")
    return tuple({key: row_of(tensor, index) for key, tensor in grids.items()} for index in range(items))


def cache_salt(batches: Iterable[MultimodalInputs]) -> str | None:
    """What keeps a prompt apart whose batches have hashes and nothing else: made of all of them, in their order."""
    hashes = [digest for batch in batches for digest in batch.mm_hashes]
    return f"mm:{','.join(hashes)}" if hashes else None
