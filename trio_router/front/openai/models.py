"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from ...errors import ModelNotFound
from ..exchange import Exchange
from .endpoint import Services
from .generation import JSON_HEADERS
from .shapes import encode

OWNER = "trio-router"


async def list_models(exchange: Exchange, services: Services) -> None:
    """Tell which models are served now."""
    models = [_card(name) for name in services.router.models()]
    await exchange.respond(200, headers=JSON_HEADERS, body=encode({"object": "list", "data": models}))


async def show_model(exchange: Exchange, services: Services, *, name: str) -> None:
    """Tell about one model; raises ModelNotFound."""
    if name not in services.router.models():
        raise ModelNotFound(f"model {name!r} is not served here")
    await exchange.respond(200, headers=JSON_HEADERS, body=encode(_card(name)))


def _card(name: str) -> dict[str, Any]:
    # The API wants a date of creation, which nobody knows.
    return {"id": name, "object": "model", "created": 0, "owned_by": OWNER}
