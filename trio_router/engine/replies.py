"""Where a Generate call's tokens go: frames for its client, merged when the client lags.

The engine never waits for a client. While the transport is full, the tokens of each choice pile up as numbers (a
context at most), and leave as one chunk when there is room again, as vLLM merges its deltas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import trio

from ..protocol.messages import MediaIdentity
from .responses import ChoiceEncoder
from .sequence import EngineFailure, Finish, Sequence


class FrameSink(Protocol):
    """The part of a server call that replies need."""

    on_drained: Callable[[], None] | None

    def send_nowait(self, messages: list[bytes]) -> bool:
        """Queue frames; False when nothing more should be queued until `on_drained`."""

    def flush(self) -> None:
        """Write what is queued."""


class _Choice:
    """What is known of one choice, and what of it has not left."""

    __slots__ = ("encoder", "finish", "unsent")

    def __init__(self) -> None:
        self.encoder: ChoiceEncoder | None = None
        self.finish: Finish | None = None
        self.unsent: list[int] = []


class Replies:
    """The outlet of one Generate call. `done` is set when every choice's last frame has been queued, or on failure."""

    __slots__ = ("_choices", "_full", "_identity", "_open", "_sink", "_streaming", "_touched", "done", "failure")

    def __init__(
        self,
        sink: FrameSink,
        *,
        choices: int,
        streaming: bool,
        touched: Callable[[FrameSink], None],
        identity: MediaIdentity | None = None,
    ) -> None:
        """`touched` is told about the sink whenever frames wait in it for a flush; `identity` goes with every end."""
        self._identity = identity
        self.done = trio.Event()
        self.failure: EngineFailure | None = None
        self._sink = sink
        self._touched = touched
        self._streaming = streaming
        self._choices = [_Choice() for _ in range(choices)]
        self._open = choices
        self._full = False
        sink.on_drained = self._drained

    def __repr__(self) -> str:
        return f"<Replies {self._open} of {len(self._choices)} open{' full' if self._full else ''}>"

    # ---- the engine's side

    def put(self, sequence: Sequence, *, token_ids: list[int], finish: Finish | None) -> None:
        choice = self._choices[sequence.index]
        if choice.encoder is None:
            choice.encoder = ChoiceEncoder(
                index=sequence.index,
                prompt_tokens=sequence.prompt_length,
                cached_tokens=sequence.cached_tokens,
                identity=self._identity,
            )
        if finish is None and self._streaming and not self._full:
            # The usual token: no bookkeeping beyond the bytes.
            self._full = not self._sink.send_nowait([choice.encoder.chunk(token_ids)])
            self._touched(self._sink)
            return
        choice.unsent += token_ids
        choice.finish = finish
        if finish is not None:
            self._open -= 1
        if self._streaming:
            if not self._full:
                self._send_delta(choice)
        elif not self._open:
            self._send_everything()
        self._settle()

    def fail(self, reason: EngineFailure) -> None:
        self.failure = reason
        self.done.set()

    # ---- the client's side

    def _drained(self) -> None:
        self._full = False
        for choice in self._choices:
            if self._full:
                break
            if choice.unsent or choice.finish is not None:
                self._send_delta(choice)
        self._settle()
        self._sink.flush()

    def _send_delta(self, choice: _Choice) -> None:
        """One chunk with all that is unsent, and the end right behind it, which repeats the chunk's tokens."""
        encoder, token_ids, finish = choice.encoder, choice.unsent, choice.finish
        if encoder is None:
            return
        frames = [encoder.chunk(token_ids)]
        if finish is not None:
            frames.append(encoder.complete(token_ids, finish=finish))
        choice.unsent, choice.finish = [], None
        self._full = not self._sink.send_nowait(frames)
        self._touched(self._sink)

    def _send_everything(self) -> None:
        frames = [
            choice.encoder.complete(choice.unsent, finish=choice.finish)
            for choice in self._choices
            if choice.encoder is not None and choice.finish is not None
        ]
        for choice in self._choices:
            choice.unsent, choice.finish = [], None
        self._sink.send_nowait(frames)

    def _settle(self) -> None:
        if not self._open and all(choice.finish is None for choice in self._choices):
            self.done.set()
