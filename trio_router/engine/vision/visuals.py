"""What media are to the simulated engine: numbers at the embeddings' places, and one that every later token feels.

Pure. The first stand for what an encoder makes of pixels; the second for positions, which in a model like Qwen3-VL
depend on every grid before them. So a missing, foreign or misplaced item makes another text, on whichever worker.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from ..state import advance
from .items import Group, Placeholder, Tensor

_DIGEST_BYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Visuals:
    """The media of one prompt."""

    values: Mapping[int, int]
    """By position: what is seen there in place of the token."""
    salt: int
    end: int
    """The first position after all of them."""
    has_pixels: bool
    """Without, their embeddings cannot be computed here: the state up to `end` must come from elsewhere."""


def visuals_of(groups: Sequence[Group], *, prompt_length: int, has_pixels: bool) -> Visuals:
    values: dict[int, int] = {}
    everything = blake2b(digest_size=_DIGEST_BYTES)
    end = 0
    for group in groups:
        for index, (digest, span) in enumerate(zip(group.hashes, group.placeholders, strict=True)):
            fields = group.fields[index] if group.fields else {}
            item = b"\0".join([digest.encode(), *_told(fields)])
            seed = int.from_bytes(blake2b(item, digest_size=_DIGEST_BYTES).digest(), "little")
            places = span.embedded(prompt_length=prompt_length)
            values |= {place: advance(seed, number) for number, place in enumerate(places)}
            end = max(end, *(place + 1 for place in places[-1:]), 0)
            # Where positions do not depend on media, their places matter through what is seen there and no more.
            told = f"{group.kind} {span.offset} {span.length} {places}" if fields else ""
            everything.update(b"\1".join([item, told.encode()]) + b"\2")
    salt = int.from_bytes(everything.digest(), "little")
    return Visuals(values=values, salt=salt, end=end, has_pixels=has_pixels)


def visuals_of_hashes(hashes: Iterable[str]) -> Visuals:
    """What is left of media without grids when only their hashes are told: what later tokens feel of them."""
    told = tuple(hashes)
    nowhere = Placeholder(offset=0, length=0)
    group = Group(kind="image", hashes=told, placeholders=(nowhere,) * len(told))
    return visuals_of((group,), prompt_length=0, has_pixels=False)


def _told(fields: Mapping[str, Tensor]) -> list[bytes]:
    """Tensors as bytes that are equal where their values are, on whichever side of the wire."""
    return [
        f"{key}{tensor.shape}".encode() + struct.pack(f"<{len(tensor.values)}f", *tensor.values)
        for key, tensor in sorted(fields.items())
    ]


def extras_of(visuals: Visuals, *, block_size: int) -> dict[int, bytes]:
    """What tells blocks with equal tokens apart, by the number of the block."""
    seen: dict[int, list[int]] = {}
    for place, value in sorted(visuals.values.items()):
        seen.setdefault(place // block_size, []).extend((place % block_size, value))
    return {block: struct.pack(f"<{len(numbers)}Q", *numbers) for block, numbers in seen.items()}
