"""Prompts with one anchor for each item, made into prompts with as many tokens as the item has embeddings.

Pure. The layout is Qwen3-VL's: pads for a picture; for a film its frames in pairs, each with the time it is from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from .grid import TEMPORAL_PATCH, Grid
from .items import Group, Placeholder, Processed, ProcessingFailed, Tensor

SAMPLING_RATE: Final = 2.0
"""Frames of a film for each second of it, as the model is told; whatever the film's own rate."""

_GRID_NAMES: Final = {"image": "image_grid_thw", "video": "video_grid_thw"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchors:
    """Token ids from the model's configuration."""

    image: int
    video: int
    vision_start: int
    vision_end: int

    @classmethod
    def of(cls, config: Mapping[str, object]) -> Anchors:
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        image, video, start, end = (int(str(config[name])) for name in names)
        return cls(image=image, video=video, vision_start=start, vision_end=end)

    def token(self, kind: str) -> int:
        return self.image if kind == "image" else self.video


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """An item whose size is known; `digest` tells it from every other."""

    kind: str
    digest: str
    grid: Grid


def expand(
    prompt: Sequence[int],
    items: Sequence[Measured],
    *,
    anchors: Anchors,
    encode: Callable[[str], list[int]],
    grids: bool = True,
) -> Processed:
    """Put items in the place of their anchors, those of each kind in their order; `grids` says whether the model's
    positions need more of them than that.

    An anchor too many stays what it is, as with a real worker; an item too many raises ProcessingFailed.
    """
    waiting: dict[int, deque[Measured]] = {}
    for item in items:
        waiting.setdefault(anchors.token(item.kind), deque()).append(item)
    expanded: list[int] = []
    placed: dict[str, list[tuple[Measured, Placeholder]]] = {}
    for token in prompt:
        queue = waiting.get(token)
        if not queue:
            expanded.append(token)
            continue
        item = queue.popleft()
        body = _body(item, anchors=anchors, encode=encode)
        # A film's span takes in the mark of its beginning, which the template has put before the anchor.
        led = item.kind == "video" and expanded[-1:] == [anchors.vision_start]
        offset = len(expanded) - led
        expanded += body
        mask = tuple(each == token for each in expanded[offset:])
        span = Placeholder(offset=offset, length=len(mask), is_embed=None if all(mask) else mask)
        placed.setdefault(item.kind, []).append((item, span))
    left = sum(map(len, waiting.values()))
    if left:
        raise ProcessingFailed(f"{left} of {len(items)} media references have no placeholder in the prompt")
    kinds = dict.fromkeys(item.kind for item in items)
    return Processed(prompt=expanded, groups=tuple(_group(kind, placed[kind], grids=grids) for kind in kinds))


def _body(item: Measured, *, anchors: Anchors, encode: Callable[[str], list[int]]) -> list[int]:
    grid = item.grid
    if item.kind == "image" or grid.t == 1:
        return [anchors.token(item.kind)] * grid.tokens
    body: list[int] = []
    for pair in range(grid.t):
        seconds = (pair * TEMPORAL_PATCH + (TEMPORAL_PATCH - 1) / 2) / SAMPLING_RATE
        between = pair > 0
        body += [anchors.vision_end] * between
        body += encode(f"<{seconds:.1f} seconds>")
        body += [anchors.vision_start] * between
        body += [anchors.video] * (grid.tokens // grid.t)
    return body


def _group(kind: str, placed: Sequence[tuple[Measured, Placeholder]], *, grids: bool) -> Group:
    return Group(
        kind=kind,
        hashes=tuple(item.digest for item, _span in placed),
        placeholders=tuple(span for _item, span in placed),
        fields=tuple(_fields(item) if grids else {} for item, _span in placed),
    )


def _fields(item: Measured) -> dict[str, Tensor]:
    fields = {_GRID_NAMES[item.kind]: Tensor(shape=(3,), dtype="int64", values=item.grid.row, keep_on_cpu=True)}
    if item.kind == "video":
        fields["video_second_per_grid"] = Tensor(shape=(), dtype="float32", values=(TEMPORAL_PATCH / SAMPLING_RATE,))
    return fields
