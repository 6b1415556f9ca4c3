"""Media references of a request: the servicer's checks, in its order, before anything is fetched.

Pure. A reference is never quoted in a message: it may be megabytes of data, or have a password in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ...errors import BadRequest
from ...protocol.messages import MediaRefs, Modality
from .settings import MediaSettings

KINDS: Final = {
    Modality(Modality.IMAGE): "image",
    Modality(Modality.VIDEO): "video",
    Modality(Modality.AUDIO): "audio",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """One item to fetch; `scheme` in lower case."""

    kind: str
    scheme: str
    url: str = field(repr=False)


def read_references(refs: MediaRefs, *, settings: MediaSettings) -> tuple[Reference, ...]:
    """Raises BadRequest for the first thing that is wrong with them."""
    if not settings.advertised:
        raise BadRequest(
            "media_refs sent but this worker has no media processor; start it with --mm-processor (and not as a"
            " language model only)"
        )
    references = tuple(_read(index, item.modality, item.url) for index, item in enumerate(refs.items))
    if not references:
        raise BadRequest("media_refs is set but carries no items")
    for index, reference in enumerate(references):
        if reference.scheme not in settings.schemes:
            raise BadRequest(
                f"media_refs[{index}]: url scheme {reference.scheme[:16]!r} is not accepted by this worker"
                f" ({', '.join(settings.schemes)})"
            )
    return references


def _read(index: int, modality: Modality, url: str) -> Reference:
    kind = KINDS.get(modality)
    if kind is None:
        raise BadRequest(f"media_refs[{index}]: unsupported modality {int(modality)}")
    if not url:
        raise BadRequest(f"media_refs[{index}]: empty url")
    return Reference(kind=kind, scheme=scheme_of(url), url=url)


def scheme_of(url: str) -> str:
    """In lower case; empty for a path without one."""
    head, colon, _rest = url[:32].partition(":")
    return head.lower() if colon else ""


def check_limits(references: Sequence[Reference], *, settings: MediaSettings) -> None:
    """Numbers of items, and sizes as far as they can be told unseen. Raises BadRequest."""
    limits = settings.limits
    for kind, count in Counter(reference.kind for reference in references).items():
        most = limits.get(kind, 0)
        if count > most:
            raise BadRequest(f"At most {most} {kind}(s) may be provided in one prompt, got {count}.")
    for index, reference in enumerate(references):
        if reference.scheme == "data":
            size = data_bytes(reference.url)
            if size > settings.max_item_bytes:
                raise BadRequest(
                    f"media_refs[{index}]: about {size} bytes of data, the limit is {settings.max_item_bytes}"
                )


def data_bytes(url: str) -> int:
    """About how many bytes a data: URL stands for, without decoding it."""
    comma = url.find(",")
    payload = len(url) - comma - 1
    return payload * 3 // 4 if url[:comma].lower().endswith(";base64") else payload
