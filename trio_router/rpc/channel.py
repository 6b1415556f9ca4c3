"""The client side: a channel opens calls on its links, and looks to betterproto's stubs like their own.

Which link, and when one is dialed, is decided in `links`. The channel owns nothing of the calls made on it: leaving a
call is the caller's synchronous bookkeeping (`ClientCall.cancel`).
"""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio
from grpclib.const import Cardinality
from grpclib.metadata import Deadline

from ..pieces import Message
from ..scopes import plain_errors
from .call import ClientCall, open_call
from .endpoint import dial
from .link import Link
from .links import ChannelSettings, ChannelState, Links, OnState, StateChange, ignore_state
from .metadata import MetadataLike, request_headers
from .stub import ControlStubs, Reply, Request, StubStream
from .transport import Dialer, authority_of

__all__ = ["Channel", "ChannelSettings", "ChannelState", "StateChange", "connect_channel", "open_channel"]


class Channel:
    """Calls to one address. Made by `open_channel` or `connect_channel`."""

    def __init__(self, links: Links, *, authority: str, scheme: str) -> None:
        self.address = links.address
        self._links = links
        self._authority = authority
        self._scheme = scheme

    def __repr__(self) -> str:
        return f"<Channel {self.address} {self._links}>"

    @property
    def state(self) -> ChannelState:
        """What a new call would find."""
        return self._links.state

    @property
    def links(self) -> list[Link]:
        """The links there are: those that take calls, that only finish theirs, and that have closed lately."""
        return self._links.all

    @property
    def control(self) -> ControlStubs:
        """This channel for stubs whose calls may use the streams that are kept for control calls."""
        return ControlStubs(self.request)

    async def connect(self) -> None:
        """Make sure that a call could be opened now. Raises LinkError when the peer cannot be reached."""
        await self._links.find(deadline=math.inf)

    async def call(
        self,
        path: str,
        message: Message,
        *,
        metadata: MetadataLike = (),
        timeout: float | None = None,
        control: bool = False,
        wait_for_ready: bool = False,
    ) -> ClientCall:
        """Open a call and send its one request message.

        Dials first when no link has room (the only time this waits). The request leaves in one write where the windows
        allow. `timeout` is in seconds from now, dialing included; what is left of it goes to the peer and is kept here,
        too. Raises LinkError when the peer cannot be reached, RpcError when that takes longer than `timeout` or when
        the peer takes no metadata of this size.

        No call waits for a link longer than the channel's `connect_timeout`. While the channel backs off, calls fail at
        once, as gRPC's do; one that is to `wait_for_ready` waits for the attempts that follow, until its `timeout` if
        it has one. `control` calls may use the streams that others leave free.
        """
        call = await self._open(
            path, metadata=metadata, timeout=timeout, control=control, wait_for_ready=wait_for_ready
        )
        call.send_nowait([message], end=True)
        call.flush()
        return call

    async def start(
        self,
        path: str,
        *,
        metadata: MetadataLike = (),
        timeout: float | None = None,
        control: bool = False,
        wait_for_ready: bool = False,
    ) -> ClientCall:
        """As `call`, but send the headers only; messages follow by `ClientCall.send`."""
        call = await self._open(
            path, metadata=metadata, timeout=timeout, control=control, wait_for_ready=wait_for_ready
        )
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
        control: bool = False,
    ) -> StubStream[Request, Reply]:
        """What betterproto's generated stubs call. Opens no scope and no nursery.

        A call of one request that the peer refused without acting on it is made once more, where a link can be had.

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
            control=control,
        )

    def close(self) -> None:
        """End every link now; calls on them fail with UNAVAILABLE, and no further call is taken."""
        self._links.close()

    async def _open(
        self, path: str, *, metadata: MetadataLike, timeout: float | None, control: bool, wait_for_ready: bool
    ) -> ClientCall:
        deadline = math.inf if timeout is None else trio.current_time() + timeout
        link = await self._links.find(deadline=deadline, control=control, wait_for_ready=wait_for_ready)
        left = None if timeout is None else max(0.0, deadline - trio.current_time())
        headers = request_headers(path, authority=self._authority, metadata=metadata, timeout=left, scheme=self._scheme)
        return open_call(link, headers, path=path, deadline=None if timeout is None else deadline)


@asynccontextmanager
async def open_channel(
    address: str,
    *,
    dialer: Dialer = dial,
    settings: ChannelSettings | None = None,
    on_state: OnState = ignore_state,
    chance: Callable[[], float] = random.random,
) -> AsyncIterator[Channel]:
    """A channel to `host:port` or `unix:path` that lives as long as the block; its links end with it.

    `on_state` is told of every change of `Channel.state`, as it happens. `chance` is the jitter's, in [0, 1).
    """
    with plain_errors():
        async with trio.open_nursery() as nursery:
            channel = connect_channel(
                nursery, address, dialer=dialer, settings=settings, on_state=on_state, chance=chance
            )
            try:
                yield channel
            finally:
                channel.close()
                nursery.cancel_scope.cancel()


def connect_channel(
    nursery: trio.Nursery,
    address: str,
    *,
    dialer: Dialer = dial,
    settings: ChannelSettings | None = None,
    on_state: OnState = ignore_state,
    chance: Callable[[], float] = random.random,
) -> Channel:
    """The same with a nursery of the caller's, who ends the links by `close` or by cancelling it."""
    settings = settings or ChannelSettings()
    links = Links(address, nursery=nursery, dialer=dialer, settings=settings, on_state=on_state, chance=chance)
    server_name = settings.tls.server_name if settings.tls is not None else None
    return Channel(
        links,
        authority=settings.authority or server_name or authority_of(address),
        scheme="http" if settings.tls is None else "https",
    )
