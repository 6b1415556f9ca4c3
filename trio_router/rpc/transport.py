"""Byte transports: non-blocking reads and writes first, waiting only when the kernel says so.

A transport moves bytes and knows nothing of frames. Reading and writing never suspend; the two `wait_*` methods
do nothing else. That split lets a reader hand bytes on synchronously and lets any task flush an outbox without a
checkpoint (one trio socket call costs a full checkpoint, some 5 µs, which is more than a token may cost).

I/O errors of the operating system become `LinkError` here and nowhere else.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, Protocol

import trio

from ..errors import LinkError
from ..offload import Offload
from .resolve import connect_first, resolve, resolver_threads

CONNECT_TIMEOUT: Final = 10.0
"""Seconds to wait for a TCP handshake: without it a black hole holds the dialer for the kernel's two minutes."""

UNIX_SCHEME: Final = "unix:"
"""Begins the address of a UNIX socket; its path follows."""

# Where a host vanishes, the kernel finds it out in two minutes, whether something is being sent or not, and whatever is
# pinged above. Not sooner: a reader that takes nothing for a while looks the same to it as one that has gone.
_TCP_OPTIONS: Final = (
    ("TCP_KEEPIDLE", 60),
    ("TCP_KEEPALIVE", 60),  # the same on macOS
    ("TCP_KEEPINTVL", 20),
    ("TCP_KEEPCNT", 3),
    ("TCP_USER_TIMEOUT", 120_000),  # of Linux, in milliseconds
    # Tokens are small and must not wait for an acknowledgement of the one before (Nagle).
    ("TCP_NODELAY", 1),
)

ACCEPT_BACKLOG: Final = 1024
_ACCEPT_PAUSE: Final = 0.1
# Errors that mean "this machine is out of something": accepting again at once would only spin.
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})


class Transport(Protocol):
    """A connected, ordered, bidirectional byte pipe. At most one task waits in each direction."""

    @property
    def peer(self) -> str:
        """The other end's address, for messages and logs."""

    async def establish(self) -> None:
        """Do what comes before the first byte, such as a handshake. Who accepts a transport awaits it once, and owns
        the deadline; a dialer has done it.

        Raises LinkError when the two ends do not agree. Whether it raises or is cancelled, closing is still to be done.
        """

    def recv_nowait(self, max_bytes: int) -> bytes | None:
        """Return what has arrived, b"" at the peer's end of file, None when nothing has; raise LinkError if broken."""

    def send_nowait(self, data: bytes | bytearray | memoryview) -> int:
        """Hand over as much as fits now and return that count (0: none fits); raise LinkError when broken.

        What was not taken is offered again, unchanged, before anything else: it may be half encrypted.
        """

    async def wait_readable(self) -> None:
        """Return when `recv_nowait` may have something to say; raise LinkError once closed on this side."""

    async def wait_writable(self) -> None:
        """Return when `send_nowait` can take something; raise LinkError once closed on this side."""

    def close(self) -> None:
        """Drop the pipe now, without lingering. Closing twice is allowed; waiters are woken with LinkError."""


class Listener(Protocol):
    """Where transports come in."""

    @property
    def address(self) -> str:
        """The bound address, dialable by the matching dialer."""

    async def accept(self) -> Transport:
        """Wait for the next peer, to be established; raise LinkError once closed."""

    def close(self) -> None:
        """Refuse further peers and wake the acceptor."""


Dialer = Callable[[str], Awaitable[Transport]]
"""Takes an address, such as `host:port`, returns an established transport or raises LinkError.

Who dials owns the deadline.
"""


