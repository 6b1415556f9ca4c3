"""What the HTTP front asks of the rest of the router: small protocols, each easy to play in a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from ..media.mode import WorkerMedia
from ..media.specs import ModelFacts
from ..protocol.messages import GenerateRequest
from ..text.tokenizer import Tokenizer

Sink = Callable[[list[bytes]], bool]
"""Takes a batch of serialized GenerateResponses; False: give no more credit until `resume`."""


class GenerateStream(Protocol):
    """One request's frames, once the first of them is here."""

    @property
    def prompt_counts(self) -> tuple[int, int] | None:
        """Tokens of the prompt, and how many of them were cached, where the frames do not tell the truth of it."""

    async def pump(self, sink: Sink, *, tokens: Callable[[], int]) -> None:
        """Hand every batch to `sink` until the stream ends well, then ask `tokens` how many it has seen. Raises the
        error family, and what `sink` raises.
        """

    def resume(self) -> None:
        """The sink that said full has room again."""


class Router(Protocol):
    """Where requests go."""

    @property
    def ready(self) -> bool:
        """Every leg has a worker to go to."""

    def models(self) -> list[str]:
        """Names of the models that can be served now."""

    def generate(
        self, request: GenerateRequest | bytes, *, timeout: float | None, model: str | None, client: str
    ) -> AbstractAsyncContextManager[GenerateStream]:
        """Run a request; leaving the block ends it. Raises the error family."""


class TextSource(Protocol):
    """Where tokenizers come from."""

    @property
    def ready(self) -> bool:
        """A tokenizer is at hand."""

    async def get(self, model: str) -> Tokenizer:
        """The model's tokenizer; raises WorkerUnavailable (or BadBundle) when there is none yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """What a load balancer is told. Worker counts are left out when they are not known."""

    ready: bool
    reason: str = ""
    healthy_workers: int | None = None
    total_workers: int | None = None


ContextLength = Callable[[str], int | None]
"""For a model: how many tokens of prompt and answer its context holds. None: not known."""
SamplingDefaults = Callable[[str], Mapping[str, float]]
"""For a model: what its maker recommends for temperature, top_p, top_k, min_p and repetition_penalty."""
ModelFactsOf = Callable[[str], ModelFacts]
"""For a model: what its workers say of it."""
MediaFacts = Callable[[str], tuple[WorkerMedia, ...]]
"""For a model: what every registered worker of it says of media, whether it is ready or not."""
