"""How long a peer is left alone."""

from __future__ import annotations

import pytest

from trio_router.errors import ConfigError
from trio_router.rpc.backoff import Backoff, BackoffSettings

PLAIN = BackoffSettings(initial=1.0, multiplier=2.0, maximum=10.0, jitter=0.0)


class TestPauses:
    def test_they_grow_from_the_first_failure_on_up_to_a_bound(self):
        assert [PLAIN.pause(failures, chance=0.0) for failures in range(1, 7)] == [1, 2, 4, 8, 10, 10]

    def test_the_bound_holds_after_any_number_of_failures(self):
        assert PLAIN.pause(10**9, chance=0.5) == 10

    @pytest.mark.parametrize(("chance", "factor"), [(0.0, 0.75), (0.5, 1.0), (0.999999, 1.25)])
    def test_chance_makes_them_longer_or_shorter(self, chance, factor):
        settings = BackoffSettings(initial=1.0, multiplier=2.0, maximum=10.0, jitter=0.25)
        assert [settings.pause(failures, chance=chance) for failures in (1, 3)] == [
            pytest.approx(factor, rel=1e-4),
            pytest.approx(4 * factor, rel=1e-4),
        ]

    @pytest.mark.parametrize(
        "wrong",
        [{"initial": -1}, {"initial": 6}, {"maximum": 0.01}, {"multiplier": 0.9}, {"jitter": 1.0}, {"jitter": -0.1}],
        ids=str,
    )
    def test_values_without_a_meaning_are_refused(self, wrong):
        with pytest.raises(ConfigError, match="backoff"):
            BackoffSettings(**wrong)


class TestFailures:
    def test_each_failed_attempt_in_a_row_makes_the_pause_longer(self):
        backoff = Backoff(PLAIN)
        ends = []
        for now in (100.0, 200.0, 300.0):
            backoff.failed(now=now, chance=0.5)
            ends.append(backoff.not_before)
        assert ends == [101, 202, 304]

    def test_a_connection_that_lasted_makes_up_for_all_of_them(self):
        backoff = Backoff(PLAIN)
        for now in (100.0, 200.0, 300.0):
            backoff.failed(now=now, chance=0.5)
        backoff.lost(now=320.0, lasted=10.0, chance=0.5)
        backoff.failed(now=400.0, chance=0.5)
        assert backoff.not_before == 401

    def test_the_first_connection_that_does_not_last_is_an_accident(self):
        backoff = Backoff(PLAIN)
        backoff.lost(now=100.0, lasted=0.0, chance=0.5)
        assert backoff.not_before < 100

    def test_a_peer_that_greets_and_hangs_up_again_and_again_is_left_alone_for_longer_and_longer(self):
        backoff = Backoff(PLAIN)
        ends = []
        for now in (100.0, 200.0, 300.0, 400.0):
            backoff.lost(now=now, lasted=9.9, chance=0.5)
            ends.append(backoff.not_before - now)
        assert ends[1:] == [1, 2, 4]

    def test_one_that_was_made_ends_the_pause(self):
        backoff = Backoff(PLAIN)
        for now in (100.0, 100.0, 100.0):
            backoff.failed(now=now, chance=0.5)
        backoff.made()
        assert backoff.not_before < 100

    def test_one_that_does_not_last_after_failures_is_no_recovery(self):
        backoff = Backoff(PLAIN)
        for now in (100.0, 200.0, 300.0):
            backoff.failed(now=now, chance=0.5)
        backoff.lost(now=400.0, lasted=1.0, chance=0.5)
        assert backoff.not_before == 404
