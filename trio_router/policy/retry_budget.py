"""How many retries all requests together may make: a share of the traffic, so that retries cannot become most of it."""

from __future__ import annotations


class RetryBudget:
    """Each request adds `share` of a retry; `floor` more are there each second, whatever the traffic. What is not used
    is kept up to ten seconds of the floor or a hundred requests' share, whichever is more.
    """

    __slots__ = ("_balance", "_cap", "_floor", "_share", "_when")

    def __init__(self, *, share: float, floor: float) -> None:
        self._share = share
        self._floor = floor
        self._cap = max(10 * floor, 100 * share)
        self._balance = self._cap
        self._when = 0.0

    def __repr__(self) -> str:
        return f"<RetryBudget {self._balance:.1f} of {self._cap:.0f}>"

    def note_request(self) -> None:
        """A request has come."""
        self._balance = min(self._cap, self._balance + self._share)

    def take(self, now: float) -> bool:
        """Use one retry; False when there is none left. `now` is in seconds and never goes back."""
        self._balance = min(self._cap, self._balance + self._floor * (now - self._when))
        self._when = now
        if self._balance < 1:
            return False
        self._balance -= 1
        return True
