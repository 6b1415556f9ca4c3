"""A message in pieces that have not been joined: so that one cut from another shares its bytes. A leaf, without I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias


class Pieces:
    """Bytes as a row of pieces, in order. Views keep what they look at alive, and nothing is copied."""

    __slots__ = ("_size", "parts")

    def __init__(self, parts: Sequence[bytes | memoryview]) -> None:
        self.parts = [part for part in parts if part]
        self._size = sum(map(len, self.parts))

    def __repr__(self) -> str:
        return f"<Pieces {self._size} bytes in {len(self.parts)}>"

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)


Message: TypeAlias = bytes | Pieces
"""What can be sent as one message."""
