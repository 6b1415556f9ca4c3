"""The state a context leaves behind: what stands in for attention over keys and values.

Each token's slot holds a digest of the folded blocks before it and of the tokens of its own block up to it; the
fold of a finished block mixes its last slot into what came before. A context's next token is chosen from the fold
of every block and the newest slot, so a single wrong, missing or misplaced block changes everything after it, and
equal contents give equal text on every worker. Digests are 64-bit integers: one multiplication per token, because
this runs for every token of every stream.
"""

from __future__ import annotations

from typing import Final

ROOT: Final = 0x243F6A8885A308D3
"""The state of an empty context (the first digits of pi, so that nobody need wonder)."""

_MASK: Final = (1 << 64) - 1
_TOKEN_FACTOR: Final = 0x9E3779B97F4A7C15
_FOLD_FACTOR: Final = 0xD6E8FEB86659FD93


def advance(state: int, token: int) -> int:
    """The slot of `token`, given the slot before it in the same block (or the fold, for a block's first)."""
    state = ((state ^ (token + 1)) * _TOKEN_FACTOR) & _MASK
    return state ^ (state >> 32)


def fold(folded: int, slot: int) -> int:
    """The state before the next block, given the state before this one and this block's last slot."""
    mixed = ((folded ^ (slot >> 7)) + slot) * _FOLD_FACTOR & _MASK
    return mixed ^ (mixed >> 29)
