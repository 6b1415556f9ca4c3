"""How often and how soon a request is tried again: pure arithmetic, randomness passed in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..errors import ConfigError

_NOT_NEGATIVE: Final = (
    "initial_backoff",
    "multiplier",
    "max_backoff",
    "budget_share",
    "budget_floor",
    "busy_retry_after",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrySettings:
    """`attempts` counts the first try; moving on from a worker that is busy is not counted. Backoff in seconds, before
    jitter; the field's gateways use the same defaults.

    All requests together may make `budget_share` retries a request, and `budget_floor` a second besides. When every
    worker of a leg is busy the client is asked to come back after `busy_retry_after` seconds.
    """

    attempts: int = 5
    initial_backoff: float = 0.05
    multiplier: float = 1.5
    max_backoff: float = 30.0
    jitter: float = 0.2
    budget_share: float = 0.2
    budget_floor: float = 10.0
    busy_retry_after: float = 1.0

    def validate(self) -> None:
        """Raise ConfigError, naming the setting."""
        if self.attempts < 1:
            raise ConfigError(f"retry.attempts counts the first try and must be at least 1, not {self.attempts}")
        for name in _NOT_NEGATIVE:
            if not getattr(self, name) >= 0:
                raise ConfigError(f"retry.{name} must not be negative, and is {getattr(self, name)}")
        if not 0 <= self.jitter <= 1:
            raise ConfigError(f"retry.jitter is a share of a pause, from 0 to 1, not {self.jitter}")


def backoff(settings: RetrySettings, *, failures: int, chance: float) -> float:
    """Seconds to wait after the `failures`-th failed try (from 1). `chance` is uniform in [0, 1)."""
    try:
        plain = min(settings.max_backoff, settings.initial_backoff * settings.multiplier ** (failures - 1))
    except OverflowError:
        plain = settings.max_backoff
    return plain * (1 + settings.jitter * (2 * chance - 1))
