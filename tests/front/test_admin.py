"""The metrics listener."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter

from trio_router.front.admin import AdminFront


@pytest.fixture
def connect(launch):
    async def connect_to(registry: CollectorRegistry):
        front = AdminFront(registry)
        return await (await launch(front, server=front.server)).connect()

    return connect_to


async def test_metrics_are_told_in_prometheus_text(autojump_clock, connect) -> None:
    registry = CollectorRegistry()
    Counter("smg_things", "Things.", ["kind"], registry=registry).labels("good").inc(3)
    client = await connect(registry)

    response = await client.request("GET", "/metrics")

    assert response.status == 200
    assert response.header("content-type").startswith("text/plain; version=")
    assert b'smg_things_total{kind="good"} 3.0\n' in response.body


async def test_it_lives(autojump_clock, connect) -> None:
    client = await connect(CollectorRegistry())

    assert (await client.request("GET", "/health")).body == b"OK"


async def test_nothing_else_is_served(autojump_clock, connect) -> None:
    client = await connect(CollectorRegistry())

    assert (await client.request("POST", "/v1/chat/completions")).status == 404
    assert (await client.request("POST", "/metrics")).status == 405
