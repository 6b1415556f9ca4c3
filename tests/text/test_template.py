"""Chat templates: the same prompt as the library they were written for, and every failure the caller's clear error."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from trio_router.errors import BadRequest
from trio_router.text import template as template_module
from trio_router.text.bundle import BadBundle, TokenizerFiles
from trio_router.text.content import ContentFormat
from trio_router.text.template import ChatTemplate, load_template

# Templates of ours that use what real ones use, rendered by transformers 5.24.0 (`render_jinja_template`, Jinja 3.1.6,
# its clock set to 9 March 2025, `<s>` and `</s>` as bos and eos token).
GOLDEN = json.loads((Path(__file__).parent / "golden_templates.json").read_text(encoding="utf-8"))
HELLO = [{"role": "user", "content": "hello"}]


def refused(template: ChatTemplate, messages: list[dict[str, Any]] = HELLO, **variables: Any) -> str:
    with pytest.raises(BadRequest) as caught:
        template.render(messages, **variables)
    assert caught.value.error_code == "process_messages_failed"
    return caught.value.message


class TestGolden:
    @pytest.mark.parametrize(
        "case",
        GOLDEN["cases"],
        ids=[f"{number} {case['template']}, {case['messages']}" for number, case in enumerate(GOLDEN["cases"])],
    )
    def test_renders_as_transformers_does(self, case: dict[str, Any]):
        template = ChatTemplate(
            GOLDEN["templates"][case["template"]],
            special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
            clock=lambda: datetime(2025, 3, 9),
        )
        assert template.render(GOLDEN["conversations"][case["messages"]], **case["arguments"]) == case["rendered"]


class TestVariables:
    def test_defaults_that_authors_rely_on_are_defined(self):
        source = "{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }} {{ bos_token is defined }}"
        assert ChatTemplate(source).render(HELLO) == "True True True False"

    def test_more_variables_are_passed_on_and_may_replace_special_tokens(self):
        template = ChatTemplate("{{ bos_token }}{{ enable_thinking }}", special_tokens={"bos_token": "<s>"})
        assert template.render(HELLO, enable_thinking=False) == "<s>False"
        assert template.render(HELLO, enable_thinking=1, bos_token="[B]") == "[B]1"

    def test_variables_cannot_replace_the_conversation(self):
        template = ChatTemplate("{{ messages[0].content }}")
        assert template.render(HELLO, messages=[{"content": "forged"}]) == HELLO[0]["content"]

    @pytest.mark.parametrize("name", ["self", "context", "environment", "caller"])
    def test_a_variable_may_have_any_name(self, name: str):
        assert ChatTemplate("{{ messages[0].content }}").render(HELLO, **{name: 1}) == HELLO[0]["content"]

    def test_without_a_clock_there_is_no_date_function(self):
        source = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}no clock{% endif %}"
        assert ChatTemplate(source).render(HELLO) == "no clock"
        assert ChatTemplate(source, clock=lambda: datetime(2031, 1, 1)).render(HELLO) == "2031"

    def test_one_render_leaves_nothing_for_the_next(self):
        template = ChatTemplate("{% set n = n|default(0) + 1 %}{{ n }}{{ x|default('-') }}")
        assert [template.render(HELLO, x=1), template.render(HELLO)] == ["11", "1-"]


class TestNamedTemplates:
    SOURCES = {"default": "plain", "tool_use": "with tools", "rag": "with documents"}  # noqa: RUF012 - read only
    TOOLS = [{"type": "function", "function": {"name": "f"}}]  # noqa: RUF012 - read only

    def test_tools_choose_the_template_for_tools(self):
        template = ChatTemplate(self.SOURCES)
        assert template.render(HELLO) == "plain"
        assert template.render(HELLO, tools=[]) == "plain"
        assert template.render(HELLO, tools=self.TOOLS) == "with tools"

    def test_without_one_for_tools_the_default_serves(self):
        assert ChatTemplate("one for all").render(HELLO, tools=self.TOOLS) == "one for all"

    def test_without_a_default_the_names_are_told(self):
        assert "no chat template named 'default', only rag" in refused(ChatTemplate({"rag": "x"}))


class TestContent:
    PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]  # noqa: RUF012

    def test_text_parts_are_joined_for_a_template_that_prints_content(self):
        template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
        assert template.content_format() is ContentFormat.TEXT
        assert template.render(self.PARTS) == "a\nb"

    def test_text_becomes_a_part_for_a_template_that_goes_through_parts(self):
        template = ChatTemplate("{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}")
        assert template.content_format() is ContentFormat.PARTS
        assert template.render(HELLO) == "[hello]"
        assert template.render(self.PARTS) == "[a][b]"

    def test_the_caller_s_messages_are_left_alone(self):
        ChatTemplate("{{ messages }}").render(self.PARTS)
        assert isinstance(self.PARTS[0]["content"], list)


class TestFailures:
    def test_the_template_s_own_words_reach_the_caller(self):
        template = ChatTemplate("{{ raise_exception('Roles must alternate!') }}")
        assert refused(template) == "the chat template failed: Roles must alternate!"

    def test_a_malformed_template_is_an_error_only_when_it_is_rendered(self):
        template = ChatTemplate("fine\n{% for m in messages %}{{ m.content }}")
        assert "malformed in line 2: Unexpected end of template" in refused(template)
        assert "malformed in line 2" in refused(template), "the second time as well"

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("{{ messages.nothing.more }}", "has no attribute 'nothing'"),
            ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
            ("{{ 'a' + 1 }}", "TypeError: can only concatenate str"),
            ("{% include 'other' %}", "no loader"),
            ("{{ 'x' | unheard_of }}", "No filter named 'unheard_of'"),
            ("{% unknown %}", "unknown tag 'unknown'"),
            ("{{ missing | tojson }}", "TypeError: Object of type Undefined is not JSON serializable"),
        ],
    )
    def test_any_failure_inside_is_told(self, source: str, message: str):
        assert message in refused(ChatTemplate(source))

    @pytest.mark.parametrize(
        "source",
        [
            "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
            "{{ " + "-" * 5000 + "1 }}",
            "{% if x %}" * 200 + "{% endif %}" * 200,
            "{{ " + "[" * 150 + "]" * 150 + " }}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        ],
        ids=["parentheses", "signs", "blocks", "lists", "a macro that calls itself"],
    )
    def test_nesting_without_end_is_an_error_like_others(self, source: str):
        try:
            ChatTemplate(source).render(HELLO)
        except BadRequest as error:
            assert error.error_code == "process_messages_failed"  # noqa: PT017 - some depths are within limits

    def test_a_huge_template_is_refused(self):
        message = refused(ChatTemplate("x" * (template_module.MAX_TEMPLATE_CHARACTERS + 1)))
        assert "262145 characters, the limit is 262144" in message


def files(**contents: str) -> TokenizerFiles:
    return TokenizerFiles(contents={name.replace("__", "."): text.encode() for name, text in contents.items()})


class TestLoading:
    def test_a_model_without_a_template_has_none(self):
        assert load_template(files(tokenizer_config__json="{}")) is None
        assert load_template(files()) is None
        assert load_template(files(tokenizer_config__json='{"chat_template": null}')) is None

    def test_the_forms_take_precedence_in_order(self):
        contents = {
            "tokenizer_config__json": '{"chat_template": "from the config"}',
            "chat_template__json": '{"chat_template": "from json"}',
            "chat_template__jinja": "from jinja",
        }
        found = []
        while contents:
            template = load_template(files(**contents))
            assert template is not None
            found.append(template.render(HELLO))
            contents.popitem()
        assert found == ["from jinja", "from json", "from the config"]

    def test_named_templates_are_read_from_their_list(self):
        named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
        template = load_template(files(tokenizer_config__json=json.dumps({"chat_template": named})))
        assert template is not None
        assert template.render(HELLO, tools=TestNamedTemplates.TOOLS) == "tools"

    def test_special_tokens_come_in_all_their_forms(self):
        config = {
            "chat_template": "{{ bos_token }} {{ eos_token }} {{ pad_token }} {{ image_token }} {{ unk_token }}",
            "bos_token": "<s>",
            "eos_token": {"content": "</s>", "lstrip": False},
            "pad_token": None,
            "extra_special_tokens": {"image_token": "<image>"},
        }
        special = {"bos_token": "[overruled]", "pad_token": "<pad>"}
        template = load_template(
            files(tokenizer_config__json=json.dumps(config), special_tokens_map__json=json.dumps(special))
        )
        assert template is not None
        assert template.render(HELLO) == "<s> </s> <pad> <image> "

    @pytest.mark.parametrize("value", [3, {"a": "b"}, [{"name": "default"}], ["x"], [{"name": 1, "template": "x"}]])
    def test_a_template_in_no_known_form_is_refused(self, value: object):
        with pytest.raises(BadBundle, match=r"chat_template in tokenizer_config\.json is neither"):
            load_template(files(tokenizer_config__json=json.dumps({"chat_template": value})))
