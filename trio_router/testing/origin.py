"""Media for tests: pictures and films made on the spot, and a fetcher that has them and counts who asks.

It takes the place of a worker's fetcher (`open_worker`, `open_cluster`), so that no test needs a web server.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import trio

from ..errors import BadRequest
from ..protocol.messages import MediaRef, Modality

IMAGE_ANCHOR: Final = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO_ANCHOR: Final = "<|vision_start|><|video_pad|><|vision_end|>"

Item = bytes | Exception | Callable[[int], bytes] | None


class Asked(Protocol):
    """What a fetcher is asked for."""

    @property
    def url(self) -> str: ...


@dataclass(slots=True)
class Origin:
    """A fetcher of what it holds by URL: bytes; an error to raise; a function of how often the item has been asked for
    by now; or None for one that never comes. What it does not hold is the asker's mistake.
    """

    items: dict[str, Item] = field(default_factory=dict)
    hits: Counter[str] = field(default_factory=Counter)

    async def __call__(self, reference: Asked) -> bytes:
        self.hits[reference.url] += 1
        item = self.items.get(reference.url, BadRequest("the origin answered with 404"))
        if item is None:
            await trio.sleep_forever()
        if isinstance(item, Exception):
            raise item
        return item(self.hits[reference.url]) if callable(item) else item


def picture(color: str = "red", *, size: tuple[int, int] = (64, 48)) -> bytes:
    """A PNG of one color."""
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", size, color).save(out, format="PNG")
    return out.getvalue()


def film(*colors: str, size: tuple[int, int] = (64, 48)) -> bytes:
    """A GIF with a frame for each color."""
    from PIL import Image

    frames = [Image.new("RGB", size, color) for color in colors]
    out = io.BytesIO()
    frames[0].save(out, format="GIF", save_all=True, append_images=frames[1:], duration=500)
    return out.getvalue()


def reference(url: str, *, kind: str = "image") -> MediaRef:
    """A reference to an image or a video."""
    return MediaRef(modality=Modality(Modality.VIDEO if kind == "video" else Modality.IMAGE), url=url)


def anchors_of(references: Sequence[MediaRef]) -> str:
    """What the chat template of the packaged model writes for them, in their order."""
    return "".join(VIDEO_ANCHOR if each.modality == Modality.VIDEO else IMAGE_ANCHOR for each in references)
