from __future__ import annotations

import socket
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import trio
import trio.testing

from trio_router.errors import LinkError
from trio_router.rpc.endpoint import dial
from trio_router.rpc.memory import MemoryNetwork, memory_link
from trio_router.rpc.transport import Listener, Transport, dial_tcp, open_tcp_listener, split_address
from trio_router.rpc.unix import open_unix_listener


async def _receive_exactly(transport: Transport, count: int) -> bytes:
    received = b""
    while len(received) < count:
        await transport.wait_readable()
        piece = transport.recv_nowait(65_536)
        assert piece != b"", "end of file before all bytes came"
        received += piece or b""
    return received


async def _tcp_pair() -> tuple[Transport, Transport]:
    return await _connected(await open_tcp_listener("127.0.0.1", port=0))


async def _unix_pair() -> tuple[Transport, Transport]:
    with TemporaryDirectory() as directory:
        return await _connected(open_unix_listener(Path(directory) / "socket"))


async def _connected(listener: Listener) -> tuple[Transport, Transport]:
    accepted: list[Transport] = []

    async def accept_one() -> None:
        accepted.append(await listener.accept())

    async with trio.open_nursery() as accepting:
        accepting.start_soon(accept_one)
        dialed = await dial(listener.address)
    listener.close()
    return dialed, accepted[0]


async def _memory_pair() -> tuple[Transport, Transport]:
    return memory_link()


PAIRS = pytest.mark.parametrize("make_pair", [_tcp_pair, _unix_pair, _memory_pair], ids=["tcp", "unix", "memory"])


@PAIRS
async def test_bytes_arrive_in_order_and_then_the_end(make_pair):
    left, right = await make_pair()
    await left.establish()
    await right.establish()
    assert left.send_nowait(b"abc") == 3
    assert left.send_nowait(b"def") == 3
    assert await _receive_exactly(right, 6) == b"abcdef"
    assert right.recv_nowait(10) is None
    left.close()
    await right.wait_readable()
    assert right.recv_nowait(10) == b""
    right.close()


@PAIRS
async def test_a_full_pipe_refuses_and_opens_again_when_read(make_pair):
    left, right = await make_pair()
    written = 0
    while taken := left.send_nowait(bytes(65_536)):
        written += taken
    assert written > 0
    async with trio.open_nursery() as reading:
        reading.start_soon(_receive_exactly, right, written)
        await left.wait_writable()
        assert left.send_nowait(b"more") > 0
    left.close()
    right.close()


@PAIRS
async def test_closing_wakes_our_own_waiter_with_an_error(make_pair):
    left, right = await make_pair()

    async def wait() -> None:
        with pytest.raises(LinkError, match="closed"):
            await left.wait_readable()

    async with trio.open_nursery() as waiting:
        waiting.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        left.close()
    left.close()  # twice is allowed
    with pytest.raises(LinkError):
        left.send_nowait(b"x")
    right.close()


@PAIRS
async def test_waiting_on_a_closed_transport_is_a_link_error_however_often(make_pair):
    for _ in range(2):
        left, right = await make_pair()
        left.close()
        for wait in (left.wait_readable, left.wait_writable):
            for _ in range(2):
                with pytest.raises(LinkError, match="closed"):
                    await wait()
        right.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux has all of these options")
async def test_both_ends_have_the_kernel_look_after_hosts_that_vanish():
    for end in await _tcp_pair():
        sock = end._socket
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        seconds = [
            sock.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        ]
        # The two ways of dying take the same time: silent, and with something on the way.
        assert seconds == [60, 20, 3]
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * (60 + 20 * 3)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        end.close()


async def test_a_memory_link_holds_its_capacity_and_no_more():
    left, right = memory_link(10)
    assert left.send_nowait(b"0123456789ab") == 10
    assert left.send_nowait(b"ab") == 0
    assert right.recv_nowait(4) == b"0123"
    assert left.send_nowait(b"abcdef") == 4


async def test_dialing_nobody_is_an_error_that_names_the_address():
    listener = await open_tcp_listener("127.0.0.1", port=0)
    listener.close()
    with pytest.raises(LinkError, match=f"{listener.address}: Connection refused"):
        await dial_tcp(listener.address)
    with pytest.raises(LinkError, match="memory:9"):
        await MemoryNetwork().dial("memory:9")


@pytest.mark.parametrize("address", ["no..where:1", "x" * 70 + ":1", "127.0.0.1", "127.0.0.1:99999"])
async def test_dialing_what_is_no_address_is_an_error_that_names_it(address):
    with pytest.raises(LinkError, match=address):
        await dial_tcp(address)


async def test_a_closed_listener_wakes_its_acceptor():
    network = MemoryNetwork()
    for listener in (await open_tcp_listener("127.0.0.1", port=0), network.listen()):

        async def accept(listener=listener) -> None:
            with pytest.raises(LinkError, match="closed"):
                await listener.accept()

        async with trio.open_nursery() as accepting:
            accepting.start_soon(accept)
            await trio.testing.wait_all_tasks_blocked()
            listener.close()
        for _ in range(2):
            with pytest.raises(LinkError, match="closed"):
                await listener.accept()


@pytest.mark.parametrize(
    ("address", "expected"),
    [("10.0.0.1:50051", ("10.0.0.1", 50051)), ("[::1]:80", ("::1", 80)), ("worker-0.svc:1", ("worker-0.svc", 1))],
)
def test_addresses_split_at_the_last_colon(address, expected):
    assert split_address(address) == expected


@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "host:http", "host:99999", "host:-1"])
def test_an_address_without_a_port_is_refused(address):
    with pytest.raises(LinkError, match="host:port"):
        split_address(address)
