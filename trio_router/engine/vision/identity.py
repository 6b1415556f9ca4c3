"""What a prefill worker tells of media it has processed, so that the decode worker need not: no pixels.

Pure, and free of any engine: it reads `Processed`. An identity that might be wrong is worse than none, so whatever does
not fit gives none; the decode worker then processes the media again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from ...protocol.messages import GenerateComplete, MediaIdentity, Modality, MultimodalInputs, PlaceholderRange
from .items import GRID_KEYS, Group, Processed, Tensor, write_tensor
from .references import KINDS

MODALITIES: Final[dict[str, Modality]] = {kind: modality for modality, kind in KINDS.items()}

Warn = Callable[[str], None]


def solicited_identity(
    processed: Processed, *, params: Mapping[str, object] | None, supported: bool, warn: Warn
) -> MediaIdentity | None:
    """The identity for a request's completes, if it asked for one by having KV params at all.

    `supported` is whether this worker's protocol has the field. That and the params come first: building costs
    something. Never raises: whatever goes wrong is a warning and no identity.
    """
    if params is None:
        return None
    if not supported or "media_identity" not in GenerateComplete.__dataclass_fields__:
        warn("this worker's protocol has no media_identity; the decode side will reprocess the media")
        return None
    try:
        return build_media_identity(processed, warn=warn)
    except Exception as exc:  # noqa: BLE001 - the request is served all the same; a processor may give anything
        warn(f"media identity not built ({type(exc).__name__}: {exc}); the decode side will reprocess the media")
        return None


def build_media_identity(processed: Processed, *, warn: Warn) -> MediaIdentity | None:
    """The expanded prompt, and one batch for each kind of media.

    None, with a warning, when a grid tensor is not one row for each item; None where nothing has a hash.
    """
    if not any(group.hashes for group in processed.groups):
        return None
    batches: list[MultimodalInputs] = []
    for group in processed.groups:
        stacked = _stack(group, warn=warn)
        if stacked is None:
            return None
        batches.append(_batch(group, stacked=stacked, prompt=processed.prompt))
    identity = MediaIdentity(prompt_token_ids=list(processed.prompt), extra_mm_inputs=batches[1:])
    identity.mm_inputs = batches[0]
    return identity


def _stack(group: Group, *, warn: Warn) -> dict[str, Tensor] | None:
    """The grid tensors, one row for each item."""
    stacked: dict[str, Tensor] = {}
    for key in GRID_KEYS:
        rows = [fields[key] for fields in group.fields if key in fields]
        if not rows:
            continue
        if len(rows) != len(group.hashes) or len({(row.shape, row.dtype) for row in rows}) != 1:
            warn(f"{key} is not one row for each of {len(group.hashes)} items; no media identity is returned")
            return None
        stacked[key] = Tensor(
            shape=(len(rows), *rows[0].shape),
            dtype=rows[0].dtype,
            values=tuple(value for row in rows for value in row.values),
            keep_on_cpu=any(row.keep_on_cpu for row in rows),
        )
    return stacked


def _batch(group: Group, *, stacked: Mapping[str, Tensor], prompt: list[int]) -> MultimodalInputs:
    return MultimodalInputs(
        modality=MODALITIES.get(group.kind, Modality(Modality.UNSPECIFIED)),
        mm_hashes=list(group.hashes),
        mm_placeholders=[PlaceholderRange(offset=span.offset, length=span.length) for span in group.placeholders],
        im_token_id=_embedding_token(group, prompt=prompt),
        model_specific_tensors={key: write_tensor(tensor) for key, tensor in stacked.items()},
        batched_keys=list(stacked),
        keep_on_cpu_keys=[key for key, tensor in stacked.items() if tensor.keep_on_cpu],
    )


def _embedding_token(group: Group, *, prompt: list[int]) -> int | None:
    """The token that embeddings stand at, where a span has others, too; None where that need not be said."""
    for span in group.placeholders:
        if span.is_embed is not None and span.is_mixed:
            return prompt[span.offset + span.is_embed.index(True)]
    return None
