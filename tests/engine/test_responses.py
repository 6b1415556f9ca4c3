"""Frames put together by hand are the codec's, byte for byte."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_router.engine.responses import ChoiceEncoder
from trio_router.engine.sequence import Finish, FinishReason
from trio_router.protocol.codec import decode, encode
from trio_router.protocol.messages import GenerateComplete, GenerateResponse, GenerateStreamChunk, KvTransferParams
from trio_router.protocol.wire import is_complete, scan_chunk

token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=200)
counts = st.integers(0, 2**32 - 1)
positive = st.integers(1, 2**32 - 1)


@settings(deadline=None)
@given(token_ids | st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=1), positive, counts, st.integers(0, 300))
def test_a_chunk_is_the_codecs(ids, prompt_tokens, cached_tokens, index):
    encoder = ChoiceEncoder(index=index, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
    chunk = GenerateStreamChunk(
        token_ids=ids,
        prompt_tokens=prompt_tokens,
        completion_tokens=len(ids),
        cached_tokens=cached_tokens,
        index=index,
    )
    data = encoder.chunk(ids)
    assert data == encode(GenerateResponse(chunk=chunk))
    assert scan_chunk(data) == (ids, prompt_tokens, len(ids), cached_tokens, index)


def test_a_complete_carries_ending_and_handoff():
    params = {"remote_host": "h", "remote_port": 7, "remote_block_ids": [[1]]}
    data = ChoiceEncoder(index=2, prompt_tokens=5, cached_tokens=4).complete(
        [8, 9], finish=Finish(reason=FinishReason.STOP, matched="end", kv_params=params)
    )
    complete = decode(GenerateResponse, data).complete
    assert json.loads(complete.kv_transfer_params_json) == params
    assert complete == GenerateComplete(
        output_ids=[8, 9],
        finish_reason="stop",
        prompt_tokens=5,
        completion_tokens=2,
        cached_tokens=4,
        index=2,
        matched_stop_str="end",
        kv_transfer_params_json=complete.kv_transfer_params_json,
        kv_transfer_params=KvTransferParams(remote_host="h", remote_port=7),
    )
    assert is_complete(data)


@pytest.mark.parametrize(
    "params", [{"remote_host": "", "remote_port": 7}, {"remote_host": "h", "remote_port": 0}, {"a": 1}]
)
def test_half_an_address_is_not_mirrored(params):
    data = ChoiceEncoder(index=0, prompt_tokens=5, cached_tokens=0).complete(
        [1], finish=Finish(reason=FinishReason.LENGTH, kv_params=params)
    )
    complete = decode(GenerateResponse, data).complete
    assert complete.kv_transfer_params.remote_port == 0
    assert json.loads(complete.kv_transfer_params_json) == params
