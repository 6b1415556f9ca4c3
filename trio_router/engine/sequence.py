"""One choice of one request: its place in the engine, its context, and the state its KV has reached.

Pure. The phases are a table; the rest is arithmetic on slots. It does not decide when it runs, and it does not know
who listens to its tokens beyond the `Outlet` it was given.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import Enum, StrEnum, unique
from hashlib import blake2b
from typing import Final, Protocol

from .blocks import NO_PARENT, KvCache, block_hash, chain_hashes
from .handoff import NOTHING, Directive, Handoff, KvParams, Transfer
from .language import Language
from .sampling import SamplingPlan
from .state import ROOT, advance, fold
from .vision.visuals import Visuals, extras_of


@unique
class Phase(Enum):
    """Where a sequence stands in the engine."""

    WAITING = "waiting"
    PULLING = "pulling"
    RUNNING = "running"
    FINISHED = "finished"


_MOVES: Final = {
    Phase.WAITING: frozenset({Phase.PULLING, Phase.RUNNING, Phase.FINISHED}),
    Phase.PULLING: frozenset({Phase.RUNNING, Phase.FINISHED}),
    # A preempted sequence waits again, with everything it had said.
    Phase.RUNNING: frozenset({Phase.WAITING, Phase.FINISHED}),
    Phase.FINISHED: frozenset[Phase](),
}


@unique
class FinishReason(StrEnum):
    """Why a choice ended, as the wire spells it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The end of a choice."""

    reason: FinishReason
    matched: int | str | None = None
    """The stop token or stop string that ended it; None for the end of text."""
    kv_params: KvParams | None = None


class Outlet(Protocol):
    """Where a request's tokens go. Called by the engine between steps; must not block or raise."""

    def put(self, sequence: Sequence, *, token_ids: list[int], finish: Finish | None) -> None:
        """New tokens of a sequence, and its end with the last of them."""

    def fail(self, reason: EngineFailure) -> None:
        """The request ends without a frame of its own."""


@unique
class EngineFailure(Enum):
    """Why an engine gave a request up without finishing it."""

    DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    RAISED = ""


class StopText(Protocol):
    """Watches the text of one sequence for its stop strings."""

    def feed(self, token_id: int) -> str | None:
        """Take the next token; returns the stop string that it completes."""


