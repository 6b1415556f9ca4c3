"""One client's connection: deadlines, limits, leaving."""

from __future__ import annotations

import itertools

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trio_router.errors import BadRequest
from trio_router.front.exchange import Exchange
from trio_router.front.http import HttpServer
from trio_router.front.settings import HttpSettings
from trio_router.rpc.memory import MemoryNetwork


async def echo(exchange: Exchange) -> None:
    await exchange.respond(200, headers=((b"content-type", b"text/plain"),), body=exchange.request.body)


# requests in a row


async def test_requests_share_a_connection(autojump_clock, start) -> None:
    client = await (await start(echo)).connect()

    first = await client.request("POST", "/a", body=b"one")
    second = await client.request("POST", "/b", body=b"two")

    assert (first.body, second.body) == (b"one", b"two")


async def test_pipelined_requests_are_answered_in_order(autojump_clock, start, request_bytes) -> None:
    client = await (await start(echo)).connect()

    await client.send(b"".join(request_bytes("POST", "/", body=b"n%d" % i) for i in range(50)))

    assert [(await client.response()).body for _ in range(50)] == [b"n%d" % i for i in range(50)]


async def test_what_is_sent_ahead_stays_bounded(autojump_clock, start, request_bytes, make_gate) -> None:
    gate = make_gate()
    client = await (await start(gate, capacity=4096, max_pipelined_bytes=8192)).connect()
    await client.send(request_bytes("GET", "/"))
    await gate.entered.wait()

    sent = 0
    with trio.move_on_after(60):
        while True:
            await client.send(b"x" * 1024)
            sent += 1024

    assert 8192 <= sent <= 8192 + 2 * 4096


async def test_connection_close_is_honoured(autojump_clock, start) -> None:
    client = await (await start(echo)).connect()

    response = await client.request("GET", "/", headers="connection: close\r\n")

    assert response.header("connection") == "close"
    assert await client.is_closed()


async def test_http_10_gets_a_response_and_the_end(autojump_clock, start, request_bytes) -> None:
    async def stream(exchange: Exchange) -> None:
        writer = exchange.start_stream(headers=((b"content-type", b"text/plain"),))
        writer.write_nowait(b"a")
        await writer.finish(b"b")

    client = await (await start(stream)).connect()
    await client.send(request_bytes("GET", "/", version="1.0"))
    response = await client.response()

    assert response.header("transfer-encoding") is None
    assert response.body == b"ab"


async def test_head_has_the_length_and_no_body(autojump_clock, start) -> None:
    async def hello(exchange: Exchange) -> None:
        await exchange.respond(200, body=b"hello")

    client = await (await start(hello)).connect()

    response = await client.request("HEAD", "/")

    assert response.header("content-length") == "5"
    assert (await client.request("GET", "/")).body == b"hello"


async def test_the_date_is_sent(autojump_clock, start) -> None:
    client = await (await start(echo)).connect()

    assert (await client.request("GET", "/")).header("date") == "Tue, 14 Nov 2023 22:13:20 GMT"


async def test_a_chunked_request_body_is_put_together(autojump_clock, start) -> None:
    client = await (await start(echo)).connect()
    await client.send(b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
    await client.send(b"".join(b"1\r\n%c\r\n" % byte for byte in b"hello") + b"0\r\n\r\n")

    assert (await client.response()).body == b"hello"


@given(cuts=st.sets(st.integers(1, 160), max_size=25))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_split_of_the_request_bytes_gets_the_same_answers(request_bytes, cuts: set[int]) -> None:
    stream = request_bytes("POST", "/a", body="中😀".encode()) + request_bytes("POST", "/b", body=b'{"x": 1}')
    edges = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]

    async def main() -> bytes:
        network = MemoryNetwork()
        server = HttpServer(echo, settings=HttpSettings(), clock=lambda: 0.0)
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, network.listen("a:1"))
            link = await network.dial("a:1")
            for begin, end in itertools.pairwise(edges):
                link.send_nowait(stream[begin:end])
                await trio.testing.wait_all_tasks_blocked()
            received = link.recv_nowait(65536) or b""
            nursery.cancel_scope.cancel()
        return received

    received = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))

    bodies = [part.rpartition(b"\r\n\r\n")[2] for part in received.split(b"HTTP/1.1 200 OK")[1:]]
    assert bodies == ["中😀".encode(), b'{"x": 1}']


# deadlines


async def test_headers_have_a_deadline_from_their_first_byte(autojump_clock, start) -> None:
    client = await (await start(echo, header_seconds=10.0)).connect()
    await trio.sleep(9)
    begun = trio.current_time()
    await client.send(b"GET / HTTP/1.1\r\n")

    response = await client.response()

    assert response.status == 408
    assert response.json["error"]["code"] == "request_read_timeout"
    assert trio.current_time() - begun == pytest.approx(10)
    assert await client.is_closed()


