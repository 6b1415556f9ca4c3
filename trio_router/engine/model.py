"""The model a reference worker serves: its tokenizer, its language, and the files it hands out.

Reads a directory once; knows no requests. Several workers of one process share what was read.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from ..text.bundle import TokenizerFiles, pack_files, read_directory
from ..text.stops import StopMatcher
from ..text.tokenizer import Tokenizer, load
from .language import Language
from .sampling import SamplingPlan

ASSETS: Final = Path(__file__).parent / "assets"
"""The model that comes with the package."""
VISION: Final = ASSETS / "vision"
"""What its variant that says it sees has otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Everything that is read from a model directory."""

    directory: Path
    tokenizer: Tokenizer
    language: Language
    config: dict[str, Any]
    generation_config: dict[str, Any]
    bundle: bytes
    """The archive that GetTokenizer serves."""
    bundle_sha256: str

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size


@cache
def load_model(directory: Path = ASSETS, *, over: Path | None = None) -> Model:
    """Read a model directory: tokenizer files as any model has them, and a `corpus.txt` to learn English from. Files in
    the directory `over` take the place of those in it, or stand beside them.

    Blocks for about a tenth of a second. Raises BadBundle when tokenizer files are missing or malformed.
    """
    files = read_directory(directory)
    if over is not None:
        files = TokenizerFiles(contents={**files.contents, **read_directory(over).contents})
    tokenizer = load(files)
    config = files.json_object("config.json")
    bundle = pack_files(files)
    return Model(
        directory=directory,
        tokenizer=tokenizer,
        language=Language.from_corpus(
            (directory / "corpus.txt").read_text(encoding="utf-8"),
            encode=tokenizer.encode,
            decode=tokenizer.decode,
            eos_token_id=int(str(config["eos_token_id"])),
        ),
        config=config,
        generation_config=files.json_object("generation_config.json"),
        bundle=bundle,
        bundle_sha256=hashlib.sha256(bundle).hexdigest(),
    )


class StopStrings:
    """Watches the text of one sequence for its stop strings, token by token (a `StopText`)."""

    __slots__ = ("_detokenizer", "_matcher")

    def __init__(self, tokenizer: Tokenizer, *, plan: SamplingPlan) -> None:
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=plan.skip_special_tokens)
        self._matcher = StopMatcher(plan.stop)

    def feed(self, token_id: int) -> str | None:
        _text, matched = self._matcher.feed(self._detokenizer.step([token_id]))
        return matched
