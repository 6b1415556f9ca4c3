"""The hooks: records of what happened, and the object that takes them. A leaf: it knows nobody who calls it.

Logic calls an `Observer`; metrics, logs and the demo's picture are observers. An observer must not raise or suspend.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, unique


@unique
class Outcome(Enum):
    """How a request ended. Each request ends in exactly one (invariant I8)."""

    OK = "ok"
    FAILED = "failed"
    CLIENT_LEFT = "client_left"
    ABORTED = "aborted"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One ended request. Times are seconds on trio's clock; None where that point was never reached."""

    request_id: str
    outcome: Outcome
    error_code: str | None = None
    attempts: int = 0
    prefill_worker: str | None = None
    decode_worker: str | None = None
    received_at: float
    prefill_started_at: float | None = None
    prefill_ended_at: float | None = None
    decode_started_at: float | None = None
    first_frame_at: float | None = None
    ended_at: float
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    frames: int = 0
    client: str = "embedded"
    workers_tried: tuple[str, ...] = field(default=())


class Observer:
    """Does nothing; adapters override what they care about."""

    def request_started(self) -> None:
        """A request was accepted."""

    def request_ended(self, record: RequestRecord) -> None:
        """A request reached its one terminal state."""

    def request_refused(self, *, request_id: str, client: str, code: str) -> None:
        """A request was answered with an error, or left by its client, before it was accepted: it has no record.

        `request_id` is empty where it could not be read.
        """

    def media_resolved(self, *, model: str, mode: str, reason: str) -> None:
        """The media of a request are processed by the `router` or a `worker`, and why (`media.mode.Reason`)."""

    def attempt_failed(self, *, worker: str, role: str, code: str, will_retry: bool) -> None:
        """A try ended before the client had its first byte."""

    def pair_dispatched(self, *, connector: str, prefill_seconds: float, handoff_seconds: float) -> None:
        """A decode leg was dispatched behind a prefill leg, so long after that had ended."""

    def handoff_missing(self, *, worker: str) -> None:
        """A prefill leg that was asked for a handoff ended without one."""

    def prefill_skipped(self, *, reason: str) -> None:
        """A decode worker serves a request whole: `several_samples` or `empty_prefill_pool`."""

    def media_judged(self, *, request_id: str, outcome: str, detail: str | None) -> None:
        """A decode leg with media goes by an identity (`applied`), or fetches them again, and why: `several_samples`,
        `no_handoff`, `not_solicited`, `missing` or `invalid` (`detail` says what is wrong with the identity).
        """

    def breaker_changed(self, *, worker: str, state: str) -> None:
        """A worker's circuit breaker is `closed`, `open` or `half_open` now."""

    def handoff_ended(self, *, outcome: str) -> None:
        """A handoff reached `consumed`, `released`, `lapsed` or `invalid`."""

    def janitor_jobs(self, count: int) -> None:
        """The number of jobs the janitor holds has changed."""

    def worker_ready(self, *, worker: str, role: str, ready: bool) -> None:
        """A worker became routable, or ceased to be."""

    def channel_changed(self, *, worker: str, state: str, reason: str | None) -> None:
        """The connection to a worker became `idle`, `connecting`, `ready`, `backoff` or `closed`."""


class Observers(Observer):
    """Several observers as one, told in order."""

    def __init__(self, *members: Observer) -> None:
        self.members = members

    def request_started(self) -> None:
        for member in self.members:
            member.request_started()

    def request_ended(self, record: RequestRecord) -> None:
        for member in self.members:
            member.request_ended(record)

    def request_refused(self, *, request_id: str, client: str, code: str) -> None:
        for member in self.members:
            member.request_refused(request_id=request_id, client=client, code=code)

    def media_resolved(self, *, model: str, mode: str, reason: str) -> None:
        for member in self.members:
            member.media_resolved(model=model, mode=mode, reason=reason)

    def attempt_failed(self, *, worker: str, role: str, code: str, will_retry: bool) -> None:
        for member in self.members:
            member.attempt_failed(worker=worker, role=role, code=code, will_retry=will_retry)

    def pair_dispatched(self, *, connector: str, prefill_seconds: float, handoff_seconds: float) -> None:
        for member in self.members:
            member.pair_dispatched(
                connector=connector, prefill_seconds=prefill_seconds, handoff_seconds=handoff_seconds
            )

    def handoff_missing(self, *, worker: str) -> None:
        for member in self.members:
            member.handoff_missing(worker=worker)

    def prefill_skipped(self, *, reason: str) -> None:
        for member in self.members:
            member.prefill_skipped(reason=reason)

    def media_judged(self, *, request_id: str, outcome: str, detail: str | None) -> None:
        for member in self.members:
            member.media_judged(request_id=request_id, outcome=outcome, detail=detail)

    def breaker_changed(self, *, worker: str, state: str) -> None:
        for member in self.members:
            member.breaker_changed(worker=worker, state=state)

    def handoff_ended(self, *, outcome: str) -> None:
        for member in self.members:
            member.handoff_ended(outcome=outcome)

    def janitor_jobs(self, count: int) -> None:
        for member in self.members:
            member.janitor_jobs(count)

    def worker_ready(self, *, worker: str, role: str, ready: bool) -> None:
        for member in self.members:
            member.worker_ready(worker=worker, role=role, ready=ready)

    def channel_changed(self, *, worker: str, state: str, reason: str | None) -> None:
        for member in self.members:
            member.channel_changed(worker=worker, state=state, reason=reason)
