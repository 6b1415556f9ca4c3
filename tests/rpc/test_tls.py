"""TLS over memory links: who gets in, what both ends say when they do not, and what gets through narrow links."""

from __future__ import annotations

import re
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from trio_router.errors import ConfigError, LinkError
from trio_router.rpc.memory import MemoryNetwork, memory_link
from trio_router.rpc.tls import ClientTls, ServerTls
from trio_router.rpc.tlstransport import PARTING_TIME, TlsTransport
from trio_router.rpc.transport import Transport, open_tcp_listener

STUCK = 1e6
NAME = "server.test"
PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}


async def outcome(transport: Transport) -> str:
    """How a handshake ends, and if well: what the next read says."""
    try:
        await transport.establish()
        data = None
        while data is None:
            await transport.wait_readable()
            data = transport.recv_nowait(100)
    except LinkError as exc:
        return exc.message
    finally:
        transport.close()
    return f"read {data!r}"


async def both_outcomes(client: Transport, server: Transport) -> tuple[str, str]:
    said: dict[str, str] = {}

    async def run(name: str, transport: Transport) -> None:
        said[name] = await outcome(transport)

    with trio.fail_after(STUCK):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, "client", client)
            nursery.start_soon(run, "server", server)
    return said["client"], said["server"]


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


async def send_all(transport: Transport, data: bytes, *, piece: int = 1 << 20) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[transport.send_nowait(rest[:piece]) :]
        if rest:
            await transport.wait_writable()


async def receive(transport: Transport, count: int, *, piece: int = 1 << 20) -> bytes:
    received = bytearray()
    while len(received) < count:
        await transport.wait_readable()
        data = transport.recv_nowait(piece)
        assert data != b"", f"the end after {len(received)} bytes"
        received += data or b""
    return bytes(received)


