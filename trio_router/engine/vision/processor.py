"""A worker's media processor: references in, an expanded prompt and its media out, for so many requests at a time.

It waits for what it fetches and for threads that decode; every decision is in the pure modules beside it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import trio

from ...errors import BadRequest
from ...offload import Offload
from ..counters import Counters
from .expansion import Anchors, Measured, expand
from .fetch import Fetcher, fetch_all
from .grid import image_grid, video_grid
from .items import Processed
from .pictures import decode_item
from .references import Reference, check_limits
from .settings import MediaSettings
from .web import MediaUnavailable

DECODING_THREADS = 2


class MediaProcessor:
    """One for a worker. `process` may run any number of times at once; the settings say how many get on."""

    def __init__(
        self,
        settings: MediaSettings,
        *,
        fetcher: Fetcher,
        offload: Offload,
        counters: Counters,
        anchors: Anchors,
        encode: Callable[[str], list[int]],
    ) -> None:
        """`offload` runs decoding; `encode` makes tokens of the text that stands beside a film's frames."""
        self._settings = settings
        self._fetcher = fetcher
        self._offload = offload
        self._counters = counters
        self._anchors = anchors
        self._encode = encode
        self._slots = trio.CapacityLimiter(settings.max_inflight)

    def __repr__(self) -> str:
        return f"<MediaProcessor {self._slots.borrowed_tokens} of {self._slots.total_tokens} in use>"

    async def process(self, references: Sequence[Reference], *, prompt: Sequence[int]) -> Processed:
        """Raises BadRequest, MediaUnavailable, or ProcessingFailed."""
        if self._slots.statistics().tasks_waiting >= self._settings.max_inflight:
            raise MediaUnavailable("worker is saturated: too many multimodal requests wait already")
        async with self._slots:
            check_limits(references, settings=self._settings)
            contents = await fetch_all(references, fetcher=self._fetch)
            items: list[Measured] = []
            for index, (reference, content) in enumerate(zip(references, contents, strict=True)):
                items.append(await self._measure(index, reference.kind, content))
            grids = self._settings.position_grids
            return expand(prompt, items, anchors=self._anchors, encode=self._encode, grids=grids)

    async def _fetch(self, reference: Reference) -> bytes:
        self._counters.media_fetches += 1
        return await self._fetcher(reference)

    async def _measure(self, index: int, kind: str, content: bytes) -> Measured:
        try:
            measured = await self._offload(lambda: measure(content, kind=kind))
        except BadRequest as exc:
            raise BadRequest(f"media_refs[{index}]: {exc.message}") from exc
        self._counters.media_items_processed += 1
        return measured


def measure(content: bytes, *, kind: str) -> Measured:
    """Decode one item and lay its grid. Blocking. Raises BadRequest."""
    picture = decode_item(content, kind=kind)
    if kind == "image":
        grid = image_grid(width=picture.width, height=picture.height)
    else:
        grid = video_grid(frames=picture.frames, width=picture.width, height=picture.height)
    return Measured(kind=kind, digest=hashlib.sha256(content).hexdigest(), grid=grid)
