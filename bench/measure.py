"""What a process has cost so far, read from /proc (Linux)."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_seconds(pid: int) -> float:
    """CPU time of all live threads of a process; the scheduler counts it in nanoseconds.

    `/proc/<pid>/stat` would count in ticks of 10 ms, a hundredth of what a short run costs.
    """
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((thread / "schedstat").read_text().split()[0])
        except FileNotFoundError:  # the thread has ended meanwhile
            continue
    return total / 1e9


def resident_bytes(pid: int) -> int:
    """Resident set size of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Meter:
    """CPU spent by named processes between `start` and `stop`."""

    def __init__(self, processes: dict[str, int]) -> None:
        self._processes = processes
        self._before: dict[str, float] = {}

    def start(self) -> None:
        self._before = {name: cpu_seconds(pid) for name, pid in self._processes.items()}

    def stop(self) -> dict[str, float]:
        """Seconds, by name."""
        return {name: cpu_seconds(pid) - self._before[name] for name, pid in self._processes.items()}
