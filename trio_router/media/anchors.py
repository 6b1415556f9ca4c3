"""Whether the anchors in a prompt are as many as the items of its plan: what a worker fills in must all have its place.

Real workers die of too many references, and answer wrongly, without a word, when there are too few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import BadRequest
from .items import MediaPlan
from .specs import ModelSpec


def check_anchors(
    token_ids: Sequence[int], *, plan: MediaPlan, spec: ModelSpec, tokenize: Callable[[str], list[int]]
) -> None:
    """Count the anchors of each modality by token id, the modalities that the plan has none of included.

    `tokenize` gives the ids of an anchor. Raises BadRequest with both counts when they differ: when text of the client
    has an anchor in it, or the chat template renders none.
    """
    for kind, anchor in spec.anchors.items():
        wanted = plan.counts[kind]
        ids = tokenize(anchor)
        if len(ids) != 1:
            if wanted:
                raise BadRequest(
                    f"the model's tokenizer has no token for {anchor!r}, which stands for each {kind} in its prompts",
                    code="invalid_multimodal_request",
                )
            continue
        found = token_ids.count(ids[0])
        if found != wanted:
            raise BadRequest(
                f"the prompt has {found} of the token {anchor!r}, each of which stands for one {kind}, and the request"
                f" has {wanted} {kind}{'s' * (wanted != 1)}: leave it out of texts, or use a chat template that renders"
                " one for each item",
                code="multimodal_prompt_contract_mismatch",
            )
