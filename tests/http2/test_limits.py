"""How much nonsense is too much."""

from __future__ import annotations

import pytest

from trio_router.errors import ProtocolViolation
from trio_router.http2 import limits
from trio_router.http2.frames import ErrorCode
from trio_router.http2.limits import Patience


@pytest.mark.parametrize(
    ("count", "limit"),
    [
        (Patience.answer, limits.MAX_PENDING_ANSWERS),
        (Patience.idle_frame, limits.MAX_IDLE_FRAMES),
        (Patience.unanswered_reset, limits.MAX_UNANSWERED_RESETS),
    ],
)
def test_each_count_ends_with_calm(count, limit):
    patience = Patience()
    for _ in range(limit):
        count(patience)
    with pytest.raises(ProtocolViolation) as caught:
        count(patience)
    assert caught.value.h2_code == ErrorCode.ENHANCE_YOUR_CALM


def test_answered_requests_make_up_for_reset_ones():
    patience = Patience()
    for _ in range(limits.MAX_UNANSWERED_RESETS * 2):
        patience.unanswered_reset()
        patience.answered()
    patience.answered()
    assert patience.unanswered_resets == 0
