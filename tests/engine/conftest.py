"""A toy language for the engine's pure parts, and a fleet of workers on memory links for the rest."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import betterproto
import pytest
import trio
import trio.testing

from trio_router.engine.core import Core
from trio_router.engine.handoff import NOTHING, Directive
from trio_router.engine.language import Language
from trio_router.engine.sampling import SamplingPlan
from trio_router.engine.sequence import EngineFailure, Finish, Sequence
from trio_router.engine.settings import WorkerSettings
from trio_router.engine.worker import Worker, open_worker
from trio_router.offload import inline
from trio_router.protocol.codec import decode, encode
from trio_router.protocol.messages import GenerateRequest, GenerateResponse, SamplingParams, TokenizedInput
from trio_router.rpc.call import ClientCall
from trio_router.rpc.channel import Channel, open_channel
from trio_router.rpc.memory import MemoryNetwork

EOS = 63
FULL_STOP = 62


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every async test of this directory runs on virtual time, without asking for a clock each."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("trio") is not None:
            item.add_marker(pytest.mark.trio(run=_run_on_virtual_time), append=False)


def _run_on_virtual_time(main: Any, *, clock: Any, instruments: Any) -> Any:
    return trio.run(main, clock=clock or trio.testing.MockClock(autojump_threshold=0), instruments=instruments)


@dataclass
class Listener:
    """An outlet that remembers."""

    token_ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    failure: EngineFailure | None = None

    def put(self, sequence: Sequence, *, token_ids: list[int], finish: Finish | None) -> None:
        assert self.finish is None, "nothing follows the end"
        self.token_ids += token_ids
        self.finish = finish

    def fail(self, reason: EngineFailure) -> None:
        self.failure = reason


def make_language() -> Language:
    """Any of sixty words may follow any other; nothing is rare, so texts of different contexts part at once."""
    rng = random.Random(1)
    words = list(range(60))
    passages = [rng.choices([*words, FULL_STOP], k=400) for _ in range(40)]
    return Language(passages, starters=words, ends={FULL_STOP}, word_starts=range(63), eos_token_id=EOS)


@pytest.fixture(scope="session")
def language() -> Language:
    return make_language()


@pytest.fixture
def make_core(language: Language) -> Callable[..., Core]:
    def make(name: str = "w", **changes: Any) -> Core:
        small = {
            "block_size": 4,
            "num_blocks": 64,
            "max_num_seqs": 8,
            "max_context_length": 128,
            "max_batched_tokens": 32,
        }
        settings = WorkerSettings(name=name, **{"role": "prefill", **small, **changes})
        return Core(
            settings, language=language, engine_id=f"{name}-engine", transfer_address="10.0.0.1:7", draw=lambda: 0.5
        )

    return make


@pytest.fixture
def submit() -> Callable[..., tuple[Sequence, Listener]]:
    ids = itertools.count()

    def do(
        core: Core, prompt: list[int], *, directive: Directive = NOTHING, index: int = 0, seed: int = 0, **plan: Any
    ) -> tuple[Sequence, Listener]:
        listener = Listener()
        number = next(ids)
        sequence = Sequence(
            internal_id=f"r{number}",
            external_id=f"r{number}",
            index=index,
            prompt=prompt,
            plan=SamplingPlan(**{"max_tokens": 8, **plan}),
            outlet=listener,
            context_limit=core.settings.max_context_length,
            eos_token_id=EOS,
            seed=seed,
            directive=directive,
        )
        core.submit(sequence)
        return sequence, listener

    return do


@pytest.fixture
def run() -> Callable[[Core], None]:
    def do(core: Core, *, now: float = 0.0) -> None:
        """Step until nothing moves any more."""
        while True:
            assert not core.admit(now=now), "nothing here pulls"
            step = core.plan(now=now)
            if step is None:
                return
            core.perform(step, now=now)

    return do


GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass
class Answer:
    """A finished Generate stream."""

    frames: list[GenerateResponse]
    times: list[float]

    @property
    def chunks(self) -> list[Any]:
        return [frame.chunk for frame in self.frames if _is(frame, "chunk")]

    @property
    def completes(self) -> list[Any]:
        return [frame.complete for frame in self.frames if _is(frame, "complete")]

    @property
    def complete(self) -> Any:
        (only,) = self.completes
        return only

    @property
    def token_ids(self) -> list[int]:
        """Of the first choice: the chunks of a stream, or all of the one complete."""
        if self.chunks:
            return [token for chunk in self.chunks if chunk.index == 0 for token in chunk.token_ids]
        return list(self.completes[0].output_ids)

    @property
    def kv(self) -> dict[str, Any] | None:
        text = self.complete.kv_transfer_params_json
        return None if text is None else json.loads(text)


def _is(frame: GenerateResponse, kind: str) -> bool:
    return betterproto.which_one_of(frame, "response")[0] == kind


@dataclass
class Fleet:
    """Workers by name, a channel to each, on one memory network and the virtual clock."""

    network: MemoryNetwork
    workers: dict[str, Worker] = field(default_factory=dict)
    channels: dict[str, Channel] = field(default_factory=dict)
    ids: Any = field(default_factory=itertools.count)

    def request(
        self,
        prompt: list[int] | str,
        *,
        kv: Any = None,
        request_id: str | None = None,
        stream: bool = True,
        **sampling: Any,
    ) -> GenerateRequest:
        request = GenerateRequest(
            request_id=request_id or f"req-{next(self.ids)}",
            sampling_params=SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **sampling}),
            stream=stream,
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.tokenized = TokenizedInput(input_ids=prompt)
        if kv is not None:
            request.kv_transfer_params_json = kv if isinstance(kv, str) else json.dumps(kv)
        return request

    async def call(self, name: str, request: GenerateRequest) -> ClientCall:
        return await self.channels[name].call(GENERATE, encode(request))

    async def send(self, name: str, request: GenerateRequest) -> Answer:
        return await self.read(await self.call(name, request))

    async def read(self, call: ClientCall) -> Answer:
        answer = Answer([], [])
        while (data := await call.receive()) is not None:
            answer.frames.append(decode(GenerateResponse, data))
            answer.times.append(trio.current_time())
        return answer

    async def generate(self, name: str, prompt: list[int] | str, **about: Any) -> Answer:
        """Run one request to its end. Raises RpcError when it ends with a status."""
        return await self.send(name, self.request(prompt, **about))

    async def prefill(self, name: str, prompt: list[int], **about: Any) -> dict[str, Any]:
        """The handoff of a prefill leg."""
        answer = await self.generate(name, prompt, kv=PREFILL, stream=False, **{"max_tokens": 1, **about})
        assert answer.kv is not None
        return answer.kv


@pytest.fixture
def open_fleet() -> Callable[..., Any]:
    """Opens workers: names with changes to their settings, and a `fetcher` of media where one is wanted. A name starts
    with p, d or w for its role."""
    roles = {"p": "prefill", "d": "decode", "w": "plain"}

    @asynccontextmanager
    async def do(**workers: dict[str, Any]) -> AsyncIterator[Fleet]:
        fleet = Fleet(MemoryNetwork())
        async with AsyncExitStack() as stack:
            for name, changes in workers.items():
                fetcher = changes.pop("fetcher", None)
                listener, transfer_listener = fleet.network.listen(f"{name}:1"), fleet.network.listen(f"{name}:2")
                fleet.workers[name] = await stack.enter_async_context(
                    open_worker(
                        WorkerSettings(name=name, **{"role": roles[name[0]], **changes}),
                        listener=listener,
                        transfer_listener=transfer_listener,
                        dialer=fleet.network.dial,
                        fetcher=fetcher,
                        offload=inline,
                    )
                )
                fleet.channels[name] = await stack.enter_async_context(
                    open_channel(f"{name}:1", dialer=fleet.network.dial)
                )
            yield fleet

    return do
