"""From what a client wrote to token ids."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import ClassVar

import msgspec
import pytest

from trio_router.errors import BadRequest
from trio_router.front.openai.parts import media_plan
from trio_router.front.openai.prompts import chat_messages, chat_prompt, completion_prompts, ids_prompt, text_prompt
from trio_router.front.openai.schema import ChatRequest, parse
from trio_router.media.items import Modality
from trio_router.media.specs import SPECS
from trio_router.protocol.messages import TokenizedInput
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


PICTURES = [
    {"role": "system", "content": "Look."},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "before"},
            {"type": "image_url", "image_url": "http://x/1"},
            {"type": "text", "text": "after"},
            {"type": "video_url", "video_url": {"url": "http://x/2"}},
        ],
    },
]
LOOPS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}|{% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}[{{ part.type }}]{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}"
)
PRINTS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


class AnchorTokenizer(FakeTokenizer):
    """One token for each of two anchors, one per character for the rest."""

    anchors: ClassVar = {"<i>": 1000, "<v>": 2000}

    def encode(self, text: str, *, add_special_tokens: bool, max_tokens: int | None) -> list[int]:
        pieces = re.split("(<i>|<v>)", text)
        ids = ([self.anchors[piece]] if piece in self.anchors else map(ord, piece) for piece in pieces)
        return [token for some in ids for token in some]


SPEC = replace(SPECS[0], anchors={Modality.IMAGE: "<i>", Modality.VIDEO: "<v>"})


def pictured(template: str, messages: list[dict] = PICTURES) -> TokenizedInput:
    request = chat(messages)
    return chat_prompt(request, tokenizer=AnchorTokenizer(template), plan=media_plan(request), spec=SPEC)


def test_a_template_over_parts_gets_media_where_they_are_as_nothing_but_their_kind() -> None:
    assert chat_messages(chat(PICTURES))[1]["content"] == [
        {"type": "text", "text": "before"},
        {"type": "image"},
        {"type": "text", "text": "after"},
        {"type": "video"},
    ]
    template = LOOPS.replace("[{{ part.type }}]", "{{ {'image': '<i>', 'video': '<v>'}[part.type] }}")
    assert pictured(template).original_text == "Look.|before<i>after<v>"


def test_a_template_over_text_gets_the_anchors_before_the_text() -> None:
    assert pictured(PRINTS).original_text == "system: Look.\nuser: <i>\n<v>\nbefore\nafter\n"


def test_the_ids_have_one_unexpanded_anchor_for_each_item() -> None:
    ids = pictured(PRINTS).input_ids
    assert [token for token in ids if token >= 1000] == [1000, 2000]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("what is <i>?", "2 of the token '<i>', each of which stands for one image, and the request has 1 image:"),
        ("<v><v>", "3 of the token '<v>', each of which stands for one video, and the request has 1 video:"),
    ],
)
def test_an_anchor_in_the_text_of_a_client_is_one_too_many(text: str, told: str) -> None:
    with pytest.raises(BadRequest) as caught:
        pictured(PRINTS, [{"role": "user", "content": text}, *PICTURES])
    assert caught.value.error_code == "multimodal_prompt_contract_mismatch"
    assert told in caught.value.message


def test_a_template_that_renders_no_anchors_is_found_out() -> None:
    with pytest.raises(BadRequest, match=r"has 0 of the token .* and the request has 1 image:") as caught:
        pictured(LOOPS)
    assert caught.value.error_code == "multimodal_prompt_contract_mismatch"


def test_a_request_without_media_may_not_have_anchors_either() -> None:
    with pytest.raises(BadRequest, match=r"has 1 of the token .* and the request has 0 images:"):
        pictured(PRINTS, [{"role": "user", "content": "what is <i>?"}])
    assert pictured(PRINTS, [{"role": "user", "content": "what is i?"}]).input_ids


def test_only_the_anchors_that_are_needed_must_be_in_the_tokenizer() -> None:
    request = chat([*PICTURES[:1], {"role": "user", "content": PICTURES[1]["content"][:2]}])
    spec = replace(SPEC, anchors={Modality.IMAGE: "<i>", Modality.VIDEO: "none such"})

    assert chat_prompt(request, tokenizer=AnchorTokenizer(PRINTS), plan=media_plan(request), spec=spec).input_ids


def test_a_tokenizer_that_has_no_token_for_an_anchor_is_told() -> None:
    request = chat(PICTURES)
    with pytest.raises(BadRequest, match=r"no token for '<\|image_pad\|>'") as caught:
        chat_prompt(request, tokenizer=AnchorTokenizer(PRINTS), plan=media_plan(request), spec=SPECS[0])
    assert caught.value.error_code == "invalid_multimodal_request"


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(BadRequest):
        ids_prompt([])
