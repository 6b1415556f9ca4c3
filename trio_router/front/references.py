"""Media references of a GenerateRequest that a client has made itself: admitted by the same rules as those of chats.

It must not know HTTP. What it needs of a request it reads from its bytes, which go on as they came.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from ..errors import BadRequest, WorkerUnavailable
from ..media.anchors import check_anchors
from ..media.items import MediaItem, MediaPlan, Modality
from ..protocol.codec import decode
from ..protocol.messages import MediaRef, MediaRefs, TokenizedInput
from ..protocol.wire import get_bodies
from .media import MediaDesk
from .seams import Router, TextSource

_TOKENIZED: Final = (2,)
_MEDIA_REFS: Final = (10,)
_MODALITIES: Final = {int(kind.wire): kind for kind in Modality}


class ReferenceDesk:
    """Holds a request's references and anchors against the same desk that chats go by."""

    def __init__(self, router: Router, *, media: MediaDesk, texts: TextSource) -> None:
        self._router = router
        self._media = media
        self._texts = texts

    async def admit(self, message: bytes) -> None:
        """Return when a serialized GenerateRequest has no media, or what may be forwarded. Raises the error family."""
        plan = references_of(message)
        if not plan:
            return
        model = self._only_model()
        await self._media.admit(plan, model=model)
        spec = self._media.spec(model)
        if spec is not None:
            tokenizer = await self._texts.get(model)
            given = decode(TokenizedInput, b"".join(get_bodies(message, _TOKENIZED)))
            tokenize = partial(tokenizer.encode, add_special_tokens=False)
            check_anchors(given.input_ids, plan=plan, spec=spec, tokenize=tokenize)

    def _only_model(self) -> str:
        """The request has no field for one."""
        models = self._router.models()
        if not models:
            raise WorkerUnavailable("no worker is ready")
        if len(models) > 1:
            raise BadRequest(f"several models are served here: {', '.join(models)}; media need one")
        return models[0]


def references_of(message: bytes) -> MediaPlan:
    """The plan that a serialized GenerateRequest has in its references. Raises DecodeError, and BadRequest for an item
    of no known kind.
    """
    bodies = get_bodies(message, _MEDIA_REFS)
    items = decode(MediaRefs, b"".join(bodies)).items if bodies else []
    return MediaPlan(tuple(_item(ref, part=f"media_refs.items[{at}]") for at, ref in enumerate(items)))


def _item(ref: MediaRef, *, part: str) -> MediaItem:
    kind = _MODALITIES.get(int(ref.modality))
    if kind is None:
        raise BadRequest(f"{part}.modality is {int(ref.modality)}; there are 1 (image), 2 (audio) and 3 (video)")
    return MediaItem(modality=kind, url=ref.url, part=part)
