"""The demo itself: the chat, and what is printed when."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final, TextIO

import msgspec
import trio
from msgspec import UNSET

from ..engine.settings import Connector
from ..engine.worker import Worker
from ..errors import RouterError
from ..media.hosts import REFUSED
from ..observe.hooks import Outcome, RequestRecord
from ..rpc.transport import dial_tcp
from ..scopes import plain_errors
from .client import stream_chat
from .fleet import Eyes, Fleet, open_fleet
from .pictures import PUBLIC_ONLY, SAMPLE, Picture
from .story import SeenImage, Story, Timings, WorkerTally, picture, problems_of

CHAT_TIMEOUT: Final = 60.0
"""Seconds for the whole chat, which takes about one."""
SETTLE_TIMEOUT: Final = 1.0
"""Seconds after the last byte within which every handoff must have found its end."""
INTERRUPTED: Final = 130
"""Exit status when a signal came before the chat was over."""
_POLL: Final = 0.01
_WIDTH: Final = 90
_INDENT: Final = 9
_LONGEST_SOURCE: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """What to ask, of workers with which connector, and whether to go on serving afterwards.

    With an image the workers are such that see. `allow_private_hosts`: it may be on a host that is not public.
    """

    prompt: str
    max_tokens: int
    connector: Connector = Connector.NIXL
    image: Picture | None = None
    allow_private_hosts: bool = False
    once: bool
    json: bool

    @property
    def eyes(self) -> Eyes | None:
        """What the workers need for it."""
        return None if self.image is None else Eyes(allow_private_hosts=self.allow_private_hosts)

    @property
    def content(self) -> str | list[dict[str, Any]]:
        """The user's message."""
        if self.image is None:
            return self.prompt
        return [{"type": "image_url", "image_url": {"url": self.image.url}}, {"type": "text", "text": self.prompt}]


async def demo(settings: DemoSettings, *, say: Callable[[str], None], out: TextIO) -> int:
    """Run it; returns the exit status. `out` gets the answer piece by piece, `say` whole lines."""
    status = INTERRUPTED
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals, plain_errors():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_end_at_signal, signals, nursery.cancel_scope)
            async with open_fleet(connector=settings.connector, eyes=settings.eyes) as fleet:
                story = await _chat(fleet, settings=settings, out=out)
                status = 0 if story.ok else 1
                _tell(story, settings=settings, say=say, plain=not _can_draw(out))
                if not settings.once:
                    _invite(fleet, settings=settings, say=say)
                    await trio.sleep_forever()
            nursery.cancel_scope.cancel()
    return status


