"""What a server does with handlers and clients that behave badly. A bad call ends; nothing else does (I12)."""

from __future__ import annotations

import hpack
import pytest
import trio
import trio.testing
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from trio_router.errors import BadRequest, ConfigError, LinkError
from trio_router.http2 import frames
from trio_router.http2.frames import ErrorCode
from trio_router.http2.settings import Http2Settings
from trio_router.rpc.channel import open_channel
from trio_router.rpc.memory import MemoryNetwork
from trio_router.rpc.metadata import Origin, RpcError, get, request_headers
from trio_router.rpc.server import Server, ServerSettings
from trio_router.rpc.servercall import ServerCall

CALL = "/test.Service/Call"
OTHER = "/test.Service/Other"


async def echo(call: ServerCall) -> None:
    while (message := await call.receive()) is not None:
        await call.send(message)


async def failure(channel, path: str = CALL, message: bytes = b"", **options) -> RpcError:
    try:
        call = await channel.call(path, message, **options)
        while await call.receive() is not None:
            pass
    except RpcError as exc:
        return exc
    raise AssertionError("the call ended well")


async def still_serves(channel) -> bool:
    call = await channel.call(OTHER, b"fine")
    return [await call.receive(), await call.receive()] == [b"fine", None]


class TestHandlersThatFail:
    async def test_trailing_metadata_that_cannot_be_sent_is_the_handlers_bug(self, open_pair, autojump_clock, caplog):
        async def careless(call: ServerCall) -> None:
            call.trailing_metadata = {"Not A Key": "x"}
            if await call.receive() == b"raise":
                raise GRPCError(Status.ABORTED)

        async with open_pair(raw={CALL: careless, OTHER: echo}) as (channel, _):
            for message in (b"", b"raise"):
                assert (await failure(channel, message=message)).status is Status.INTERNAL
            assert "Not A Key" in caplog.text
            assert await still_serves(channel)

    async def test_a_message_that_is_no_text_is_sent_as_far_as_it_is(self, open_pair, autojump_clock):
        async def surrogate(call: ServerCall) -> None:
            raise GRPCError(Status.ABORTED, "half a \ud83d pair")

        async with open_pair(raw={CALL: surrogate, OTHER: echo}) as (channel, _):
            error = await failure(channel)
            assert (error.status, error.message) == (Status.ABORTED, "half a ? pair")
            assert await still_serves(channel)

    async def test_an_endless_message_is_cut_and_endless_details_are_left_out(self, open_pair, autojump_clock):
        """Peers refuse long header lists, and some close the connection over them."""

        async def talk(call: ServerCall) -> None:
            raise GRPCError(Status.ABORTED, "größer " * 100_000, bytes(100_000))

        async with open_pair(raw={CALL: talk, OTHER: echo}) as (channel, _):
            error = await failure(channel)
            assert error.status is Status.ABORTED
            assert error.message.startswith("größer größer ")
            assert error.message.endswith("…")
            assert 1000 < len(error.message) < 3072
            assert error.details is None
            assert await still_serves(channel)
            assert len(channel.links) == 1

    async def test_an_error_beside_a_cancellation_ends_no_more_than_its_call(self, open_pair, autojump_clock, caplog):
        async def clumsy(call: ServerCall) -> None:
            async def fail_when_cancelled(name: str) -> None:
                try:
                    await trio.sleep_forever()
                finally:
                    raise ValueError(name)  # the mistake the test is about

            async with trio.open_nursery() as nursery:
                nursery.start_soon(fail_when_cancelled, "one")
                nursery.start_soon(fail_when_cancelled, "two")
                nursery.start_soon(trio.sleep_forever)

        async with open_pair(raw={CALL: clumsy, OTHER: echo}) as (channel, server):
            call = await channel.call(CALL, b"")
            await trio.testing.wait_all_tasks_blocked()
            call.cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert server.calls_in_flight == 0
            assert "ValueError: one" in caplog.text
            assert await still_serves(channel)
            assert (await failure(channel, timeout=2.0)).status is Status.DEADLINE_EXCEEDED

    async def test_a_status_raised_in_a_handlers_nursery_is_a_status(self, open_pair, autojump_clock):
        async def nested(call: ServerCall) -> None:
            async def refuse() -> None:
                raise GRPCError(Status.FAILED_PRECONDITION, "not yet")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(refuse)
                await trio.sleep_forever()

        async with open_pair(raw={CALL: nested}) as (channel, _):
            error = await failure(channel)
            assert (error.status, error.message) == (Status.FAILED_PRECONDITION, "not yet")

    @pytest.mark.parametrize("error", [BadRequest("prompt: is empty"), ConfigError("no such model")], ids=repr)
    async def test_the_packages_own_errors_carry_their_status(self, open_pair, autojump_clock, error):
        async def refuse(call: ServerCall) -> None:
            raise error

        async with open_pair(raw={CALL: refuse}) as (channel, _):
            told = await failure(channel)
            assert (told.status, told.message) == (error.grpc_status, error.message)

    async def test_a_handler_that_is_cancelled_with_its_server_fails_its_call(self, autojump_clock, scripted_client):
        async def wait(call: ServerCall) -> None:
            await trio.sleep_forever()

        async with scripted_client(raw={CALL: wait}) as (server, peer):
            peer.call(CALL)
            await trio.testing.wait_all_tasks_blocked()
            assert server.calls_in_flight == 1
        assert server.calls_in_flight == 0


