"""TLS records over wires in a test's hands: reading and writing under every split."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from trio_router.errors import LinkError
from trio_router.rpc.memory import memory_link
from trio_router.rpc.tls import ClientTls, ServerTls
from trio_router.rpc.tlstransport import RECORD_BYTES, TlsTransport
from trio_router.rpc.transport import Transport

STUCK = 1e6
NAME = "server.test"


def wrapped(
    client_tls: ClientTls, server_tls: ServerTls, *, name: str = NAME, capacity: int = 65_536
) -> tuple[TlsTransport, TlsTransport]:
    near, far = memory_link(capacity, left="client", right="server")
    return TlsTransport(near, client_tls.context(), server_name=name), server_tls.wrap(far)


@asynccontextmanager
async def established(
    client_tls: ClientTls, server_tls: ServerTls, *, capacity: int = 65_536
) -> AsyncIterator[tuple[TlsTransport, TlsTransport]]:
    client, server = wrapped(client_tls, server_tls, capacity=capacity)
    with trio.fail_after(STUCK):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.establish)
            nursery.start_soon(server.establish)
        yield client, server
    client.close()
    server.close()


class Wire:
    """The transport below, in a test's hands: what it gives to read, and how much it takes at a time."""

    def __init__(self) -> None:
        self.peer = "wire"
        self.arriving: list[bytes] = []
        self.sent = bytearray()
        self.takes = 1 << 30
        self.reads = 0

    async def establish(self) -> None:
        await trio.lowlevel.checkpoint()

    def recv_nowait(self, max_bytes: int) -> bytes | None:
        self.reads += 1
        if not self.arriving:
            return None
        assert len(self.arriving[0]) <= max_bytes
        return self.arriving.pop(0)

    def send_nowait(self, data: bytes | bytearray | memoryview) -> int:
        taken = data[: self.takes]
        self.sent += taken
        self.takes -= len(taken)
        return len(taken)

    async def wait_readable(self) -> None:
        assert self.arriving, "waits for what is here already"
        await trio.lowlevel.checkpoint()

    async def wait_writable(self) -> None:
        raise AssertionError

    def close(self) -> None:
        pass


@pytest.fixture
async def on_wires(client_tls, server_tls, autojump_clock):
    """Two ends after their handshake, and the wires that are below them from then on."""
    near, far = Wire(), Wire()
    async with established(client_tls, server_tls) as (client, server):
        client._below, server._below = near, far
        yield client, near, server, far


def read_now(transport: Transport, *, piece: int = 1 << 20) -> list[bytes]:
    """What is to be read without waiting."""
    pieces = []
    while data := transport.recv_nowait(piece):
        pieces.append(data)
    return pieces


