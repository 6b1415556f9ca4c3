"""The simulated model's idea of English: which token may follow which, learned by counting a small corpus.

Pure choice: the same digest after the same two tokens gives the same next token on every worker. It knows nothing
of where a digest comes from.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise
from typing import Final

ENDING_ODDS: Final = 12
"""After a finished sentence, one digest in this many ends the text: answers of a few hundred tokens."""

# Low bits choose the successor; these two draws must not depend on them.
_ENDING_SHIFT: Final = 40
_WANDER_SHIFT: Final = 52
_WANDER_MASK: Final = 3

_SENTENCE_END: Final = re.compile(r"(?<=[.!?])\s+")

Successors = tuple[int, ...]


class Language:
    """Successor tables over token ids.

    A pair of tokens names its successors; where it knows none, or one time in four where it knows only the start of
    one word, the last token alone does. (Without that a long pair chain would recite the corpus, and two contexts that
    once met would read the same for ever: a wrong context must show. Inside a word the pair decides, or words break.)
    """

    __slots__ = ("_after_one", "_after_two", "_ends", "_new_words_after", "_starters", "_word_starts", "eos_token_id")

    def __init__(
        self,
        passages: Iterable[Sequence[int]],
        *,
        starters: Sequence[int],
        ends: Collection[int],
        word_starts: Collection[int],
        eos_token_id: int,
    ) -> None:
        """`passages` are token ids of running text; `starters` may begin a text, `ends` may finish a sentence, and
        `word_starts` do not continue a word that the token before has begun."""
        after_one: defaultdict[int, list[int]] = defaultdict(list)
        after_two: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for passage in passages:
            for before, token in pairwise(passage):
                after_one[before].append(token)
            for earlier, before, token in zip(passage, passage[1:], passage[2:], strict=False):
                after_two[earlier, before].append(token)
        if not starters:
            raise ValueError("a language needs at least one token to start a text with")
        self.eos_token_id = eos_token_id
        self._starters = tuple(starters)
        self._ends = frozenset(ends)
        self._word_starts = frozenset(word_starts)
        self._after_one = {key: tuple(tokens) for key, tokens in after_one.items()}
        self._after_two = {key: tuple(tokens) for key, tokens in after_two.items()}
        self._new_words_after = {
            key: tuple(token for token in tokens if token in self._word_starts) for key, tokens in after_one.items()
        }

    @classmethod
    def from_corpus(
        cls,
        text: str,
        *,
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
        eos_token_id: int,
    ) -> Language:
        """Learn from paragraphs separated by blank lines. Any sentence may start a text."""
        passages: list[list[int]] = []
        starters: list[int] = []
        ends: set[int] = set()
        for paragraph in re.split(r"\n\s*\n", text):
            sentences = _SENTENCE_END.split(" ".join(paragraph.split()))
            for sentence in filter(None, sentences):
                token_ids = encode(sentence)
                starters.append(token_ids[0])
                ends.add(token_ids[-1])
            passages.append(encode(" ".join(sentences)))
        seen = sorted({token for passage in passages for token in passage})
        word_starts = [token for token in seen if not decode([token])[:1].isalnum()]
        return cls(passages, starters=starters, ends=ends, word_starts=word_starts, eos_token_id=eos_token_id)

    def next_token(self, digest: int, *, earlier: int, last: int, barred: Collection[int] = ()) -> int:
        """The token after `earlier`, `last`. `barred` tokens are never chosen (the end of text among them)."""
        if last in self._ends and (digest >> _ENDING_SHIFT) % ENDING_ODDS == 0 and self.eos_token_id not in barred:
            return self.eos_token_id
        choices = self._after_two.get((earlier, last))
        if choices is None:
            choices = self._after_one.get(last) or self._starters
        elif len(choices) == 1 and (digest >> _WANDER_SHIFT) & _WANDER_MASK == 0 and choices[0] in self._word_starts:
            choices = self._new_words_after[last]
        token = choices[digest % len(choices)]
        if token not in barred:
            return token
        return self._around(digest, choices=choices, barred=barred)

    def _around(self, digest: int, *, choices: Successors, barred: Collection[int]) -> int:
        """A choice that is not barred: among the same successors, else among the starters, else any token."""
        for candidates in (choices, self._starters):
            allowed = [token for token in candidates if token not in barred]
            if allowed:
                return allowed[digest % len(allowed)]
        token = 0
        while token in barred:
            token += 1
        return token
