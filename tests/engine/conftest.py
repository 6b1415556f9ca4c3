"""A toy language and sequences over it, so that the engine's pure parts need no tokenizer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from trio_router.engine.core import Core
from trio_router.engine.handoff import NOTHING, Directive
from trio_router.engine.language import Language
from trio_router.engine.sampling import SamplingPlan
from trio_router.engine.sequence import EngineFailure, Finish, Sequence
from trio_router.engine.settings import WorkerSettings

VOCABULARY = 64
EOS = 63
FULL_STOP = 62


@dataclass
class Listener:
    """An outlet that remembers."""

    token_ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    failure: EngineFailure | None = None

    def put(self, sequence: Sequence, *, token_ids: list[int], finish: Finish | None) -> None:
        assert self.finish is None, "nothing follows the end"
        self.token_ids += token_ids
        self.finish = finish

    def fail(self, reason: EngineFailure) -> None:
        self.failure = reason


def make_language() -> Language:
    """Any of sixty words may follow any other; nothing is rare, so texts of different contexts part at once."""
    rng = random.Random(1)
    words = list(range(60))
    passages = [rng.choices([*words, FULL_STOP], k=400) for _ in range(40)]
    return Language(passages, starters=words, ends={FULL_STOP}, eos_token_id=EOS)


@pytest.fixture(scope="session")
def language() -> Language:
    return make_language()


@pytest.fixture
def make_core(language: Language) -> Callable[..., Core]:
    def make(name: str = "w", **changes: Any) -> Core:
        small = {
            "block_size": 4,
            "num_blocks": 64,
            "max_num_seqs": 8,
            "max_context_length": 128,
            "max_batched_tokens": 32,
        }
        settings = WorkerSettings(name=name, **{"role": "prefill", **small, **changes})
        return Core(
            settings, language=language, engine_id=f"{name}-engine", transfer_address="10.0.0.1:7", draw=lambda: 0.5
        )

    return make


@pytest.fixture
def submit() -> Callable[..., tuple[Sequence, Listener]]:
    ids = itertools.count()

    def do(
        core: Core, prompt: list[int], *, directive: Directive = NOTHING, index: int = 0, seed: int = 0, **plan: Any
    ) -> tuple[Sequence, Listener]:
        listener = Listener()
        number = next(ids)
        sequence = Sequence(
            internal_id=f"r{number}",
            external_id=f"r{number}",
            index=index,
            prompt=prompt,
            plan=SamplingPlan(**{"max_tokens": 8, **plan}),
            outlet=listener,
            context_limit=core.settings.max_context_length,
            eos_token_id=EOS,
            seed=seed,
            directive=directive,
        )
        core.submit(sequence)
        return sequence, listener

    return do


@pytest.fixture
def run() -> Callable[[Core], None]:
    def do(core: Core, *, now: float = 0.0) -> None:
        """Step until nothing moves any more."""
        while True:
            assert not core.admit(now=now), "nothing here pulls"
            step = core.plan(now=now)
            if step is None:
                return
            core.perform(step, now=now)

    return do
