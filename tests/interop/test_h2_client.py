"""Clients that h2 plays against our server: every request that no well-meant client makes. On virtual time."""

from __future__ import annotations

import math

import h2.errors
import h2.events
import pytest
import trio
import trio.testing
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from hyperframe.frame import Frame, PingFrame

from trio_router.http2 import Http2Settings
from trio_router.rpc.memory import MemoryNetwork
from trio_router.rpc.server import Server, ServerSettings
from trio_router.rpc.servercall import ServerCall

CALL = "/test.Service/Call"
OTHER = "/test.Service/Other"
REQUEST = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", CALL.encode()),
    (b":authority", b"test"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
]
HELLO = b"\x00\x00\x00\x00\x05hello"
EVERY_CODE = [*map(int, h2.errors.ErrorCodes), 14, 0xFFFF_FFFF]


async def echo(call: ServerCall) -> None:
    while (message := await call.receive()) is not None:
        await call.send(message)


async def wait(call: ServerCall) -> None:
    await call.send(b"here")
    await trio.sleep_forever()


async def serves(peer) -> bool:
    """Whether another call on the same connection is answered."""
    stream_id = peer.h2.get_next_available_stream_id()
    headers = dict(REQUEST) | {b":path": OTHER.encode()}
    peer.h2.send_headers(stream_id, list(headers.items()))
    peer.h2.send_data(stream_id, HELLO, end_stream=True)
    peer.flush()
    while (data := await peer.next(h2.events.DataReceived)).stream_id != stream_id:
        pass
    return data.data == HELLO


async def raw_frames(peer, *, count: int) -> list[Frame]:
    """Whole frames that come next, past h2."""
    data = b""
    found = []
    while len(found) < count:
        await peer.transport.wait_readable()
        data += peer.transport.recv_nowait(1 << 20)
        while len(data) >= 9:
            frame, length = Frame.parse_frame_header(memoryview(data[:9]))
            if len(data) < 9 + length:
                break
            frame.parse_body(memoryview(data[9 : 9 + length]))
            found.append(frame)
            data = data[9 + length :]
    return found


async def trailers(peer, stream_id: int) -> dict[bytes, bytes]:
    """How a call ended, trailers-only or not."""
    while True:
        event = await peer.next(h2.events.TrailersReceived, h2.events.ResponseReceived)
        if event.stream_id == stream_id and event.stream_ended:
            return dict(event.headers)


class TestTimeouts:
    @pytest.mark.parametrize(
        ("wire", "seconds"),
        [
            (b"2H", 7200.0),
            (b"3M", 180.0),
            (b"4S", 4.0),
            (b"5m", 0.005),
            (b"6u", 6e-6),
            (b"7n", 7e-9),
            (b"0S", 0.0),
            (b"00000001S", 1.0),
            (b"99999999H", 99_999_999 * 3600.0),
        ],
    )
    async def test_the_server_keeps_a_timeout_in_any_unit(self, open_server_for_h2, autojump_clock, wire, seconds):
        deadlines = []

        async def note(call: ServerCall) -> None:
            deadlines.append(call.deadline - trio.current_time())
            await trio.sleep(math.inf if seconds < 1e6 else 0)

        async with open_server_for_h2(raw={CALL: note}) as (peer, server):
            begin = trio.current_time()
            peer.h2.send_headers(1, [*REQUEST, (b"grpc-timeout", wire)], end_stream=True)
            peer.flush()
            ended = await trailers(peer, 1)
            if seconds < 1e6:
                assert ended[b"grpc-status"] == b"4"
                assert trio.current_time() - begin == pytest.approx(seconds, abs=1e-9)
            assert deadlines == [pytest.approx(seconds, abs=1e-9)]
            assert server.calls_in_flight == 0

    @pytest.mark.parametrize("wire", [b"", b"S", b"5", b"5s", b"-5S", b"1.5S", b"123456789S", b"5 S", b"S5", b"\xb2S"])
    async def test_anything_else_is_refused_in_words(self, open_server_for_h2, autojump_clock, wire):
        async with open_server_for_h2(raw={CALL: echo, OTHER: echo}) as (peer, _):
            peer.h2.send_headers(1, [*REQUEST, (b"grpc-timeout", wire)], end_stream=True)
            peer.flush()
            ended = await trailers(peer, 1)
            assert ended[b"grpc-status"] == str(Status.INVALID_ARGUMENT.value).encode()
            assert b"grpc-timeout" in ended[b"grpc-message"]
            assert await serves(peer)


