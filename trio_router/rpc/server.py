"""The server side: accepts transports and runs one task per call, under its connection's nursery.

Serves betterproto's generated service bases unchanged, and raw handlers that take and give bytes. A handler ends a
call with a status by raising grpclib's GRPCError; it is cancelled when the client leaves.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from inspect import isasyncgen
from typing import Any, Final, Protocol

import trio
from grpclib.const import Handler, Status
from grpclib.exceptions import GRPCError

from ..errors import LinkError, RouterError
from ..http2.connection import Connection
from ..http2.frames import ErrorCode
from ..http2.settings import Http2Settings
from ..http2.streams import Role, Stream
from ..protocol.codec import decode, encode
from ..scopes import plain_errors
from .keepalive import KeepaliveSettings, Pace, PingLimits
from .link import Link
from .servercall import ServerCall
from .transport import Listener, Transport

_log: Final = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT: Final = 10.0
"""Seconds a new connection may take until its client's first SETTINGS, TLS included: several round trips of a bad
network, and no longer, for a silent client holds one of the connections.
"""

REQUEST_TIMEOUT: Final = 60.0
"""Seconds without a byte of a request message that a handler waits for. A call that was opened and never asks for
anything holds a handler and, with it, its connection's place among those that are in use.
"""

UNREAD_TIMEOUT: Final = 120.0
"""Seconds. A client that has stopped reading holds streams, their queues and a connection; one that is only slow takes
something in two minutes, even where its kernel opens a window no sooner than a large part of it is free.
"""

HANDLERS_PER_STREAM: Final = 2
"""How many handlers may run for each stream that a client may have. Two: a client that gives up all of its calls and
makes new ones in the same moment is honest, and the old handlers have not cleaned up yet.
"""

SILENCE_TOLERATED: Final = 1.0
"""Seconds after which a connection makes room for a new one, if there is no other, when its client has said nothing yet
or has no call on it. One that is only quiet loses nothing: it is told, and dials again for its next call.
"""

RawHandler = Callable[[ServerCall], Awaitable[None]]


class Service(Protocol):
    """What betterproto's generated service bases provide."""

    def __mapping__(self) -> dict[str, Handler]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Bounds of a server. `max_connections` keeps descriptors below the system's limit: beyond it a new connection gets
    the place of one that nobody uses, or is closed. Times are in seconds.

    `handshake_timeout`: how long a client may take to introduce itself, TLS and its first SETTINGS together.
    `ping_limits`: how often clients may ping. `keepalive`: how silent clients are pinged; without it those whose host
    has vanished are found by TCP, in two minutes.
    `request_timeout`: for how long a client may send nothing of the message that a method with one waits for.
    `unread_timeout`: how long a client may take nothing of what waits for it: of the rest of an answer whose handler
    has gone, which is then dropped; or of anything at all, which ends its connection.
    """

    max_connections: int = 1024
    handshake_timeout: float = HANDSHAKE_TIMEOUT
    request_timeout: float = REQUEST_TIMEOUT
    unread_timeout: float = UNREAD_TIMEOUT
    ping_limits: PingLimits = field(default_factory=PingLimits)
    keepalive: KeepaliveSettings | None = None
    http2: Http2Settings = field(default_factory=Http2Settings)


class Server:
    """A gRPC server on any number of listeners. `serve` owns every task; `drain` lets it end by itself."""

    def __init__(
        self,
        services: Iterable[Service] = (),
        *,
        raw: Mapping[str, RawHandler] | None = None,
        settings: ServerSettings | None = None,
    ) -> None:
        self._handlers: dict[str, RawHandler] = {}
        for service in services:
            self._handlers.update(_typed_handlers(service))
        # A raw handler replaces the generated method of the same path.
        self._handlers.update(raw or {})
        self._settings = settings or ServerSettings()
        self._links: dict[Link, int] = {}  # with how many handlers run for it
        self._listeners: list[Listener] = []
        self._draining = False
        self._connections = 0
        # Connections without their client's first words, and since when; the oldest come first.
        self._silent: dict[trio.CancelScope, float] = {}
        # Connections without a handler, and since when; the oldest come first.
        self._idle: dict[Link, float] = {}
        self.calls_in_flight = 0

    def __repr__(self) -> str:
        return f"<Server {len(self._links)} connections, {self.calls_in_flight} calls>"

    async def serve(self, listener: Listener, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Accept until cancelled (every call is cancelled with it) or drained (returns when the last call has
        ended). Closes the listener in any case.
        """
        self._listeners.append(listener)
        task_status.started()
        async with trio.open_nursery() as connections:
            try:
                while True:
                    transport = await listener.accept()
                    if self._connections >= self._settings.max_connections and not self._make_room():
                        transport.close()
                        continue
                    self._connections += 1
                    connections.start_soon(self._serve_connection, transport, name=f"gRPC client {transport.peer}")
            except LinkError:
                pass  # it was closed, by a drain or by whoever opened it
            finally:
                listener.close()

    def drain(self) -> None:
        """Take no new connections or calls; calls under way go on, and so do those that clients sent before they knew.
        Who wants a deadline puts a scope around `serve`.
        """
        self._draining = True
        for listener in self._listeners:
            listener.close()
        for link in list(self._links):
            _drain(link)

    def _make_room(self) -> bool:
        """Let go of a connection that nobody uses, if there is one: at the cap a new client is worth more. Those who
        have not even introduced themselves go first, and of either kind who has been so the longest.
        """
        long_ago = trio.current_time() - SILENCE_TOLERATED
        for scope, since in self._silent.items():
            if since > long_ago:
                break
            del self._silent[scope]
            scope.cancel(reason="said nothing, and there were too many connections")
            return True
        for link, since in self._idle.items():
            if since > long_ago:
                break
            if not link.connection.open_streams:  # of an answer that waits for its client to read it
                del self._idle[link]
                _hang_up(link, "there were too many connections, and no call on this one")
                return True
        return False

    async def _serve_connection(self, transport: Transport) -> None:
        scope = trio.CancelScope(deadline=trio.current_time() + self._settings.handshake_timeout)
        self._silent[scope] = trio.current_time()
        try:
            with scope:
                await transport.establish()
                await self._serve_link(transport, greeting=scope)
            if scope.cancelled_caught:
                _log.info("%s did not finish its handshake in time", transport.peer)
        except LinkError as exc:
            _log.info("a client did not get in: %s", exc)
        except Exception:  # noqa: BLE001  # as the next line says
            # The edge of a connection: what fails in this one must not end the others.
            _log.exception("connection of %s failed", transport.peer)
        finally:
            transport.close()
            self._silent.pop(scope, None)
            self._connections -= 1

    async def _serve_link(self, transport: Transport, *, greeting: trio.CancelScope) -> None:
        settings = self._settings
        link: Link
        try:
            async with trio.open_nursery() as calls:
                link = Link(
                    transport,
                    Connection(Role.SERVER, settings=settings.http2, clock=trio.current_time),
                    on_stream=lambda stream: self._begin_call(link, stream, calls),
                    pace=Pace(settings.keepalive) if settings.keepalive is not None else None,
                    ping_limits=settings.ping_limits,
                    write_timeout=settings.unread_timeout,
                )
                self._links[link] = 0
                if self._draining:
                    _drain(link)
                calls.start_soon(self._admit, link, greeting)
                await link.run()
                calls.cancel_scope.cancel()
        finally:
            del self._links[link]
            self._idle.pop(link, None)

    async def _admit(self, link: Link, greeting: trio.CancelScope) -> None:
        with suppress(LinkError):
            await link.greeted()
            self._silent.pop(greeting, None)
            greeting.deadline = math.inf
            self._note_handlers(link, 0)

    def _note_handlers(self, link: Link, change: int) -> None:
        self._links[link] += change
        self._idle.pop(link, None)
        if not self._links[link]:
            self._idle[link] = trio.current_time()

    def _begin_call(self, link: Link, stream: Stream, calls: trio.Nursery) -> None:
        """Start the call of a new stream, unless too many handlers run already: a stream is over when it is reset, but
        its handler only when it has cleaned up, so a client that resets its calls could start any number of them.
        """
        if self._links[link] >= HANDLERS_PER_STREAM * self._settings.http2.max_concurrent_streams:
            link.connection.reset(stream, ErrorCode.REFUSED_STREAM)
            return
        self._note_handlers(link, +1)
        # The call takes its stream here and not in its task: the next batch may come before that runs.
        call = ServerCall(link, stream, request_timeout=self._settings.request_timeout)
        calls.start_soon(self._serve_call, call, link)

    async def _serve_call(self, call: ServerCall, link: Link) -> None:
        self.calls_in_flight += 1
        try:
            with call.scope:
                await self._run_handler(call)
            if call.fault is not None:
                _blame_handler(call, call.fault)
            elif call.problem is not None:
                call.fail(call.problem)
            elif call.timed_out:
                call.finish(Status.DEADLINE_EXCEEDED, "the call's deadline has passed")
        except* Exception as group:  # noqa: BLE001  # the edge of a handler
            # Only here, where the scope has taken its part of it: what a handler raises while it is being cancelled.
            _blame_handler(call, group)
        finally:
            self.calls_in_flight -= 1
            self._note_handlers(link, -1)
            if trio.current_effective_deadline() == -math.inf:
                # Not this call alone is cancelled: its reset would tell the client that the call was cancelled.
                _hang_up(link, "the server has stopped")
            call.leave(unread_timeout=self._settings.unread_timeout)

    async def _run_handler(self, call: ServerCall) -> None:
        problem = call.problem
        handler = self._handlers.get(call.path)
        if problem is None and handler is None:
            problem = GRPCError(Status.UNIMPLEMENTED, f"no method {call.path} here")
        if problem is not None or handler is None:
            call.fail(problem or GRPCError(Status.INTERNAL))
            return
        try:
            with plain_errors():  # a status that was raised inside a nursery is still a status
                await handler(call)
        except GRPCError as exc:
            call.fail(exc)
        except RouterError as exc:
            call.fail(GRPCError(exc.grpc_status, exc.message))
        else:
            call.finish(Status.OK, None)