class TestWhoGetsIn:
    async def test_two_who_trust_each_other(self, client_tls, server_tls, autojump_clock):
        async with established(client_tls, server_tls) as (client, server):
            assert client.send_nowait(b"ping") == 4
            assert await receive(server, 4) == b"ping"
            assert server.send_nowait(b"pong") == 4
            assert await receive(client, 4) == b"pong"

    @pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
    async def test_both_versions_of_tls(self, server_tls, authority, version, autojump_clock):
        context = ssl.create_default_context(cafile=str(authority.ca_file))
        context.set_alpn_protocols(["h2"])
        context.maximum_version = context.minimum_version = version
        near, far = memory_link()
        client, server = TlsTransport(near, context, server_name=NAME), server_tls.wrap(far)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.establish)
            nursery.start_soon(server.establish)
        await send_all(client, b"x" * 30_000)
        assert await receive(server, 30_000) == b"x" * 30_000
        client.close()
        server.close()

    @pytest.mark.parametrize(
        ("names", "dates", "dialed", "client_says", "server_says"),
        [
            (["other.test"], {}, NAME, "not valid for 'server.test'", "it is not valid for this name or now"),
            (["10.0.0.1"], {}, "10.0.0.2", "not valid for '10.0.0.2'", "it is not valid for this name or now"),
            ([NAME], {"until": 2021}, NAME, "its certificate has expired", "refused our certificate: it has expired"),
            ([NAME], {"since": 2090}, NAME, "is not valid yet", "it is not valid for this name or now"),
        ],
        ids=["wrong host", "wrong address", "expired", "not yet valid"],
    )
    async def test_a_server_that_is_not_whom_was_asked_for(
        self, authority, client_tls, autojump_clock, names, dates, dialed, client_says, server_says
    ):
        pair = authority.issue(*names, **dates)
        ends = wrapped(client_tls, ServerTls(**pair._asdict()), name=dialed)
        client, server = await both_outcomes(*ends)
        assert client.startswith("TLS handshake with server failed: ")
        assert client_says in client
        assert server.startswith("TLS handshake with client failed: it refused our certificate: ")
        assert server_says in server

    async def test_a_server_of_an_unknown_authority(self, stranger, server_tls, autojump_clock):
        client, server = await both_outcomes(*wrapped(ClientTls(ca_file=stranger.ca_file), server_tls))
        assert "its certificate comes from an authority that is not trusted here" in client
        assert "it refused our certificate: its authority is not trusted there" in server

    async def test_a_client_with_the_certificate_that_is_asked_for(
        self, authority, server_pair, client_pair, autojump_clock
    ):
        server_tls = ServerTls(**server_pair._asdict(), client_ca_file=authority.ca_file)
        client_tls = ClientTls(ca_file=authority.ca_file, **client_pair._asdict())
        async with established(client_tls, server_tls) as (client, server):
            client.send_nowait(b"ping")
            assert await receive(server, 4) == b"ping"

    async def test_a_client_without_one(self, authority, client_tls, server_pair, autojump_clock):
        server_tls = ServerTls(**server_pair._asdict(), client_ca_file=authority.ca_file)
        client, server = await both_outcomes(*wrapped(client_tls, server_tls))
        assert "it requires a certificate, and we showed none" in client
        assert "it showed no certificate, and one is required" in server

    @pytest.mark.parametrize(
        ("dates", "client_says", "server_says"),
        [
            ({}, "its authority is not trusted there", "not trusted here"),
            ({"until": 2021}, "it has expired", "expired"),
        ],
        ids=["unknown authority", "expired"],
    )
    async def test_a_client_with_one_that_is_not_good(
        self, authority, stranger, server_pair, autojump_clock, dates, client_says, server_says
    ):
        pair = (authority if dates else stranger).issue("client.test", **dates)
        server_tls = ServerTls(**server_pair._asdict(), client_ca_file=authority.ca_file)
        ends = wrapped(ClientTls(ca_file=authority.ca_file, **pair._asdict()), server_tls)
        client, server = await both_outcomes(*ends)
        assert f"it refused our certificate: {client_says}" in client
        assert server_says in server

    async def test_a_client_that_offers_no_http2(self, server_tls, authority, autojump_clock):
        near, far = memory_link(left="client")
        context = ssl.create_default_context(cafile=str(authority.ca_file))
        context.set_alpn_protocols(["http/1.1"])
        old = ssl_peer(near, context, server_name=NAME)
        _, server = await both_outcomes(old, server_tls.wrap(far))
        assert server == "TLS handshake with client failed: it does not offer HTTP/2 (ALPN h2)"

    @pytest.mark.parametrize("protocols", [[], ["http/1.1"]])
    async def test_a_server_that_offers_no_http2(self, client_tls, server_pair, autojump_clock, protocols):
        near, far = memory_link(right="server")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*server_pair)
        if protocols:
            context.set_alpn_protocols(protocols)
        ours = TlsTransport(near, client_tls.context(), server_name=NAME)
        client, _ = await both_outcomes(ours, ssl_peer(far, context, server_side=True))
        assert client == "TLS handshake with server failed: it does not offer HTTP/2 (ALPN h2)"

    async def test_no_version_in_common(self, server_tls, authority, autojump_clock):
        near, far = memory_link()
        context = ssl.create_default_context(cafile=str(authority.ca_file))
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            context.maximum_version = context.minimum_version = ssl.TLSVersion.TLSv1_1
        context.set_ciphers("ALL:@SECLEVEL=0")
        _, server = await both_outcomes(TlsTransport(near, context, server_name=NAME), server_tls.wrap(far))
        assert server == "TLS handshake with left failed: no version of TLS in common"

    async def test_ciphers_that_http2_forbids_are_not_had(self, server_tls, authority, autojump_clock):
        near, far = memory_link()
        context = ssl.create_default_context(cafile=str(authority.ca_file))
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers("ECDHE+AES:!AESGCM")
        _, server = await both_outcomes(TlsTransport(near, context, server_name=NAME), server_tls.wrap(far))
        assert server == "TLS handshake with left failed: no cipher in common"

    @pytest.mark.parametrize("name", ["", ".", "x" * 300, "a..b"])
    async def test_a_name_that_no_certificate_can_have(self, client_tls, name):
        with pytest.raises(LinkError, match="is no name that a certificate could be for"):
            TlsTransport(memory_link()[0], client_tls.context(), server_name=name)


class ssl_peer(TlsTransport):  # noqa: N801
    """The same without the demand for HTTP/2: a stranger's end."""

    async def establish(self) -> None:
        with suppress(LinkError):
            await super().establish()


