"""One call as its server sees it: requests in, replies out, a scope that ends when the client leaves."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from ..errors import TooLarge
from ..http2.frames import ErrorCode
from ..http2.streams import Stream
from .link import Flush, Link
from .metadata import (
    CONTENT_TYPE,
    Headers,
    MetadataLike,
    decode_metadata,
    decode_timeout,
    get,
    response_headers,
    status_trailers,
)
from .remainder import Remainder
from .seat import Seat


class ServerCall:
    """Given to handlers. `scope` is cancelled when the client has gone or the call's deadline has passed."""

    __slots__ = (
        "_finished", "_headers_sent", "_inbox", "_link", "_seat", "_sender", "_stream", "deadline", "fault",
        "flush", "on_drained", "path", "peer", "problem", "request_timeout", "scope", "trailing_metadata",
    )  # fmt: skip

    def __init__(self, link: Link, stream: Stream, *, request_timeout: float = math.inf) -> None:
        headers = stream.headers or []
        self.request_timeout = request_timeout
        self.path = (get(headers, b":path") or b"").decode("latin-1")
        self.peer = link.peer
        self.deadline = math.inf
        self._stream = stream
        # Why the call is refused whatever its handler says.
        self.problem = self._read_headers(headers) or self._unreadable()
        self.scope = trio.CancelScope(deadline=self.deadline)
        self.on_drained: Callable[[], None] | None = None
        self.fault: Exception | None = None  # raised by `on_drained`, for the server to report
        self.trailing_metadata: MetadataLike = ()
        # Writes what is queued on this call's connection. The link's own method and not one of ours: calls of one
        # connection that are pumped in one batch then share one flush.
        self.flush: Flush = link.flush
        self._link = link
        self._inbox: deque[bytes] = deque()
        self._seat = Seat()  # of the task that receives
        self._sender = Seat()
        self._headers_sent = False
        self._finished = False
        stream.user = self

    def __repr__(self) -> str:
        state = "finished" if self._finished else "gone" if self.gone else "open"
        return f"<ServerCall {self.path} from {self.peer} {state}>"

    @property
    def metadata(self) -> list[tuple[str, str | bytes]]:
        """What the client's user code sent with the call."""
        return decode_metadata(self._stream.headers or [])

    @property
    def gone(self) -> bool:
        """The client has reset the call or its connection has ended."""
        return self._stream.closed and not self._finished

    @property
    def timed_out(self) -> bool:
        """The scope was cancelled by the deadline and not by the client's leaving."""
        return self.scope.cancelled_caught and not self.gone

    # Receiving

    async def receive(self) -> bytes | None:
        """The next request message, or None when the client has sent all of them."""
        while not self._inbox:
            stream = self._stream
            if stream.messages:
                self._inbox.extend(stream.take())
            elif self.problem is not None:
                raise self.problem
            elif stream.remote_ended:
                return None
            else:
                await self._seat.wait()
        message = self._inbox.popleft()
        if not self._inbox:
            self._stream.credit()
            if self._link.connection.has_output:
                self._link.flush()
        return message

    async def receive_request(self) -> bytes | None:
        """As `receive`, for the one message of a method that takes one: the client owes it.

        Raises GRPCError (DEADLINE_EXCEEDED) when it has sent nothing more of it for `request_timeout` seconds, which is
        looked at that often: it may be twice as long.
        """
        stream = self._stream
        while not (self._inbox or stream.messages or stream.remote_ended or self.problem):
            heard = stream.heard
            with trio.move_on_after(self.request_timeout) as silence:
                await self._seat.wait()
            if silence.cancelled_caught and stream.heard == heard:
                seconds = f"{self.request_timeout:g} s"
                raise GRPCError(
                    Status.DEADLINE_EXCEEDED, f"the client has sent nothing of its request message for {seconds}"
                )
        return await self.receive()

    # Sending

    def send_headers(self, *, metadata: MetadataLike = ()) -> None:
        """Begin the answer now, with initial metadata. Without this the first reply begins it, with none.

        Raises RuntimeError when it has begun, ValueError or TypeError for metadata that gRPC cannot carry, TooLarge for
        more than the client takes.
        """
        if self._headers_sent:
            raise RuntimeError(f"the answer to {self.path} has begun already")
        headers = response_headers(metadata)
        if not self._finished and not self._stream.closed:
            self._link.connection.send_headers(self._stream, headers)
            self._headers_sent = True
            self._link.flush()

    def send_nowait(self, messages: list[bytes]) -> bool:
        """Queue replies without flushing; False: the client is behind, wait for `on_drained` or `wait_drained`.

        What is queued after "full" still goes out, in order; bounding it is the caller's business.
        """
        stream = self._stream
        if self._finished or stream.closed:
            return True
        link = self._link
        if not self._headers_sent:
            link.connection.send_headers(stream, response_headers())
            self._headers_sent = True
        link.connection.send_messages(stream, messages)
        if stream.queued_bytes or link.stuck:
            link.when_drained(self, stream)
            return False
        return True

    async def send(self, message: bytes) -> None:
        """Send one reply and wait until the client keeps up."""
        await trio.lowlevel.checkpoint()
        fits = self.send_nowait([message])
        self._link.flush()
        if not fits:
            await self.wait_drained()

    async def wait_drained(self) -> None:
        """Return when everything queued has been taken by the transport, or nobody will take it any more."""
        while not self._stream.closed and (self._stream.queued_bytes or self._link.stuck):
            self._link.when_drained(self, self._stream)
            await self._sender.wait()

    # Ending

    def fail(self, error: GRPCError) -> None:
        """End the call with a status."""
        details = error.details if isinstance(error.details, bytes) else None
        self.finish(error.status, error.message, details=details)

    def finish(self, status: Status, message: str | None, *, details: bytes | None = None) -> None:
        """End the call; a no-op when it has ended or the client has gone. Raises ValueError or TypeError for trailing
        metadata that gRPC cannot carry; nothing has been sent then.
        """
        if self._finished or self._stream.closed:
            return
        trailers = status_trailers(status, message, details=details, metadata=self.trailing_metadata)
        self._finished = True
        try:
            self._send_trailers(trailers)
        except TooLarge as exc:
            self._end_smaller(exc)
        self._link.flush()

    def _send_trailers(self, trailers: Headers) -> None:
        if not self._headers_sent:
            trailers = [*response_headers(), *trailers]
        self._link.connection.send_headers(self._stream, trailers, end_stream=True)

    def _end_smaller(self, error: TooLarge) -> None:
        """The client takes no list of that size: tell it so, and not what it was to be told."""
        try:
            self._send_trailers(status_trailers(Status.RESOURCE_EXHAUSTED, f"the call's trailers: {error.message}"))
        except TooLarge:
            # What gRPC reads as RESOURCE_EXHAUSTED, and nothing else fits.
            self._link.connection.reset(self._stream, ErrorCode.ENHANCE_YOUR_CALM)

    def leave(self, *, unread_timeout: float = math.inf) -> None:
        """The handler has gone. An answer that is not finished never will be; what the client has not taken of a
        finished one waits until it has taken nothing for `unread_timeout` seconds.
        """
        self._link.forget(self)
        if self._stream.closed or self._stream.user is not self:
            return
        if not self._finished:
            self._link.connection.reset(self._stream, ErrorCode.CANCEL)
            self._link.flush()
        else:
            Remainder(self._link, self._stream, timeout=unread_timeout)

    # StreamOwner

    def touched(self, flushes: dict[Flush, None]) -> None:
        if self.problem is None:
            self.problem = self._unreadable()
        if self.gone or self.problem is not None:
            self.scope.cancel()
        self._seat.wake()

    def drained(self) -> None:
        if self.on_drained is not None:
            try:
                self.on_drained()
            except Exception as exc:  # noqa: BLE001  # the handler's fault, which its server reports
                self.fault = exc
                self.scope.cancel()
        self._sender.wake()

    def flush_failed(self, flush: Flush, error: Exception) -> None:
        """Never asked for: replies are flushed by their sender."""

    def expired(self) -> None:
        """Never watched: the scope keeps the deadline."""

    # Inside

    def _unreadable(self) -> GRPCError | None:
        failure = self._stream.failure
        return None if failure is None else GRPCError(failure.grpc_status, failure.message)

    def _read_headers(self, headers: list[tuple[bytes, bytes]]) -> GRPCError | None:
        content_type = get(headers, b"content-type") or b""
        if not content_type.startswith(CONTENT_TYPE) or content_type[len(CONTENT_TYPE) :][:1] not in (b"", b"+", b";"):
            return GRPCError(Status.INTERNAL, f"content-type {content_type!r} is not application/grpc")
        method = get(headers, b":method")
        if method != b"POST":
            return GRPCError(Status.INTERNAL, f"a call is a POST, not {method!r}")
        encoding = get(headers, b"grpc-encoding")
        if encoding not in (None, b"identity"):
            return GRPCError(Status.UNIMPLEMENTED, f"grpc-encoding {encoding!r} is not supported: send identity")
        timeout = get(headers, b"grpc-timeout")
        if timeout is not None:
            try:
                self.deadline = trio.current_time() + decode_timeout(timeout)
            except ValueError as exc:
                return GRPCError(Status.INVALID_ARGUMENT, str(exc))
        return None
