"""What the demo's chat amounted to: the facts, what is wrong with them if anything, and their picture in text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

_BAR: Final = 30
_EIGHTHS: Final = "▏▎▍▌▋▊▉█"
_BY: Final = "\N{MULTIPLICATION SIGN}"


class WorkerTally(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker counted."""

    name: str
    role: str
    address: str
    generates: int
    computed_prompt_tokens: int
    recomputed_prompt_tokens: int
    pulls: int
    pulled_tokens: int
    generated_tokens: int
    ledger_entries: int
    lease_expired: int


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds. `first_token` and `total` count from the request's arrival at the router."""

    queue: float
    prefill: float
    handoff: float
    decode: float
    first_token: float
    per_token: float
    total: float


class SeenImage(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers made of the picture in the chat; the counts are by worker.

    `source` is what `--image` was given. Without a size, no worker has got hold of it. `identity`: what became, on each
    decode leg, of what the prefill worker told of the picture (`Observer.media_judged`).
    """

    source: str
    width: int | None
    height: int | None
    fetched: dict[str, int]
    processed: dict[str, int]
    identity: list[str]


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `--json` prints. `image` is there if the chat had one."""

    ok: bool
    problems: list[str]
    prompt: str
    text: str
    finish_reason: str | None
    connector: str | None
    prefill_worker: str | None
    decode_worker: str | None
    prompt_tokens: int
    tokens: int
    kv_pulls: int
    pulled_tokens: int
    recomputed_prompt_tokens: int
    ledger_entries: int
    handoffs: list[str]
    requests_in_flight: int
    timings_ms: Timings | None
    workers: list[WorkerTally]
    image: SeenImage | UnsetType = UNSET


def problems_of(story: Story) -> list[str]:
    """Everything that is not as it has to be after one chat through a healthy pair."""
    expired = sum(worker.lease_expired for worker in story.workers)
    checks = {
        "the request has no record, or did not end well": story.timings_ms is not None,
        "no prefill worker took part": story.prefill_worker is not None,
        "no decode worker took part": story.decode_worker is not None,
        "no token came": story.tokens > 0 and bool(story.text),
        f"the answer ended with {story.finish_reason!r}": story.finish_reason in ("stop", "length"),
        f"{story.kv_pulls} KV transfers instead of one": story.kv_pulls == 1,
        "no KV state came over": story.pulled_tokens > 0,
        f"{story.recomputed_prompt_tokens} prompt tokens were computed twice": story.recomputed_prompt_tokens == 0,
        f"{story.ledger_entries} handoffs are still held": story.ledger_entries == 0,
        f"{expired} handoffs expired": expired == 0,
        f"the handoff ended as {story.handoffs}": story.handoffs == ["consumed"],
        f"{story.requests_in_flight} requests are still in flight": story.requests_in_flight == 0,
    }
    if isinstance(story.image, SeenImage):
        checks |= _picture_checks(story.image, prefill_worker=story.prefill_worker)
    return [problem for problem, fine in checks.items() if not fine]


def _picture_checks(image: SeenImage, *, prefill_worker: str | None) -> dict[str, bool]:
    once = {prefill_worker: 1}
    return {
        f"the picture was fetched {_places(image.fetched)}": _where(image.fetched) == once,
        f"the picture was processed {_places(image.processed)}": _where(image.processed) == once,
        f"the picture's identity was judged as {image.identity}": image.identity == ["applied"],
    }


def _where(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


def _places(counts: Mapping[str, int]) -> str:
    """Like: once on prefill-1."""
    places = [f"{_times(count)} on {name}" for name, count in _where(counts).items()]
    return " and ".join(places) or "nowhere"


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def picture(story: Story, *, plain: bool = False) -> str:
    """Where the time went and what the workers counted. `plain`: ASCII only."""
    lines: list[str] = []
    if story.timings_ms is not None:
        lines += [f"where {_time(story.timings_ms.total)} went", "", *_bars(story, story.timings_ms, plain=plain)]
    if isinstance(story.image, SeenImage):
        lines += ["", "what the workers saw", "", f"  {_sight(story.image, plain=plain)}"]
    lines += ["", "what the workers counted", "", *_tallies(story), ""]
    if story.ok:
        lines += [
            "Each prompt token was computed once; its KV state went straight from the one worker to",
            "the other, which freed it at the first: nothing is held any more.",
        ]
        if isinstance(story.image, SeenImage):
            lines += ["The toy model's words depend on the picture, but do not describe it."]
    else:
        lines += ["This is not as it should be:", *(f"  - {problem}" for problem in story.problems)]
    return "\n".join(lines)


def _sight(image: SeenImage, *, plain: bool) -> str:
    size = f" {image.width}{'x' if plain else _BY}{image.height}" if image.width else ""
    fate = ", ".join(image.identity) or "no decode leg"
    relayed = "relayed" if image.identity == ["applied"] else f"not relayed ({fate})"
    return f"one{size} image, processed {_places(image.processed)}, identity {relayed}"


def _bars(story: Story, times: Timings, *, plain: bool) -> Iterator[str]:
    arrow = "->" if plain else "→"
    rows = (
        ("queue", times.queue, "a pair is chosen, the prefill leg made"),
        ("prefill", times.prefill, f"{story.prefill_worker}: {story.prompt_tokens} prompt tokens"),
        (
            "handoff",
            times.handoff,
            f"{story.prefill_worker} {arrow} {story.decode_worker}: {story.pulled_tokens} tokens of KV",
        ),
        ("decode", times.decode, f"{story.decode_worker}: {times.per_token:.1f} ms a token"),
    )
    scale = _BAR / max(times.total, 0.001)
    start = 0.0
    for name, length, note in rows:
        bar = _bar(start * scale, length * scale, plain=plain)
        yield f"  {name:<8} {_time(length):>9}  {bar:<{_BAR + 1}} {note}"
        start += length
    mark = " " * round((times.first_token) * scale)
    yield f"  {'':<8} {'':>9}  {mark}{'^' if plain else '↑'} first token after {_time(times.first_token)}"


def _bar(start: float, length: float, *, plain: bool) -> str:
    """A bar of `length` cells from `start` on; what is there is never invisible."""
    indent = " " * int(start)
    if plain:
        return indent + "#" * max(1, round(length))
    whole, part = divmod(max(1, round(length * 8)), 8)
    return indent + "█" * whole + (_EIGHTHS[part - 1] if part else "")


def _tallies(story: Story) -> Iterator[str]:
    heads = ("", "requests", "prompt tokens", "KV received", "tokens made", "held")
    yield _row(heads)
    for worker in story.workers:
        yield _row(
            (
                worker.name,
                _some(worker.generates),
                _some(worker.computed_prompt_tokens),
                _some(worker.pulled_tokens),
                _some(worker.generated_tokens),
                str(worker.ledger_entries),
            )
        )


def _row(cells: tuple[str, ...]) -> str:
    first, *rest = cells
    return f"  {first:<10}" + "".join(f"{cell:>15}" for cell in rest)


def _some(count: int) -> str:
    return str(count) if count else "-"


def _time(milliseconds: float) -> str:
    return f"{milliseconds / 1000:.2f} s" if milliseconds >= 1000 else f"{milliseconds:.1f} ms"