class Sequence:
    """The engine's record of one choice. Fields are the engine's to change, through the methods where one exists."""

    __slots__ = (
        "_barred",
        "_barred_at_first",
        "_endings",
        "_eos_token_id",
        "_extras",
        "_first_parent",
        "_folded",
        "_hashes",
        "_inputs",
        "_plan",
        "_sampling_salt",
        "_slot",
        "blocks",
        "cached_tokens",
        "computed",
        "directive",
        "external_id",
        "index",
        "internal_id",
        "outlet",
        "phase",
        "prefill_end",
        "prompt_length",
        "pull",
        "rank",
        "ready_at",
        "stop_text",
        "token_limit",
        "tokens",
        "visuals",
    )

    def __init__(
        self,
        *,
        internal_id: str,
        external_id: str,
        index: int,
        prompt: list[int],
        plan: SamplingPlan,
        outlet: Outlet,
        context_limit: int,
        eos_token_id: int,
        seed: int = 0,
        rank: int = 0,
        directive: Directive = NOTHING,
        stop_text: StopText | None = None,
        visuals: Visuals | None = None,
        cache_salt: str | None = None,
    ) -> None:
        self.internal_id = internal_id
        self.external_id = external_id
        self.index = index
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self.outlet = outlet
        self.directive = directive
        self.stop_text = stop_text
        self.phase = Phase.WAITING
        self.rank = rank
        self.pull: Handoff | Transfer | None = directive.pull
        # The handoff's own report of the prefill's cache hits, where it carries one, replaces the local count.
        self.cached_tokens = 0
        self.ready_at: float | None = None
        limit = context_limit if plan.max_tokens is None else self.prompt_length + plan.max_tokens
        self.token_limit = min(limit, context_limit)
        self._plan = plan
        self._eos_token_id = eos_token_id
        self._endings = plan.stop_token_ids | {eos_token_id}
        self._barred = frozenset({eos_token_id}) if plan.ignore_eos else frozenset[int]()
        self._barred_at_first = self._barred | plan.stop_token_ids | {eos_token_id}
        self._sampling_salt = None if plan.greedy else advance(advance(ROOT, seed), index)
        self.visuals = visuals
        # What the model is fed: the tokens, and what media put in the place of some.
        self._inputs = self.tokens
        if visuals is not None:
            self._inputs = [visuals.values.get(place, token) for place, token in enumerate(prompt)]
            self._sampling_salt = fold(self._sampling_salt or ROOT, visuals.salt)
        self._extras: dict[int, bytes] | None = None
        self._first_parent = NO_PARENT if cache_salt is None else blake2b(cache_salt.encode(), digest_size=16).digest()
        self._hashes: list[bytes] = []
        self.blocks: list[int] = []
        self.computed = 0
        self.prefill_end = self.prompt_length
        self._folded = ROOT
        self._slot = ROOT

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.internal_id}[{self.index}] {self.phase.value}"
            f" {self.prompt_length}+{self.generated} tokens, {self.computed} computed>"
        )

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def is_prefilling(self) -> bool:
        """Whether there is more of the context to compute than the one token that a decode step computes."""
        return self.computed < self.prefill_end

    @property
    def lacks_pixels(self) -> bool:
        """Whether what is to be computed next needs pixels that this worker was not given."""
        visuals = self.visuals
        return visuals is not None and not visuals.has_pixels and self.computed < visuals.end

    def move(self, phase: Phase) -> None:
        """Change phase. Raises RuntimeError for a move that is not in the table: a bug of the engine's."""
        if phase not in _MOVES[self.phase]:
            raise RuntimeError(f"sequence {self.internal_id} cannot go from {self.phase.value} to {phase.value}")
        self.phase = phase

    def reusable_hashes(self, block_size: int) -> list[bytes]:
        """Content hashes of the blocks that a hit may cover: at least the last token is always computed afresh."""
        if not self._hashes:
            if self.visuals is not None:
                self._extras = extras_of(self.visuals, block_size=block_size)
            self._hashes = chain_hashes(
                self.tokens, block_size=block_size, parent=self._first_parent, extras=self._extras
            )
        return self._hashes[: (len(self.tokens) - 1) // block_size]

    def resume(self, cache: KvCache, *, length: int) -> None:
        """Take the state of the first `length` tokens from what the blocks hold, right or wrong."""
        size, memory = cache.block_size, cache.memory
        full, rest = divmod(length, size)
        folded = ROOT
        for block in self.blocks[:full]:
            folded = fold(folded, memory[block * size + size - 1])
        self._folded = folded
        self._slot = memory[self.blocks[full] * size + rest - 1] if rest else folded
        self.computed = length

    def compute(self, cache: KvCache, *, count: int) -> None:
        """Compute the KV of the next `count` tokens into this sequence's blocks; full ones become findable."""
        size, memory, blocks = cache.block_size, cache.memory, self.blocks
        slot, position = self._slot, self.computed
        # This loop and `sample` are what a token costs (with the frame's bytes, 3 us in all).
        for token in self._inputs[position : position + count]:
            slot = advance(slot, token)
            offset = position % size
            memory[blocks[position // size] * size + offset] = slot
            position += 1
            if offset == size - 1:
                slot = self._folded = fold(self._folded, slot)
                self._publish(cache, index=position // size - 1)
        self._slot = slot
        self.computed = position

    def publish(self, cache: KvCache) -> None:
        """Make every full block of the computed context findable, whoever computed it."""
        for index in range(self.computed // cache.block_size):
            self._publish(cache, index=index)

    def _publish(self, cache: KvCache, *, index: int) -> None:
        if index >= len(self._hashes):
            parent = self._hashes[-1] if self._hashes else self._first_parent
            start = index * cache.block_size
            extra = b"" if self._extras is None else self._extras.get(index, b"")
            block = array("I", self.tokens[start : start + cache.block_size])
            self._hashes.append(block_hash(parent, block, extra=extra))
        cache.publish(self.blocks[index], content=self._hashes[index])

    def sample(self, language: Language) -> int:
        """Choose and append the next token; the whole context must have been computed."""
        digest = fold(self._folded, self._slot)
        if self._sampling_salt is not None:
            digest = fold(digest, self._sampling_salt)
        tokens = self.tokens
        early = len(tokens) - self.prompt_length < self._plan.min_tokens
        barred = self._barred_at_first if early else self._barred
        earlier = tokens[-2] if len(tokens) > 1 else -1
        token = language.next_token(digest, earlier=earlier, last=tokens[-1], barred=barred)
        tokens.append(token)
        if self._inputs is not tokens:
            self._inputs.append(token)
        return token

    def judge(self, token: int) -> Finish | None:
        """Whether `token`, just sampled, ends the sequence."""
        if self.stop_text is None and token not in self._endings:
            return _TOO_LONG if len(self.tokens) >= self.token_limit else None
        plan = self._plan
        matched = self.stop_text.feed(token) if self.stop_text is not None else None
        if self.generated >= plan.min_tokens:
            if token == self._eos_token_id and not plan.ignore_eos:
                return _END_OF_TEXT
            if token in plan.stop_token_ids:
                return Finish(reason=FinishReason.STOP, matched=token)
            if matched is not None:
                return Finish(reason=FinishReason.STOP, matched=matched)
        return _TOO_LONG if len(self.tokens) >= self.token_limit else None

    def rewind(self) -> None:
        """Forget everything computed, but nothing said: the sequence was preempted and its blocks are gone."""
        self.blocks = []
        self.computed = 0
        self.prefill_end = len(self.tokens)
        self._folded = self._slot = ROOT
        # What was pulled is gone with the blocks, and the handoff behind it has been spent.
        self.pull = None


_END_OF_TEXT: Final = Finish(reason=FinishReason.STOP)
_TOO_LONG: Final = Finish(reason=FinishReason.LENGTH)
