"""gRPC messages in DATA bytes: a compressed flag, four bytes of length, the message.

Responsible for cutting and joining; must not know frames, windows or streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final

from trio_router.errors import ProtocolViolation, TooLarge
from trio_router.pieces import Message, Pieces

PREFIX: Final = Struct(">BI")
PREFIX_BYTES: Final = 5


def check_prefix(mark: int, length: int, *, limit: int) -> None:
    """Refuse what cannot become a message, before a byte of it is kept.

    Raises `ProtocolViolation` for a compressed message (only identity encoding is spoken here) or an undefined
    flag, `TooLarge` above
    `limit` bytes.
    """
    if mark:
        raise ProtocolViolation(
            "compressed gRPC message: only the identity encoding is supported"
            if mark == 1
            else f"gRPC message flag {mark} is not defined"
        )
    if length > limit:
        raise TooLarge(f"gRPC message of {length} bytes is over max_message_bytes ({limit})")


class Assembler:
    """Cuts a stream's DATA into messages and keeps the unfinished one.

    Memory follows the bytes that came, never the length a prefix promises.
    """

    __slots__ = ("_limit", "_missing", "_partial")

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._partial = bytearray()
        # Bytes still to come of a message whose prefix is complete; -1 while the prefix itself is not.
        self._missing = -1

    @property
    def pending(self) -> bool:
        """Whether a message has begun and not ended."""
        return bool(self._partial) or self._missing >= 0

    @property
    def held(self) -> int:
        """Bytes kept of a message that has not ended."""
        return len(self._partial)

    def feed(self, chunk: bytes, *, into: list[bytes]) -> None:
        """Append to `into` every message that `chunk` completes; on an error (see `check_prefix`) those before it."""
        at = 0
        if self._missing >= 0:
            at = self._continue(chunk, into)
            if at < 0:
                return
        elif self._partial:
            chunk = bytes(self._partial) + chunk
            self._partial.clear()
        size = len(chunk)
        limit = self._limit
        while size - at >= PREFIX_BYTES:
            mark, length = PREFIX.unpack_from(chunk, at)
            if mark or length > limit:
                check_prefix(mark, length, limit=limit)
            at += PREFIX_BYTES
            end = at + length
            if end > size:
                self._missing = end - size
                break
            into.append(chunk[at:end])
            at = end
        self._partial += chunk[at:]

    def _continue(self, chunk: bytes, into: list[bytes]) -> int:
        """Feed the unfinished message; where the next one begins in `chunk`, or -1 if this one goes on."""
        missing = self._missing
        if len(chunk) < missing:
            self._partial += chunk
            self._missing = missing - len(chunk)
            return -1
        self._partial += chunk[:missing]
        into.append(bytes(self._partial))
        self._partial = bytearray()  # not clear(): a large buffer must not stay with an idle stream
        self._missing = -1
        return missing


def join(messages: Sequence[Message]) -> bytes:
    """Messages as gRPC writes them, one behind the other."""
    return b"".join(row(messages))


def row(messages: Sequence[Message]) -> list[bytes | memoryview]:
    """The same, not joined yet."""
    pieces: list[bytes | memoryview] = []
    for message in messages:
        pieces.append(PREFIX.pack(0, len(message)))
        if isinstance(message, Pieces):
            pieces += message.parts
        else:
            pieces.append(message)
    return pieces
