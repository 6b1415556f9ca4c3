"""A router in front of workers that speak TLS, plainly, or on a UNIX socket: the worker's URL decides."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio

from trio_router.dispatch.router import RouterSettings, open_router
from trio_router.engine.settings import WorkerSettings
from trio_router.engine.worker import open_worker
from trio_router.errors import ConfigError
from trio_router.fleet.worker import WorkerRole, WorkerSpec
from trio_router.protocol.messages import GenerateRequest, SamplingParams, TokenizedInput
from trio_router.rpc.channel import ChannelSettings
from trio_router.rpc.memory import MemoryNetwork
from trio_router.rpc.tls import ClientTls, ServerTls

PLACES = {"prefill": "grpcs://localhost:1", "decode": "unix:/run/decode"}
ROLES = {"prefill": WorkerRole.PREFILL, "decode": WorkerRole.DECODE}


@asynccontextmanager
async def cluster(pair, tls: ClientTls | None):
    """A prefill worker behind TLS, a decode worker that is not, and a router that trusts as `tls` says."""
    network = MemoryNetwork()
    specs = tuple(WorkerSpec(url=url, role=ROLES[role]) for role, url in PLACES.items())
    async with AsyncExitStack() as stack:
        for spec, role in zip(specs, PLACES, strict=True):
            listener = network.listen(spec.address)
            opened = open_worker(
                WorkerSettings(name=role, role=role),
                listener=ServerTls(**pair._asdict()).listen(listener) if spec.tls else listener,
                transfer_listener=network.listen("transfer:0"),
                dialer=network.dial,
            )
            await stack.enter_async_context(opened)
        settings = RouterSettings(workers=specs, channel=ChannelSettings(tls=tls))
        yield await stack.enter_async_context(open_router(settings, dialer=network.dial))


async def test_a_pair_of_which_one_speaks_tls(server_pair, authority, autojump_clock):
    request = GenerateRequest(
        tokenized=TokenizedInput(input_ids=list(range(40))),
        sampling_params=SamplingParams(max_tokens=4, ignore_eos=True),
        stream=True,
    )
    async with cluster(server_pair, ClientTls(ca_file=authority.ca_file)) as router:
        await router.wait_ready()
        async with router.generate(request) as stream:
            frames = [frame async for frame in stream]
    assert frames[-1].is_complete


async def test_a_worker_that_is_not_trusted_is_not_ready_and_says_why(server_pair, stranger, autojump_clock):
    async with cluster(server_pair, ClientTls(ca_file=stranger.ca_file)) as router:
        await trio.sleep(5)
        prefill, decode = router.registry.workers
        assert decode.ready
        assert not prefill.ready
        assert "its certificate comes from an authority that is not trusted here" in prefill.trouble


async def test_without_settings_the_system_authorities_are_asked(server_pair, autojump_clock):
    async with cluster(server_pair, None) as router:
        await trio.sleep(5)
        assert "not trusted here" in router.registry.workers[0].trouble


@pytest.mark.parametrize(
    ("url", "told"),
    [("grpcs://x:1", r"missing\.pem: No such file"), ("grpc://x:1", "no worker's URL begins with grpcs")],
)
def test_settings_that_cannot_work_are_told_before_anything_is_dialed(tmp_path, url, told):
    tls = ClientTls(ca_file=tmp_path / "missing.pem")
    workers = (WorkerSpec(url=url, role=WorkerRole.PLAIN),)
    with pytest.raises(ConfigError, match=told):
        RouterSettings(workers=workers, channel=ChannelSettings(tls=tls)).validate()
