"""One client's connection: requests one after the other, each handled under a watch for the client's leaving.

Owns the transport, the deadlines of reading and the request's scope. Must not know routes or what a handler does.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from ..errors import LinkError, RouterError, TooLarge
from ..rpc.transport import Transport
from .exchange import Exchange, http_date
from .faults import BodiesBusy, ClientGone, RequestTooSlow
from .outbox import Outbox
from .respond import http_reply, is_planned
from .settings import HttpSettings
from .wire import Body, Headers, HttpRequest, RequestHead, Wire

Handler = Callable[[Exchange], Awaitable[None]]
"""Answers one exchange; what it raises becomes the response if none has begun, else ends the connection."""

OnRefusal = Callable[[str], Headers]


def nothing_to_add(code: str) -> Headers:
    """For servers that keep no account of refusals."""
    return ()


_RECEIVE_BYTES: Final = 65_536
_log = logging.getLogger(__name__)


class BodyBudget:
    """Bytes of request bodies that may be held at one time, shared by connections."""

    __slots__ = ("held_bytes", "total_bytes")

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.held_bytes = 0

    def reserve(self, count: int) -> None:
        """Take `count` bytes; raises BodiesBusy when they are not there."""
        if self.held_bytes + count > self.total_bytes:
            raise BodiesBusy("too many request bodies are being handled; try again later")
        self.held_bytes += count

    def release(self, count: int) -> None:
        """Give back what was reserved."""
        self.held_bytes -= count


class HttpConnection:
    """Serves one transport until either side has had enough."""

    __slots__ = (
        "_budget", "_clock", "_draining", "_handler", "_idle", "_on_refusal", "_outbox", "_reserved", "_responses",
        "_scope", "_settings", "_transport", "_wire", "left",
    )  # fmt: skip

    def __init__(
        self,
        transport: Transport,
        *,
        handler: Handler,
        on_refusal: OnRefusal,
        settings: HttpSettings,
        budget: BodyBudget,
        responses: Counter[int],
        clock: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._handler = handler
        self._on_refusal = on_refusal
        self._settings = settings
        self._budget = budget
        self._responses = responses
        self._clock = clock
        self._wire = Wire(max_header_bytes=settings.max_header_bytes)
        self._outbox: Outbox  # made by `run`, before its first checkpoint
        self._scope: trio.CancelScope | None = None
        self._idle: trio.CancelScope | None = None
        self._draining = False
        self._reserved = 0
        self.left = False

    def __repr__(self) -> str:
        state = "idle" if self.is_idle else "busy" if self._scope is not None else "reading"
        return f"<HttpConnection {self._transport.peer} {state}>"

    @property
    def is_idle(self) -> bool:
        """Nothing of a request has come: closing harms nobody."""
        return self._idle is not None

    @property
    def pending_bytes(self) -> int:
        """Of responses, waiting for the client to take them."""
        return self._outbox.pending_bytes

    def close_when_idle(self) -> None:
        """Finish what is under way, then close; at once if nothing is."""
        self._draining = True
        if self._idle is not None:
            self._idle.cancel()

    async def run(self) -> None:
        """Serve until the connection ends. The transport is closed on the way out, whatever happens."""
        try:
            async with trio.open_nursery() as nursery:
                self._outbox = Outbox(
                    self._transport,
                    nursery=nursery,
                    stall_seconds=self._settings.write_stall_seconds,
                    max_pending_bytes=self._settings.max_pending_bytes,
                    on_broken=self._client_left,
                )
                first = True
                while await self._serve_next(first=first):
                    first = False
                nursery.cancel_scope.cancel(reason="the connection is over")
        finally:
            self._transport.close()

    async def _serve_next(self, *, first: bool) -> bool:
        try:
            request = await self._read_request(first=first)
            if request is None:
                return False
            await self._exchange(request)
        except ClientGone:
            return False
        except RouterError as fault:
            await self._refuse(fault)
            return False
        finally:
            self._release_body()
            self._outbox.on_drained = None
        return not self.left and self._wire.next_cycle()

    # Reading: the deadlines below end every wait for the client.

    async def _read_request(self, *, first: bool) -> HttpRequest | None:
        head = await self._read_head(
            patience=self._settings.header_seconds if first else self._settings.keep_alive_seconds
        )
        if head is None:
            return None
        body = await self._read_body(head)
        if body is None:
            return None
        return HttpRequest(method=head.method, path=head.path, query=head.query, headers=head.headers, body=body)

    async def _read_head(self, *, patience: float) -> RequestHead | None:
        begun = self._wire.buffered_bytes > 0
        if self._draining and not begun:
            return None
        with trio.move_on_after(self._settings.header_seconds if begun else patience) as scope:
            self._idle = None if begun else scope
            try:
                while (head := self._wire.next_head()) is None:
                    data = await self._receive()
                    if not data:
                        return None
                    if not begun:
                        begun = True
                        self._idle = None
                        scope.deadline = trio.current_time() + self._settings.header_seconds
                    self._wire.feed(data)
            finally:
                self._idle = None
            return head
        if begun:
            raise RequestTooSlow("the request's headers did not arrive in time")
        return None

    async def _read_body(self, head: RequestHead) -> bytes | None:
        body = bytearray()
        # An announced length is reserved whole before the body comes: uploads that cannot all fit are refused early
        # instead of failing together.
        self._admit(head.content_length or 0)
        if self._wire.read_body(body) is Body.MORE:
            if self._wire.awaits_continue:
                self._outbox.write(self._wire.go_on())
            if not await self._read_rest(body):
                return None
        self._admit(len(body))
        return bytes(body)

    async def _read_rest(self, body: bytearray) -> bool:
        start = trio.current_time()
        with trio.move_on_after(self._settings.body_seconds) as scope:
            while True:
                data = await self._receive()
                if not data:
                    return False
                self._wire.feed(data)
                progress = self._wire.read_body(body)
                self._admit(len(body))
                if progress is Body.COMPLETE:
                    return True
                allowed = self._settings.body_seconds + len(body) / self._settings.body_bytes_per_second
                scope.deadline = start + allowed
        raise RequestTooSlow("the request's body did not arrive in time")

    def _admit(self, size: int) -> None:
        """Hold `size` bytes of body in all, or raise TooLarge or BodiesBusy."""
        if size > self._settings.max_body_bytes:
            limit = self._settings.max_body_bytes
            raise TooLarge(f"the request body is over the limit of {limit} bytes")
        if size > max(self._reserved, self._settings.small_body_bytes):
            self._budget.reserve(size - self._reserved)
            self._reserved = size

    def _release_body(self) -> None:
        self._budget.release(self._reserved)
        self._reserved = 0

    async def _receive(self) -> bytes:
        """What the client sent next; b"" once it has left. Ended by the caller's deadline, or by the client."""
        try:
            while True:
                # Waiting first makes each read a checkpoint: a fast upload must not keep the others from running.
                await self._transport.wait_readable()
                data = self._transport.recv_nowait(_RECEIVE_BYTES)
                if data is not None:
                    return data
        except LinkError:
            return b""

    # Handling.

    async def _exchange(self, request: HttpRequest) -> None:
        exchange = Exchange(
            request,
            wire=self._wire,
            outbox=self._outbox,
            clock=self._clock,
            close=lambda: self._draining,
            release=self._release_body,
        )
        try:
            async with trio.open_nursery() as nursery:
                self._scope = nursery.cancel_scope
                nursery.start_soon(self._watch)
                await self._run_handler(exchange)
                nursery.cancel_scope.cancel(reason="the exchange is over")
        except* Exception as errors:  # noqa: BLE001 - what a cancelled handler raised on its way out: nobody to tell
            _log.warning("handler failed after its client had left", exc_info=errors)
        finally:
            self._scope = None
            if exchange.status is not None:
                self._responses[exchange.status] += 1
        if not exchange.finished:
            raise ClientGone("the response cannot be completed")

    async def _run_handler(self, exchange: Exchange) -> None:
        try:
            try:
                await self._handler(exchange)
                if not exchange.finished:
                    raise RuntimeError("the handler returned without completing its response")
            except ClientGone:
                raise
            except Exception as exc:  # noqa: BLE001 - the edge of a handler: its failure is this client's answer
                if not is_planned(exc):
                    _log.exception("handler of %s %s failed", exchange.request.method, exchange.request.path)
                if not exchange.started:
                    reply = http_reply(exc)
                    await exchange.respond(reply.status, headers=reply.headers, body=reply.body)
        except ClientGone:
            self._client_left()

    async def _watch(self) -> None:
        """Notice the client's leaving while its request is handled. Requests sent ahead are kept, up to a bound."""
        ahead = self._wire.buffered_bytes
        while ahead < self._settings.max_pipelined_bytes:
            data = await self._receive()
            if not data:
                self._client_left()
                return
            ahead += len(data)
            self._wire.feed(data)

    def _client_left(self) -> None:
        self.left = True
        if self._scope is not None:
            self._scope.cancel(reason="the client has left")

    async def _refuse(self, fault: RouterError) -> None:
        """Answer a request that could not be read, and end the connection so that the client can read the answer."""
        reply = http_reply(fault)
        if not self._wire.can_respond:
            return
        self._responses[reply.status] += 1
        headers = (
            (b"date", http_date(self._clock())),
            (b"content-length", b"%d" % len(reply.body)),
            *reply.headers,
            *self._on_refusal(reply.code),
            (b"connection", b"close"),
        )
        head = self._wire.response_head(reply.status, headers=headers)
        try:
            self._outbox.write(head + self._wire.response_body(reply.body))
            await self._outbox.drain()
        except ClientGone:
            return
        # Closing while the client still sends would reset the connection and take the answer with it.
        with trio.move_on_after(self._settings.linger_seconds):
            while await self._receive():
                pass
