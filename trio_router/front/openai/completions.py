"""POST /v1/completions: text or token ids, one prompt or several."""

from __future__ import annotations

from functools import partial

from ...errors import Unsupported
from ...protocol.messages import TokenizedInput
from ...text.tokenizer import Tokenizer
from ..exchange import Exchange
from .endpoint import Services, answer_for
from .generation import Answer, run_answer
from .prompts import completion_prompts, ids_prompt, text_prompt
from .sampling import sampling_params
from .schema import CompletionRequest, parse
from .shapes import CompletionShape


async def completions(exchange: Exchange, services: Services) -> None:
    """Answer a text completion. Raises the error family as long as nothing has gone out."""
    await run_answer(exchange, await _prepare(exchange, services), router=services.router, settings=services.settings)


# By itself, so that what it works with is gone when the answer, which may take half an hour, begins.
async def _prepare(exchange: Exchange, services: Services) -> Answer:
    request = parse(CompletionRequest, exchange.request.body)
    refuse_unsupported(request)
    prompts = completion_prompts(request.prompt)
    services.check_choices(request, prompts=len(prompts))
    model = services.model(request.model)
    sampling = sampling_params(request, max_tokens=request.max_tokens, defaults=services.sampling_defaults(model))
    tokenizer = await services.texts.get(model)
    tokenize = partial(
        _inputs,
        prompts,
        tokenizer=tokenizer,
        add_special_tokens=bool(request.add_special_tokens),
        max_tokens=services.context_length(model),
    )
    inputs = await services.offload(tokenize) if services.is_long(exchange.request.body) else tokenize()
    return answer_for(
        request,
        inputs,
        exchange=exchange,
        sampling=sampling,
        shape=CompletionShape,
        id_prefix="cmpl-",
        model=model,
        tokenizer=tokenizer,
        services=services,
    )


def refuse_unsupported(request: CompletionRequest) -> None:
    """Raise Unsupported for what would change the answer and is not built: better told than ignored."""
    if request.logprobs is not None:
        raise Unsupported("logprobs are not supported yet")
    if request.echo:
        raise Unsupported("echo is not supported")
    if request.suffix:
        raise Unsupported("suffix is not supported")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise Unsupported("best_of other than n is not supported")


def _inputs(
    prompts: list[str | list[int]], *, tokenizer: Tokenizer, add_special_tokens: bool, max_tokens: int | None
) -> list[TokenizedInput]:
    return [
        text_prompt(prompt, tokenizer=tokenizer, add_special_tokens=add_special_tokens, max_tokens=max_tokens)
        if isinstance(prompt, str)
        else ids_prompt(prompt, max_tokens=max_tokens)
        for prompt in prompts
    ]
