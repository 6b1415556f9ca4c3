"""Our channel against servers that h2 plays: every answer that no well-meant server gives. On virtual time."""

from __future__ import annotations

import h2.errors
import h2.events
import pytest
import trio
import trio.testing
from grpclib.const import Status

from trio_router.http2 import Http2Settings
from trio_router.rpc.call import ClientCall
from trio_router.rpc.channel import ChannelSettings
from trio_router.rpc.metadata import Origin, RpcError

CALL = "/test.Service/Call"
OK = [(b":status", b"200"), (b"content-type", b"application/grpc")]
DONE = [(b"grpc-status", b"0")]
HELLO = b"\x00\x00\x00\x00\x05hello"
EVERY_CODE = [*map(int, h2.errors.ErrorCodes), 14, 0xFFFF_FFFF]
RESET_STATUS = {7: Status.UNAVAILABLE, 8: Status.CANCELLED, 11: Status.RESOURCE_EXHAUSTED, 12: Status.PERMISSION_DENIED}


async def read(call: ClientCall) -> tuple[list[bytes], RpcError | None]:
    messages = []
    try:
        while (message := await call.receive()) is not None:
            messages.append(message)
    except RpcError as exc:
        return messages, exc
    return messages, None


@pytest.fixture
def answer(open_h2_server):
    """The outcome of a call to a server that answers by a script: what was received, and the error."""

    async def outcome(script, **settings) -> tuple[list[bytes], RpcError | None]:
        async with open_h2_server(**settings) as (channel, peer, _):
            call = await channel.call(CALL, b"request")
            stream_id = (await peer.next(h2.events.RequestReceived)).stream_id
            script(peer, stream_id)
            result = await read(call)
            assert call.ended
            # Whatever it was, it has harmed neither the connection nor the next call.
            again = await channel.call(CALL, b"again")
            next_id = (await peer.next(h2.events.RequestReceived)).stream_id
            peer.headers(next_id, OK + DONE, end=True)
            assert await read(again) == ([], None)
            assert len(channel.links) == 1
            return result

    return outcome


class TestInformationalHeaders:
    @pytest.mark.parametrize("codes", [[b"100"], [b"103"], [b"100", b"103", b"103", b"199"]])
    async def test_they_are_no_answer(self, answer, autojump_clock, codes):
        def script(peer, stream_id) -> None:
            for code in codes:
                peer.h2.send_headers(stream_id, [(b":status", code), (b"link", b"</style.css>")])
            peer.h2.send_headers(stream_id, OK)
            peer.h2.send_data(stream_id, HELLO)
            peer.h2.send_headers(stream_id, DONE, end_stream=True)
            peer.flush()

        assert await answer(script) == ([b"hello"], None)

    async def test_their_fields_are_no_metadata(self, open_h2_server, autojump_clock):
        async with open_h2_server() as (channel, peer, _):
            call = await channel.call(CALL, b"")
            stream_id = (await peer.next(h2.events.RequestReceived)).stream_id
            peer.headers(stream_id, [(b":status", b"103"), (b"x-early", b"hint")])
            peer.headers(stream_id, [*OK, (b"x-real", b"1")])
            peer.headers(stream_id, DONE, end=True)
            assert await read(call) == ([], None)
            assert call.initial_metadata == [("x-real", "1")]

    async def test_a_stream_that_ends_with_them_has_failed(self, answer, autojump_clock):
        messages, error = await answer(
            lambda peer, stream_id: peer.headers(stream_id, [(b":status", b"100")], end=True)
        )
        assert (messages, error.status) == ([], Status.INTERNAL)

    async def test_they_may_not_follow_the_answer(self, answer, autojump_clock):
        def script(peer, stream_id) -> None:
            peer.headers(stream_id, OK)
            peer.data(stream_id, HELLO)
            peer.headers(stream_id, [(b":status", b"103")])

        messages, error = await answer(script)
        assert (messages, error.status) == ([b"hello"], Status.INTERNAL)


