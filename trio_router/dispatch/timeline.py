"""When a request reached which point: plain marks on one clock, turned into a record at the end."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..observe.hooks import Outcome, RequestRecord


@dataclass(slots=True, kw_only=True)
class Timeline:
    """Seconds on trio's clock. The marks of the attempt that succeeded replace those of the ones before it."""

    request_id: str
    received_at: float
    prefill_started_at: float | None = None
    prefill_ended_at: float | None = None
    decode_started_at: float | None = None
    first_frame_at: float | None = None
    prefill_worker: str | None = None
    decode_worker: str | None = None
    attempts: int = 0
    frames: int = 0
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    workers_tried: list[str] = field(default_factory=list)

    def forget_attempt(self) -> None:
        """Forget the marks of the attempt before; `attempts` and `workers_tried` go on."""
        self.prefill_started_at = self.prefill_ended_at = self.decode_started_at = self.first_frame_at = None
        self.prefill_worker = self.decode_worker = None

    def record(self, outcome: Outcome, *, now: float, error_code: str | None, client: str) -> RequestRecord:
        """The whole story, frozen."""
        return RequestRecord(
            request_id=self.request_id,
            outcome=outcome,
            error_code=error_code,
            attempts=self.attempts,
            prefill_worker=self.prefill_worker,
            decode_worker=self.decode_worker,
            received_at=self.received_at,
            prefill_started_at=self.prefill_started_at,
            prefill_ended_at=self.prefill_ended_at,
            decode_started_at=self.decode_started_at,
            first_frame_at=self.first_frame_at,
            ended_at=now,
            finish_reason=self.finish_reason,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            frames=self.frames,
            client=client,
            workers_tried=tuple(self.workers_tried),
        )