async def _end_at_signal(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    await anext(signals)
    scope.cancel()


async def _chat(fleet: Fleet, *, settings: DemoSettings, out: TextIO) -> Story:
    """Ask, print the answer as it comes, wait until the fleet is quiet, and gather the facts."""
    answer = Answer(out=None if settings.json else out)
    answer.begin(settings.prompt if settings.image is None else f"[{_named(settings.image)}] {settings.prompt}")
    failure: str | None = None
    request = {
        "model": fleet.service.router.models()[0],
        "messages": [{"role": "user", "content": settings.content}],
        "max_tokens": settings.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with trio.move_on_after(CHAT_TIMEOUT) as scope:
        try:
            await stream_chat(fleet.service.addresses.http, request, dialer=dial_tcp, on_event=answer.take)
        except RouterError as exc:
            failure = PUBLIC_ONLY if settings.image and REFUSED in exc.message else exc.message
    if scope.cancelled_caught:
        failure = f"no complete answer within {CHAT_TIMEOUT:g} s"
    answer.end()
    await _settle(fleet)
    return _story(fleet, settings=settings, answer=answer, failure=failure)


def _named(image: Picture) -> str:
    if image.source == SAMPLE:
        return "a sample picture"
    # The end of a path says more than its beginning.
    cut = len(image.source) > _LONGEST_SOURCE
    return f"...{image.source[3 - _LONGEST_SOURCE :]}" if cut else image.source


async def _settle(fleet: Fleet) -> None:
    with trio.move_on_after(SETTLE_TIMEOUT):
        await fleet.witness.ended.wait()
        # Ledgers belong to workers, which other processes may be: there is no event to wait for.
        while fleet.ledger_entries or fleet.service.router.janitor.jobs:  # noqa: ASYNC110
            await trio.sleep(_POLL)


class Answer:
    """Collects a chat's answer and prints it as it comes, in lines of a readable length."""

    def __init__(self, *, out: TextIO | None) -> None:
        self._out = out
        self._column = 0
        self.text = ""
        self.finish_reason: str | None = None
        self.prompt_tokens = 0
        self.tokens = 0

    def begin(self, prompt: str) -> None:
        """Print the question."""
        self._write("Two prefill workers, two decode workers and a router run in this process.\n\nyou      ")
        self._wrap(prompt)
        self._write("\n\nmodel    ")
        self._column = 0

    def take(self, event: dict[str, Any]) -> None:
        """One event of the stream."""
        for choice in event.get("choices", ()):
            piece = choice["delta"].get("content") or ""
            self.text += piece
            self._wrap(piece)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        usage = event.get("usage")
        if usage:
            self.prompt_tokens, self.tokens = usage["prompt_tokens"], usage["completion_tokens"]

    def end(self) -> None:
        """Close the text."""
        self._write("\n\n")

    def _wrap(self, piece: str) -> None:
        for number, line in enumerate(piece.split("\n")):
            words = line.split(" ")
            for place, word in enumerate(words):
                gap = " " if place else ""
                if number and not place:
                    self._new_line()
                elif gap and self._column + len(word) + 1 > _WIDTH - _INDENT:
                    self._new_line()
                    gap = ""
                self._write(gap + word)
                self._column += len(gap) + len(word)

    def _new_line(self) -> None:
        self._write("\n" + " " * _INDENT)
        self._column = 0

    def _write(self, text: str) -> None:
        if self._out is not None and text:
            self._out.write(text)
            self._out.flush()


def _story(fleet: Fleet, *, settings: DemoSettings, answer: Answer, failure: str | None) -> Story:
    record = fleet.witness.records[0] if fleet.witness.records else None
    tallies = [_tally(worker) for worker in fleet.workers]
    story = Story(
        ok=True,
        problems=[],
        prompt=settings.prompt,
        text=answer.text,
        finish_reason=answer.finish_reason,
        connector=next(iter(fleet.witness.connectors), None),
        prefill_worker=fleet.name_of(record.prefill_worker) if record else None,
        decode_worker=fleet.name_of(record.decode_worker) if record else None,
        prompt_tokens=answer.prompt_tokens,
        tokens=answer.tokens,
        kv_pulls=sum(tally.pulls for tally in tallies),
        pulled_tokens=sum(tally.pulled_tokens for tally in tallies),
        recomputed_prompt_tokens=sum(tally.recomputed_prompt_tokens for tally in tallies),
        ledger_entries=fleet.ledger_entries,
        handoffs=list(fleet.witness.handoffs),
        requests_in_flight=fleet.service.router.in_flight,
        timings_ms=_timings(record, tokens=answer.tokens) if record else None,
        workers=tallies,
        image=UNSET if settings.image is None else _seen(fleet, source=settings.image.source),
    )
    problems = [failure] if failure else []
    problems += problems_of(story)
    return msgspec.structs.replace(story, ok=not problems, problems=problems)


def _seen(fleet: Fleet, *, source: str) -> SeenImage:
    width, height = next(iter(fleet.witness.sizes), (None, None))
    return SeenImage(
        source=source,
        width=width,
        height=height,
        fetched={worker.settings.name: worker.counters.media_fetches for worker in fleet.workers},
        processed={worker.settings.name: worker.counters.media_items_processed for worker in fleet.workers},
        identity=list(fleet.witness.identities),
    )


def _tally(worker: Worker) -> WorkerTally:
    counters = worker.counters
    return WorkerTally(
        name=worker.settings.name,
        role=worker.settings.role,
        address=worker.address,
        generates=counters.generates,
        computed_prompt_tokens=counters.computed_prompt_tokens,
        recomputed_prompt_tokens=counters.recomputed_prompt_tokens,
        pulls=counters.pulls,
        pulled_tokens=counters.pulled_tokens,
        generated_tokens=counters.generated_tokens,
        ledger_entries=len(worker.ledger),
        lease_expired=counters.lease_expired,
    )


def _timings(record: RequestRecord, *, tokens: int) -> Timings | None:
    started, ended, first = record.prefill_started_at, record.prefill_ended_at, record.first_frame_at
    if record.outcome is not Outcome.OK or started is None or ended is None or first is None:
        return None
    return Timings(
        queue=_ms(started - record.received_at),
        prefill=_ms(ended - started),
        handoff=_ms(first - ended),
        decode=_ms(record.ended_at - first),
        first_token=_ms(first - record.received_at),
        per_token=_ms((record.ended_at - first) / max(1, tokens - 1)),
        total=_ms(record.ended_at - record.received_at),
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _tell(story: Story, *, settings: DemoSettings, say: Callable[[str], None], plain: bool) -> None:
    if settings.json:
        say(msgspec.json.encode(story).decode())
    else:
        say(picture(story, plain=plain))


def _can_draw(out: TextIO) -> bool:
    try:
        "█→\N{MULTIPLICATION SIGN}".encode(out.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _invite(fleet: Fleet, *, settings: DemoSettings, say: Callable[[str], None]) -> None:
    if settings.json:
        return
    where = fleet.service.addresses
    request = {
        "model": fleet.service.router.models()[0],
        "stream": True,
        "messages": [{"role": "user", "content": "Tell me about the sea."}],
    }
    say("")
    say("Still serving, until Ctrl-C. Try:")
    say("")
    say(f"  curl -N http://{where.http}/v1/chat/completions -H 'content-type: application/json' \\")
    say(f"    -d '{msgspec.json.encode(request).decode()}'")
    say("")
    say(f"  curl http://{where.metrics}/metrics")
    say("")
