"""Message content: which form a template wants, and messages brought into it."""

from __future__ import annotations

from typing import Any

import pytest

from trio_router.errors import BadRequest
from trio_router.text.content import ContentFormat, detect_content_format, shape_messages
from trio_router.text.sandbox import ChatEnvironment

TEXT, PARTS, EITHER = ContentFormat.TEXT, ContentFormat.PARTS, ContentFormat.EITHER
LOOP = "{% for m in messages %}BODY{% endfor %}"


def detect(source: str) -> ContentFormat:
    return detect_content_format(ChatEnvironment().parse(source))


class TestDetection:
    @pytest.mark.parametrize(
        "body",
        [
            "{% for p in m.content %}{{ p.text }}{% endfor %}",
            "{% for p in m['content'] %}{{ p.text }}{% endfor %}",
            "{% for p in m.get('content', []) %}{{ p.text }}{% endfor %}",
            "{% for p in m.content | selectattr('type', 'equalto', 'text') | list %}{{ p.text }}{% endfor %}",
            "{% set c = m.content %}{% set d = c %}{% for p in d %}{{ p.text }}{% endfor %}",
            "{% set c = m.content or [] %}{% for p in m.content if p.text %}{{ p.text }}{% endfor %}",
            "{% for p in messages[0].content %}{{ p.text }}{% endfor %}",
            "{% macro show(x, c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}{{ show(1, m.content) }}",
            "{% macro a(c) %}{{ b(c) }}{% endmacro %}{% macro b(d) %}{% for p in d %}{{ p }}{% endfor %}{% endmacro %}"
            "{{ a(m.content) }}",
        ],
    )
    def test_a_loop_over_content_wants_parts(self, body: str):
        assert detect(LOOP.replace("BODY", body)) is PARTS

    @pytest.mark.parametrize(
        "body",
        [
            "{{ m.content }}",
            "{{ m['content'] | trim }}",
            "{% for call in m.tool_calls %}{{ call }}{% endfor %}{{ m.content }}",
            "{% set c = m.content %}{% for tool in tools %}{{ tool }}{% endfor %}{{ c }}",
            "{% macro show(c) %}{% for p in c %}{{ p }}{% endfor %}{% endmacro %}{{ show(m.calls) }}{{ m.content }}",
            "{% if m.content is string %}{{ m.content }}{% endif %}",
        ],
    )
    def test_printing_content_wants_text(self, body: str):
        assert detect(LOOP.replace("BODY", body)) is TEXT

    @pytest.mark.parametrize(
        "body",
        [
            "{% if m.content is string %}{{ m.content }}{% endif %}{% for p in m.content %}{{ p.text }}{% endfor %}",
            "{% set c = m.content %}{% if c is not string %}{% for p in c %}{{ p.text }}{% endfor %}{% endif %}",
        ],
    )
    def test_a_template_that_asks_first_takes_either(self, body: str):
        assert detect(LOOP.replace("BODY", body)) is EITHER

    def test_asking_about_something_else_is_not_asking(self):
        body = "{% if m.name is string %}{% endif %}{% for p in m.content %}{{ p.text }}{% endfor %}"
        assert detect(LOOP.replace("BODY", body)) is PARTS


def shape_one(message: dict[str, Any], content_format: ContentFormat) -> dict[str, Any]:
    (shaped,) = shape_messages([message], content_format=content_format)
    return shaped


class TestShaping:
    TWO_PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]  # noqa: RUF012 - read only

    @pytest.mark.parametrize(
        ("content", "content_format", "expected"),
        [
            ("one", TEXT, "one"),
            (TWO_PARTS, TEXT, "one\ntwo"),
            (["one", {"type": "text", "text": "two"}], TEXT, "one\ntwo"),
            ([], TEXT, ""),
            ("one", PARTS, [{"type": "text", "text": "one"}]),
            (TWO_PARTS, PARTS, TWO_PARTS),
            ("one", EITHER, "one"),
            (TWO_PARTS, EITHER, TWO_PARTS),
            (None, TEXT, None),
            (None, PARTS, None),
        ],
    )
    def test_content(self, content: object, content_format: ContentFormat, expected: object):
        message = {"role": "user", "content": content, "name": "x"}
        assert shape_one(message, content_format) == {"role": "user", "content": expected, "name": "x"}

    def test_absent_content_stays_absent(self):
        assert shape_one({"role": "assistant"}, PARTS) == {"role": "assistant"}

    def test_media_for_a_text_template_is_refused_by_its_type(self):
        with pytest.raises(BadRequest, match="'image_url'") as caught:
            shape_one({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, TEXT)
        assert caught.value.error_code == "multimodal_not_supported"

    @pytest.mark.parametrize("part", [3, {}, {"type": 1}, None])
    def test_a_part_without_a_type_is_refused(self, part: object):
        with pytest.raises(BadRequest, match="has no type"):
            shape_one({"content": [part]}, TEXT)

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ('{"b": 1, "a": [true]}', {"b": 1, "a": [True]}),
            ("", {}),
            (" ", {}),
            ("not json", "not json"),
            ("[1]", "[1]"),
            ({"already": 1}, {"already": 1}),
        ],
    )
    def test_arguments_of_earlier_calls_become_values(self, text: object, value: object):
        call = {"id": "c", "function": {"name": "f", "arguments": text}}
        message = {"role": "assistant", "content": "", "tool_calls": [call, "odd"]}
        shaped = shape_one(message, TEXT)
        assert shaped["tool_calls"] == [{"id": "c", "function": {"name": "f", "arguments": value}}, "odd"]
        assert call["function"] == {"name": "f", "arguments": text}, "the caller's message is left alone"
