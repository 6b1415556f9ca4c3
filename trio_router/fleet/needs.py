"""What a request needs of its workers beyond being ready: for now, that they fetch its media themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import BadRequest, RouterError, WorkerUnavailable
from ..media.mode import WorkerMedia
from .client import WorkerFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaNeeds:
    """The schemes of a request's references, as its URLs spell them in lower case. Kept with the request: each choice
    of a worker is held against it, also those of later attempts.
    """

    schemes: frozenset[str]

    def met_by(self, facts: WorkerFacts) -> bool:
        """Whether a worker would take the references. What it says of itself may change with every probe."""
        media = facts.media()
        return media.accepts_references and not self._refused_by(media)

    def _refused_by(self, media: WorkerMedia) -> frozenset[str]:
        # A worker that advertises no schemes does not say what it refuses.
        return frozenset() if media.schemes is None else self.schemes - media.schemes

    def refusal(self, role: str, ready: Sequence[WorkerFacts], *, elsewhere: Sequence[WorkerFacts]) -> RouterError:
        """Why none of the workers that are ready for a leg will do; `elsewhere` are the other leg's."""
        able = [media for facts in ready if (media := facts.media()).accepts_references]
        if able:
            refused = sorted(frozenset[str]().union(*map(self._refused_by, able)))
            known = sorted(frozenset[str]().union(*(media.schemes or () for media in able)))
            return BadRequest(
                f"no {role} worker fetches media by {', '.join(map(repr, refused))}; schemes that are accepted:"
                f" {', '.join(known)}",
                code="media_ref_scheme_not_accepted",
            )
        if role == "decode" and any(facts.media().accepts_references for facts in elsewhere):
            return WorkerUnavailable(
                "the decode workers are started for language only (no vision, no media processor): they take no media"
                " references",
                code="pd_decode_language_model_only_media_refs",
            )
        return WorkerUnavailable(
            f"no {role} worker that is ready processes media itself (mm_processor)", code="no_media_ref_capable_worker"
        )
