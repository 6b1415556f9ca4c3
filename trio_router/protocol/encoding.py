"""From a message's values to bytes: the loop over fields, and a writer for each shape a field can have.

It must not know where plans come from. Writers append to a flat list of parts, so that a large payload is copied
once, however deep it lies. They raise TypeError, ValueError or OverflowError; `put` turns that into a BadRequest
that names the field.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any

import betterproto

from ..errors import BadRequest
from .plan import PLACEHOLDER, Plan, Values, Writer, values_of
from .varint import written


def put(plan: Plan, out: list[bytes], values: Values) -> None:
    """Appends the encoded fields of one message to `out`. Raises BadRequest."""
    name = ""
    try:
        for name, default, write, group in plan.writers:
            value = values[name]
            if value is default or value is PLACEHOLDER or value is None:
                continue
            if group is not None and values["_group_current"][group] != name:
                continue
            write(out, value)
    except (TypeError, ValueError, OverflowError, AttributeError, struct.error) as error:
        raise BadRequest(f"{plan.cls.__name__}.{name}: {error}") from error
    if values["_unknown_fields"]:
        out.append(values["_unknown_fields"])


def varint_writer(tag: bytes, to_wire: Callable[[Any], int], *, implicit: bool) -> Writer:
    """A single integer, bool or enum; zero is left out where presence is `implicit`."""

    def write(out: list[bytes], value: Any) -> None:
        number = to_wire(value)
        if number or not implicit:
            out.append(tag)
            out.append(written[number])

    return write


def fixed_writer(tag: bytes, code: str, *, implicit: bool) -> Writer:
    """A single float or double; positive zero, and only that, is left out where presence is `implicit`."""
    layout = struct.Struct(f"<{code}")
    pack, zero = layout.pack, bytes(layout.size)

    def write(out: list[bytes], value: Any) -> None:
        number = pack(value)
        if number != zero or not implicit:
            out.append(tag)
            out.append(number)

    return write


def payload_writer(tag: bytes, to_wire: Callable[[Any], bytes], *, implicit: bool) -> Writer:
    """A single string or bytes field; an empty one is left out where presence is `implicit`."""

    def write(out: list[bytes], value: Any) -> None:
        payload = to_wire(value)
        if payload or not implicit:
            out += (tag, written[len(payload)], payload)

    return write


def message_writer(tag: bytes, plan: Plan, *, implicit: bool) -> Writer:
    """A single sub-message. Where presence is `implicit` an empty one that only a look has created is left out."""
    cls = plan.cls

    def write(out: list[bytes], value: Any) -> None:
        if not isinstance(value, cls):
            raise TypeError(f"expected {cls.__name__}, not {type(value).__name__}")
        values = values_of(value)
        mark = len(out)
        out += (tag, b"")
        put(plan, out, values)
        if implicit and len(out) == mark + 2 and not values["_serialized_on_wire"]:
            del out[mark:]
        else:
            _seal(out, mark + 1)

    return write


def repeated(write_one: Writer) -> Writer:
    """Elements one by one, each written by the writer of a single field with explicit presence."""

    def write(out: list[bytes], value: Iterable[Any]) -> None:
        for element in _elements(value):
            write_one(out, element)

    return write


def packed(tag: bytes, pack: Callable[[Iterable[Any]], bytes]) -> Writer:
    """Numbers in one packet, or nothing where there are none."""
    return payload_writer(tag, lambda value: pack(_elements(value)), implicit=True)


def map_writer(tag: bytes, write_key: Writer, write_value: Writer) -> Writer:
    """Entries of a map, each with both key and value."""

    def write(out: list[bytes], value: dict[Any, Any]) -> None:
        for key, item in value.items():
            mark = len(out)
            out += (tag, b"")
            write_key(out, key)
            write_value(out, item)
            _seal(out, mark + 1)

    return write


def encoded(plan: Plan, message: betterproto.Message) -> bytes:
    """The bytes of one message. Raises BadRequest."""
    out: list[bytes] = []
    put(plan, out, values_of(message))
    return b"".join(out)


def _elements(value: Iterable[Any]) -> Iterable[Any]:
    # Both can be iterated over, but whoever passes one meant a list with it as the only element.
    if isinstance(value, str | bytes | bytearray):
        raise TypeError(f"expected a list, not {type(value).__name__}")
    return value


def _seal(out: list[bytes], mark: int) -> None:
    # Everything after `mark` is the body whose length goes there.
    out[mark] = written[sum(map(len, out[mark + 1 :]))]
