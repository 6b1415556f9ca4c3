"""One call as its client sees it: a record that outlives any task that waits for it.

Messages and the outcome are stored in the record, so a task that is cancelled loses nothing: whoever leaves the
call can still look at what came. At most one task sends in a call and one receives from it at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import trio
from grpclib.const import Status

from ..errors import TooLarge
from ..http2.frames import ErrorCode
from ..http2.streams import Stream
from ..pieces import Message
from .link import Flush, Link
from .metadata import Headers, Origin, RpcError, decode_metadata, not_grpc, outcome, reset_outcome
from .seat import Seat

Sink = Callable[[list[bytes]], bool]
"""Takes a batch of messages; returns False when it wants no more credit given until `ClientCall.resume`."""

_UNSET: Final = object()


class ClientCall:
    """A call on a link. Made by `Channel.call` or `Channel.start`; ended by the peer, by `cancel`, or by its
    deadline.
    """

    __slots__ = (
        "_error", "_flush", "_full", "_inbox", "_link", "_seat", "_sender", "_sink", "_sink_error", "_stream", "path",
    )  # fmt: skip

    def __init__(self, link: Link, stream: Stream, *, path: str, deadline: float | None = None) -> None:
        self.path = path
        self._link = link
        self._stream = stream
        self._inbox: deque[bytes] = deque()
        self._seat = Seat(on_cancel=self._deregister)  # of the task that receives
        self._sender = Seat()
        self._sink: Sink | None = None
        self._flush: Flush | None = None
        self._full = False
        self._sink_error: Exception | None = None
        self._error: object = _UNSET
        stream.user = self
        if deadline is not None:
            link.watch(self, deadline=deadline)

    def __repr__(self) -> str:
        state = "open" if not self.ended else repr(self.error) if self.error else "OK"
        return f"<ClientCall {self.path} on {self._link.peer}: {state}>"

    # What is known without waiting

    @property
    def ended(self) -> bool:
        """The outcome is known; messages may still be waiting to be taken."""
        return self._error is not _UNSET

    @property
    def error(self) -> RpcError | None:
        """Why the call failed; None when it ended well or has not ended."""
        return self._error if isinstance(self._error, RpcError) else None

    @property
    def initial_metadata(self) -> list[tuple[str, str | bytes]]:
        """What the peer sent before its first message (empty until then)."""
        return decode_metadata(self._stream.headers or [])

    @property
    def trailing_metadata(self) -> list[tuple[str, str | bytes]]:
        """What the peer sent at the end (empty until then)."""
        return decode_metadata(self._stream.trailers or [])

    def take_nowait(self) -> list[bytes]:
        """Every message that has come and that nobody has taken. Works after `cancel` and after the end, too."""
        taken = [*self._inbox, *self._stream.take()]
        self._inbox.clear()
        return taken

    # Sending

    def send_nowait(self, messages: Sequence[Message], *, end: bool = False) -> bool:
        """Queue messages; False when the peer or the transport is behind. `flush` writes what is queued."""
        if self.ended:
            return True
        self._link.connection.send_messages(self._stream, messages, end_stream=end)
        return not (self._stream.queued_bytes or self._link.stuck)

    def flush(self) -> None:
        """Write what is queued on this call's link."""
        self._link.flush()

    async def send(self, message: Message, *, end: bool = False) -> None:
        """Send one message and wait until the peer keeps up."""
        await trio.lowlevel.checkpoint()
        fits = self.send_nowait([message], end=end)
        self._link.flush()
        while not fits and not self.ended and (self._stream.queued_bytes or self._link.stuck):
            self._link.when_drained(self, self._stream)
            await self._sender.wait()

    def end_sending(self) -> None:
        """Say that no further message follows."""
        if not self.ended:
            self._link.connection.end_stream(self._stream)
            self._link.flush()

    # Receiving

    async def receive(self) -> bytes | None:
        """The next message, or None when the call ended well. Raises RpcError when it failed.

        No checkpoint lies between taking the message and returning it: a cancelled caller has not lost one.
        """
        if not self._inbox and await self.peek() is None:
            return None
        message = self._inbox.popleft()
        if not self._inbox:
            self._give_credit()
        return message

    async def peek(self, index: int = 0) -> bytes | None:
        """The message `index` places ahead, or None when the call ended well before it; all of them stay in the record.

        Raises RpcError when the call failed first. Looking ahead gives no credit, so it reaches one window at most.
        """
        while len(self._inbox) <= index:
            if self._stream.messages:
                self._inbox.extend(self._stream.take())
            elif self.ended:
                if self.error is not None:
                    raise self.error
                return None
            else:
                await self._seat.wait()
        return self._inbox[index]

    async def pump(self, sink: Sink, *, flush: Flush | None = None) -> None:
        """Let the link's reader hand every batch to `sink`, in order, until the call ends.

        `sink` runs synchronously inside the reader; `flush`, if given, runs once after a batch in which any sink
        that named the same flush was called. Raises RpcError when the call failed, and whatever the sink raised (the
        call is then reset; no other call notices).
        """
        self._sink, self._flush = sink, flush
        try:
            if self._inbox or self._stream.messages:
                self._deliver([*self._inbox, *self._stream.take()])
                self._inbox.clear()
                if flush is not None:
                    flush()
            while not self.ended and self._sink_error is None:
                await self._seat.wait()
        finally:
            self._sink = self._flush = None
        if self._sink_error is not None:
            raise self._sink_error
        if self.error is not None:
            raise self.error

    def resume(self) -> None:
        """The sink that said "full" has room again: let the peer send on."""
        if self._full:
            self._full = False
            self._give_credit()

    # Leaving

    def cancel(self) -> None:
        """Reset the call now. Synchronous, idempotent, and a no-op once the call has ended."""
        self._end(RpcError(Status.CANCELLED, "cancelled by this side", origin=Origin.LOCAL), reset=True)

    # StreamOwner

    def touched(self, flushes: dict[Flush, None]) -> None:
        # The hot path: it runs once for every token that arrives by itself (bench/stream.py).
        stream = self._stream
        if stream.messages and self._sink is not None:
            self._deliver(stream.take())
            if self._flush is not None:
                flushes[self._flush] = None
        if stream.remote_ended or stream.closed:
            self._settle()
        elif self._sink is None:
            self._seat.wake()

    def drained(self) -> None:
        self._sender.wake()

    def flush_failed(self, flush: Flush, error: Exception) -> None:
        if self._flush == flush:
            self._sink_failed(error)

    def expired(self) -> None:
        self._end(RpcError(Status.DEADLINE_EXCEEDED, "the call's deadline has passed", origin=Origin.LOCAL), reset=True)

    # Inside

    def _deliver(self, messages: list[bytes]) -> None:
        sink = self._sink
        if sink is None:  # the sink left while an earlier batch was handed out
            self._inbox.extend(messages)
            return
        try:
            goes_on = sink(messages)
        except Exception as exc:  # noqa: BLE001  # a sink's fault ends its own call only; pump() raises it to its owner
            self._sink_failed(exc)
            return
        if goes_on:
            self._stream.credit()
        else:
            self._full = True

    def _sink_failed(self, error: Exception) -> None:
        self._sink_error = error
        self._sink = None
        self.cancel()
        self._seat.wake()

    def _give_credit(self) -> None:
        self._stream.credit()
        if self._link.connection.has_output:
            self._link.flush()

    def _settle(self) -> None:
        if not self.ended:
            # The peer has said all it will; a request that is still being sent has no reader any more.
            self._end(self._judge(), reset=not self._stream.closed)

    def _judge(self) -> RpcError | None:
        stream = self._stream
        if stream.failure is not None:
            # A proxy's error page fails as gRPC, and an error may come inside a message: what was said explains more.
            said = not_grpc(stream.headers)
            if said is None and stream.trailers is not None:
                said = outcome(stream.headers, trailers=stream.trailers)
            if said is not None:
                return said
            too_large = isinstance(stream.failure, TooLarge)
            status = Status.RESOURCE_EXHAUSTED if too_large else Status.INTERNAL
            return RpcError(status, str(stream.failure), origin=Origin.LOCAL)
        if stream.remote_ended:
            return outcome(stream.headers, trailers=stream.trailers)
        if stream.lost:
            origin = Origin.REFUSED if stream.refused else Origin.TRANSPORT
            return RpcError(Status.UNAVAILABLE, str(self._link.loss), origin=origin)
        return reset_outcome(stream.reset_code or 0, refused=stream.refused)

    def _end(self, error: RpcError | None, *, reset: bool) -> None:
        if self.ended:
            return
        self._error = error
        self._link.forget(self)
        if reset and not self._stream.closed:
            self._link.connection.reset(self._stream, ErrorCode.CANCEL)
            self._link.flush()
        self._seat.wake()
        self._sender.wake()

    def _deregister(self) -> None:
        # At the moment of the cancel and not when the cancelled task runs: until then the reader may bring more.
        self._sink = None


def open_call(link: Link, headers: Headers, *, path: str, deadline: float | None) -> ClientCall:
    """Open a stream on a usable link; raises LinkError when it has just become unusable, and RpcError when the peer has
    said that it takes no headers of this size: it would refuse the call without a word. The caller flushes.
    """
    try:
        stream = link.connection.open_stream(headers)
    except TooLarge as exc:
        raise RpcError(Status.RESOURCE_EXHAUSTED, f"the call's metadata: {exc.message}", origin=Origin.LOCAL) from exc
    return ClientCall(link, stream, path=path, deadline=deadline)
