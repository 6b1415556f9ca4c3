"""Harvesting, checking and the life of a handoff (invariants I1, I3, I5, I6)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_router.dispatch.handoff import (
    Handoff,
    HandoffState,
    harvest,
    invalid_because,
    is_handoff,
)
from trio_router.errors import PrefillFailed
from trio_router.protocol.codec import encode
from trio_router.protocol.messages import GenerateComplete, GenerateResponse, GenerateStreamChunk

GOOD = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[4, 5, 6]],
    "remote_engine_id": "engine",
    "remote_request_id": "req-1",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 40,
    "transfer_mode": "pull",
}


def complete(**fields) -> bytes:
    return encode(GenerateResponse(complete=GenerateComplete(**{"finish_reason": "length", **fields})))


CHUNK = encode(GenerateResponse(chunk=GenerateStreamChunk(token_ids=[1])))


def test_i1_a_stream_without_a_complete_frame_is_a_failure():
    for frames in ([], [CHUNK]):
        with pytest.raises(PrefillFailed, match="without a complete"):
            harvest(frames)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_i1_an_aborted_or_failed_prefill_hands_nothing_over(reason):
    with pytest.raises(PrefillFailed, match=reason):
        harvest([complete(finish_reason=reason, kv_transfer_params_json=json.dumps(GOOD))])


def test_the_workers_json_is_kept_byte_for_byte():
    odd = '{"b": 1e2,  "a":\t[ 1 ] , "Ω":12345678901234567890}'
    assert harvest([CHUNK, complete(kv_transfer_params_json=odd, prompt_tokens=9)]).kv_params == odd


def test_of_several_completes_the_last_counts():
    found = harvest([complete(kv_transfer_params_json='{"a":1}'), complete(kv_transfer_params_json='{"a":2}')])
    assert (found.kv_params, found.completes) == ('{"a":2}', 2)


def test_an_empty_string_counts_as_no_params():
    assert harvest([complete(kv_transfer_params_json="")]).kv_params is None


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, False),
        ("{}", False),
        ('{"do_remote_prefill": false}', False),
        ('{"do_remote_prefill": true}', True),
        ('{"remote_host": "x"}', True),
        ("not json", True),
    ],
)
def test_what_counts_as_a_handoff(params, expected):
    assert is_handoff(params) is expected


def test_a_well_formed_handoff_passes():
    assert invalid_because(json.dumps(GOOD), prompt_tokens=40, block_size=16) is None


FAULTS = {
    "do_remote_prefill": [None, False, "true", 1],
    "remote_block_ids": [None, [], [[]], [4, 5, 6], [[4, "5"]], [[4, -1]], "4", [[True]], {}],
    "remote_engine_id": [None, "", 5],
    "remote_request_id": [None, "", 7, []],
    "remote_host": [None, "", 1],
    "remote_port": [None, 0, 70000, "5600", True],
    "remote_num_tokens": [None, 0, -1, "40", 41, True],
}


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in FAULTS.items() for v in values])
def test_i6_what_kills_engines_is_refused_with_the_key_named(key, value):
    """Each of these ends a real decode engine, or makes it answer wrongly."""
    for params in ({**GOOD, key: value}, {k: v for k, v in GOOD.items() if k != key}):
        reason = invalid_because(json.dumps(params), prompt_tokens=40, block_size=16)
        assert reason is not None
        assert key in reason


def test_i6_fewer_blocks_than_tokens_are_refused():
    params = json.dumps({**GOOD, "remote_block_ids": [[4, 5]]})
    assert "32 of 40" in (invalid_because(params, prompt_tokens=40, block_size=16) or "")
    assert invalid_because(params, prompt_tokens=40) is None, "without the block size nobody can tell"


@pytest.mark.parametrize("params", ["nope", "[1]", "3", "null", '"text"'])
def test_i6_params_that_are_no_object_are_refused(params):
    assert invalid_because(params, prompt_tokens=1) is not None


def test_older_shapes_are_relayed():
    assert invalid_because('{"remote_host": "h", "remote_port": 1}', prompt_tokens=5, block_size=16) is None


@given(st.text())
def test_i6_the_check_never_raises(text):
    invalid_because(text, prompt_tokens=3, block_size=16)
    is_handoff(text)


@given(st.lists(st.sampled_from(list(HandoffState))))
def test_i3_whatever_is_asked_a_handoff_ends_at_most_once_and_is_offered_at_most_once(steps):
    handoff = Handoff("{}", prefill_worker="p", issued_at=0.0, lease=30.0)
    taken = []
    for step in steps:
        try:
            handoff.move(step)
        except RuntimeError:
            continue
        taken.append(step)
    assert taken.count(HandoffState.OFFERED) <= 1
    endings = [step for step in taken if step is not HandoffState.OFFERED]
    assert len(endings) <= 1
    assert handoff.ended is bool(endings)
    assert HandoffState.ISSUED not in taken


def test_i5_a_handoff_is_fresh_until_its_share_of_the_lease_has_passed():
    handoff = Handoff("{}", prefill_worker="p", issued_at=100.0, lease=30.0)
    assert handoff.is_fresh(120.9, fraction=0.7)
    assert not handoff.is_fresh(121.0, fraction=0.7)
