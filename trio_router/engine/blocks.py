"""The KV cache: numbered blocks of slots, shared by content, reused least recently used first.

Holds memory and who refers to it; knows no requests, no time and no transfers. A block that nobody refers to keeps
its contents, and its place in the prefix index, until it is handed out again: that is what makes a prefix hit
possible, and what makes a late reader of a freed block read something else.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Final

SLOT_BYTES: Final = 8
NO_PARENT: Final = b""


def chain_hashes(
    token_ids: Sequence[int], *, block_size: int, parent: bytes = NO_PARENT, extras: Mapping[int, bytes] | None = None
) -> list[bytes]:
    """Content hashes of the full blocks of a context: each covers its tokens and, through its parent, all before.

    `extras` are further contents by the number of their block: what is not told by tokens. A `parent` of the first
    block keeps contexts apart that nothing else tells apart.
    """
    hashes: list[bytes] = []
    packed = array("I", token_ids)
    for start in range(0, len(packed) - block_size + 1, block_size):
        extra = b"" if extras is None else extras.get(start // block_size, b"")
        parent = block_hash(parent, packed[start : start + block_size], extra=extra)
        hashes.append(parent)
    return hashes


def block_hash(parent: bytes, token_ids: array[int], *, extra: bytes = b"") -> bytes:
    """The content hash of one full block after the block of hash `parent` (NO_PARENT for the first)."""
    return blake2b(parent + token_ids.tobytes() + extra, digest_size=16).digest()


class KvCache:
    """`num_blocks` blocks of `block_size` slots.

    A block is held (counted references) or free. Free blocks stand in the order in which they will be reused;
    those whose content is published can be taken back out of that order by a hit.
    """

    __slots__ = (
        "_free",
        "_hash_of",
        "_held",
        "_index",
        "block_size",
        "evictions",
        "memory",
        "num_blocks",
        "releases",
    )

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.memory = array("Q", bytes(num_blocks * block_size * SLOT_BYTES))
        self.evictions = 0
        self.releases = 0
        """Calls that may have freed something: as long as it stands still, what did not fit does not fit."""
        self._held: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._index: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def __repr__(self) -> str:
        return f"<KvCache {len(self._held)} held, {len(self._free)} free, {len(self._index)} published>"

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def held_blocks(self) -> int:
        return len(self._held)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest published prefix. Takes no reference and changes no order."""
        blocks: list[int] = []
        for content in hashes:
            block = self._index.get(content)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def fits(self, hits: Sequence[int], *, fresh: int) -> bool:
        """Whether `fresh` blocks could be allocated after `hits` have been retained."""
        revived = sum(1 for block in hits if block not in self._held)
        return fresh <= len(self._free) - revived

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, contents arbitrary; None (and no change) when there are too few."""
        if count > len(self._free):
            return None
        blocks = []
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            self._withdraw(block)
            self._held[block] = 1
            blocks.append(block)
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """One more reference to each; a free one is taken out of the order of reuse."""
        for block in blocks:
            if block in self._held:
                self._held[block] += 1
            else:
                del self._free[block]
                self._held[block] = 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each. Raises KeyError for a block that nobody holds.

        The last block of a chain is reused first: a prefix without its tail is still worth something, a tail
        without its prefix nothing.
        """
        self.releases += 1
        for block in reversed(blocks):
            left = self._held[block] - 1
            if left:
                self._held[block] = left
            else:
                del self._held[block]
                self._free[block] = None

    def publish(self, block: int, *, content: bytes) -> None:
        """Let later requests find this full block. The first block with a content keeps the name."""
        if content not in self._index and block not in self._hash_of:
            self._index[content] = block
            self._hash_of[block] = content

    def _withdraw(self, block: int) -> None:
        content = self._hash_of.pop(block, None)
        if content is not None:
            del self._index[content]
            self.evictions += 1

    def forget(self) -> bool:
        """Unpublish everything, as long as nobody holds a block; says whether it did."""
        if self._held:
            return False
        self._index.clear()
        self._hash_of.clear()
        return True

    def read(self, blocks: Sequence[int]) -> bytes:
        """What those blocks hold now, in that order. Raises IndexError for a number that is not a block's."""
        size = self.block_size
        parts: list[bytes] = []
        for block in blocks:
            if not 0 <= block < self.num_blocks:
                raise IndexError(f"no block {block} in a cache of {self.num_blocks}")
            parts.append(self.memory[block * size : (block + 1) * size].tobytes())
        return b"".join(parts)

    def write(self, blocks: Sequence[int], *, data: bytes) -> None:
        """Overwrite whole blocks, in order. Raises ValueError when the sizes do not match."""
        size = self.block_size
        if len(data) != len(blocks) * size * SLOT_BYTES:
            raise ValueError(f"{len(data)} bytes are not the contents of {len(blocks)} blocks")
        slots = array("Q", data)
        for position, block in enumerate(blocks):
            self.memory[block * size : (block + 1) * size] = slots[position * size : (position + 1) * size]
