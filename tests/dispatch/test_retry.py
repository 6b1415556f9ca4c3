from __future__ import annotations

import pytest

from trio_router.dispatch.retry import RetrySettings, backoff


def test_backoff_grows_to_its_cap():
    settings = RetrySettings()
    waits = [backoff(settings, failures=n, chance=0.5) for n in (1, 2, 3, 30)]
    assert waits == [pytest.approx(0.05), pytest.approx(0.075), pytest.approx(0.1125), 30.0]


def test_jitter_stays_within_its_share():
    settings = RetrySettings()
    assert backoff(settings, failures=1, chance=0.0) == pytest.approx(0.04)
    assert backoff(settings, failures=1, chance=0.999999) < 0.06
