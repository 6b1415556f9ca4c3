"""How much nonsense is too much."""

from __future__ import annotations

import pytest

from trio_router.errors import ProtocolViolation
from trio_router.http2 import limits
from trio_router.http2.frames import ErrorCode
from trio_router.http2.limits import Patience

FORGIVEN = [
    (Patience.idle_frame, limits.MAX_IDLE_FRAMES, limits.IDLE_FRAMES_PER_SECOND),
    (Patience.credit, limits.MAX_CREDITS, limits.CREDITS_PER_SECOND),
    (Patience.unanswered_reset, limits.MAX_UNANSWERED_RESETS, limits.UNANSWERED_RESETS_PER_SECOND),
]


class Clock:
    """Time as a test sets it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.readings = 0

    def __call__(self) -> float:
        self.readings += 1
        return self.now


def spend(patience: Patience, count, times: int) -> None:
    for _ in range(times):
        count(patience)


@pytest.mark.parametrize(
    ("count", "limit"), [(Patience.answer, limits.MAX_PENDING_ANSWERS), *((kind, limit) for kind, limit, _ in FORGIVEN)]
)
def test_each_count_ends_with_calm(count, limit):
    patience = Patience()
    spend(patience, count, limit)
    with pytest.raises(ProtocolViolation) as caught:
        count(patience)
    assert caught.value.h2_code == ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize(("count", "limit", "per_second"), FORGIVEN)
class TestForgiving:
    def test_a_burst_is_forgiven_at_its_rate(self, count, limit, per_second):
        clock = Clock()
        patience = Patience(clock)
        spend(patience, count, limit)
        clock.now += 2
        spend(patience, count, 2 * per_second)
        with pytest.raises(ProtocolViolation):
            count(patience)

    def test_a_rate_that_is_allowed_goes_on_for_ever(self, count, limit, per_second):
        clock = Clock()
        patience = Patience(clock)
        for _ in range(3 * limit // per_second):
            spend(patience, count, per_second)
            clock.now += 1

    def test_a_rate_above_it_ends_some_time(self, count, limit, per_second):
        clock = Clock()
        patience = Patience(clock)
        for _ in range(limit // per_second - 1):  # each second leaves one second's worth behind
            spend(patience, count, 2 * per_second)
            clock.now += 1
        with pytest.raises(ProtocolViolation):
            spend(patience, count, 4 * per_second)

    def test_the_clock_is_left_alone_below_the_limit(self, count, limit, per_second):
        clock = Clock()
        patience = Patience(clock)
        before = clock.readings
        spend(patience, count, limit)
        assert clock.readings == before
        clock.now += 1
        count(patience)
        assert clock.readings == before + 1


def test_answered_requests_make_up_for_reset_ones():
    patience = Patience()
    for _ in range(limits.MAX_UNANSWERED_RESETS * 2):
        patience.unanswered_reset()
        patience.answered()
    patience.answered()
    assert patience.unanswered_resets == 0


def test_output_pays_for_credit_and_answers():
    patience = Patience()
    spend(patience, Patience.credit, 10)
    spend(patience, Patience.answer, 10)
    patience.taken(9 * limits.BYTES_PER_CREDIT)
    assert (patience.credits, patience.answers) == (1, 0)
    patience.taken(9 * limits.BYTES_PER_CREDIT)
    assert patience.credits == 0


def test_work_makes_up_for_idle_frames_and_credit():
    patience = Patience()
    patience.idle_frame(weight=7)
    patience.credit()
    assert (patience.idle_frames, patience.credits) == (7, 1)
    patience.work()
    assert (patience.idle_frames, patience.credits) == (0, 0)
