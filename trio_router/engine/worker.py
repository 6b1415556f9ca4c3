"""Opens a reference worker: one engine, its gRPC server and its side channel, on listeners it is given.

It binds nothing itself, so it runs on sockets and on memory links alike, and on any clock trio has.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import trio

from ..offload import Offload, Threads
from ..rpc.endpoint import dial
from ..rpc.server import Server
from ..rpc.transport import Dialer, Listener
from ..scopes import plain_errors
from .core import Core
from .counters import Counters
from .ledger import Pin
from .model import VISION, Model, load_model
from .scheduler import Engine
from .servicer import Servicer
from .settings import Faults, WorkerSettings
from .vision.expansion import Anchors
from .vision.fetch import Fetcher, MediaFetcher
from .vision.processor import DECODING_THREADS, MediaProcessor


class Worker:
    """A running reference worker, from the side of whoever started it. Made by `open_worker`."""

    def __init__(
        self, settings: WorkerSettings, *, address: str, transfer_address: str, engine: Engine, server: Server
    ) -> None:
        self._server = server
        self._served = trio.Event()
        self.settings = settings
        self.address = address
        """Where its gRPC services are."""
        self.transfer_address = transfer_address
        """Where other workers pull from it."""
        self.engine = engine

    def __repr__(self) -> str:
        return f"<Worker {self.settings.name} {self.settings.role} at {self.address} {self.engine!r}>"

    @property
    def engine_id(self) -> str:
        return self.engine.core.engine_id

    @property
    def counters(self) -> Counters:
        """Counts since it started; the record itself, so it goes on changing."""
        return self.engine.core.counters

    @property
    def ledger(self) -> Mapping[str, Pin]:
        """Handoffs it holds blocks for, by internal request id."""
        return self.engine.core.ledger.pins

    @property
    def faults(self) -> Faults:
        """What is wrong with it now; assign another record to change that."""
        return self.engine.faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        self.engine.set_faults(faults)

    async def drain(self) -> None:
        """Take no new calls, and return when those under way have ended. Put a timeout around it.

        Handoffs may still be pinned then; pulls are served until the block is left.
        """
        self._server.drain()
        await self._served.wait()

    async def _serve(self, listener: Listener, *, task_status: trio.TaskStatus[None]) -> None:
        await self._server.serve(listener, task_status=task_status)
        self._served.set()

    def kill_engine(self) -> None:
        """The engine dies as of now; the service goes on and says so."""
        self.engine.kill()


@asynccontextmanager
async def open_worker(
    settings: WorkerSettings,
    *,
    listener: Listener,
    transfer_listener: Listener,
    dialer: Dialer = dial,
    model: Model | None = None,
    fetcher: Fetcher | None = None,
    offload: Offload | None = None,
) -> AsyncIterator[Worker]:
    """Serve until the block is left; calls under way are then cancelled and both listeners closed.

    Handoffs name `transfer_listener.address`, so other workers must be able to dial it as it is (not 0.0.0.0). `dialer`
    reaches their side channels, and origins of media. `model` defaults to the one in the package that the settings ask
    for, `fetcher` of media to one that asks their origins, `offload` of decoding to two threads.
    """
    # Not a secret: the seed makes a run repeatable, the name keeps two workers of one seed apart.
    rng = random.Random(f"{settings.seed}/{settings.name}")  # noqa: S311
    model = model or load_model(over=VISION if settings.media.sees else None)
    offload = offload or Threads(DECODING_THREADS)
    core = Core(
        settings,
        language=model.language,
        engine_id=settings.engine_id or f"{settings.name}-{rng.getrandbits(48):012x}",
        transfer_address=transfer_listener.address,
        draw=rng.random,
    )
    engine = Engine(core, dialer=dialer, draw=rng.random)
    media = MediaProcessor(
        settings.media,
        fetcher=fetcher or MediaFetcher(settings.media, dialer=dialer, offload=offload),
        offload=offload,
        counters=core.counters,
        anchors=Anchors.of(model.config),
        encode=model.tokenizer.encode,
    )
    server = Servicer(engine, model=model, media=media, rng=rng).server()
    worker = Worker(
        settings,
        address=listener.address,
        transfer_address=transfer_listener.address,
        engine=engine,
        server=server,
    )
    try:
        with plain_errors():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.run, transfer_listener, name=f"engine of {settings.name}")
                await nursery.start(worker._serve, listener)
                yield worker
                nursery.cancel_scope.cancel()
    finally:
        listener.close()
        transfer_listener.close()
