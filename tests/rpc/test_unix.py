from __future__ import annotations

import socket
import stat
from contextlib import closing
from pathlib import Path

import pytest
import trio
import trio.testing

from trio_router.errors import LinkError
from trio_router.rpc.channel import open_channel
from trio_router.rpc.endpoint import dial, listen
from trio_router.rpc.server import Server
from trio_router.rpc.servercall import ServerCall
from trio_router.rpc.transport import CONNECT_TIMEOUT
from trio_router.rpc.unix import dial_unix, open_unix_listener, split_unix_address

CALL = "/test.Service/Call"


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "socket"


def bound(path: Path, *, backlog: int | None = None) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    if backlog is not None:
        sock.listen(backlog)
    return sock


async def tell_who(call: ServerCall) -> None:
    await call.receive()
    await call.send(call.peer.encode())


class TestAddresses:
    @pytest.mark.parametrize(
        ("address", "path"),
        [
            ("unix:/run/worker", "/run/worker"),
            ("unix:///run/worker", "/run/worker"),
            ("unix:worker.sock", "worker.sock"),
            ("unix:./a:b", "a:b"),
        ],
    )
    def test_both_ways_to_write_one(self, address, path):
        assert split_unix_address(address) == Path(path)

    @pytest.mark.parametrize("address", ["unix:", "unix://", "unix://host/path", "/run/worker", "unix:/a\0b"])
    def test_what_names_no_path_is_refused(self, address):
        with pytest.raises(LinkError, match="unix:path or unix:///path"):
            split_unix_address(address)


class TestListening:
    async def test_only_the_owner_may_connect_unless_told_otherwise(self, path):
        for options, mode in (({}, 0o600), ({"mode": 0o660}, 0o660)):
            with closing(open_unix_listener(path, **options)):
                assert stat.S_IMODE(path.stat().st_mode) == mode

    async def test_closing_removes_the_socket(self, path):
        listener = open_unix_listener(path)
        assert path.is_socket()
        listener.close()
        listener.close()
        assert not path.exists()

    async def test_closing_leaves_alone_what_somebody_else_has_put_there(self, path):
        listener = open_unix_listener(path)
        path.unlink()
        with closing(bound(path)):
            listener.close()
            assert path.exists()

    async def test_what_a_dead_process_left_is_replaced(self, path):
        bound(path, backlog=1).close()
        with closing(open_unix_listener(path)) as listener:
            (await dial(listener.address)).close()

    async def test_a_path_that_somebody_listens_on_is_in_use(self, path):
        with closing(open_unix_listener(path)) as listener:
            with pytest.raises(OSError, match="Address already in use"):
                open_unix_listener(path)
            (await dial(listener.address)).close()

    async def test_a_listener_whose_queue_is_full_is_not_taken_for_dead(self, path):
        with closing(bound(path, backlog=0)), closing(socket.socket(socket.AF_UNIX)) as waiting:
            waiting.connect(str(path))
            with pytest.raises(OSError, match="Address already in use"):
                open_unix_listener(path)

    async def test_what_is_no_socket_is_not_removed(self, path):
        path.write_text("precious")
        with pytest.raises(FileExistsError, match="not a socket"):
            open_unix_listener(path)
        assert path.read_text() == "precious"

    async def test_a_directory_that_is_not_there_is_told(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            await listen(f"unix:{tmp_path}/none/socket")


class TestDialing:
    @pytest.mark.parametrize("form", ["unix:{}", "unix://{}"])
    async def test_calls_go_through(self, path, form):
        async with trio.open_nursery() as nursery:
            with closing(await listen(form.format(path))) as listener:
                await nursery.start(Server(raw={CALL: tell_who}).serve, listener)
                async with open_channel(form.format(path)) as channel:
                    call = await channel.call(CALL, b"")
                    assert await call.receive() == f"unix:{path}".encode()
                nursery.cancel_scope.cancel()

    async def test_nobody_there(self, path):
        with pytest.raises(LinkError, match=f"cannot connect to unix:{path}: No such file"):
            await dial(f"unix:{path}")
        bound(path).close()
        with pytest.raises(LinkError, match=f"cannot connect to unix:{path}: Connection refused"):
            await dial(f"unix:{path}")

    async def test_a_path_longer_than_the_system_takes(self):
        with pytest.raises(LinkError, match="too long"):
            await dial(f"unix:/{'x' * 200}")

    async def test_a_full_queue_is_waited_for(self, path, mock_clock):
        dialed = []

        async def connect() -> None:
            dialed.append(await dial_unix(f"unix:{path}"))

        with closing(bound(path, backlog=0)) as listener, closing(socket.socket(socket.AF_UNIX)) as first:
            first.connect(str(path))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(connect)
                await trio.testing.wait_all_tasks_blocked()
                assert dialed == []
                listener.accept()[0].close()
                mock_clock.jump(1)
            dialed[0].close()

    async def test_a_queue_that_stays_full_ends_the_dial(self, path, autojump_clock):
        with closing(bound(path, backlog=0)), closing(socket.socket(socket.AF_UNIX)) as first:
            first.connect(str(path))
            with pytest.raises(LinkError, match="nobody accepts within"):
                await dial_unix(f"unix:{path}")
            assert trio.current_time() >= CONNECT_TIMEOUT
