"""Pinned handoffs: each ends exactly once, and its blocks come back exactly once."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trio_router.engine.blocks import KvCache
from trio_router.engine.ledger import Ledger, PinEnd

LEASE = 30.0
ids = st.sampled_from(["a", "b", "c", "d"])


class LedgerAgainstModel(RuleBasedStateMachine):
    """Any order of pins, endings, renewals and time."""

    def __init__(self):
        super().__init__()
        self.cache = KvCache(num_blocks=20, block_size=4)
        self.ledger = Ledger(self.cache, lease_seconds=LEASE)
        self.now = 0.0
        self.expiry: dict[str, float] = {}
        self.begun = 0

    @precondition(lambda self: len(self.expiry) < 4)
    @rule(request_id=ids, count=st.integers(1, 4))
    def pin(self, request_id, count):
        if request_id in self.expiry:
            with pytest.raises(ValueError, match=request_id):
                self.ledger.pin(request_id, engine_id="e", blocks=[], num_tokens=0, now=self.now)
            return
        blocks = self.cache.allocate(count)
        self.ledger.pin(request_id, engine_id="e", blocks=blocks, num_tokens=count * 4, now=self.now)
        self.expiry[request_id] = self.now + LEASE
        self.begun += 1

    @rule(request_id=ids, how=st.sampled_from([PinEnd.PULLED, PinEnd.RELEASED]))
    def end(self, request_id, how):
        assert (self.ledger.end(request_id, how=how) is not None) == (request_id in self.expiry)
        self.expiry.pop(request_id, None)

    @rule(request_id=ids)
    def renew(self, request_id):
        assert self.ledger.renew(request_id, now=self.now) == (request_id in self.expiry)
        if request_id in self.expiry:
            self.expiry[request_id] = self.now + LEASE

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds):
        self.now += seconds
        gone = {pin.request_id for pin in self.ledger.expire(self.now)}
        assert gone == {key for key, at in self.expiry.items() if at <= self.now}
        for key in gone:
            del self.expiry[key]

    @invariant()
    def books_balance(self):
        assert list(self.ledger.pins) == list(self.expiry)
        assert self.ledger.next_expiry == min(self.expiry.values(), default=None)
        assert self.ledger.pinned_blocks == self.cache.held_blocks
        assert self.ledger.ended.total() + len(self.ledger) == self.begun


LedgerAgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLedgerAgainstModel = LedgerAgainstModel.TestCase
