"""Header lists on the wire: HPACK both ways with bounds, and what RFC 9113 8.2 and 8.3 call well-formed.

Responsible for compression state and for refusing malformed or oversized lists. Must not know gRPC's own headers
(`te`, `content-type`, `grpc-*`): which requests are acceptable is the business of `rpc`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, TypeVar

import hpack
from hpack.table import HeaderTable

from trio_router.errors import ProtocolViolation, TooLarge
from trio_router.http2.frames import ErrorCode

Headers = list[tuple[bytes, bytes]]
Key = TypeVar("Key")
Value = TypeVar("Value")

# Ends of what we decode at all, as a multiple of the list size we admit. Up to it only the stream fails, for the
# compression state is still sound; beyond it the block is not read to its end, so the connection is lost with it.
HARD_LIMIT_FACTOR: Final = 4
# An honest peer fills its frames, so even the hard limit needs few CONTINUATION frames; a flood sends thousands
# of empty ones.
MAX_CONTINUATIONS: Final = 64
# A block may begin with changes of the table's size; an encoder needs two (RFC 7541 4.2), one that announces every
# change of ours by itself some more. They decode to nothing, so no other limit sees them.
MAX_TABLE_UPDATES: Final = 16
# Our encoder's table: the protocol's default. A peer that offers more gets no more, it is memory per connection
# on both sides.
MAX_ENCODER_TABLE_BYTES: Final = 4096
# Most calls of a connection have the same few header lists, which the table holds after the first of each: a look
# instead of 20 us in hpack. Both bounds are per connection and direction.
MAX_REMEMBERED: Final = 32
MAX_REMEMBERED_BYTES: Final = 512
# RFC 9113 6.5.2: what one field costs besides its bytes.
FIELD_OVERHEAD: Final = 32

# Never entered into the compression table: secrets (RFC 7541 7.1.3), and values that never repeat, which would
# only push out those that do and cost a scan of the table for each later header.
NEVER_INDEXED: Final = frozenset(
    {
        b"authorization",
        b"proxy-authorization",
        b"cookie",
        b"set-cookie",
        b"grpc-timeout",
        b"grpc-message",
        b"grpc-status-details-bin",
        b"traceparent",
        b"x-request-id",
    }
)

_CONNECTION_SPECIFIC: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)
_REQUEST_PSEUDO: Final = frozenset({b":method", b":scheme", b":path", b":authority"})
_RESPONSE_PSEUDO: Final = frozenset({b":status"})
_NO_PSEUDO: Final[frozenset[bytes]] = frozenset()
# RFC 9113 8.2.1: visible lower-case ASCII without a colon.
_NAME: Final = re.compile(rb"[!-9;-@\[-~]+").fullmatch
_BAD_IN_VALUE: Final = re.compile(rb"[\x00\r\n]").search
_TABLE_UPDATES: Final = re.compile(rb"(?:[\x20-\x3e]|\x3f[\x80-\xff]*[\x00-\x7f]){%d}" % (MAX_TABLE_UPDATES + 1)).match
_LENGTH: Final = re.compile(rb"[0-9]{1,18}").fullmatch
_FINAL_STATUS: Final = re.compile(rb"[2-9][0-9][0-9]").fullmatch
_EDGE_SPACE: Final = b" \t"


class HeaderEncoder:
    """The compression state of what we send. A block that was encoded must reach the peer, in the order of encoding."""

    __slots__ = ("_blocks", "_hpack", "_smallest", "_wanted")

    def __init__(self) -> None:
        self._hpack = hpack.Encoder()
        # The table size that the peer wants and the smallest it has wanted since the last block.
        self._wanted = self._smallest = self._hpack.header_table_size
        # Blocks of lists that were encoded before, as long as the table stays as it is.
        self._blocks: dict[tuple[tuple[bytes, bytes], ...], bytes] = {}

    def encode(self, headers: Headers) -> bytes:
        """One header block. Without Huffman coding: it would save a few bytes for three times the CPU."""
        key = tuple(headers)
        block = self._blocks.get(key)
        if block is not None:
            return block
        table = self._hpack.header_table
        announces = self._resize()
        before = _Mark.of(table)
        fields = [(name, value, name in NEVER_INDEXED) for name, value in headers]
        block = self._hpack.encode(fields, huffman=False)
        if not before.still_holds(table):
            self._blocks.clear()
        elif not announces and len(block) <= MAX_REMEMBERED_BYTES and not any(sensitive for _, _, sensitive in fields):
            _remember(self._blocks, key, block)
        return block

    def limit_table(self, peer_limit: int) -> None:
        """Follow the peer's HEADER_TABLE_SIZE; the change is announced in the next block."""
        self._wanted = min(peer_limit, MAX_ENCODER_TABLE_BYTES)
        self._smallest = min(self._smallest, self._wanted)
        if self._smallest != self._hpack.header_table_size or self._wanted != self._smallest:
            self._blocks.clear()

    def _resize(self) -> bool:
        """Make the changes that the next block announces: the smallest size and the last (RFC 7541 4.2).

        hpack would announce every size that it was ever given: a list that a peer can make as long as it likes.
        """
        coder = self._hpack
        for size in (self._smallest, self._wanted):
            # Setting the same value again would make hpack forget a change it has not announced yet.
            if size != coder.header_table_size:
                coder.header_table_size = size
        self._smallest = self._wanted
        return bool(coder.header_table.resized)


