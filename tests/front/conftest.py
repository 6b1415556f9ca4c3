"""A bare HTTP client on a memory link, and a running server to talk to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import pytest
import trio

from trio_router.errors import LinkError
from trio_router.front.connection import Handler
from trio_router.front.exchange import Exchange
from trio_router.front.faults import ClientGone
from trio_router.front.http import HttpServer
from trio_router.front.settings import HttpSettings
from trio_router.rpc.memory import MemoryNetwork, MemoryTransport
from trio_router.rpc.transport import Listener

WALL_CLOCK = 1_700_000_000.0


@dataclass
class Response:
    """What a server answered, `chunks` as framed (None: the body had a length or ended with the connection)."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes = b""
    chunks: list[bytes] | None = None

    def header(self, name: str) -> str | None:
        values = [value for key, value in self.headers if key == name]
        assert len(values) <= 1, f"{name} is repeated"
        return values[0] if values else None

    @property
    def json(self) -> dict:
        return msgspec.json.decode(self.body)


@dataclass
class Client:
    """One end of a connection; reads block on virtual time."""

    transport: MemoryTransport
    buffer: bytearray = field(default_factory=bytearray)

    async def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            sent = self.transport.send_nowait(view)
            view = view[sent:]
            if view:
                await self.transport.wait_writable()
        await trio.lowlevel.checkpoint()

    async def more(self) -> bool:
        """Read once into the buffer; False at the end of the connection."""
        try:
            await self.transport.wait_readable()
            data = self.transport.recv_nowait(65536)
        except LinkError:
            return False
        self.buffer += data or b""
        return data != b""

    async def until(self, mark: bytes) -> bytes:
        """Take from the buffer up to and including `mark`."""
        while (at := self.buffer.find(mark)) < 0:
            assert await self.more(), f"connection ended before {mark!r}; got {bytes(self.buffer)!r}"
        return self._take(at + len(mark))

    async def exactly(self, count: int) -> bytes:
        while len(self.buffer) < count:
            assert await self.more(), f"connection ended; got {bytes(self.buffer)!r}"
        return self._take(count)

    async def to_end(self) -> bytes:
        while await self.more():
            pass
        return self._take(len(self.buffer))

    def _take(self, count: int) -> bytes:
        taken = bytes(self.buffer[:count])
        del self.buffer[:count]
        return taken

    async def head(self) -> Response:
        status_line, *lines = (await self.until(b"\r\n\r\n"))[:-4].decode("latin-1").split("\r\n")
        headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        return Response(int(status_line.split()[1]), headers)

    async def response(self, *, head_only: bool = False) -> Response:
        response = await self.head()
        if head_only or response.status == 100:
            return response
        if response.header("transfer-encoding") == "chunked":
            response.chunks = []
            while (size := int(await self.until(b"\r\n"), 16)) > 0:
                response.chunks.append(await self.exactly(size))
                assert await self.exactly(2) == b"\r\n"
            assert await self.exactly(2) == b"\r\n"
            response.body = b"".join(response.chunks)
        elif (length := response.header("content-length")) is not None:
            response.body = await self.exactly(int(length))
        else:
            response.body = await self.to_end()
        return response

    async def request(self, method: str, path: str, *, body: bytes = b"", headers: str = "") -> Response:
        await self.send(wire_request(method, path, body=body, headers=headers))
        return await self.response(head_only=method == "HEAD")

    async def post(self, path: str, body: dict, *, headers: str = "") -> Response:
        return await self.request("POST", path, body=msgspec.json.encode(body), headers=headers)

    async def is_closed(self) -> bool:
        return not self.buffer and not await self.more()

    def leave(self) -> None:
        self.transport.close()


def wire_request(method: str, path: str, *, body: bytes = b"", headers: str = "", version: str = "1.1") -> bytes:
    length = f"content-length: {len(body)}\r\n" if body else ""
    return f"{method} {path} HTTP/{version}\r\nhost: test\r\n{length}{headers}\r\n".encode() + body


@dataclass
class Site:
    """A server on a memory network."""

    server: HttpServer
    network: MemoryNetwork
    address: str
    done: trio.Event = field(default_factory=trio.Event)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    async def connect(self) -> Client:
        return Client(await self.network.dial(self.address))


class Gate:
    """A handler that does `work` (by default: waits to be let go, then answers) and tells how that ended."""

    def __init__(self, work: Handler | None = None) -> None:
        self.work = work or self.wait
        self.entered = trio.Event()
        self.go = trio.Event()
        self.ended = trio.Event()
        self.outcome = "never called"

    async def __call__(self, exchange: Exchange) -> None:
        self.outcome = "running"
        self.entered.set()
        try:
            await self.work(exchange)
            self.outcome = "done"
        except (trio.Cancelled, ClientGone):
            self.outcome = "stopped"
            raise
        finally:
            self.ended.set()

    async def wait(self, exchange: Exchange) -> None:
        await self.go.wait()
        await exchange.respond(200, body=b"ok")


class Serves(Protocol):
    """An HttpServer, or what wraps one."""

    async def serve(self, listener: Listener, *, task_status: trio.TaskStatus[None]) -> None: ...


Launch = Callable[..., Awaitable[Site]]
Start = Callable[..., Awaitable[Site]]


@pytest.fixture
async def launch(nursery: trio.Nursery) -> AsyncIterator[Launch]:
    """Serve something on a memory network: `await launch(front, server=front.server)`.

    Tests name `autojump_clock` themselves: only a test's own arguments choose its clock.
    """
    sites: list[Site] = []

    async def launch_site(front: Serves, *, server: HttpServer, capacity: int = 65536) -> Site:
        network = MemoryNetwork(capacity_bytes=capacity)
        site = Site(server, network, "front:80")
        sites.append(site)

        async def serve(*, task_status: trio.TaskStatus[None]) -> None:
            with site.scope:
                await front.serve(network.listen(site.address), task_status=task_status)
            site.done.set()

        await nursery.start(serve)
        return site

    yield launch_site
    for site in sites:
        site.scope.cancel()


@pytest.fixture
def start(launch: Launch) -> Start:
    """Start an HTTP server: `await start(handler, capacity=..., **http_settings)`."""

    async def start_site(handler: Handler, *, capacity: int = 65536, **settings: float) -> Site:
        server = HttpServer(handler, settings=HttpSettings(**settings), clock=lambda: WALL_CLOCK)
        return await launch(server, server=server, capacity=capacity)

    return start_site


@pytest.fixture
def request_bytes() -> Callable[..., bytes]:
    return wire_request


@pytest.fixture
def make_gate() -> type[Gate]:
    return Gate
