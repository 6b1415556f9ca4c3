"""From what a client wrote to token ids."""

from __future__ import annotations

import msgspec
import pytest

from trio_router.errors import BadRequest, Unsupported
from trio_router.front.openai.prompts import chat_messages, chat_prompt, completion_prompts, ids_prompt, text_prompt
from trio_router.front.openai.schema import ChatRequest, parse
from trio_router.text.template import ChatTemplate
from trio_router.text.tokenizer import PromptTooLong


def chat(messages: list[dict], **fields: object) -> ChatRequest:
    return parse(ChatRequest, msgspec.json.encode({"messages": messages, **fields}))


class FakeTokenizer:
    """Renders a template of the test's; one token per character."""

    def __init__(self, template: str | None) -> None:
        self.template = None if template is None else ChatTemplate(template)

    def encode(self, text: str, *, add_special_tokens: bool, max_tokens: int | None) -> list[int]:
        if max_tokens is not None and len(text) > max_tokens:
            raise PromptTooLong("too long")
        return [1] * add_special_tokens + [ord(character) for character in text]


def rendered(template: str, **fields: object) -> str:
    request = chat([{"role": "user", "content": "hi"}], **fields)
    return chat_prompt(request, tokenizer=FakeTokenizer(template)).original_text


def test_messages_keep_what_they_have_and_nothing_else() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "x", "name": "n"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "y", "tool_call_id": "1"},
        {"role": "user", "content": [{"type": "text", "text": "z"}]},
    ]

    assert chat_messages(chat(messages)) == messages


@pytest.mark.parametrize("kind", ["image_url", "video_url", "input_audio", "file"])
def test_a_part_that_is_not_text_is_named(kind: str) -> None:
    parts = [{"type": "text", "text": "look:"}, {"type": kind, kind: {}}]

    with pytest.raises(Unsupported) as caught:
        chat_messages(chat([{"role": "user", "content": "a"}, {"role": "user", "content": parts}]))

    assert caught.value.error_code == "multimodal_router_processing_unavailable"
    assert caught.value.message.startswith(f"messages[1].content[1] is of type '{kind}'")


def test_a_text_part_without_text_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"messages\[0\].content\[0\].text"):
        chat_messages(chat([{"role": "user", "content": [{"type": "text"}]}]))


def test_template_variables_are_passed_on() -> None:
    template = "{{ enable_thinking }} {{ reasoning_effort }} {{ add_generation_prompt }}"

    assert (
        rendered(template, chat_template_kwargs={"enable_thinking": False}, reasoning_effort="high")
        == "False high True"
    )


@pytest.mark.parametrize("name", ["self", "messages_", "context", "environment", "template", "a b", ""])
def test_a_template_variable_may_have_any_name(name: str) -> None:
    assert rendered("{{ messages[0].content }}", chat_template_kwargs={name: 1}) == "hi"


def test_what_the_api_has_fields_for_cannot_be_overridden() -> None:
    kwargs = {"messages": [], "add_generation_prompt": True, "tools": [1], "reasoning_effort": "low"}

    said = rendered(
        "{{ messages|length }} {{ add_generation_prompt }} {{ tools }} {{ reasoning_effort }}",
        chat_template_kwargs=kwargs,
        add_generation_prompt=False,
        reasoning_effort="high",
    )

    assert said == "1 False None low"


def test_a_model_without_a_template_says_what_to_do() -> None:
    request = chat([{"role": "user", "content": "hi"}])

    with pytest.raises(BadRequest, match="no chat template") as caught:
        chat_prompt(request, tokenizer=FakeTokenizer(None))

    assert caught.value.error_code == "process_messages_failed"


def test_special_tokens_are_added_to_text_only_when_asked_for() -> None:
    tokenizer = FakeTokenizer(None)

    assert text_prompt("a", tokenizer=tokenizer, add_special_tokens=False).input_ids == [97]
    assert text_prompt("a", tokenizer=tokenizer, add_special_tokens=True).input_ids == [1, 97]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts_come_in_four_forms(prompt, prompts) -> None:
    assert completion_prompts(prompt) == prompts


@pytest.mark.parametrize("prompt", [[], ["a", 1], [[1], 2], ["a", [1]]])
def test_mixtures_of_them_are_refused(prompt) -> None:
    with pytest.raises(BadRequest):
        completion_prompts(prompt)


def test_a_prompt_that_the_context_cannot_hold_is_refused() -> None:
    request = chat([{"role": "user", "content": "hi"}])

    with pytest.raises(PromptTooLong):
        chat_prompt(request, tokenizer=FakeTokenizer("abcdef"), max_tokens=5)
    with pytest.raises(PromptTooLong, match="the prompt has 6 tokens, the model's context 5"):
        ids_prompt([1] * 6, max_tokens=5)
    assert ids_prompt([1] * 5, max_tokens=5).input_ids == [1] * 5


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(BadRequest):
        ids_prompt([])
