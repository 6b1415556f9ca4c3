"""Message content: which form a chat template expects, and bringing messages into it.

Pure functions over a parsed template and plain JSON values. This module must not know media: parts other than text are
the media plan's, which replaces them before a conversation comes here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import msgspec
from jinja2 import nodes

from trio_router.errors import BadRequest


class ContentFormat(Enum):
    """What a template does with a message's content."""

    # Prints it: content must be a string.
    TEXT = "text"
    # Goes through it: content must be a list of typed parts.
    PARTS = "parts"
    # Asks whether it is a string: content may be as the client sent it.
    EITHER = "either"


def detect_content_format(template: nodes.Template) -> ContentFormat:
    """Tell from a parsed template what it wants: a loop over the content of a message wants parts.

    Content is followed through `set` and into macros, by name. A template that loops over nothing wants text.
    """
    contents = _content_names(template)
    loops = (loop for loop in template.find_all(nodes.For) if _is_content(_unfiltered(loop.iter), names=contents))
    if next(loops, None) is None:
        return ContentFormat.TEXT
    asks = (test for test in template.find_all(nodes.Test) if test.name == "string")
    return ContentFormat.EITHER if any(_is_content(test.node, names=contents) for test in asks) else ContentFormat.PARTS


def _content_names(template: nodes.Template) -> frozenset[str]:
    """The variables and macro parameters that hold a message's content somewhere in the template."""
    macros = {macro.name: macro for macro in template.find_all(nodes.Macro)}
    names: set[str] = set()
    # A name may be passed on several times; each round follows one more link.
    while True:
        found = set(names)
        for assignment in template.find_all(nodes.Assign):
            target = assignment.target
            if isinstance(target, nodes.Name) and _is_content(_unfiltered(assignment.node), names=names):
                found.add(target.name)
        for call in template.find_all(nodes.Call):
            macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
            if macro is not None:
                pairs = zip(macro.args, call.args, strict=False)
                found |= {parameter.name for parameter, value in pairs if _is_content(value, names=names)}
        if found == names:
            return frozenset(names)
        names = found


def _is_content(node: nodes.Node, *, names: Iterable[str]) -> bool:
    """`message.content`, `message['content']`, `messages[0].content`, `message.get('content')`, or a name for one."""
    match node:
        case nodes.Name():
            return node.name in names
        case nodes.Getattr():
            return node.attr == "content"
        case nodes.Getitem():
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value="content"), *_]):
            return True
        case _:
            return False


def _unfiltered(node: nodes.Node) -> nodes.Node:
    """What a chain of filters starts from."""
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    return node


def shape_messages(messages: Iterable[Mapping[str, Any]], *, content_format: ContentFormat) -> list[dict[str, Any]]:
    """Copy messages into the form that the template expects.

    Text parts become one string, joined by line ends, or a string becomes one text part; the arguments of earlier tool
    calls, which the API carries as JSON text, become values. Content that is absent or null stays so. Raises
    BadRequest for a part that is not text where the template wants text.
    """
    return [_shape(message, content_format=content_format) for message in messages]


def _shape(message: Mapping[str, Any], *, content_format: ContentFormat) -> dict[str, Any]:
    shaped = dict(message)
    content = shaped.get("content")
    if isinstance(content, list) and content_format is ContentFormat.TEXT:
        shaped["content"] = "\n".join([_text_of(part) for part in content])
    elif isinstance(content, str) and content_format is ContentFormat.PARTS:
        shaped["content"] = [{"type": "text", "text": content}]
    calls = shaped.get("tool_calls")
    if isinstance(calls, list):
        shaped["tool_calls"] = [_with_arguments(call) if isinstance(call, dict) else call for call in calls]
    return shaped


def _text_of(part: object) -> str:
    match part:
        case str():
            return part
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)}:
            raise BadRequest(
                f"the model's chat template takes text only, a message has a part of type {kind!r}",
                code="multimodal_not_supported",
            )
        case _:
            raise BadRequest("a message's content part has no type", code="process_messages_failed")


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": _arguments(function["arguments"])}}


def _arguments(text: str) -> object:
    """A call's arguments as an object; text that is not one is left for the template to print."""
    if not text.strip():
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        return text
