"""Grids against what the transformers library makes of the same sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_router.engine.vision.grid import FACTOR, IMAGE_PIXELS, Grid, image_grid, video_grid
from trio_router.errors import BadRequest


class TestPictures:
    @pytest.mark.parametrize(
        ("width", "height", "row"),
        [(37, 23, (1, 14, 22)), (259, 194, (1, 14, 20)), (640, 480, (1, 30, 40)), (16384, 2048, (1, 90, 724))],
        ids=["raised to the least", "raised, near it", "as it is", "lowered to the most"],
    )
    def test_known_sizes(self, width, height, row):
        assert image_grid(width=width, height=height).row == row

    def test_halves_are_rounded_to_even(self):
        assert image_grid(width=32 * 20 + 16, height=32 * 20 + 16).row == (1, 40, 40)
        assert image_grid(width=32 * 21 + 16, height=32 * 21 + 16).row == (1, 44, 44)

    def test_tokens_are_patches_by_four(self):
        assert image_grid(width=640, height=480).tokens == 30 * 40 // 4

    @pytest.mark.parametrize(("width", "height", "complaint"), [(0, 5, "no pixels"), (1, 201, "narrow")])
    def test_what_cannot_be_resized_is_refused(self, width, height, complaint):
        with pytest.raises(BadRequest, match=complaint):
            image_grid(width=width, height=height)

    @given(st.integers(1, 9000), st.integers(1, 9000))
    def test_every_grid_is_whole_blocks_within_the_bounds(self, width, height):
        if max(width, height) > 200 * min(width, height):
            return
        grid = image_grid(width=width, height=height)
        assert grid.h % 2 == grid.w % 2 == 0
        assert min(grid.h, grid.w) >= FACTOR // 16
        assert grid.tokens <= IMAGE_PIXELS[1] // FACTOR**2 or min(grid.h, grid.w) == 2


class TestFilms:
    def test_known_size(self):
        assert video_grid(frames=3, width=37, height=35) == Grid(2, 2, 2)

    def test_one_frame_fills_a_pair(self):
        assert video_grid(frames=1, width=64, height=64).t == 1

    def test_the_bound_is_on_all_frames_together(self):
        assert video_grid(frames=2, width=1024, height=1024).row == (1, 64, 64)
        assert video_grid(frames=200, width=1024, height=1024).row == (100, 22, 22)

    def test_what_is_smaller_than_a_block_is_refused(self):
        with pytest.raises(BadRequest, match="too small"):
            video_grid(frames=2, width=31, height=64)
