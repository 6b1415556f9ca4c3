"""The demo's fleet: reference workers and a router on loopback sockets whose ports the system chooses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import trio

from ..dispatch.router import RouterSettings
from ..engine.model import load_model
from ..engine.settings import Connector, Role, WorkerSettings
from ..engine.worker import Worker, open_worker
from ..fleet.worker import WorkerRole, WorkerSpec
from ..observe.hooks import Observer, RequestRecord
from ..rpc.transport import open_tcp_listener
from ..service import Service, open_service
from ..settings import ListenSettings, ServiceSettings

HOST: Final = "127.0.0.1"
_PAIRS: Final = 2
# Slow enough that a person sees the tokens come and the bars have a length; the protocol runs at its own speed.
_PREFILL_TOKENS_PER_SECOND: Final = 200.0
_INTER_TOKEN_SECONDS: Final = 0.015


class Witness(Observer):
    """Keeps the records of ended requests, how state went between their legs and how their handoffs ended; `ended`
    wakes whoever waits for one.
    """

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.connectors: list[str] = []
        self.handoffs: list[str] = []
        self.ended = trio.Event()

    def request_ended(self, record: RequestRecord) -> None:
        self.records.append(record)
        self.ended.set()

    def pair_dispatched(self, *, connector: str, prefill_seconds: float, handoff_seconds: float) -> None:
        self.connectors.append(connector)

    def handoff_ended(self, *, outcome: str) -> None:
        self.handoffs.append(outcome)


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
async def open_fleet(*, connector: Connector) -> AsyncIterator[Fleet]:
    """Two prefill and two decode workers with that connector and a router in front of them, ready for requests."""
    model = await trio.to_thread.run_sync(load_model)
    witness = Witness()
    async with AsyncExitStack() as stack:
        workers: list[Worker] = []
        for role in (Role.PREFILL, Role.DECODE):
            for number in range(1, _PAIRS + 1):
                settings = WorkerSettings(
                    name=f"{role.value}-{number}",
                    role=role,
                    connector=connector,
                    prefill_tokens_per_second=_PREFILL_TOKENS_PER_SECOND,
                    inter_token_seconds=_INTER_TOKEN_SECONDS,
                )
                opened = open_worker(
                    settings,
                    listener=await open_tcp_listener(HOST, port=0),
                    transfer_listener=await open_tcp_listener(HOST, port=0),
                    model=model,
                )
                workers.append(await stack.enter_async_context(opened))
        service = await stack.enter_async_context(open_service(_settings(workers), observer=witness))
        await service.wait_ready()
        yield Fleet(service=service, workers=tuple(workers), witness=witness)


def _settings(workers: list[Worker]) -> ServiceSettings:
    return ServiceSettings(
        router=RouterSettings(workers=tuple(map(_spec, workers))),
        listen=ListenSettings(host=HOST, port=0, grpc_port=0, prometheus_host=HOST, prometheus_port=0),
    )


def _spec(worker: Worker) -> WorkerSpec:
    """A prefill worker that pushes is found by its transfer port; to one that is pulled from the number is nothing."""
    if worker.settings.role == Role.DECODE:
        return WorkerSpec(url=f"grpc://{worker.address}", role=WorkerRole.DECODE)
    port = int(worker.transfer_address.rpartition(":")[2])
    return WorkerSpec(url=f"grpc://{worker.address}", role=WorkerRole.PREFILL, bootstrap_port=port)
