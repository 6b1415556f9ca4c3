"""Deadlines of many owners kept by one task: no scope and no timer per call."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import Final, Protocol

import trio

_SLACK: Final = 64
"""Dead entries that are not worth a new heap."""


class Expires(Protocol):
    """Who has a deadline."""

    def expired(self) -> None:
        """The deadline has passed. Must not raise or suspend; may set another one."""


class Sweeper:
    """Deadlines of any number of owners, one for each."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Expires]] = []
        self._live: dict[Expires, int] = {}
        self._numbers = itertools.count()
        self._changed = trio.Event()

    def add(self, owner: Expires, *, deadline: float) -> None:
        number = next(self._numbers)
        self._live[owner] = number
        heapq.heappush(self._heap, (deadline, number, owner))
        if self._heap[0][1] == number:
            self._changed.set()

    def discard(self, owner: Expires) -> None:
        self._live.pop(owner, None)
        if len(self._heap) > 2 * len(self._live) + _SLACK:
            # Entries of calls that ended in time; the heap would hold each until its deadline, and what it refers to.
            self._heap = [entry for entry in self._heap if self._live.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    async def run(self) -> None:
        while True:
            self._changed = trio.Event()
            with trio.move_on_at(self._next()):
                await self._changed.wait()
            now = trio.current_time()
            while self._heap and self._heap[0][0] <= now:
                _, number, owner = heapq.heappop(self._heap)
                if self._live.get(owner) == number:
                    del self._live[owner]
                    owner.expired()

    def _next(self) -> float:
        # No waking for an entry that nobody waits for.
        while self._heap and self._live.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf
