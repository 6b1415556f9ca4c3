"""A request under way, as the router sees it from outside: its scope, its attempt, and how it ends."""

from __future__ import annotations

from typing import Final

import trio

from ..errors import DecodeError, DecodeFailed, RequestAborted, RequestTimeout, RouterError
from ..observe.hooks import Outcome
from ..protocol.codec import decode
from ..protocol.messages import GenerateResponse
from .attempt import Attempt, AttemptState
from .stream import GenerateStream
from .timeline import Timeline

_TIE: Final = 0.001
"""Seconds. Which of two scopes with one deadline notices first is a matter of rounding."""


class LiveRequest:
    """Made when a request is accepted. `deadline` is on trio's clock. `outcome` and `code` are what its record will
    say if it ended now.
    """

    __slots__ = ("_ended_by", "abort_asked", "attempt", "client_id", "code", "outcome", "scope", "timeline")

    def __init__(self, client_id: str, *, deadline: float, timeline: Timeline) -> None:
        self.client_id = client_id
        self.timeline = timeline
        self.scope = trio.CancelScope(deadline=deadline)
        self.attempt: Attempt | None = None
        self.abort_asked = False
        """Its worker has been asked to abort it."""
        self.outcome = Outcome.CLIENT_LEFT
        self.code: str | None = None
        self._ended_by: tuple[Outcome, RouterError] | None = None

    def __repr__(self) -> str:
        return f"<LiveRequest {self.client_id} {self.attempt!r}>"

    @property
    def streaming(self) -> bool:
        """The client may have had frames."""
        return self.attempt is not None and self.attempt.state is AttemptState.STREAMING

    def end(self, outcome: Outcome, error: RouterError) -> None:
        """End it on the router's own account: its scope is cancelled and `error` raised in its task. The first reason
        is kept.
        """
        self._ended_by = self._ended_by or (outcome, error)
        self.scope.cancel()

    # Called in the request's own task

    def check_scope(self) -> None:
        """Raise what the scope was cancelled for, if it was."""
        if self.scope.cancelled_caught:
            late = RequestTimeout(f"request {self.client_id}: its deadline has passed")
            self.outcome, error = self._ended_by or (Outcome.TIMEOUT, late)
            raise error

    def note_cancelled(self) -> None:
        """Cancelled from outside, which is how a client's leaving arrives. The router's own reason, if it had one, came
        first; and a front keeps its client's deadline as well as we do.
        """
        if self._ended_by is not None:
            self.outcome, error = self._ended_by
            self.code = error.error_code
        elif trio.current_time() >= self.scope.deadline - _TIE:
            self.outcome, self.code = Outcome.TIMEOUT, RequestTimeout.code

    def note_failed(self, code: str) -> None:
        """The request's task raises an error with this code."""
        self.code = code
        if self.outcome in (Outcome.CLIENT_LEFT, Outcome.OK):
            self.outcome = Outcome.FAILED

    def note_stream(self, stream: GenerateStream) -> None:
        """The caller is done with its stream."""
        if not stream.ended_well or stream.last_complete is None:
            return
        self.outcome = Outcome.OK
        try:
            last = decode(GenerateResponse, stream.last_complete).complete
        except DecodeError:
            self.note_failed(DecodeFailed.code)
            return
        timeline = self.timeline
        timeline.finish_reason = last.finish_reason
        timeline.prompt_tokens = timeline.prompt_tokens or last.prompt_tokens
        if timeline.prefill_worker is None:
            # A decode worker counts what it was handed as cached, which says nothing of the caches.
            timeline.cached_tokens = last.cached_tokens
        if last.finish_reason == "error":
            self.note_failed(DecodeFailed.code)
        elif last.finish_reason == "abort" and self.abort_asked:
            self.outcome, self.code = Outcome.ABORTED, RequestAborted.code
