"""One response as a stream of server-sent events: begun by the first event, shared by the sinks that feed it.

It must not know what is in an event.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from ..exchange import BodyWriter, Exchange
from ..wire import Headers

SSE_HEADERS: Final[Headers] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
)


class Feeder(Protocol):
    """Has more to say once the client has caught up."""

    def flush(self) -> bool:
        """Send what was held back; False when the client is behind again."""


class EventStream:
    """Until the first `send` nothing has gone out, and the exchange can still be answered with an error status."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._writer: BodyWriter | None = None
        self._feeders: dict[Feeder, Callable[[], None]] = {}
        # The client is behind, or gone. An attribute, since it is asked for every token.
        self.full = False

    @property
    def begun(self) -> bool:
        """Events have gone out."""
        return self._writer is not None

    def attach(self, feeder: Feeder, *, resume: Callable[[], None]) -> None:
        """When the client has caught up, have `feeder` flush and then call `resume`, until `detach`."""
        self._feeders[feeder] = resume

    def detach(self, feeder: Feeder) -> None:
        """The feeder's source has ended; what the feeder still holds is flushed by `finish`, if not before."""
        self._feeders[feeder] = _nothing

    def send(self, events: bytes) -> None:
        """Write whole events."""
        self.full = not (self._writer or self._begin()).write_nowait(events)

    async def finish(self, tail: bytes) -> None:
        """Send what feeders still hold, then `tail`, and wait until the client has it. Raises ClientGone."""
        writer = self._writer or self._begin()
        for feeder in self._feeders:
            while not feeder.flush():
                await writer.drain()
        await writer.finish(tail)

    def _begin(self) -> BodyWriter:
        self._writer = self._exchange.start_stream(200, headers=SSE_HEADERS)
        self._writer.on_drained(self._caught_up)
        return self._writer

    def _caught_up(self) -> None:
        self.full = False
        for feeder, resume in list(self._feeders.items()):
            if feeder.flush():
                resume()


def _nothing() -> None:
    return None
