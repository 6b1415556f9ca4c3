"""The arithmetic of windows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trio_router.http2.credit import due, grown

windows = st.integers(1, 2**31 - 1)


def test_nothing_is_due_before_half_a_window():
    assert due(window=100, left=51, held=0) == 0
    assert due(window=100, left=50, held=0) == 50
    assert due(window=100, left=0, held=0) == 100


def test_held_bytes_are_not_due():
    assert due(window=100, left=0, held=51) == 0
    assert due(window=100, left=0, held=50) == 50


@given(window=windows, data=st.data())
def test_credit_restores_the_window_and_nothing_more(window, data):
    left = data.draw(st.integers(-window, window))
    held = data.draw(st.integers(0, window - left))
    amount = due(window=window, left=left, held=held)
    assert amount == 0 or left + amount + held == window
    assert amount == 0 or amount * 2 >= window


@given(window=windows, left=st.integers(-(2**31), 0))
def test_a_peer_that_can_send_nothing_is_owed_credit_once_all_is_consumed(window, left):
    assert due(window=window, left=left, held=0) > 0


def test_a_window_grows_up_to_its_limit():
    assert grown(2**31 - 2, 1) == 2**31 - 1
    assert grown(2**31 - 1, 1) is None
    assert grown(10, -20) == -10
