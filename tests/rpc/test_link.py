"""A connection that breaks, clogs, ends, or has an owner that makes mistakes."""

from __future__ import annotations

import socket

import pytest
import trio
import trio.testing
from grpclib.const import Status

from trio_router.errors import LinkError
from trio_router.http2 import frames
from trio_router.http2.connection import Connection
from trio_router.http2.frames import ErrorCode
from trio_router.http2.streams import Role
from trio_router.rpc.call import open_call
from trio_router.rpc.channel import open_channel
from trio_router.rpc.link import Link
from trio_router.rpc.memory import MemoryNetwork, memory_link
from trio_router.rpc.metadata import Origin, RpcError, request_headers, response_headers, status_trailers
from trio_router.rpc.server import Server
from trio_router.rpc.servercall import ServerCall
from trio_router.rpc.transport import open_tcp_listener, split_address

CALL = "/test.Service/Call"
OTHER = "/test.Service/Other"
OK = status_trailers(Status.OK, None)


async def echo(call: ServerCall) -> None:
    while (message := await call.receive()) is not None:
        await call.send(message)


class TestBreaking:
    async def test_what_came_before_a_write_failed_is_not_lost(self, scripted_server, autojump_clock):
        """A server that finishes a call and closes must be heard even by a client that is just writing."""
        async with scripted_server() as (channel, peer):
            first = await channel.call(CALL, b"")
            stream = await peer.request()
            peer.respond(stream, b"reply")
            peer.end(stream, OK)
            peer.close()
            second = await channel.call(CALL, b"")  # its write fails, before the link's reader runs
            assert await first.receive() == b"reply"
            assert await first.receive() is None
            with pytest.raises(RpcError) as caught:
                await second.receive()
            assert (caught.value.status, caught.value.origin) == (Status.UNAVAILABLE, Origin.TRANSPORT)
            assert [link.usable for link in channel.links] == [False]

    async def test_the_same_on_real_sockets(self):
        """Unread input makes a kernel close with RST, after which writes fail while the reply waits to be read."""
        with socket.create_server(("127.0.0.1", 0)) as listener, trio.fail_after(30):
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            async with open_channel(address) as channel:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(channel.connect)
                    sock, _ = await trio.to_thread.run_sync(listener.accept)
                    connection = Connection(Role.SERVER)
                    sock.sendall(connection.take_output())
                call = await channel.call(CALL, b"")
                touched = []
                while not touched:
                    touched = connection.receive(sock.recv(65_536))
                connection.send_headers(touched[0], response_headers())
                connection.send_messages(touched[0], [b"reply"])
                connection.send_headers(touched[0], OK, end_stream=True)
                sock.sendall(connection.take_output())
                late = [await channel.call(OTHER, b"") for _ in range(2)]
                sock.close()
                late.append(await channel.call(OTHER, b""))
                assert not channel.links[0].usable
                assert [await call.receive(), await call.receive()] == [b"reply", None]
                for lost in late:
                    with pytest.raises(RpcError) as caught:
                        await lost.receive()
                    assert caught.value.origin is Origin.TRANSPORT

    async def test_garbage_is_named_as_what_it_is(self, scripted_server, autojump_clock):
        async with scripted_server() as (channel, peer):
            call = await channel.call(CALL, b"")
            await peer.request()
            peer.write(b"\x00\x00\x04\x03\x00\x00\x00\x00\x00" + bytes(4))  # RST_STREAM on stream 0
            with pytest.raises(RpcError, match="broke the protocol: RST_STREAM") as caught:
                await call.receive()
            assert (caught.value.status, caught.value.origin) == (Status.UNAVAILABLE, Origin.TRANSPORT)
            await peer.until(lambda: peer.connection.goaway_received is not None)
            assert peer.connection.goaway_received.code == ErrorCode.PROTOCOL_ERROR

    async def test_a_connection_that_ends_inside_a_message_fails_the_call(self, scripted_server, autojump_clock):
        async with scripted_server() as (channel, peer):
            call = await channel.call(CALL, b"")
            stream = await peer.request()
            peer.respond(stream, b"whole")
            half = b"\x00\x00\x00\x00\x64" + b"only a part"
            peer.write(len(half).to_bytes(3, "big") + b"\x00\x00" + stream.id.to_bytes(4, "big") + half)
            peer.close()
            assert await call.receive() == b"whole"
            with pytest.raises(RpcError, match="closed the connection") as caught:
                await call.receive()
            assert (caught.value.status, caught.value.origin) == (Status.UNAVAILABLE, Origin.TRANSPORT)

    async def test_a_call_above_a_goaway_may_be_repeated_and_one_below_goes_on(self, scripted_server, autojump_clock):
        async with scripted_server() as (channel, peer):
            first = await channel.call(CALL, b"")
            served = await peer.request()
            peer.connection.go_away()
            second = await channel.call(CALL, b"")  # crosses with the GOAWAY
            peer.flush()
            with pytest.raises(RpcError) as caught:
                await second.receive()
            assert (caught.value.status, caught.value.origin) == (Status.UNAVAILABLE, Origin.REFUSED)
            peer.respond(served, b"reply")
            peer.end(served, OK)
            assert [await first.receive(), await first.receive()] == [b"reply", None]