class TestClientsThatMisbehave:
    @pytest.mark.parametrize(
        ("change", "status"),
        [
            ({b"content-type": None}, Status.INTERNAL),
            ({b"content-type": b"text/html"}, Status.INTERNAL),
            ({b"content-type": b"application/grpcish"}, Status.INTERNAL),
            ({b"content-type": b"application/grpc+proto"}, None),
            ({b"content-type": b"application/grpc;charset=x"}, None),
            ({b"grpc-encoding": b"snappy"}, Status.UNIMPLEMENTED),
            ({b"grpc-encoding": b"identity"}, None),
            ({b"grpc-timeout": b""}, Status.INVALID_ARGUMENT),
            ({b"grpc-timeout": b"5"}, Status.INVALID_ARGUMENT),
            ({b"grpc-timeout": b"-5S"}, Status.INVALID_ARGUMENT),
            ({b"grpc-timeout": b"123456789S"}, Status.INVALID_ARGUMENT),
            ({b"grpc-timeout": b"99999999H"}, None),
            ({b":method": b"GET"}, Status.INTERNAL),
            ({b"x-blob-bin": b"?not base64?"}, None),
            ({b"x-latin": b"gr\xfc\xdfe"}, None),
        ],
    )
    async def test_odd_requests_are_answered(self, scripted_client, autojump_clock, change, status):
        headers = dict(request_headers(CALL, authority="a")) | change
        sent = [(name, value) for name, value in headers.items() if value is not None]
        async with scripted_client(raw={CALL: echo}) as (server, peer):
            stream = peer.call(CALL, b"hello", headers=sent)
            await peer.until(lambda: stream.closed)
            assert get(stream.headers, b":status") == b"200"
            assert get(stream.trailers, b"grpc-status") == str((status or Status.OK).value).encode()
            assert stream.take() == ([b"hello"] if status is None else [])
            assert server.calls_in_flight == 0

    async def test_a_client_that_forgets_the_deadline_is_told(self, scripted_client, autojump_clock):
        async def wait(call: ServerCall) -> None:
            assert call.deadline == trio.current_time() + 3
            await trio.sleep_forever()

        async with scripted_client(raw={CALL: wait}) as (server, peer):
            begin = trio.current_time()
            stream = peer.call(CALL, b"", headers=request_headers(CALL, authority="a", timeout=3.0))
            await peer.until(lambda: stream.closed)
            assert trio.current_time() - begin == pytest.approx(3.0)
            assert get(stream.trailers, b"grpc-status") == str(Status.DEADLINE_EXCEEDED.value).encode()
            assert server.calls_in_flight == 0

    async def test_a_deadline_that_has_passed_is_kept_all_the_same(self, open_pair, autojump_clock):
        async def wait(call: ServerCall) -> None:
            await trio.sleep_forever()

        async with open_pair(raw={CALL: wait}) as (channel, server):
            for timeout in (0.0, -1.0, 1e-12):
                assert (await failure(channel, timeout=timeout)).status is Status.DEADLINE_EXCEEDED
            await trio.testing.wait_all_tasks_blocked()
            assert server.calls_in_flight == 0

    @pytest.mark.parametrize(
        "when", ["with the request", "before the handler runs", "while it waits", "while it sends"]
    )
    async def test_a_reset_ends_the_handler_whenever_it_comes(self, scripted_client, autojump_clock, when):
        async def handler(call: ServerCall) -> None:
            started.append(1)
            if when == "while it sends":
                while True:
                    await call.send(bytes(1000))
            await trio.sleep_forever()

        started: list[int] = []
        async with scripted_client(raw={CALL: handler, OTHER: echo}) as (server, peer):
            if when == "with the request":
                stream = peer.connection.open_stream(request_headers(CALL, authority="a"))
                peer.connection.send_messages(stream, [b""])
            else:
                stream = peer.call(CALL, b"")
            if when.startswith("while"):
                await trio.testing.wait_all_tasks_blocked()
                assert server.calls_in_flight == 1
            peer.reset(stream, ErrorCode.CANCEL)
            await trio.testing.wait_all_tasks_blocked()
            assert server.calls_in_flight == 0
            assert len(started) == (when != "with the request" and when != "before the handler runs")
            other = peer.call(OTHER, b"fine")
            await peer.until(lambda: other.closed)
            assert other.take() == [b"fine"]

    async def test_a_broken_stream_ends_its_handler(self, scripted_client, autojump_clock):
        async def wait(call: ServerCall) -> None:
            await trio.sleep_forever()

        async with scripted_client(raw={CALL: wait, OTHER: echo}) as (server, peer):
            stream = peer.call(CALL, b"", end=False)
            await trio.testing.wait_all_tasks_blocked()
            peer.write(frames.window_update(stream.id, 0))
            await peer.until(lambda: stream.closed)
            await trio.testing.wait_all_tasks_blocked()
            assert server.calls_in_flight == 0
            assert stream.reset_code == ErrorCode.PROTOCOL_ERROR
            other = peer.call(OTHER, b"fine")
            await peer.until(lambda: other.closed)
            assert other.take() == [b"fine"]

    @pytest.mark.parametrize("when", ["at once", "later", "after a reply"])
    @pytest.mark.parametrize(
        ("sent", "encoding", "status", "words"),
        [
            (b"\x00\x00\x00\x03\xe9" + bytes(1001), None, Status.RESOURCE_EXHAUSTED, b"1001 bytes is over"),
            (b"\x00\xff\xff\xff\xff", None, Status.RESOURCE_EXHAUSTED, b"max_message_bytes (1000)"),
            (b"\x01\x00\x00\x00\x00", None, Status.INTERNAL, b"identity"),
            (b"\x01\x00\x00\x00\x00", b"gzip", Status.UNIMPLEMENTED, b"gzip"),
            (b"\x02\x00\x00\x00\x00", None, Status.INTERNAL, b"not defined"),
            (b"\x00\x00\x00\x00", None, Status.INTERNAL, b"inside a message"),
        ],
    )
    async def test_a_message_that_cannot_be_read_is_answered_in_words(
        self, scripted_client, autojump_clock, sent, encoding, status, words, when
    ):
        async def read_all(call: ServerCall) -> None:
            if when == "after a reply":
                await call.send(b"reply")
            while await call.receive() is not None:
                pass

        http2 = Http2Settings(max_message_bytes=1000)
        async with scripted_client(raw={CALL: read_all, OTHER: echo}, http2=http2) as (server, peer):
            headers = request_headers(CALL, authority="a")
            stream = peer.connection.open_stream(headers + ([(b"grpc-encoding", encoding)] if encoding else []))
            if when != "at once":
                peer.flush()
                await trio.testing.wait_all_tasks_blocked()
            peer.write(peer.connection.take_output() + frames.data_header(stream.id, len(sent), end_stream=True) + sent)
            await peer.until(lambda: stream.closed)
            assert get(stream.trailers, b"grpc-status") == str(status.value).encode()
            assert words in get(stream.trailers, b"grpc-message")
            assert stream.take() == ([b"reply"] if when == "after a reply" and not encoding else [])
            await trio.testing.wait_all_tasks_blocked()
            assert server.calls_in_flight == 0
            other = peer.call(OTHER, b"fine")
            await peer.until(lambda: other.closed)
            assert other.take() == [b"fine"]

    async def test_connections_beyond_the_limit_are_closed_at_once(self, autojump_clock):
        network = MemoryNetwork()
        listener = network.listen()
        async with trio.open_nursery() as nursery:
            server = Server(raw={CALL: echo}, settings=ServerSettings(max_connections=2))
            await nursery.start(server.serve, listener)
            transports = [await network.dial(listener.address) for _ in range(4)]
            await trio.testing.wait_all_tasks_blocked()
            ends = [transport.recv_nowait(1 << 20) for transport in transports]
            assert [end == b"" for end in ends] == [False, False, True, True]
            transports[0].close()
            await trio.testing.wait_all_tasks_blocked()
            again = await network.dial(listener.address)
            await trio.testing.wait_all_tasks_blocked()
            assert again.recv_nowait(1 << 20)
            nursery.cancel_scope.cancel()