def _blame_handler(call: ServerCall, error: BaseException) -> None:
    """One handler's bug is its call's failure; the text stays in our log and out of the client's hands."""
    _log.error("handler of %s failed", call.path, exc_info=error)
    call.trailing_metadata = ()  # perhaps the very thing that could not be sent
    call.fail(GRPCError(Status.INTERNAL, "internal error"))


def _hang_up(link: Link, why: str) -> None:
    link.connection.go_away()
    link.flush()
    link.close(LinkError(why))


def _drain(link: Link) -> None:
    link.connection.drain()
    link.finish(LinkError("the server is draining"))


def _typed_handlers(service: Service) -> dict[str, RawHandler]:
    # betterproto's helper iterates a handler's generator without ever closing it; shadowed on the instance, so that a
    # handler which is left early runs its own cleanup at once and in its own task.
    service._call_rpc_handler_server_stream = _stream_replies  # type: ignore[attr-defined]  # see above
    return {path: partial(_run_typed, handler) for path, handler in service.__mapping__().items()}


async def _stream_replies(handler: Callable[[Any], Any], stream: _TypedStream, request: Any) -> None:
    replies = handler(request)
    if isasyncgen(replies):
        async with aclosing(replies):
            async for reply in replies:
                await stream.send_message(reply)
    elif isinstance(replies, AsyncIterable):
        async for reply in replies:
            await stream.send_message(reply)
    else:
        # The method does not override the generated one, which is a coroutine that raises UNIMPLEMENTED.
        await replies


async def _run_typed(handler: Handler, call: ServerCall) -> None:
    await handler.func(_TypedStream(call, handler))


class _TypedStream:
    """A call as betterproto's generated bases drive it."""

    def __init__(self, call: ServerCall, handler: Handler) -> None:
        self._call = call
        self._request_type = handler.request_type
        self._unary = not handler.cardinality.client_streaming
        self.metadata = call.metadata
        self.peer = call.peer

    async def recv_message(self) -> Any:
        data = await (self._call.receive_request() if self._unary else self._call.receive())
        if data is None:
            if self._unary:
                raise GRPCError(Status.INVALID_ARGUMENT, "the call ended without a request message")
            return None
        return decode(self._request_type, data)

    async def send_message(self, message: Any) -> None:
        await self._call.send(encode(message))

    def __aiter__(self) -> _TypedStream:
        return self

    async def __anext__(self) -> Any:
        message = await self.recv_message()
        if message is None:
            raise StopAsyncIteration
        return message
