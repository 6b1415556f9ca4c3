"""How long to leave a peer alone that could not be reached: pure arithmetic, chance passed in."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BackoffSettings:
    """Pauses between attempts to connect, in seconds before jitter. Raises ConfigError for values that make no sense.

    Shorter than gRPC's own defaults (1 s growing to 120 s), which are made for thousands of clients of one server: a
    worker has a few routers, refusing a connection costs it nothing, and one that is back should have work soon. After
    an outage of any length it is found within `maximum` seconds.
    """

    initial: float = 0.1
    multiplier: float = 1.5
    maximum: float = 5.0
    jitter: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.initial <= self.maximum:
            raise ConfigError(f"backoff from {self.initial:g} s to {self.maximum:g} s: it must grow from 0 or more")
        if self.multiplier < 1 or not 0 <= self.jitter < 1:
            raise ConfigError(
                f"backoff with multiplier {self.multiplier:g} and jitter {self.jitter:g}: "
                "the first is 1 or more, the second is below 1"
            )

    def pause(self, failures: int, *, chance: float) -> float:
        """Seconds to wait after the `failures`-th failure in a row (from 1). `chance` is uniform in [0, 1)."""
        # Growth stops counting before the power overflows: a peer may be gone for days.
        plain = min(self.maximum, self.initial * self.multiplier ** min(failures - 1, 100))
        return plain * (1 + self.jitter * (2 * chance - 1))


class Backoff:
    """The pauses of one peer. No attempt is due before `not_before`, on the clock that its methods are told."""

    __slots__ = ("_failures", "_settings", "not_before")

    def __init__(self, settings: BackoffSettings) -> None:
        self._settings = settings
        self._failures = 0  # in a row
        self.not_before = -math.inf

    def __repr__(self) -> str:
        return f"<Backoff {self._failures} failures>"

    def failed(self, *, now: float, chance: float) -> None:
        """An attempt to connect has failed."""
        self._failures += 1
        self.not_before = now + self._settings.pause(self._failures, chance=chance)

    def made(self) -> None:
        """A connection was made. Whether it counts will show; another one may be made at once."""
        self.not_before = -math.inf

    def lost(self, *, now: float, lasted: float, chance: float) -> None:
        """A connection has ended that lasted so many seconds.

        One that lasted for the longest pause shows that all is well. Of shorter ones in a row the first is an accident,
        and the next ones are failures: a peer that greets everybody and hangs up must not be hammered, either.
        """
        if lasted >= self._settings.maximum:
            self._failures = 0
            return
        self._failures += 1
        if self._failures > 1:
            self.not_before = now + self._settings.pause(self._failures - 1, chance=chance)
