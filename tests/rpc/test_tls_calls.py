"""gRPC over TLS: calls, certificates that change, and connections that never get as far as a call."""

from __future__ import annotations

import logging
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio
import trio.testing

from trio_router.errors import ConfigError, LinkError
from trio_router.http2.settings import Http2Settings
from trio_router.rpc.channel import Channel, ChannelSettings, open_channel
from trio_router.rpc.memory import MemoryNetwork
from trio_router.rpc.server import HANDSHAKE_TIMEOUT, SILENCE_TOLERATED, Server, ServerSettings
from trio_router.rpc.servercall import ServerCall
from trio_router.rpc.tls import ClientTls, ServerTls
from trio_router.rpc.transport import Dialer, Transport

STUCK = 1e6
ECHO = "/test.Service/Echo"
FLOOD = "/test.Service/Flood"
MESSAGE = bytes(range(256)) * 20_480  # 5 MiB
NARROW = Http2Settings.for_test()


async def echo(call: ServerCall) -> None:
    while (message := await call.receive()) is not None:
        await call.send(message)


@dataclass
class Secured:
    """A server behind TLS and what dials it."""

    network: MemoryNetwork
    address: str
    server: Server
    tls: ServerTls
    client_tls: ClientTls

    @property
    def dialer(self) -> Dialer:
        return self.client_tls.dialer(self.network.dial)

    def channel(self, **settings):
        return open_channel(
            self.address, dialer=self.network.dial, settings=ChannelSettings(tls=self.client_tls, **settings)
        )


@asynccontextmanager
async def secured(
    pair, client_tls: ClientTls, *, raw=None, capacity: int = 65_536, http2=None, client_ca_file=None, **settings
) -> AsyncIterator[Secured]:
    network = MemoryNetwork(capacity_bytes=capacity)
    below = network.listen()
    tls = ServerTls(**pair._asdict(), client_ca_file=client_ca_file)
    server = Server(raw=raw or {ECHO: echo}, settings=ServerSettings(http2=http2 or Http2Settings(), **settings))
    with trio.fail_after(STUCK):
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, tls.listen(below))
            yield Secured(network, below.address, server, tls, client_tls)
            nursery.cancel_scope.cancel()


async def echoes(channel: Channel, message: bytes = b"hello") -> bool:
    call = await channel.call(ECHO, message)
    return [await call.receive(), await call.receive()] == [message, None]


async def settled(server: Server) -> int:
    """Connections of a server once nothing moves."""
    await trio.testing.wait_all_tasks_blocked()
    return server._connections


class TestCalls:
    @pytest.mark.parametrize("capacity", [50, 1000, 65_536])
    async def test_a_call_on_a_link_of_any_width(self, server_pair, client_tls, autojump_clock, capacity):
        async with (
            secured(server_pair, client_tls, capacity=capacity, http2=NARROW) as at,
            at.channel(http2=NARROW) as channel,
        ):
            assert await echoes(channel, b"x" * 20_000)

    async def test_a_large_message_both_ways(self, server_pair, client_tls, autojump_clock):
        async with secured(server_pair, client_tls) as at, at.channel() as channel:
            assert await echoes(channel, MESSAGE)

    async def test_a_slow_reader_stops_its_server_and_not_its_neighbour(self, server_pair, client_tls, autojump_clock):
        sent = 0

        async def flood(call: ServerCall) -> None:
            nonlocal sent
            await call.receive()
            for _ in range(5 * 64):
                await call.send(bytes(16_384))
                sent += 1

        async with secured(server_pair, client_tls, raw={FLOOD: flood, ECHO: echo}) as at, at.channel() as channel:
            slow = await channel.call(FLOOD, b"")
            await trio.testing.wait_all_tasks_blocked()
            window = Http2Settings().stream_window_bytes
            assert sent <= window // 16_384 + 1
            assert await echoes(channel)
            replies = 0
            while await slow.receive() is not None:
                replies += 1
            assert replies == sent == 5 * 64

    async def test_a_client_that_may_not_come_in_learns_why(
        self, authority, server_pair, client_tls, autojump_clock, caplog
    ):
        caplog.set_level(logging.INFO)
        async with secured(server_pair, client_tls, client_ca_file=authority.ca_file) as at, at.channel() as channel:
            with pytest.raises(LinkError, match="it requires a certificate, and we showed none"):
                await channel.connect()
            assert await settled(at.server) == 0
        assert "it showed no certificate, and one is required" in caplog.text

    async def test_a_name_of_its_own_for_the_server(self, server_pair, authority, autojump_clock):
        for name, fits in (("server.test", True), ("other.test", False)):
            tls = ClientTls(ca_file=authority.ca_file, server_name=name)
            async with secured(server_pair, tls) as at, at.channel() as channel:
                if fits:
                    assert await echoes(channel)
                else:
                    with pytest.raises(LinkError, match=r"not valid for 'other\.test'"):
                        await channel.connect()


