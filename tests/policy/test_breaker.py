"""The breaker's whole table, and how it gets from one state to the next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_router.errors import ConfigError
from trio_router.policy.breaker import Breaker, BreakerSettings, BreakerState

SETTINGS = BreakerSettings(failures=3, window=100.0, first_pause=60.0, pause=60.0, successes=2)


def opened(at: float = 0.0) -> Breaker:
    breaker = Breaker(SETTINGS)
    for _ in range(SETTINGS.failures):
        breaker.failed(at)
    return breaker


def test_failures_in_a_row_open_it_for_a_while():
    breaker = Breaker(SETTINGS)
    for _ in range(2):
        breaker.failed(1.0)
        assert breaker.state(1.0) is BreakerState.CLOSED
    breaker.failed(1.0)
    assert breaker.state(60.9) is BreakerState.OPEN
    assert breaker.retry_after(51.0) == 10.0
    assert breaker.state(61.0) is BreakerState.HALF_OPEN
    assert breaker.retry_after(61.0) == 0.0


def test_a_success_between_them_begins_the_count_again():
    breaker = Breaker(SETTINGS)
    for _ in range(10):
        breaker.failed(1.0)
        breaker.failed(1.0)
        breaker.succeeded(1.0)
    assert breaker.state(1.0) is BreakerState.CLOSED


def test_failures_far_apart_are_not_counted_together():
    breaker = Breaker(SETTINGS)
    for number in range(10):
        breaker.failed(number * 101.0)
    assert breaker.state(910.0) is BreakerState.CLOSED


def test_half_open_it_is_closed_by_successes():
    breaker = opened()
    breaker.succeeded(70.0)
    assert breaker.state(70.0) is BreakerState.HALF_OPEN
    breaker.succeeded(70.0)
    assert breaker.state(70.0) is BreakerState.CLOSED


def test_half_open_it_is_opened_by_one_failure_for_a_whole_pause():
    breaker = opened()
    breaker.succeeded(70.0)
    breaker.failed(70.0)
    assert breaker.state(129.0) is BreakerState.OPEN
    breaker.succeeded(131.0)
    assert breaker.state(131.0) is BreakerState.HALF_OPEN, "what went well before it opened again does not count"


def test_legs_that_began_before_it_opened_change_nothing():
    breaker = opened()
    breaker.failed(50.0)
    breaker.succeeded(50.0)
    assert breaker.state(59.0) is BreakerState.OPEN
    assert breaker.state(60.0) is BreakerState.HALF_OPEN


def test_pauses_grow_while_it_keeps_failing_and_begin_anew_when_it_has_been_well():
    breaker = Breaker(BreakerSettings(failures=1, first_pause=1.0, pause=5.0, successes=1))
    now, pauses = 0.0, []
    for _ in range(5):
        breaker.failed(now)
        pauses.append(breaker.retry_after(now))
        now += pauses[-1]
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]
    breaker.succeeded(now)
    breaker.failed(now)
    assert breaker.retry_after(now) == 1.0


def test_a_reset_forgets_everything():
    breaker = opened()
    breaker.reset()
    breaker.failed(1.0)
    breaker.failed(1.0)
    assert breaker.state(1.0) is BreakerState.CLOSED


@given(st.lists(st.tuples(st.sampled_from(["ok", "failed"]), st.integers(0, 50))))
def test_it_opens_only_after_failures_and_never_for_longer_than_its_pause(steps):
    breaker, now, in_a_row = Breaker(SETTINGS), 0, 0
    for what, later in steps:
        now += later
        was = breaker.state(now)
        if what == "ok":
            breaker.succeeded(now)
            in_a_row = 0
        else:
            breaker.failed(now)
            in_a_row += 1
        if was is BreakerState.CLOSED and breaker.state(now) is BreakerState.OPEN:
            assert in_a_row >= SETTINGS.failures
        assert breaker.retry_after(now) <= SETTINGS.pause
        assert breaker.state(now + SETTINGS.pause) is not BreakerState.OPEN


@pytest.mark.parametrize("name", ["failures", "successes"])
def test_settings_that_cannot_work_are_named(name):
    with pytest.raises(ConfigError, match=f"breaker.{name}"):
        BreakerSettings(**{name: 0}).validate()
