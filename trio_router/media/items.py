"""The media that a request carries, in the order of their anchors in the prompt.

Values only. It must not know models, workers or policy, nor how a client writes a part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum, unique
from functools import cached_property
from typing import Final

from ..protocol.messages import MediaRef, MediaRefs
from ..protocol.messages import Modality as WireModality

_LONGEST_SCHEME: Final = 32


@unique
class Modality(StrEnum):
    """What kind of media an item is."""

    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"

    @property
    def wire(self) -> WireModality:
        """The engine protocol's value for it."""
        return WireModality.from_string(self.name)


@unique
class Form(Enum):
    """How the client gave an item."""

    # By URL; a data: URL is one, too.
    REFERENCE = "reference"
    # As bytes beside a name of their format.
    INLINE = "inline bytes"
    # As what an encoder has made of it.
    EMBEDDINGS = "embeddings"


@unique
class Obstacle(Enum):
    """Why an item cannot be left to a worker."""

    HINT = "hint"
    INLINE = "inline bytes"
    AUDIO = "audio"
    EMBEDDINGS = "embeddings"


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItem:
    """One item. `part` is where the client wrote it, as `messages[0].content[1].image_url`.

    `hints` are the names of what it asked for beyond the item itself, such as `fps`. The URL is never shown: it may be
    secret, or megabytes long.
    """

    modality: Modality
    url: str
    part: str
    hints: tuple[str, ...] = ()
    form: Form = Form.REFERENCE

    def __repr__(self) -> str:
        return f"<{self.modality} {self.scheme or '?'}: at {self.part}>"

    @property
    def scheme(self) -> str:
        """The URL's scheme in small letters; empty when it has none."""
        end = self.url.find(":", 0, _LONGEST_SCHEME)
        return self.url[:end].lower() if end > 0 else ""

    @property
    def obstacle(self) -> Obstacle | None:
        """Why no worker can process it from the wire's references, which have room for a kind and a URL only."""
        if self.form is Form.EMBEDDINGS:
            return Obstacle.EMBEDDINGS
        if self.modality is Modality.AUDIO:
            return Obstacle.AUDIO
        if self.form is Form.INLINE:
            return Obstacle.INLINE
        return Obstacle.HINT if self.hints else None


@dataclass(frozen=True)
class MediaPlan:
    """All items of a request, in message order. Empty and false for a request of text."""

    items: tuple[MediaItem, ...] = ()

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[MediaItem]:
        return iter(self.items)

    @cached_property
    def counts(self) -> Mapping[Modality, int]:
        """Items of each modality; 0 for one that is not there."""
        return Counter(item.modality for item in self.items)

    @cached_property
    def modalities(self) -> frozenset[Modality]:
        """The kinds of media there are."""
        return frozenset(self.counts)

    @cached_property
    def schemes(self) -> frozenset[str]:
        """The schemes of all references: what a worker must be able to fetch to process them."""
        return frozenset(item.scheme for item in self.items if item.form is Form.REFERENCE)

    @cached_property
    def obstacle(self) -> tuple[MediaItem, Obstacle] | None:
        """The first item that cannot be left to a worker, and why; None: the plan can be forwarded."""
        return next(((item, found) for item in self.items if (found := item.obstacle) is not None), None)

    def references(self) -> MediaRefs:
        """The plan as the engine protocol has it."""
        return MediaRefs(items=[MediaRef(modality=item.modality.wire, url=item.url) for item in self.items])
