"""Varints, tags and lengths: the parts of the protobuf wire format that carry no meaning yet.

It must not know messages or fields. Limits are those of google's parser (upb), so that what one side of a link
accepts the other accepts too: tags and lengths of at most 5 bytes, varints of at most 10, lengths below 2 GiB, 100
levels. Readers take an offset and return the next one; they raise DecodeError, or IndexError where the data ends,
which whoever parses a whole message turns into a DecodeError that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from ..errors import DecodeError

WIRE_VARINT: Final = 0
WIRE_FIXED64: Final = 1
WIRE_BYTES: Final = 2
WIRE_GROUP: Final = 3
WIRE_END_GROUP: Final = 4
WIRE_FIXED32: Final = 5

MAX_DEPTH: Final = 100
MAX_FIELD_NUMBER: Final = (1 << 29) - 1
MASK_64: Final = (1 << 64) - 1
_MAX_TAG: Final = (1 << 32) - 1
_MAX_LENGTH: Final = (1 << 31) - 1

# The memos below hold the token ids of any vocabulary in use; at roughly 100 bytes an entry that is 25 MB at worst.
_MEMO_ENTRIES: Final = 1 << 18


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns an unsigned 64-bit value; bits above the 64th, which only a broken writer sends, are dropped."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & MASK_64, at
        shift += 7
        if shift == 70:
            raise DecodeError("a varint is longer than 10 bytes")


def read_tag(data: bytes, at: int) -> tuple[int, int]:
    """Returns field number << 3 | wire type."""
    tag, at = _read_short(data, at, what="tag", limit=_MAX_TAG)
    if tag < 8:
        raise DecodeError("there is no field number 0")
    return tag, at


def read_length(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Returns where a length-delimited payload starts and where it stops; `end` bounds both."""
    length = data[at]
    if length < 0x80:
        at += 1
    else:
        length, at = _read_short(data, at, what="length", limit=_MAX_LENGTH)
    stop = at + length
    if stop > end:
        raise DecodeError(f"a field reaches {stop - end} bytes beyond the end of what encloses it")
    return at, stop


def skip_value(data: bytes, at: int, end: int, *, tag: int, depth: int) -> int:
    """Returns the offset behind the value of the field `tag`; `depth` levels enclose it."""
    wire_type = tag & 7
    if wire_type == WIRE_VARINT:
        at = read_varint(data, at)[1]
    elif wire_type == WIRE_BYTES:
        at = read_length(data, at, end)[1]
    elif wire_type == WIRE_FIXED32:
        at += 4
    elif wire_type == WIRE_FIXED64:
        at += 8
    elif wire_type == WIRE_GROUP:
        at = _skip_group(data, at, end, end_tag=tag + 1, depth=depth + 1)
    elif wire_type == WIRE_END_GROUP:
        raise DecodeError(f"group {tag >> 3} ends where it has not begun")
    else:
        raise DecodeError(f"there is no wire type {wire_type}")
    if at > end:
        raise DecodeError(f"a field reaches {at - end} bytes beyond the end of what encloses it")
    return at


def write_varint(value: int) -> bytes:
    """Encodes an int of 64 bits, of either sign; a negative one takes ten bytes, as protobuf has it."""
    return written[value & MASK_64]


def _read_short(data: bytes, at: int, *, what: str, limit: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift == 35:
            raise DecodeError(f"a {what} is longer than 5 bytes")
    if value > limit:
        raise DecodeError(f"a {what} is out of range")
    return value, at


def _skip_group(data: bytes, at: int, end: int, *, end_tag: int, depth: int) -> int:
    if depth > MAX_DEPTH:
        raise DecodeError(f"more than {MAX_DEPTH} levels deep")
    while True:
        tag, at = read_tag(data, at)
        if tag == end_tag:
            return at
        at = skip_value(data, at, end, tag=tag, depth=depth)


class _Written(dict[int, bytes]):
    """Varints by value, made at their first use."""

    def __missing__(self, value: int) -> bytes:
        out = bytearray()
        rest = value
        while rest > 0x7F:
            out.append(rest & 0x7F | 0x80)
            rest >>= 7
        out.append(rest)
        made = bytes(out)
        if value < _MEMO_ENTRIES:
            self[value] = made
        return made


# Keys must be plain unsigned ints: whoever looks up here has checked type and range.
written: Final = _Written()

_pieces: Final = re.compile(rb"[\x80-\xff]*[\x00-\x7f]").findall


class PackedReader(dict[bytes, Any]):
    """Reads packed varints of one type: a memo from the bytes of a varint to its value.

    A packed field is cut into varints by one regular expression and looked up by one `map`, without a Python
    instruction per element: 2,048 ids take a fifth of the time that a loop over their bytes would.
    """

    def __init__(self, convert: Callable[[int], Any]) -> None:
        """`convert` makes the field's value out of an unsigned 64-bit one."""
        super().__init__()
        self._convert = convert

    def __missing__(self, piece: bytes) -> Any:
        value = self._convert(read_varint(piece, 0)[0])
        # Only what a token id can be is worth keeping; longer ones would let a peer choose what fills the memo.
        if len(piece) <= 3 and len(self) < _MEMO_ENTRIES:
            self[piece] = value
        return value

    def read(self, payload: bytes) -> list[Any]:
        """Returns the elements of a packed field. Raises DecodeError."""
        if not payload:
            return []
        if payload[-1] > 0x7F:
            raise DecodeError("a packed field ends inside a varint")
        return list(map(self.__getitem__, _pieces(payload)))