class TestResets:
    @pytest.mark.parametrize("code", EVERY_CODE)
    async def test_every_code_is_an_error_before_trailers(self, answer, autojump_clock, code):
        """NO_ERROR too: without trailers nobody has said that the call went well."""

        def at_once(peer, stream_id) -> None:
            peer.reset(stream_id, code)

        def after_headers(peer, stream_id) -> None:
            peer.headers(stream_id, OK)
            peer.reset(stream_id, code)

        def after_a_message(peer, stream_id) -> None:
            peer.headers(stream_id, OK)
            peer.data(stream_id, HELLO)
            peer.reset(stream_id, code)

        for script, expected in ((at_once, []), (after_headers, []), (after_a_message, [b"hello"])):
            messages, error = await answer(script)
            assert messages == expected
            assert error.status is RESET_STATUS.get(code, Status.INTERNAL)
            refused = code == h2.errors.ErrorCodes.REFUSED_STREAM and script is at_once
            assert error.origin is (Origin.REFUSED if refused else Origin.TRANSPORT)
            assert str(code) in error.message

    @pytest.mark.parametrize("code", EVERY_CODE)
    @pytest.mark.parametrize("status", [b"0", b"10"])
    async def test_no_code_changes_what_trailers_have_said(self, open_h2_server, autojump_clock, code, status):
        """A server that has answered before it has read everything asks for silence (RFC 9113 8.1)."""
        async with open_h2_server() as (channel, peer, _):
            call = await channel.start(CALL)
            await call.send(b"more to come")
            stream_id = (await peer.next(h2.events.RequestReceived)).stream_id
            peer.headers(stream_id, OK)
            peer.data(stream_id, HELLO)
            peer.headers(stream_id, [(b"grpc-status", status)], end=True)
            peer.reset(stream_id, code)
            messages, error = await read(call)
            assert messages == [b"hello"]
            assert (error and error.status) == (None if status == b"0" else Status.ABORTED)
            assert channel.links[0].connection.open_streams == 0


class TestTrailers:
    async def test_trailers_only_is_an_answer_without_messages(self, answer, autojump_clock):
        assert await answer(lambda peer, stream_id: peer.headers(stream_id, OK + DONE, end=True)) == ([], None)

    async def test_trailers_only_may_fail_with_all_that_goes_with_it(self, answer, autojump_clock):
        trailers = [
            (b"grpc-status", b"9"),
            (b"grpc-message", b"not yet"),
            (b"grpc-status-details-bin", b"AP8"),
            (b"x-cost", b"7"),
        ]
        messages, error = await answer(lambda peer, stream_id: peer.headers(stream_id, OK + trailers, end=True))
        assert (messages, error.status, error.message) == ([], Status.FAILED_PRECONDITION, "not yet")
        assert (error.details, error.origin) == (b"\x00\xff", Origin.PEER)

    @pytest.mark.parametrize("body", [b"", HELLO])
    async def test_an_end_without_trailers_is_an_error(self, answer, autojump_clock, body):
        def script(peer, stream_id) -> None:
            peer.headers(stream_id, OK)
            peer.data(stream_id, body, end=True)

        messages, error = await answer(script)
        assert messages == ([b"hello"] if body else [])
        assert (error.status, error.message) == (Status.INTERNAL, "the stream ended without trailers")

    @pytest.mark.parametrize(
        ("trailers", "status"),
        [
            ([(b"x-cost", b"7")], Status.UNKNOWN),
            ([(b"grpc-message", b"lost its status")], Status.UNKNOWN),
            ([(b"grpc-status", b"")], Status.UNKNOWN),
            ([(b"grpc-status", b"five")], Status.UNKNOWN),
            ([(b"grpc-status", b"17")], Status.UNKNOWN),
            ([(b"grpc-status", b"-1")], Status.UNKNOWN),
            ([(b"grpc-status", b"0"), (b":status", b"200")], Status.INTERNAL),
            ([(b":status", b"200"), (b"grpc-status", b"0")], Status.INTERNAL),
            ([(b"Grpc-Status", b"0")], Status.INTERNAL),
            ([(b"grpc-status", b"0"), (b"connection", b"close")], Status.INTERNAL),
            ([(b"grpc-status", b"0"), (b"x", b"two\nlines")], Status.INTERNAL),
            ([(b"grpc-status", b"0"), (b"", b"nameless")], Status.INTERNAL),
        ],
    )
    async def test_malformed_trailers_are_an_error(self, answer, autojump_clock, trailers, status):
        def script(peer, stream_id) -> None:
            peer.headers(stream_id, OK)
            peer.data(stream_id, HELLO)
            peer.headers(stream_id, trailers, end=True)

        messages, error = await answer(script)
        assert (messages, error.status) == ([b"hello"], status)

    async def test_trailers_that_do_not_end_the_stream_are_an_error(self, answer, autojump_clock):
        def script(peer, stream_id) -> None:
            peer.headers(stream_id, OK)
            peer.headers(stream_id, DONE)
            peer.data(stream_id, HELLO, end=True)

        messages, error = await answer(script)
        assert (messages, error.status) == ([], Status.INTERNAL)

    async def test_trailers_over_the_limit_are_an_error(self, answer, autojump_clock):
        def script(peer, stream_id) -> None:
            peer.headers(stream_id, OK)
            peer.headers(stream_id, [*DONE, (b"x-long", b"." * 3000)], end=True)

        settings = ChannelSettings(http2=Http2Settings(max_header_list_bytes=1024))
        messages, error = await answer(script, settings=settings)
        assert (messages, error.status) == ([], Status.RESOURCE_EXHAUSTED)
        assert "max_header_list_bytes" in error.message

    @pytest.mark.parametrize(
        ("wire", "text"),
        [
            (b"plain words", "plain words"),
            (b"gr%C3%B6%C3%9Fer %25 als%0A10", "größer % als\n10"),
            (b"gr%c3%b6%c3%9fer", "größer"),
            (b"%F0%9F%98%80", "😀"),
            (b"100%", "100%"),
            (b"%zz %1 %", "%zz %1 %"),
            (b"%FF%FEnot utf-8", "��not utf-8"),
            (b"%00", "\x00"),
            (b"", ""),
        ],
    )
    async def test_percent_encoded_messages_are_read_as_far_as_they_are(self, answer, autojump_clock, wire, text):
        trailers = [(b"grpc-status", b"10"), (b"grpc-message", wire)]
        _, error = await answer(lambda peer, stream_id: peer.headers(stream_id, OK + trailers, end=True))
        assert (error.status, error.message) == (Status.ABORTED, text)

    async def test_a_message_in_raw_bytes_is_read_without_an_error(self, answer, autojump_clock):
        trailers = [(b"grpc-status", b"10"), (b"grpc-message", "größer".encode())]
        _, error = await answer(lambda peer, stream_id: peer.headers(stream_id, OK + trailers, end=True))
        assert error.status is Status.ABORTED

    @pytest.mark.parametrize(("wire", "details"), [(b"AP8=", b"\x00\xff"), (b"AP8", b"\x00\xff"), (b"?", None)])
    async def test_details_are_read_with_and_without_padding(self, answer, autojump_clock, wire, details):
        trailers = [(b"grpc-status", b"10"), (b"grpc-status-details-bin", wire)]
        _, error = await answer(lambda peer, stream_id: peer.headers(stream_id, OK + trailers, end=True))
        assert (error.status, error.details) == (Status.ABORTED, details)


