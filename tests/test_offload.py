"""Threads for work that takes long."""

from __future__ import annotations

import pytest

from trio_router.offload import Threads


async def test_threads_run_what_they_are_given_and_pass_on_what_it_raises():
    threads = Threads(1)
    assert await threads(lambda: 6 * 7) == 42
    with pytest.raises(ZeroDivisionError):
        await threads(lambda: 1 // 0)