class TestReading:
    async def test_every_split_of_what_arrives_reads_the_same(self, on_wires):
        client, near, server, far = on_wires
        for split in range(200):
            for message in (b"first", b"second", b"x" * 100):
                client.send_nowait(message)
            ciphertext = bytes(near.sent)
            near.sent.clear()
            far.arriving = [ciphertext[:split], ciphertext[split:]]
            if not all(far.arriving):
                far.arriving = [ciphertext]
            assert b"".join(read_now(server)) == b"firstsecond" + b"x" * 100
        assert split > len(ciphertext)

    async def test_a_byte_at_a_time(self, on_wires):
        client, near, server, far = on_wires
        client.send_nowait(b"x" * 20_000)
        far.arriving = [bytes([byte]) for byte in near.sent]
        assert b"".join(read_now(server)) == b"x" * 20_000

    @pytest.mark.parametrize("limit", [1, 100, RECORD_BYTES, RECORD_BYTES + 1, 60_000])
    async def test_no_more_than_asked_for_and_the_rest_without_waiting(self, on_wires, limit):
        client, near, server, far = on_wires
        message = bytes(range(256)) * (1 if limit == 1 else 200)
        client.send_nowait(message)
        far.arriving = [bytes(near.sent)]
        received = b""
        while len(received) < len(message):
            await server.wait_readable()  # fails when it waits for the wire, which has nothing more
            piece = server.recv_nowait(limit)
            assert 0 < len(piece) <= limit
            received += piece
        assert received == message
        assert server.recv_nowait(limit) is None

    async def test_it_takes_no_more_from_below_than_it_gives(self, on_wires):
        client, near, server, far = on_wires
        for _ in range(50):
            client.send_nowait(b"x" * 10_000)
            far.arriving.append(bytes(near.sent))
            near.sent.clear()
        far.reads = 0
        assert len(server.recv_nowait(100_000)) == 10_000
        assert far.reads == 1

    async def test_a_flood_of_messages_of_tls_itself_does_not_keep_it(self, on_wires):
        class NeverData:
            """What OpenSSL is while key updates come and come."""

            def pending(self) -> int:
                return 0

            def read(self, limit: int) -> bytes:
                server._incoming.read()
                raise ssl.SSLWantReadError

        _, _, server, far = on_wires
        far.arriving = [bytes(100_000)] * 100
        real, server._tls = server._tls, NeverData()
        assert server.recv_nowait(100) is None
        server._tls = real
        assert len(far.arriving) > 90

    async def test_the_goodbye_is_the_end_of_file_after_all_data(self, on_wires):
        client, near, server, far = on_wires
        client.send_nowait(b"last words")
        client.close()
        far.arriving = [bytes(near.sent)]
        assert server.recv_nowait(100) == b"last words"
        for _ in range(2):
            await server.wait_readable()
            assert server.recv_nowait(100) == b""
        server.close()

    async def test_a_cut_without_goodbye_is_the_end_of_file_as_well(self, on_wires):
        client, near, server, far = on_wires
        client.send_nowait(b"whole")
        whole = bytes(near.sent)
        client.send_nowait(b"in the middle")
        far.arriving = [bytes(near.sent)[: len(whole) + 8], b""]
        assert server.recv_nowait(100) == b"whole"
        for _ in range(2):
            assert server.recv_nowait(100) == b""
            await server.wait_readable()

    @pytest.mark.parametrize("how", ["end", "reset"])
    async def test_a_server_that_hangs_up_without_a_word_may_dislike_the_certificate(self, on_wires, how):
        client, near, _, _ = on_wires

        def reset(max_bytes: int) -> bytes:
            raise LinkError("connection reset by peer")

        near.arriving = [b""]
        if how == "reset":
            near.recv_nowait = reset
        for _ in range(2):
            with pytest.raises(LinkError, match="it may want another certificate"):
                client.recv_nowait(100)

    async def test_one_that_has_spoken_does_not(self, on_wires):
        client, near, server, far = on_wires
        server.send_nowait(b"hello")
        near.arriving = [bytes(far.sent), b""]
        assert [client.recv_nowait(100), client.recv_nowait(100)] == [b"hello", b""]

    async def test_spoilt_bytes_are_an_error_after_what_came_before_them(self, on_wires):
        client, near, server, far = on_wires
        client.send_nowait(b"good")
        client.send_nowait(b"spoilt")
        near.sent[-1] ^= 1
        far.arriving = [bytes(near.sent)]
        assert server.recv_nowait(100) == b"good"
        for _ in range(2):
            await server.wait_readable()
            with pytest.raises(LinkError, match="broke while reading: decryption failed or bad record mac"):
                server.recv_nowait(100)
        assert far.sent  # the alert

    async def test_a_closed_end_reads_and_waits_no_more(self, client_tls, server_tls, autojump_clock):
        async with established(client_tls, server_tls) as (client, server):
            client.send_nowait(b"unread")
            server.close()
            server.close()
            for attempt in (lambda: server.recv_nowait(10), lambda: server.send_nowait(b"x")):
                with pytest.raises(LinkError):
                    attempt()
            for wait in (server.wait_readable, server.wait_writable):
                with pytest.raises(LinkError):
                    await wait()
            with pytest.raises(LinkError):
                client.send_nowait(b"x")


class TestWriting:
    @pytest.mark.parametrize("takes", [1, 5, 21, 22, 23, 1000])
    async def test_every_short_write(self, on_wires, takes):
        client, near, server, far = on_wires
        rest = b"0123456789" * 30
        near.takes = 0
        reported = 0
        while rest:
            near.takes += takes
            sent = client.send_nowait(rest[:10])
            reported += sent
            rest = rest[sent:]
            if sent:
                # What is reported as sent can be read.
                far.arriving = [bytes(near.sent)]
                near.sent.clear()
                assert sum(map(len, read_now(server))) == sent
        assert reported == 300

    async def test_what_waits_is_bounded_and_sent_once(self, on_wires):
        client, near, server, far = on_wires
        message = bytes(range(256)) * 4096  # 1 MiB
        near.takes = 0
        for _ in range(3):
            assert client.send_nowait(message) == 0
        assert RECORD_BYTES < len(client._ciphertext) < RECORD_BYTES + 100
        near.takes = 1 << 30
        assert client.send_nowait(message) == len(message)
        far.arriving = [bytes(near.sent[start : start + 10_000]) for start in range(0, len(near.sent), 10_000)]
        assert b"".join(read_now(server)) == message

    async def test_what_is_owed_may_be_offered_in_smaller_pieces(self, on_wires):
        client, near, server, far = on_wires
        near.takes = 3
        assert client.send_nowait(b"abcdefghij") == 0
        assert client.send_nowait(b"abcdefghij") == 0
        near.takes = 1 << 30
        assert client.send_nowait(b"abc") == 3
        assert client.send_nowait(b"defg") == 4
        assert client.send_nowait(b"hijklm") == 6
        far.arriving = [bytes(near.sent)]
        assert b"".join(read_now(server)) == b"abcdefghijklm"

    async def test_any_buffer_is_taken_and_let_go(self, on_wires):
        client, near, server, far = on_wires
        for data in (b"abc", bytearray(b"def"), memoryview(b"ghi")):
            assert client.send_nowait(data) == 3
            if isinstance(data, bytearray):
                data.clear()  # a BufferError while somebody holds it
        assert client.send_nowait(b"") == 0
        far.arriving = [bytes(near.sent)]
        assert b"".join(read_now(server)) == b"abcdefghi"
