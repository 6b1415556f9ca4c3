"""The demo's fleet: reference workers and a router on loopback sockets whose ports the system chooses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import trio

from ..dispatch.router import RouterSettings
from ..engine.model import VISION, load_model
from ..engine.settings import Connector, Role, WorkerSettings
from ..engine.vision.fetch import MediaFetcher
from ..engine.vision.settings import MediaSettings as WorkerMediaSettings
from ..engine.vision.settings import Processor
from ..engine.worker import Worker, open_worker
from ..fleet.worker import WorkerRole, WorkerSpec
from ..front.settings import FrontSettings, MediaSettings
from ..media.gate import MediaPolicy
from ..observe.hooks import Observer, RequestRecord
from ..offload import Threads
from ..rpc.transport import dial_tcp, open_tcp_listener
from ..service import Service, open_service
from ..settings import ListenSettings, ServiceSettings
from .pictures import Watch

HOST: Final = "127.0.0.1"
_PAIRS: Final = 2
# Slow enough that a person sees the tokens come and the bars have a length; the protocol runs at its own speed.
_PREFILL_TOKENS_PER_SECOND: Final = 200.0
_INTER_TOKEN_SECONDS: Final = 0.015


@dataclass(frozen=True, slots=True, kw_only=True)
class Eyes:
    """How workers see. One picture may be 16,384 tokens: the model has room for it, and is faster, not to bore."""

    allow_private_hosts: bool = False
    """Whether pictures may be fetched from hosts that are not public."""
    context_length: int = 32_768
    prefill_tokens_per_second: float = 2000.0


class Witness(Observer):
    """Keeps the records of ended requests, how state went between their legs, how their handoffs ended and what became
    of their media; `ended` wakes whoever waits for one. `sizes` are those of the pictures that workers fetched.
    """

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.connectors: list[str] = []
        self.handoffs: list[str] = []
        self.identities: list[str] = []
        self.sizes: list[tuple[int, int]] = []
        self.ended = trio.Event()

    def request_ended(self, record: RequestRecord) -> None:
        self.records.append(record)
        self.ended.set()

    def pair_dispatched(self, *, connector: str, prefill_seconds: float, handoff_seconds: float) -> None:
        self.connectors.append(connector)

    def handoff_ended(self, *, outcome: str) -> None:
        self.handoffs.append(outcome)

    def media_judged(self, *, request_id: str, outcome: str, detail: str | None) -> None:
        self.identities.append(outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Everything that runs."""

    service: Service
    workers: tuple[Worker, ...]
    witness: Witness = field(default_factory=Witness)

    def name_of(self, address: str | None) -> str | None:
        """A worker's name by its address."""
        return next((worker.settings.name for worker in self.workers if worker.address == address), None)

    @property
    def ledger_entries(self) -> int:
        """Handoffs that workers still hold blocks for."""
        return sum(len(worker.ledger) for worker in self.workers)


@asynccontextmanager
async def open_fleet(*, connector: Connector, eyes: Eyes | None = None) -> AsyncIterator[Fleet]:
    """Two prefill and two decode workers with that connector and a router in front of them, ready for requests.

    With `eyes` the workers have a model that takes pictures.
    """
    model = await trio.to_thread.run_sync(lambda: load_model(over=VISION if eyes else None))
    witness = Witness()
    offload = Threads(1)
    async with AsyncExitStack() as stack:
        workers: list[Worker] = []
        for role in (Role.PREFILL, Role.DECODE):
            for number in range(1, _PAIRS + 1):
                settings = _worker(f"{role.value}-{number}", role=role, connector=connector, eyes=eyes)
                fetcher = MediaFetcher(settings.media, dialer=dial_tcp, offload=offload)
                opened = open_worker(
                    settings,
                    listener=await open_tcp_listener(HOST, port=0),
                    transfer_listener=await open_tcp_listener(HOST, port=0),
                    model=model,
                    fetcher=Watch(fetcher, offload=offload, note=witness.sizes.append),
                )
                workers.append(await stack.enter_async_context(opened))
        service = await stack.enter_async_context(open_service(_settings(workers, eyes=eyes), observer=witness))
        await service.wait_ready()
        yield Fleet(service=service, workers=tuple(workers), witness=witness)


def _worker(name: str, *, role: Role, connector: Connector, eyes: Eyes | None) -> WorkerSettings:
    settings = WorkerSettings(
        name=name,
        role=role,
        connector=connector,
        prefill_tokens_per_second=_PREFILL_TOKENS_PER_SECOND,
        inter_token_seconds=_INTER_TOKEN_SECONDS,
    )
    if eyes is None:
        return settings
    return replace(
        settings,
        media=WorkerMediaSettings(processor=Processor.INPROCESS),
        max_context_length=eyes.context_length,
        prefill_tokens_per_second=eyes.prefill_tokens_per_second,
    )


def _settings(workers: list[Worker], *, eyes: Eyes | None) -> ServiceSettings:
    policy = MediaPolicy(allow_private_hosts=eyes is not None and eyes.allow_private_hosts)
    return ServiceSettings(
        front=FrontSettings(media=MediaSettings(policy=policy)),
        router=RouterSettings(workers=tuple(map(_spec, workers))),
        listen=ListenSettings(host=HOST, port=0, grpc_port=0, prometheus_host=HOST, prometheus_port=0),
    )


def _spec(worker: Worker) -> WorkerSpec:
    """A prefill worker that pushes is found by its transfer port; to one that is pulled from the number is nothing."""
    if worker.settings.role == Role.DECODE:
        return WorkerSpec(url=f"grpc://{worker.address}", role=WorkerRole.DECODE)
    port = int(worker.transfer_address.rpartition(":")[2])
    return WorkerSpec(url=f"grpc://{worker.address}", role=WorkerRole.PREFILL, bootstrap_port=port)
