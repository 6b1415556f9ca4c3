"""From what a client wrote to token ids: chat messages through the model's template, text through its tokenizer. Pure.

The functions here may take long for long prompts; the endpoints decide where they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from ...errors import BadRequest
from ...media.anchors import check_anchors
from ...media.items import MediaPlan, Modality
from ...media.specs import ModelSpec
from ...protocol.codec import make
from ...protocol.messages import TokenizedInput
from ...text.content import ContentFormat
from ...text.tokenizer import PromptTooLong, Tokenizer
from .parts import part_place, template_part
from .schema import ChatRequest, Message

NO_MEDIA: Final = MediaPlan()


def chat_messages(request: ChatRequest) -> list[dict[str, Any]]:
    """Messages as the template takes them, media as parts that say no more than what they are. Raises BadRequest for a
    part that is none.
    """
    return [_message(message, at=at) for at, message in enumerate(request.messages)]


def chat_prompt(
    request: ChatRequest,
    *,
    tokenizer: Tokenizer,
    max_tokens: int | None = None,
    plan: MediaPlan = NO_MEDIA,
    spec: ModelSpec | None = None,
) -> TokenizedInput:
    """Render and tokenize a conversation, one anchor for each item of its plan.

    `spec` is the model's family, if it takes media. Raises BadRequest, also for more than `max_tokens`.
    """
    messages = chat_messages(request)
    if tokenizer.template is None:
        raise BadRequest(
            "the model has no chat template; use /v1/completions, or give the router a template",
            code="process_messages_failed",
        )
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    # What the API has a field for cannot be overridden beside it.
    for name in ("messages", "tools", "add_generation_prompt"):
        variables.pop(name, None)
    if plan and spec is not None and tokenizer.template.content_format() is ContentFormat.TEXT:
        messages = [_with_anchors(message, spec=spec) for message in messages]
    text = tokenizer.template.render(
        messages, add_generation_prompt=request.add_generation_prompt is not False, **variables
    )
    prompt = text_prompt(text, tokenizer=tokenizer, add_special_tokens=False, max_tokens=max_tokens)
    if spec is not None:
        tokenize = partial(tokenizer.encode, add_special_tokens=False, max_tokens=None)
        check_anchors(prompt.input_ids, plan=plan, spec=spec, tokenize=tokenize)
    return prompt


def text_prompt(
    text: str, *, tokenizer: Tokenizer, add_special_tokens: bool, max_tokens: int | None = None
) -> TokenizedInput:
    """Tokenize a prompt; raises BadRequest for one that has no tokens, or more than `max_tokens`."""
    return _input(text, tokenizer.encode(text, add_special_tokens=add_special_tokens, max_tokens=max_tokens))


def completion_prompts(prompt: str | Sequence[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts of a text completion, each a text or token ids; raises BadRequest for mixtures and for none."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [[item for item in prompt if isinstance(item, int)]]
    if kinds in ({str}, {list}):
        return [item for item in prompt if not isinstance(item, int)]
    raise BadRequest("prompt must be a string, a list of strings, a list of token ids, or a list of lists of token ids")


def ids_prompt(token_ids: list[int], *, max_tokens: int | None = None) -> TokenizedInput:
    """A prompt that the client has tokenized; raises BadRequest for an empty one, or more than `max_tokens`."""
    if max_tokens is not None and len(token_ids) > max_tokens:
        raise PromptTooLong(f"the prompt has {len(token_ids)} tokens, the model's context {max_tokens}")
    return _input("", token_ids)


def _input(text: str, token_ids: list[int]) -> TokenizedInput:
    if not token_ids:
        raise BadRequest("the prompt is empty")
    return make(TokenizedInput, original_text=text, input_ids=token_ids)


def _message(message: Message, *, at: int) -> dict[str, Any]:
    content: Any = message.content
    if isinstance(content, list):
        content = [template_part(part, where=part_place(at, number)) for number, part in enumerate(content)]
    extras = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": message.tool_calls,
        "reasoning_content": message.reasoning_content,
    }
    known = {name: value for name, value in extras.items() if value is not None}
    return {"role": message.role, "content": content, **known}


def _with_anchors(message: dict[str, Any], *, spec: ModelSpec) -> dict[str, Any]:
    """For templates that print content: the anchors of a message, then its texts, each on a line, as vLLM has it."""
    content = message["content"]
    if not isinstance(content, list):
        return message
    anchors = [spec.anchors[Modality(part["type"])] for part in content if part["type"] != "text"]
    return {**message, "content": "\n".join([*anchors, *(part["text"] for part in content if part["type"] == "text")])}
