"""The client side: a channel dials when a call needs it, and looks to betterproto's stubs like their own.

It owns the tasks of its links and nothing of the calls made on them: leaving a call is the caller's synchronous
bookkeeping (`ClientCall.cancel`).
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio
from grpclib.const import Cardinality, Status
from grpclib.metadata import Deadline

from ..errors import LinkError
from ..http2.connection import Connection
from ..http2.settings import Http2Settings
from ..http2.streams import Role
from ..scopes import plain_errors
from .call import ClientCall, open_call
from .link import Link
from .metadata import MetadataLike, Origin, RpcError, request_headers
from .stub import Reply, Request, StubStream
from .transport import Dialer, dial_tcp


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSettings:
    """How a channel connects.

    `connect_timeout` is in seconds and covers resolving, dialing and the peer's first words (its SETTINGS).
    """

    connect_timeout: float = 10.0
    http2: Http2Settings = field(default_factory=Http2Settings)


class Channel:
    """Calls to one address. Made by `open_channel`."""

    def __init__(self, address: str, *, nursery: trio.Nursery, dialer: Dialer, settings: ChannelSettings) -> None:
        self.address = address
        self._nursery = nursery
        self._dialer = dialer
        self._settings = settings
        self.links: list[Link] = []
        self._attempt: _Attempt | None = None
        self._closed_because: LinkError | None = None

    def __repr__(self) -> str:
        return f"<Channel {self.address} {self.links}>"

    async def connect(self) -> None:
        """Make sure that a call could be opened now. Raises LinkError when the peer cannot be reached."""
        await self._usable_link(math.inf)

    async def call(
        self, path: str, message: bytes, *, metadata: MetadataLike = (), timeout: float | None = None
    ) -> ClientCall:
        """Open a call and send its one request message.

        Dials first when no link is usable (the only time this waits). The request leaves in one write where the windows
        allow. `timeout` is in seconds from now, dialing included; what is left of it goes to the peer and is kept here,
        too. Raises LinkError when the peer cannot be reached, RpcError when that takes longer than `timeout`.
        """
        call = await self._open(path, metadata=metadata, timeout=timeout)
        call.send_nowait([message], end=True)
        call.flush()
        return call

    async def start(self, path: str, *, metadata: MetadataLike = (), timeout: float | None = None) -> ClientCall:
        """As `call`, but send the headers only; messages follow by `ClientCall.send`."""
        call = await self._open(path, metadata=metadata, timeout=timeout)
        call.flush()
        return call

    def request(
        self,
        route: str,
        cardinality: Cardinality,
        request_type: type[Request],
        reply_type: type[Reply],
        *,
        timeout: float | None = None,
        deadline: Deadline | None = None,
        metadata: MetadataLike | None = None,
    ) -> StubStream[Request, Reply]:
        """What betterproto's generated stubs call. Opens no scope and no nursery.

        Streaming stubs are async generators: iterate them under `contextlib.aclosing`. betterproto's generated method
        wraps a second generator that nothing closes, so a stream that is left early ends when that one is collected: at
        once, but with a ResourceWarning of trio's where those are shown. `call` and `ClientCall.cancel` do without.
        A bidirectional stub is refused: the generated code would start an asyncio task.
        """
        if cardinality.client_streaming and cardinality.server_streaming:
            raise TypeError(
                f"{route}: bidirectional stubs of betterproto 2.0.0b7 need asyncio; open the call with Channel.start, "
                "send with ClientCall.send in a task of your own and read with ClientCall.receive"
            )
        if deadline is not None:
            remaining = deadline.time_remaining()
            timeout = remaining if timeout is None else min(timeout, remaining)
        return StubStream(
            self,
            route,
            reply_type=reply_type,
            single=not cardinality.server_streaming,
            timeout=timeout,
            metadata=metadata,
        )

    def close(self) -> None:
        """End every link now; calls on them fail with UNAVAILABLE, and no further call is taken."""
        reason = self._closed_because = self._closed_because or self._was_closed()
        if self._attempt is not None:
            self._attempt.scope.cancel()
        for link in self.links:
            link.connection.go_away()
            link.flush()
            link.close(reason)

    async def _open(self, path: str, *, metadata: MetadataLike, timeout: float | None) -> ClientCall:
        deadline = math.inf if timeout is None else trio.current_time() + timeout
        link = await self._usable_link(deadline)
        left = None if timeout is None else max(0.0, deadline - trio.current_time())
        headers = request_headers(path, authority=self.address, metadata=metadata, timeout=left)
        return open_call(link, headers, path=path, deadline=None if timeout is None else deadline)

    async def _usable_link(self, deadline: float) -> Link:
        link = self._pick()
        if link is not None:
            return link
        with trio.move_on_at(deadline):
            return await self._new_link()
        raise RpcError(
            Status.DEADLINE_EXCEEDED,
            f"no connection to {self.address} before the call's deadline",
            origin=Origin.REFUSED,
        )

    def _pick(self) -> Link | None:
        for link in self.links:
            if link.usable:
                return link
        return None

    async def _new_link(self) -> Link:
        """Wait for the attempt under way, or make one. Calls share it: a peer that does not answer keeps each of them
        waiting once and not one after the other.
        """
        while True:
            attempt = self._attempt
            if self._closed_because is not None:
                raise self._was_closed()
            if attempt is None:
                attempt = self._attempt = _Attempt(self._was_closed())
                self._nursery.start_soon(self._dial, attempt, name=f"dial {self.address}")
            await attempt.ended.wait()
            link = self._pick()
            if link is not None:
                return link
            attempt.check()
            # The new link is full already: others were quicker.

    async def _dial(self, attempt: _Attempt) -> None:
        limit = self._settings.connect_timeout
        attempt.scope.deadline = trio.current_time() + limit
        try:
            with attempt.scope:
                transport = await self._dialer(self.address)
                link = attempt.link = Link(transport, Connection(Role.CLIENT, settings=self._settings.http2))
                self._nursery.start_soon(link.run, name=f"link to {self.address}")
                # Only now is it known how many calls the peer takes, and that it speaks HTTP/2 at all.
                await link.greeted()
                self.links = [old for old in self.links if old.closed_because is None] + [link]
                attempt.error = None
            if attempt.scope.cancelled_caught and self._closed_because is None:
                attempt.error = LinkError(f"cannot connect to {self.address}: no answer within {limit:g} s")
        except Exception as exc:  # noqa: BLE001  # a dialer's failure, mistakes included, belongs to those who wait
            attempt.error = exc
        finally:
            if attempt.link is not None and attempt.error is not None:
                attempt.link.close(LinkError(str(attempt.error)))
            self._attempt = None
            attempt.ended.set()

    def _was_closed(self) -> LinkError:
        return LinkError(f"the channel to {self.address} was closed")


class _Attempt:
    """One attempt to make a link. `error` stands until it succeeds."""

    def __init__(self, error: Exception) -> None:
        self.error: Exception | None = error
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self.link: Link | None = None

    def check(self) -> None:
        """Raise why no call can use the new link; return when it is only full."""
        error = self.error or (self.link.closed_because if self.link is not None else None)
        if isinstance(error, LinkError):
            # Several tasks raise it: each gets its own, since raising one writes to it.
            raise LinkError(error.message) from error
        if error is not None:
            raise error


@asynccontextmanager
async def open_channel(
    address: str, *, dialer: Dialer = dial_tcp, settings: ChannelSettings | None = None
) -> AsyncIterator[Channel]:
    """A channel to `host:port` that lives as long as the block; its links end with it."""
    with plain_errors():
        async with trio.open_nursery() as nursery:
            channel = connect_channel(nursery, address, dialer=dialer, settings=settings)
            try:
                yield channel
            finally:
                channel.close()
                nursery.cancel_scope.cancel()


def connect_channel(
    nursery: trio.Nursery, address: str, *, dialer: Dialer = dial_tcp, settings: ChannelSettings | None = None
) -> Channel:
    """The same with a nursery of the caller's, who ends the links by `close` or by cancelling it."""
    return Channel(address, nursery=nursery, dialer=dialer, settings=settings or ChannelSettings())
