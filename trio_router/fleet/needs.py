"""What a request needs of its workers beyond being ready: for now, that they fetch its media themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import BadRequest, RouterError, WorkerUnavailable
from .client import WorkerFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaNeeds:
    """The schemes of a request's references, as its URLs spell them in lower case. Kept with the request: each choice
    of a worker is held against it, also those of later attempts.
    """

    schemes: frozenset[str]

    def met_by(self, facts: WorkerFacts) -> bool:
        """Whether a worker would take the references. What it says of itself may change with every probe."""
        return takes_media(facts) and not self._refused_by(facts)

    def _refused_by(self, facts: WorkerFacts) -> frozenset[str]:
        accepted = schemes_of(facts)
        # A worker that advertises none does not say what it refuses.
        return self.schemes - accepted if accepted else frozenset()

    def refusal(self, role: str, ready: Sequence[WorkerFacts], *, elsewhere: Sequence[WorkerFacts]) -> RouterError:
        """Why none of the workers that are ready for a leg will do; `elsewhere` are the other leg's."""
        able = [facts for facts in ready if takes_media(facts)]
        if able:
            refused = sorted(frozenset[str]().union(*(self._refused_by(facts) for facts in able)))
            known = sorted(frozenset[str]().union(*(schemes_of(facts) for facts in able)))
            return BadRequest(
                f"no {role} worker fetches media by {', '.join(map(repr, refused))}; schemes that are accepted:"
                f" {', '.join(known)}",
                code="media_ref_scheme_not_accepted",
            )
        if role == "decode" and any(takes_media(facts) for facts in elsewhere):
            return WorkerUnavailable(
                "the decode workers are started for language only (no vision, no media processor): they take no media"
                " references",
                code="pd_decode_language_model_only_media_refs",
            )
        return WorkerUnavailable(
            f"no {role} worker that is ready processes media itself (mm_processor)", code="no_media_ref_capable_worker"
        )


def takes_media(facts: WorkerFacts) -> bool:
    """Whether a worker fetches and processes media itself."""
    return bool(facts.server_info.mm_processor)


def schemes_of(facts: WorkerFacts) -> frozenset[str]:
    """The URL schemes that a worker says it fetches by; empty where it does not say."""
    return frozenset(filter(None, map(str.strip, facts.server_info.mm_media_ref_schemes.lower().split(","))))
