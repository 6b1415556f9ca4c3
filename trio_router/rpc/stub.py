"""One call as betterproto's generated stubs drive it: typed messages, GRPCError for everything that is not OK.

It opens its call where it is told to and knows nothing of links.
"""

from __future__ import annotations

from types import TracebackType
from typing import Generic, Protocol, TypeVar

import betterproto
from grpclib.const import Status

from ..errors import DecodeError, LinkError
from ..protocol.codec import decode, encode
from .call import ClientCall
from .metadata import MetadataLike, Origin, RpcError

Request = TypeVar("Request", bound=betterproto.Message)
Reply = TypeVar("Reply", bound=betterproto.Message)


class Opener(Protocol):
    """What opens calls: a channel."""

    async def call(
        self, path: str, message: bytes, *, metadata: MetadataLike = (), timeout: float | None = None
    ) -> ClientCall: ...

    async def start(self, path: str, *, metadata: MetadataLike = (), timeout: float | None = None) -> ClientCall: ...


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
    ) -> None:
        self._opener = opener
        self._route = route
        self._reply_type = reply_type
        self._single = single
        self._timeout = timeout
        self._metadata = metadata or ()
        self._call: ClientCall | None = None

    async def __aenter__(self) -> StubStream[Request, Reply]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._call is not None:
            self._call.cancel()

    async def send_request(self) -> None:
        try:
            self._call = await self._opener.start(self._route, metadata=self._metadata, timeout=self._timeout)
        except LinkError as exc:
            raise _unreachable(exc) from exc

    async def send_message(self, message: Request, *, end: bool = False) -> None:
        data = encode(message)
        if self._call is None and end:
            try:
                self._call = await self._opener.call(self._route, data, metadata=self._metadata, timeout=self._timeout)
            except LinkError as exc:
                raise _unreachable(exc) from exc
            return
        if self._call is None:
            await self.send_request()
        await self._opened().send(data, end=end)

    async def end(self) -> None:
        self._opened().end_sending()

    async def recv_message(self) -> Reply | None:
        call = self._opened()
        data = await call.receive()
        if data is None:
            if self._single:
                raise RpcError(Status.INTERNAL, "the peer ended OK without a reply", origin=Origin.PEER)
            return None
        if self._single and await call.receive() is not None:
            raise RpcError(Status.INTERNAL, "the peer sent two replies to a unary call", origin=Origin.PEER)
        try:
            return decode(self._reply_type, data)
        except DecodeError as exc:
            raise RpcError(Status.INTERNAL, f"the peer's reply: {exc}", origin=Origin.PEER) from exc

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