class TestPeersThatDoNotSpeakTls:
    @pytest.mark.parametrize(
        "first_words",
        [
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
            b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
            b"POST /v1/chat/completions HTTP/1.1\r\n",
            b"CONNECT x:1 HTTP/1.1\r\n\r\n",
            b"SSH-2.0-OpenSSH_9\r\n",
        ],
    )
    async def test_a_client(self, server_tls, autojump_clock, first_words):
        near, far = memory_link(left="client")
        near.send_nowait(first_words)
        server = server_tls.wrap(far)
        with pytest.raises(LinkError, match="handshake with client failed: it does not speak TLS; is it a plaintext"):
            await server.establish()
        server.close()

    @pytest.mark.parametrize("first_words", [bytes([0, 0, 18, 4]) + bytes(23), b"HTTP/1.1 400 Bad Request\r\n\r\n"])
    async def test_a_server(self, client_tls, autojump_clock, first_words):
        near, far = memory_link(right="server")
        far.send_nowait(first_words)
        client = TlsTransport(near, client_tls.context(), server_name=NAME)
        with pytest.raises(LinkError, match="handshake with server failed: it does not speak TLS"):
            await client.establish()
        client.close()

    async def test_one_that_goes_on_talking_is_not_listened_to_for_long(self, server_tls, autojump_clock):
        near, far = memory_link(10_000)
        server = server_tls.wrap(far)

        async def talk() -> None:
            while True:  # so that virtual time stands still
                await send_all(near, b"GET / HTTP/1.1\r\n" * 1000)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(talk)
            with pytest.raises(LinkError, match="does not speak TLS"):
                await server.establish()
            nursery.cancel_scope.cancel()

    async def test_one_that_does_not_leave_is_not_waited_for_long(self, server_tls, autojump_clock):
        near, far = memory_link()
        near.send_nowait(b"GET / HTTP/1.1\r\n")
        began = trio.current_time()
        with pytest.raises(LinkError, match="does not speak TLS"):
            await server_tls.wrap(far).establish()
        assert trio.current_time() - began == PARTING_TIME

    async def test_one_that_leaves_in_the_middle(self, client_tls, server_tls, autojump_clock):
        near, far = memory_link(left="client")
        client = TlsTransport(near, client_tls.context(), server_name=NAME)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.establish)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        client.close()
        with pytest.raises(LinkError, match="client"):
            await server_tls.wrap(far).establish()


class TestNarrowLinks:
    @pytest.mark.parametrize("capacity", [1, 2, 3, 7, 64, 1000, 20_000])
    async def test_the_handshake_and_both_directions_get_through(
        self, client_tls, server_tls, autojump_clock, capacity
    ):
        there, back = bytes(range(256)) * (capacity + 1), b"back" * (100 + 60 * capacity)
        async with established(client_tls, server_tls, capacity=capacity) as (client, server):
            received: dict[str, bytes] = {}

            async def read(name: str, transport: Transport, count: int) -> None:
                received[name] = await receive(transport, count)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send_all, client, there)
                nursery.start_soon(send_all, server, back)
                nursery.start_soon(read, "there", server, len(there))
                nursery.start_soon(read, "back", client, len(back))
        assert received == {"there": there, "back": back}

    @pytest.mark.parametrize("capacity", [10, 64, 1000])
    async def test_a_refusal_gets_through(self, stranger, server_tls, autojump_clock, capacity):
        ends = wrapped(ClientTls(ca_file=stranger.ca_file), server_tls, capacity=capacity)
        client, server = await both_outcomes(*ends)
        assert "is not trusted here" in client
        assert "is not trusted there" in server

    async def test_a_reader_that_stops_stops_the_writer(self, client_tls, server_tls, autojump_clock):
        async with established(client_tls, server_tls, capacity=10_000) as (client, server):
            rest = memoryview(bytes(1 << 20))
            for _ in range(100):
                rest = rest[client.send_nowait(rest) :]
            assert (1 << 20) - len(rest) <= 10_000
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send_all, client, rest)
                assert await receive(server, 1 << 20) == bytes(1 << 20)


