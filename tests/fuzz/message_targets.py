"""Protobuf readers and the HTTP/1 parser on any bytes."""

from __future__ import annotations

from typing import Final

from trio_router.errors import DecodeError, RouterError
from trio_router.front.wire import Body, RequestHead, Wire
from trio_router.protocol import messages, wire
from trio_router.protocol.codec import decode, encode

from .script import Script

TYPES: Final = [
    messages.GenerateRequest,
    messages.GenerateResponse,
    messages.GenerateStreamChunk,
    messages.GenerateComplete,
    messages.MultimodalInputs,
    messages.KvEventBatch,
    messages.GetModelInfoResponse,
    messages.EmbedResponse,
]
MAX_HEADER_BYTES: Final = 2000


def codec(data: bytes) -> None:
    """Decoding raises DecodeError or gives what encodes to the same message again."""
    script = Script(data)
    cls = TYPES[script.below(len(TYPES))]
    try:
        message = decode(cls, script.rest())
    except DecodeError:
        return
    once = encode(message)
    assert encode(decode(cls, once)) == once


def chunk(data: bytes) -> None:
    """A scan of a token chunk says what decoding says, or nothing."""
    scanned = wire.scan_chunk(data)
    try:
        complete = wire.is_complete(data)
    except DecodeError:
        assert scanned is None
        return
    if scanned is None:
        return
    assert not complete
    found = decode(messages.GenerateResponse, data).chunk
    expected = (found.token_ids, found.prompt_tokens, found.completion_tokens, found.cached_tokens, found.index)
    assert scanned == expected


def edits(data: bytes) -> None:
    """An edit raises what it declares, or does what it was asked and nothing else."""
    script = Script(data)
    changes: dict[tuple[int, ...], bytes | None] = {}
    for _ in range(script.below(4)):
        path = tuple(1 + script.below(20) for _ in range(1 + script.below(3)))
        kind = script.below(3)
        value = (
            wire.field_varint(path[-1], script.number()) if kind == 1 else wire.field_bytes(path[-1], script.take(5))
        )
        changes[path] = value if kind else None
    message = script.rest()
    try:
        edited = wire.edit(message, changes)
    except (DecodeError, ValueError):
        return
    again = wire.edit(edited, changes)  # may put parents that were made into another order, once
    assert wire.edit(again, changes) == again
    assert len(again) == len(edited)
    assert len(edited) <= len(message) + sum(30 + len(value or b"") for value in changes.values())
    if not changes:
        assert edited == message
    for path, value in changes.items():
        if value is None:
            assert wire.get_varint(edited, path) is None
            assert wire.get_string(edited, path) is None


def http1(data: bytes) -> None:
    """The HTTP/1 parser raises our own errors only, says the same however bytes are cut, and holds a bounded rest."""
    script = Script(data)
    sizes = [1 + script.byte() for _ in range(script.below(20))]
    text = script.rest()
    assert _requests(text, sizes) == _requests(text, [])


def _requests(text: bytes, sizes: list[int]) -> list[object]:
    """What a server makes of `text`, fed in pieces of the given sizes and the rest at once."""
    parser = Wire(max_header_bytes=MAX_HEADER_BYTES)
    found: list[object] = []
    head: RequestHead | None = None
    body = bytearray()
    at = 0
    try:
        for size in [*sizes, len(text)]:
            piece = text[at : at + size]
            at += size
            if not piece:
                break
            parser.feed(piece)
            while (head := head or parser.next_head()) is not None:
                if parser.read_body(body) is Body.MORE:
                    break
                found.append((head, bytes(body)))
                head = None
                body.clear()
                parser.response_head(200, headers=((b"content-length", b"2"),))
                parser.response_body(b"ok")
                parser.response_end()
                if not parser.next_cycle():
                    return found
            assert parser.buffered_bytes <= MAX_HEADER_BYTES + len(piece)
    except RouterError as error:
        found.append(type(error))
    return found
