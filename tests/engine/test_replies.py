"""Output to a client that lags: nothing is lost, nothing doubled, and the engine never waits."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from trio_router.engine.replies import Replies
from trio_router.engine.sequence import EngineFailure, Finish, FinishReason
from trio_router.protocol.codec import decode
from trio_router.protocol.messages import GenerateResponse

LENGTH = Finish(reason=FinishReason.LENGTH)


class Sink:
    """A call whose client reads when told to."""

    def __init__(self):
        self.on_drained = None
        self.frames: list[bytes] = []
        self.room = 0
        self.flushed = 0

    def send_nowait(self, messages):
        self.frames += messages
        self.room -= len(messages)
        return self.room > 0

    def flush(self):
        self.flushed += 1

    def make_room(self, frames):
        if self.room <= 0:
            self.room = frames
            self.on_drained()


def choice(index):
    return SimpleNamespace(index=index, prompt_length=3, cached_tokens=0)


def tokens_of(sink, *, index):
    frames = [decode(GenerateResponse, data) for data in sink.frames]
    chunks = [f.chunk for f in frames if f.is_set("chunk")]
    return [token for chunk in chunks if chunk.index == index for token in chunk.token_ids]


@settings(deadline=None)
@given(st.lists(st.integers(0, 2) | st.just("read"), max_size=60), st.integers(1, 5), st.integers(1, 3))
def test_at_any_pace_every_token_comes_once_and_the_end_repeats_the_last_chunk(events, room, choices):
    sink = Sink()
    sink.room = room
    replies = Replies(sink, choices=choices, streaming=True, touched=lambda _sink: None)
    sent: dict[int, list[int]] = {index: [] for index in range(choices)}
    for number, event in enumerate(events):
        if event == "read":
            sink.make_room(room)
        elif event < choices:
            replies.put(choice(event), token_ids=[number], finish=None)
            sent[event].append(number)
    for index in range(choices):
        replies.put(choice(index), token_ids=[1000 + index], finish=LENGTH)
        sent[index].append(1000 + index)
    for _ in range(10):
        sink.make_room(room)

    assert replies.done.is_set()
    frames = [decode(GenerateResponse, data) for data in sink.frames]
    for index in range(choices):
        assert tokens_of(sink, index=index) == sent[index]
        mine = [f for f in frames if (f.chunk if f.is_set("chunk") else f.complete).index == index]
        assert [f.is_set("complete") for f in mine].count(True) == 1
        assert mine[-1].complete.output_ids == mine[-2].chunk.token_ids


def test_a_client_that_does_not_read_gets_one_chunk_with_all_it_missed():
    sink = Sink()
    sink.room = 1
    replies = Replies(sink, choices=1, streaming=True, touched=lambda _sink: None)
    for token in range(500):
        replies.put(choice(0), token_ids=[token], finish=None)
    assert len(sink.frames) == 1
    sink.make_room(5)
    assert len(sink.frames) == 2
    assert tokens_of(sink, index=0) == list(range(500))
    assert sink.flushed == 1, "what is queued when room appears is written by nobody else"


def test_the_end_waits_for_room_and_done_waits_for_the_end():
    sink = Sink()
    sink.room = 1
    replies = Replies(sink, choices=1, streaming=True, touched=lambda _sink: None)
    replies.put(choice(0), token_ids=[1], finish=None)
    replies.put(choice(0), token_ids=[2], finish=LENGTH)
    assert not replies.done.is_set()
    sink.make_room(1)
    assert replies.done.is_set()
    assert len(sink.frames) == 3


def test_without_streaming_everything_leaves_when_the_last_choice_ends():
    sink = Sink()
    replies = Replies(sink, choices=2, streaming=False, touched=lambda _sink: None)
    replies.put(choice(1), token_ids=[5], finish=None)
    replies.put(choice(1), token_ids=[6], finish=LENGTH)
    replies.put(choice(0), token_ids=[7], finish=None)
    assert sink.frames == []
    replies.put(choice(0), token_ids=[8], finish=LENGTH)
    completes = [decode(GenerateResponse, data).complete for data in sink.frames]
    assert [(c.index, c.output_ids) for c in completes] == [(0, [7, 8]), (1, [5, 6])]
    assert replies.done.is_set()


def test_a_failure_needs_no_frame():
    replies = Replies(Sink(), choices=2, streaming=True, touched=lambda _sink: None)
    replies.fail(EngineFailure.DEAD)
    assert replies.done.is_set()
    assert replies.failure is EngineFailure.DEAD


def test_room_for_one_choice_is_not_taken_for_room_for_all():
    sink = Sink()
    sink.room = 1
    replies = Replies(sink, choices=3, streaming=True, touched=lambda _sink: None)
    for index in range(3):
        replies.put(choice(index), token_ids=[index], finish=None)
    for expected in (2, 3):
        sink.make_room(1)
        assert len(sink.frames) == expected
