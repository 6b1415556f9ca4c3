"""Ten thousand connections that end badly, over real sockets: every descriptor comes back, on both sides (F7).

Each kind runs in waves, since what is held at one time is bounded by who waits, not by how many there were.
"""

from __future__ import annotations

import gc
import random
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
import trio
import trio.testing

from trio_router.errors import LinkError
from trio_router.http2.connection import Connection
from trio_router.http2.streams import Role
from trio_router.rpc.channel import ChannelSettings, open_channel
from trio_router.rpc.metadata import RpcError, request_headers
from trio_router.rpc.server import Server
from trio_router.rpc.servercall import ServerCall
from trio_router.rpc.transport import SocketTransport, dial_tcp, open_tcp_listener

CALL = "/test.Service/Call"
WAVES, WAVE = 40, 50
PATIENCE = 120.0


def descriptors() -> int:
    return len(list(Path("/dev/fd").iterdir()))


async def wait(call: ServerCall) -> None:
    await trio.sleep_forever()


def opening() -> bytes:
    """What a client says that opens a call and waits."""
    connection = Connection(Role.CLIENT)
    connection.send_messages(connection.open_stream(request_headers(CALL, authority="a")), [b""], end_stream=True)
    return connection.take_output()


async def until_hung_up(transport: SocketTransport) -> None:
    while transport.recv_nowait(1 << 16) != b"":
        await transport.wait_readable()


async def half_close(address: str) -> None:
    """Says that it will send nothing more, in the middle of a call, and waits."""
    transport = await dial_tcp(address)
    transport.send_nowait(opening())
    transport._socket.shutdown(socket.SHUT_WR)
    await until_hung_up(transport)
    transport.close()


async def half_close_before_the_first_byte(address: str) -> None:
    transport = await dial_tcp(address)
    transport._socket.shutdown(socket.SHUT_WR)
    await until_hung_up(transport)
    transport.close()


async def reset(address: str) -> None:
    """Ends with RST, in the middle of a call."""
    transport = await dial_tcp(address)
    transport.send_nowait(opening())
    transport._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.close()


async def give_up_dialing(address: str) -> None:
    """Is cancelled at whichever step of its dial it has come to."""
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_connect, address)
            for _ in range(random.randrange(13)):
                await trio.lowlevel.checkpoint()
            scope.cancel()


async def _connect(address: str) -> None:
    async with open_channel(address) as channel:
        await channel.call(CALL, b"")
        await trio.sleep_forever()


@pytest.mark.parametrize(
    "ending",
    [half_close, half_close_before_the_first_byte, reset, give_up_dialing],
    ids=lambda ending: ending.__name__,
)
async def test_case_f7_clients_that_leave_in_the_middle_leave_no_descriptor(ending: Callable[[str], Awaitable[None]]):
    listener = await open_tcp_listener("127.0.0.1", port=0)
    server = Server(raw={CALL: wait})
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, listener)
            await half_close(listener.address)
            base = descriptors()
            for _ in range(WAVES):
                async with trio.open_nursery() as clients:
                    for _ in range(WAVE):
                        clients.start_soon(ending, listener.address)
                assert descriptors() < base + 2 * WAVE + 10
            while server._connections:
                await trio.lowlevel.checkpoint()
            await trio.testing.wait_all_tasks_blocked()
            assert descriptors() <= base
            assert server.calls_in_flight == 0
            nursery.cancel_scope.cancel()


async def test_case_f7_servers_that_hang_up_leave_no_descriptor():
    """Two thousand times: half-closed, closed, and answered with nonsense, while a channel keeps calling."""
    replies = [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"]
    listener = await open_tcp_listener("127.0.0.1", port=0)
    served = 0

    async def hang_up(*, task_status: trio.TaskStatus[None]) -> None:
        nonlocal served
        task_status.started()
        while True:
            transport = await listener.accept()
            assert isinstance(transport, SocketTransport)
            served += 1
            transport.send_nowait(replies[served % 3])
            transport._socket.shutdown(socket.SHUT_WR)
            nursery.start_soon(linger, transport)

    async def linger(transport: SocketTransport) -> None:
        with suppress(LinkError):
            await until_hung_up(transport)
        transport.close()

    async def call() -> None:
        async with open_channel(listener.address, settings=ChannelSettings(connect_timeout=30)) as channel:
            with pytest.raises((LinkError, RpcError)):
                await (await channel.call(CALL, b"")).receive()

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            await nursery.start(hang_up)
            await call()
            base = descriptors()
            for _ in range(WAVES):
                async with trio.open_nursery() as clients:
                    for _ in range(WAVE):
                        clients.start_soon(call)
                assert descriptors() < base + 2 * WAVE + 10
            await trio.testing.wait_all_tasks_blocked()
            assert descriptors() <= base
            assert served == WAVES * WAVE + 1
            nursery.cancel_scope.cancel()
    listener.close()


async def test_case_d8_a_host_that_drops_what_it_is_sent_costs_a_channel_one_socket():
    """A full backlog answers no handshake, as a firewall that drops packets does not."""
    with socket.socket() as deaf, socket.socket() as filling:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        port = deaf.getsockname()[1]
        filling.setblocking(False)
        filling.connect_ex(("127.0.0.1", port))
        more = [socket.socket() for _ in range(3)]
        for sock in more:
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", port))
        base = descriptors()
        with trio.fail_after(PATIENCE):
            settings = ChannelSettings(connect_timeout=0.3)
            async with open_channel(f"127.0.0.1:{port}", settings=settings) as channel:
                for _ in range(2):
                    async with trio.open_nursery() as nursery:
                        for _ in range(100):
                            nursery.start_soon(_fails, channel)
                        await trio.testing.wait_all_tasks_blocked()
                        assert descriptors() <= base + 1
        gc.collect()
        assert descriptors() <= base
        for sock in more:
            sock.close()


async def _fails(channel) -> None:
    with pytest.raises(LinkError, match=r"no answer within 0\.3 s"):
        await channel.call(CALL, b"")
