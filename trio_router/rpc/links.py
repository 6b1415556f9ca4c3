"""The links to one address: when to dial, which link a call gets, and what there is to see from outside.

It owns the tasks of its links and of the attempts to make them. It knows nothing of calls but that they need a link.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum, unique
from typing import Final

import trio
from grpclib.const import Status

from ..errors import LinkError
from ..http2.connection import Connection
from ..http2.settings import Http2Settings
from ..http2.streams import Role
from .backoff import Backoff, BackoffSettings
from .keepalive import KeepaliveSettings, Pace
from .link import Link
from .metadata import Origin, RpcError
from .tls import ClientTls
from .transport import Dialer

CONTROL_STREAMS: Final = 8
"""Streams of each link that are kept for control calls: an Abort must not queue behind what it is to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSettings:
    """How a channel connects.

    `connect_timeout` is in seconds and covers resolving, dialing, the TLS handshake and the peer's first words (its
    SETTINGS). Without `tls` connections are plain. `authority` is whom calls say they are for (None: the TLS server
    name where one is set, else the address).

    Bulk calls leave `control_streams` free on each link (at most half of what the peer allows); when that makes every
    link full, another one is dialed, up to `max_links`. Without `keepalive` silent peers are not pinged.
    """

    connect_timeout: float = 10.0
    tls: ClientTls | None = None
    authority: str | None = None
    backoff: BackoffSettings = field(default_factory=BackoffSettings)
    keepalive: KeepaliveSettings | None = field(default_factory=KeepaliveSettings)
    control_streams: int = CONTROL_STREAMS
    max_links: int = 64
    http2: Http2Settings = field(default_factory=Http2Settings)


