"""Each candidate in turn."""

from __future__ import annotations

from collections.abc import Sequence

from .base import Candidate, fresh_first


class RoundRobin:
    """One counter; a retry takes the next turn among the workers that have not failed the request."""

    def __init__(self) -> None:
        self._turn = 0

    def pick(self, candidates: Sequence[Candidate]) -> int:
        eligible = fresh_first(candidates)
        choice = eligible[self._turn % len(eligible)]
        self._turn += 1
        return choice
