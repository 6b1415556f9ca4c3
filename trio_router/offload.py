"""Where blocking work goes: one seam for threads and name resolution, so that simulations can do without threads.

trio's virtual clock knows nothing of threads: it would jump over whatever waits for one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import trio

T = TypeVar("T")


class Offload(Protocol):
    """Runs blocking work elsewhere, usually in a thread."""

    def __call__(self, function: Callable[[], T]) -> Awaitable[T]:
        """Call `function` and return what it returns, or raise what it raises."""


async def inline(function: Callable[[], T]) -> T:
    """An Offload that does not: for simulations, whose clock knows nothing of threads."""
    return function()


class Threads:
    """An Offload with threads of its own, so that nothing else that uses threads can starve it."""

    def __init__(self, count: int) -> None:
        self._limiter = trio.CapacityLimiter(count)

    async def __call__(self, function: Callable[[], T]) -> T:
        # What is offloaded asks or computes and has no effects: who has gone need not wait for it.
        return await trio.to_thread.run_sync(function, limiter=self._limiter, abandon_on_cancel=True)
