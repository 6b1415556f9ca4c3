"""HTTP/1.1 as a value."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_router.errors import RouterError, Unsupported
from trio_router.front.faults import HeadersTooLarge, MalformedHttp
from trio_router.front.wire import Body, RequestHead, Wire

REQUESTS = {
    "get": b"GET /v1/models?x=1 HTTP/1.1\r\nHost: a\r\nX-Request-Id: r\r\n\r\n",
    "length": b'POST /v1/chat HTTP/1.1\r\nhost: a\r\ncontent-length: 15\r\n\r\n{"a":"\xe4\xb8\xad\xf0\x9f\x98\x80"}',
    "chunked": (
        b"POST /c HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        b"5;ext=1\r\nhello\r\n1\r\n \r\n5\r\nworld\r\n0\r\ntrailer: t\r\n\r\n"
    ),
    "old": b"GET / HTTP/1.0\r\n\r\n",
    "absolute": b"GET http://a.example/p/q?z HTTP/1.1\r\nhost: a.example\r\n\r\n",
}


def parse(pieces: list[bytes]) -> list[tuple[RequestHead, bytes]]:
    """Parse pipelined requests, answering each so that the next may come."""
    wire = Wire(max_header_bytes=4096)
    requests: list[tuple[RequestHead, bytes]] = []
    head: RequestHead | None = None
    body = bytearray()
    for piece in pieces:
        wire.feed(piece)
        while True:
            head = head or wire.next_head()
            if head is None or wire.read_body(body) is Body.MORE:
                break
            requests.append((head, bytes(body)))
            head = None
            body.clear()
            wire.response_head(200, headers=((b"content-length", b"0"),))
            wire.response_end()
            if not wire.next_cycle():
                break
    return requests


@given(
    data=st.data(), names=st.lists(st.sampled_from(["get", "length", "chunked", "absolute"]), min_size=1, max_size=4)
)
def test_any_split_of_the_bytes_gives_the_same_requests(data: st.DataObject, names: list[str]) -> None:
    stream = b"".join(REQUESTS[name] for name in names)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=40)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]

    assert parse(pieces) == parse([stream])


def test_each_byte_alone_gives_the_same_requests() -> None:
    stream = REQUESTS["length"] + REQUESTS["chunked"] + REQUESTS["get"]

    requests = parse([stream[i : i + 1] for i in range(len(stream))])

    assert [head.path for head, _ in requests] == ["/v1/chat", "/c", "/v1/models"]
    assert [body for _, body in requests] == ['{"a":"中😀"}'.encode(), b"hello world", b""]


@pytest.mark.parametrize(
    ("name", "path", "query", "length"),
    [
        ("get", "/v1/models", "x=1", None),
        ("length", "/v1/chat", "", 15),
        ("chunked", "/c", "", None),
        ("old", "/", "", None),
        ("absolute", "/p/q", "z", None),
    ],
)
def test_a_head_is_read(name: str, path: str, query: str, length: int | None) -> None:
    [(head, _)] = parse([REQUESTS[name]])

    assert (head.path, head.query, head.content_length) == (path, query, length)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nbad header\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: " + b"9" * 3000 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_not_http_is_refused(raw: bytes) -> None:
    with pytest.raises(MalformedHttp):
        parse([raw])


def test_an_unknown_transfer_coding_is_unsupported() -> None:
    with pytest.raises(Unsupported):
        parse([b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n"])


@pytest.mark.parametrize("step", [1, 100, 100_000])
def test_too_many_headers_are_refused_however_they_come(step: int) -> None:
    raw = b"GET / HTTP/1.1\r\nhost: a\r\n" + b"x: " + b"y" * 5000 + b"\r\n\r\n"

    with pytest.raises(HeadersTooLarge):
        parse([raw[i : i + step] for i in range(0, len(raw), step)])


@given(st.binary(max_size=200))
def test_garbage_never_raises_anything_but_the_family(garbage: bytes) -> None:
    with contextlib.suppress(RouterError):
        parse([b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n", garbage or b"x"])


def test_expect_continue_is_seen_until_it_is_answered() -> None:
    wire = Wire(max_header_bytes=4096)
    wire.feed(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\n")

    assert wire.next_head() is not None
    assert wire.awaits_continue
    assert wire.go_on().startswith(b"HTTP/1.1 100 Continue\r\n")
    assert not wire.awaits_continue


def test_head_is_answered_without_a_body() -> None:
    wire = Wire(max_header_bytes=4096)
    wire.feed(b"HEAD / HTTP/1.1\r\nhost: a\r\n\r\n")
    wire.next_head()
    wire.read_body(bytearray())

    assert b"content-length: 3" in wire.response_head(200, headers=((b"content-length", b"3"),))
    assert wire.response_body(b"abc") == b""
    assert wire.response_end() == b""
    assert wire.next_cycle()