async def test_a_client_that_says_nothing_is_dropped_without_a_word(autojump_clock, start) -> None:
    client = await (await start(echo, header_seconds=10.0)).connect()

    assert await client.to_end() == b""
    assert trio.current_time() == pytest.approx(10, abs=0.1)


async def test_an_idle_connection_is_kept_for_a_while(autojump_clock, start) -> None:
    client = await (await start(echo, keep_alive_seconds=60.0)).connect()
    await client.request("GET", "/")
    await trio.sleep(59)
    assert (await client.request("GET", "/")).status == 200
    last = trio.current_time()

    assert await client.is_closed()
    assert trio.current_time() - last == pytest.approx(60)


async def test_a_body_that_trickles_is_given_up(autojump_clock, start) -> None:
    client = await (await start(echo, body_seconds=30.0, body_bytes_per_second=1000)).connect()
    await client.send(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 100000\r\n\r\n")
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def _() -> None:
            while True:
                await client.send(b"x")
                await trio.sleep(1)

        response = await client.response()
        nursery.cancel_scope.cancel()

    assert response.status == 408
    assert trio.current_time() < 32


async def test_a_body_that_keeps_coming_may_take_its_time(autojump_clock, start) -> None:
    client = await (await start(echo, body_seconds=30.0, body_bytes_per_second=1000)).connect()
    await client.send(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 100000\r\n\r\n")
    for _ in range(50):
        await client.send(b"x" * 2000)
        await trio.sleep(1.5)

    assert len((await client.response()).body) == 100_000


async def test_i11_a_client_that_reads_nothing_is_dropped_with_its_handler(autojump_clock, start, make_gate) -> None:
    async def without_end(exchange: Exchange) -> None:
        writer = exchange.start_stream()
        while True:
            writer.write_nowait(b"x" * 1000)
            await writer.drain()

    flood = make_gate(without_end)
    client = await (await start(flood, capacity=4096, write_stall_seconds=120.0)).connect()
    await client.send(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")

    await flood.ended.wait()

    assert flood.outcome == "stopped"
    assert trio.current_time() == pytest.approx(120, abs=16)


async def test_a_client_that_reads_a_little_now_and_then_is_not_stalled(autojump_clock, start) -> None:
    async def flood(exchange: Exchange) -> None:
        writer = exchange.start_stream()
        for _ in range(40):
            writer.write_nowait(b"x" * 1000)
            await writer.drain()
        await writer.finish()

    client = await (await start(flood, capacity=4096, write_stall_seconds=120.0)).connect()
    await client.send(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        await trio.sleep(100)
        received += client.transport.recv_nowait(2000) or b""

    assert received.count(b"x") == 40_000


# limits


async def test_a_body_over_the_limit_is_refused_before_it_comes(autojump_clock, start, make_gate) -> None:
    gate = make_gate()
    client = await (await start(gate, max_body_bytes=1000)).connect()
    await client.send(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1001\r\n\r\n")

    response = await client.response()

    assert response.status == 413
    assert response.header("content-type") == "application/json"
    assert response.header("x-smg-error-code") == "payload_too_large"
    assert response.json["error"] == {
        "type": "Request Entity Too Large",
        "code": "payload_too_large",
        "message": "the request body is over the limit of 1000 bytes",
        "param": None,
    }
    assert gate.outcome == "never called"


async def test_a_client_that_sends_its_whole_body_first_still_reads_the_refusal(
    autojump_clock, start, request_bytes
) -> None:
    client = await (await start(echo, max_body_bytes=1000, capacity=4096)).connect()

    response = await client.request("POST", "/", body=b"x" * 100_000)

    assert response.status == 413
    assert await client.is_closed()


async def test_a_client_that_never_stops_sending_is_dropped_after_its_refusal(autojump_clock, start) -> None:
    client = await (await start(echo, max_body_bytes=1000, linger_seconds=2.0)).connect()
    await client.send(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n")
    assert (await client.response()).status == 413

    assert await client.is_closed()
    assert trio.current_time() == pytest.approx(2)


async def test_a_chunked_body_over_the_limit_is_refused(autojump_clock, start) -> None:
    client = await (await start(echo, max_body_bytes=1000)).connect()
    await client.send(b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
    await client.send(b"3e9\r\n" + b"x" * 1001 + b"\r\n0\r\n\r\n")

    assert (await client.response()).status == 413


async def test_a_body_at_the_limit_passes(autojump_clock, start) -> None:
    client = await (await start(echo, max_body_bytes=1000)).connect()

    assert (await client.request("POST", "/", body=b"x" * 1000)).body == b"x" * 1000


async def test_case_b7_a_large_body_passes_by_default(autojump_clock, start) -> None:
    async def measure(exchange: Exchange) -> None:
        await exchange.respond(200, body=b"%d" % len(exchange.request.body))

    client = await (await start(measure, capacity=1 << 20)).connect()

    assert (await client.request("POST", "/", body=b"x" * (8 << 20))).body == b"%d" % (8 << 20)


async def test_case_b7_slow_uploads_do_not_exceed_the_budget(autojump_clock, start) -> None:
    site = await start(echo, max_body_bytes=1000, max_bodies_bytes=10_000, small_body_bytes=0)
    clients = [await site.connect() for _ in range(200)]
    for client in clients:
        await client.send(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n" + b"x" * 999)
    await trio.testing.wait_all_tasks_blocked()
    assert site.server.held_body_bytes == 10_000
    for client in clients[:10]:
        await client.send(b"x")

    responses = [await client.response() for client in clients]

    assert [response.status for response in responses] == [200] * 10 + [429] * 190
    assert responses[-1].header("retry-after") == "1"
    assert site.server.held_body_bytes == 0


async def test_large_uploads_that_are_announced_and_never_come_keep_no_small_request_out(autojump_clock, start) -> None:
    site = await start(echo, max_body_bytes=100_000, max_bodies_bytes=100_000, small_body_bytes=1000)
    announcer, large, small = [await site.connect() for _ in range(3)]

    await announcer.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n")
    await trio.testing.wait_all_tasks_blocked()

    assert site.server.held_body_bytes == 100_000
    assert (await large.request("POST", "/", body=b"x" * 1001)).status == 429
    assert (await small.request("POST", "/", body=b"x" * 1000)).status == 200


async def test_a_client_that_leaves_during_its_upload_frees_its_budget(autojump_clock, start) -> None:
    site = await start(echo, max_bodies_bytes=10_000, small_body_bytes=0)
    client = await site.connect()
    await client.send(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9000\r\n\r\nxxx")
    await trio.testing.wait_all_tasks_blocked()
    assert site.server.held_body_bytes == 9000

    client.leave()
    await trio.testing.wait_all_tasks_blocked()

    assert site.server.held_body_bytes == 0


async def test_too_many_headers_are_refused(autojump_clock, start) -> None:
    client = await (await start(echo)).connect()

    response = await client.request("GET", "/", headers=f"x: {'y' * 40_000}\r\n")

    assert response.status == 431
    assert response.json["error"]["code"] == "headers_too_large"


async def test_expect_continue_is_answered_before_the_body(autojump_clock, start) -> None:
    client = await (await start(echo)).connect()
    await client.send(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\nexpect: 100-continue\r\n\r\n")
    assert (await client.response()).status == 100

    await client.send(b"hello")

    assert (await client.response()).body == b"hello"


async def test_expect_continue_over_the_limit_is_refused_without_the_body(autojump_clock, start) -> None:
    client = await (await start(echo, max_body_bytes=4)).connect()
    await client.send(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\nexpect: 100-continue\r\n\r\n")

    assert (await client.response()).status == 413


async def test_i12_malformed_http_is_told_and_ends_its_connection_only(autojump_clock, start) -> None:
    site = await start(echo)
    bad, good = await site.connect(), await site.connect()
    await bad.send(b"\x16\x03\x01\x02\x00 hello\r\n\r\n")

    response = await bad.response()

    assert response.status == 400
    assert response.json["error"]["code"] == "malformed_http"
    assert await bad.is_closed()
    assert (await good.request("GET", "/")).status == 200


# handlers that fail


async def test_a_planned_error_is_the_response_and_the_connection_goes_on(autojump_clock, start) -> None:
    async def refuse(exchange: Exchange) -> None:
        raise BadRequest("max_tokens must be positive")

    client = await (await start(refuse)).connect()
    for _ in range(2):
        response = await client.request("GET", "/")
        assert (response.status, response.json["error"]["message"]) == (400, "max_tokens must be positive")


async def test_a_bug_is_logged_and_not_told(autojump_clock, start, caplog: pytest.LogCaptureFixture) -> None:
    async def bug(exchange: Exchange) -> None:
        raise KeyError("secret")

    client = await (await start(bug)).connect()

    response = await client.request("GET", "/")

    assert response.status == 500
    assert response.json["error"]["code"] == "internal_error"
    assert b"secret" not in response.body
    assert "secret" in caplog.text


async def test_a_handler_that_does_not_answer_is_a_bug(autojump_clock, start, caplog: pytest.LogCaptureFixture) -> None:
    async def silent(exchange: Exchange) -> None:
        await trio.lowlevel.checkpoint()

    client = await (await start(silent)).connect()

    assert (await client.request("GET", "/")).status == 500
    assert "without completing" in caplog.text


async def test_a_stream_that_fails_is_cut_so_that_nobody_takes_it_for_whole(autojump_clock, start, caplog) -> None:
    async def half(exchange: Exchange) -> None:
        exchange.start_stream().write_nowait(b"half")
        raise ValueError("bug")

    client = await (await start(half)).connect()
    await client.send(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")

    assert (await client.to_end()).endswith(b"4\r\nhalf\r\n")
    assert "bug" in caplog.text
