"""Google's own implementation of the same messages, as the judge of ours, and wire data to judge with.

Its classes are made at run time from the descriptors that protoc finds in protos/, so nothing of it is checked in.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message as GoogleMessage
from grpc_tools import protoc
from hypothesis import strategies as st

PROTOS = Path(__file__).resolve().parents[2] / "protos"

GoogleClass = Callable[[str], type[GoogleMessage]]
WireData = Callable[..., st.SearchStrategy[bytes]]


@pytest.fixture(scope="session")
def google(tmp_path_factory: pytest.TempPathFactory) -> GoogleClass:
    """Maps the full name of a message to google's class for it."""
    descriptors = tmp_path_factory.mktemp("protoc") / "descriptors"
    names = sorted(path.name for path in PROTOS.glob("*.proto"))
    assert protoc.main(["protoc", f"-I{PROTOS}", f"--descriptor_set_out={descriptors}", *names]) == 0
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(descriptors.read_bytes()).file:
        pool.Add(file)
    # A recursive message, which none of ours is.
    node = descriptor_pb2.FileDescriptorProto(name="node.proto", package="test", syntax="proto3")
    message = node.message_type.add(name="Node")
    message.field.add(name="value", number=1, type="TYPE_INT32", label="LABEL_OPTIONAL")
    message.field.add(name="next", number=2, type="TYPE_MESSAGE", type_name=".test.Node", label="LABEL_OPTIONAL")
    pool.Add(node)
    return lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


@pytest.fixture(scope="session")
def wire_data(google: GoogleClass) -> WireData:
    """Maps the full name of a message to data that may or may not be one: mostly fields it has, in any form, any
    number of times and in any order, with unknown fields, groups, wrong wire types, and some damage.

    With `odd=False` there is no damage, and no field has a wire type that is not its own.
    """

    @cache
    def for_name(name: str, *, odd: bool = True) -> st.SearchStrategy[bytes]:
        whole = message_data(google(name).DESCRIPTOR, 3, odd)
        return st.one_of(whole, whole, whole, damaged(whole)) if odd else whole

    return for_name


def varint(value: int, padding: int = 0) -> bytes:
    """A varint, with `padding` bytes more than it needs."""
    out = bytearray()
    while value > 0x7F or padding:
        out.append(value & 0x7F | 0x80)
        padding -= value <= 0x7F
        value >>= 7
    out.append(value)
    return bytes(out)


PADDINGS = st.sampled_from([0] * 12 + [1, 2])
NUMBERS = st.one_of(
    st.integers(0, 200),
    st.integers(0, 2**64 - 1),
    st.sampled_from([2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 2**64 - 2**31]),
)
# The last one has more than 64 bits.
VARINTS = st.one_of(st.builds(varint, NUMBERS, PADDINGS), st.just(b"\xff" * 9 + b"\x7f"))
SIZES = {1: 8, 5: 4}


def counted(payload: bytes, padding: int) -> bytes:
    return varint(len(payload), padding) + payload


def junk(number: int, wire_type: int, value: int, payload: bytes) -> bytes:
    """A field nobody asked for."""
    start = varint(number << 3 | wire_type)
    if wire_type == 0:
        return start + varint(value)
    if wire_type in SIZES:
        return start + value.to_bytes(8, "little")[: SIZES[wire_type]]
    if wire_type == 2:
        return start + counted(payload, 0)
    return start + varint(1 << 3) + varint(value) + varint(number << 3 | 4)


@cache
def message_data(descriptor: Any, depth: int, odd: bool) -> st.SearchStrategy[bytes]:
    numbers = [field.number for field in descriptor.fields] if odd else []
    fields = [field_data(field, depth, odd) for field in descriptor.fields if depth or field.message_type is None]
    unknown = st.builds(
        junk,
        st.sampled_from([*numbers, 100, 536870911]),
        st.sampled_from([0, 1, 2, 3, 5]),
        NUMBERS,
        st.binary(max_size=5),
    )
    return st.lists(st.one_of(*fields, unknown) if fields else unknown, max_size=5).map(b"".join)


def field_data(field: Any, depth: int, odd: bool) -> st.SearchStrategy[bytes]:
    def tagged(wire_type: int, value: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
        return st.builds(lambda padding, rest: varint(field.number << 3 | wire_type, padding) + rest, PADDINGS, value)

    def payload(value: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
        return tagged(2, st.builds(counted, value, PADDINGS))

    if field.message_type is not None:
        return payload(message_data(field.message_type, depth - 1, odd))
    if field.type == field.TYPE_STRING:
        return payload(st.one_of(st.text(max_size=6).map(str.encode), st.binary(max_size=2 if odd else 0)))
    if field.type == field.TYPE_BYTES:
        return payload(st.binary(max_size=6))
    wire_type = {field.TYPE_FLOAT: 5, field.TYPE_DOUBLE: 1}.get(field.type, 0)
    size = SIZES.get(wire_type)
    one = VARINTS if size is None else st.binary(min_size=size, max_size=size)
    if field.is_repeated:
        return st.one_of(tagged(wire_type, one), payload(st.lists(one, max_size=5).map(b"".join)))
    return tagged(wire_type, one)


@st.composite
def damaged(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Data with its end cut off, or with one byte changed, dropped or added."""
    data = draw(whole)
    at = draw(st.integers(0, len(data)))
    if draw(st.booleans()):
        return data[:at]
    return data[:at] + draw(st.binary(max_size=1)) + data[at + draw(st.integers(0, 1)) :]
