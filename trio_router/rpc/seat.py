"""Room for one waiting task: the cheapest way to wake it exactly once."""

from __future__ import annotations

from collections.abc import Callable

import trio


class Seat:
    """At most one task sits here. `wake` is a no-op when nobody does."""

    __slots__ = ("_on_cancel", "_task")

    def __init__(self, *, on_cancel: Callable[[], None] | None = None) -> None:
        self._task: trio.lowlevel.Task | None = None
        self._on_cancel = on_cancel

    async def wait(self) -> None:
        """Sleep until `wake`. `on_cancel` runs at the moment of a cancellation, before the cancelled task does."""
        if self._task is not None:
            raise trio.BusyResourceError("another task is already waiting in this call")
        self._task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._abandon)

    def wake(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    def _abandon(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self._task = None
        if self._on_cancel is not None:
            self._on_cancel()
        return trio.lowlevel.Abort.SUCCEEDED
