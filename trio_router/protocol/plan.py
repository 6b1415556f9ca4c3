"""The table a message class is read and written by, and the way around betterproto's attribute access.

`codec.py` fills the table, `decoding.py` and `encoding.py` follow it. It must not know the wire.

Every attribute access of a betterproto message runs Python code (0.9 us), so the codec works on the instance's
`__dict__`. What lies there, in betterproto 2.0.0b7: each field under its name, PLACEHOLDER where it has never been
set or looked at; `_group_current`, the chosen member of each oneof; `_unknown_fields`; `_serialized_on_wire`, which
tells an empty message that is present from one that only a look has created.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import betterproto

Values = dict[str, Any]
# (values, data, offset behind the tag, end of the message, levels around it) -> offset behind the value
Reader = Callable[[Values, bytes, int, int, int], int]
# (parts of the encoded message so far, value)
Writer = Callable[[list[bytes], Any], None]

PLACEHOLDER: Final[Any] = betterproto.PLACEHOLDER


class Plan:
    """How one message class is read and written."""

    __slots__ = ("cls", "groups", "members", "readers", "template", "writers")

    def __init__(self, cls: type[betterproto.Message]) -> None:
        self.cls = cls
        # By tag, so a field with a wire type that is not its own finds no reader and is kept as unknown.
        self.readers: dict[int, Reader] = {}
        # (field, value that is not worth a look, writer, oneof) in order of field numbers.
        self.writers: list[tuple[str, Any, Writer, str | None]] = []
        # The `__dict__` of a message decoded from no bytes, less its own `_group_current`.
        self.template: Values = {"_serialized_on_wire": True, "_unknown_fields": b"", "_group_current": {}}
        self.groups: dict[str, str | None] = {}
        # The oneof of each field that is in one.
        self.members: dict[str, str] = {}


def values_of(message: betterproto.Message) -> Values:
    """The instance's own `__dict__`, past betterproto's `__getattribute__`."""
    values: Values = object.__getattribute__(message, "__dict__")
    return values


def message_of(plan: Plan, values: Values) -> betterproto.Message:
    """An instance whose `__dict__` is `values`, past betterproto's constructor (36 us for a chunk)."""
    message = object.__new__(plan.cls)
    object.__setattr__(message, "__dict__", values)
    return message