class HeaderDecoder:
    """The compression state of what we receive. Every block must pass through, even one for a stream that is gone."""

    __slots__ = ("_hpack", "_lists")

    def __init__(self, *, max_list_bytes: int) -> None:
        self._hpack = hpack.Decoder(max_header_list_size=max_list_bytes * HARD_LIMIT_FACTOR)
        # Lists of blocks that were decoded before, as long as the table stays as it is.
        self._lists: dict[bytes, Headers] = {}

    def decode(self, block: bytes) -> Headers:
        """A complete header block as raw pairs. Raises `ProtocolViolation`, always fatal for the connection."""
        known = self._lists.get(block)
        if known is not None:
            return known.copy()
        if _TABLE_UPDATES(block):
            raise ProtocolViolation(
                f"header block with more than {MAX_TABLE_UPDATES} table sizes", h2_code=ErrorCode.COMPRESSION_ERROR
            )
        table = self._hpack.header_table
        before = _Mark.of(table)
        try:
            headers: Headers = list(self._hpack.decode(block, raw=True))
        except hpack.OversizedHeaderListError as error:
            raise ProtocolViolation(str(error), h2_code=ErrorCode.ENHANCE_YOUR_CALM) from error
        except hpack.HPACKError as error:
            # Not in hpack's words: they may quote the whole block, or say where in our memory it lies.
            raise ProtocolViolation(
                f"header block cannot be decoded: {type(error).__name__}", h2_code=ErrorCode.COMPRESSION_ERROR
            ) from error
        if not before.still_holds(table):
            self._lists.clear()
        elif len(block) <= MAX_REMEMBERED_BYTES and not _is_table_update(block):
            _remember(self._lists, block, headers.copy())
        return headers


@dataclass(frozen=True, slots=True)
class _Mark:
    """What a compression table was. Entries come at the front, one by one, and leave at the back or all at once."""

    newest: object
    entries: int
    size: int

    @classmethod
    def of(cls, table: HeaderTable) -> _Mark:
        entries = table.dynamic_entries
        return cls(entries[0] if entries else None, len(entries), table.maxsize)

    def still_holds(self, table: HeaderTable) -> bool:
        # By identity: an entry that is equal may be another one, behind which the old ones have moved.
        now = _Mark.of(table)
        return now.newest is self.newest and now.entries == self.entries and now.size == self.size


def _is_table_update(block: bytes) -> bool:
    # RFC 7541 6.3: what it changes is not in the entries.
    return block[:1] >= b"\x20" and block[:1] < b"\x40"


def _remember(memory: dict[Key, Value], key: Key, value: Value) -> None:
    # Lists that never repeat fill it up; what does repeat is soon there again.
    if len(memory) >= MAX_REMEMBERED:
        memory.clear()
    memory[key] = value


