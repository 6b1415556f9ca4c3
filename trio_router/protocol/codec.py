"""Encodes and decodes betterproto messages by tables made once per class from betterproto's own metadata.

The generated classes and stubs stay as they are; only betterproto's parser and serializer are not used, because
they are wrong on input that other implementations may send (a packed field in two pieces, a sub-message in two
pieces, truncated data, groups, unexpected wire types, -0.0) and take 40 times as long. Measured by bench/codec.py.

Pure. It must not know what any particular message means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import betterproto

from ..errors import DecodeError
from . import decoding, encoding
from .plan import PLACEHOLDER, Plan, Reader, Writer, message_of
from .scalars import (
    FIXED_TYPES,
    PAYLOAD_TYPES,
    VARINT_TYPES,
    FixedType,
    PayloadType,
    VarintType,
    enum_type,
)
from .varint import WIRE_BYTES, WIRE_VARINT, PackedReader, write_varint

M = TypeVar("M", bound=betterproto.Message)

# Made once per class and never changed afterwards; a plan holds nothing of any message.
_PLANS: dict[type[betterproto.Message], Plan] = {}


def encode(message: betterproto.Message) -> bytes:
    """Returns the message's bytes, fields in order of their numbers, unknown fields after them.

    A sub-message counts as present when anything in it is set, or when it was decoded or assigned to as such.
    Raises BadRequest, naming the field, for a value that its type cannot hold.
    """
    cls = type(message)
    return encoding.encoded(_PLANS.get(cls) or _plan_for(cls), message)


def decode(cls: type[M], data: bytes) -> M:
    """Returns a new message. Fields it does not know, or not with that wire type, are kept and encoded again.

    Raises DecodeError for anything that is not a message of protobuf.
    """
    plan = _PLANS.get(cls) or _plan_for(cls)
    whole = data if type(data) is bytes else bytes(data)
    try:
        message: M = decoding.new_message(plan, whole, 0, len(whole), 0)
    except IndexError as error:
        raise DecodeError(f"not a {cls.__name__}: the data ends in the middle of a field") from error
    except DecodeError as error:
        raise DecodeError(f"not a {cls.__name__}: {error.message}") from error
    return message


def make(cls: type[M], /, **fields: Any) -> M:
    """Returns a new message, as `cls(**fields)` does at twenty times the cost (bench/codec.py): for every request.

    None is no value, as there. Raises TypeError for a field that there is not, and for two members of one oneof.
    """
    plan = _PLANS.get(cls) or _plan_for(cls)
    values = plan.template.copy()
    values["_serialized_on_wire"] = False
    chosen = values["_group_current"] = plan.groups.copy()
    members = plan.members
    for name, value in fields.items():
        if name not in values:
            raise TypeError(f"{cls.__name__} has no field {name}")
        if value is None:
            continue
        if name in members:
            group = members[name]
            if chosen[group] is not None:
                raise TypeError(f"{cls.__name__} takes one of {chosen[group]} and {name}")
            chosen[group] = name
        values[name] = value
        values["_serialized_on_wire"] = True
    message: M = message_of(plan, values)  # type: ignore[assignment]  # a plan does not know its class as a type
    return message


def _plan_for(cls: type[betterproto.Message]) -> Plan:
    # Plans refer to each other, also in circles. They are published together when all of them are complete.
    fresh: dict[type[betterproto.Message], Plan] = {}
    plan = _build(cls, fresh)
    _PLANS.update(fresh)
    return plan


def _build(cls: type[betterproto.Message], fresh: dict[type[betterproto.Message], Plan]) -> Plan:
    known = _PLANS.get(cls) or fresh.get(cls)
    if known is not None:
        return known
    plan = fresh[cls] = Plan(cls)
    metadata = cls._betterproto  # type: ignore[arg-type]  # its descriptor is annotated for type[Never]
    for name in metadata.sorted_field_names:
        field = metadata.meta_by_field_name[name]
        if field.map_types:
            key = _shape(field.map_types[0], object, fresh)
            value = _shape(field.map_types[1], metadata.cls_by_field[f"{name}.value"], fresh)
            _add_map(plan, name, field.number, key, value)
            continue
        shape = _shape(field.proto_type, metadata.cls_by_field[name], fresh)
        if metadata.default_gen[name] is list:
            _add_repeated(plan, name, field.number, shape)
        else:
            _add_single(plan, name, field, shape)
    return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """A type's way on the wire, before it is known which field has it."""

    wire_type: int
    # What an absent field reads as; PLACEHOLDER where betterproto has to make a new object on the first look.
    default: Any
    read: Callable[[str], Reader]
    # (tag, whether presence is implicit)
    write: Callable[[bytes, bool], Writer]
    read_packed: Callable[[str], Reader] | None = None
    pack: Callable[[Iterable[Any]], bytes] | None = None
    plan: Plan | None = None