class TestClogging:
    async def test_a_stream_without_credit_is_not_told_to_go_on_when_only_the_transport_has_room(
        self, scripted_client, autojump_clock
    ):
        """Invariant I9: whoever is told too early sends more, each time anew."""
        told = []

        async def stalled(call: ServerCall) -> None:
            call.on_drained = lambda: told.append(trio.current_time())
            while call.send_nowait([bytes(1000)]):
                pass
            call.flush()
            await trio.sleep_forever()

        async with scripted_client(raw={CALL: stalled, OTHER: echo}, capacity_bytes=10_000) as (server, peer):
            clogged = peer.call(CALL)
            await peer.until(lambda: sum(map(len, clogged.messages)) >= 64_000)
            for _ in range(5):
                other = peer.call(OTHER, bytes(9_000))
                await trio.testing.wait_all_tasks_blocked()  # the pipe is full again
                await peer.until(lambda other=other: other.closed)
            assert told == []
            clogged.take()
            clogged.credit()
            peer.flush()
            await peer.until(lambda: sum(map(len, clogged.messages)) >= 1_000)
            await trio.testing.wait_all_tasks_blocked()
            assert len(told) == 1
            assert server.calls_in_flight == 1

    async def test_a_sender_that_waits_for_the_transport_and_for_credit_is_woken(self, autojump_clock):
        near, far = memory_link(10_000)
        link, server = Link(near, Connection(Role.CLIENT)), Connection(Role.SERVER)
        received = bytearray()

        async def read_slowly(*, task_status) -> None:
            far.send_nowait(server.take_output())
            task_status.started()
            while True:
                await far.wait_readable()
                await trio.sleep(1)
                for stream in server.receive(far.recv_nowait(1000)):
                    received.extend(b"".join(stream.take()))
                    stream.credit()
                while server.has_output:
                    far.send_nowait(server.take_output())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.run)
            await nursery.start(read_slowly)
            await link.greeted()
            call = open_call(link, request_headers(CALL, authority="a"), path=CALL, deadline=None)
            with trio.fail_after(10_000):
                for number in range(20):
                    await call.send(bytes([number]) * 10_000)
            nursery.cancel_scope.cancel()
        assert len(received) >= 20 * 10_000 - 65_535 - 10_000

    async def test_many_senders_share_a_clogged_transport(self, open_pair, autojump_clock):
        received: dict[bytes, int] = {}

        async def total(call: ServerCall) -> None:
            while (message := await call.receive()) is not None:
                received[message[:1]] = received.get(message[:1], 0) + len(message)

        async with open_pair(raw={CALL: total}, capacity_bytes=150) as (channel, _):

            async def send(number: int) -> None:
                call = await channel.start(CALL)
                for at in range(30):
                    await call.send(bytes([number]) * 100, end=at == 29)
                assert await call.receive() is None

            async with trio.open_nursery() as nursery:
                for number in range(6):
                    nursery.start_soon(send, number)
        assert received == {bytes([number]): 3000 for number in range(6)}

    async def test_one_task_may_send_while_another_receives(self, open_pair, autojump_clock):
        """What a channel advises for bidirectional calls."""
        async with open_pair(raw={CALL: echo}) as (channel, _):
            call = await channel.start(CALL)

            async def send() -> None:
                for number in range(100):
                    await call.send(bytes([number]) * 5_000, end=number == 99)

            replies = []
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                while (reply := await call.receive()) is not None:
                    replies.append(reply)
                    await trio.testing.wait_all_tasks_blocked()
            assert replies == [bytes([number]) * 5_000 for number in range(100)]

    async def test_a_handler_may_send_in_one_task_and_receive_in_another(self, open_pair, autojump_clock):
        async def both(call: ServerCall) -> None:
            async def send() -> None:
                for number in range(100):
                    await call.send(bytes([number]) * 5_000)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                while await call.receive() is not None:
                    pass

        async with open_pair(raw={CALL: both}) as (channel, _):
            call = await channel.start(CALL)
            replies = []
            async with trio.open_nursery() as nursery:

                async def send() -> None:
                    for number in range(100):
                        await call.send(bytes(5_000), end=number == 99)

                nursery.start_soon(send)
                while (reply := await call.receive()) is not None:
                    replies.append(reply[0])
            assert replies == list(range(100))


