"""Many deadlines, one task."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from trio_router.rpc.sweeper import Sweeper


class Owner:
    """Notes when its deadline passed, and sets another one if it was given any."""

    def __init__(self, sweeper: Sweeper, *again: float) -> None:
        self.expired_at: list[float] = []
        self._sweeper = sweeper
        self._again = list(again)

    def expired(self) -> None:
        self.expired_at.append(trio.current_time())
        if self._again:
            self._sweeper.add(self, deadline=trio.current_time() + self._again.pop(0))


@pytest.fixture
def sweeper(nursery) -> Sweeper:
    made = Sweeper()
    nursery.start_soon(made.run)
    return made


async def test_each_owner_is_told_at_its_own_deadline(sweeper, autojump_clock):
    begin = trio.current_time()
    owners = {seconds: Owner(sweeper) for seconds in (5.0, 1.0, 3.0)}
    for seconds, owner in owners.items():
        sweeper.add(owner, deadline=begin + seconds)
    await trio.sleep(10)
    assert {seconds: owner.expired_at for seconds, owner in owners.items()} == {
        seconds: [begin + seconds] for seconds in owners
    }


async def test_an_owner_may_set_its_next_deadline_while_it_is_told(sweeper, autojump_clock):
    begin = trio.current_time()
    owner = Owner(sweeper, 2.0, 0.0, 3.0)
    sweeper.add(owner, deadline=begin + 1)
    await trio.sleep(10)
    assert owner.expired_at == [begin + 1, begin + 3, begin + 3, begin + 6]


async def test_who_was_discarded_is_not_told_and_may_come_again(sweeper, autojump_clock):
    begin = trio.current_time()
    owner = Owner(sweeper)
    sweeper.add(owner, deadline=begin + 1)
    sweeper.discard(owner)
    sweeper.add(owner, deadline=begin + 4)
    await trio.sleep(10)
    assert owner.expired_at == [begin + 4]


async def test_a_later_deadline_replaces_an_earlier_one(sweeper, autojump_clock):
    begin = trio.current_time()
    owner = Owner(sweeper)
    sweeper.add(owner, deadline=begin + 1)
    sweeper.add(owner, deadline=begin + 4)
    await trio.sleep(10)
    assert owner.expired_at == [begin + 4]


async def test_calls_that_end_in_time_are_not_kept_until_their_deadline(sweeper, autojump_clock):
    """One of half an hour, a hundred times a second, would be a hundred and eighty thousand."""
    first = Owner(sweeper)
    sweeper.add(first, deadline=trio.current_time() + 1)  # dead entries behind one that lives
    for _ in range(10_000):
        owner = Owner(sweeper)
        sweeper.add(owner, deadline=trio.current_time() + 1800)
        sweeper.discard(owner)
        assert len(sweeper._heap) <= 100
    await trio.sleep(2)
    assert len(first.expired_at) == 1
