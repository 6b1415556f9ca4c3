"""A scripted router, the shipped tokenizer, and a front between them and an HTTP client."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio

import trio_router.engine.assets
from trio_router.errors import RouterError
from trio_router.front.app import HttpFront
from trio_router.front.media import MediaDesk
from trio_router.front.seams import Sink
from trio_router.front.settings import FrontSettings, HttpSettings
from trio_router.front.texts import LoadedText
from trio_router.protocol.codec import decode, encode
from trio_router.protocol.messages import GenerateComplete, GenerateRequest, GenerateResponse, GenerateStreamChunk
from trio_router.text.bundle import read_directory
from trio_router.text.tokenizer import Tokenizer, load

MODEL = "tiny-english"
WINDOW_BYTES = 65536
PREFIX_BYTES = 5

Step = bytes | list[bytes] | float | Exception
"""A frame, a batch of them, seconds to wait, or how the stream fails."""


class Frames:
    """Makes a worker's frames."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def chunk(self, ids: list[int], *, index: int = 0) -> bytes:
        chunk = GenerateStreamChunk(token_ids=ids, prompt_tokens=7, completion_tokens=len(ids), index=index)
        return encode(GenerateResponse(chunk=chunk))

    def complete(self, reason: str = "stop", *, index: int = 0, cached: int = 0, **fields) -> bytes:
        frame = GenerateComplete(finish_reason=reason, prompt_tokens=7, cached_tokens=cached, index=index, **fields)
        return encode(GenerateResponse(complete=frame))

    def text(self, text: str, reason: str = "stop", *, index: int = 0, **fields) -> list[bytes]:
        """A chunk per token of `text`, and a complete that repeats the last delta."""
        ids = self.tokenizer.encode(text)
        chunks = [self.chunk([token], index=index) for token in ids]
        return [*chunks, self.complete(reason, index=index, output_ids=ids[-1:], **fields)]


class ScriptedStream:
    """Plays steps under a stream window, as the link's flow control would allow."""

    def __init__(self, steps: list[Step]) -> None:
        self.steps = steps
        self.sent_bytes = 0
        self._used = 0
        self._full = False
        self._resumed = trio.Event()

    prompt_counts: tuple[int, int] | None = None

    async def pump(self, sink: Sink, *, tokens: Callable[[], int]) -> None:
        for step in self.steps:
            await play(step)
            batch = [step] if isinstance(step, bytes) else step if isinstance(step, list) else []
            if batch:
                await self._deliver(batch, sink=sink)

    async def _deliver(self, batch: list[bytes], *, sink: Sink) -> None:
        size = sum(len(frame) + PREFIX_BYTES for frame in batch)
        while self._full and self._used + size > WINDOW_BYTES:
            await self._resumed.wait()
        self.sent_bytes += size
        self._used += size
        if sink(batch):
            self._used = 0
        elif not self._full:
            self._full = True
            self._resumed = trio.Event()

    def resume(self) -> None:
        self._full = False
        self._used = 0
        self._resumed.set()


async def play(step: Step) -> None:
    if isinstance(step, Exception):
        raise step
    await trio.sleep(step if isinstance(step, float) else 0)


class ScriptedRouter:
    """Plays one script for every request; what comes before its first frame is played before the block is entered."""

    def __init__(self, script: Callable[[GenerateRequest], list[Step]] | list[Step]) -> None:
        self._script = script if callable(script) else lambda request: script
        self.served = [MODEL]
        self.ready = True
        self.requests: list[GenerateRequest] = []
        self.streams: list[ScriptedStream] = []
        self.outcomes: list[str] = []
        self.ended_at: list[float] = []
        self.timeouts: list[float | None] = []

    def models(self) -> list[str]:
        return self.served

    @asynccontextmanager
    async def generate(
        self, message: bytes, *, timeout: float | None, model: str | None, client: str
    ) -> AsyncIterator[ScriptedStream]:
        request = decode(GenerateRequest, message)
        self.requests.append(request)
        self.timeouts.append(timeout)
        steps = list(self._script(request))
        slot = len(self.outcomes)
        self.outcomes.append("open")
        try:
            while steps and not isinstance(steps[0], bytes | list):
                await play(steps.pop(0))
            stream = ScriptedStream(steps)
            self.streams.append(stream)
            yield stream
            self.outcomes[slot] = "ok"
        except trio.Cancelled:
            self.outcomes[slot] = "cancelled"
            raise
        except RouterError:
            self.outcomes[slot] = "failed"
            raise
        finally:
            self.ended_at.append(trio.current_time())


def events_of(body: bytes) -> list[dict | str]:
    """The data of each event; the shape of the stream itself is checked on the way."""
    assert body.endswith(b"\n\n")
    events: list[dict | str] = []
    for block in body[:-2].split(b"\n\n"):
        assert block.startswith(b"data: ")
        assert b"\n" not in block
        data = block.removeprefix(b"data: ")
        events.append("[DONE]" if data == b"[DONE]" else msgspec.json.decode(data))
    return events


def content_of(events: list[dict | str], index: int = 0) -> str:
    """A choice's text, put together as a client does it."""
    text = ""
    for event in events:
        for choice in event["choices"] if isinstance(event, dict) and "choices" in event else ():
            if choice["index"] == index:
                text += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    return text


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load(read_directory(Path(trio_router.engine.assets.__file__).parent))


@pytest.fixture(scope="session")
def frames(tokenizer) -> Frames:
    return Frames(tokenizer)


@pytest.fixture
def scripted() -> type[ScriptedRouter]:
    return ScriptedRouter


@pytest.fixture(scope="session")
def read_events() -> Callable[[bytes], list[dict | str]]:
    return events_of


@pytest.fixture(scope="session")
def content() -> Callable[..., str]:
    return content_of


@pytest.fixture
def serve(launch, tokenizer) -> Callable[..., Awaitable[object]]:
    """`site = await serve(router, capacity=..., front={...}, media=desk, texts=tokenizer, **http_settings)`."""

    async def serve_front(
        router: ScriptedRouter,
        *,
        capacity: int = 65536,
        front: dict | None = None,
        context: int | None = None,
        media: MediaDesk | None = None,
        texts: Tokenizer | None = None,
        **http,
    ):
        numbers = itertools.count(1)
        made = HttpFront(
            router,
            LoadedText(texts or tokenizer),
            settings=FrontSettings(http=HttpSettings(**http), **(front or {})),
            context_length=lambda model: context,
            media=media,
            ids=lambda: f"{next(numbers):032x}",
            clock=lambda: 1_700_000_000.9,
        )
        return await launch(made, server=made.server, capacity=capacity)

    return serve_front