@unique
class ChannelState(StrEnum):
    """What a new call would find."""

    IDLE = "idle"
    """No link; the next call dials."""
    CONNECTING = "connecting"
    """The first link is being made; calls wait for it."""
    READY = "ready"
    """At least one link that its peer takes calls on."""
    BACKOFF = "backoff"
    """The last attempt failed. Until its pause is over calls fail at once; the first one after that dials."""
    CLOSED = "closed"
    """By this side; calls fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChange:
    """A channel has entered `state`. `reason` tells why, where something went wrong."""

    address: str
    state: ChannelState
    reason: str | None = None


OnState = Callable[[StateChange], None]
"""Is told of each change as it happens. Must not raise or suspend."""


def ignore_state(change: StateChange) -> None:
    """Watch nothing."""


class Links:
    """Every link to `address`, and the attempt to make another one. Links are dialed only when a call needs them."""

    def __init__(
        self,
        address: str,
        *,
        nursery: trio.Nursery,
        dialer: Dialer,
        settings: ChannelSettings,
        on_state: OnState = ignore_state,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.address = address
        self.state = ChannelState.IDLE
        self.all: list[Link] = []  # those that have closed stay until the next one is made
        self._nursery = nursery
        self._dialer = dialer if settings.tls is None else settings.tls.dialer(dialer)
        self._settings = settings
        self._on_state = on_state
        self._chance = chance
        self._pace = Pace(settings.keepalive) if settings.keepalive is not None else None
        self._backoff = Backoff(settings.backoff)
        self._made_at: dict[Link, float] = {}  # those that take calls
        self._attempt: _Attempt | None = None
        self._failure: LinkError | None = None  # why there is none, since the last one that could be made
        self._closing = trio.Event()

    def __repr__(self) -> str:
        why = f" ({self._failure})" if self.state is ChannelState.BACKOFF else ""
        return f"{self.state}{why} {self._open}"

    @property
    def _open(self) -> list[Link]:
        return [link for link in self.all if link.closed_because is None]

    async def find(self, *, deadline: float, control: bool = False, wait_for_ready: bool = False) -> Link:
        """A link with room for a call, made if need be. See `Channel.call` for how long this waits and what it raises.

        No checkpoint lies between finding the link and returning it.
        """
        link = self._pick(control=control)
        if link is not None:
            return link
        until = trio.current_time() + self._settings.connect_timeout
        if deadline <= until or (wait_for_ready and deadline < math.inf):
            until = deadline
        with trio.move_on_at(until):
            return await self._wait(control=control, wait_for_ready=wait_for_ready)
        if until < deadline:
            raise LinkError(str(self._failure or self._no_answer()))
        why = "" if self._failure is None else f" ({self._failure})"
        message = f"no connection to {self.address} before the call's deadline{why}"
        raise RpcError(Status.DEADLINE_EXCEEDED, message, origin=Origin.REFUSED)

    def close(self) -> None:
        """End every link now, and make no further one."""
        self._closing.set()
        self._update()
        if self._attempt is not None:
            self._attempt.scope.cancel()
        for link in self._open:
            link.connection.go_away()
            link.flush()
            link.close(self._was_closed())

    # Waiting for one

    def _pick(self, *, control: bool) -> Link | None:
        keep = 0 if control else self._settings.control_streams
        for link in self.all:
            if link.has_room(keep=keep):
                return link
        return None

    async def _wait(self, *, control: bool, wait_for_ready: bool) -> Link:
        while True:
            if self._closing.is_set():
                raise self._was_closed()
            if self._attempt is None and self._pause_left > 0:
                await self._pause(wait_for_ready=wait_for_ready)
                continue
            # Calls share the attempt: a peer that does not answer keeps each of them waiting once and not one after
            # the other.
            attempt = self._attempt or self._begin()
            await attempt.ended.wait()
            link = self._pick(control=control)
            if link is not None:
                return link
            # Without a reason the new link is full already: others were quicker.
            attempt.check(wait_for_ready=wait_for_ready)

    @property
    def _pause_left(self) -> float:
        return self._backoff.not_before - trio.current_time()

    async def _pause(self, *, wait_for_ready: bool) -> None:
        if not wait_for_ready:
            raise LinkError(f"{self._failure}; not tried again for {self._pause_left:.2g} s") from self._failure
        with trio.move_on_at(self._backoff.not_before):
            await self._closing.wait()

    # Making one

    def _begin(self) -> _Attempt:
        if len(self._open) >= self._settings.max_links:
            raise LinkError(f"all {len(self._open)} connections to {self.address} are full")
        attempt = self._attempt = _Attempt(self._was_closed())
        self._nursery.start_soon(self._dial, attempt, name=f"dial {self.address}")
        self._update()
        return attempt

    async def _dial(self, attempt: _Attempt) -> None:
        attempt.scope.deadline = trio.current_time() + self._settings.connect_timeout
        try:
            with attempt.scope:
                transport = await self._dialer(self.address)
                connection = Connection(Role.CLIENT, settings=self._settings.http2, clock=trio.current_time)
                link = attempt.link = Link(transport, connection, on_change=self._changed, pace=self._pace)
                self._nursery.start_soon(link.run, name=f"link to {self.address}")
                # Only now is it known how many calls the peer takes, and that it speaks HTTP/2 at all.
                await link.greeted()
                if not link.has_room():
                    raise LinkError(str(link.closed_because or f"{self.address} takes no calls"))
                attempt.error = None
            if attempt.scope.cancelled_caught and not self._closing.is_set():
                attempt.error = self._no_answer()
        except Exception as exc:  # noqa: BLE001  # a dialer's failure, mistakes included, belongs to those who wait
            attempt.error = exc
        finally:
            self._conclude(attempt)

    def _conclude(self, attempt: _Attempt) -> None:
        self._attempt = None
        link, error = attempt.link, attempt.error
        if error is None and link is not None:
            self.all = [*self._open, link]
            self._made_at[link] = trio.current_time()
            self._failure = None
            self._backoff.made()
        elif link is not None:
            link.close(LinkError(str(error)))
        if isinstance(error, LinkError) and error is not attempt.cancelled and not self._closing.is_set():
            self._failure = error
            self._backoff.failed(now=trio.current_time(), chance=self._chance())
        attempt.ended.set()
        self._update(error)

    # Losing one

    def _changed(self, link: Link) -> None:
        reason = link.closed_because
        made_at = self._made_at.pop(link, None)
        if made_at is not None and not self._closing.is_set():
            if reason is not None:  # and not only asked to go elsewhere
                now = trio.current_time()
                self._backoff.lost(now=now, lasted=now - made_at, chance=self._chance())
            self._failure = (reason or self._failure) if self._pause_left > 0 else None
        self._update(reason)

    # Being looked at

    def _update(self, reason: Exception | None = None) -> None:
        state = self._judge()
        if state is not self.state:
            self.state = state
            self._on_state(
                StateChange(address=self.address, state=state, reason=None if reason is None else str(reason))
            )

    def _judge(self) -> ChannelState:
        if self._closing.is_set():
            return ChannelState.CLOSED
        if self._made_at:
            return ChannelState.READY
        if self._attempt is not None:
            return ChannelState.CONNECTING
        return ChannelState.IDLE if self._failure is None else ChannelState.BACKOFF

    def _no_answer(self) -> LinkError:
        limit = self._settings.connect_timeout
        return LinkError(f"cannot connect to {self.address}: no answer within {limit:g} s")

    def _was_closed(self) -> LinkError:
        return LinkError(f"the channel to {self.address} was closed")


class _Attempt:
    """One attempt to make a link. `error` is why there is none; `cancelled` until there is another reason."""

    def __init__(self, cancelled: LinkError) -> None:
        self.cancelled = cancelled
        self.error: Exception | None = cancelled
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self.link: Link | None = None

    def check(self, *, wait_for_ready: bool) -> None:
        """Raise why no call can use the new link; return when it is only full, or when there may be a better one."""
        error = self.error or (self.link.closed_because if self.link is not None else None)
        if isinstance(error, LinkError):
            if not wait_for_ready:
                # Several tasks raise it: each gets its own, since raising one writes to it.
                raise LinkError(error.message) from error
        elif error is not None:
            raise error
