"""Our codec and google's parser agree on any data: on what is malformed, on every value, on what is written back."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import betterproto
import pytest
from google.protobuf.message import DecodeError as GoogleDecodeError
from google.protobuf.message import Message as GoogleMessage
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_router.errors import DecodeError
from trio_router.protocol import messages
from trio_router.protocol.codec import decode, encode


@dataclass(eq=False, repr=False)
class Node(betterproto.Message):
    value: int = betterproto.int32_field(1)
    next: Node = betterproto.message_field(2)  # noqa: RUF009  # the only way to declare it


ENGINE, COMMON = "vllm.grpc.engine", "smg.grpc.common"
TYPES = {
    f"{ENGINE}.GenerateRequest": messages.GenerateRequest,
    f"{ENGINE}.SamplingParams": messages.SamplingParams,
    f"{ENGINE}.MultimodalInputs": messages.MultimodalInputs,
    f"{ENGINE}.GenerateResponse": messages.GenerateResponse,
    f"{ENGINE}.GenerateStreamChunk": messages.GenerateStreamChunk,
    f"{ENGINE}.GenerateComplete": messages.GenerateComplete,
    f"{ENGINE}.GetModelInfoResponse": messages.GetModelInfoResponse,
    f"{ENGINE}.EmbedResponse": messages.EmbedResponse,
    f"{COMMON}.KvEventBatch": messages.KvEventBatch,
    f"{COMMON}.KvBlock": messages.KvBlock,
    f"{COMMON}.EngineLoad": messages.EngineLoad,
    "grpc.health.v1.HealthListResponse": messages.ServiceHealthListResponse,
    "trio_router.worker.v1.GetCountersResponse": messages.GetCountersResponse,
    "test.Node": Node,
}


def plain(value: Any) -> Any:
    """A scalar in a form that tells -0.0 from 0.0, takes nan for equal to itself, and forgets what an enum is."""
    if isinstance(value, float):
        return struct.pack("<d", value)
    return int(value) if isinstance(value, int) else value


def assert_same(ours: betterproto.Message, theirs: GoogleMessage) -> None:
    """Every field has the same value and the same presence. To be called before anything has looked at `ours`."""
    for field in theirs.DESCRIPTOR.fields:
        name = field.name
        oneof = field.containing_oneof
        if oneof is not None and len(oneof.fields) > 1:
            chosen, value = betterproto.which_one_of(ours, oneof.name)
            assert chosen == (theirs.WhichOneof(oneof.name) or "")
            if chosen == name:
                assert_same_value(value, getattr(theirs, name))
        elif field.has_presence:
            assert ours.is_set(name) == theirs.HasField(name), name
            if theirs.HasField(name):
                assert_same_value(getattr(ours, name), getattr(theirs, name))
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            assert_same_map(getattr(ours, name), getattr(theirs, name))
        elif field.is_repeated:
            our_list, their_list = getattr(ours, name), list(getattr(theirs, name))
            assert len(our_list) == len(their_list), name
            for our_element, their_element in zip(our_list, their_list, strict=True):
                assert_same_value(our_element, their_element)
        else:
            assert_same_value(getattr(ours, name), getattr(theirs, name))


def assert_same_map(ours: dict[Any, Any], theirs: Any) -> None:
    assert ours.keys() == set(theirs)
    for key, value in ours.items():
        assert_same_value(value, theirs[key])


def assert_same_value(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, GoogleMessage):
        assert_same(ours, theirs)
    else:
        assert plain(ours) == plain(theirs)
        assert isinstance(ours, type(theirs))


def from_google(cls: type[betterproto.Message], theirs: GoogleMessage) -> betterproto.Message:
    """Builds the message by betterproto's own constructor."""
    inner = cls._betterproto.cls_by_field
    values: dict[str, Any] = {}
    for field, value in theirs.ListFields():
        if field.message_type is None:
            values[field.name] = list(value) if field.is_repeated else value
        elif field.message_type.GetOptions().map_entry:
            item = field.message_type.fields_by_name["value"].message_type
            kind = inner[f"{field.name}.value"]
            values[field.name] = {key: from_google(kind, value[key]) if item else value[key] for key in value}
        elif field.is_repeated:
            values[field.name] = [from_google(inner[field.name], element) for element in value]
        else:
            values[field.name] = from_google(inner[field.name], value)
            # The constructor cannot say that an empty message is present; assigning to it, or decoding it, can.
            values[field.name]._serialized_on_wire = True
    return cls(**values)


def assert_written(ours: bytes, theirs: GoogleMessage) -> None:
    """Google reads `ours` as `theirs`, unknown fields included."""
    if "nan" in str(theirs):
        return  # CPython makes a signalling nan quiet when it widens a float, so the bits of one may differ
    read_back = type(theirs).FromString(ours)
    assert read_back.SerializeToString(deterministic=True) == theirs.SerializeToString(deterministic=True)


@pytest.mark.parametrize("name", TYPES)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_both_read_the_same_and_what_we_write_back_is_the_same_to_google(
    google: Callable[[str], type[GoogleMessage]],
    wire_data: Callable[[str], st.SearchStrategy[bytes]],
    name: str,
    data: st.DataObject,
) -> None:
    wire = data.draw(wire_data(name))
    try:
        theirs = google(name).FromString(wire)
    except GoogleDecodeError:
        with pytest.raises(DecodeError):
            decode(TYPES[name], wire)
        return
    assert_same(decode(TYPES[name], wire), theirs)
    # Decoded anew, because looking at a field creates it.
    assert_written(encode(decode(TYPES[name], wire)), theirs)


@pytest.mark.parametrize("name", TYPES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_betterproto_has_built_we_write_as_google_would(
    google: Callable[[str], type[GoogleMessage]],
    wire_data: Callable[[str], st.SearchStrategy[bytes]],
    name: str,
    data: st.DataObject,
) -> None:
    try:
        theirs = google(name).FromString(data.draw(wire_data(name)))
    except GoogleDecodeError:
        return
    theirs.DiscardUnknownFields()
    assert_written(encode(from_google(TYPES[name], theirs)), theirs)
