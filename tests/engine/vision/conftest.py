"""Pictures, films, an origin that counts, and fleets that see."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio

from trio_router.engine.model import VISION, load_model
from trio_router.engine.vision.settings import MediaSettings
from trio_router.errors import BadRequest
from trio_router.protocol.messages import GenerateRequest, MediaRef, MediaRefs, Modality

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
PAD = "<|vision_start|><|image_pad|><|vision_end|>"
FILM_PAD = "<|vision_start|><|video_pad|><|vision_end|>"
SLOW = object()
_MODALITIES = {"image": Modality.IMAGE, "video": Modality.VIDEO}


def png(color: str = "red", *, size: tuple[int, int] = (64, 48)) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", size, color).save(out, format="PNG")
    return out.getvalue()


def gif(*colors: str, size: tuple[int, int] = (64, 48)) -> bytes:
    from PIL import Image

    frames = [Image.new("RGB", size, color) for color in colors]
    out = io.BytesIO()
    frames[0].save(out, format="GIF", save_all=True, append_images=frames[1:], duration=500)
    return out.getvalue()


@dataclass
class Origin:
    """A fetcher of what it holds: bytes, an error, or a function of how often it has been asked."""

    items: dict[str, Any] = field(default_factory=dict)
    hits: Counter[str] = field(default_factory=Counter)

    async def __call__(self, reference: Any) -> bytes:
        self.hits[reference.url] += 1
        item = self.items.get(reference.url, BadRequest("no such item"))
        if item is SLOW:
            await trio.sleep_forever()
        if callable(item):
            item = item(self.hits[reference.url])
        if isinstance(item, Exception):
            raise item
        return item


@pytest.fixture
def origin() -> Origin:
    pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    return Origin(
        {"http://o/red": png("red"), "http://o/blue": png("blue"), "http://o/film": gif("red", "blue", "lime")}
    )


@pytest.fixture(scope="session")
def vision_model():
    return load_model(over=VISION)


@pytest.fixture
def sees(origin: Origin):
    """Settings of a worker that sees, over others."""

    def make(media: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
        return {"media": MediaSettings(**{"processor": "inprocess", **(media or {})}), "fetcher": origin, **changes}

    return make


@pytest.fixture
def ask(vision_model):
    """Makes a request of a fleet: a prompt with one anchor for each reference, and KV params."""

    def make(fleet: Any, *urls: str, text: str = "What is it?", kv: Any = None, **about: Any) -> GenerateRequest:
        kinds = ["video" if "film" in url else "image" for url in urls]
        anchors = "".join(FILM_PAD if kind == "video" else PAD for kind in kinds)
        prompt = vision_model.tokenizer.encode(f"<|im_start|>user\n{anchors}{text}<|im_end|>\n<|im_start|>assistant\n")
        request = fleet.request(prompt, kv=kv, **{"ignore_eos": True, **about})
        request.media_refs = MediaRefs(
            items=[MediaRef(modality=_MODALITIES[kind], url=url) for kind, url in zip(kinds, urls, strict=True)]
        )
        return request

    return make


def with_identity(request: GenerateRequest, identity: Any) -> GenerateRequest:
    """A decode leg as a router makes it."""
    request.tokenized.input_ids = list(identity.prompt_token_ids)
    request.mm_inputs = identity.mm_inputs
    request.extra_mm_inputs = list(identity.extra_mm_inputs)
    request.media_refs = MediaRefs()
    return GenerateRequest.FromString(bytes(request))
