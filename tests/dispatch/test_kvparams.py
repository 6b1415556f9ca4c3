"""What counts as a handoff, and which ones must reach no engine (invariant I6)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_router.dispatch.kvparams import read_params

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


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ("{}", False),
        ('{"do_remote_prefill": false}', False),
        ('{"do_remote_prefill": true}', True),
        ('{"remote_host": "x"}', True),
        ("not json", True),
    ],
)
def test_what_counts_as_a_handoff(params, expected):
    assert read_params(params).hand_over is expected


def test_a_well_formed_handoff_passes():
    assert read_params(json.dumps(GOOD)).fault(prompt_tokens=40, block_size=16) is None


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
        reason = read_params(json.dumps(params)).fault(prompt_tokens=40, block_size=16)
        assert reason is not None
        assert key in reason


def test_i6_fewer_blocks_than_tokens_are_refused():
    params = json.dumps({**GOOD, "remote_block_ids": [[4, 5]]})
    assert "32 of 40" in (read_params(params).fault(prompt_tokens=40, block_size=16) or "")
    assert read_params(params).fault(prompt_tokens=40) is None, "without the block size nobody can tell"


def test_i6_one_group_that_covers_the_prompt_is_enough():
    """Groups of a sliding window hold fewer blocks than the whole prompt has."""
    params = json.dumps({**GOOD, "remote_block_ids": [[9], [4, 5, 6]]})
    assert read_params(params).fault(prompt_tokens=40, block_size=16) is None


def test_a_prompt_whose_length_nobody_told_is_not_compared():
    assert read_params(json.dumps(GOOD)).fault(prompt_tokens=0, block_size=16) is None


def test_i6_nesting_without_end_is_not_json():
    assert "not JSON" in (read_params("[" * 100_000).fault(prompt_tokens=1) or "")


def test_the_text_stays_as_the_worker_wrote_it():
    odd = '{"b": 1e2,  "a":\t[ 1 ] , "Ω":12345678901234567890}'
    assert read_params(odd).text == odd


@pytest.mark.parametrize(("params", "engine"), [(json.dumps(GOOD), "engine"), ("{}", ""), ("nope", ""), ("[1]", "")])
def test_the_engine_is_the_one_that_holds_the_blocks(params, engine):
    assert read_params(params).engine_id == engine


def test_an_engine_id_of_another_type_is_none():
    assert read_params('{"remote_engine_id": 5}').engine_id == ""


@pytest.mark.parametrize("params", ["nope", "[1]", "3", "null", '"text"'])
def test_i6_params_that_are_no_object_are_refused(params):
    assert read_params(params).fault(prompt_tokens=1) is not None


FOREIGN = {"remote_host": "h", "remote_port": 1}
FLAT = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [4, 5, 6],
    "remote_engine_id": "engine",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}


def without(*keys: str) -> dict[str, object]:
    return {key: value for key, value in GOOD.items() if key not in keys}


@pytest.mark.parametrize(
    "params",
    [
        FOREIGN,
        FLAT,
        {**FLAT, "remote_request_id": "req-1"},
        without("tp_size"),
        without("transfer_mode"),
        without("transfer_mode", "remote_num_tokens"),
    ],
)
def test_older_and_foreign_shapes_are_relayed(params):
    read = read_params(json.dumps(params))
    assert not read.are_modern
    assert read.fault(prompt_tokens=40, block_size=16) is None


@pytest.mark.parametrize(
    ("params", "key"),
    [
        ({"do_remote_prefill": True}, "remote_request_id"),
        ({**FOREIGN, "do_remote_prefill": True}, "remote_request_id"),
        (without("tp_size", "remote_request_id"), "remote_request_id"),
        ({**without("transfer_mode"), "remote_block_ids": None}, "remote_block_ids"),
        ({**without("transfer_mode"), "remote_block_ids": [[4]]}, "cover 16 of 40"),
        ({**without("transfer_mode", "remote_num_tokens"), "remote_block_ids": [[4]]}, "cover 16 of 40"),
        ({**without("tp_size"), "remote_num_tokens": 41}, "remote_num_tokens"),
        ({**GOOD, "remote_block_ids": [4, 5, 6]}, "list of lists"),
        ({**FLAT, "remote_block_ids": []}, "remote_request_id"),
        ({**FLAT, "remote_port": "5600"}, "remote_port"),
        ({**FLAT, "remote_request_id": 7}, "remote_request_id"),
        ({**FLAT, "do_remote_prefill": None}, "do_remote_prefill"),
    ],
)
def test_i6_a_pull_that_lacks_the_newest_keys_must_be_whole_all_the_same(params, key):
    """A real decode engine died of the first, of the third and of the fourth."""
    assert key in (read_params(json.dumps(params)).fault(prompt_tokens=40, block_size=16) or "")


@given(st.text())
def test_i6_the_check_never_raises(text):
    params = read_params(text)
    params.fault(prompt_tokens=3, block_size=16)
    assert params.hand_over in (True, False)
