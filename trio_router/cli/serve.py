"""`trio-router serve`: the service as a process, what it prints, and how signals end it."""

from __future__ import annotations

import logging
import signal
from collections.abc import AsyncIterator, Callable
from typing import Final

import trio

from ..service import Addresses, Service, fleet, open_service
from ..settings import ServiceSettings

PATIENCE: Final = 10.0
"""Seconds without being ready after which the log says what is missing, again and again."""
_log: Final = logging.getLogger(__name__)


async def serve(settings: ServiceSettings, *, say: Callable[[str], None]) -> None:
    """Run until SIGINT or SIGTERM, then drain; a second signal ends everything at once.

    `say` gets one line for each address, and one that begins with "ready" when a request could be served.
    """
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with open_service(settings) as service, trio.open_nursery() as nursery:
            for line in _listening(service.addresses):
                say(line)
            nursery.start_soon(say_when_ready, service, say)
            nursery.start_soon(_obey, signals, service, settings)
            await service.wait_ended()
            nursery.cancel_scope.cancel()


def _listening(addresses: Addresses) -> list[str]:
    return [
        f"listening on http://{addresses.http} (OpenAI API)",
        f"listening on grpc://{addresses.grpc} (gRPC)",
        f"listening on http://{addresses.metrics}/metrics (metrics)",
    ]


async def say_when_ready(service: Service, say: Callable[[str], None]) -> None:
    """Say so once; until then, log now and again what is missing."""
    while not await _ready_within(service, PATIENCE):
        missing = [
            f"{worker.spec.role} worker {worker.name} ({worker.trouble or 'no answer yet'})"
            for worker in service.router.registry.workers
            if not worker.ready
        ]
        _log.warning("not ready yet, waiting for %s", ", ".join(missing) or "the workers' tokenizer")
    states = fleet(service.router)
    roles = {state.role: sum(other.role == state.role and other.ready for other in states) for state in states}
    workers = " and ".join(f"{count} {role}" for role, count in roles.items())
    say(f"ready: {', '.join(service.router.models())} on {workers} workers")


async def _ready_within(service: Service, seconds: float) -> bool:
    with trio.move_on_after(seconds):
        await service.wait_ready()
        return True
    return False


async def _obey(signals: AsyncIterator[int], service: Service, settings: ServiceSettings) -> None:
    settle, grace = settings.shutdown_settle, settings.shutdown_grace
    told = False
    async for number in signals:
        name = signal.Signals(number).name
        if told:
            _log.warning("%s again: ending everything now", name)
            service.stop()
        else:
            _log.info(
                "%s: refusing new requests in %g s, then waiting at most %g s for those in flight (now %d)",
                name,
                settle,
                grace,
                service.router.in_flight,
            )
            service.drain(grace=grace, settle=settle)
        told = True