class TestAnswersOnTheWire:
    async def test_a_failure_without_replies_is_trailers_only(self, open_server_for_h2, autojump_clock):
        async def fail(call: ServerCall) -> None:
            raise GRPCError(Status.ABORTED, "größer % als\n10", b"\x00\xff")

        async with open_server_for_h2(raw={CALL: fail}) as (peer, _):
            peer.h2.send_headers(1, REQUEST, end_stream=True)
            peer.flush()
            response = await peer.next(h2.events.ResponseReceived)
            assert response.stream_ended is not None
            headers = dict(response.headers)
            assert headers[b":status"] == b"200"
            assert headers[b"content-type"] == b"application/grpc"
            assert headers[b"grpc-status"] == b"10"
            assert headers[b"grpc-message"] == b"gr%C3%B6%C3%9Fer %25 als%0A10"
            assert headers[b"grpc-status-details-bin"] == b"AP8"

    async def test_a_success_without_replies_is_trailers_only_too(self, open_server_for_h2, autojump_clock):
        async with open_server_for_h2(raw={CALL: echo}) as (peer, _):
            peer.h2.send_headers(1, REQUEST, end_stream=True)
            peer.flush()
            response = await peer.next(h2.events.ResponseReceived)
            assert response.stream_ended is not None
            assert dict(response.headers)[b"grpc-status"] == b"0"

    async def test_replies_come_between_headers_and_trailers(self, open_server_for_h2, autojump_clock):
        async with open_server_for_h2(raw={CALL: echo}) as (peer, _):
            peer.h2.send_headers(1, REQUEST)
            peer.h2.send_data(1, HELLO, end_stream=True)
            peer.flush()
            response = await peer.next(h2.events.ResponseReceived)
            assert response.stream_ended is None
            assert b"grpc-status" not in dict(response.headers)
            assert (await peer.next(h2.events.DataReceived)).data == HELLO
            assert dict((await peer.next(h2.events.TrailersReceived)).headers) == {b"grpc-status": b"0"}


class TestRequests:
    async def test_messages_may_come_in_any_pieces_with_padding_between(self, open_server_for_h2, autojump_clock):
        async def count(call: ServerCall) -> None:
            received = []
            while (message := await call.receive()) is not None:
                received.append(message)
            assert received == [b"hello"] * 4
            await call.send(b"hello")

        async with open_server_for_h2(raw={CALL: count}) as (peer, _):
            peer.h2.send_headers(1, REQUEST)
            for at in range(len(HELLO)):
                peer.h2.send_data(1, HELLO[at : at + 1], pad_length=at)
                peer.h2.send_data(1, b"")
            peer.h2.send_data(1, HELLO + HELLO + HELLO[:3])
            peer.h2.send_data(1, HELLO[3:], pad_length=255, end_stream=True)
            peer.flush()
            assert (await peer.next(h2.events.DataReceived)).data == HELLO

    async def test_a_request_may_end_with_trailers_of_its_own(self, open_server_for_h2, autojump_clock):
        async with open_server_for_h2(raw={CALL: echo}) as (peer, _):
            peer.h2.send_headers(1, REQUEST)
            peer.h2.send_data(1, HELLO)
            peer.h2.send_headers(1, [(b"x-checksum", b"7")], end_stream=True)
            peer.flush()
            assert (await peer.next(h2.events.DataReceived)).data == HELLO
            assert (await trailers(peer, 1))[b"grpc-status"] == b"0"

    @pytest.mark.parametrize(
        "change",
        [
            {b":path": None},
            {b":path": b""},
            {b":method": None},
            {b":scheme": None},
            {b":status": b"200"},
            {b"Te": b"trailers"},
            {b"connection": b"keep-alive"},
            {b"x": b"two\nlines"},
        ],
        ids=repr,
    )
    async def test_a_malformed_request_is_reset_and_harms_no_other(self, open_server_for_h2, autojump_clock, change):
        headers = dict(REQUEST) | change
        pseudo_first = sorted(headers.items(), key=lambda pair: not pair[0].startswith(b":"))
        async with open_server_for_h2(raw={CALL: echo, OTHER: echo}) as (peer, server):
            peer.h2.send_headers(1, [pair for pair in pseudo_first if pair[1] is not None], end_stream=True)
            peer.flush()
            reset = await peer.next(h2.events.StreamReset)
            assert (reset.stream_id, reset.error_code) == (1, h2.errors.ErrorCodes.PROTOCOL_ERROR)
            assert await serves(peer)
            assert server.calls_in_flight == 0

    async def test_a_compressed_message_is_refused_clearly(self, open_server_for_h2, autojump_clock):
        async with open_server_for_h2(raw={CALL: echo, OTHER: echo}) as (peer, _):
            peer.h2.send_headers(1, REQUEST)
            peer.h2.send_data(1, b"\x01\x00\x00\x00\x05crush", end_stream=True)
            peer.flush()
            ended = await trailers(peer, 1)
            assert ended[b"grpc-status"] == str(Status.INTERNAL.value).encode()
            assert b"compressed" in ended[b"grpc-message"]
            assert await serves(peer)


