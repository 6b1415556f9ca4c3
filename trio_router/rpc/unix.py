"""UNIX sockets: dialing a path, and listening on one with what that leaves in the file system.

Must not know TCP. Which of the two an address means is decided in `endpoint`.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

import trio

from ..errors import LinkError
from .transport import ACCEPT_BACKLOG, CONNECT_TIMEOUT, UNIX_SCHEME, SocketListener, SocketTransport, Transport

OWNER_ONLY: Final = 0o600
"""Who may write to a socket may connect to it. There is no other check."""

_FULL_PAUSE: Final = 0.01


def split_unix_address(address: str) -> Path:
    """The path in `unix:path` or `unix:///absolute/path`; raises LinkError when it is neither."""
    path = address.removeprefix(UNIX_SCHEME)
    if path.startswith("//"):
        path = path.removeprefix("//")
        if not path.startswith("/"):
            path = ""  # it names a host
    if path == address or not path or "\0" in path:
        raise LinkError(f"address {address!r} is not unix:path or unix:///path")
    return Path(path)


async def dial_unix(address: str) -> Transport:
    """Connect to `unix:path` within CONNECT_TIMEOUT; raises LinkError with the reason otherwise."""
    path = split_unix_address(address)
    with trio.move_on_after(CONNECT_TIMEOUT):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            await _connect(sock, path)
        except OSError as exc:
            sock.close()
            raise LinkError(f"cannot connect to {address}: {exc.strerror or exc}") from exc
        except BaseException:
            sock.close()
            raise
        return SocketTransport(sock, peer=address)
    raise LinkError(f"cannot connect to {address}: nobody accepts within {CONNECT_TIMEOUT:g} s")


async def _connect(sock: socket.socket, path: Path) -> None:
    while True:
        try:
            sock.connect(os.fspath(path))
        except BlockingIOError:
            # Not "under way", as with TCP, but "the queue is full", and there is no event for when it is not.
            await trio.sleep(_FULL_PAUSE)
        else:
            await trio.lowlevel.checkpoint()
            return


def open_unix_listener(path: Path, *, mode: int = OWNER_ONLY) -> SocketListener:
    """Listen on a path that only this process listens on, with these permissions; closing removes it.

    A socket that a dead process has left there is replaced. Raises OSError as the system words it: when somebody
    listens there, or when it is something else than a socket.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _bind(sock, path)
    except BaseException:
        sock.close()
        raise
    mine = _identity(path)

    def remove() -> None:
        # Unless somebody has put another one there since.
        with suppress(OSError):
            if _identity(path) == mine:
                path.unlink()

    try:
        path.chmod(mode)  # before anybody can connect, which takes `listen`
        sock.listen(ACCEPT_BACKLOG)
    except BaseException:
        remove()
        sock.close()
        raise
    return SocketListener(sock, address=f"{UNIX_SCHEME}{path}", on_close=remove)


def _bind(sock: socket.socket, path: Path) -> None:
    try:
        sock.bind(os.fspath(path))
    except OSError as exc:
        if exc.errno != errno.EADDRINUSE:
            raise
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(errno.EEXIST, "something that is not a socket is there", str(path)) from exc
        if not _is_dead(path):
            raise
        path.unlink()
        sock.bind(os.fspath(path))


def _is_dead(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a listener with a full queue would block us, and is alive
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False


def _identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino
