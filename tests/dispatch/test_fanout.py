from __future__ import annotations

import pytest

from trio_router.dispatch.fanout import Coupling, pd_fanout_width

SEQUENTIAL, PARALLEL = Coupling


@pytest.mark.parametrize(
    ("coupling", "n", "preprocessed", "refs", "width"),
    [
        (PARALLEL, 3, False, False, 3),
        (PARALLEL, 2, False, False, 2),
        (PARALLEL, 1, False, False, None),
        (PARALLEL, 0, False, False, None),
        (PARALLEL, 3, True, False, None),
        (PARALLEL, 3, False, True, None),  # each pair would fetch and process them, on both of its legs
        (PARALLEL, 3, True, True, None),
        (SEQUENTIAL, 3, False, False, None),
        (SEQUENTIAL, 3, False, True, None),
        (SEQUENTIAL, 1, False, False, None),
    ],
)
def test_a_row(coupling, n, preprocessed, refs, width):
    assert pd_fanout_width(coupling, n=n, preprocessed_media=preprocessed, media_refs=refs) == width