class TestMessages:
    async def test_they_may_come_in_any_pieces_with_padding_between(self, answer, autojump_clock):
        def script(peer, stream_id) -> None:
            peer.headers(stream_id, OK)
            for at in range(len(HELLO)):
                peer.data(stream_id, HELLO[at : at + 1], padding=at)
                peer.data(stream_id, b"")
            peer.data(stream_id, HELLO + HELLO + HELLO[:3])
            peer.data(stream_id, HELLO[3:], padding=255)
            peer.headers(stream_id, DONE, end=True)

        assert await answer(script) == ([b"hello"] * 4, None)

    @pytest.mark.parametrize("encoding", [None, b"gzip"])
    async def test_a_compressed_message_is_refused_clearly(self, answer, autojump_clock, encoding):
        def script(peer, stream_id) -> None:
            peer.headers(stream_id, OK + ([(b"grpc-encoding", encoding)] if encoding else []))
            peer.data(stream_id, HELLO)
            peer.data(stream_id, b"\x01\x00\x00\x00\x05crush")

        messages, error = await answer(script)
        assert (messages, error.status, error.origin) == ([b"hello"], Status.INTERNAL, Origin.LOCAL)
        assert "compressed" in error.message

    async def test_a_message_over_the_limit_names_it(self, answer, autojump_clock):
        def script(peer, stream_id) -> None:
            peer.headers(stream_id, OK)
            peer.data(stream_id, b"\x00\x00\x00\x03\xe9" + bytes(1001))
            peer.headers(stream_id, DONE, end=True)

        settings = ChannelSettings(http2=Http2Settings(max_message_bytes=1000))
        messages, error = await answer(script, settings=settings)
        assert (messages, error.status, error.origin) == ([], Status.RESOURCE_EXHAUSTED, Origin.LOCAL)
        assert "max_message_bytes (1000)" in error.message

    async def test_a_response_type_that_is_not_grpc_is_an_error(self, answer, autojump_clock):
        def script(peer, stream_id) -> None:
            peer.headers(stream_id, [(b":status", b"502"), (b"content-type", b"text/html")])
            peer.data(stream_id, b"<html>bad gateway</html>", end=True)

        messages, error = await answer(script)
        assert (messages, error.status, error.origin) == ([], Status.UNAVAILABLE, Origin.PEER)
        assert "HTTP 502" in error.message


