"""Chat templates: where a model keeps its own, and rendering one to the prompt it means.

The result must be the one that the model was trained on, to the character: variables, filters and whitespace follow the
transformers library, which the template was written for. It must not know tokens, nor HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jinja2

from trio_router.errors import BadRequest
from trio_router.text.bundle import BadBundle, TokenizerFiles
from trio_router.text.content import ContentFormat, detect_content_format, shape_messages
from trio_router.text.sandbox import ChatEnvironment

if TYPE_CHECKING:
    from datetime import datetime

MAX_TEMPLATE_CHARACTERS = 256 * 1024

# The tokens that a template may name, as tokenizer_config.json and special_tokens_map.json call them.
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """One model's template, or its named set of them; rendering may take long and is safe in any thread."""

    def __init__(
        self,
        source: str | Mapping[str, str],
        *,
        special_tokens: Mapping[str, str] | None = None,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        """Prepare a template.

        `source` is the template or, by name, several ("default", "tool_use"). `special_tokens` are the variables
        `bos_token`, `eos_token` and so on. `clock` serves a template's `strftime_now`, which is undefined without.
        A source that is no template is not an error until it is rendered.
        """
        self._sources = {"default": source} if isinstance(source, str) else dict(source)
        self._special_tokens = dict(special_tokens or {})
        self._environment = ChatEnvironment()
        if clock is not None:
            self._environment.globals["strftime_now"] = lambda form: clock().strftime(form)
        self._compiled: dict[str, tuple[jinja2.Template, ContentFormat]] = {}

    def __repr__(self) -> str:
        return f"<ChatTemplate {', '.join(self._sources)}>"

    def content_format(self, *, tools: bool = False) -> ContentFormat:
        """How this template wants a message's content. Raises BadRequest when it cannot be compiled."""
        return self._prepared(tools=tools)[1]

    def render(
        self,
        messages: Iterable[Mapping[str, Any]],
        /,  # a template's variables come from clients and may have any name, `self` for one
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **variables: object,
    ) -> str:
        """Render a conversation to the prompt.

        Messages are those of the chat API, as plain JSON values; content lists of text parts become what the template
        expects. `variables` are passed on to the template. Raises BadRequest (`process_messages_failed`) with the
        template's own message when it refuses the conversation, is malformed, leaves its sandbox, or costs too much.
        """
        template, content_format = self._prepared(tools=bool(tools))
        values: dict[str, Any] = {
            # Always defined, as their authors expect: many a template asks `tools is not none` and no more.
            "documents": None,
            **self._special_tokens,
            **variables,
            "messages": shape_messages(messages, content_format=content_format),
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._environment.render(template, values)
        except Exception as error:  # a template is a foreign program: it may fail in any way a program can
            raise _failed(error) from error

    def _prepared(self, *, tools: bool) -> tuple[jinja2.Template, ContentFormat]:
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        prepared = self._compiled.get(name)
        if prepared is None:
            prepared = self._compiled[name] = self._prepare(name)
        return prepared

    def _prepare(self, name: str) -> tuple[jinja2.Template, ContentFormat]:
        source = self._sources.get(name)
        if source is None:
            raise _refused(f"the model has no chat template named {name!r}, only {', '.join(self._sources)}")
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise _refused(f"the chat template has {len(source)} characters, the limit is {MAX_TEMPLATE_CHARACTERS}")
        try:
            return self._environment.from_string(source), detect_content_format(self._environment.parse(source))
        except Exception as error:  # as above; the parser, too, runs out of its stack in more ways than one
            raise _failed(error) from error


def _refused(message: str) -> BadRequest:
    return BadRequest(message, code="process_messages_failed")


def _failed(error: Exception) -> BadRequest:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return _refused(f"the chat template is malformed in line {error.lineno}: {error.message}")
    if isinstance(error, jinja2.TemplateError):
        return _refused(f"the chat template failed: {error.message}")
    if isinstance(error, RecursionError | MemoryError):
        return _refused("the chat template failed: it is nested too deeply")
    return _refused(f"the chat template failed: {type(error).__name__}: {error}")


def load_template(files: TokenizerFiles, *, clock: Callable[[], datetime] | None = None) -> ChatTemplate | None:
    """Find a model's chat template among its files; None when it has none.

    A file of its own (`chat_template.jinja`, then `chat_template.json`) comes before tokenizer_config.json, as the
    later of the forms. Raises BadBundle when one is malformed.
    """
    config = files.json_object("tokenizer_config.json")
    source: str | dict[str, str] | None = files.text("chat_template.jinja")
    if source is None:
        source = _source(files.json_object("chat_template.json").get("chat_template"), name="chat_template.json")
    if source is None:
        source = _source(config.get("chat_template"), name="tokenizer_config.json")
    if source is None:
        return None
    return ChatTemplate(source, special_tokens=_special_tokens(files, config=config), clock=clock)


def _source(value: object, *, name: str) -> str | dict[str, str] | None:
    """One template, or a list of {"name", "template"}."""
    if value is None or isinstance(value, str):
        return value
    named: dict[str, str] = {}
    for item in value if isinstance(value, list) else [value]:
        match item:
            case {"name": str(key), "template": str(template)}:
                named[key] = template
            case _:
                raise BadBundle(f"chat_template in {name} is neither a template nor a list of named templates")
    return named or None


def _special_tokens(files: TokenizerFiles, *, config: Mapping[str, object]) -> dict[str, str]:
    found: dict[str, str] = {}
    for source in (files.json_object("special_tokens_map.json"), config):
        extra = source.get("extra_special_tokens")
        names = {**extra} if isinstance(extra, dict) else {}
        for name, token in (names | {name: source.get(name) for name in _TOKEN_NAMES}).items():
            # Either the token itself or a record of how it is matched.
            content = token.get("content") if isinstance(token, dict) else token
            if isinstance(content, str):
                found[name] = content
    return found
