"""What media make of a request: another prompt, what the engine sees in it, and what a decode worker is to be told.

Pure: which of the servicer's branches a request takes, and what comes of each. Fetching lies between the two halves of
the branch for references and is somebody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import betterproto

from ...errors import BadRequest
from ...protocol.messages import GenerateRequest, MediaIdentity, MultimodalInputs
from .batches import cache_salt, check_pixels, has_pixels, is_preprocessed, read_batches
from .identity import solicited_identity
from .items import Processed
from .references import Reference, read_references
from .settings import MediaSettings
from .visuals import Visuals, visuals_of, visuals_of_hashes

Params = Mapping[str, object]
Warn = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """Everything media change in a request; nothing of it for a request in text."""

    prompt: list[int] | None = None
    """In place of the request's own."""
    visuals: Visuals | None = None
    cache_salt: str | None = None
    """Keeps the prompt's blocks apart in the prefix cache."""
    identity: MediaIdentity | None = None
    """For every complete of the request."""


NOTHING_SEEN = Sight()


def media_batches(request: GenerateRequest) -> list[MultimodalInputs]:
    """Preprocessed media: the one batch, if it is there at all, and every extra one."""
    first = [request.mm_inputs] if betterproto.serialized_on_wire(request.mm_inputs) else []
    return [*first, *request.extra_mm_inputs]


def has_media_refs(request: GenerateRequest) -> bool:
    return betterproto.serialized_on_wire(request.media_refs)


def is_tokenized(request: GenerateRequest) -> bool:
    return betterproto.which_one_of(request, "input")[0] == "tokenized"


def references_of(request: GenerateRequest, *, settings: MediaSettings) -> tuple[Reference, ...] | None:
    """What has to be fetched first; None for the other branches. Raises BadRequest."""
    if not has_media_refs(request):
        return None
    if not is_tokenized(request) or media_batches(request):
        raise BadRequest(
            "media_refs requires tokenized input and cannot be combined with preprocessed multimodal inputs"
        )
    return read_references(request.media_refs, settings=settings)


def sight_of_references(processed: Processed, *, params: Params | None, settings: MediaSettings, warn: Warn) -> Sight:
    """The second half of that branch."""
    return Sight(
        prompt=processed.prompt,
        visuals=visuals_of(processed.groups, prompt_length=len(processed.prompt), has_pixels=True),
        identity=solicited_identity(processed, params=params, supported=settings.identity, warn=warn),
    )


def sight_of_batches(request: GenerateRequest, *, params: Params | None, settings: MediaSettings, warn: Warn) -> Sight:
    """For a request without references. Raises BadRequest or ProcessingFailed."""
    batches = media_batches(request)
    if not batches or not is_tokenized(request):
        # Media beside a text prompt are ignored, as the servicer ignores them.
        return NOTHING_SEEN
    preprocessed = [batch for batch in batches if is_preprocessed(batch)]
    check_pixels(preprocessed, has_params=params is not None)
    if not settings.sees:
        raise BadRequest("this model takes text only; it has no use for multimodal inputs")
    if not preprocessed:
        if settings.position_grids:
            warn("media come as hashes only: positions after them will be those of a prompt in text")
            return Sight(cache_salt=cache_salt(batches))
        hashes = (digest for batch in batches for digest in batch.mm_hashes)
        return Sight(cache_salt=cache_salt(batches), visuals=visuals_of_hashes(hashes))
    if settings.language_model_only:
        raise BadRequest("this worker serves the language model only; of media it takes hashes at most")
    # Batches without tensors are left out beside others: their hashes vanish, there as here.
    prompt = request.tokenized.input_ids
    groups = read_batches(preprocessed, prompt=prompt)
    sighted = all(has_pixels(batch) for batch in preprocessed)
    return Sight(visuals=visuals_of(groups, prompt_length=len(prompt), has_pixels=sighted))
