"""TLS and UNIX sockets against gRPC's own core, both ways: certificates on either side, and what refusals look like."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import pytest
import trio

from trio_router.errors import LinkError
from trio_router.rpc.channel import ChannelSettings, open_channel
from trio_router.rpc.endpoint import listen
from trio_router.rpc.server import Server
from trio_router.rpc.servercall import ServerCall
from trio_router.rpc.tls import ClientTls, ServerTls

PATIENCE = 30.0
ECHO = "/test.Service/Echo"
COUNT = "/test.Service/Count"
LARGE = bytes(range(256)) * 20_480  # 5 MiB
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]

in_thread = trio.to_thread.run_sync


async def echo(call: ServerCall) -> None:
    await call.send(await call.receive())


async def count(call: ServerCall) -> None:
    for number in range(int(await call.receive())):
        await call.send(b"%d" % number)


class ForeignEcho(grpc.GenericRpcHandler):
    """The same on grpcio's side."""

    def service(self, details):
        if details.method == ECHO:
            return grpc.unary_unary_rpc_method_handler(lambda request, context: request)
        return grpc.unary_stream_rpc_method_handler(
            lambda request, context: (b"%d" % number for number in range(int(request)))
        )


@asynccontextmanager
async def our_server(address: str, tls: ServerTls | None = None) -> AsyncIterator[str]:
    below = await listen(address)
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            await nursery.start(Server(raw={ECHO: echo, COUNT: count}).serve, tls.listen(below) if tls else below)
            yield below.address
            nursery.cancel_scope.cancel()


@contextmanager
def foreign_server(address: str, credentials: grpc.ServerCredentials | None = None) -> Iterator[str]:
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool, handlers=[ForeignEcho()], options=UNLIMITED)
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
        server.start()
        try:
            yield address if address.startswith("unix:") else f"127.0.0.1:{port}"
        finally:
            server.stop(0).wait(PATIENCE)


def foreign_trust(authority, pair=None) -> grpc.ChannelCredentials:
    shown = {} if pair is None else {"private_key": read(pair.key_file), "certificate_chain": read(pair.cert_file)}
    return grpc.ssl_channel_credentials(read(authority.ca_file), **shown)


def foreign_identity(pair, clients=None) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials(
        [(read(pair.key_file), read(pair.cert_file))],
        root_certificates=None if clients is None else read(clients.ca_file),
        require_client_auth=clients is not None,
    )


def read(path: Path) -> bytes:
    return path.read_bytes()


def foreign_calls(channel: grpc.Channel) -> None:
    """A small call, a large one and a stream; in a thread."""
    with channel:
        for message in (b"hello", LARGE):
            assert channel.unary_unary(ECHO)(message, timeout=PATIENCE) == message
        replies = list(channel.unary_stream(COUNT)(b"500", timeout=PATIENCE))
    assert replies == [b"%d" % number for number in range(500)]


def foreign_refusal(channel: grpc.Channel) -> str:
    with channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(ECHO)(b"", timeout=PATIENCE)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return caught.value.details()


async def our_calls(address: str, tls: ClientTls | None = None) -> None:
    async with open_channel(address, settings=ChannelSettings(tls=tls)) as channel:
        for message in (b"hello", LARGE):
            call = await channel.call(ECHO, message, timeout=PATIENCE)
            assert [await call.receive(), await call.receive()] == [message, None]
        call = await channel.call(COUNT, b"500", timeout=PATIENCE)
        replies: list[bytes] = []
        await call.pump(lambda batch: bool(replies.extend(batch)) or True)
    assert replies == [b"%d" % number for number in range(500)]


class TestGrpciosClient:
    async def test_over_tls(self, authority, server_pair):
        async with our_server("127.0.0.1:0", ServerTls(**server_pair._asdict())) as address:
            channel = grpc.secure_channel(address, foreign_trust(authority), UNLIMITED)
            await in_thread(foreign_calls, channel)

    async def test_with_a_certificate_of_its_own(self, authority, server_pair, client_pair):
        tls = ServerTls(**server_pair._asdict(), client_ca_file=authority.ca_file)
        async with our_server("127.0.0.1:0", tls) as address:
            assert await in_thread(foreign_refusal, grpc.secure_channel(address, foreign_trust(authority)))
            channel = grpc.secure_channel(address, foreign_trust(authority, client_pair), UNLIMITED)
            await in_thread(foreign_calls, channel)

    async def test_that_asks_for_another_name(self, authority, server_pair):
        options = [("grpc.ssl_target_name_override", "server.test"), *UNLIMITED]
        async with our_server("127.0.0.1:0", ServerTls(**server_pair._asdict())) as address:
            channel = grpc.secure_channel(address, foreign_trust(authority), options)
            await in_thread(foreign_calls, channel)

    async def test_that_trusts_somebody_else_or_speaks_plainly(self, authority, stranger, server_pair):
        async with our_server("127.0.0.1:0", ServerTls(**server_pair._asdict())) as address:
            wrong = grpc.secure_channel(address, foreign_trust(stranger))
            assert "certificate" in (await in_thread(foreign_refusal, wrong)).lower()
            await in_thread(foreign_refusal, grpc.insecure_channel(address))
            channel = grpc.secure_channel(address, foreign_trust(authority), UNLIMITED)
            await in_thread(foreign_calls, channel)

    async def test_on_a_unix_socket(self, tmp_path):
        async with our_server(f"unix:{tmp_path}/socket") as address:
            await in_thread(foreign_calls, grpc.insecure_channel(address, UNLIMITED))
            await in_thread(foreign_calls, grpc.insecure_channel(f"unix://{tmp_path}/socket", UNLIMITED))


class TestGrpciosServer:
    async def test_over_tls(self, authority, server_pair):
        with foreign_server("127.0.0.1:0", foreign_identity(server_pair)) as address:
            await our_calls(address, ClientTls(ca_file=authority.ca_file))

    async def test_that_wants_a_certificate(self, authority, server_pair, client_pair):
        with foreign_server("127.0.0.1:0", foreign_identity(server_pair, authority)) as address:
            await our_calls(address, ClientTls(ca_file=authority.ca_file, **client_pair._asdict()))
            # grpcio hangs up and does not say why.
            with pytest.raises(LinkError, match="before its first word; it may want another certificate than we show"):
                await our_calls(address, ClientTls(ca_file=authority.ca_file))

    async def test_that_is_not_whom_we_ask_for(self, authority, stranger, server_pair):
        with foreign_server("127.0.0.1:0", foreign_identity(server_pair)) as address:
            for tls, why in (
                (ClientTls(ca_file=stranger.ca_file), "an authority that is not trusted here"),
                (ClientTls(ca_file=authority.ca_file, server_name="other.test"), "not valid for 'other.test'"),
            ):
                with pytest.raises(LinkError, match=why):
                    await our_calls(address, tls)
            await our_calls(address, ClientTls(ca_file=authority.ca_file, server_name="server.test"))

    async def test_that_speaks_plainly(self, authority):
        with foreign_server("127.0.0.1:0") as address, pytest.raises(LinkError, match="does not speak TLS"):
            await our_calls(address, ClientTls(ca_file=authority.ca_file))

    async def test_that_speaks_tls_to_our_plain_client(self, server_pair):
        with (
            foreign_server("127.0.0.1:0", foreign_identity(server_pair)) as address,
            pytest.raises(LinkError, match="it may expect TLS"),
        ):
            await our_calls(address)

    async def test_on_a_unix_socket(self, tmp_path):
        with foreign_server(f"unix:{tmp_path}/socket") as address:
            for form in (address, f"unix://{tmp_path}/socket"):
                await our_calls(form)
