"""Logs, on stderr: how they are formatted, and the one line that every ended request gets.

Never in a log: prompts, generated text, URLs of media, payloads. Whoever needs more of a request has its id.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import Any, Final, TextIO

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import Processor

from .hooks import Observer, Outcome, RequestRecord

LEVELS: Final = ("debug", "info", "warning", "error")
_MAX_ID_CHARS: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """How much is logged, and in which form."""

    level: str = "info"
    json: bool = False


# What every entry gets, whoever made it.
_SHARED: Final[list[Processor]] = [
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]


def set_up_logging(settings: LogSettings, *, stream: TextIO | None = None) -> None:
    """Send everything that is logged in this process to `stream` (stderr by default), in one form.

    A process that embeds the router need not call it: without it, entries go wherever its own `logging` sends them.
    """
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_SHARED,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *(_json_form() if settings.json else _text_form(stream)),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    # Libraries tell at most what they call worth knowing: at debug level hpack writes every header, keys included.
    root.setLevel(max(level, logging.INFO))
    logging.getLogger("trio_router").setLevel(level)


# Tracebacks without the variables of their frames, which both forms show unless told otherwise: they hold what clients
# wrote, and drawing them takes a fifth of a second.
def _json_form() -> list[Processor]:
    tracebacks = structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False))
    return [tracebacks, structlog.processors.JSONRenderer()]


def _text_form(stream: TextIO) -> list[Processor]:
    plain = structlog.dev.plain_traceback
    return [structlog.dev.ConsoleRenderer(colors=stream.isatty(), pad_event_to=24, exception_formatter=plain)]


# What went wrong here or at a worker is worth a look; what a client decided is not.
_LEVEL_OF: Final = {
    Outcome.OK: logging.INFO,
    Outcome.CLIENT_LEFT: logging.INFO,
    Outcome.ABORTED: logging.INFO,
    Outcome.FAILED: logging.WARNING,
    Outcome.TIMEOUT: logging.WARNING,
}


class RequestLog(Observer):
    """One line for each request that has ended or was refused, and one for each worker that comes or goes."""

    def __init__(self) -> None:
        self._media_modes: dict[str, tuple[str, str]] = {}
        self._log: structlog.stdlib.BoundLogger = structlog.wrap_logger(
            logging.getLogger("trio_router.requests"),
            processors=[
                structlog.stdlib.filter_by_level,
                *_SHARED,
                structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
            ],
            wrapper_class=structlog.stdlib.BoundLogger,
        )

    def request_ended(self, record: RequestRecord) -> None:
        self._log.log(_LEVEL_OF[record.outcome], "request", **request_fields(record))

    def request_refused(self, *, request_id: str, client: str, code: str) -> None:
        known = {"request_id": _one_line(request_id)} if request_id else {}
        self._log.info("request", **known, outcome="refused", code=code, client=client)

    def media_resolved(self, *, model: str, mode: str, reason: str) -> None:
        if self._media_modes.get(model) != (mode, reason):
            self._media_modes[model] = (mode, reason)
            self._log.info("media are processed by", side=mode, reason=reason, model=model)

    def worker_ready(self, *, worker: str, role: str, ready: bool) -> None:
        level = logging.INFO if ready else logging.WARNING
        self._log.log(level, "worker ready" if ready else "worker not ready", worker=worker, role=role)

    def handoff_missing(self, *, worker: str) -> None:
        self._log.warning("prefill worker handed nothing over", worker=worker)

    def media_judged(self, *, request_id: str, outcome: str, detail: str | None) -> None:
        if outcome == "missing":
            words = "prefill worker returned no media identity; decode leg will reprocess media"
            self._log.warning(words, request_id=_one_line(request_id))
        elif outcome == "invalid":
            words = "prefill worker returned a media identity that cannot be used; decode leg will reprocess media"
            self._log.warning(words, request_id=_one_line(request_id), reason=detail)

    def breaker_changed(self, *, worker: str, state: str) -> None:
        level = logging.WARNING if state == "open" else logging.INFO
        self._log.log(level, "circuit breaker", worker=worker, state=state)

    def channel_changed(self, *, worker: str, state: str, reason: str | None) -> None:
        why = {} if reason is None else {"reason": reason}
        self._log.debug("connection", worker=worker, state=state, **why)


def request_fields(record: RequestRecord) -> dict[str, Any]:
    """What the line says: fields that are known, durations in milliseconds, nothing a client wrote but its id."""
    fields: dict[str, Any] = {
        "request_id": _one_line(record.request_id),
        "outcome": record.outcome.value,
        "code": record.error_code,
        "finish_reason": record.finish_reason,
        "client": record.client,
        "prefill": record.prefill_worker,
        "decode": record.decode_worker,
        "attempts": record.attempts,
        "failed_on": list(record.workers_tried) or None,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "queue_ms": _span(record.received_at, record.prefill_started_at or record.decode_started_at),
        "prefill_ms": _span(record.prefill_started_at, record.prefill_ended_at),
        "handoff_ms": _span(record.prefill_ended_at, record.first_frame_at),
        "ttft_ms": _span(record.received_at, record.first_frame_at),
        "total_ms": _span(record.received_at, record.ended_at),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _one_line(text: str) -> str:
    """A client chooses its id: no line ends or terminal codes may come out of it, nor a page of text."""
    return "".join(char if char.isprintable() else "?" for char in text[:_MAX_ID_CHARS])


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round((end - start) * 1000, 2)
