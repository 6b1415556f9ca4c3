"""A stream of delta frames as the complete frames a client that does not stream expects. Pure.

Decode legs are always streamed upstream (I4); a complete frame there repeats only its choice's last delta, so the
output is put together from the chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..protocol.codec import decode, encode
from ..protocol.messages import GenerateComplete, GenerateResponse, InputLogProbs, OutputLogProbs
from ..protocol.wire import scan_chunk


@dataclass(slots=True)
class _Choice:
    output_ids: list[int] = field(default_factory=list)
    completion_tokens: int = 0
    output_logprobs: OutputLogProbs | None = None
    input_logprobs: InputLogProbs | None = None
    complete: GenerateComplete | None = None


class Aggregator:
    """Feed it every frame of a stream; `frames` then gives one complete frame per choice, in order of index."""

    def __init__(self) -> None:
        self._choices: dict[int, _Choice] = {}

    def feed(self, batch: list[bytes]) -> bool:
        """Take a batch; always wants more. Raises DecodeError for a frame that is no GenerateResponse."""
        for data in batch:
            plain = scan_chunk(data)
            if plain is not None:
                token_ids, _, completion_tokens, _, index = plain
                choice = self._choice(index)
                choice.output_ids += token_ids
                choice.completion_tokens += completion_tokens
            else:
                self._take(decode(GenerateResponse, data))
        return True

    def frames(self, *, prompt_counts: tuple[int, int] | None = None) -> list[bytes]:
        """The complete frames of all choices that have ended. `prompt_counts` are tokens of the prompt and how many of
        them were cached, where somebody else than the worker of these frames knows.
        """
        ended = [choice for _, choice in sorted(self._choices.items()) if choice.complete is not None]
        wholes = [_whole(choice) for choice in ended]
        if prompt_counts is not None:
            for whole in wholes:
                whole.prompt_tokens, whole.cached_tokens = prompt_counts
        return [encode(GenerateResponse(complete=whole)) for whole in wholes]

    def _choice(self, index: int) -> _Choice:
        return self._choices.setdefault(index, _Choice())

    def _take(self, response: GenerateResponse) -> None:
        if response._group_current.get("response") == "complete":
            self._choice(response.complete.index).complete = response.complete
            return
        chunk = response.chunk
        choice = self._choice(chunk.index)
        choice.output_ids += chunk.token_ids
        choice.completion_tokens += chunk.completion_tokens
        if chunk.output_logprobs.token_ids or chunk.output_logprobs.token_logprobs:
            choice.output_logprobs = _joined(choice.output_logprobs, chunk.output_logprobs)
        if chunk.input_logprobs.token_ids:
            choice.input_logprobs = chunk.input_logprobs


def _joined(before: OutputLogProbs | None, more: OutputLogProbs) -> OutputLogProbs:
    if before is None:
        return more
    before.token_ids += more.token_ids
    before.token_logprobs += more.token_logprobs
    before.top_logprobs += more.top_logprobs
    return before


def _whole(choice: _Choice) -> GenerateComplete:
    complete = choice.complete or GenerateComplete()
    if choice.output_ids or choice.completion_tokens:
        # Without any chunk the worker did not stream: its complete frame is whole already.
        complete.output_ids = choice.output_ids
        complete.completion_tokens = choice.completion_tokens
        if choice.output_logprobs is not None:
            complete.output_logprobs = choice.output_logprobs
    if choice.input_logprobs is not None:
        complete.input_logprobs = choice.input_logprobs
    return complete
