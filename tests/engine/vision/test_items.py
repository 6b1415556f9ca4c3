"""Tensors to and from the wire."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_router.engine.vision.items import Tensor, read_tensor, row_of, write_tensor
from trio_router.errors import BadRequest
from trio_router.protocol.messages import TensorData


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6))
def test_whole_numbers_come_back(values):
    tensor = Tensor(shape=(len(values),), dtype="int64", values=tuple(values))
    assert read_tensor("x", write_tensor(tensor)) == tensor


@pytest.mark.parametrize(
    ("value", "half"),
    [(1.0, 0x3F80), (1 + 2**-8, 0x3F80), (1 + 3 * 2**-8, 0x3F82), (1 + 2**-8 + 2**-12, 0x3F81), (-2.0, 0xC000)],
    ids=["exact", "half to even, down", "half to even, up", "above half", "negative"],
)
def test_bfloat16_is_rounded_to_nearest_even(value, half):
    data = write_tensor(Tensor(shape=(1,), dtype="bfloat16", values=(value,)))
    assert data.inline == struct.pack("<H", half)
    (read,) = read_tensor("x", data).values
    assert read == struct.unpack("<f", struct.pack("<I", half << 16))[0]


def test_a_row_is_the_part_of_one_item():
    tensor = Tensor(shape=(2, 3), dtype="int64", values=(1, 2, 3, 4, 5, 6))
    assert row_of(tensor, 1) == Tensor(shape=(3,), dtype="int64", values=(4, 5, 6))
    assert row_of(Tensor(shape=(2,), dtype="float32", values=(0.5, 1.0)), 0).values == (0.5,)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (TensorData(shape=[1], dtype="int8", inline=b"a"), "unsupported dtype 'int8'"),
        (TensorData(shape=[3], dtype="int64", inline=b"12345678"), r"8 bytes are not \[3\] of int64"),
        (TensorData(shape=[2**31, 2**31], dtype="int64", inline=b""), "0 bytes are not"),
        (TensorData(shape=[1], dtype="int64"), "payload none"),
    ],
)
def test_what_is_no_tensor_is_refused(data, complaint):
    with pytest.raises(BadRequest, match=complaint):
        read_tensor("x", data)
