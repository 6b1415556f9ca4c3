"""Where the front's tokenizer comes from: a directory, or the bundle that a worker hands out.

Loading is blocking work and goes through `offload`. Must not know requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Final, Protocol

import trio

from ..errors import RouterError, WorkerUnavailable
from ..offload import Offload, inline
from ..text.bundle import TokenizerFiles, unpack
from ..text.tokenizer import Tokenizer, load

_RETRY_SECONDS: Final = 1.0
_log = logging.getLogger(__name__)


class BundleSource(Protocol):
    """Who has tokenizer bundles."""

    def models(self) -> list[str]:
        """Names of the models that can be served now."""

    async def tokenizer_bundle(self, model: str) -> tuple[bytes, str]:
        """A model's archive and the SHA-256 claimed for it; raises WorkerUnavailable when nobody has one."""


class LoadedText:
    """A TextSource with one tokenizer for every model, there from the start."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def ready(self) -> bool:
        return True

    async def get(self, model: str) -> Tokenizer:
        return self._tokenizer


class BundleText:
    """A TextSource that loads the tokenizer of each model from its workers once, and then keeps it.

    `clock` is what a chat template that asks for the date gets. `adapt` may change the files before they are loaded, to
    put another template in say.
    """

    def __init__(
        self,
        source: BundleSource,
        *,
        offload: Offload = inline,
        clock: Callable[[], datetime] | None = None,
        adapt: Callable[[TokenizerFiles], TokenizerFiles] = lambda files: files,
    ) -> None:
        self._source = source
        self._adapt = adapt
        self._offload = offload
        self._clock = clock
        self._tokenizers: dict[str, Tokenizer] = {}
        self._loading = trio.Lock()

    def __repr__(self) -> str:
        return f"<BundleText {self._tokenizers}>"

    @property
    def ready(self) -> bool:
        return bool(self._tokenizers)

    async def get(self, model: str) -> Tokenizer:
        """As TextSource, for a model that is served; of many callers one loads. Raises BadBundle for a bundle that
        cannot be used.
        """
        if model not in self._tokenizers:
            async with self._loading:
                if model not in self._tokenizers:
                    archive, sha256 = await self._source.tokenizer_bundle(model)
                    self._tokenizers[model] = await self._offload(partial(self._load, archive, sha256=sha256))
        return self._tokenizers[model]

    def _load(self, archive: bytes, *, sha256: str) -> Tokenizer:
        return prepare(self._adapt(unpack(archive, sha256=sha256)), clock=self._clock)

    async def warm(self) -> None:
        """Try until the tokenizers of what is served are there, so that readiness does not wait for a first request.
        Cancel it at will.
        """
        while True:
            models = self._source.models()
            try:
                for model in models:
                    await self.get(model)
                if models:
                    return
            except WorkerUnavailable as exc:
                _log.debug("no tokenizer yet: %s", exc)
            except RouterError as exc:
                _log.warning("the workers' tokenizer cannot be used: %s", exc)
            await trio.sleep(_RETRY_SECONDS)


def prepare(files: TokenizerFiles, *, clock: Callable[[], datetime] | None = None) -> Tokenizer:
    """Load a tokenizer and build the tables its first stream would wait for. Blocking; raises BadBundle."""
    tokenizer = load(files, clock=clock)
    tokenizer.detokenizer()
    return tokenizer
