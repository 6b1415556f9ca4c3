"""What the router does to messages without decoding them: scan a token chunk, read a field, replace or drop fields.

Everything that is not named stays as it is, byte for byte, also what this build has never heard of. Field numbers
are the caller's; of message types this module knows only how a response with token ids looks. It knows no oneofs:
a caller that sets one member deletes the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final, TypeAlias

import betterproto

from ..errors import DecodeError
from ..pieces import Message, Pieces
from .scalars import VARINT_TYPES
from .varint import (
    MASK_64,
    MAX_FIELD_NUMBER,
    WIRE_BYTES,
    WIRE_VARINT,
    PackedReader,
    read_length,
    read_tag,
    read_varint,
    skip_value,
    write_varint,
)

# GenerateResponse.chunk, GenerateResponse.complete, and the fields of GenerateStreamChunk but its logprobs.
_CHUNK: Final = 0x0A
_COMPLETE: Final = 0x12
_TOKEN_IDS: Final = 0x0A
_PROMPT_TOKENS, _COMPLETION_TOKENS, _CACHED_TOKENS, _INDEX = 0x10, 0x18, 0x20, 0x38

_UINT32: Final = VARINT_TYPES[betterproto.TYPE_UINT32]
_ids: Final = PackedReader(_UINT32.from_wire)
_known_id: Final = _ids.get
_WORTH_SPLICING: Final = 65_536
"""Bytes of a message above which copying what an edit keeps costs more than looking at it."""
# Four counts, each with a tag of one byte and at most five of value: what is longer is no usual chunk.
_MAX_COUNTS_BYTES: Final = 4 * 6

_Edits: TypeAlias = "dict[int, bytes | _Edits | None]"


def scan_chunk(message: bytes) -> tuple[list[int], int, int, int, int] | None:
    """Reads a GenerateResponse that holds a chunk of token ids, and nothing else.

    Returns (token_ids, prompt_tokens, completion_tokens, cached_tokens, index), exactly as `codec.decode` would give
    them. None means "decode it": it is another message, has logprobs or unknown fields, or is malformed.

    0.4 us for one id, where `decode` takes 3 (bench/codec.py): its bytes are looked up, and so are those of the
    counts, which hardly ever change from token to token of a stream.
    """
    try:
        end = len(message)
        stop = message[3] + 4
        if message[0] == _CHUNK and message[1] == end - 2 < 0x80 and message[2] == _TOKEN_IDS and stop <= end:
            only = _known_id(message[4:stop])
            token_ids = _ids.read(message[4:stop]) if only is None else [only]
        else:
            token_ids, stop = _scan_ids(message, end)
            if end - stop > _MAX_COUNTS_BYTES:
                return None
        counts = _counts(message[stop:])
    except (IndexError, DecodeError):
        return None
    if counts is None:
        return None
    prompt_tokens, completion_tokens, cached_tokens, index = counts
    return token_ids, prompt_tokens, completion_tokens, cached_tokens, index


def one_token_end(message: bytes) -> bytes | None:
    """What follows the id in a chunk that holds one and says so by `completion_tokens`; None of any other message.

    The chunks of a stream repeat it: another one with the same end holds one token, too, and need not be scanned.
    """
    scanned = scan_chunk(message)
    if scanned is None or len(scanned[0]) != 1 or scanned[2] != 1:
        return None
    if message[1] != len(message) - 2 or message[2] != _TOKEN_IDS:
        return None  # lengths in a longer form than they need
    return message[message[3] + 4 :]


def _scan_ids(message: bytes, end: int) -> tuple[list[int], int]:
    """The ids of a chunk of any size, and where they stop. Raises DecodeError if it does not look like one."""
    at, stop = read_length(message, 1, end)
    if message[0] != _CHUNK or stop != end:
        raise DecodeError("not one chunk and nothing else")
    if message[at] != _TOKEN_IDS:
        return [], at
    at, stop = read_length(message, at + 1, end)
    return _ids.read(message[at:stop]), stop


@lru_cache(maxsize=4096)
def _counts(tail: bytes) -> tuple[int, int, int, int] | None:
    # Raises as the readers do; a failure is not remembered.
    found = {_PROMPT_TOKENS: 0, _COMPLETION_TOKENS: 0, _CACHED_TOKENS: 0, _INDEX: 0}
    at = 0
    while at < len(tail):
        tag = tail[at]
        if tag not in found:
            return None
        value, at = read_varint(tail, at + 1)
        found[tag] = _UINT32.from_wire(value)
    return found[_PROMPT_TOKENS], found[_COMPLETION_TOKENS], found[_CACHED_TOKENS], found[_INDEX]


def is_complete(message: bytes) -> bool:
    """Whether a GenerateResponse is a `complete`. Raises DecodeError; what is inside is not looked at."""
    size = len(message) - 2
    if 0 <= size < 0x80 and message[0] in (_CHUNK, _COMPLETE) and message[1] == size:
        return message[0] == _COMPLETE
    chosen = None
    for tag, _, _, _ in _fields(message, 0, len(message), 0):
        if tag in (_CHUNK, _COMPLETE):
            chosen = tag
    return chosen == _COMPLETE


def edit(message: bytes, edits: Mapping[tuple[int, ...], bytes | None]) -> bytes:
    """Replaces or deletes fields; everything else stays byte for byte, in order.

    A key is a path of field numbers through singular sub-messages. Its value is the whole new field, tag included
    (see `field_varint`, `field_bytes`; several fields in a row for a repeated one), or None to delete. Every
    occurrence of the field goes, whatever its wire type, and the new one stands at the end of its parent. A parent
    that is absent is made when something is set in it; of a parent in several pieces, the last gets what is set.

    Raises DecodeError where the message, or a sub-message on a path, is malformed; the rest is not looked at.
    Raises ValueError for paths that are empty or contain one another, and for a value that is not the field it is for.
    """
    return b"".join(_edited(message, 0, len(message), _tree(edits), 0))


def splice(message: bytes, edits: Mapping[tuple[int, ...], bytes | None]) -> Message:
    """As `edit`, but what is kept of a large message is not copied: the result looks at it."""
    if len(message) < _WORTH_SPLICING:
        return edit(message, edits)
    return Pieces(_edited(message, 0, len(message), _tree(edits), 0))


def field_varint(number: int, value: int) -> bytes:
    """A whole field of an integer, bool or enum type. Raises ValueError."""
    if not -(1 << 63) <= value <= MASK_64:
        raise ValueError(f"{value} has more than 64 bits")
    return _tag(number, WIRE_VARINT) + write_varint(value)


def field_bytes(number: int, data: bytes) -> bytes:
    """A whole field of a string, bytes, message or packed type. Raises ValueError."""
    return b"".join((_tag(number, WIRE_BYTES), write_varint(len(data)), data))


def get_string(message: bytes, path: tuple[int, ...]) -> str | None:
    """The string at a path of field numbers, or None where it is absent; of several the last. Raises DecodeError."""
    found = _find(message, 0, len(message), path, WIRE_BYTES, 0)
    if found is None:
        return None
    at, stop = read_length(message, *found)
    try:
        return message[at:stop].decode()
    except UnicodeDecodeError as error:
        raise DecodeError(f"field {path} is not UTF-8: {error.reason} at its byte {error.start}") from error


def get_bodies(message: bytes, path: tuple[int, ...]) -> list[bytes]:
    """The bodies of every field at a path, whatever they are: strings, messages, packed numbers. Raises DecodeError.

    Of a sub-message on the way that comes in pieces all are looked into, as a decoder merges them.
    """
    return list(_bodies(message, 0, len(message), path, 0))


def get_varint(message: bytes, path: tuple[int, ...]) -> int | None:
    """The integer at a path as the wire has it, unsigned and of 64 bits; otherwise like `get_string`."""
    found = _find(message, 0, len(message), path, WIRE_VARINT, 0)
    return None if found is None else read_varint(message, found[0])[0]


def _tag(number: int, wire_type: int) -> bytes:
    if not 1 <= number <= MAX_FIELD_NUMBER:
        raise ValueError(f"there is no field number {number}")
    return write_varint(number << 3 | wire_type)


def _fields(data: bytes, at: int, end: int, depth: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields (tag, where the field starts, where its value starts, where it stops) of every field in data[at:end]."""
    try:
        while at < end:
            start = at
            tag, value = read_tag(data, start)
            at = skip_value(data, value, end, tag=tag, depth=depth)
            yield tag, start, value, at
    except IndexError as error:
        raise DecodeError("the data ends in the middle of a field") from error