class TestWhomCallsAreFor:
    @pytest.mark.parametrize(
        ("settings", "expected"),
        [
            ({}, "https memory:1"),
            ({"tls": "server.test"}, "https server.test"),
            ({"tls": "server.test", "authority": "me:7"}, "https me:7"),
            ({"tls": None, "authority": "me:7"}, "http me:7"),
            ({"tls": None}, "http memory:1"),
            ({"tls": None, "address": "unix:/run/x"}, "http localhost"),
            ({"address": "unix:/run/x"}, "https localhost"),
        ],
    )
    async def test_it_is_said_in_the_headers(self, server_pair, authority, autojump_clock, settings, expected):
        told: dict[bytes, bytes] = {}

        async def note(call: ServerCall) -> None:
            told.update(call._stream.headers)

        network = MemoryNetwork()
        name = settings.get("tls", "")
        listener = network.listen(settings.get("address", "memory:1"))
        if name is not None:
            listener = ServerTls(**server_pair._asdict()).listen(listener)
        tls = None if name is None else ClientTls(ca_file=authority.ca_file, server_name=name or None)
        async with trio.open_nursery() as nursery:
            await nursery.start(Server(raw={ECHO: note}).serve, listener)
            async with open_channel(
                listener.address,
                dialer=network.dial,
                settings=ChannelSettings(tls=tls, authority=settings.get("authority")),
            ) as channel:
                assert await (await channel.call(ECHO, b"")).receive() is None
            nursery.cancel_scope.cancel()
        assert f"{told[b':scheme'].decode()} {told[b':authority'].decode()}" == expected


class TestPlaintextByMistake:
    async def test_a_plain_client_of_a_tls_server_gets_nowhere(self, server_pair, client_tls, autojump_clock, caplog):
        caplog.set_level(logging.INFO)
        async with (
            secured(server_pair, client_tls) as at,
            open_channel(at.address, dialer=at.network.dial) as channel,
        ):
            with pytest.raises(LinkError, match="closed the connection before its first word; it may expect TLS"):
                await channel.connect()
            assert await settled(at.server) == 0
        assert "it does not speak TLS; is it a plaintext port or client?" in caplog.text

    async def test_a_tls_client_of_a_plain_server_gets_nowhere(self, client_tls, autojump_clock):
        network = MemoryNetwork()
        listener = network.listen()
        async with trio.open_nursery() as nursery:
            server = Server(raw={ECHO: echo})
            await nursery.start(server.serve, listener)
            tls = ChannelSettings(tls=client_tls)
            async with open_channel(listener.address, dialer=network.dial, settings=tls) as channel:
                with pytest.raises(LinkError, match="it does not speak TLS; is it a plaintext port or client"):
                    await channel.connect()
            assert await settled(server) == 0
            nursery.cancel_scope.cancel()


