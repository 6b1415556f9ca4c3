"""Context state: equal contents are equal everywhere, and any difference shows."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from trio_router.engine.state import ROOT, advance, fold

tokens = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40)


def slots(token_ids: list[int]) -> list[int]:
    state, result = ROOT, []
    for token in token_ids:
        state = advance(state, token)
        result.append(state)
    return result


@settings(deadline=None)
@given(tokens, st.data())
def test_changing_one_token_changes_every_slot_from_there_on(token_ids, data):
    place = data.draw(st.integers(0, len(token_ids) - 1))
    other = [*token_ids]
    other[place] ^= data.draw(st.integers(1, 2**32 - 1))

    before, after = slots(token_ids), slots(other)

    assert before[:place] == after[:place]
    assert all(a != b for a, b in zip(before[place:], after[place:], strict=True))


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=8, unique=True), st.data())
def test_folding_tells_swapped_blocks_apart(blocks, data):
    first, second = data.draw(st.permutations(range(len(blocks))))[:2]
    swapped = [*blocks]
    swapped[first], swapped[second] = swapped[second], swapped[first]

    def folded(values):
        state = ROOT
        for value in values:
            state = fold(state, value)
        return state

    assert folded(blocks) != folded(swapped)
