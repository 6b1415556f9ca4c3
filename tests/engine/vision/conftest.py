"""Pictures, films, an origin that counts, and fleets that see."""

from __future__ import annotations

from typing import Any

import pytest

from trio_router.engine.model import VISION, load_model
from trio_router.engine.vision.settings import MediaSettings
from trio_router.protocol.messages import GenerateRequest, MediaRefs
from trio_router.testing.origin import Origin, anchors_of, film, picture, reference

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture
def origin() -> Origin:
    return Origin(
        {"http://o/red": picture("red"), "http://o/blue": picture("blue"), "http://o/film": film("red", "blue", "lime")}
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
        references = [reference(url, kind="video" if "film" in url else "image") for url in urls]
        turn = f"<|im_start|>user\n{anchors_of(references)}{text}<|im_end|>\n<|im_start|>assistant\n"
        request = fleet.request(vision_model.tokenizer.encode(turn), kv=kv, **{"ignore_eos": True, **about})
        request.media_refs = MediaRefs(items=references)
        return request

    return make


def with_identity(request: GenerateRequest, identity: Any) -> GenerateRequest:
    """A decode leg as a router makes it."""
    request.tokenized.input_ids = list(identity.prompt_token_ids)
    request.mm_inputs = identity.mm_inputs
    request.extra_mm_inputs = list(identity.extra_mm_inputs)
    request.media_refs = MediaRefs()
    return GenerateRequest.FromString(bytes(request))