class TestGoAway:
    @pytest.mark.parametrize("last", [0, 1, 3, 5])
    async def test_calls_above_the_last_id_may_be_repeated_and_all_others_go_on(
        self, open_h2_server, autojump_clock, last
    ):
        async with open_h2_server() as (channel, peer, _):
            calls = [await channel.call(CALL, b"") for _ in range(3)]
            ids = [(await peer.next(h2.events.RequestReceived)).stream_id for _ in calls]
            assert ids == [1, 3, 5]
            for stream_id in ids:
                if stream_id <= last:
                    peer.headers(stream_id, OK)
                    peer.data(stream_id, HELLO)
            peer.go_away(last)
            for stream_id in ids:
                if stream_id <= last:
                    peer.data(stream_id, HELLO)
                    peer.headers(stream_id, DONE, end=True)
            for stream_id, call in zip(ids, calls, strict=True):
                messages, error = await read(call)
                if stream_id <= last:
                    assert (messages, error) == ([b"hello"] * 2, None)
                else:
                    assert messages == []
                    assert (error.status, error.origin) == (Status.UNAVAILABLE, Origin.REFUSED)
                    assert "never acted" in error.message

    async def test_a_server_that_has_answered_is_not_believed_that_it_never_acted(self, open_h2_server, autojump_clock):
        async with open_h2_server() as (channel, peer, _):
            call = await channel.call(CALL, b"")
            await peer.next(h2.events.RequestReceived)
            peer.headers(1, OK)
            peer.data(1, HELLO)
            peer.go_away(0)
            messages, error = await read(call)
            assert messages == [b"hello"]
            assert (error.status, error.origin) == (Status.UNAVAILABLE, Origin.TRANSPORT)

    async def test_the_next_call_takes_another_connection(self, open_h2_server, h2_peer, autojump_clock):
        async with open_h2_server() as (channel, peer, listener):
            first = await channel.call(CALL, b"")
            stream_id = (await peer.next(h2.events.RequestReceived)).stream_id
            peer.go_away(stream_id)
            await trio.testing.wait_all_tasks_blocked()
            replies = []

            async def call_again() -> None:
                replies.append(await read(await channel.call(CALL, b"")))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(call_again)
                second = h2_peer(await listener.accept(), client=False)
                other_id = (await second.next(h2.events.RequestReceived)).stream_id
                second.headers(other_id, OK + DONE, end=True)
            assert replies == [([], None)]
            peer.headers(stream_id, OK + DONE, end=True)
            assert await read(first) == ([], None)
            assert await peer.ended()  # nothing is left to be done on it

    async def test_a_server_may_say_it_twice_and_the_second_time_mean_it(self, open_h2_server, autojump_clock):
        """Go's and gRPC's servers first name the highest id there is, and a real one after a round trip."""
        async with open_h2_server() as (channel, peer, _):
            calls = [await channel.call(CALL, b"") for _ in range(2)]
            for _ in calls:
                await peer.next(h2.events.RequestReceived)
            peer.go_away(2**31 - 1)
            await trio.testing.wait_all_tasks_blocked()
            assert [call.ended for call in calls] == [False, False]
            assert not channel.links[0].usable
            peer.go_away(1)
            assert (await read(calls[1]))[1].origin is Origin.REFUSED
            peer.headers(1, OK + DONE, end=True)
            assert await read(calls[0]) == ([], None)

    @pytest.mark.parametrize("code", EVERY_CODE)
    async def test_an_error_code_ends_no_call_that_the_server_goes_on_with(self, open_h2_server, autojump_clock, code):
        async with open_h2_server() as (channel, peer, _):
            call = await channel.call(CALL, b"")
            await peer.next(h2.events.RequestReceived)
            peer.go_away(1, code=code, debug=b"a reason \xff")
            peer.headers(1, OK)
            peer.data(1, HELLO)
            peer.headers(1, DONE, end=True)
            assert await read(call) == ([b"hello"], None)

    async def test_a_server_that_hangs_up_after_it_loses_the_calls_it_had_taken(self, open_h2_server, autojump_clock):
        async with open_h2_server() as (channel, peer, _):
            calls = [await channel.call(CALL, b"") for _ in range(2)]
            for _ in calls:
                await peer.next(h2.events.RequestReceived)
            peer.go_away(1, code=2, debug=b"out of memory")
            peer.transport.close()
            taken, not_taken = [(await read(call))[1] for call in calls]
            assert (taken.status, taken.origin) == (Status.UNAVAILABLE, Origin.TRANSPORT)
            assert (not_taken.status, not_taken.origin) == (Status.UNAVAILABLE, Origin.REFUSED)
