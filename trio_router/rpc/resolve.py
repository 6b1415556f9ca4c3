"""From a host and a port to a connected socket: name resolution through an Offload, and a race between addresses.

The only place that asks the system's resolver, which blocks and may take as long as it likes.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, TypeVar

import trio

from ..offload import Offload, Threads

RESOLVER_THREADS: Final = 16
"""A name server that does not answer holds a thread for half a minute; other names must still be asked for."""

RACE_DELAY: Final = 0.25
"""Seconds an address gets before the next one is tried beside it (RFC 8305 section 8)."""

_threads: Final = trio.lowlevel.RunVar[Threads]("threads that resolve names")

T = TypeVar("T")


class Target(NamedTuple):
    """One address of a host, as `socket.socket` and its methods take it."""

    family: int
    address: tuple[str | int | bytes, ...]


async def resolver_threads(function: Callable[[], T]) -> T:
    """The Offload for names where nobody gives another: threads of its own, the same for everybody in a trio run."""
    try:
        threads = _threads.get()
    except LookupError:
        threads = Threads(RESOLVER_THREADS)
        _threads.set(threads)
    return await threads(function)


async def resolve(host: str, *, port: int, offload: Offload = resolver_threads, passive: bool = False) -> list[Target]:
    """The TCP addresses of a host, the best one first; a literal address is not offloaded. `passive`: to listen on.

    Raises OSError as the resolver words it, UnicodeError for a name that cannot be asked for.
    """
    flags = socket.AI_PASSIVE if passive else 0

    def ask(more: int = 0) -> list[Target]:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags | more)
        return list(dict.fromkeys(Target(family, address) for family, _, _, _, address in found))

    with suppress(socket.gaierror):
        return ask(socket.AI_NUMERICHOST)
    return await offload(ask)


async def connect_first(targets: Sequence[Target]) -> socket.socket:
    """A socket to whichever address answers first, tried in order with a head start for the earlier ones.

    Raises OSError with the reasons when none does.
    """
    winner: socket.socket | None = None
    reasons: dict[str, None] = {}

    async def attempt(target: Target, gave_up: trio.Event) -> None:
        nonlocal winner
        try:
            sock = await _connect(target)
        except OSError as exc:
            reasons[os.strerror(exc.errno) if exc.errno else str(exc)] = None
            gave_up.set()
            return
        if winner is None:
            winner = sock
            nursery.cancel_scope.cancel()
        else:
            sock.close()

    try:
        async with trio.open_nursery() as nursery:
            for target in alternate_families(targets):
                gave_up = trio.Event()
                nursery.start_soon(attempt, target, gave_up)
                with trio.move_on_after(RACE_DELAY):
                    await gave_up.wait()
    except BaseException:
        if winner is not None:
            winner.close()
        raise
    if winner is None:
        raise OSError("; ".join(reasons) or "it has no address")
    return winner


def alternate_families(targets: Sequence[Target]) -> list[Target]:
    """The first address, then the first of the other family: a network without IPv6 then costs one delay and not one
    for each address (RFC 8305 section 4). The others follow as they were.
    """
    other = next((target for target in targets if target.family != targets[0].family), None)
    if other is None:
        return list(targets)
    return [targets[0], other, *(target for target in targets[1:] if target is not other)]


async def _connect(target: Target) -> socket.socket:
    sock = socket.socket(target.family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        try:
            sock.connect(target.address)
        except BlockingIOError:
            await trio.lowlevel.wait_writable(sock)
            if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(code, os.strerror(code)) from None
        else:
            await trio.lowlevel.checkpoint()
    except BaseException:
        sock.close()
        raise
    return sock
