"""Harvesting, and the life of a handoff (invariants I1, I3, I5)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_router.dispatch.connectors import Connector
from trio_router.dispatch.handoff import Handoff, HandoffState, PrefillAnswer, harvest
from trio_router.dispatch.kvparams import read_params
from trio_router.errors import PrefillFailed
from trio_router.testing.scripted import chunk, complete

GARBAGE = [b"\x0a\xff\xff\xff\xff\x0f", b"", b"\x12\x02\x0a\xff"]


def answer_of(*frames: bytes) -> PrefillAnswer:
    answer = PrefillAnswer()
    for frame in frames:
        answer.add(frame)
    return answer


def test_i1_a_stream_without_a_complete_frame_is_a_failure():
    for frames in ([], [chunk(1)], GARBAGE[:2]):
        with pytest.raises(PrefillFailed, match="without a complete"):
            harvest(answer_of(*frames))


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_i1_an_aborted_or_failed_prefill_hands_nothing_over(reason):
    with pytest.raises(PrefillFailed, match=reason):
        harvest(answer_of(complete(reason, kv_transfer_params_json='{"a": 1}')))


def test_i12_a_complete_frame_that_cannot_be_read_is_a_failed_prefill():
    with pytest.raises(PrefillFailed, match="cannot be read"):
        harvest(answer_of(complete(), GARBAGE[2]))


def test_the_workers_json_is_kept_byte_for_byte():
    odd = '{"b": 1e2,  "a":\t[ 1 ] , "Ω":12345678901234567890}'
    found = harvest(answer_of(chunk(1), complete(kv_transfer_params_json=odd, cached_tokens=9)))
    assert (found.kv_params, found.prompt_tokens, found.cached_tokens) == (odd, 40, 9)


def test_of_several_completes_the_last_counts():
    found = harvest(
        answer_of(complete(kv_transfer_params_json='{"a":1}'), chunk(1), complete(kv_transfer_params_json='{"a":2}'))
    )
    assert (found.kv_params, found.completes) == ('{"a":2}', 2)


def test_i9_only_the_last_complete_frame_is_kept():
    frames = [complete(matched_token_id=number) for number in range(5)]
    answer = answer_of(*frames, chunk(1))
    assert (answer.last, answer.completes, answer.frames) == (frames[-1], 5, 6)


def test_an_empty_string_counts_as_no_params():
    assert harvest(answer_of(complete(kv_transfer_params_json=""))).kv_params is None


def make_handoff(told: list[HandoffState] | None = None, *, issued_at: float = 0.0) -> Handoff:
    told = [] if told is None else told
    return Handoff(
        read_params("{}"),
        attempt_id="a",
        connector=Connector.NIXL,
        prefill_worker="p",
        issued_at=issued_at,
        lease=30.0,
        on_end=lambda handoff: told.append(handoff.state),
    )


ENDINGS = [HandoffState.CONSUMED, HandoffState.RELEASED, HandoffState.LAPSED, HandoffState.INVALID]


@given(st.lists(st.sampled_from(["offer", *HandoffState])))
def test_i3_whatever_is_asked_a_handoff_is_offered_at_most_once_and_ends_at_most_once(steps):
    told: list[HandoffState] = []
    handoff = make_handoff(told)
    offers = 0
    for step in steps:
        before = handoff.state
        try:
            if step == "offer":
                handoff.offer()
                offers += 1
            else:
                handoff.end(step)
        except RuntimeError:
            assert handoff.state is before
    assert offers <= 1
    assert len(told) <= 1
    assert handoff.ended is bool(told)
    if told:
        assert handoff.state is told[0]
        assert told[0] in ENDINGS


def test_i3_the_first_to_say_how_it_ended_was_right():
    told: list[HandoffState] = []
    handoff = make_handoff(told)
    handoff.offer()
    handoff.end(HandoffState.CONSUMED)
    handoff.end(HandoffState.LAPSED)
    assert told == [HandoffState.CONSUMED]


@pytest.mark.parametrize("state", [HandoffState.CONSUMED, HandoffState.OFFERED, HandoffState.ISSUED])
def test_i3_what_was_never_offered_cannot_end_so(state):
    with pytest.raises(RuntimeError):
        make_handoff().end(state)


def test_i5_a_second_offer_is_a_bug():
    handoff = make_handoff()
    handoff.offer()
    with pytest.raises(RuntimeError, match="offered"):
        handoff.offer()


def test_i5_a_handoff_is_fresh_until_its_share_of_the_lease_has_passed():
    handoff = make_handoff(issued_at=100.0)
    assert handoff.is_fresh(120.9, fraction=0.7)
    assert not handoff.is_fresh(121.0, fraction=0.7)
