"""The visible text of one choice: token ids in, text out, until a stop or the worker's last word. Pure.

It must not know JSON shapes, nor who reads the text.
"""

from __future__ import annotations

from dataclasses import dataclass

import betterproto

from ...protocol.messages import GenerateComplete
from ...text.detokenizer import Detokenizer
from ...text.stops import StopAutomaton, StopMatcher
from ...text.tokenizer import Tokenizer

NOTHING_HIDDEN: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """How one request's tokens become text: shared by its choices.

    `hidden` are the token ids that end a choice and are not shown. `stops` end it, too, and are shown if `show_stops`.
    """

    tokenizer: Tokenizer
    skip_special_tokens: bool = True
    hidden: frozenset[int] = NOTHING_HIDDEN
    stops: StopAutomaton | tuple[str, ...] = ()
    show_stops: bool = False


class Choice:
    """One choice of a request, from its first token to its finish reason.

    `json_piece(id)` is the fast way: the token's text as a JSON string, if that is known without a look at what came
    before (it is then taken); the caller leaves `hidden` ids to `text`.
    """

    __slots__ = (
        "_detokenizer", "_matcher", "_over", "finish_reason", "hidden", "index", "json_piece", "matched_stop",
        "prefix", "tokens",
    )  # fmt: skip

    def __init__(self, index: int, *, rules: TextRules) -> None:
        self.index = index
        self.tokens = 0
        self.hidden = rules.hidden
        self.finish_reason: str | None = None
        self.matched_stop: str | int | None = None
        # The sink's: what it writes before each piece of text, empty until there was one.
        self.prefix = b""
        self._detokenizer: Detokenizer = rules.tokenizer.detokenizer(skip_special_tokens=rules.skip_special_tokens)
        self._matcher = StopMatcher(rules.stops, include=rules.show_stops) if rules.stops else None
        self._over = False
        self.json_piece = self._detokenizer.json_piece if self._matcher is None else _unknown

    def __repr__(self) -> str:
        return f"<Choice {self.index} {self.tokens} tokens, {self.finish_reason or ('over' if self._over else 'open')}>"

    def text(self, token_ids: list[int]) -> str:
        """Take the next ids; returns the text that can be shown now. After a stop there is none."""
        if self._over:
            return ""
        if not self.hidden.isdisjoint(token_ids):
            token_ids = token_ids[: next(at for at, token in enumerate(token_ids) if token in self.hidden)]
            self._end()
        return self._visible(self._detokenizer.step(token_ids))

    def finish(self, complete: GenerateComplete) -> str:
        """Take the worker's last frame; returns the text withheld so far. Sets the finish reason and what matched.

        A stop found here counts, whatever the worker says: it may have gone on before it noticed.
        """
        rest = ""
        if self._matcher is None or self._matcher.matched is None:
            rest = self._visible(self._detokenizer.flush())
            if self._matcher is not None:
                rest += self._matcher.flush()
        self.finish_reason = "stop" if self._over else complete.finish_reason
        matched = None if self._matcher is None else self._matcher.matched
        self.matched_stop = betterproto.which_one_of(complete, "matched_stop")[1] if matched is None else matched
        return rest

    def _visible(self, text: str) -> str:
        if self._matcher is None or not text:
            return text
        text, matched = self._matcher.feed(text)
        if matched is not None:
            self._end()
        return text

    def _end(self) -> None:
        self._over = True
        self.json_piece = _unknown


def _unknown(token_id: int) -> None:
    return None
