"""The rules of pings, tried without a connection. The judge of "too often" is gRPC's core, whose count is told here
once more, in its own terms.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_router.errors import ConfigError
from trio_router.rpc.keepalive import (
    MAX_INTERVAL,
    KeepaliveSettings,
    Pace,
    PingLimits,
    PingStrikes,
    Verdict,
    Watch,
)

DEFAULTS = KeepaliveSettings()


class Core:
    """How a server of gRPC's core counts pings; `sent` is called when it sends headers or data."""

    def __init__(self, *, interval: float, strikes: int) -> None:
        self.interval = interval
        self.allowed = strikes
        self.sent()

    def sent(self) -> None:
        self.strikes = 0
        self.last_ping = -math.inf

    def ping(self, now: float) -> bool:
        """Whether it is one too many."""
        early = now < self.last_ping + self.interval
        self.last_ping = now
        self.strikes += early
        return self.allowed != 0 and self.strikes > self.allowed


def watch(
    *,
    until: float,
    heard: list[float] = (),
    dies_at: float = math.inf,
    settings: KeepaliveSettings = DEFAULTS,
    pace: Pace | None = None,
    busy=lambda now: True,
) -> tuple[list[float], float | None]:
    """The times of the pings to a peer that says something at the given times and answers pings until it dies, and when
    it was found dead.
    """
    rules = Watch(pace or Pace(settings), now=0.0)
    pings: list[float] = []
    while (now := rules.next_look) <= until:
        said = [*heard, *(ping + 0.01 for ping in pings)]
        verdict = rules.look(now, reads=sum(each <= min(now, dies_at) for each in said), busy=busy(now))
        if verdict is Verdict.PING:
            pings.append(now)
        elif verdict is Verdict.DEAD:
            return pings, now
    return pings, None


class TestPinging:
    def test_a_silent_peer_is_pinged_three_times_and_then_slowly(self):
        assert watch(until=1000) == ([30, 60, 90, 390, 690, 990], None)

    def test_a_peer_that_talks_is_not_pinged(self):
        assert watch(until=1000, heard=[float(at) for at in range(15, 1000, 19)]) == ([], None)

    def test_silence_counts_from_the_last_word(self):
        pings, _ = watch(until=65, heard=[5.0, 21.0])
        assert pings == [60]  # at 30 something had come

    def test_who_talks_between_two_silences_is_pinged_as_at_first(self):
        pings, _ = watch(until=300, heard=[115.0])
        assert pings == [30, 60, 90, 150, 180, 210]

    def test_what_comes_with_the_answer_earns_no_further_pings(self):
        """It may be a part of it, and a ping too few costs less than one too many."""
        pings, _ = watch(until=300, heard=[30.5, 70.5, 110.5])
        assert pings == [30, 70, 110]

    def test_without_a_call_it_may_be_left_alone(self):
        quiet = KeepaliveSettings(while_idle=False)
        assert watch(until=1000, settings=quiet, busy=lambda now: False) == ([], None)
        pings, _ = watch(until=150, settings=quiet, busy=lambda now: now > 70)
        assert pings == [80, 110, 140]

    def test_a_complaint_halves_the_rate_at_once_and_on_every_connection(self):
        pace = Pace(DEFAULTS)
        assert watch(until=250, pace=pace)[0] == [30, 60, 90]
        pace.slow_down()
        assert watch(until=800, pace=pace)[0] == [60, 120, 180, 780]
        pace.slow_down()
        assert watch(until=800, pace=pace)[0] == [120, 240, 360]

    def test_complaints_end_at_what_no_server_complains_of(self):
        pace = Pace(KeepaliveSettings(interval=100, slow_interval=10_000))
        for _ in range(20):
            pace.slow_down()
        assert (pace.interval, pace.slow_interval) == (MAX_INTERVAL, 10_000)


