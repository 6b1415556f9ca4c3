"""What does one token cost to turn into text: by the byte table, and by the tokenizers library's own stream?

Run `python -m bench.detokenize`. CPU nanoseconds per token, median of the rounds, one thread; the text is the reference
worker's corpus, through its own tokenizer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import resources
from itertools import chain
from pathlib import Path

import msgspec
from tokenizers import Tokenizer as HfTokenizer
from tokenizers.decoders import DecodeStream

from trio_router.text.bundle import read_directory
from trio_router.text.detokenizer import StreamDetokenizer
from trio_router.text.stops import StopMatcher
from trio_router.text.tokenizer import Tokenizer, load

ROUNDS = 15
# What is measured, the run, and how many tokens it handles.
Row = tuple[str, Callable[[], object], int]
ASSETS = Path(str(resources.files("trio_router.engine.assets")))


def nanoseconds(run: Callable[[], object], *, tokens: int) -> float:
    """CPU time of a run per token; the first run is not counted."""
    run()
    taken = []
    for _ in range(ROUNDS):
        start = time.process_time_ns()
        run()
        taken.append((time.process_time_ns() - start) / tokens)
    return statistics.median(taken)


def table_rows(tokenizer: Tokenizer, token_ids: list[int]) -> Iterator[Row]:
    """The fast way, in the forms that a front uses it."""

    def by_table(groups: list[list[int]]) -> None:
        step = tokenizer.detokenizer().step
        for group in groups:
            step(group)

    def ready_json() -> None:
        piece = tokenizer.detokenizer().json_piece
        for token_id in token_ids:
            piece(token_id)

    def json_of_text() -> None:
        step, encode = tokenizer.detokenizer().step, msgspec.json.encode
        for single in singles:
            encode(step(single))

    singles = [[token_id] for token_id in token_ids]
    eights = [token_ids[start : start + 8] for start in range(0, len(token_ids), 8)]
    broken = [[byte] for byte in "東京🦔é".encode() * 500]
    yield "table, one token a call", partial(by_table, singles), len(token_ids)
    yield "table, eight tokens a call", partial(by_table, eights), len(token_ids)
    yield "table, one byte of a character a call", partial(by_table, broken), len(broken)
    yield "table, JSON made from the text", json_of_text, len(token_ids)
    yield "table, ready JSON", ready_json, len(token_ids)
    yield "to make a detokenizer (per detokenizer)", lambda: [tokenizer.detokenizer() for _ in range(1000)], 1000


def library_rows(library: HfTokenizer, token_ids: list[int]) -> Iterator[Row]:
    """The general way, beside the library alone."""

    def bare() -> None:
        stream = DecodeStream(skip_special_tokens=True)
        for token_id in token_ids:
            stream.step(library, token_id)

    def ours() -> None:
        step = StreamDetokenizer(library, hidden=frozenset()).step
        for single in singles:
            step(single)

    singles = [[token_id] for token_id in token_ids]
    yield "DecodeStream, bare", bare, len(token_ids)
    yield "DecodeStream, as a fallback here", ours, len(token_ids)


def stop_rows(texts: list[str]) -> Iterator[Row]:
    """What stop strings add."""

    def feed_all(stops: list[str]) -> None:
        feed = StopMatcher(stops).feed
        for text in texts:
            feed(text)

    yield "stop strings: one that never begins", partial(feed_all, ["\u2581"]), len(texts)
    yield "stop strings: four that often begin", partial(feed_all, ["the end!", ". So,", "\n\n\n", " a b!"]), len(texts)


def main() -> None:
    """Measure and print."""
    tokenizer = load(read_directory(ASSETS))
    library = HfTokenizer.from_file(str(ASSETS / "tokenizer.json"))
    token_ids = tokenizer.encode((ASSETS / "corpus.txt").read_text(encoding="utf-8"))
    texts = [library.decode([token_id]) for token_id in token_ids]
    print(f"{len(token_ids)} tokens, CPU ns per token, median of {ROUNDS}")
    rows = chain(table_rows(tokenizer, token_ids), library_rows(library, token_ids), stop_rows(texts))
    for name, run, tokens in rows:
        print(f"{nanoseconds(run, tokens=tokens):8.0f}  {name}")


if __name__ == "__main__":
    main()
