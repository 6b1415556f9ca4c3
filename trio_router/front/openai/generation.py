"""Running an answer: one GenerateRequest per prompt, all at once, into sinks; then the last words to the client.

Knows the router and the exchange; must not know chat from text completions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final

import trio

from ...errors import DecodeFailed
from ..exchange import Exchange
from ..respond import error_event, is_planned
from ..seams import GenerateStream, Router
from ..settings import FrontSettings
from .choice import TextRules
from .events import EventStream
from .shapes import DONE, Shape, Usage
from .sinks import EventSink, FrameSink, TextSink

JSON_HEADERS: Final = ((b"content-type", b"application/json"),)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Everything decided about a request before the first token: what to run, and how to tell it."""

    requests: list[bytes]
    """GenerateRequests, each taken out of here when it begins: they may be large, and the answer long."""
    n: int
    """Choices of each of the requests."""
    model: str
    rules: TextRules
    shape: Shape
    stream: bool
    include_usage: bool
    holds_body: bool = False
    """Most of what the client sent is in the requests, and stays in memory until the first token is here."""


async def run_answer(exchange: Exchange, answer: Answer, *, router: Router, settings: FrontSettings) -> None:
    """Run it and answer the exchange. Raises the error family as long as nothing has gone out."""
    exchange.recorded = True
    if answer.holds_body:
        exchange.drop_body()
    else:
        exchange.forget_body()
    run = _Run(answer, router=router, settings=settings, on_begun=exchange.forget_body)
    await (run.stream(exchange) if answer.stream else run.collect(exchange))


class _Run:
    """One answer under way."""

    def __init__(
        self, answer: Answer, *, router: Router, settings: FrontSettings, on_begun: Callable[[], None]
    ) -> None:
        self._answer = answer
        self._on_begun = on_begun
        self._router = router
        self._settings = settings

    async def collect(self, exchange: Exchange) -> None:
        answer = self._answer
        limit = self._settings.max_response_chars // len(answer.requests)
        sinks = [
            TextSink(first_index=at * answer.n, n=answer.n, rules=answer.rules, max_chars=limit)
            for at in range(len(answer.requests))
        ]
        await self._run(sinks)
        texts = [(choice, sink.text_of(choice)) for sink in sinks for _, choice in sorted(sink.choices.items())]
        body = answer.shape.whole(texts, usage=_usage(sinks))
        await exchange.respond(200, headers=JSON_HEADERS, body=body)

    async def stream(self, exchange: Exchange) -> None:
        answer = self._answer
        events = EventStream(exchange)
        sinks = [
            EventSink(events, shape=answer.shape, first_index=at * answer.n, n=answer.n, rules=answer.rules)
            for at in range(len(answer.requests))
        ]
        try:
            await self._run(sinks)
        except Exception as exc:
            if not events.begun:
                raise
            if not is_planned(exc):
                _log.exception("a stream failed")
            # An error event is the last one: a client that sees [DONE] takes what it has for the whole.
            tail = b"data: " + error_event(exc) + b"\n\n"
        else:
            tail = (answer.shape.usage(_usage(sinks)) if answer.include_usage else b"") + DONE
        await events.finish(tail)

    async def _run(self, sinks: Sequence[FrameSink]) -> None:
        """Run all requests; the first that fails cancels the others and is raised."""
        if len(sinks) == 1:
            await self._run_one(0, sinks[0])
            return
        failures: list[Exception] = []
        async with trio.open_nursery() as nursery:

            async def run(at: int, sink: FrameSink) -> None:
                try:
                    await self._run_one(at, sink)
                except Exception as exc:  # noqa: BLE001 - raised below, without the group around it
                    failures.append(exc)
                    nursery.cancel_scope.cancel(reason="another prompt of the request failed")

            for at, sink in enumerate(sinks):
                nursery.start_soon(run, at, sink)
        if failures:
            raise failures[0]

    def _begin(self, at: int) -> AbstractAsyncContextManager[GenerateStream]:
        answer = self._answer
        request, answer.requests[at] = answer.requests[at], b""
        return self._router.generate(
            request, timeout=self._settings.request_seconds, model=answer.model, client=answer.shape.endpoint
        )

    async def _run_one(self, at: int, sink: FrameSink) -> None:
        async with self._begin(at) as stream:
            self._on_begun()
            sink.connect(stream.resume)
            try:
                await stream.pump(sink, tokens=lambda: sink.completion_tokens)
            finally:
                sink.disconnect()
            if stream.prompt_counts is not None:
                sink.prompt_tokens, sink.cached_tokens = stream.prompt_counts
            if sink.failed:
                raise DecodeFailed("the worker's engine failed in the middle of the stream")


def _usage(sinks: Sequence[FrameSink]) -> Usage:
    return Usage(
        prompt_tokens=sum(sink.prompt_tokens for sink in sinks),
        completion_tokens=sum(sink.completion_tokens for sink in sinks),
        cached_tokens=sum(sink.cached_tokens for sink in sinks),
    )