def _shape(proto_type: str, inner: Any, fresh: dict[type[betterproto.Message], Plan]) -> _Shape:
    if proto_type == betterproto.TYPE_MESSAGE:
        return _message_shape(_build(inner, fresh))
    if proto_type in PAYLOAD_TYPES:
        return _payload_shape(PAYLOAD_TYPES[proto_type])
    if proto_type in FIXED_TYPES:
        return _fixed_shape(FIXED_TYPES[proto_type])
    if proto_type == betterproto.TYPE_ENUM:
        return _varint_shape(enum_type(inner))
    if proto_type in VARINT_TYPES:
        return _varint_shape(VARINT_TYPES[proto_type])
    raise TypeError(f"no message of this protocol has had a {proto_type} so far: add it to scalars.py")


def _message_shape(plan: Plan) -> _Shape:
    return _Shape(
        wire_type=WIRE_BYTES,
        default=PLACEHOLDER,
        read=lambda name: decoding.message_reader(name, plan),
        write=lambda tag, implicit: encoding.message_writer(tag, plan, implicit=implicit),
        plan=plan,
    )


def _payload_shape(kind: PayloadType) -> _Shape:
    return _Shape(
        wire_type=WIRE_BYTES,
        default=kind.from_wire(b""),
        read=lambda name: decoding.payload_reader(name, kind.from_wire),
        write=lambda tag, implicit: encoding.payload_writer(tag, kind.to_wire, implicit=implicit),
    )


def _fixed_shape(kind: FixedType) -> _Shape:
    return _Shape(
        wire_type=kind.wire_type,
        default=0.0,
        read=lambda name: decoding.fixed_reader(name, kind.code),
        write=lambda tag, implicit: encoding.fixed_writer(tag, kind.code, implicit=implicit),
        read_packed=lambda name: decoding.packed_fixed(name, kind.code),
        pack=kind.pack,
    )


def _varint_shape(kind: VarintType) -> _Shape:
    elements = PackedReader(kind.from_wire)
    return _Shape(
        wire_type=WIRE_VARINT,
        default=kind.from_wire(0),
        read=lambda name: decoding.varint_reader(name, kind.from_wire),
        write=lambda tag, implicit: encoding.varint_writer(tag, kind.to_wire, implicit=implicit),
        read_packed=lambda name: decoding.packed_varints(name, elements),
        pack=kind.pack,
    )


def _add_single(plan: Plan, name: str, field: betterproto.FieldMetadata, shape: _Shape) -> None:
    tag = field.number << 3 | shape.wire_type
    reader = shape.read(name)
    default = shape.default
    if field.group:
        plan.groups[field.group] = None
        plan.members[name] = field.group
        reader = decoding.one_of(field.group, name, reader)
        default = PLACEHOLDER
    elif field.optional:
        default = None
    implicit = not field.group and not field.optional
    plan.readers[tag] = reader
    plan.template[name] = default
    plan.writers.append((name, default, shape.write(write_varint(tag), implicit), field.group))


def _add_repeated(plan: Plan, name: str, number: int, shape: _Shape) -> None:
    tag = number << 3 | shape.wire_type
    plan.readers[tag] = decoding.repeated(name, shape.read(name))
    if shape.read_packed is not None and shape.pack is not None:
        # Written packed; read in both forms, as protobuf asks.
        tag = number << 3 | WIRE_BYTES
        plan.readers[tag] = shape.read_packed(name)
        writer = encoding.packed(write_varint(tag), shape.pack)
    else:
        writer = encoding.repeated(shape.write(write_varint(tag), False))
    plan.template[name] = PLACEHOLDER
    plan.writers.append((name, PLACEHOLDER, writer, None))


def _add_map(plan: Plan, name: str, number: int, key: _Shape, value: _Shape) -> None:
    tag = write_varint(number << 3 | WIRE_BYTES)
    key_tag, value_tag = 1 << 3 | key.wire_type, 2 << 3 | value.wire_type
    entry = Plan(plan.cls)
    entry.readers = {key_tag: key.read("key"), value_tag: value.read("value")}
    entry.template |= {"key": key.default, "value": value.default}
    plan.readers[number << 3 | WIRE_BYTES] = decoding.map_reader(name, tag, entry, value.plan)
    plan.template[name] = PLACEHOLDER
    write_key = key.write(write_varint(key_tag), False)
    write_value = value.write(write_varint(value_tag), False)
    plan.writers.append((name, PLACEHOLDER, encoding.map_writer(tag, write_key, write_value), None))
