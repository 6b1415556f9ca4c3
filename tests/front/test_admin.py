"""The metrics listener."""

from __future__ import annotations

import json

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


async def test_pages_are_made_when_they_are_asked_for(autojump_clock, launch) -> None:
    things = [{"age": 1.5}]
    front = AdminFront(CollectorRegistry(), pages={"/debug/things": lambda: things})
    client = await (await launch(front, server=front.server)).connect()
    things.append({"age": 2.0})

    response = await client.request("GET", "/debug/things")

    assert (response.status, response.header("content-type")) == (200, "application/json")
    assert json.loads(response.body) == [{"age": 1.5}, {"age": 2.0}]


async def test_nothing_else_is_served(autojump_clock, connect) -> None:
    client = await connect(CollectorRegistry())

    assert (await client.request("POST", "/v1/chat/completions")).status == 404
    assert (await client.request("POST", "/metrics")).status == 405
