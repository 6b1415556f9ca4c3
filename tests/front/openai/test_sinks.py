"""Frames into answers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_router.errors import DecodeFailed
from trio_router.front.openai.choice import TextRules
from trio_router.front.openai.shapes import ChatShape
from trio_router.front.openai.sinks import JOIN_ABOVE, EventSink, TextSink
from trio_router.protocol.codec import encode
from trio_router.protocol.messages import (
    GenerateResponse,
    GenerateStreamChunk,
    OutputLogProbs,
)


class Events:
    """An EventStream's face: takes everything while it is not `full`."""

    def __init__(self) -> None:
        self.full = False
        self.sent = b""
        self.sends = 0
        self.resume = None

    def attach(self, feeder, *, resume) -> None:
        self.resume = resume

    def detach(self, feeder) -> None:
        self.resume = None

    def send(self, data: bytes) -> None:
        self.sent += data
        self.sends += 1


@pytest.fixture(scope="module")
def event_sink(tokenizer):
    def make(*, n: int = 1) -> tuple[EventSink, Events]:
        events = Events()
        shape = ChatShape(response_id="chatcmpl-1", created=1, model="m%d")
        return EventSink(events, shape=shape, first_index=0, n=n, rules=TextRules(tokenizer=tokenizer)), events

    return make


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_batches_of_any_size_and_any_stall_tell_the_same_text(event_sink, frames, read_events, content, data) -> None:
    """Also with the client behind for any part of it."""
    texts = ["Hello world 中文😀 " * 6, "another choice " * 9]
    first, second = (frames.text(text, index=index) for index, text in enumerate(texts))
    mixed = [frame for pair in zip(first, second, strict=False) for frame in pair]
    longer = max(first, second, key=len)
    mixed += longer[min(len(first), len(second)) :]
    sink, events = event_sink(n=2)
    at = 0
    while at < len(mixed):
        size = data.draw(st.integers(1, 2 * JOIN_ABOVE))
        events.full = data.draw(st.booleans())
        assert sink(mixed[at : at + size]) is not events.full
        at += size
    events.full = False
    sink.flush()

    told = read_events(events.sent)
    assert [content(told, index) for index in (0, 1)] == texts
    assert [event["choices"][0]["finish_reason"] for event in told if event["choices"][0]["finish_reason"]] == [
        "stop",
        "stop",
    ]
    assert sink.completion_tokens == len(mixed) - 2


def test_one_batch_is_one_write(event_sink, frames) -> None:
    sink, events = event_sink()

    sink(frames.text("Hello world"))

    assert events.sends == 1


def test_a_client_that_is_behind_gets_nothing_more_but_loses_nothing(event_sink, frames, read_events, content) -> None:
    sink, events = event_sink()
    chunks = frames.text("Hello world")
    sink(chunks[:1])
    events.full = True
    for chunk in chunks[1:-1]:
        assert sink([chunk]) is False
    before = events.sent

    events.full = False
    assert sink.flush() is True

    assert content(read_events(before)) == "He"
    assert content(read_events(events.sent)) == "Hello world"
    assert events.sends == 2


def test_i9_what_is_held_for_a_whole_window_is_small(event_sink, frames, tokenizer) -> None:
    sink, events = event_sink()
    [token] = tokenizer.encode(" this")
    frame = frames.chunk([token])
    window = [frame] * (65536 // (len(frame) + 5))
    events.full = True

    sink(window)
    events.full = False
    sink.flush()

    assert len(events.sent) < 65536


def test_a_chunk_with_fields_that_are_not_scanned_is_decoded(event_sink, tokenizer, read_events, content) -> None:
    token_ids = tokenizer.encode("Hello")
    logprobs = OutputLogProbs(token_logprobs=[-0.5] * len(token_ids), token_ids=token_ids)
    sink, events = event_sink()

    sink([encode(GenerateResponse(chunk=GenerateStreamChunk(token_ids=token_ids, output_logprobs=logprobs)))])

    assert content(read_events(events.sent)) == "Hello"


def test_a_frame_of_an_unknown_kind_is_passed_over(event_sink, frames, read_events, content) -> None:
    sink, events = event_sink()

    sink([b"\x7a\x02hi", *frames.text("Hello")])

    assert content(read_events(events.sent)) == "Hello"


def test_a_worker_that_does_not_stream_is_understood(tokenizer, frames) -> None:
    sink = TextSink(first_index=0, n=1, rules=TextRules(tokenizer=tokenizer), max_chars=100)

    sink([frames.complete("stop", output_ids=tokenizer.encode("Hello world"))])

    assert sink.text_of(sink.choices[0]) == "Hello world"
    assert sink.completion_tokens == 5


@pytest.mark.parametrize("message", [b"\x0a\xff", b"\xff", b"\x12\x01"])
def test_bytes_that_are_no_frame_are_the_workers_fault(event_sink, message: bytes) -> None:
    sink, _events = event_sink()

    with pytest.raises(DecodeFailed):
        sink([message])


def test_an_error_ending_marks_the_sink_and_ends_no_choice(event_sink, frames) -> None:
    sink, events = event_sink()

    sink([*frames.text("Hello")[:-1], frames.complete("error")])

    assert sink.failed
    assert b'finish_reason":"error' not in events.sent


def test_resuming_is_the_streams_business_only_while_connected(event_sink) -> None:
    sink, events = event_sink()
    calls: list[str] = []
    sink.connect(lambda: calls.append("resume"))
    events.resume()
    sink.disconnect()

    assert calls == ["resume"]
    assert events.resume is None
