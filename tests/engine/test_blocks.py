"""The KV cache against a model of it, and the order in which blocks are reused."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from trio_router.engine.blocks import SLOT_BYTES, KvCache, chain_hashes

SIZE = 4


class CacheAgainstModel(RuleBasedStateMachine):
    """Any order of allocate, retain, publish, release: nothing is lost, doubled, or found under a wrong name."""

    holds = Bundle("holds")

    @initialize(num_blocks=st.integers(1, 12))
    def begin(self, num_blocks):
        self.cache = KvCache(num_blocks=num_blocks, block_size=SIZE)
        self.references: Counter[int] = Counter()
        self.contents: dict[int, bytes] = {}

    @rule(target=holds, count=st.integers(0, 5))
    def allocate(self, count):
        free = self.cache.free_blocks
        assert self.cache.fits([], fresh=count) == (count <= free)
        blocks = self.cache.allocate(count)
        if blocks is None:
            assert count > free
            assert self.cache.free_blocks == free
            return multiple()
        assert len(set(blocks)) == count
        assert not any(self.references[block] for block in blocks)
        self.references.update(blocks)
        for block in blocks:
            self.contents.pop(block, None)
        return tuple(blocks)

    @rule(blocks=holds, name=st.integers(0, 5))
    def publish(self, blocks, name):
        if blocks:
            content = bytes([name])
            self.cache.publish(blocks[0], content=content)
            if content not in self.contents.values():
                self.contents.setdefault(blocks[0], content)

    @rule(target=holds, name=st.integers(0, 5))
    def hit(self, name):
        found = self.cache.match([bytes([name])])
        expected = [block for block, content in self.contents.items() if content == bytes([name])]
        assert found == expected
        assert self.cache.fits(found, fresh=self.cache.free_blocks) == all(self.references[b] for b in found)
        self.cache.retain(found)
        self.references.update(found)
        return tuple(found)

    @rule(blocks=consumes(holds))
    def release(self, blocks):
        self.cache.release(blocks)
        self.references.subtract(blocks)

    @rule()
    def forget(self):
        held = any(self.references.values())
        assert self.cache.forget() is not held
        if not held:
            self.contents.clear()

    @invariant()
    def accounts_balance(self):
        if hasattr(self, "cache"):
            held = sum(1 for count in self.references.values() if count)
            assert self.cache.held_blocks == held
            assert self.cache.free_blocks == self.cache.num_blocks - held


CacheAgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestCacheAgainstModel = CacheAgainstModel.TestCase


def test_releasing_more_often_than_held_is_an_error():
    cache = KvCache(num_blocks=2, block_size=SIZE)
    blocks = cache.allocate(1)
    cache.release(blocks)
    with pytest.raises(KeyError):
        cache.release(blocks)


def test_the_tail_of_a_chain_is_reused_before_its_head():
    cache = KvCache(num_blocks=3, block_size=SIZE)
    chain = cache.allocate(3)
    cache.release(chain)
    assert cache.allocate(3) == chain[::-1]


def test_the_least_recently_released_is_reused_first_and_a_hit_saves_it():
    cache = KvCache(num_blocks=3, block_size=SIZE)
    first, second, third = (cache.allocate(1) for _ in range(3))
    cache.publish(first[0], content=b"a")
    for blocks in (first, second, third):
        cache.release(blocks)
    cache.retain(cache.match([b"a"]))
    cache.release(first)
    assert cache.allocate(2) == second + third
    assert cache.match([b"a"]) == first
    assert cache.allocate(1) == first
    assert cache.match([b"a"]) == []
    assert cache.evictions == 1


def test_a_freed_block_keeps_its_contents_until_it_is_handed_out_and_overwritten():
    cache = KvCache(num_blocks=1, block_size=SIZE)
    block = cache.allocate(1)
    cache.write(block, data=bytes(range(SIZE * SLOT_BYTES)))
    cache.release(block)
    assert cache.read(block) == bytes(range(SIZE * SLOT_BYTES))
    assert cache.allocate(1) == block
    cache.write(block, data=bytes(SIZE * SLOT_BYTES))
    assert cache.read(block) == bytes(SIZE * SLOT_BYTES)


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), max_size=4), st.binary(max_size=200))
def test_whole_blocks_only_are_written(blocks, data):
    cache = KvCache(num_blocks=5, block_size=SIZE)
    if len(data) == len(blocks) * SIZE * SLOT_BYTES:
        cache.write(blocks, data=data)
    else:
        with pytest.raises(ValueError):
            cache.write(blocks, data=data)


@pytest.mark.parametrize("block", [-1, 5])
def test_a_number_that_is_no_block_cannot_be_read(block):
    with pytest.raises(IndexError):
        KvCache(num_blocks=5, block_size=SIZE).read([0, block])


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=30), st.lists(st.integers(0, 9), max_size=30))
def test_hashes_agree_exactly_as_far_as_the_contexts_do(left, right):
    a, b = chain_hashes(left, block_size=SIZE), chain_hashes(right, block_size=SIZE)
    assert len(a) == len(left) // SIZE
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        end = (index + 1) * SIZE
        assert (x == y) == (left[:end] == right[:end])