class TestRenewal:
    @staticmethod
    def copies(tmp_path: Path, pair) -> dict[str, Path]:
        """The pair under names that renewals can be put at."""
        files = {"cert_file": tmp_path / "now.pem", "key_file": tmp_path / "now.key"}
        TestRenewal.renew(files, pair)
        return files

    @staticmethod
    def renew(files: dict[str, Path], pair) -> None:
        for name, source in pair._asdict().items():
            shutil.copy(source, files[name].with_suffix(".new"))
            files[name].with_suffix(".new").replace(files[name])

    async def test_new_handshakes_get_it_and_connections_stay(
        self, server_pair, stranger, client_tls, autojump_clock, tmp_path
    ):
        files = self.copies(tmp_path, server_pair)
        renewed = stranger.issue("memory")

        class Files:
            _asdict = staticmethod(lambda: files)

        async with secured(Files, client_tls) as at, at.channel() as old:
            assert await echoes(old)
            (link,) = old.links
            self.renew(files, renewed)
            async with at.channel() as still_old:
                assert await echoes(still_old)  # nobody has asked for it yet
            at.tls.reload()
            assert await echoes(old)
            assert old.links == [link]
            async with at.channel() as refused:
                with pytest.raises(LinkError, match="not trusted here"):
                    await refused.connect()
            at.client_tls = ClientTls(ca_file=stranger.ca_file)
            async with at.channel() as new:
                assert await echoes(new)

    async def test_a_renewal_that_cannot_be_used_changes_nothing(
        self, server_pair, client_tls, autojump_clock, tmp_path
    ):
        files = self.copies(tmp_path, server_pair)

        class Files:
            _asdict = staticmethod(lambda: files)

        async with secured(Files, client_tls) as at:
            files["key_file"].write_text("half a fil")
            with pytest.raises(ConfigError, match=r"now\.key"):
                at.tls.reload()
            async with at.channel() as channel:
                assert await echoes(channel)

    async def test_a_client_shows_the_new_one_at_its_next_dial(
        self, authority, stranger, server_pair, client_pair, autojump_clock, tmp_path
    ):
        files = self.copies(tmp_path, stranger.issue("client.test"))
        client_tls = ClientTls(ca_file=authority.ca_file, **files)
        async with secured(server_pair, client_tls, client_ca_file=authority.ca_file) as at:
            async with at.channel() as channel:
                with pytest.raises(LinkError, match="its authority is not trusted there"):
                    await channel.connect()
            self.renew(files, client_pair)
            async with at.channel() as channel:
                assert await echoes(channel)


