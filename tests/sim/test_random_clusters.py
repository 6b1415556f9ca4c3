"""Seeded whole-cluster runs: clients that come, wait and leave, workers that fail; afterwards nothing is left.

A failure prints its seed; the same seed runs the same way again.
"""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import trio

from trio_router.engine.settings import Faults, WorkerSettings
from trio_router.errors import RouterError
from trio_router.testing import Cluster, collect, open_cluster, run_simulation

REQUESTS = 60
FAULTS = [
    Faults(),
    Faults(),
    Faults(error_rate=0.3),
    Faults(load_error_rate=0.5),
    Faults(raise_rate=0.3),
    Faults(refuse_admission=True),
    Faults(drop_handoff=True),
    Faults(first_frame_delay_seconds=0.3),
    Faults(hold_prefill=True),
    Faults(hold_pull=True),
    Faults(hang=True),
]


async def client(cluster: Cluster, rng: random.Random, answers: dict[str, list[int]]) -> None:
    prompt = f"Prompt {rng.randrange(20)} about the weather in the mountains"
    patience = rng.choice([0.001, 0.01, 0.05, 0.2, 30.0, 30.0, 30.0])
    request = cluster.request(prompt, max_tokens=rng.randrange(1, 20), n=rng.choice([1, 1, 1, 1, 2]))
    request.sampling_params.temperature = 0.5  # engines refuse several greedy samples
    request.sampling_params.seed = 1
    await trio.sleep(rng.random() * 2)
    with trio.move_on_after(patience):
        try:
            answers[f"{request.request_id} {prompt}"] = await collect(cluster.router, request)
        except RouterError as exc:
            answers[f"{request.request_id} {prompt} {exc.error_code}"] = []


async def aborter(cluster: Cluster, rng: random.Random) -> None:
    """A client that aborts requests by their ids, its own and others'."""
    for _ in range(15):
        await trio.sleep(rng.random() * 0.3)
        names = [f"request-{rng.randrange(1, REQUESTS)}" for _ in range(3)]
        await cluster.router.abort(names)


async def mischief(cluster: Cluster, rng: random.Random) -> None:
    for _ in range(12):
        await trio.sleep(rng.random() * 0.4)
        rng.choice(cluster.workers).faults = rng.choice(FAULTS)
    for worker in cluster.workers:
        worker.faults = Faults()


async def scenario(rng: random.Random, connector: str = "nixl") -> tuple[list[str], list[str], int]:
    worker = WorkerSettings(
        name="template", inter_token_seconds=0.004, max_num_seqs=8, num_blocks=1024, lease_seconds=30.0
    )
    async with open_cluster(prefill=2, decode=3, worker=worker, connector=connector) as cluster:
        answers: dict[str, list[int]] = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mischief, cluster, rng)
            nursery.start_soon(aborter, cluster, rng)
            for _ in range(REQUESTS):
                nursery.start_soon(client, cluster, rng, answers)
        # A lease that outlived its janitor's bound still ends by itself; nothing is left after that.
        await trio.sleep(40)
        trace = [
            f"{record.request_id} {record.outcome.value} {record.ended_at:.6f}" for record in cluster.recorder.records
        ]
        trace += sorted(f"{name}: {tokens}" for name, tokens in answers.items())
        excess = sum(worker.counters.lease_expired - worker.counters.failed_pulls for worker in cluster.workers)
        leaks = [leak for leak in cluster.leaks() if "leases expired" not in leak]
        assert await collect(cluster.router, cluster.request()), "the fleet must still serve"
        assert len(cluster.recorder.records) == REQUESTS + 1
        pinned = sum(worker.counters.pinned for worker in cluster.prefill)
        told = len(cluster.recorder.handoffs)
        # A worker that drops what it should push says nothing of it: its transfer was promised all the same.
        assert told == pinned if connector == "nixl" else told >= pinned, "every handoff is told of once (I3)"
        return leaks, trace, excess


@pytest.mark.parametrize(
    ("connector", "seed"), [*(("nixl", seed) for seed in range(12)), *(("mooncake", seed) for seed in range(6))]
)
def test_i8_whatever_happens_everything_returns_to_rest(connector, seed):
    leaks, _, excess = run_simulation(lambda rng: scenario(rng, connector), seed=seed)
    assert leaks == [], f"seed {seed}"
    # Only a handoff that may have been consumed, whose load failed half-way, may be left to its lease (I3).
    assert excess <= 0, f"seed {seed}"


SCRIPT = """
import importlib.util, logging, sys
logging.disable(logging.CRITICAL)
spec = importlib.util.spec_from_file_location("scenario", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from trio_router.testing import run_simulation
print("\\n".join(run_simulation(module.scenario, seed=7)[1]))
"""


def test_one_seed_runs_the_same_way_in_every_process():
    """The canary for trio's private switches that the order of tasks depends on."""
    runs = [
        subprocess.run([sys.executable, "-c", SCRIPT, __file__], capture_output=True, text=True, timeout=60, check=True)
        for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stdout.count("\n") > REQUESTS
