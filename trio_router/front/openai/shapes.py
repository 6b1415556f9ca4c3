"""The JSON of answers: chat completions and text completions, whole and as events. Pure bytes, no protocol.

An event is a prefix that is made once per choice, the text as a JSON string, and a suffix.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

import msgspec

from .choice import Choice

FINGERPRINT: Final = "default"
DONE: Final = b"data: [DONE]\n\n"
encode: Final = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request, over all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Shape(Protocol):
    """How one kind of answer is written."""

    endpoint: ClassVar[str]
    """What records and metrics call the endpoint."""
    suffix: ClassVar[bytes]

    def prefix(self, index: int) -> bytes:
        """What comes before the text in an event of a choice."""

    def opening(self, index: int) -> bytes:
        """The event before a choice's first text; b"" for none."""

    def finish(self, choice: Choice) -> bytes:
        """The event that ends a choice."""

    def usage(self, usage: Usage) -> bytes:
        """The event that tells the usage."""

    def whole(self, texts: Iterable[tuple[Choice, str]], *, usage: Usage) -> bytes:
        """The answer to a client that does not stream."""


class _Answer:
    """What every event and answer of one response begins with."""

    event_kind: ClassVar[str]
    whole_kind: ClassVar[str]

    def __init__(self, *, response_id: str, created: int, model: str) -> None:
        self._id = response_id
        self._created = created
        self._model = model
        self._start = encode(self._fields(self.event_kind))[:-1] + b',"choices":['

    def usage(self, usage: Usage) -> bytes:
        return b"data: " + self._start + b'],"usage":' + encode(usage.as_json()) + b"}\n\n"

    def _fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": FINGERPRINT,
        }

    def _event(self, choice: dict[str, Any]) -> bytes:
        return b"data: " + self._start + encode(choice) + b"]}\n\n"

    def _whole(self, choices: list[dict[str, Any]], *, usage: Usage) -> bytes:
        return encode({**self._fields(self.whole_kind), "choices": choices, "usage": usage.as_json()})


class ChatShape(_Answer):
    """Chat completions."""

    event_kind = "chat.completion.chunk"
    whole_kind = "chat.completion"
    endpoint: ClassVar[str] = "chat"
    suffix: ClassVar[bytes] = b'},"logprobs":null,"finish_reason":null}]}\n\n'

    def prefix(self, index: int) -> bytes:
        return b'data: %b{"index":%d,"delta":{"role":"assistant","content":' % (self._start, index)

    def opening(self, index: int) -> bytes:
        return self.prefix(index) + b'""' + self.suffix

    def finish(self, choice: Choice) -> bytes:
        return self._event({"index": choice.index, "delta": {}, **_ending(choice)})

    def whole(self, texts: Iterable[tuple[Choice, str]], *, usage: Usage) -> bytes:
        choices = [
            {"index": choice.index, "message": {"role": "assistant", "content": text}, **_ending(choice)}
            for choice, text in texts
        ]
        return self._whole(choices, usage=usage)


class CompletionShape(_Answer):
    """Text completions."""

    event_kind = "text_completion"
    whole_kind = "text_completion"
    endpoint: ClassVar[str] = "completions"
    suffix: ClassVar[bytes] = b',"logprobs":null,"finish_reason":null}]}\n\n'

    def prefix(self, index: int) -> bytes:
        return b'data: %b{"index":%d,"text":' % (self._start, index)

    def opening(self, index: int) -> bytes:
        return b""

    def finish(self, choice: Choice) -> bytes:
        return self._event({"index": choice.index, "text": "", **_ending(choice)})

    def whole(self, texts: Iterable[tuple[Choice, str]], *, usage: Usage) -> bytes:
        choices = [{"index": choice.index, "text": text, **_ending(choice)} for choice, text in texts]
        return self._whole(choices, usage=usage)


def _ending(choice: Choice) -> dict[str, Any]:
    return {"logprobs": None, "finish_reason": choice.finish_reason, "matched_stop": choice.matched_stop}
