"""What every policy takes and gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A worker as a policy sees it. `load` counts the requests in flight through this router, `tokens` those of their
    prompts (estimated where media stand in them).
    """

    worker: str
    load: int
    tokens: int = 0
    failed_before: bool = False


class Policy(Protocol):
    """Chooses one of the candidates."""

    def pick(self, candidates: Sequence[Candidate], *, retry: bool = False) -> int:
        """The index of the choice. `candidates` is never empty; `retry` says that others have been tried before."""


def fresh_first(candidates: Sequence[Candidate]) -> list[int]:
    """Indices worth choosing from: those that have not failed this very request, or all when every one has."""
    fresh = [index for index, candidate in enumerate(candidates) if not candidate.failed_before]
    return fresh or list(range(len(candidates)))
