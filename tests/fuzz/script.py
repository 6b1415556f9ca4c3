"""Random bytes read as a script: what a fuzzer changes by one byte is then one decision, and not a broken frame."""

from __future__ import annotations

from typing import Final

_WIDE: Final = 16_500  # a little more than a frame may have


class Script:
    """Takes decisions off the front of some bytes; when they run out, every decision is 0 or empty."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def over(self) -> bool:
        """Whether every byte has been used."""
        return self._at >= len(self._data)

    def byte(self) -> int:
        """0 to 255."""
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def below(self, limit: int) -> int:
        """0 to `limit` - 1, for a limit of at most 256."""
        return self.byte() % limit

    def number(self) -> int:
        """Any number of 32 bits; small ones and those near the ends of windows come more often."""
        match self.below(4):
            case 0:
                return self.byte()
            case 1:
                return self.byte() << 8 | self.byte()
            case 2:
                return (2**31 - 1 - self.byte()) & 0xFFFFFFFF
        return int.from_bytes(self.take(4).ljust(4, b"\0"), "big")

    def size(self) -> int:
        """Mostly small, now and then up to more than a frame may have."""
        size = self.byte()
        return size if size < 192 else (size - 192) * _WIDE // 63

    def take(self, count: int) -> bytes:
        """The next bytes as they are, at most `count`."""
        piece = self._data[self._at : self._at + count]
        self._at += count
        return piece

    def blob(self) -> bytes:
        """A piece of some size: short ones as they are, long ones filled up."""
        size = self.size()
        return self.take(size) if size < 64 else bytes([self.byte()]) * size

    def rest(self) -> bytes:
        """Everything that is left."""
        return self.take(len(self._data))
