from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trio_router.policy.retry_budget import RetryBudget


def spend(budget: RetryBudget, now: float) -> int:
    count = 0
    while budget.take(now):
        count += 1
    return count


def test_when_all_is_spent_a_share_of_the_traffic_is_left():
    budget = RetryBudget(share=0.25, floor=0.0)
    spend(budget, 0.0)
    for _ in range(100):
        budget.note_request()
    assert spend(budget, 0.0) == 25


def test_without_traffic_there_are_a_few_each_second():
    budget = RetryBudget(share=0.0, floor=10.0)
    spend(budget, 0.0)
    assert spend(budget, 1.0) == 10
    assert not budget.take(1.0)


def test_a_fresh_one_is_full_and_savings_are_bounded():
    budget = RetryBudget(share=0.2, floor=10.0)
    assert spend(budget, 0.0) == 100
    assert spend(budget, 1e6) == 100


def test_nothing_at_all_is_a_budget_too():
    budget = RetryBudget(share=0.0, floor=0.0)
    budget.note_request()
    assert not budget.take(1e6)


@given(st.lists(st.one_of(st.none(), st.floats(0.0, 2.0)), max_size=300))
def test_retries_never_exceed_what_has_been_given(steps):
    """Whatever the order: at most the first filling, the share of the requests and the floor of the seconds."""
    budget, now, requests, retries = RetryBudget(share=0.5, floor=3.0), 0.0, 0, 0
    for step in steps:
        if step is None:
            budget.note_request()
            requests += 1
        else:
            now += step
            retries += budget.take(now)
    assert retries <= 50 + 0.5 * requests + 3.0 * now + 1e-6
