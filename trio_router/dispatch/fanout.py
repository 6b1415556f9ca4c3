"""Whether a request of several samples becomes as many pairs. Pure.

Runtimes that start both legs at one time (SGLang) couple them by a rendezvous that serves one sample only; those that
run them in turn (vLLM) are not split, and neither is anything with media: each pair would process them anew, on both
legs.
"""

from __future__ import annotations

from enum import Enum, auto, unique


@unique
class Coupling(Enum):
    """How the legs of a pair are started."""

    SEQUENTIAL = auto()
    """Decode after prefill has ended."""
    PARALLEL = auto()
    """Both at one time."""


def pd_fanout_width(coupling: Coupling, *, n: int, preprocessed_media: bool, media_refs: bool) -> int | None:
    """How many pairs of one sample each a request is split into; None when it is not."""
    whole = coupling is Coupling.SEQUENTIAL or n <= 1 or preprocessed_media or media_refs
    return None if whole else n