class TestLeaving:
    @pytest.mark.parametrize("code", EVERY_CODE)
    async def test_a_reset_with_any_code_ends_the_handler(self, open_server_for_h2, autojump_clock, code):
        async with open_server_for_h2(raw={CALL: wait, OTHER: echo}) as (peer, server):
            peer.h2.send_headers(1, REQUEST)
            peer.flush()
            await peer.next(h2.events.DataReceived)
            assert server.calls_in_flight == 1
            peer.h2.reset_stream(1, error_code=code)
            peer.flush()
            await trio.testing.wait_all_tasks_blocked()
            assert server.calls_in_flight == 0
            assert await serves(peer)

    async def test_a_client_that_goes_away_is_served_to_the_end(self, open_server_for_h2, autojump_clock):
        """Its GOAWAY is about streams that the server would open, which gRPC has none of."""
        async with open_server_for_h2(raw={CALL: echo, OTHER: echo}) as (peer, _):
            peer.h2.send_headers(1, REQUEST)
            peer.flush()
            peer.go_away(0)
            peer.h2.send_data(1, HELLO, end_stream=True)
            peer.flush()
            assert (await peer.next(h2.events.DataReceived)).data == HELLO
            assert (await trailers(peer, 1))[b"grpc-status"] == b"0"


class TestLimits:
    async def test_a_stream_too_many_is_refused_so_that_it_may_be_repeated(self, open_server_for_h2, autojump_clock):
        few = ServerSettings(http2=Http2Settings(max_concurrent_streams=2))
        async with open_server_for_h2(raw={CALL: wait, OTHER: echo}, settings=few) as (peer, server):
            for stream_id in (1, 3, 5):  # before the server's limit is known
                peer.h2.send_headers(stream_id, REQUEST)
            peer.flush()
            reset = await peer.next(h2.events.StreamReset)
            assert (reset.stream_id, reset.error_code) == (5, h2.errors.ErrorCodes.REFUSED_STREAM)
            await trio.testing.wait_all_tasks_blocked()
            assert server.calls_in_flight == 2
            peer.h2.reset_stream(1)
            peer.flush()
            assert await serves(peer)


class TestStopping:
    async def test_a_drain_names_the_last_call_it_serves(self, open_server_for_h2, autojump_clock):
        async with open_server_for_h2(raw={CALL: wait}) as (peer, server):
            for stream_id in (1, 3):
                peer.h2.send_headers(stream_id, REQUEST)
            peer.flush()
            for _ in range(2):
                await peer.next(h2.events.DataReceived)
            server.drain()
            # h2 takes no frame behind a GOAWAY, so from here on they are read and written by hand.
            first, ping = await raw_frames(peer, count=2)
            assert (first.last_stream_id, first.error_code) == (2**31 - 1, h2.errors.ErrorCodes.NO_ERROR)
            peer.write(PingFrame(0, ping.opaque_data, flags=["ACK"]))
            (second,) = await raw_frames(peer, count=1)
            assert (second.last_stream_id, second.error_code) == (3, h2.errors.ErrorCodes.NO_ERROR)
            assert server.calls_in_flight == 2

    async def test_a_server_that_stops_at_once_says_goaway_and_hangs_up(self, h2_peer, autojump_clock):
        network = MemoryNetwork()
        listener = network.listen()
        server = Server(raw={CALL: wait})
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, listener)
            peer = h2_peer(await network.dial(listener.address), client=True)
            for stream_id in (1, 3):
                peer.h2.send_headers(stream_id, REQUEST)
            peer.flush()
            for _ in range(2):
                await peer.next(h2.events.DataReceived)
            nursery.cancel_scope.cancel()
        goaway = await peer.next(h2.events.ConnectionTerminated)
        assert (goaway.last_stream_id, goaway.error_code) == (3, h2.errors.ErrorCodes.NO_ERROR)
        assert await peer.ended()