def _find(data: bytes, at: int, end: int, path: tuple[int, ...], wire_type: int, depth: int) -> tuple[int, int] | None:
    """Where the value of the last field at `path` starts and stops."""
    found = None
    for tag, _, value, stop in _fields(data, at, end, depth):
        if tag >> 3 != path[0]:
            continue
        if len(path) == 1:
            found = (value, stop) if tag & 7 == wire_type else found
        elif tag & 7 == WIRE_BYTES:
            body, _ = read_length(data, value, stop)
            found = _find(data, body, stop, path[1:], wire_type, depth + 1) or found
    return found


def _bodies(data: bytes, at: int, end: int, path: tuple[int, ...], depth: int) -> Iterator[bytes]:
    for tag, _, value, stop in _fields(data, at, end, depth):
        if tag >> 3 == path[0] and tag & 7 == WIRE_BYTES:
            body, _ = read_length(data, value, stop)
            if len(path) == 1:
                yield data[body:stop]
            else:
                yield from _bodies(data, body, stop, path[1:], depth + 1)


def _tree(edits: Mapping[tuple[int, ...], bytes | None]) -> _Edits:
    """The edits by field number, nested like the messages they are for."""
    root: _Edits = {}
    for path, replacement in edits.items():
        if not path:
            raise ValueError("an empty path names no field")
        node = root
        for number in path[:-1]:
            inner = node.setdefault(number, {})
            if not isinstance(inner, dict):
                raise ValueError(f"the edit of {path} is inside a field that is edited as a whole")
            node = inner
        if path[-1] in node:
            raise ValueError(f"the field {path} is edited as a whole and in part")
        if replacement and read_tag(replacement, 0)[0] >> 3 != path[-1]:
            raise ValueError(f"the replacement of {path} is another field")
        node[path[-1]] = replacement
    return root


