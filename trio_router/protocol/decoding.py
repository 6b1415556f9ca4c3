"""From bytes to a message's values: the loop over fields, and a reader for each shape a field can have.

It must not know where plans come from. Everything here raises DecodeError for what is no protobuf, and IndexError
where the data ends early. All work is linear in the size of the data, whatever the data repeats.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from ..errors import DecodeError
from .plan import PLACEHOLDER, Plan, Reader, Values, message_of, values_of
from .varint import (
    MAX_DEPTH,
    PackedReader,
    read_length,
    read_tag,
    read_varint,
    skip_value,
    written,
)


def fill(plan: Plan, values: Values, data: bytes, at: int, end: int, depth: int) -> None:
    """Reads the fields in data[at:end] into `values`; where some are set already this merges, as protobuf asks."""
    if depth > MAX_DEPTH:
        raise DecodeError(f"more than {MAX_DEPTH} levels deep")
    readers = plan.readers
    while at < end:
        start = at
        tag = data[at]
        at += 1
        if tag > 0x7F:
            tag, at = read_tag(data, start)
        reader = readers.get(tag)
        if reader is not None:
            at = reader(values, data, at, end, depth)
        else:
            tag, at = read_tag(data, start)
            at = skip_value(data, at, end, tag=tag, depth=depth)
            _keep(values, data[start:at])
    if at != end:
        raise DecodeError(f"a field reaches {at - end} bytes beyond the end of what encloses it")


def new_message(plan: Plan, data: bytes, at: int, end: int, depth: int) -> Any:
    """Decodes data[at:end] as a message; `depth` levels enclose it."""
    values = plan.template.copy()
    if plan.groups:
        values["_group_current"] = plan.groups.copy()
    fill(plan, values, data, at, end, depth)
    return message_of(plan, values)


def _keep(values: Values, field: bytes) -> None:
    kept = values["_unknown_fields"]
    # A bytearray, because adding to bytes would copy all of it for each of a million unknown fields.
    if type(kept) is bytearray:
        kept += field
    else:
        values["_unknown_fields"] = bytearray(kept + field)


def varint_reader(name: str, convert: Callable[[int], Any]) -> Reader:
    """A single integer, bool or enum; of several the last counts."""
    small = [convert(value) for value in range(0x80)]

    def read(values: Values, data: bytes, at: int, end: int, depth: int) -> int:
        byte = data[at]
        if byte < 0x80:
            values[name] = small[byte]
            return at + 1
        value, at = read_varint(data, at)
        values[name] = convert(value)
        return at

    return read


def fixed_reader(name: str, code: str) -> Reader:
    """A single float or double; of several the last counts."""
    layout = struct.Struct(f"<{code}")
    unpack, size = layout.unpack, layout.size

    def read(values: Values, data: bytes, at: int, end: int, depth: int) -> int:
        stop = at + size
        if stop > end:
            raise DecodeError("a number is cut short")
        values[name] = unpack(data[at:stop])[0]
        return stop

    return read


def payload_reader(name: str, convert: Callable[[bytes], Any]) -> Reader:
    """A single string or bytes field; of several the last counts."""

    def read(values: Values, data: bytes, at: int, end: int, depth: int) -> int:
        at, stop = read_length(data, at, end)
        try:
            values[name] = convert(data[at:stop])
        except UnicodeDecodeError as error:
            raise DecodeError(f"{name} is not UTF-8: {error.reason} at its byte {error.start}") from error
        return stop

    return read


def message_reader(name: str, plan: Plan) -> Reader:
    """A single sub-message; several are merged."""

    def read(values: Values, data: bytes, at: int, end: int, depth: int) -> int:
        at, stop = read_length(data, at, end)
        current = values[name]
        if current is PLACEHOLDER or current is None:
            values[name] = new_message(plan, data, at, stop, depth + 1)
        else:
            fill(plan, values_of(current), data, at, stop, depth + 1)
        return stop

    return read


def one_of(group: str, name: str, read_member: Reader) -> Reader:
    """A member of a oneof: it unsets the member that was chosen before, unless that is itself."""

    def read(values: Values, data: bytes, at: int, end: int, depth: int) -> int:
        current = values["_group_current"]
        chosen = current[group]
        if chosen != name:
            if chosen is not None:
                values[chosen] = PLACEHOLDER
            current[group] = name
        return read_member(values, data, at, end, depth)

    return read


def repeated(name: str, read_one: Reader) -> Reader:
    """Elements that come one by one, read by the reader of a single field."""

    def read(values: Values, data: bytes, at: int, end: int, depth: int) -> int:
        element = {name: None}
        at = read_one(element, data, at, end, depth)
        _list(values, name).append(element[name])
        return at

    return read


def packed_varints(name: str, elements: PackedReader) -> Reader:
    """Integers that come packed; several packets are one list."""

    def read(values: Values, data: bytes, at: int, end: int, depth: int) -> int:
        at, stop = read_length(data, at, end)
        payload = data[at:stop]
        # A token chunk has one id, and its varint is the memo's own key.
        only = elements.get(payload) if stop - at < 4 else None
        found = elements.read(payload) if only is None else [only]
        if values[name] is PLACEHOLDER:
            values[name] = found
        else:
            values[name] += found
        return stop

    return read


def packed_fixed(name: str, code: str) -> Reader:
    """Floats or doubles that come packed; several packets are one list."""
    size = struct.calcsize(f"<{code}")

    def read(values: Values, data: bytes, at: int, end: int, depth: int) -> int:
        at, stop = read_length(data, at, end)
        count, rest = divmod(stop - at, size)
        if rest:
            raise DecodeError("a packed field ends inside a number")
        _list(values, name).extend(struct.unpack_from(f"<{count}{code}", data, at))
        return stop

    return read


def map_reader(name: str, tag: bytes, entry: Plan, value_plan: Plan | None) -> Reader:
    """Entries of a map; the last of a key counts. `entry` reads "key" and "value", `value_plan` a message value.

    An entry that holds something besides the two is kept among the unknown fields as a whole, as google's parser
    does, since a dict has no room for the rest.
    """

    def read(values: Values, data: bytes, at: int, end: int, depth: int) -> int:
        at, stop = read_length(data, at, end)
        pair = entry.template.copy()
        fill(entry, pair, data, at, stop, depth + 1)
        if pair["_unknown_fields"]:
            _keep(values, b"".join((tag, written[stop - at], data[at:stop])))
            return stop
        if value_plan is not None and pair["value"] is PLACEHOLDER:
            pair["value"] = new_message(value_plan, b"", 0, 0, depth + 1)
        if values[name] is PLACEHOLDER:
            values[name] = {}
        values[name][pair["key"]] = pair["value"]
        return stop

    return read


def _list(values: Values, name: str) -> list[Any]:
    current = values[name]
    if current is PLACEHOLDER:
        current = values[name] = []
    return current  # type: ignore[no-any-return]  # a repeated field holds a list or PLACEHOLDER