class TestHandshakesThatDoNotEnd:
    async def test_a_server_that_says_nothing_ends_the_dial_in_time(self, client_tls, autojump_clock):
        network = MemoryNetwork()
        listener = network.listen()
        settings = ChannelSettings(tls=client_tls, connect_timeout=3)
        async with open_channel(listener.address, dialer=network.dial, settings=settings) as channel:
            began = trio.current_time()
            with pytest.raises(LinkError, match="within 3 s"):
                await channel.connect()
            assert trio.current_time() - began == 3
        transport = await listener.accept()
        while transport.recv_nowait(1000):
            pass
        assert transport.recv_nowait(1000) == b""

    @pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00\x01", b"slowly"], ids=["nothing", "half", "slow"])
    async def test_a_client_that_does_not_finish_is_ended_and_harms_nobody(
        self, server_pair, client_tls, autojump_clock, said
    ):
        async with secured(server_pair, client_tls) as at:
            silent = await at.network.dial(at.address)

            async def speak() -> None:
                with suppress(LinkError):
                    if said == b"slowly":
                        for byte in b"\x16\x03\x01\x02\x00\x01" + bytes(100):
                            silent.send_nowait(bytes([byte]))
                            await trio.sleep(1)
                    silent.send_nowait(said)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(speak)
                async with at.channel() as channel:
                    assert await echoes(channel)
                    (link,) = channel.links
                    await trio.sleep(HANDSHAKE_TIMEOUT - 1)
                    assert silent.recv_nowait(100) is None
                    await trio.sleep(1.5)
                    assert silent.recv_nowait(100) == b""
                    assert await echoes(channel)
                    assert channel.links == [link]
                    assert await settled(at.server) == 1
                nursery.cancel_scope.cancel()

    async def test_nor_may_a_client_be_silent_after_it(self, server_pair, client_tls, autojump_clock):
        async with secured(server_pair, client_tls) as at:
            transport = await at.dialer(at.address)
            await trio.sleep(HANDSHAKE_TIMEOUT + 1)
            assert await settled(at.server) == 0
            transport.close()

    async def test_silent_clients_make_room_for_others(self, server_pair, client_tls, autojump_clock):
        async with secured(server_pair, client_tls, max_connections=4) as at, at.channel() as old:
            assert await echoes(old)
            silent = [await at.network.dial(at.address) for _ in range(3)]
            async with at.channel() as early:
                with pytest.raises(LinkError):
                    await early.connect()  # they may be slow only
            await trio.sleep(SILENCE_TOLERATED)
            async with at.channel() as late:
                assert await echoes(late)
                assert [transport.recv_nowait(1) for transport in silent] == [b"", None, None]
                assert await echoes(old)
                assert at.server._connections == 4

    async def test_a_drain_does_not_wait_for_them_for_ever(self, server_pair, client_tls, autojump_clock):
        network = MemoryNetwork()
        listener = network.listen()
        server = Server(raw={ECHO: echo})
        tls = ServerTls(**server_pair._asdict())
        with trio.fail_after(HANDSHAKE_TIMEOUT + 1):
            async with trio.open_nursery() as nursery:
                await nursery.start(server.serve, tls.listen(listener))
                transport = await network.dial(listener.address)
                await trio.testing.wait_all_tasks_blocked()
                server.drain()
        transport.close()


class AtStep(trio.abc.Instrument):
    """Calls `act` once, after the k-th task step from now."""

    def __init__(self, k: int, act: Callable[[], None]) -> None:
        self.left = k
        self.act = act

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.left -= 1
        if self.left == 0:
            self.act()


class Watched:
    """A dialer that remembers what it has dialed."""

    def __init__(self, dialer: Dialer) -> None:
        self.dialer = dialer
        self.made: list[Transport] = []

    async def __call__(self, address: str) -> Transport:
        transport = await self.dialer(address)
        self.made.append(transport)
        return transport

    def open_ones(self) -> list[Transport]:
        return [transport for transport in self.made if not transport._closed]


@pytest.mark.parametrize("how", ["cancel", "break"])
async def test_leaving_at_any_step_of_the_handshake_leaves_nothing_behind(server_pair, client_tls, autojump_clock, how):
    async with secured(server_pair, client_tls, capacity=400, http2=NARROW) as at:
        for k in range(1, 1000):
            below = Watched(at.network.dial)
            scope = trio.CancelScope()

            def leave(scope=scope, below=below) -> None:
                if how == "cancel":
                    scope.cancel()
                for transport in below.made if how == "break" else ():
                    transport.close()

            instrument = AtStep(k, leave)
            trio.lowlevel.add_instrument(instrument)
            with scope, suppress(LinkError):
                async with open_channel(
                    at.address,
                    dialer=below,
                    settings=ChannelSettings(tls=client_tls, http2=NARROW, connect_timeout=5),
                ) as channel:
                    await channel.connect()
            trio.lowlevel.remove_instrument(instrument)
            assert await settled(at.server) == 0, k
            assert below.open_ones() == [], k
            if instrument.left > 0:
                break
        assert k > 20, "the handshake has become too short to mean anything"
        async with at.channel(http2=NARROW) as channel:
            assert await echoes(channel)
