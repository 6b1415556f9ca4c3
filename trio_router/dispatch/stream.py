"""The stream of one request as its caller sees it: frames to iterate over, or to have pumped into a sink."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ..errors import DecodeFailed, WorkerRejected
from ..protocol.codec import decode
from ..protocol.messages import GenerateResponse
from ..protocol.wire import is_complete, token_count
from ..rpc.call import ClientCall, Sink
from ..rpc.link import Flush
from ..rpc.metadata import RpcError
from .timeline import Timeline

_CHUNK: Final = b"\x0a"
"""The first byte of every chunk frame."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message of a Generate stream, as the worker wrote it."""

    data: bytes

    @property
    def is_complete(self) -> bool:
        """Whether it ends a choice. In a stream it repeats that choice's last chunk (do not count its tokens again)."""
        return is_complete(self.data)

    def message(self) -> GenerateResponse:
        """The decoded message (made anew at every call). Raises DecodeError."""
        return decode(GenerateResponse, self.data)


class GenerateStream:
    """Made by `Router.generate`. Either iterate over it or pump it, once."""

    def __init__(self, call: ClientCall, *, request_id: str, timeline: Timeline, choices: int) -> None:
        self.request_id = request_id
        self.timeline = timeline
        self._call = call
        self._choices = choices
        self._completes: list[bytes] = []
        self._ended = False

    def __repr__(self) -> str:
        return f"<GenerateStream {self.request_id} {'ended' if self._ended else 'open'}>"

    @property
    def completes(self) -> list[bytes]:
        """The complete frames so far, one per choice that has ended."""
        return self._completes

    @property
    def ended_well(self) -> bool:
        """Whether the worker ended the stream OK, with a complete for every choice."""
        return self._ended

    def __aiter__(self) -> GenerateStream:
        return self

    async def __anext__(self) -> Frame:
        """The next frame. Raises WorkerRejected when the worker fails the stream, DecodeFailed when it just stops."""
        try:
            data = await self._call.receive()
        except RpcError as exc:
            raise _broken(exc) from exc
        if data is None:
            self._finish()
            raise StopAsyncIteration
        self._note([data])
        return Frame(data)

    async def pump(self, sink: Sink, *, flush: Flush | None = None, tokens: Callable[[], int] | None = None) -> None:
        """Hand every batch of frames to `sink` as it comes, until the stream ends. Errors as for iteration.

        `sink` runs inside the reader of the worker's link: it must be quick, must not suspend, and returns False when
        its client is behind (call `resume` later). `flush` runs once per batch. What `sink` raises is raised here. A
        sink that reads the frames gives `tokens`, which tells at the end how many it has seen; without it they are
        counted here, for the request's record.
        """
        timeline = self.timeline
        irregular = self._note_irregular

        # The hot path: all that dispatch does per token (bench/stream.py).
        def counted(batch: list[bytes]) -> bool:
            timeline.frames += len(batch)
            for data in batch:
                count = token_count(data)
                timeline.output_tokens += irregular(data) if count is None else count
            return sink(batch)

        def uncounted(batch: list[bytes]) -> bool:
            timeline.frames += len(batch)
            for data in batch:
                if data[:1] != _CHUNK:
                    irregular(data)
            return sink(batch)

        try:
            await self._call.pump(counted if tokens is None else uncounted, flush=flush)
        except RpcError as exc:
            raise _broken(exc) from exc
        finally:
            if tokens is not None:
                timeline.output_tokens += tokens()
        self._finish()

    def resume(self) -> None:
        """The sink has room again."""
        self._call.resume()

    def _note(self, batch: list[bytes]) -> None:
        timeline = self.timeline
        timeline.frames += len(batch)
        for data in batch:
            count = token_count(data)
            timeline.output_tokens += self._note_irregular(data) if count is None else count

    def _note_irregular(self, data: bytes) -> int:
        """Any frame but a plain chunk; returns the tokens it adds."""
        if is_complete(data):
            self._completes.append(data)
            return 0
        return len(decode(GenerateResponse, data).chunk.token_ids)

    def _finish(self) -> None:
        if len(self._completes) < self._choices:
            raise DecodeFailed(
                f"the worker ended the stream after {len(self._completes)} of {self._choices} complete frames"
            )
        self._ended = True


def _broken(exc: RpcError) -> WorkerRejected:
    message = exc.message or "the worker gave no reason"
    return WorkerRejected(message, status=exc.status, leg="decode", details=exc.details, code="worker_stream_failed")
