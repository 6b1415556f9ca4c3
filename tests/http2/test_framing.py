"""gRPC messages out of DATA bytes, however they are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_router.errors import ProtocolViolation, TooLarge
from trio_router.http2.framing import Assembler, join


def assemble(chunks: list[bytes], *, limit: int = 1000, into: list[bytes] | None = None) -> tuple[list[bytes], bool]:
    assembler = Assembler(limit=limit)
    messages = [] if into is None else into
    for chunk in chunks:
        assembler.feed(chunk, into=messages)
    return messages, assembler.pending


@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(0, 300), max_size=8))
def test_any_cut_gives_the_same_messages(messages, cuts):
    data = join(messages)
    edges = [0, *sorted(cut for cut in cuts if cut <= len(data)), len(data)]
    chunks = [data[start:end] for start, end in pairwise(edges)]
    assert assemble(chunks) == (messages, False)


@pytest.mark.parametrize("size", range(1, 9))
def test_byte_by_byte(size):
    message = bytes(range(size))
    assert assemble([bytes([byte]) for byte in join([message, b"", message])]) == ([message, b"", message], False)


@pytest.mark.parametrize("cut", [1, 4, 5, 6, 8])
def test_an_unfinished_message_is_pending(cut):
    assert assemble([join([b"abcd"])[:cut]]) == ([], True)


def test_a_finished_message_leaves_nothing_behind():
    assembler = Assembler(limit=1000)
    messages: list[bytes] = []
    data = join([b"x" * 900])
    assembler.feed(data[:500], into=messages)
    assert assembler.pending
    assembler.feed(data[500:], into=messages)
    assert not assembler.pending
    assert messages == [b"x" * 900]


@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_a_compressed_message_is_refused_and_those_before_it_are_kept(chunks):
    data = join([b"good"]) + b"\x01\0\0\0\x02hi"
    size = -(-len(data) // chunks)
    messages: list[bytes] = []
    with pytest.raises(ProtocolViolation, match="identity"):
        assemble([data[start : start + size] for start in range(0, len(data), size)], into=messages)
    assert messages == [b"good"]


def test_an_undefined_flag_is_refused():
    with pytest.raises(ProtocolViolation, match="flag 2"):
        assemble([b"\x02\0\0\0\x00"])


class TestLimit:
    def test_a_message_of_the_limit_passes(self):
        assert assemble([join([b"x" * 10])], limit=10) == ([b"x" * 10], False)

    @pytest.mark.parametrize("rest", [b"", b"x", b"x" * 11])
    def test_a_larger_one_is_refused_by_its_prefix(self, rest):
        with pytest.raises(TooLarge, match=r"max_message_bytes \(10\)"):
            assemble([b"\0\0\0\0\x0b" + rest], limit=10)

    def test_a_promised_length_reserves_nothing(self):
        assembler = Assembler(limit=2**31)
        assembler.feed(b"\0\x7f\xff\xff\xff", into=[])
        assembler.feed(b"abc", into=[])
        assert len(assembler._partial) == 3
