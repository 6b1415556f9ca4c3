"""What the two generating endpoints share: from a parsed request and its prompts to an `Answer`.

Must not know how a prompt was made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ...errors import BadRequest, ModelNotFound, WorkerUnavailable
from ...media.items import MediaPlan
from ...offload import Offload, inline
from ...protocol.codec import encode, make
from ...protocol.messages import GenerateRequest, SamplingParams, TokenizedInput
from ...text.stops import StopAutomaton
from ...text.tokenizer import Tokenizer
from ..exchange import Exchange, is_request_id
from ..media import MediaDesk
from ..seams import ContextLength, Router, SamplingDefaults, TextSource
from ..settings import FrontSettings
from .choice import NOTHING_HIDDEN, TextRules
from .generation import Answer
from .sampling import stop_strings
from .schema import GenerationRequest
from .shapes import ChatShape, CompletionShape

NO_MEDIA: Final = MediaPlan()


def no_defaults(model: str) -> dict[str, float]:
    """For models without recommendations."""
    return {}


def any_length(model: str) -> None:
    """For models whose context length nobody tells: their workers judge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What an endpoint works with.

    `ids` gives the random part of response ids; `clock` is wall time in seconds.
    """

    router: Router
    texts: TextSource
    settings: FrontSettings
    ids: Callable[[], str]
    clock: Callable[[], float]
    offload: Offload = inline
    sampling_defaults: SamplingDefaults = no_defaults
    context_length: ContextLength = any_length
    media: MediaDesk = field(default_factory=MediaDesk)

    def is_long(self, body: bytes) -> bool:
        """Making a prompt of this body would keep other connections waiting: a thread should do it."""
        return len(body) >= self.settings.offload_bytes

    def check_choices(self, request: GenerationRequest, *, prompts: int) -> None:
        """Raise BadRequest for more choices than the settings allow."""
        n, limit = request.n or 1, self.settings.max_choices
        if n * prompts > limit:
            each = f" for each of {prompts} prompts" if prompts > 1 else ""
            raise BadRequest(f"n={n}{each} asks for {n * prompts} choices, more than the limit of {limit}")

    def model(self, wanted: str | None) -> str:
        """The model to use; the one there is when the client names none.

        Raises ModelNotFound, WorkerUnavailable, and BadRequest for a client that has to choose and does not.
        """
        models = self.router.models()
        if not models:
            raise WorkerUnavailable("no worker is ready")
        if wanted in models:
            return wanted
        if not wanted and len(models) == 1:
            return models[0]
        if not wanted:
            raise BadRequest(f"several models are served here: {', '.join(models)}; the request must name one")
        raise ModelNotFound(f"model {wanted!r} is not served here; served: {', '.join(models)}")


def answer_for(
    request: GenerationRequest,
    prompts: Sequence[TokenizedInput],
    *,
    exchange: Exchange,
    sampling: SamplingParams,
    shape: type[ChatShape | CompletionShape],
    id_prefix: str,
    model: str,
    tokenizer: Tokenizer,
    services: Services,
    media: MediaPlan = NO_MEDIA,
) -> Answer:
    """Decide everything else, the request's id included: the body's `rid`, the header's, or the response's own."""
    response_id = f"{id_prefix}{services.ids()}"
    request_id = request.rid or exchange.given_id or response_id
    if exchange.given_id is None and is_request_id(request_id):
        exchange.name(request_id)
    many = len(prompts) > 1
    options = request.stream_options
    return Answer(
        requests=[
            encode(
                make(
                    GenerateRequest,
                    request_id=f"{request_id}-p{at}" if many else request_id,
                    tokenized=prompt,
                    sampling_params=sampling,
                    stream=True,
                    media_refs=media.references() if media else None,
                )
            )
            for at, prompt in enumerate(prompts)
        ],
        n=request.n or 1,
        model=model,
        rules=text_rules(request, tokenizer=tokenizer),
        shape=shape(response_id=response_id, created=int(services.clock()), model=model),
        stream=bool(request.stream),
        include_usage=options is not None and bool(options.include_usage),
        holds_body="data" in media.schemes,
    )


def text_rules(request: GenerationRequest, *, tokenizer: Tokenizer) -> TextRules:
    """How the request's tokens become text: stop tokens end a choice and are not shown, unless asked for."""
    show_stops = bool(request.no_stop_trim)
    hidden = frozenset(request.stop_token_ids or ())
    if not request.ignore_eos:
        hidden |= tokenizer.eos_token_ids
    stops = stop_strings(request)
    return TextRules(
        tokenizer=tokenizer,
        skip_special_tokens=request.skip_special_tokens is not False,
        hidden=NOTHING_HIDDEN if show_stops else hidden,
        stops=StopAutomaton(stops) if stops else (),
        show_stops=show_stops,
    )
