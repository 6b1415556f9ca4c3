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


def test_a_retry_takes_no_turn_of_a_first_try():
    """Not even of a worker that has not failed: the one before it would get its turn back each time."""
    policy = RoundRobin()
    for _ in range(10):
        first = policy.pick(candidates(False, False, False))
        policy.pick([each for i, each in enumerate(candidates(False, False, False)) if i != first], retry=True)
    assert [policy.pick(candidates(False, False, False)) for _ in range(3)] == [1, 2, 0]


def test_two_models_whose_requests_alternate_each_use_all_their_workers():
    policy = RoundRobin()
    models = {name: [Candidate(worker=f"{name}{i}", load=0) for i in range(2)] for name in ("a", "b")}
    picked = [models[name][policy.pick(models[name])].worker for name in "abababab"]
    assert Counter(picked) == {"a0": 2, "a1": 2, "b0": 2, "b1": 2}


def test_a_worker_that_fails_at_once_is_not_every_requests_first_choice():
    policy = RoundRobin()
    shares: Counter[int] = Counter()
    for _ in range(30):
        choice = policy.pick(candidates(False, False))
        shares[choice] += 1
        if choice == 0:
            policy.pick(candidates(True, False))
    assert shares[0] == 15


def test_retries_are_spread_over_the_other_workers():
    policy = RoundRobin()
    shares: Counter[int] = Counter()
    for _ in range(30):
        if policy.pick(candidates(False, False, False)) == 0:
            shares[policy.pick(candidates(True, False, False))] += 1
    assert shares == {1: 5, 2: 5}


def test_a_worker_that_joins_gets_the_next_turn_and_no_more_than_its_share():
    policy = RoundRobin()
    for _ in range(100):
        policy.pick(candidates(False, False))
    shares = Counter(policy.pick(candidates(False, False, False)) for _ in range(9))
    assert shares == {0: 3, 1: 3, 2: 3}
