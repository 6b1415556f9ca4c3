"""Each candidate in turn."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from .base import Candidate, fresh_first


class RoundRobin:
    """Picks whoever has waited longest for a turn, so that shares stay equal whichever candidates are offered: those of
    one of several models, or fewer than before.

    Retries go round by themselves. If they took turns of first tries, a worker that fails at once would get its turn
    back each time, and with it every request.
    """

    def __init__(self) -> None:
        self._turns = itertools.count(1)
        self._last_first_try: dict[str, int] = {}
        self._last_retry: dict[str, int] = {}

    def pick(self, candidates: Sequence[Candidate], *, retry: bool = False) -> int:
        is_retry = retry or any(candidate.failed_before for candidate in candidates)
        last = self._last_retry if is_retry else self._last_first_try
        choice = min(fresh_first(candidates), key=lambda index: last.get(candidates[index].worker, 0))
        last[candidates[choice].worker] = next(self._turns)
        return choice
