"""What `serve` says while it waits, and when it is ready."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import trio

from trio_router.cli.serve import PATIENCE, say_when_ready
from trio_router.fleet.worker import WorkerRole
from trio_router.policy.breaker import Breaker, BreakerSettings


class Service:
    """Ready when told so."""

    def __init__(self) -> None:
        self.is_ready = trio.Event()
        self.workers = [worker(WorkerRole.PREFILL, "p:1"), worker(WorkerRole.DECODE, "d:1")]
        self.router = SimpleNamespace(registry=SimpleNamespace(workers=self.workers), models=lambda: ["tiny"])

    async def wait_ready(self) -> None:
        await self.is_ready.wait()


def worker(role: WorkerRole, name: str) -> Any:
    return SimpleNamespace(
        name=name,
        spec=SimpleNamespace(role=role),
        facts=None,
        ready=False,
        in_flight=0,
        tokens_in_flight=0,
        trouble=None,
        breaker=Breaker(BreakerSettings()),
    )


async def test_what_is_missing_is_logged_again_and_again_and_ready_said_once(autojump_clock, caplog):
    service: Any = Service()
    said: list[str] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(say_when_ready, service, said.append)
        service.workers[1].trouble = "connection refused"
        await trio.sleep(PATIENCE * 1.5)
        service.workers[0].ready = True
        await trio.sleep(PATIENCE)
        service.workers[1].ready = True
        await trio.sleep(PATIENCE)
        assert said == []
        service.is_ready.set()
    assert [entry.getMessage() for entry in caplog.records if entry.levelno == logging.WARNING] == [
        "not ready yet, waiting for prefill worker p:1 (no answer yet), decode worker d:1 (connection refused)",
        "not ready yet, waiting for decode worker d:1 (connection refused)",
        "not ready yet, waiting for the workers' tokenizer",
    ]
    assert said == ["ready: tiny on 1 prefill and 1 decode workers"]