class TestStopping:
    async def test_it_closes_its_listener_and_a_successor_may_have_the_address(self, autojump_clock):
        network = MemoryNetwork()
        listener = network.listen()
        async with trio.open_nursery() as nursery:
            await nursery.start(Server().serve, listener)
            nursery.cancel_scope.cancel()
        with pytest.raises(LinkError, match="nobody listens there"):
            await network.dial(listener.address)
        with pytest.raises(LinkError, match="closed"):
            await listener.accept()
        network.listen(listener.address)
        listener.close()
        await network.dial(listener.address)

    async def test_every_call_of_a_server_that_is_cancelled_ends_alike(self, autojump_clock):
        """Whichever of its tasks is cancelled first: the client is told that the server has gone, and not that somebody
        cancelled the call.
        """

        async def wait(call: ServerCall) -> None:
            await trio.sleep_forever()

        network = MemoryNetwork()
        listener = network.listen()
        server = Server(raw={CALL: wait})
        async with open_channel(listener.address, dialer=network.dial) as channel:
            async with trio.open_nursery() as nursery:
                await nursery.start(server.serve, listener)
                calls = [await channel.call(CALL, b"") for _ in range(50)]
                while server.calls_in_flight < 50:
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            for call in calls:
                with pytest.raises(RpcError) as caught:
                    await call.receive()
                assert (caught.value.status, caught.value.origin) == (Status.UNAVAILABLE, Origin.TRANSPORT)


