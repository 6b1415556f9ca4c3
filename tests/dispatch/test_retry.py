from __future__ import annotations

import pytest

from trio_router.dispatch.retry import RetrySettings, backoff
from trio_router.errors import ConfigError


def test_backoff_grows_to_its_cap():
    settings = RetrySettings()
    waits = [backoff(settings, failures=n, chance=0.5) for n in (1, 2, 3, 30)]
    assert waits == [pytest.approx(0.05), pytest.approx(0.075), pytest.approx(0.1125), 30.0]


def test_jitter_stays_within_its_share():
    settings = RetrySettings()
    assert backoff(settings, failures=1, chance=0.0) == pytest.approx(0.04)
    assert backoff(settings, failures=1, chance=0.999999) < 0.06


def test_any_number_of_failures_has_a_pause():
    for multiplier in (0.0, 1.5, 1000.0):
        settings = RetrySettings(attempts=10_000, multiplier=multiplier)
        assert 0 <= backoff(settings, failures=9_999, chance=0.5) <= 30.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempts": 0},
        {"initial_backoff": -0.1},
        {"multiplier": -1.0},
        {"max_backoff": float("nan")},
        {"jitter": 1.1},
        {"jitter": -0.1},
        {"budget_share": -0.1},
        {"budget_floor": -1.0},
        {"busy_retry_after": -1.0},
    ],
)
def test_settings_by_which_nobody_can_wait_are_named(wrong):
    """A pause below 0 would end requests with an error of trio's."""
    with pytest.raises(ConfigError, match=f"retry.{next(iter(wrong))}"):
        RetrySettings(**wrong).validate()
    RetrySettings().validate()