class TestTurns:
    async def test_a_peer_of_many_small_frames_does_not_keep_the_others_waiting(self, scripted_client, autojump_clock):
        """One read of 19,000 frames is handled in portions; calls on other connections go on between them."""
        async with scripted_client(raw={CALL: echo}) as (server, peer):
            (busy,) = server._links
            network = MemoryNetwork()
            listener = network.listen()
            async with trio.open_nursery() as nursery:
                await nursery.start(server.serve, listener)
                async with open_channel(listener.address, dialer=network.dial) as channel:
                    await channel.connect()
                    call = await channel.start(CALL)
                    peer.write(frames.window_update(0, 1) * 19_000)
                    await call.send(b"me, too")
                    assert await call.receive() == b"me, too"
                    assert busy.connection.has_input
                    await trio.testing.wait_all_tasks_blocked()
                    assert not busy.connection.has_input
                nursery.cancel_scope.cancel()
            mine = peer.call(CALL, b"still fine")
            await peer.until(lambda: mine.closed)
            assert mine.take() == [b"still fine"]

    async def test_what_came_in_one_read_is_all_heard_before_the_end(self, scripted_client, autojump_clock):
        """The client says more than one portion in one write, and hangs up."""
        heard = []

        async def note(call: ServerCall) -> None:
            heard.append(await call.receive())
            await trio.sleep_forever()

        async with scripted_client(raw={CALL: note}) as (server, peer):
            for number in range(1000):
                peer.call(CALL, b"%d" % number)
                if number == 500:
                    peer.write(frames.window_update(0, 1) * 19_000)
            peer.close()
            await trio.testing.wait_all_tasks_blocked()
            assert len(heard) == 1000
            assert (server.calls_in_flight, server._links) == (0, {})


class TestEnding:
    async def test_a_drained_server_lets_a_slow_client_read_to_the_end(self):
        """Closing a socket that the peer still writes to destroys what the peer has not read yet."""
        replies = [bytes([number]) * 1000 for number in range(60)]

        async def answer(call: ServerCall) -> None:
            await call.receive()
            for reply in replies:
                await call.send(reply)

        def read_to_the_end(address: str) -> list[bytes]:
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                sock.settimeout(30)
                sock.connect(split_address(address))
                connection = Connection(Role.CLIENT)
                stream = connection.open_stream(request_headers(CALL, authority="a"))
                connection.send_messages(stream, [b""], end_stream=True)
                sock.sendall(connection.take_output())
                trio.from_thread.run(server_is_done)
                connection.ping(b"any data")
                while not stream.closed:
                    data = sock.recv(1000)
                    if not data:
                        break
                    connection.receive(data)
                    if connection.has_output:
                        sock.sendall(connection.take_output())
                assert stream.trailers == OK
                return stream.take()

        async def server_is_done() -> None:
            while not done or server.calls_in_flight:
                await trio.lowlevel.checkpoint()
            server.drain()
            for _ in range(10):
                await trio.lowlevel.checkpoint()

        async def answer_and_note(call: ServerCall) -> None:
            await answer(call)
            done.append(1)

        done: list[int] = []
        listener = await open_tcp_listener("127.0.0.1", port=0)
        server = Server(raw={CALL: answer_and_note})
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.serve, listener)
                assert await trio.to_thread.run_sync(read_to_the_end, listener.address) == replies

    async def test_who_waits_in_a_call_is_told_when_the_link_is_closed(self, scripted_server, autojump_clock):
        async with scripted_server() as (channel, peer):
            call = await channel.start(CALL)
            await peer.request()
            async with trio.open_nursery() as nursery:

                async def receive() -> None:
                    with pytest.raises(RpcError, match="pulled"):
                        await call.receive()

                async def send() -> None:
                    await call.send(bytes(1_000_000))

                nursery.start_soon(receive)
                nursery.start_soon(send)
                await trio.testing.wait_all_tasks_blocked()
                channel.links[0].close(LinkError("pulled"))
                channel.links[0].close(LinkError("too late to be the reason"))


class TestDeadlines:
    async def test_each_call_ends_at_its_own_deadline_whatever_the_order(self, scripted_server, autojump_clock):
        async with scripted_server() as (channel, peer):
            ended: dict[float, float] = {}
            begin = trio.current_time()

            async def one(timeout: float) -> None:
                call = await channel.call(CALL, b"", timeout=timeout)
                with pytest.raises(RpcError) as caught:
                    await call.receive()
                assert (caught.value.status, caught.value.origin) == (Status.DEADLINE_EXCEEDED, Origin.LOCAL)
                ended[timeout] = trio.current_time() - begin

            async with trio.open_nursery() as nursery:
                for timeout in (5.0, 1.0, 3.0, 2.0, 0.0, 4.0):
                    nursery.start_soon(one, timeout)
            assert ended == {timeout: pytest.approx(timeout) for timeout in (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)}
            await peer.until(lambda: not peer.connection.open_streams)

    async def test_a_call_that_ended_in_time_is_left_alone(self, scripted_server, autojump_clock):
        async with scripted_server() as (channel, peer):
            call = await channel.call(CALL, b"", timeout=5.0)
            stream = await peer.request()
            peer.respond(stream, b"reply")
            peer.end(stream, OK)
            assert await call.receive() == b"reply"
            await trio.sleep(10)
            assert await call.receive() is None

    async def test_what_came_before_the_deadline_is_still_received(self, scripted_server, autojump_clock):
        async with scripted_server() as (channel, peer):
            call = await channel.call(CALL, b"", timeout=5.0)
            peer.respond(await peer.request(), b"1", b"2")
            await trio.sleep(10)
            assert [await call.receive(), await call.receive()] == [b"1", b"2"]
            with pytest.raises(RpcError):
                await call.receive()
