from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from trio_router.policy.base import Candidate
from trio_router.policy.round_robin import RoundRobin


def candidates(*failed: bool) -> list[Candidate]:
    return [Candidate(worker=f"w{i}", load=0, failed_before=f) for i, f in enumerate(failed)]


def test_each_in_turn():
    policy = RoundRobin()
    assert [policy.pick(candidates(False, False, False)) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@given(st.integers(1, 8), st.integers(1, 50))
def test_shares_differ_by_at_most_one(workers, picks):
    policy = RoundRobin()
    shares = Counter(policy.pick(candidates(*[False] * workers)) for _ in range(picks))
    counts = [shares[i] for i in range(workers)]
    assert max(counts) - min(counts) <= 1


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.integers(0, 20))
def test_a_worker_that_failed_the_request_is_avoided_while_there_is_another(failed, turns):
    policy = RoundRobin()
    for _ in range(turns):
        policy.pick(candidates(*failed))
    choice = policy.pick(candidates(*failed))
    assert all(failed) or not failed[choice]
