"""A router and reference workers on memory links: the real code of all of them, only the wire and the clock
replaced.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

from ..dispatch.router import Router, RouterSettings
from ..engine.model import VISION, Model, load_model
from ..engine.settings import Connector, WorkerSettings
from ..engine.vision.fetch import Fetcher
from ..engine.vision.settings import MediaSettings
from ..engine.worker import Worker, open_worker
from ..fleet.worker import WorkerRole, WorkerSpec
from ..offload import inline
from ..protocol.messages import (
    GenerateRequest,
    GenerateResponse,
    MediaRef,
    MediaRefs,
    SamplingParams,
    TokenizedInput,
)
from ..rpc.memory import MemoryNetwork
from .origin import anchors_of
from .recorder import Recorder, open_counted_router, router_leaks, said

_ROLES = {"prefill": WorkerRole.PREFILL, "decode": WorkerRole.DECODE, "plain": WorkerRole.PLAIN}


@dataclass(slots=True, kw_only=True)
class Cluster:
    """Everything a test looks at."""

    router: Router
    network: MemoryNetwork
    workers: list[Worker]
    recorder: Recorder
    model: Model
    _names: Callable[[], str] = field(repr=False)

    @property
    def prefill(self) -> list[Worker]:
        """The prefill workers, in order."""
        return [worker for worker in self.workers if worker.settings.role == "prefill"]

    @property
    def decode(self) -> list[Worker]:
        """The decode workers, in order."""
        return [worker for worker in self.workers if worker.settings.role == "decode"]

    def request(
        self,
        text: str = "Tell me about the harbour.",
        *,
        max_tokens: int = 16,
        n: int = 1,
        media: Sequence[MediaRef] = (),
    ) -> GenerateRequest:
        """A greedy request for a prompt; an anchor for each of `media` comes before the text."""
        text = anchors_of(media) + text
        ids = self.model.tokenizer.encode(text)
        request = GenerateRequest(
            request_id=self._names(),
            tokenized=TokenizedInput(original_text=text, input_ids=ids),
            sampling_params=SamplingParams(temperature=0.0, max_tokens=max_tokens, n=n, ignore_eos=True),
            stream=True,
        )
        if media:
            request.media_refs = MediaRefs(items=list(media))
        return request

    def leaks(self) -> list[str]:
        """What has not returned to rest (invariant I8). Empty after quiet, whatever was cancelled where."""
        counts = router_leaks(self.router)
        for worker in self.workers:
            core, name = worker.engine.core, worker.settings.name
            counts[f"handoffs pinned on {name}"] = len(worker.ledger)
            counts[f"sequences on {name}"] = len(core.waiting) + len(core.pulling) + len(core.running)
            counts[f"leases expired on {name}"] = worker.counters.lease_expired
        return said(counts)


async def collect(router: Router, request: GenerateRequest | bytes) -> list[int]:
    """Run a request to its end and return the token ids of choice 0."""
    token_ids: list[int] = []
    async with router.generate(request) as stream:
        async for frame in stream:
            if not frame.is_complete:
                response: GenerateResponse = frame.message()
                if response.chunk.index == 0:
                    token_ids += response.chunk.token_ids
    return token_ids


@asynccontextmanager
async def open_cluster(
    *,
    prefill: int = 1,
    decode: int = 1,
    plain: int = 0,
    connector: str | None = None,
    dp_size: int | None = None,
    worker: WorkerSettings | None = None,
    router: RouterSettings | None = None,
    network: MemoryNetwork | None = None,
    media: MediaSettings | Mapping[str, MediaSettings] | None = None,
    fetcher: Fetcher | None = None,
) -> AsyncIterator[Cluster]:
    """A cluster whose every worker is routable. `worker` and `router` are templates: names, roles and the worker list
    are filled in. `connector` (nixl, mooncake, store or none) and `dp_size` are every worker's, whatever the template
    has. `media` are every worker's, or those of the workers named or of the roles: with a processor the cluster serves
    the model that sees, and `fetcher` has what references name (see `testing.origin`); without one, origins are looked
    for on the network.
    """
    network = network or MemoryNetwork()
    template = worker or WorkerSettings(name="template")
    template = replace(
        template,
        connector=template.connector if connector is None else connector,
        dp_size=template.dp_size if dp_size is None else dp_size,
    )
    told = media if isinstance(media, Mapping) else dict.fromkeys(_ROLES, media or template.media)
    sees = any(settings.sees for settings in told.values())
    model = load_model(over=VISION if sees else None)
    recorder = Recorder()
    ids = itertools.count(1)
    async with AsyncExitStack() as stack:
        workers: list[Worker] = []
        for role, count in (("prefill", prefill), ("decode", decode), ("plain", plain)):
            for number in range(count):
                name = f"{role}-{number}"
                own = told.get(name) or told.get(role) or template.media
                opened = open_worker(
                    replace(template, name=name, role=role, media=own),
                    listener=network.listen(f"{name}:1"),
                    transfer_listener=network.listen(f"{name}:2"),
                    dialer=network.dial,
                    model=model,
                    fetcher=fetcher,
                    offload=inline,
                )
                workers.append(await stack.enter_async_context(opened))
        settings_of_router = replace(router or RouterSettings(), workers=tuple(map(_spec, workers)))
        opened_router = open_counted_router(settings_of_router, network=network, recorder=recorder)
        running = await stack.enter_async_context(opened_router)
        # All of them, not one for each leg: tests count on the first turn being the first worker's.
        await running.registry.wait_ready(every_worker=True)
        yield Cluster(
            router=running,
            network=network,
            workers=workers,
            recorder=recorder,
            model=model,
            _names=lambda: f"request-{next(ids)}",
        )


def _spec(worker: Worker) -> WorkerSpec:
    """How an operator would tell the router of it: a worker that pushes is found by its transfer port."""
    pushes = worker.settings.role == "prefill" and worker.settings.kv_connector is Connector.MOONCAKE
    return WorkerSpec(
        url=f"grpc://{worker.address}",
        role=_ROLES[str(worker.settings.role)],
        bootstrap_port=int(worker.transfer_address.rpartition(":")[2]) if pushes else None,
    )
