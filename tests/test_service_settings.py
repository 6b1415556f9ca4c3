"""Settings that a router process cannot serve by: what it says, and that it opened nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from trio_router.dispatch.router import RouterSettings
from trio_router.errors import ConfigError, LinkError
from trio_router.fleet.worker import WorkerRole, WorkerSpec
from trio_router.rpc.memory import MemoryNetwork
from trio_router.service import (
    open_service,
)
from trio_router.settings import ListenSettings, ServiceSettings, TextSettings
from trio_router.text.bundle import BadBundle

HTTP = "router:30000"
LISTEN = ListenSettings(host="router", prometheus_host="metrics")


@pytest.fixture
async def network() -> MemoryNetwork:
    return MemoryNetwork()


class TestWrongSettings:
    async def test_a_port_that_is_taken_names_its_setting(self, network, autojump_clock):
        async def listen(host: str, port: int) -> Any:
            if port == LISTEN.grpc_port:
                raise OSError(98, "Address already in use")
            return network.listen(f"{host}:{port}")

        specs = (WorkerSpec(url="grpc://w:1", role=WorkerRole.PLAIN),)
        settings = ServiceSettings(router=RouterSettings(workers=specs), listen=LISTEN)
        with pytest.raises(ConfigError, match="grpc_port: cannot listen on router:30001: Address already in use"):
            async with open_service(settings, listen=listen, dialer=network.dial):
                pass
        # What had been opened before is closed again.
        with pytest.raises(LinkError, match="nobody listens"):
            await network.dial(HTTP)

    async def test_own_files_that_cannot_be_used_are_told_before_any_worker_is_asked(
        self, network, autojump_clock, tmp_path
    ):
        dialled = []

        async def dial(url: str) -> Any:
            dialled.append(url)
            raise LinkError("nobody there")

        async def slow(work: Callable[[], Any]) -> Any:
            await trio.sleep(1)
            return work()

        async def listen(host: str, port: int) -> Any:
            return network.listen(f"{host}:{port}")

        specs = (WorkerSpec(url="grpc://w:1", role=WorkerRole.PLAIN),)
        settings = ServiceSettings(
            router=RouterSettings(workers=specs), listen=LISTEN, text=TextSettings(tokenizer_path=tmp_path)
        )
        with pytest.raises(BadBundle, match="No tokenizer files found"):
            async with open_service(settings, listen=listen, dialer=dial, offload=slow):
                raise AssertionError("it serves")
        assert not dialled

    async def test_a_fleet_that_cannot_work_opens_nothing(self, network, autojump_clock):
        async def listen(host: str, port: int) -> Any:
            raise AssertionError("opened a listener for settings that cannot work")

        with pytest.raises(ConfigError, match="no workers"):
            async with open_service(ServiceSettings(router=RouterSettings()), listen=listen):
                pass
