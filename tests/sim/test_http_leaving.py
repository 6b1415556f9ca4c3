"""An HTTP client that hangs up, in every phase and both modes, against a whole cluster on virtual time."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio

from trio_router.engine.settings import Faults
from trio_router.front.app import HttpFront
from trio_router.rpc.transport import Transport
from trio_router.testing import Cluster, open_cluster
from trio_router.text.tokenizer import Tokenizer


class FixedText:
    """The cluster's tokenizer, as the front asks for it."""

    ready = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    async def get(self, model: str) -> Tokenizer:
        return self.tokenizer


@asynccontextmanager
async def open_front(**cluster_args) -> AsyncIterator[tuple[Cluster, str]]:
    async with open_cluster(**cluster_args) as cluster, trio.open_nursery() as nursery:
        listener = cluster.network.listen("http:1")
        front = HttpFront(cluster.router, FixedText(cluster.model.tokenizer))
        await nursery.start(front.serve, listener)
        yield cluster, listener.address
        nursery.cancel_scope.cancel()


def chat(*, stream: bool, max_tokens: int = 300) -> bytes:
    body = msgspec.json.encode(
        {
            "model": "tiny-english",
            "messages": [{"role": "user", "content": "Tell me about the harbour."}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": stream,
            "ignore_eos": True,
        }
    )
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def read_until(transport: Transport, marker: bytes) -> bytes:
    received = b""
    while marker not in received:
        await transport.wait_readable()
        piece = transport.recv_nowait(65_536)
        assert piece != b"", received
        received += piece or b""
    return received


def in_prefill(cluster: Cluster) -> bool:
    return cluster.prefill[0].counters.generates == 1


def before_the_first_frame(cluster: Cluster) -> bool:
    return bool(cluster.decode[0].engine.core.pulling)


def while_streaming(cluster: Cluster) -> bool:
    return cluster.decode[0].counters.generated_tokens > 20


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "not streaming"])
@pytest.mark.parametrize("phase", [in_prefill, before_the_first_frame, while_streaming])
async def test_case_c4_a_client_that_hangs_up_leaves_nothing_in_any_phase_or_mode(autojump_clock, phase, stream):
    async with open_front() as (cluster, address):
        if phase is in_prefill:
            cluster.prefill[0].faults = Faults(hold_prefill=True)
        if phase is before_the_first_frame:
            cluster.decode[0].faults = Faults(hold_pull=True)
        client = await cluster.network.dial(address)
        client.send_nowait(chat(stream=stream))
        with trio.fail_after(30):
            while not phase(cluster):  # noqa: ASYNC110  # looks at a foreign object, which has no event for this
                await trio.sleep(0.001)
        client.close()
        await trio.sleep(0.01)
        assert cluster.router.in_flight == 0, "the request must end at once, whatever its legs still need"
        await trio.sleep(0.2)  # a prefill that ended by itself before this would not be aborted
        for worker in cluster.workers:
            worker.faults = Faults()
        await trio.sleep(1)
        assert cluster.leaks() == []
        assert sum(worker.counters.aborts for worker in cluster.workers) == 1
        assert [record.outcome.value for record in cluster.recorder.records] == ["client_left"]


async def test_a_client_that_hangs_up_while_waiting_for_a_worker_is_noticed(autojump_clock):
    async with open_front() as (cluster, address):
        for worker in cluster.workers:
            worker.faults = Faults(raise_rate=1.0)
        client = await cluster.network.dial(address)
        client.send_nowait(chat(stream=True))
        await trio.sleep(0.06)  # the first attempt has failed, the second waits for its turn
        client.close()
        await trio.sleep(0.001)
        assert cluster.router.in_flight == 0
        assert [record.outcome.value for record in cluster.recorder.records] == ["client_left"]


async def test_case_c1_a_stream_over_http_is_the_text_of_a_plain_worker(autojump_clock):
    async with open_front() as (cluster, address), open_front(prefill=0, decode=0, plain=1) as (plain, other):
        texts = []
        for which, where in ((cluster, address), (plain, other)):
            client = await which.network.dial(where)
            client.send_nowait(chat(stream=True, max_tokens=40))
            received = await read_until(client, b"data: [DONE]")
            events = re.findall(rb"data: (\{.*?\})\n\n", received)
            pieces = [msgspec.json.decode(event)["choices"][0]["delta"].get("content") or "" for event in events]
            texts.append("".join(pieces))
            client.close()
        assert texts[0] == texts[1]
        assert len(texts[0]) > 40


async def test_both_modes_give_the_same_text_and_the_usage_is_right(autojump_clock):
    async with open_front() as (cluster, address):
        client = await cluster.network.dial(address)
        client.send_nowait(chat(stream=False, max_tokens=12))
        received = await read_until(client, b"}}")
        answer = msgspec.json.decode(received[received.index(b"\r\n\r\n") + 4 :])
        assert answer["usage"]["completion_tokens"] == 12
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["choices"][0]["message"]["content"]
        await trio.sleep(0.5)
        assert cluster.leaks() == []
