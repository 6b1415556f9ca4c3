"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes says nothing of the code on a machine that does other things, too: timings are benchmarks.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
