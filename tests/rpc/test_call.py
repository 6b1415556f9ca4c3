"""A call against servers that end it well, badly, oddly or never. Whatever is not a clean OK is an error."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from grpclib.const import Status

from trio_router.http2 import frames
from trio_router.http2.frames import ErrorCode
from trio_router.http2.settings import Http2Settings
from trio_router.http2.streams import Stream
from trio_router.rpc.call import ClientCall
from trio_router.rpc.metadata import Origin, RpcError, response_headers, status_trailers
from trio_router.rpc.servercall import ServerCall

CALL = "/test.Service/Call"
OK = status_trailers(Status.OK, None)


async def by_receive(call: ClientCall) -> tuple[list[bytes], RpcError | None]:
    messages = []
    try:
        while (message := await call.receive()) is not None:
            messages.append(message)
    except RpcError as exc:
        return messages, exc
    return messages, None


async def by_pump(call: ClientCall) -> tuple[list[bytes], RpcError | None]:
    messages: list[bytes] = []
    try:
        await call.pump(lambda batch: bool(messages.extend(batch)) or True)
    except RpcError as exc:
        return messages, exc
    return messages, None


READERS = pytest.mark.parametrize("read", [by_receive, by_pump])
# Each ending after no message, one, and several.
COUNTS = pytest.mark.parametrize("count", [0, 1, 3])


def data(stream, payload: bytes, *, end: bool = False) -> bytes:
    return frames.data_header(stream.id, len(payload), end_stream=end) + payload


class TestEndings:
    async def outcome(self, scripted_server, read, count: int, end) -> RpcError | None:
        """Answer with `count` messages and what `end` does then; the call's outcome, after all the messages."""
        async with scripted_server() as (channel, peer):
            call = await channel.call(CALL, b"")
            stream = await peer.request()
            if count:
                peer.respond(stream, *[b"%d" % number for number in range(count)])
            end(peer, stream)
            messages, error = await read(call)
            assert messages == [b"%d" % number for number in range(count)]
            assert call.ended
            assert call.error is error
            assert channel.links[0].connection.open_streams == 0
            return error

    @READERS
    @COUNTS
    async def test_ok(self, scripted_server, autojump_clock, read, count):
        assert (
            await self.outcome(scripted_server, read, count, lambda peer, stream: finish(peer, stream, count, OK))
            is None
        )

    @READERS
    @COUNTS
    async def test_ok_followed_by_a_reset(self, scripted_server, autojump_clock, read, count):
        """A server that answers before it has read the whole request asks for silence that way (RFC 9113 8.1)."""

        def end(peer, stream) -> None:
            finish(peer, stream, count, OK)
            peer.write(frames.rst_stream(stream.id, ErrorCode.NO_ERROR))

        assert await self.outcome(scripted_server, read, count, end) is None

    @READERS
    @COUNTS
    async def test_case_g3_a_status(self, scripted_server, autojump_clock, read, count):
        trailers = status_trailers(Status.DATA_LOSS, "gone", details=b"\x01")
        error = await self.outcome(
            scripted_server, read, count, lambda peer, stream: finish(peer, stream, count, trailers)
        )
        assert (error.status, error.message, error.details) == (Status.DATA_LOSS, "gone", b"\x01")
        assert error.origin is Origin.PEER

    @READERS
    @COUNTS
    async def test_case_g3_trailers_without_a_status(self, scripted_server, autojump_clock, read, count):
        error = await self.outcome(
            scripted_server, read, count, lambda peer, stream: finish(peer, stream, count, [(b"x-cost", b"7")])
        )
        assert (error.status, error.origin) == (Status.UNKNOWN, Origin.TRANSPORT)

    @READERS
    @COUNTS
    async def test_case_g3_no_trailers(self, scripted_server, autojump_clock, read, count):
        def end(peer, stream) -> None:
            if not count:
                peer.respond(stream)
            peer.write(data(stream, b"", end=True))

        error = await self.outcome(scripted_server, read, count, end)
        assert (error.status, error.origin) == (Status.INTERNAL, Origin.TRANSPORT)
        assert "without trailers" in error.message

    @READERS
    @COUNTS
    @pytest.mark.parametrize("code", [0, 1, 2, 5, 8, 11, 99])
    async def test_a_reset(self, scripted_server, autojump_clock, read, count, code):
        error = await self.outcome(scripted_server, read, count, lambda peer, stream: peer.reset(stream, code))
        expected = {8: Status.CANCELLED, 11: Status.RESOURCE_EXHAUSTED}
        assert (error.status, error.origin) == (expected.get(code, Status.INTERNAL), Origin.TRANSPORT)

    @READERS
    @COUNTS
    async def test_a_refusal_is_believed_only_before_the_answer(self, scripted_server, autojump_clock, read, count):
        error = await self.outcome(
            scripted_server, read, count, lambda peer, stream: peer.reset(stream, ErrorCode.REFUSED_STREAM)
        )
        assert error.status is Status.UNAVAILABLE
        assert error.origin is (Origin.TRANSPORT if count else Origin.REFUSED)

    @READERS
    @COUNTS
    async def test_the_end_of_the_connection(self, scripted_server, autojump_clock, read, count):
        error = await self.outcome(scripted_server, read, count, lambda peer, _stream: peer.close())
        assert (error.status, error.origin) == (Status.UNAVAILABLE, Origin.TRANSPORT)

    @READERS
    @COUNTS
    async def test_the_end_inside_a_message(self, scripted_server, autojump_clock, read, count):
        def end(peer, stream) -> None:
            if not count:
                peer.respond(stream)
            peer.write(data(stream, b"\x00\x00\x00\x00\x09cut"))
            peer.end(stream, OK)

        error = await self.outcome(scripted_server, read, count, end)
        assert error.status is Status.INTERNAL
        assert "inside a message" in error.message

    @READERS
    async def test_a_status_that_comes_inside_a_message_is_the_better_explanation(
        self, scripted_server, autojump_clock, read
    ):
        def end(peer, stream) -> None:
            peer.respond(stream)
            peer.write(data(stream, b"\x00\x00\x00\x00\x09cut"))
            peer.end(stream, status_trailers(Status.ABORTED, "out of paper"))

        error = await self.outcome(scripted_server, read, 0, end)
        assert (error.status, error.message, error.origin) == (Status.ABORTED, "out of paper", Origin.PEER)

    @READERS
    @COUNTS
    @pytest.mark.parametrize("mark", [1, 2, 255])
    async def test_a_message_that_cannot_be_read(self, scripted_server, autojump_clock, read, count, mark):
        def end(peer, stream) -> None:
            if not count:
                peer.respond(stream)
            peer.write(data(stream, bytes([mark, 0, 0, 0, 1, 0])))

        error = await self.outcome(scripted_server, read, count, end)
        assert (error.status, error.origin) == (Status.INTERNAL, Origin.LOCAL)

    @READERS
    async def test_messages_before_the_headers(self, scripted_server, autojump_clock, read):
        error = await self.outcome(
            scripted_server, read, 0, lambda peer, stream: peer.write(data(stream, b"\x00\x00\x00\x00\x00"))
        )
        assert error.status is Status.INTERNAL

    @READERS
    @pytest.mark.parametrize("body", [b"", b"<html>so sorry</html>", b"\x00\x00\x00\x00\x00"])
    async def test_a_proxys_error_page(self, scripted_server, autojump_clock, read, body):
        def end(peer, stream) -> None:
            peer.connection.send_headers(stream, [(b":status", b"503"), (b"content-type", b"text/html")])
            peer.flush()
            peer.write(data(stream, body, end=True))

        async with scripted_server() as (channel, peer):
            call = await channel.call(CALL, b"")
            end(peer, await peer.request())
            _, error = await read(call)
        assert error.status is Status.UNAVAILABLE
        assert "HTTP 503" in error.message

    @READERS
    async def test_early_hints_are_not_an_answer(self, scripted_server, autojump_clock, read):
        async with scripted_server() as (channel, peer):
            call = await channel.call(CALL, b"")
            stream = await peer.request()
            hint = peer.connection._core.encoder.encode([(b":status", b"103"), (b"link", b"</x>")])
            peer.write(frames.header_frames(stream.id, hint, end_stream=False))
            peer.respond(stream, b"reply")
            peer.end(stream, OK)
            assert await read(call) == ([b"reply"], None)