class TestDying:
    def test_a_ping_that_nothing_follows_is_the_proof(self):
        assert watch(until=1000, dies_at=5) == ([30], 40)
        assert watch(until=1000, dies_at=100) == ([30, 60, 90, 390], 400)

    def test_anything_that_follows_is_an_answer(self):
        rules = Watch(Pace(DEFAULTS), now=0.0)
        while rules.look(rules.next_look, reads=0, busy=True) is not Verdict.PING:
            pass
        assert rules.look(rules.next_look, reads=1, busy=True) is Verdict.FINE

    def test_the_timeout_is_its_own(self):
        assert watch(until=1000, dies_at=5, settings=KeepaliveSettings(timeout=3)) == ([30], 33)
        assert watch(until=1000, dies_at=5, settings=KeepaliveSettings(timeout=300)) == ([30], 330)

    def test_a_long_timeout_makes_no_pause_longer(self):
        assert watch(until=400, settings=KeepaliveSettings(timeout=300)) == ([30, 60, 90, 390], None)


times = st.lists(st.floats(0, 5000, allow_nan=False), max_size=40)


class TestLimits:
    @settings(deadline=None)
    @given(heard=times)
    def test_no_ping_comes_sooner_than_an_interval_after_a_word_or_another_ping(self, heard):
        pings, _ = watch(until=6000, heard=heard)
        for ping in pings:
            before = [each for each in [*heard, *pings] if each < ping]
            assert ping - max(before, default=0) >= DEFAULTS.interval - 1e-6
            assert ping - max(before, default=0) < DEFAULTS.slow_interval + DEFAULTS.interval

    @settings(deadline=None)
    @given(heard=times)
    @pytest.mark.parametrize(("interval", "strikes"), [(10, 2), (10, 1), (30, 1), (300, 2)])
    def test_case_g1_no_server_of_grpcs_core_complains(self, interval, strikes, heard):
        """With the limits of inference servers, and with its own defaults, which these servers had once."""
        core = Core(interval=interval, strikes=strikes)
        pings, _ = watch(until=6000, heard=heard)
        for at, what in sorted([*((at, "word") for at in heard), *((at, "ping") for at in pings)]):
            if what == "word":
                core.sent()
            else:
                assert not core.ping(at), f"too many pings: {pings}, words {sorted(heard)}"

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"interval": 9.9}, "every 9.9 s: peers allow a ping every 10 s"),
            ({"interval": 20, "allowed": 21}, "every 21 s"),
            ({"allowed": 0}, "every 0 s"),
            ({"slow_interval": 29}, "not slower"),
            ({"slow_interval": math.inf}, "not slower"),
            ({"timeout": 0}, "timeout"),
            ({"timeout": math.inf}, "timeout"),
        ],
        ids=str,
    )
    def test_settings_that_no_server_accepts_are_refused(self, wrong, message):
        with pytest.raises(ConfigError, match=message):
            KeepaliveSettings(**wrong)


class TestStrikes:
    @settings(deadline=None)
    @given(
        st.sampled_from([(10.0, 2), (10.0, 1), (300.0, 2), (0.0, 1), (10.0, 0)]),
        st.lists(st.tuples(st.floats(0, 20), st.booleans()), max_size=30),
    )
    def test_they_are_counted_as_by_grpcs_core(self, limits, events):
        interval, allowed = limits
        core = Core(interval=interval, strikes=allowed)
        strikes = PingStrikes(PingLimits(interval=interval, strikes=allowed))
        now = 0.0
        for pause, sent in events:
            now += pause
            if sent:
                core.sent()
            assert strikes.pinged(1, now=now, alone=not sent) == core.ping(now)

    def test_pings_that_come_together_are_as_many(self):
        strikes = PingStrikes(PingLimits())
        assert not strikes.pinged(3, now=0.0, alone=True)
        assert strikes.pinged(1, now=1.0, alone=True)
        assert PingStrikes(PingLimits()).pinged(4, now=0.0, alone=True)

    @pytest.mark.parametrize("wrong", [{"interval": -1}, {"strikes": -1}], ids=str)
    def test_limits_are_not_negative(self, wrong):
        with pytest.raises(ConfigError, match="negative"):
            PingLimits(**wrong)
