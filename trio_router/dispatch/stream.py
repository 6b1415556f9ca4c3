"""The stream of one request as its caller sees it: frames to iterate over, or to have pumped into a sink."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ..errors import DecodeError, DecodeFailed, RouterError
from ..protocol.codec import decode
from ..protocol.messages import GenerateResponse
from ..protocol.wire import get_string, is_complete, one_token_end, scan_chunk
from ..rpc.call import ClientCall, Sink
from ..rpc.link import Flush
from ..rpc.metadata import RpcError
from .failures import Verdict, judge, leg_error
from .timeline import Timeline

_CHUNK: Final = b"\x0a"
"""The first byte of every chunk frame."""
_FINISH_REASON: Final = (2, 2)
"""GenerateResponse.complete.finish_reason."""
_MAX_ENDS: Final = 8
"""One for each choice of a request, as long as it does not ask for more."""


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

    def __init__(
        self,
        call: ClientCall,
        *,
        request_id: str,
        timeline: Timeline,
        choices: int,
        leg: str,
        on_end: Callable[[bool], None],
    ) -> None:
        """`on_end` is told once how the worker did, when that is known: True when it ended the stream as it should."""
        self.request_id = request_id
        self.timeline = timeline
        self.last_complete: bytes | None = None
        """The last complete frame so far; one comes for every choice that has ended."""
        self._call = call
        self._leg = leg
        self._on_end = on_end
        self._open_choices = choices
        self._ended = False

    def __repr__(self) -> str:
        return f"<GenerateStream {self.request_id} {'ended' if self._ended else 'open'}>"

    @property
    def ended_well(self) -> bool:
        """Whether the worker ended the stream OK, with a complete for every choice."""
        return self._ended

    @property
    def prompt_counts(self) -> tuple[int, int] | None:
        """Tokens of the prompt, and how many of them were cached, as its prefill worker counted; None when there was
        none. A decode worker counts as cached what it was handed, which saved nobody any work.
        """
        timeline = self.timeline
        return None if timeline.prefill_worker is None else (timeline.prompt_tokens, timeline.cached_tokens)

    def __aiter__(self) -> GenerateStream:
        return self

    async def __anext__(self) -> Frame:
        """The next frame. Raises WorkerRejected when the worker fails the stream, DecodeFailed when it just stops or
        sends what is no message.
        """
        try:
            data = await self._call.receive()
            if data is not None:
                self.timeline.frames += 1
                self.timeline.output_tokens += self._tokens_of(data)
        except (RpcError, DecodeError) as exc:
            raise self._broken(exc) from exc
        if data is None:
            self._finish()
            raise StopAsyncIteration
        return Frame(data)

    async def pump(self, sink: Sink, *, flush: Flush | None = None, tokens: Callable[[], int] | None = None) -> None:
        """Hand every batch of frames to `sink` as it comes, until the stream ends. Errors as for iteration.

        `sink` runs inside the reader of the worker's link: it must be quick, must not suspend, and returns False when
        its client is behind (call `resume` later). `flush` runs once per batch. What `sink` raises is raised here,
        except that a DecodeError is taken for the worker's: it sent the frame. A sink that reads the frames gives
        `tokens`, which tells at the end how many it has seen; without it they are counted here, for the request's
        record.
        """
        timeline = self.timeline
        before = timeline.frames
        ends: tuple[bytes, ...] = ()
        extra = 0

        # The hot path: all that dispatch does per token (bench/stream.py).
        def counted(batch: list[bytes]) -> bool:
            nonlocal ends, extra
            timeline.frames += len(batch)
            for data in batch:
                # Nearly every frame is one token, with the same counts behind it as in the frames before.
                if not data.endswith(ends) or data[:1] != _CHUNK:
                    extra += self._tokens_of(data) - 1
                    end = one_token_end(data) if len(ends) < _MAX_ENDS else None
                    ends += () if end is None else (end,)
            return sink(batch)

        def uncounted(batch: list[bytes]) -> bool:
            timeline.frames += len(batch)
            for data in batch:
                if data[:1] != _CHUNK:
                    self._tokens_of(data)
            return sink(batch)

        try:
            await self._call.pump(counted if tokens is None else uncounted, flush=flush)
        except (RpcError, DecodeError) as exc:
            raise self._broken(exc) from exc
        finally:
            timeline.output_tokens += timeline.frames - before + extra if tokens is None else tokens()
        self._finish()

    def resume(self) -> None:
        """The sink has room again."""
        self._call.resume()

    def _tokens_of(self, data: bytes) -> int:
        """Take note of a frame; returns the tokens it adds. Raises DecodeError."""
        scanned = scan_chunk(data)
        if scanned is not None:
            return len(scanned[0])
        if is_complete(data):
            self.last_complete = data
            self._open_choices -= 1
            return 0
        return len(decode(GenerateResponse, data).chunk.token_ids)

    def _finish(self) -> None:
        if self._open_choices > 0:
            self._on_end(False)
            raise DecodeFailed(f"the worker ended the stream before {self._open_choices} of its choices had ended")
        self._ended = True
        self._on_end(not _ends_in_error(self.last_complete))

    def _broken(self, exc: RpcError | DecodeError) -> RouterError:
        error: RouterError
        if isinstance(exc, DecodeError):
            error = DecodeFailed(f"the worker sent a frame that cannot be read: {exc.message}")
        else:
            error = leg_error(exc, leg=self._leg, worker=self.timeline.decode_worker or "", started=True)
        if judge(error) is Verdict.FAILED:
            self._on_end(False)
        return error


def _ends_in_error(complete: bytes | None) -> bool:
    """Whether it says that the engine failed, which comes in a stream that is otherwise well; or cannot be read."""
    try:
        return complete is not None and get_string(complete, _FINISH_REASON) == "error"
    except DecodeError:
        return True