class SocketTransport:
    """A connected stream socket, TCP or UNIX."""

    __slots__ = ("_socket", "peer")

    def __init__(self, sock: socket.socket, *, peer: str) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            _tune(sock)
        self._socket = sock
        self.peer = peer

    def __repr__(self) -> str:
        state = "closed" if self._socket.fileno() < 0 else "open"
        return f"<SocketTransport {self.peer} {state}>"

    async def establish(self) -> None:
        await trio.lowlevel.checkpoint()

    def recv_nowait(self, max_bytes: int) -> bytes | None:
        try:
            return self._socket.recv(max_bytes)
        except BlockingIOError:
            return None
        except OSError as exc:
            raise LinkError(f"connection to {self.peer} broke while reading: {exc.strerror or exc}") from exc

    def send_nowait(self, data: bytes | bytearray | memoryview) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as exc:
            raise LinkError(f"connection to {self.peer} broke while writing: {exc.strerror or exc}") from exc

    async def wait_readable(self) -> None:
        try:
            await trio.lowlevel.wait_readable(self._open_socket())
        except (trio.ClosedResourceError, OSError) as exc:
            raise LinkError(f"connection to {self.peer} is closed") from exc

    async def wait_writable(self) -> None:
        try:
            await trio.lowlevel.wait_writable(self._open_socket())
        except (trio.ClosedResourceError, OSError) as exc:
            raise LinkError(f"connection to {self.peer} is closed") from exc

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()

    def _open_socket(self) -> socket.socket:
        # trio must never be asked to wait for a closed socket: it would enter a waiter for descriptor -1, fail, keep
        # the entry, and tell whoever waits for a closed socket next that the descriptor is busy (trio 0.35).
        if self._socket.fileno() < 0:
            raise LinkError(f"connection to {self.peer} is closed")
        return self._socket


def _tune(sock: socket.socket) -> None:
    with suppress(OSError):  # of a peer that has gone already, as the first read will tell
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _TCP_OPTIONS:
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class SocketListener:
    """A listening stream socket. `on_close` is called once, just before the socket is closed."""

    __slots__ = ("_on_close", "_socket", "address")

    def __init__(self, sock: socket.socket, *, address: str, on_close: Callable[[], None] | None = None) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._on_close = on_close
        self.address = address

    def __repr__(self) -> str:
        return f"<SocketListener {self.address}>"

    async def accept(self) -> Transport:
        while self._socket.fileno() >= 0:
            try:
                await trio.lowlevel.wait_readable(self._socket)
                sock, peer = self._socket.accept()
            except BlockingIOError:
                continue
            except trio.ClosedResourceError as exc:
                raise LinkError(f"listener {self.address} is closed") from exc
            except OSError as exc:
                if self._socket.fileno() < 0:
                    raise LinkError(f"listener {self.address} is closed") from exc
                # A peer that left in the queue costs nothing; being out of descriptors costs a pause.
                if exc.errno in _EXHAUSTED:
                    await trio.sleep(_ACCEPT_PAUSE)
                continue
            # A client's UNIX socket usually has no name of its own.
            return SocketTransport(sock, peer=_format_address(peer) if isinstance(peer, tuple) else self.address)
        raise LinkError(f"listener {self.address} is closed")

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            if self._on_close is not None:
                self._on_close()
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()


async def open_tcp_listener(host: str, *, port: int, offload: Offload = resolver_threads) -> SocketListener:
    """Bind `host:port` (port 0: the system chooses) and listen. Raises OSError as the system words it."""
    target = (await resolve(host, port=port, offload=offload, passive=True))[0]
    sock = socket.socket(target.family, socket.SOCK_STREAM)
    try:
        # A router that restarts must get its port back while old connections linger in TIME_WAIT.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(target.address)
        sock.listen(ACCEPT_BACKLOG)
    except OSError:
        sock.close()
        raise
    return SocketListener(sock, address=_format_address(sock.getsockname()))


async def dial_tcp(address: str, *, offload: Offload = resolver_threads) -> Transport:
    """Connect to `host:port` within CONNECT_TIMEOUT; raises LinkError with the reason otherwise.

    The host is resolved through `offload`.
    """
    host, port = split_address(address)
    with trio.move_on_after(CONNECT_TIMEOUT):
        try:
            sock = await connect_first(await resolve(host, port=port, offload=offload))
        except (OSError, UnicodeError) as exc:  # UnicodeError: the host cannot even be asked for
            raise LinkError(f"cannot connect to {address}: {getattr(exc, 'strerror', None) or exc}") from exc
        return SocketTransport(sock, peer=address)
    raise LinkError(f"cannot connect to {address}: no answer within {CONNECT_TIMEOUT:g} s")


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port` or `[v6]:port`; raises LinkError when the port is missing or no number."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise LinkError(f"address {address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def host_of(address: str) -> str:
    """What a certificate at this address would be for. A socket in the file system is on this host."""
    return "localhost" if address.startswith(UNIX_SCHEME) else split_address(address)[0]


def authority_of(address: str) -> str:
    """Whom calls to an address are for, as a URL would say it. A path cannot be said."""
    return host_of(address) if address.startswith(UNIX_SCHEME) else address


def _format_address(sockname: tuple[str, int] | tuple[str, int, int, int]) -> str:
    host, port = sockname[0], sockname[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
