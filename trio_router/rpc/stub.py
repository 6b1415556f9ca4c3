"""One call as betterproto's generated stubs drive it: typed messages, GRPCError for everything that is not OK.

It opens its call where it is told to and knows nothing of links.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

import betterproto
import trio
from grpclib.const import Cardinality, Status

from ..errors import DecodeError, LinkError
from ..protocol.codec import decode, encode
from .call import ClientCall
from .metadata import MetadataLike, Origin, RpcError

Request = TypeVar("Request", bound=betterproto.Message)
Reply = TypeVar("Reply", bound=betterproto.Message)


class Opener(Protocol):
    """What opens calls: a channel."""

    async def call(
        self,
        path: str,
        message: bytes,
        *,
        metadata: MetadataLike = (),
        timeout: float | None = None,
        control: bool = False,
    ) -> ClientCall: ...

    async def start(
        self, path: str, *, metadata: MetadataLike = (), timeout: float | None = None, control: bool = False
    ) -> ClientCall: ...


class ControlStubs:
    """What a stub is given in a channel's place, so that its calls may use the streams kept for control calls."""

    def __init__(self, request: Callable[..., StubStream[Any, Any]]) -> None:
        self._request = request

    def request(
        self,
        route: str,
        cardinality: Cardinality,
        request_type: type[Request],
        reply_type: type[Reply],
        **options: Any,
    ) -> StubStream[Request, Reply]:
        """`Channel.request`, with `control`."""
        return self._request(route, cardinality, request_type, reply_type, control=True, **options)


class StubStream(Generic[Request, Reply]):
    """A call that its first message, or `send_request`, opens; leaving the block before its end resets it."""

    def __init__(
        self,
        opener: Opener,
        route: str,
        *,
        reply_type: type[Reply],
        single: bool,
        timeout: float | None,
        metadata: MetadataLike | None,
        control: bool = False,
    ) -> None:
        self._opener = opener
        self._route = route
        self._reply_type = reply_type
        self._single = single
        self._deadline = None if timeout is None else trio.current_time() + timeout
        self._metadata = metadata or ()
        self._control = control
        self._call: ClientCall | None = None
        # The one request, until it is known that the peer acts on it.
        self._repeatable: bytes | None = None

    async def __aenter__(self) -> StubStream[Request, Reply]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._call is not None:
            self._call.cancel()

    async def send_request(self) -> None:
        try:
            self._call = await self._opener.start(
                self._route, metadata=self._metadata, timeout=self._time_left(), control=self._control
            )
        except LinkError as exc:
            raise _unreachable(exc) from exc

    async def send_message(self, message: Request, *, end: bool = False) -> None:
        data = encode(message)
        if self._call is None and end:
            await self._open(data)
            self._repeatable = data
            return
        if self._call is None:
            await self.send_request()
        await self._opened().send(data, end=end)

    async def end(self) -> None:
        self._opened().end_sending()

    async def recv_message(self) -> Reply | None:
        data = await self._receive()
        if data is None:
            if self._single:
                raise RpcError(Status.INTERNAL, "the peer ended OK without a reply", origin=Origin.PEER)
            return None
        if self._single and await self._receive() is not None:
            raise RpcError(Status.INTERNAL, "the peer sent two replies to a unary call", origin=Origin.PEER)
        try:
            return decode(self._reply_type, data)
        except DecodeError as exc:
            raise RpcError(Status.INTERNAL, f"the peer's reply: {exc}", origin=Origin.PEER) from exc

    async def _receive(self) -> bytes | None:
        repeatable, self._repeatable = self._repeatable, None
        try:
            return await self._opened().receive()
        except RpcError as exc:
            if repeatable is None or exc.origin is not Origin.REFUSED:
                raise
        await self._open(repeatable)
        return await self._opened().receive()

    async def _open(self, message: bytes) -> None:
        try:
            self._call = await self._opener.call(
                self._route, message, metadata=self._metadata, timeout=self._time_left(), control=self._control
            )
        except LinkError as exc:
            raise _unreachable(exc) from exc

    def _time_left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - trio.current_time())

    def __aiter__(self) -> StubStream[Request, Reply]:
        return self

    async def __anext__(self) -> Reply:
        message = await self.recv_message()
        if message is None:
            raise StopAsyncIteration
        return message

    def _opened(self) -> ClientCall:
        if self._call is None:
            raise RuntimeError(f"{self._route}: nothing has been sent yet")
        return self._call


def _unreachable(exc: LinkError) -> RpcError:
    return RpcError(Status.UNAVAILABLE, str(exc), origin=Origin.REFUSED)