async def requests(peer, count: int) -> list[Stream]:
    found: list[Stream] = []
    while len(found) < count:
        found += [stream for stream in await peer.read() if stream not in found]
    return found


def finish(peer, stream, count: int, trailers) -> None:
    if not count:  # trailers-only
        trailers = [(b":status", b"200"), (b"content-type", b"application/grpc"), *trailers]
    peer.end(stream, trailers)


class TestLeaving:
    async def test_a_pump_that_is_cancelled_gets_nothing_more_of_the_same_batch(self, scripted_server, autojump_clock):
        """Invariant I2: from the cancel on, what comes stays in the record, where whoever leaves can look for it."""
        async with scripted_server() as (channel, peer):
            calls = [await channel.call(CALL, b"") for _ in range(2)]
            streams = await requests(peer, 2)
            got: list[bytes] = []
            scope = trio.CancelScope()

            async def pump_cancelled() -> None:
                with scope:
                    await calls[1].pump(lambda batch: bool(got.extend(batch)) or True)

            def cancel_the_other(batch: list[bytes]) -> bool:
                scope.cancel()
                return True

            async with trio.open_nursery() as nursery:
                nursery.start_soon(pump_cancelled)
                nursery.start_soon(calls[0].pump, cancel_the_other)
                await trio.testing.wait_all_tasks_blocked()
                for stream in streams:
                    peer.connection.send_headers(stream, response_headers())
                    peer.connection.send_messages(stream, [b"frame"])
                peer.flush()
                await trio.testing.wait_all_tasks_blocked()
                assert scope.cancelled_caught
                assert got == []
                assert calls[1].take_nowait() == [b"frame"]
                peer.end(streams[0], OK)

    async def test_a_server_that_goes_on_after_a_cancel_harms_nobody(self, scripted_server, autojump_clock):
        async with scripted_server() as (channel, peer):
            call = await channel.call(CALL, b"")
            stream = await peer.request()
            peer.respond(stream, b"1")
            assert await call.receive() == b"1"
            call.cancel()
            # All of it was on its way before the reset came.
            peer.connection.send_messages(stream, [b"2", bytes(20_000)])
            peer.end(stream, OK)
            with pytest.raises(RpcError) as caught:
                await call.receive()
            assert (caught.value.status, caught.value.origin) == (Status.CANCELLED, Origin.LOCAL)
            await peer.read()
            again = await channel.call(CALL, b"")
            stream = await peer.request()
            peer.respond(stream, b"fine")
            peer.end(stream, OK)
            assert await by_receive(again) == ([b"fine"], None)
            assert len(channel.links) == 1

    async def test_case_g6_what_a_cancelled_call_had_not_read_is_given_back_to_the_connection(
        self, open_pair, autojump_clock
    ):
        """Windows that leak stall everybody on the connection, after enough cancels."""

        async def offer(call: ServerCall) -> None:
            while True:
                await call.send(bytes(10_000))

        small = Http2Settings(connection_window_bytes=65_535)
        async with open_pair(raw={CALL: offer}, client_http2=small) as (channel, server):
            for number in range(300):
                call = await channel.call(CALL, b"")
                if number % 2:
                    await call.peek()
                await trio.testing.wait_all_tasks_blocked()
                call.cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert server.calls_in_flight == 0
            last = await channel.call(CALL, b"")
            for _ in range(20):
                assert len(await last.receive()) == 10_000
            assert len(channel.links) == 1

    async def test_an_ended_call_takes_no_more_and_says_so_kindly(self, scripted_server, autojump_clock):
        async with scripted_server() as (channel, peer):
            call = await channel.start(CALL)
            stream = await peer.request()
            finish(peer, stream, 0, status_trailers(Status.ABORTED, "full"))
            await trio.testing.wait_all_tasks_blocked()
            assert call.send_nowait([b"late"])
            await call.send(b"late")
            call.end_sending()
            call.cancel()
            call.resume()
            assert call.take_nowait() == []
            assert call.error.message == "full"
            assert "full" in repr(call)

    async def test_a_call_tells_its_state(self, scripted_server, autojump_clock):
        async with scripted_server() as (channel, peer):
            call = await channel.start(CALL)
            stream = await peer.request()
            assert repr(call) == f"<ClientCall {CALL} on {channel.address}: open>"
            finish(peer, stream, 0, OK)
            await trio.testing.wait_all_tasks_blocked()
            assert repr(call) == f"<ClientCall {CALL} on {channel.address}: OK>"
            assert "0 streams" in repr(channel)
