"""A circuit breaker as a value: when a worker that keeps failing gets no requests for a while. Time is passed in.

Three kinds of ends: a success, a failure, and neither, of which it is not told: a worker that is busy is well, and one
that refuses a request for the request's own fault is, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, unique

from ..errors import ConfigError


@unique
class BreakerState(StrEnum):
    """Whether a worker gets requests."""

    CLOSED = "closed"
    """Yes."""
    OPEN = "open"
    """No."""
    HALF_OPEN = "half_open"
    """A few at a time, if there is another worker; successes close it, and one failure opens it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerSettings:
    """`failures` in a row open it, none of them more than `window` seconds after the one before; it stays open for
    `first_pause` seconds and then takes `successes` to close. When it opens again before that, each pause is twice as
    long as the one before, up to `pause`: where nobody else is left, what a worker fails for a moment must not become a
    minute's outage. The other defaults are those of the field's gateways, which know only the long pause.
    """

    failures: int = 10
    window: float = 120.0
    first_pause: float = 1.0
    pause: float = 60.0
    successes: int = 3

    def validate(self) -> None:
        """Raise ConfigError, naming the setting."""
        for name in ("failures", "successes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"breaker.{name} must be at least 1, not {getattr(self, name)}")


class Breaker:
    """One worker's. All times are seconds on one clock."""

    __slots__ = ("_failed_at", "_failures", "_opened_at", "_openings", "_settings", "_successes")

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        self._opened_at: float | None = None
        self._openings = 0
        self._failures = 0
        self._successes = 0
        self._failed_at = 0.0

    def __repr__(self) -> str:
        return f"<Breaker {self._failures} failures, opened at {self._opened_at}>"

    def state(self, now: float) -> BreakerState:
        """Where it is now."""
        if self._opened_at is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._opened_at + self._pause else BreakerState.HALF_OPEN

    @property
    def _pause(self) -> float:
        settings = self._settings
        # 2**40 seconds are longer than any pause, and no float is too small for them.
        return min(settings.pause, settings.first_pause * 2.0 ** min(self._openings - 1, 40))

    def retry_after(self, now: float) -> float:
        """Seconds until it lets somebody through; 0 when it does."""
        return 0.0 if self._opened_at is None else max(0.0, self._opened_at + self._pause - now)

    def is_to_be_spared(self, now: float, *, trying: int) -> bool:
        """Whether another worker should have the next request: it is half open, and `trying` legs are under way that
        will tell. They may take long to fail, and each one's client waits.
        """
        return self.state(now) is BreakerState.HALF_OPEN and trying >= self._settings.successes

    def succeeded(self, now: float) -> None:
        """A leg went well."""
        self._failures = 0
        if self.state(now) is BreakerState.HALF_OPEN:
            self._successes += 1
            if self._successes >= self._settings.successes:
                self.reset()

    def failed(self, now: float) -> None:
        """A leg failed by the worker's fault."""
        state = self.state(now)
        if state is BreakerState.OPEN:
            return  # of a leg that began before it opened
        if now > self._failed_at + self._settings.window:
            self._failures = 0
        self._failures += 1
        self._failed_at = now
        if state is BreakerState.HALF_OPEN or self._failures >= self._settings.failures:
            self._opened_at = now
            self._openings += 1
            self._failures = self._successes = 0

    def reset(self) -> None:
        """Closed, and nothing remembered: who answers now may be another process."""
        self._opened_at = None
        self._failures = self._successes = self._openings = 0
        self._failed_at = 0.0