class TestFiles:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"ca_file": "missing"}, "missing: No such file"),
            ({"ca_file": "garbage"}, "garbage has no certificates of authorities"),
            ({"cert_file": "cert"}, "both its certificate file and its key file"),
            ({"key_file": "key"}, "both its certificate file and its key file"),
            ({"cert_file": "cert", "key_file": "missing"}, "missing: No such file"),
            ({"cert_file": "missing", "key_file": "key"}, "missing: No such file"),
            ({"cert_file": "garbage", "key_file": "key"}, "not a certificate and a key in PEM"),
            ({"cert_file": "cert", "key_file": "garbage"}, "not a certificate and a key in PEM"),
            ({"cert_file": "cert", "key_file": "other"}, "is not the key of the certificate"),
            ({"cert_file": "cert", "key_file": "encrypted"}, "encrypted is encrypted"),
            ({"server_name": ""}, "server name is empty"),
        ],
    )
    def test_a_file_that_cannot_be_used_is_named(self, tmp_path, authority, options, said):
        good, other = authority.issue("a.test"), authority.issue("b.test")
        for name, source in (("cert", good.cert_file), ("key", good.key_file), ("other", other.key_file)):
            (tmp_path / name).write_bytes(source.read_bytes())
        (tmp_path / "garbage").write_text("no PEM")
        (tmp_path / "encrypted").write_bytes(encrypted(good.key_file.read_bytes()))
        paths = {name: tmp_path / value if value else value for name, value in options.items()}
        with pytest.raises(ConfigError, match=re.escape(said)):
            ClientTls(**paths).validate()
        if len(options) == 2:
            with pytest.raises(ConfigError, match=re.escape(said)):
                ServerTls(**paths)

    def test_the_system_authorities_are_trusted_where_none_are_given(self):
        ClientTls().validate()

    async def test_a_dial_says_which_file_has_gone(self, authority, tmp_path):
        ca_file = tmp_path / "ca.pem"
        ca_file.write_bytes(authority.ca_file.read_bytes())
        tls = ClientTls(ca_file=ca_file)
        tls.validate()
        ca_file.unlink()
        network = MemoryNetwork()
        listener = network.listen("memory:1")
        with pytest.raises(LinkError, match=r"cannot connect to memory:1: TLS file .*ca\.pem: No such file"):
            await tls.dialer(network.dial)("memory:1")
        assert (await listener.accept()).recv_nowait(1) == b""  # and hangs up

    def test_contexts_are_shared_until_a_file_changes(self, authority, stranger, tmp_path):
        ca_file = tmp_path / "ca.pem"
        ca_file.write_bytes(authority.ca_file.read_bytes())
        first = ClientTls(ca_file=ca_file).context()
        assert ClientTls(ca_file=ca_file, server_name="x").context() is first
        renewed = tmp_path / "renewed.pem"
        renewed.write_bytes(stranger.ca_file.read_bytes())
        renewed.replace(ca_file)
        assert ClientTls(ca_file=ca_file).context() is not first


def encrypted(key: bytes) -> bytes:
    from cryptography.hazmat.primitives import serialization as s

    private = s.load_pem_private_key(key, None)
    return private.private_bytes(
        s.Encoding.PEM, s.PrivateFormat.TraditionalOpenSSL, s.BestAvailableEncryption(b"secret")
    )


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
class TestForeignPeers:
    async def test_a_key_update_in_the_middle(self, server_tls, authority):
        listener = server_tls.listen(await open_tcp_listener("127.0.0.1", port=0))
        command = ["openssl", "s_client", "-connect", listener.address, "-alpn", "h2", "-quiet", "-no_ign_eof"]
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                process = await nursery.start(partial(trio.run_process, command, check=False, **PIPES))
                server = await listener.accept()
                await server.establish()
                for update in (b"k\n", b"K\n"):  # ours only; and asking for one in return
                    await process.stdin.send_all(b"before\n")
                    assert await receive(server, 7) == b"before\n"
                    await process.stdin.send_all(update)
                    await trio.testing.wait_all_tasks_blocked(0.05)
                    await process.stdin.send_all(b"after\n")
                    assert await receive(server, 6) == b"after\n"
                    server.send_nowait(b"answer\n")
                    assert await process.stdout.receive_some(100) == b"answer\n"
                nursery.cancel_scope.cancel()
        server.close()
        listener.close()