def _edited(data: bytes, at: int, end: int, edits: _Edits, depth: int) -> list[bytes | memoryview]:
    """The pieces of data[at:end] after the edits. What is kept of a large message is looked at, not copied."""
    kept: bytes | memoryview = data if len(data) < _WORTH_SPLICING else memoryview(data)
    touched = [field for field in _fields(data, at, end, depth) if field[0] >> 3 in edits]
    last_parents = {tag >> 3: start for tag, start, _, _ in touched if tag & 7 == WIRE_BYTES}
    parts: list[bytes | memoryview] = []
    for tag, start, value, stop in touched:
        change = edits[tag >> 3]
        if isinstance(change, dict):
            if tag & 7 != WIRE_BYTES:
                continue  # not the sub-message, whatever it is
            body, _ = read_length(data, value, stop)
            inner = change if last_parents[tag >> 3] == start else _deletions(change)
            new_body = b"".join(_edited(data, body, stop, inner, depth + 1))
            if new_body == data[body:stop]:
                continue  # also the length stays as it was written
            parts += (kept[at:value], write_varint(len(new_body)), new_body)
        else:
            parts.append(kept[at:start])
        at = stop
    parts.append(kept[at:end])
    for number, change in edits.items():
        if isinstance(change, bytes):
            parts.append(change)
        elif change is not None and number not in last_parents:
            body_of_new_parent = b"".join(_edited(b"", 0, 0, change, depth + 1))
            if body_of_new_parent:
                parts.append(field_bytes(number, body_of_new_parent))
    return parts


def _deletions(edits: _Edits) -> _Edits:
    return {number: _deletions(change) if isinstance(change, dict) else None for number, change in edits.items()}