class HeaderBlock:
    """A header block that arrives in several frames (RFC 9113 6.10), bounded in bytes and in frames."""

    __slots__ = ("_frames", "_limit", "_parts", "end_stream", "stream_id")

    def __init__(self, *, stream_id: int, end_stream: bool, first: bytes, max_list_bytes: int) -> None:
        self.stream_id = stream_id
        self.end_stream = end_stream
        self._limit = max_list_bytes * HARD_LIMIT_FACTOR
        self._parts = bytearray()
        self._frames = -1
        self.add(first)

    def add(self, fragment: bytes) -> None:
        """Take the next fragment. Raises `ProtocolViolation` (ENHANCE_YOUR_CALM) beyond either bound."""
        self._parts += fragment
        self._frames += 1
        if len(self._parts) > self._limit or self._frames > MAX_CONTINUATIONS:
            raise ProtocolViolation(
                f"header block of more than {self._limit} bytes or {MAX_CONTINUATIONS} CONTINUATION frames",
                h2_code=ErrorCode.ENHANCE_YOUR_CALM,
            )

    def content(self) -> bytes:
        """The whole block."""
        return bytes(self._parts)


def size_of(headers: Headers) -> int:
    """Bytes of a list as RFC 9113 6.5.2 counts them."""
    return sum(len(name) + len(value) + FIELD_OVERHEAD for name, value in headers)


def check_size(headers: Headers, *, limit: int) -> TooLarge | None:
    """What to say of a list over `limit` bytes; None if it is within."""
    size = size_of(headers)
    if size > limit:
        return TooLarge(f"header list of {size} bytes is over max_header_list_bytes ({limit})")
    return None


def check_request(headers: Headers) -> ProtocolViolation | None:
    """Why `headers` is no well-formed request (8.3.1), or None. Any method passes: refusing GET is the server's
    choice.

    CONNECT, which has no path, is malformed here: nothing above could serve it.
    """
    problem = _check(headers, pseudo=_REQUEST_PSEUDO)
    if problem is None:
        present = dict(headers)
        for name in (b":method", b":scheme", b":path"):
            if not present.get(name):
                problem = f"request without {name.decode()}"
                break
    return ProtocolViolation(problem) if problem else None


def check_response(headers: Headers) -> ProtocolViolation | None:
    """Why `headers` is no well-formed final response (8.3.2), or None."""
    problem = _check(headers, pseudo=_RESPONSE_PSEUDO)
    if problem is None:
        status = status_of(headers)
        if status is None or not _FINAL_STATUS(status):
            problem = f"response status {status!r}"
    return ProtocolViolation(problem) if problem else None


def check_trailers(headers: Headers) -> ProtocolViolation | None:
    """Why `headers` is no well-formed trailer section (8.1), or None."""
    problem = _check(headers, pseudo=_NO_PSEUDO)
    return ProtocolViolation(problem) if problem else None


def status_of(headers: Headers) -> bytes | None:
    """The value of `:status`, if there is one where it belongs."""
    for name, value in headers:
        if name == b":status":
            return value
    return None


def content_length(headers: Headers) -> int | None:
    """How many bytes of DATA the list promises (8.1.1), None if it does not say. It must have passed its check."""
    for name, value in headers:
        if name == b"content-length":
            return int(value)
    return None


def _check(headers: Headers, *, pseudo: frozenset[bytes]) -> str | None:
    """The rules that all header lists share (8.2, 8.3); the first one broken, in words."""
    seen: set[bytes] = set()
    regular = False
    for name, value in headers:
        if name.startswith(b":"):
            if name not in pseudo:
                return f"pseudo-header {name!r} does not belong here"
            if regular or name in seen:
                return f"pseudo-header {name!r} is repeated or comes late"
            seen.add(name)
        else:
            regular = True
            if not _NAME(name):
                return f"header name {name!r} has characters that are not allowed"
            if name in _CONNECTION_SPECIFIC or (name == b"te" and value != b"trailers"):
                return f"connection-specific header {name!r}"
            if name == b"content-length":
                if not _LENGTH(value) or name in seen:
                    return f"content-length {value!r} is no number or not the only one"
                seen.add(name)
        if _BAD_IN_VALUE(value) or (value.strip(_EDGE_SPACE) != value and name != b"grpc-message"):
            # gRPC leaves spaces of a status message as they are, so an honest peer's may begin or end with one.
            return f"value of header {name!r} has characters that are not allowed"
    return None
