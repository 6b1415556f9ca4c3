"""Where a worker's frames become an answer: synchronous sinks, called by the reader of the worker's link.

Two of them over one base: `EventSink` writes server-sent events as tokens come, `TextSink` collects. Neither may
suspend. They must not know requests, routes or the router.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import betterproto

from ...errors import DecodeError, DecodeFailed, TooLarge
from ...protocol.codec import decode
from ...protocol.messages import GenerateComplete, GenerateResponse
from ...protocol.wire import scan_chunk
from .choice import Choice, TextRules
from .events import EventStream
from .shapes import Shape, encode

JOIN_ABOVE: Final = 64
"""Frames in one batch above which a choice's text goes out as one event: the client is behind the worker anyway, and
a batch may be a whole window (some 5,000 frames of 13 bytes), which as events would be a hundred times larger."""


class FrameSink:
    """Follows the choices of one GenerateRequest. The prompt's index shifts its choices: `first_index`."""

    def __init__(self, *, first_index: int, n: int, rules: TextRules) -> None:
        self.choices: dict[int, Choice] = {}
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.failed = False
        self._first_index = first_index
        self._n = n
        self._rules = rules

    def __call__(self, messages: list[bytes]) -> bool:
        """Take a batch of serialized GenerateResponses. Raises DecodeFailed for what no worker may send."""
        for message in messages:
            scanned = scan_chunk(message)
            if scanned is None:
                self._irregular(message)
            else:
                self._tokens(self.choices.get(scanned[4]) or self._open(scanned[4]), scanned[0])
        return True

    def connect(self, resume: Callable[[], None]) -> None:
        """The source of frames that follows is to be told by `resume` when a full sink has room again."""

    def disconnect(self) -> None:
        """The source is over."""

    @property
    def completion_tokens(self) -> int:
        """Counted from the chunks: a complete frame only repeats the last of them."""
        return sum(choice.tokens for choice in self.choices.values())

    def _say(self, choice: Choice, text: str) -> None:
        """Some more text of a choice, not empty."""
        raise NotImplementedError

    def _finished(self, choice: Choice) -> None:
        """A choice has its finish reason and will say nothing more."""

    def _open(self, index: int) -> Choice:
        if index >= self._n:
            raise DecodeFailed(f"the worker sent choice {index} of a request for {self._n}")
        choice = self.choices[index] = Choice(self._first_index + index, rules=self._rules)
        return choice

    def _tokens(self, choice: Choice, token_ids: list[int]) -> None:
        choice.tokens += len(token_ids)
        text = choice.text(token_ids)
        if text:
            self._say(choice, text)

    def _irregular(self, message: bytes) -> None:
        """Anything but a plain chunk: decode it."""
        try:
            response = decode(GenerateResponse, message)
        except DecodeError as exc:
            raise DecodeFailed("the worker sent a frame that is no GenerateResponse") from exc
        _, frame = betterproto.which_one_of(response, "response")
        if frame is None:
            return  # a kind of frame that this build has never heard of
        choice = self.choices.get(frame.index) or self._open(frame.index)
        if isinstance(frame, GenerateComplete):
            self._complete(choice, frame)
        else:
            self._tokens(choice, frame.token_ids)

    def _complete(self, choice: Choice, frame: GenerateComplete) -> None:
        self.prompt_tokens = max(self.prompt_tokens, frame.prompt_tokens)
        self.cached_tokens = max(self.cached_tokens, frame.cached_tokens)
        if choice.tokens == 0 and frame.output_ids:
            self._tokens(choice, frame.output_ids)  # a worker that did not stream: nothing is repeated
        if frame.finish_reason == "error":
            self.failed = True
            return
        rest = choice.finish(frame)
        if rest:
            self._say(choice, rest)
        self._finished(choice)


class TextSink(FrameSink):
    """Collects each choice's text, up to a bound over all of them."""

    def __init__(self, *, first_index: int, n: int, rules: TextRules, max_chars: int) -> None:
        super().__init__(first_index=first_index, n=n, rules=rules)
        self._texts: dict[int, list[str]] = {}
        self._chars_left = max_chars

    def text_of(self, choice: Choice) -> str:
        """All that the choice has said."""
        return "".join(self._texts.get(choice.index, ()))

    def _say(self, choice: Choice, text: str) -> None:
        self._chars_left -= len(text)
        if self._chars_left < 0:
            raise TooLarge("the response is too large to be collected; stream it instead", code="response_too_large")
        self._texts.setdefault(choice.index, []).append(text)


class EventSink(FrameSink):
    """Writes an event per frame while the client keeps up; text of a client that is behind is held and joined.

    What is held is bounded by the worker's stream window, since a full sink gets no more credit.
    """

    def __init__(self, events: EventStream, *, shape: Shape, first_index: int, n: int, rules: TextRules) -> None:
        super().__init__(first_index=first_index, n=n, rules=rules)
        self._events = events
        self._shape = shape
        self._joining = False
        self._held: dict[Choice, list[str]] = {}
        self._ready: list[bytes] = []

    def __call__(self, messages: list[bytes]) -> bool:
        """As the base; False when the client is behind."""
        events = self._events
        if events.full or self._held or len(messages) > JOIN_ABOVE:
            return self._join(messages)
        # The hot path: all that happens per token (bench/events.py). The base's loop with the fast way inlined.
        ready = self._ready
        choices = self.choices
        suffix = self._shape.suffix
        for message in messages:
            scanned = scan_chunk(message)
            if scanned is None:
                self._irregular(message)
                continue
            token_ids = scanned[0]
            choice = choices.get(scanned[4]) or self._open(scanned[4])
            if len(token_ids) == 1 and token_ids[0] not in choice.hidden:
                piece = choice.json_piece(token_ids[0])
                if piece is not None:
                    choice.tokens += 1
                    ready.append((choice.prefix or self._begin(choice)) + piece + suffix)
                    continue
            self._tokens(choice, token_ids)
        if ready:
            data = ready[0] if len(ready) == 1 else b"".join(ready)
            ready.clear()
            events.send(data)
        return not events.full

    def _join(self, messages: list[bytes]) -> bool:
        self._joining = True
        super().__call__(messages)
        self._joining = False
        return self.flush()

    def connect(self, resume: Callable[[], None]) -> None:
        self._events.attach(self, resume=resume)

    def disconnect(self) -> None:
        self._events.detach(self)

    def flush(self) -> bool:
        """Send what there is, but held text only to a client that is not behind; False when it is."""
        if self._held and not self._events.full:
            for choice, texts in self._held.items():
                self._add(choice, "".join(texts))
            self._held.clear()
        if self._ready:
            data = b"".join(self._ready)
            self._ready.clear()
            self._events.send(data)
        return not self._events.full

    def _say(self, choice: Choice, text: str) -> None:
        if self._joining:
            self._held.setdefault(choice, []).append(text)
        else:
            self._add(choice, text)

    def _finished(self, choice: Choice) -> None:
        held = self._held.pop(choice, None)
        if held is not None:
            self._add(choice, "".join(held))
        self._ready.append(self._shape.finish(choice))

    def _add(self, choice: Choice, text: str) -> None:
        prefix = choice.prefix or self._begin(choice)
        self._ready.append(prefix + encode(text) + self._shape.suffix)

    def _begin(self, choice: Choice) -> bytes:
        self._ready.append(self._shape.opening(choice.index))
        choice.prefix = self._shape.prefix(choice.index)
        return choice.prefix
