"""Doing something at any step of a run: what a test needs that must hold whenever it happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio


class AtStep(trio.abc.Instrument):
    """Calls `act` once, after the k-th task step from now, whichever task that is. It must not raise."""

    def __init__(self, k: int, act: Callable[[], None]) -> None:
        self._left = k
        self._act = act

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self._left -= 1
        if self._left == 0:
            self._act()


@contextmanager
def at_step(k: int, act: Callable[[], None]) -> Iterator[None]:
    """Have `act` called at the k-th task step within the block, if it takes as many."""
    instrument = AtStep(k, act)
    trio.lowlevel.add_instrument(instrument)
    try:
        yield
    finally:
        trio.lowlevel.remove_instrument(instrument)
