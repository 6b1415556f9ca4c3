"""How often and how soon a request is tried again: pure arithmetic, randomness passed in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrySettings:
    """`attempts` counts the first try. Backoff in seconds, before jitter; the field's gateways use the same
    defaults.
    """

    attempts: int = 5
    initial_backoff: float = 0.05
    multiplier: float = 1.5
    max_backoff: float = 30.0
    jitter: float = 0.2


def backoff(settings: RetrySettings, *, failures: int, chance: float) -> float:
    """Seconds to wait after the `failures`-th failed try (from 1). `chance` is uniform in [0, 1)."""
    plain = min(settings.max_backoff, settings.initial_backoff * settings.multiplier ** (failures - 1))
    return plain * (1 + settings.jitter * (2 * chance - 1))