class TestDraining:
    async def test_a_connection_accepted_at_that_moment_is_told_too(self, autojump_clock):
        network = MemoryNetwork()
        inner = network.listen()

        class DrainsOnAccept:
            address = inner.address
            close = staticmethod(inner.close)

            async def accept(self):
                transport = await inner.accept()
                server.drain()
                return transport

        server = Server(raw={CALL: echo})
        with trio.fail_after(100):
            async with trio.open_nursery() as nursery:
                await nursery.start(server.serve, DrainsOnAccept())
                async with open_channel(inner.address, dialer=network.dial) as channel:
                    with pytest.raises(LinkError):
                        await channel.call(CALL, b"")

    async def test_who_connected_but_was_not_accepted_is_hung_up_on(self, autojump_clock):
        network = MemoryNetwork()
        listener = network.listen()
        waiting = await network.dial(listener.address)
        listener.close()
        assert waiting.recv_nowait(1) == b""

    async def test_it_ends_when_a_slow_client_has_taken_the_last_answer(self, scripted_client, autojump_clock):
        async def answer(call: ServerCall) -> None:
            call.send_nowait([bytes(1000)] * 200)

        ended = []
        async with scripted_client(raw={CALL: answer}) as (server, peer):
            stream = peer.call(CALL)
            await peer.until(lambda: sum(map(len, stream.messages)) >= 64_000)
            assert server.calls_in_flight == 0
            server.drain()
            received = 0
            with trio.fail_after(100):
                while not stream.closed:
                    received += len(stream.take())
                    stream.credit()
                    peer.flush()
                    await peer.read()
                received += len(stream.take())
                await peer.until_closed()
            ended.append(received)
        assert ended == [200]

    async def test_it_ends_when_the_last_client_gives_up(self, scripted_client, autojump_clock):
        async def wait(call: ServerCall) -> None:
            await trio.sleep_forever()

        async with scripted_client(raw={CALL: wait}) as (server, peer):
            stream = peer.call(CALL)
            await trio.testing.wait_all_tasks_blocked()
            server.drain()
            await peer.until(lambda: peer.connection.goaway_received is not None)
            peer.reset(stream, ErrorCode.CANCEL)
            await peer.until_closed()

    async def test_a_request_that_was_on_its_way_is_served(self, scripted_client, autojump_clock):
        async with scripted_client(raw={CALL: echo}) as (server, peer):
            server.drain()
            stream = peer.call(CALL, b"sent before I knew")
            assert peer.connection.goaway_received is None
            await peer.until_closed()
            assert (stream.take(), stream.trailers) == ([b"sent before I knew"], [(b"grpc-status", b"0")])
            assert peer.connection.goaway_received.last_stream_id == stream.id

    async def test_a_request_that_comes_later_may_be_repeated(self, scripted_client, autojump_clock):
        """From a client that goes on all the same; one call is left, so that the connection stays."""

        async def wait(call: ServerCall) -> None:
            await trio.sleep_forever()

        async with scripted_client(raw={CALL: wait, OTHER: echo}) as (server, peer):
            peer.call(CALL)
            server.drain()
            while peer.connection.goaway_received is None or peer.connection.goaway_received.last_stream_id > 1:
                await peer.read()
            headers = hpack.Encoder().encode(request_headers(OTHER, authority="test"))
            peer.write(frames.header_frames(3, headers, end_stream=True))
            await peer.transport.wait_readable()
            assert peer.transport.recv_nowait(1 << 20) == frames.rst_stream(3, ErrorCode.REFUSED_STREAM)
            assert server.calls_in_flight == 1

    async def test_an_idle_server_ends_at_once(self, scripted_client, autojump_clock):
        async with scripted_client(raw={CALL: echo}) as (server, peer):
            server.drain()
            await peer.until_closed()
            await trio.testing.wait_all_tasks_blocked()
            assert not server._links
