"""The parts of a chat message: text, and media in the forms that clients of the OpenAI API write. Pure.

A part becomes an item of the media plan, and a part for a chat template. It must not know what becomes of either.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from types import MappingProxyType
from typing import Final

from ...errors import BadRequest
from ...media.items import Form, MediaItem, MediaPlan, Modality
from .schema import ChatRequest, ContentPart, MediaUrl

_URLS: Final = MappingProxyType({"image_url": Modality.IMAGE, "video_url": Modality.VIDEO, "audio_url": Modality.AUDIO})
_EMBEDDINGS: Final = MappingProxyType({"image_embeds": Modality.IMAGE, "audio_embeds": Modality.AUDIO})
_AUDIO: Final = "input_audio"
MAX_ITEMS: Final = 1024
"""Of one request: no model takes so many, and looking at a third of a million, which a body has room for, would keep
everybody waiting for a second."""
_HINTS: Final = ("max_long_side_pixel", "fps")


def part_place(message: int, part: int) -> str:
    """How clients are told of a part."""
    return f"messages[{message}].content[{part}]"


def media_plan(request: ChatRequest) -> MediaPlan:
    """All media of a conversation, in the order of its messages and their parts. Raises BadRequest for a part that is
    incomplete, or none that is known, and for more items than are looked at.
    """
    items = tuple(islice(_items(request), MAX_ITEMS + 1))
    if len(items) > MAX_ITEMS:
        raise BadRequest(
            f"{items[-1].part}: the request has more than {MAX_ITEMS} items that are not text",
            code="invalid_multimodal_request",
        )
    return MediaPlan(items)


def _items(request: ChatRequest) -> Iterator[MediaItem]:
    for at, message in enumerate(request.messages):
        if isinstance(message.content, list):
            for number, part in enumerate(message.content):
                if part.type != "text":
                    yield _item(part, where=part_place(at, number))


def template_part(part: ContentPart, *, where: str) -> dict[str, str]:
    """A part as chat templates take it: of media, they want to know the kind. Raises BadRequest as `media_plan`."""
    if part.type != "text":
        return {"type": _item(part, where=where).modality.value}
    if part.text is None:
        raise BadRequest(f"{where}.text is missing")
    return {"type": "text", "text": part.text}


def _item(part: ContentPart, *, where: str) -> MediaItem:
    place = f"{where}.{part.type}"
    if part.type in _URLS:
        return _by_url(part, getattr(part, part.type), modality=_URLS[part.type], place=place)
    if part.type in _EMBEDDINGS:
        return MediaItem(modality=_EMBEDDINGS[part.type], url="", part=place, form=Form.EMBEDDINGS)
    if part.type == _AUDIO:
        if part.input_audio is None:
            raise BadRequest(f"{place} is missing")
        return MediaItem(modality=Modality.AUDIO, url="", part=place, form=Form.INLINE)
    known = ", ".join(("text", *_URLS, _AUDIO))
    raise BadRequest(f"{where} is of type {part.type[:40]!r}; there are {known}")


def _by_url(part: ContentPart, given: str | MediaUrl | None, *, modality: Modality, place: str) -> MediaItem:
    if given is None:
        raise BadRequest(f"{place} is missing")
    holders = (part,) if isinstance(given, str) else (part, given)
    hints = tuple(hint for hint in _HINTS if any(getattr(holder, hint) is not None for holder in holders))
    url = given if isinstance(given, str) else given.url
    return MediaItem(modality=modality, url=url, part=place, hints=hints)
