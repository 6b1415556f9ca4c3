"""What is noted of a stream's frames on their way."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_router.dispatch.stream import GenerateStream
from trio_router.dispatch.timeline import Timeline
from trio_router.errors import DecodeFailed
from trio_router.protocol.codec import encode
from trio_router.protocol.messages import GenerateComplete, GenerateResponse, GenerateStreamChunk, OutputLogProbs


class Call:
    """A ClientCall's face: batches that end well."""

    def __init__(self, batches: list[list[bytes]]) -> None:
        self._batches = batches
        self._frames = iter([frame for batch in batches for frame in batch])

    async def receive(self) -> bytes | None:
        return next(self._frames, None)

    async def pump(self, sink, *, flush) -> None:
        for batch in self._batches:
            sink(batch)


def run(steps) -> None:
    """Run a coroutine that waits for nothing."""
    with pytest.raises(StopIteration):
        steps.send(None)


def stream_of(batches: list[list[bytes]], *, choices: int = 1) -> GenerateStream:
    timeline = Timeline(request_id="r", received_at=0.0)
    return GenerateStream(Call(batches), request_id="r", timeline=timeline, choices=choices, leg="decode", on_end=bool)


async def read_all(stream: GenerateStream) -> None:
    async for _ in stream:
        pass


CHUNKS = st.builds(
    GenerateStreamChunk,
    token_ids=st.lists(st.integers(0, 70_000), min_size=1, max_size=3),
    prompt_tokens=st.sampled_from([0, 5, 2048]),
    completion_tokens=st.none(),
    index=st.integers(0, 9),
)
COMPLETE = encode(GenerateResponse(complete=GenerateComplete(output_ids=[5], completion_tokens=1)))


class TestCounting:
    @given(chunks=st.lists(CHUNKS, max_size=40), cuts=st.sets(st.integers(0, 41)), tells=st.booleans())
    def test_tokens_and_frames_are_those_of_the_chunks_however_they_are_read(self, chunks, cuts, tells):
        for chunk in chunks:
            chunk.completion_tokens = len(chunk.token_ids) if tells else 0
        frames = [encode(GenerateResponse(chunk=chunk)) for chunk in chunks] + [COMPLETE]
        edges = [0, *sorted(cut for cut in cuts if cut < len(frames)), len(frames)]
        batches = [frames[start:end] for start, end in pairwise(edges)]
        expected = sum(len(chunk.token_ids) for chunk in chunks)
        pumped, told, iterated = (stream_of(batches) for _ in range(3))
        run(pumped.pump(lambda batch: True))
        run(told.pump(lambda batch: True, tokens=lambda: expected))
        run(read_all(iterated))
        for stream in (pumped, told, iterated):
            assert (stream.timeline.frames, stream.timeline.output_tokens) == (len(frames), expected)
            assert stream.ended_well
            assert stream.last_complete == COMPLETE

    def test_chunks_with_more_than_ids_count_too(self):
        chunk = GenerateStreamChunk(token_ids=[5, 6], output_logprobs=OutputLogProbs(token_ids=[5, 6]))
        stream = stream_of([[encode(GenerateResponse(chunk=chunk)), COMPLETE]])
        run(stream.pump(lambda batch: True))
        assert stream.timeline.output_tokens == 2


def test_the_stream_is_handed_on_unchanged_and_in_its_batches():
    batches = [[b"\x0a\x00"], [b"\x0a\x00", COMPLETE]]
    taken: list[list[bytes]] = []
    run(stream_of(batches).pump(lambda batch: not taken.append(batch)))
    assert taken == batches


@pytest.mark.parametrize("tokens", [None, lambda: 0])
def test_a_stream_without_a_complete_for_every_choice_has_not_ended_well(tokens):
    stream = stream_of([[COMPLETE]], choices=2)
    with pytest.raises(DecodeFailed, match="1 of its choices"):
        stream.pump(lambda batch: True, tokens=tokens).send(None)
    assert not stream.ended_well
