"""Runs on virtual time that are the same every time for one seed."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio
import trio.testing

Result = TypeVar("Result")


def run_simulation(main: Callable[[random.Random], Awaitable[Result]], *, seed: int) -> Result:
    """Run `main(rng)` on an autojump clock with trio's scheduling order fixed by `seed`; returns its result.

    trio shuffles each batch of runnable tasks on purpose. Repeating a run needs both of its private switches set
    before the run: either alone gives another order in every process. All other randomness must come from `rng`.
    """
    scheduler: Any = trio._core._run
    before = scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True
    scheduler._r = random.Random(seed)  # noqa: S311  # repeatable on purpose
    try:
        return trio.run(main, random.Random(seed), clock=trio.testing.MockClock(autojump_threshold=0))  # noqa: S311
    finally:
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r = before
