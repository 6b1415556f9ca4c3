"""POST /v1/chat/completions."""

from __future__ import annotations

from functools import partial

from ...errors import Unsupported
from ..exchange import Exchange
from .endpoint import Services, answer_for
from .generation import Answer, run_answer
from .parts import media_plan
from .prompts import chat_prompt
from .sampling import sampling_params
from .schema import ChatRequest, parse
from .shapes import ChatShape


async def chat_completions(exchange: Exchange, services: Services) -> None:
    """Answer a chat. Raises the error family as long as nothing has gone out."""
    await run_answer(exchange, await _prepare(exchange, services), router=services.router, settings=services.settings)


# By itself, so that what it works with is gone when the answer, which may take half an hour, begins.
async def _prepare(exchange: Exchange, services: Services) -> Answer:
    request = parse(ChatRequest, exchange.request.body)
    refuse_unsupported(request)
    services.check_choices(request, prompts=1)
    model = services.model(request.model)
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    plan = media_plan(request)
    sampling = sampling_params(request, max_tokens=max_tokens, defaults=services.sampling_defaults(model))
    is_long = services.is_long(exchange.request.body)
    if plan:
        # Its data: URLs are in the plan now, and may be most of it.
        exchange.drop_body()
        await services.media.admit(plan, model=model)
    tokenizer = await services.texts.get(model)
    render = partial(
        chat_prompt,
        request,
        tokenizer=tokenizer,
        max_tokens=services.context_length(model),
        plan=plan,
        spec=services.media.spec(model),
    )
    prompt = await services.offload(render) if is_long else render()
    return answer_for(
        request,
        [prompt],
        exchange=exchange,
        sampling=sampling,
        shape=ChatShape,
        id_prefix="chatcmpl-",
        model=model,
        tokenizer=tokenizer,
        services=services,
        media=plan,
    )


def refuse_unsupported(request: ChatRequest) -> None:
    """Raise Unsupported for what would change the answer and is not built: better told than ignored."""
    if request.logprobs or request.top_logprobs:
        raise Unsupported("logprobs are not supported yet")
    if (request.tools and request.tool_choice != "none") or request.functions:
        raise Unsupported("tools are not supported yet; leave them out or send tool_choice 'none'")
    if request.modalities and request.modalities != ["text"]:
        raise Unsupported(f"modalities {request.modalities}: only text is generated")
