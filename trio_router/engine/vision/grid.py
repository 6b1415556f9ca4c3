"""From sizes in pixels to grids of patches, with Qwen3-VL's numbers: how many tokens a picture or a film becomes.

Pure arithmetic. It must agree with the transformers library to the patch, or prompts would differ in length between
this worker and a real one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ...errors import BadRequest

PATCH: Final = 16
MERGE: Final = 2
TEMPORAL_PATCH: Final = 2
FACTOR: Final = PATCH * MERGE
IMAGE_PIXELS: Final = (65_536, 16_777_216)
VIDEO_PIXELS: Final = (4_096, 25_165_824)
"""Least and most pixels; of a film, over all its frames."""
LONGEST_RATIO: Final = 200


@dataclass(frozen=True, slots=True)
class Grid:
    """Patches in time, height and width, as `image_grid_thw` and `video_grid_thw` have them."""

    t: int
    h: int
    w: int

    @property
    def tokens(self) -> int:
        """Embeddings that it becomes: one for MERGE x MERGE patches."""
        return self.t * self.h * self.w // MERGE**2

    @property
    def row(self) -> tuple[int, int, int]:
        return (self.t, self.h, self.w)


def image_grid(*, width: int, height: int) -> Grid:
    """The grid of a picture. Raises BadRequest for one that cannot be resized."""
    _check_ratio(width=width, height=height)
    least, most = IMAGE_PIXELS
    h, w = max(FACTOR, _nearest(height)), max(FACTOR, _nearest(width))
    if h * w > most:
        beta = math.sqrt(height * width / most)
        h, w = (max(FACTOR, _below(side / beta)) for side in (height, width))
    elif h * w < least:
        beta = math.sqrt(least / (height * width))
        h, w = (_above(side * beta) for side in (height, width))
    return Grid(1, h // PATCH, w // PATCH)


def video_grid(*, frames: int, width: int, height: int) -> Grid:
    """The grid of a film, whose last frame is repeated to fill the last pair. Raises BadRequest as above."""
    if min(width, height) < FACTOR:
        raise BadRequest(f"a video of {width}x{height} is too small: each side must have at least {FACTOR} pixels")
    _check_ratio(width=width, height=height)
    least, most = VIDEO_PIXELS
    padded = -(-frames // TEMPORAL_PATCH) * TEMPORAL_PATCH
    h, w = _nearest(height), _nearest(width)
    if padded * h * w > most:
        beta = math.sqrt(frames * height * width / most)
        h, w = (max(FACTOR, _below(side / beta)) for side in (height, width))
    elif padded * h * w < least:
        beta = math.sqrt(least / (frames * height * width))
        h, w = (_above(side * beta) for side in (height, width))
    return Grid(padded // TEMPORAL_PATCH, h // PATCH, w // PATCH)


def _check_ratio(*, width: int, height: int) -> None:
    if min(width, height) < 1:
        raise BadRequest(f"an image of {width}x{height} has no pixels")
    if max(width, height) > LONGEST_RATIO * min(width, height):
        raise BadRequest(f"an image of {width}x{height} is too narrow: at most {LONGEST_RATIO} times as long as wide")


# Python rounds halves to even, as the library's code does.
def _nearest(side: int) -> int:
    return round(side / FACTOR) * FACTOR


def _below(side: float) -> int:
    return math.floor(side / FACTOR) * FACTOR


def _above(side: float) -> int:
    return math.ceil(side / FACTOR) * FACTOR
