from __future__ import annotations

from trio_router.dispatch.aggregate import Aggregator
from trio_router.protocol.codec import decode, encode
from trio_router.protocol.messages import (
    GenerateComplete,
    GenerateResponse,
    GenerateStreamChunk,
    OutputLogProbs,
    TopLogProbs,
)


def chunk(index=0, ids=(), **fields) -> bytes:
    return encode(
        GenerateResponse(
            chunk=GenerateStreamChunk(
                token_ids=list(ids), completion_tokens=len(ids), index=index, prompt_tokens=3, **fields
            )
        )
    )


def complete(index=0, ids=(), **fields) -> bytes:
    fields = {"finish_reason": "stop", "prompt_tokens": 3, "completion_tokens": len(ids), **fields}
    return encode(GenerateResponse(complete=GenerateComplete(output_ids=list(ids), index=index, **fields)))


def whole(*frames: bytes) -> list[GenerateComplete]:
    aggregator = Aggregator()
    for frame in frames:
        assert aggregator.feed([frame])
    return [decode(GenerateResponse, data).complete for data in aggregator.frames()]


def test_the_last_delta_is_not_counted_twice():
    [answer] = whole(chunk(ids=[1, 2]), chunk(ids=[3]), complete(ids=[3], matched_token_id=9))
    assert answer.output_ids == [1, 2, 3]
    assert answer.completion_tokens == 3
    assert (answer.finish_reason, answer.matched_token_id, answer.prompt_tokens) == ("stop", 9, 3)


def test_choices_come_in_order_of_index_however_they_ended():
    answers = whole(
        chunk(1, [10]), chunk(0, [20]), complete(1, [10], finish_reason="length"), chunk(0, [21]), complete(0, [21])
    )
    assert [(a.index, a.output_ids, a.finish_reason) for a in answers] == [(0, [20, 21], "stop"), (1, [10], "length")]


def test_a_worker_that_did_not_stream_is_taken_as_it_is():
    [answer] = whole(complete(ids=[5, 6, 7]))
    assert answer.output_ids == [5, 6, 7]
    assert answer.completion_tokens == 3


def test_logprobs_of_all_chunks_are_joined():
    def logprobs(token, value):
        return OutputLogProbs(
            token_ids=[token], token_logprobs=[value], top_logprobs=[TopLogProbs(token_ids=[token], values=[value])]
        )

    [answer] = whole(
        chunk(ids=[1], output_logprobs=logprobs(1, -0.5)),
        chunk(ids=[2], output_logprobs=logprobs(2, -0.25)),
        complete(ids=[2], output_logprobs=logprobs(2, -0.25)),
    )
    assert answer.output_logprobs.token_ids == [1, 2]
    assert answer.output_logprobs.token_logprobs == [-0.5, -0.25]
    assert [top.token_ids for top in answer.output_logprobs.top_logprobs] == [[1], [2]]


def test_the_prompt_is_counted_by_whoever_computed_it():
    """A decode worker counts all that it was handed as cached."""
    aggregator = Aggregator()
    aggregator.feed([chunk(ids=[1], cached_tokens=3), complete(ids=[1], cached_tokens=3)])
    [answer] = [decode(GenerateResponse, data).complete for data in aggregator.frames(prompt_counts=(30, 2))]
    assert (answer.prompt_tokens, answer.cached_tokens) == (30, 2)
