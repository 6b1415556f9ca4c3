"""A request that is over a worker's own message limit: its client's error, and nobody's failure (case G2).

It comes with the status of a worker that is busy, and is told from that by its words only.
"""

from __future__ import annotations

import pytest
import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from trio_router.dispatch.router import RouterSettings
from trio_router.errors import TooLarge
from trio_router.front.respond import grpc_reply, http_reply
from trio_router.http2.settings import Http2Settings
from trio_router.rpc import server as rpc_server
from trio_router.rpc.channel import ChannelSettings
from trio_router.rpc.server import ServerSettings
from trio_router.testing import collect, scripted
from trio_router.testing.scripted import (
    a_request,
    answer,
    chunk,
    complete,
    decode_worker,
    open_scene,
    plain_worker,
    prefill_worker,
)

# As servers say it: of gRPC's C core, without and with their side in front, of grpc-go, of grpc-java, and our own.
SAID = [
    "Received message larger than max (5242880 vs. 4194304)",
    "SERVER: Received message larger than max (5242880 vs. 4194304)",
    "grpc: received message larger than max (5242880 vs. 4194304)",
    "gRPC message exceeds maximum size 4194304: 5242880",
    "gRPC message of 5242880 bytes is over max_message_bytes (4194304)",
]
BUSY = ["worker is saturated: 256 requests are waiting", "Bandwidth exhausted", None]


def exhausted(words: str | None):
    """Takes no request and no release."""

    async def script(call, request):
        raise GRPCError(Status.RESOURCE_EXHAUSTED, words)

    return script


def asked(workers) -> int:
    return sum(len(worker.requests) for worker in workers)


@pytest.fixture
def small_servers(monkeypatch):
    """Have scripted workers take messages of up to 1000 bytes."""
    settings = ServerSettings(http2=Http2Settings(max_message_bytes=1000))
    monkeypatch.setattr(
        scripted, "Server", lambda services, *, raw: rpc_server.Server(services, raw=raw, settings=settings)
    )


class TestRequests:
    @pytest.mark.parametrize("words", SAID)
    async def test_case_g2_one_that_is_over_a_workers_limit_goes_to_no_other(self, autojump_clock, words):
        workers = [plain_worker(exhausted(words), name=name) for name in ("one", "two", "three")]
        async with open_scene(*workers) as scene:
            with pytest.raises(TooLarge) as caught:
                await collect(scene.router, a_request())
            assert asked(workers) == 1
            assert words in caught.value.message
            assert scene.recorder.records[0].error_code == "payload_too_large"
            assert scene.leaks() == []
            http, grpc = http_reply(caught.value), grpc_reply(caught.value)
            assert (http.status, http.code) == (413, "payload_too_large")
            assert (grpc.status, words in grpc.message) == (Status.RESOURCE_EXHAUSTED, True)

    async def test_case_g2_on_the_wire(self, autojump_clock, small_servers):
        worker = plain_worker()
        async with open_scene(worker) as scene:
            request = a_request()
            request.tokenized.original_text = "x" * 1000
            with pytest.raises(TooLarge, match=r"bytes is over max_message_bytes \(1000\)"):
                await collect(scene.router, request)
            assert await collect(scene.router, a_request()) == [7, 8]
            assert len(scene.router.registry.workers[0].client._channel.links) == 1

    async def test_case_g2_it_is_held_against_no_worker(self, autojump_clock):
        workers = [plain_worker(name=name) for name in ("one", "two")]
        async with open_scene(*workers) as scene:
            for worker in workers:
                worker.script = exhausted(SAID[0])
            for number in range(20):
                with pytest.raises(TooLarge):
                    await collect(scene.router, a_request(f"large-{number}"))
            for worker in workers:
                worker.script = answer
                worker.requests.clear()
            for number in range(20):
                assert await collect(scene.router, a_request(f"small-{number}")) == [7, 8]
            assert [len(worker.requests) for worker in workers] == [10, 10]

    async def test_case_g2_of_a_pair_either_leg_may_be_the_one(self, autojump_clock):
        prefill, decode = prefill_worker(exhausted(SAID[0])), decode_worker()
        async with open_scene(prefill, decode) as scene:
            with pytest.raises(TooLarge, match=f"prefill worker {prefill.address}"):
                await collect(scene.router, a_request())
            assert (asked([prefill]), asked([decode])) == (1, 0)
            prefill.script, decode.script = prefill_worker().script, exhausted(SAID[0])
            with pytest.raises(TooLarge, match=f"decode worker {decode.address}"):
                await collect(scene.router, a_request())
            assert asked([prefill]) == 2

    @pytest.mark.parametrize("met", [True, False])
    async def test_i3_what_was_never_looked_at_has_told_no_prefill_worker(self, autojump_clock, met):
        """Neither a leg nor the release after it; another decode worker carries the word."""
        decode = decode_worker(name="small")
        other = decode_worker(name="other")
        async with open_scene(prefill_worker(), decode, other) as scene:
            if met:
                for number in range(2):
                    await collect(scene.router, a_request(f"before-{number}"))
                scene.recorder.handoffs.clear()
            decode.script = exhausted(SAID[0])
            with pytest.raises(TooLarge):
                await collect(scene.router, a_request())
            assert scene.recorder.handoffs == []
            await trio.sleep(2)
            assert scene.recorder.handoffs == ["released"]
            assert len(other.releases) == (1 if met else 2)
            assert scene.leaks() == []


class TestReplies:
    async def test_case_g2_one_that_is_over_the_routers_limit_is_not_asked_for_again(self, autojump_clock):
        """To compute a prompt once more, on every worker, would make the answer no smaller."""

        async def verbose(call, request):
            await call.send(complete(output_ids=list(range(1000))))

        workers = [plain_worker(verbose, name=name) for name in ("one", "two")]
        channel = ChannelSettings(http2=Http2Settings(max_message_bytes=1000))
        async with open_scene(*workers, router=RouterSettings(channel=channel)) as scene:
            with pytest.raises(TooLarge, match=r"max_message_bytes \(1000\)") as caught:
                await collect(scene.router, a_request())
            assert caught.value.error_code == "response_too_large"
            assert asked(workers) == 1

    async def test_case_g2_nor_in_mid_stream_is_it_the_worker_that_fails(self, autojump_clock):
        async def verbose(call, request):
            await call.send(chunk(7))
            await call.send(complete(output_ids=list(range(1000))))

        channel = ChannelSettings(http2=Http2Settings(max_message_bytes=1000))
        async with open_scene(plain_worker(verbose), router=RouterSettings(channel=channel)) as scene:
            with pytest.raises(TooLarge):
                await collect(scene.router, a_request())


@pytest.mark.parametrize("words", BUSY)
async def test_what_a_busy_worker_does_not_take_goes_to_another(autojump_clock, words):
    busy, idle = plain_worker(exhausted(words), name="busy"), plain_worker(name="idle")
    async with open_scene(busy, idle) as scene:
        for number in range(2):
            assert await collect(scene.router, a_request(f"request-{number}")) == [7, 8]
        assert len(busy.requests) == 1
