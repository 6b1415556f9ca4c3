"""When to ping, when a silent peer is dead, and when a pinging peer goes too far: pure rules.

They are told the time and what has happened; they know neither clocks nor connections.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto, unique
from typing import Final

from ..errors import ConfigError

ALLOWED_INTERVAL: Final = 10.0
"""Seconds between pings that inference servers allow (vLLM, SGLang and MLX all say 10 s to gRPC's core); also the
least that gRPC's own guide lets a client ask for."""

TOO_MANY_PINGS: Final = b"too_many_pings"
"""What a server says in a GOAWAY with ENHANCE_YOUR_CALM before it hangs up on a client that pings too often."""

FREE_PINGS: Final = 3
"""Pings in one silence that gRPC's core forgives at its own defaults, however soon they come: one and two strikes."""

CORE_INTERVAL: Final = 300.0
"""Seconds between later pings of the same silence that it allows at its own defaults."""

MAX_INTERVAL: Final = 7200.0
"""Two hours, what gRPC's core allows a client without calls at its own defaults: no server asks for more."""

LOOKS: Final = 3
"""Looks at a link in one interval. A ping follows a silence of one interval, and a third of it at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepaliveSettings:
    """How a silent connection is tested. Seconds; raises ConfigError for values that no server would accept.

    Nothing is sent before the peer has been silent for `interval`. A ping that nothing follows for `timeout` shows the
    connection dead. `while_idle`: also when it has no call. After three pings in one silence the next ones are
    `slow_interval` apart, so that a server that was left at gRPC's defaults does not end a long prefill over them.
    `allowed` is how often the peer lets itself be pinged: no interval may be below it.
    """

    interval: float = 30.0
    timeout: float = 10.0
    while_idle: bool = True
    slow_interval: float = CORE_INTERVAL
    allowed: float = ALLOWED_INTERVAL

    def __post_init__(self) -> None:
        if not 0 < self.allowed <= self.interval:
            raise ConfigError(f"keepalive every {self.interval:g} s: peers allow a ping every {self.allowed:g} s")
        if not self.interval <= self.slow_interval < math.inf:
            raise ConfigError(
                f"keepalive slows down from {self.interval:g} s to {self.slow_interval:g} s, which is not slower"
            )
        if not 0 < self.timeout < math.inf:
            raise ConfigError(f"keepalive timeout of {self.timeout:g} s")


class Pace:
    """How often one peer is pinged, on all of its connections: what it has complained of once holds for all."""

    __slots__ = ("interval", "settings", "slow_interval")

    def __init__(self, settings: KeepaliveSettings) -> None:
        self.settings = settings
        self.interval = settings.interval
        self.slow_interval = settings.slow_interval

    def __repr__(self) -> str:
        return f"<Pace {self.interval:g} s, then {self.slow_interval:g} s>"

    def slow_down(self) -> None:
        """The peer has said that these were too many pings: half as many from now on."""
        self.interval = max(self.interval, min(self.interval * 2, MAX_INTERVAL))
        self.slow_interval = max(self.slow_interval, min(self.slow_interval * 2, MAX_INTERVAL))


@unique
class Verdict(Enum):
    """What a look at a connection has shown."""

    FINE = auto()
    PING = auto()
    """Send a ping now."""
    DEAD = auto()
    """The last ping brought nothing: give the connection up."""


class Watch:
    """The keepalive of one connection. `look` is called at the time the last call of it asked for, `next_look`."""

    __slots__ = ("_free", "_heard_at", "_pace", "_pinged_at", "_reads", "_waiting", "next_look")

    def __init__(self, pace: Pace, *, now: float) -> None:
        self._pace = pace
        self._reads = 0
        self._heard_at = now  # or before: when a look found that something had come
        self._pinged_at = -math.inf
        self._waiting = False
        self._free = FREE_PINGS
        self.next_look = now + pace.interval / LOOKS

    def look(self, now: float, *, reads: int, busy: bool) -> Verdict:
        """`reads` counts what has been received so far, `busy` says whether the connection has calls."""
        came, self._reads = reads - self._reads, reads
        self.next_look = now + self._pace.interval / LOOKS
        return self._judge_answer(now, came=came) if self._waiting else self._judge_silence(now, came=came, busy=busy)

    def _judge_answer(self, now: float, *, came: int) -> Verdict:
        if not came:
            gives_up_at = self._pinged_at + self._pace.settings.timeout
            self.next_look = min(self.next_look, gives_up_at)
            return Verdict.FINE if now < gives_up_at else Verdict.DEAD
        self._waiting = False
        # The answer is about as old as the ping. What else came earns no further pings: it may be part of the answer.
        self._heard_at = self._pinged_at if came == 1 else now
        return Verdict.FINE

    def _judge_silence(self, now: float, *, came: int, busy: bool) -> Verdict:
        pace = self._pace
        if came:
            self._heard_at = now
            self._free = FREE_PINGS  # a server forgets its strikes when it sends something
        if not busy and not pace.settings.while_idle:
            return Verdict.FINE
        due = self._heard_at + pace.interval if self._free else self._pinged_at + pace.slow_interval
        if now < due:
            self.next_look = min(self.next_look, due)
            return Verdict.FINE
        self._free = max(0, self._free - 1)
        self._pinged_at = now
        self._waiting = True
        self.next_look = min(self.next_look, now + pace.settings.timeout)
        return Verdict.PING


@dataclass(frozen=True, slots=True, kw_only=True)
class PingLimits:
    """How often a server lets itself be pinged, as gRPC's core counts it.

    A ping that comes less than `interval` seconds after another, with nothing sent or received between them, is a
    strike; above `strikes` of them the client is told so and its connection ended. No strikes: never.
    """

    interval: float = ALLOWED_INTERVAL
    strikes: int = 2

    def __post_init__(self) -> None:
        if self.interval < 0 or self.strikes < 0:
            raise ConfigError(f"ping limits of {self.interval:g} s and {self.strikes} strikes: neither is negative")


class PingStrikes:
    """The count of one connection."""

    __slots__ = ("_limits", "_pinged_at", "_strikes")

    def __init__(self, limits: PingLimits) -> None:
        self._limits = limits
        self._strikes = 0
        self._pinged_at = -math.inf

    def pinged(self, count: int, *, now: float, alone: bool) -> bool:
        """`count` pings came; `alone`: nothing was sent or received since the one before. True: it is enough."""
        limits = self._limits
        if not alone:
            self._strikes = 0
            self._pinged_at = -math.inf
        soon = now < self._pinged_at + limits.interval
        self._pinged_at = now
        self._strikes += count if soon else count - 1
        return 0 < limits.strikes < self._strikes
