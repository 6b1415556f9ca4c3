"""What each scalar type of protobuf means: from the wire's integers to Python's values and back.

Tables, by betterproto's name of the type. It must not know messages, tags or offsets. Encoders raise
TypeError, ValueError or OverflowError, which say what is wrong with a value but not where.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import index
from typing import Any, Final

import betterproto

from .varint import MASK_64, written

_MASK_32: Final = (1 << 32) - 1
_SIGN_32: Final = 1 << 31
_SIGN_64: Final = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class VarintType:
    """A type whose values travel as varints."""

    # From an unsigned 64-bit integer. Like google's parser it takes the low bits of what is too large.
    from_wire: Callable[[int], Any]
    # To an unsigned 64-bit integer. Refuses what is out of range: a peer would silently truncate it.
    to_wire: Callable[[Any], int]
    # Packed form of several values.
    pack: Callable[[Iterable[Any]], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedType:
    """A type whose values travel as little-endian IEEE numbers."""

    wire_type: int
    # Format character of the struct module.
    code: str

    def pack(self, values: Iterable[Any]) -> bytes:
        """Packed form of several values. A finite one that is too large for the type is an OverflowError."""
        listed = list(values)
        return struct.pack(f"<{len(listed)}{self.code}", *listed)


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadType:
    """A type whose values travel as counted bytes."""

    from_wire: Callable[[bytes], Any]
    to_wire: Callable[[Any], bytes]


def as_int32(value: int) -> int:
    """Reads the low 32 bits of a wire value as two's complement."""
    return ((value & _MASK_32) ^ _SIGN_32) - _SIGN_32


def _as_uint32(value: int) -> int:
    return value & _MASK_32


def _as_int64(value: int) -> int:
    return (value ^ _SIGN_64) - _SIGN_64


def _as_uint64(value: int) -> int:
    return value


def _as_bool(value: int) -> bool:
    return value != 0


def _checked(name: str, low: int, high: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        number = value if type(value) is int else index(value)
        if not low <= number <= high:
            raise ValueError(f"{number} is not in the range of {name}")
        return number & MASK_64

    return check


def _packer(code: str) -> Callable[[Iterable[Any]], bytes]:
    if code.isupper():

        def pack(values: Iterable[Any]) -> bytes:
            # The array checks type and range of every element in C, at 6 ns each.
            return b"".join(map(written.__getitem__, array(code, values)))
    else:

        def pack(values: Iterable[Any]) -> bytes:
            return b"".join([written[value & MASK_64] for value in array(code, values)])

    return pack


def _text_to_wire(value: Any) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"expected str, not {type(value).__name__}")
    return value.encode()


def _bytes_to_wire(value: Any) -> bytes:
    # By way of a memoryview, because bytes(7) is seven zeros.
    return value if type(value) is bytes else bytes(memoryview(value))


def _bytes_from_wire(value: bytes) -> bytes:
    return value


def _bool_to_wire(value: Any) -> int:
    return 1 if index(value) else 0


def _pack_bools(values: Iterable[Any]) -> bytes:
    return bytes(map(_bool_to_wire, values))


_int32_to_wire: Final = _checked("int32", -_SIGN_32, _SIGN_32 - 1)

VARINT_TYPES: Final[dict[str, VarintType]] = {
    betterproto.TYPE_UINT32: VarintType(
        from_wire=_as_uint32, to_wire=_checked("uint32", 0, _MASK_32), pack=_packer("I")
    ),
    betterproto.TYPE_UINT64: VarintType(
        from_wire=_as_uint64, to_wire=_checked("uint64", 0, MASK_64), pack=_packer("Q")
    ),
    betterproto.TYPE_INT32: VarintType(from_wire=as_int32, to_wire=_int32_to_wire, pack=_packer("i")),
    betterproto.TYPE_INT64: VarintType(
        from_wire=_as_int64, to_wire=_checked("int64", -_SIGN_64, _SIGN_64 - 1), pack=_packer("q")
    ),
    betterproto.TYPE_BOOL: VarintType(from_wire=_as_bool, to_wire=_bool_to_wire, pack=_pack_bools),
}

FIXED_TYPES: Final[dict[str, FixedType]] = {
    betterproto.TYPE_FLOAT: FixedType(wire_type=5, code="f"),
    betterproto.TYPE_DOUBLE: FixedType(wire_type=1, code="d"),
}

PAYLOAD_TYPES: Final[dict[str, PayloadType]] = {
    betterproto.TYPE_STRING: PayloadType(from_wire=bytes.decode, to_wire=_text_to_wire),
    betterproto.TYPE_BYTES: PayloadType(from_wire=_bytes_from_wire, to_wire=_bytes_to_wire),
}


def enum_type(members: type[betterproto.Enum]) -> VarintType:
    """An enum: an int32 whose values become members, or nameless members where the number is unknown."""

    def from_wire(value: int) -> betterproto.Enum:
        return members.try_value(as_int32(value))

    return VarintType(from_wire=from_wire, to_wire=_int32_to_wire, pack=_packer("i"))
