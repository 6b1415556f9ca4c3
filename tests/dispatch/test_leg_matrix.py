"""What each leg carries, byte for byte: every connector with every answer of a prefill worker, in one table.

The expectations are made by a small oracle of literal tags and texts that shares nothing with the code under test but
`edit`, which has tests of its own.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from trio_router.dispatch.retry import RetrySettings
from trio_router.dispatch.router import RouterSettings
from trio_router.errors import HandoffInvalid, PrefillFailed, RouterError, Unsupported
from trio_router.policy.breaker import BreakerSettings
from trio_router.protocol.messages import GenerateRequest, KvTransferParams, SamplingParams, TokenizedInput
from trio_router.protocol.wire import edit, get_string
from trio_router.testing.scripted import (
    PROMPT_TOKENS,
    Scene,
    ScriptedWorker,
    chunk,
    complete,
    decode_worker,
    handoff_params,
    open_scene,
    prefill_worker,
)

HANDOFFS = {
    # Spelled as no JSON library of ours would.
    "present": handoff_params()[:-1] + ',  "odd" :1e2, "Ω": 123456789012345678901234567890}',
    "absent": None,
    "empty object": "{}",
    "do_remote_prefill false": handoff_params(do_remote_prefill=False),
    "invalid": handoff_params(remote_block_ids=[1, 2, 3]),
}
ENDINGS = ("length", "stop", "abort", "error")
KEEP = '{"do_remote_decode":true,"do_remote_prefill":false}'
# A later client's field, and one in the sampling parameters: 1007 and 99, both strings.
LATER = b"\xfa\x3e\x05later"


@dataclass(frozen=True)
class Fleet:
    """A connector as its worker names it, and how many ranks it says it has when no rank is pinned."""

    name: str
    dp_size: int = 0


FLEETS = {
    "nixl": Fleet("NixlConnector"),
    "mooncake": Fleet("MooncakeConnector"),
    "mooncake, ranks unpinned": Fleet("MooncakeConnector", dp_size=4),
    "store": Fleet("SharedStorageConnector"),
    "passthrough": Fleet("FancyConnector"),
    "moriio": Fleet("MoRIIOConnector"),
}
PINNED = 1
MINTS = {("mooncake", False), ("mooncake", True), ("mooncake, ranks unpinned", True)}
"""Connector and whether a rank is pinned: where it is known which engine a transfer must name."""


@dataclass(frozen=True, kw_only=True)
class Row:
    n: int
    streams: bool
    handoff: str
    ending: str


@dataclass(kw_only=True)
class Expected:
    """KV on the legs: `prefill_kv` and `decode_kv` are JSON templates (`{id}` is the transfer id), `typed` bytes of
    field 6. `legs` is how many go out."""

    legs: int = 2
    skips_prefill: bool = False
    prefill_kv: str | None = None
    decode_kv: str | None = None
    typed: bytes | None = None
    error: type[RouterError] | None = None
    code: str | None = None
    handoffs: list[str] = field(default_factory=list)
    missing: int = 0


def expected(connector: str, row: Row, *, pinned: bool) -> Expected:
    """The oracle: the rules in the order in which they decide."""
    if connector == "moriio":
        refused = {"legs": 0, "error": Unsupported, "code": "moriio_grpc_pd_unsupported"}
        return Expected(skips_prefill=row.n > 1, **refused)
    if row.n > 1 and connector != "store":
        return Expected(legs=1, skips_prefill=True)
    mints = (connector, pinned) in MINTS
    made = Expected()
    if mints:
        made.prefill_kv = KEEP[:-1] + ',"transfer_id":"{id}"}'
    elif connector == "nixl":
        made.prefill_kv = KEEP
    if row.ending in ("abort", "error"):
        made.legs, made.error, made.code = 1, PrefillFailed, "prefill_stream_error"
    elif connector in ("nixl", "passthrough"):
        relay(made, row, asked=connector == "nixl")
    elif mints:
        if row.ending == "length":
            engine = "engine-1_dp1" if pinned else "engine-1"
            made.decode_kv = (
                '{"do_remote_decode":false,"do_remote_prefill":true,"transfer_id":"{id}",'
                f'"remote_engine_id":"{engine}","remote_bootstrap_addr":"http://prefill:9100"}}'
            )
            made.handoffs = ["consumed"]
        else:
            made.missing = 1
    elif connector != "store":
        made.typed = b"\x32\x0c" + b"\x0a\x07prefill" + b"\x10\x8c\x47"  # field 6: {1: "prefill", 2: 9100}
    return made


def relay(made: Expected, row: Row, *, asked: bool) -> None:
    if row.handoff == "invalid":
        made.legs, made.error, made.code, made.handoffs = 1, HandoffInvalid, "handoff_invalid", ["invalid"]
    elif row.handoff == "present":
        made.decode_kv, made.handoffs = HANDOFFS["present"], ["consumed"]
    else:
        made.missing = int(asked)


def client_bytes(row: Row) -> bytes:
    """A request that asks for everything a leg may have to lose, by betterproto's own encoder."""
    sampling = SamplingParams(
        temperature=0.5,
        max_tokens=7,
        min_tokens=3,
        stop=["END", "."],
        stop_token_ids=[5, 600],
        n=row.n,
        seed=11,
        logprobs=2,
    )
    request = GenerateRequest(
        request_id="client",
        tokenized=TokenizedInput(original_text="hi", input_ids=list(range(PROMPT_TOKENS))),
        sampling_params=sampling,
        stream=row.streams,
        kv_transfer_params=KvTransferParams(remote_host="evil", remote_port=1),
        kv_transfer_params_json='{"do_remote_prefill":true,"transfer_id":"evil"}',
    )
    return bytes(request) + LATER


def string_field(number: int, text: str) -> bytes:
    data = text.encode()
    size = bytes([len(data)]) if len(data) < 128 else bytes([len(data) % 128 + 128, len(data) // 128])
    return bytes([number << 3 | 2]) + size + data


def prefill_bytes(client: bytes, *, name: str, kv: str | None, pinned: bool) -> bytes:
    return edit(
        client,
        {
            (1,): string_field(1, name),
            (5,): None,
            (6,): None,
            (8,): None if kv is None else string_field(8, kv),
            (4, 8): b"\x40\x01",  # max_tokens 1
            (4, 9): None,  # min_tokens
            (4, 10): None,  # stop
            (4, 11): None,  # stop_token_ids
            (4, 14): b"\x70\x01",  # ignore_eos
            (4, 15): b"\x78\x01",  # n 1
            **({(9,): b"\x48\x01"} if pinned else {}),
        },
    )


def decode_bytes(client: bytes, *, name: str, kv: str | None, typed: bytes | None, pinned: bool) -> bytes:
    return edit(
        client,
        {
            (1,): string_field(1, name),
            (5,): b"\x28\x01",
            (6,): typed,
            (8,): None if kv is None else string_field(8, kv),
            **({(9,): b"\x48\x01"} if pinned else {}),
        },
    )


class Players:
    """The scripts of both workers; they play whichever row is set."""

    row: Row

    async def prefill(self, call, request):
        await call.send(complete(self.row.ending, kv_transfer_params_json=HANDOFFS[self.row.handoff]))

    async def decode(self, call, request):
        assert request.sampling_params.max_tokens == 7, "a release, although nothing is left over"
        for index in range(self.row.n):
            await call.send(chunk(7, index=index))
            await call.send(complete(index=index, output_ids=[7]))


async def play(scene: Scene, players: Players, row: Row, *, client: bytes) -> RouterError | None:
    players.row = row
    try:
        async with scene.router.generate(client) as stream:
            async for _ in stream:
                pass
    except RouterError as error:
        return error
    return None


def rows() -> Iterator[Row]:
    for n, streams, handoff, ending in itertools.product((1, 3), (True, False), HANDOFFS, ENDINGS):
        yield Row(n=n, streams=streams, handoff=handoff, ending=ending)


SETTINGS = RouterSettings(retry=RetrySettings(attempts=1), breaker=BreakerSettings(failures=10_000))


@pytest.mark.parametrize("pinned", [False, True], ids=["no rank", "rank pinned"])
@pytest.mark.parametrize("connector", FLEETS)
async def test_the_leg_matrix(autojump_clock, connector, pinned):
    fleet, players = FLEETS[connector], Players()
    fields = {
        "connector": fleet.name,
        "data_parallel_size": 4 if pinned else fleet.dp_size,
        "rank": PINNED if pinned else None,
    }
    prefill = prefill_worker(players.prefill, bootstrap_port=9100, **fields)
    decode = decode_worker(players.decode, **fields)
    seen_transfers: set[str] = set()
    async with open_scene(prefill, decode, router=SETTINGS) as scene:
        for row in rows():
            check = Check(scene, prefill, decode, pinned=pinned, transfers=seen_transfers)
            client = client_bytes(row)
            error = await play(scene, players, row, client=client)
            check.against(expected(connector, row, pinned=pinned), client=client, error=error, where=row)
        assert scene.leaks() == []
        assert len(scene.router.handoffs) == 0


class Check:
    """What is new since it was made, held against what was expected."""

    def __init__(
        self,
        scene: Scene,
        prefill: ScriptedWorker,
        decode: ScriptedWorker,
        *,
        pinned: bool,
        transfers: set[str],
    ) -> None:
        self.scene, self.prefill, self.decode, self.pinned, self.transfers = scene, prefill, decode, pinned, transfers
        for each in (prefill.received, decode.received, scene.recorder.handoffs, scene.recorder.missing):
            each.clear()
        scene.recorder.skipped.clear()

    def against(self, want: Expected, *, client: bytes, error: RouterError | None, where: Row) -> None:
        assert (type(error) if error else None) is want.error, (where, error)
        assert (error.error_code if error else None) == want.code, where
        assert self.scene.recorder.handoffs == want.handoffs, where
        assert len(self.scene.recorder.missing) == want.missing, where
        assert self.scene.recorder.skipped == (["several_samples"] if want.skips_prefill else []), where
        legs = [*self.prefill.received, *self.decode.received]
        assert len(legs) == want.legs, where
        assert len(self.prefill.received) == (0 if want.skips_prefill else min(want.legs, 1)), where
        if not legs:
            return
        name = get_string(legs[0], (1,)) or ""
        assert name.startswith("client-")
        transfer = self.transfer_of(want)
        if self.prefill.received:
            kv = want.prefill_kv and want.prefill_kv.replace("{id}", transfer)
            assert self.prefill.received == [prefill_bytes(client, name=name, kv=kv, pinned=self.pinned)], where
        if self.decode.received:
            kv = want.decode_kv and want.decode_kv.replace("{id}", transfer)
            wanted = decode_bytes(client, name=name, kv=kv, typed=want.typed, pinned=self.pinned)
            assert self.decode.received == [wanted], where

    def transfer_of(self, want: Expected) -> str:
        """The id that was minted, which no other row has had (I5)."""
        if not want.prefill_kv or "{id}" not in want.prefill_kv:
            return ""
        transfer = json.loads(get_string(self.prefill.received[0], (8,)) or "")["transfer_id"]
        assert transfer.startswith("xfer-")
        assert transfer not in self.transfers
        self.transfers.add(transfer)
        return transfer


def test_the_oracles_client_has_everything_that_a_leg_may_lose():
    decoded = GenerateRequest().parse(client_bytes(Row(n=3, streams=True, handoff="present", ending="stop")))
    params = decoded.sampling_params
    assert params.min_tokens
    assert params.stop
    assert params.stop_token_ids
    assert decoded.kv_transfer_params.remote_host == "evil"
    assert "evil" in (decoded.kv_transfer_params_json or "")


RANKS = [
    # the client's, those pinned on prefill and decode; of each leg; the engine that a transfer names
    (None, None, None, None, None, None),
    (2, None, None, 2, 2, "engine-1_dp2"),
    (0, None, None, 0, 0, "engine-1_dp0"),
    (2, 1, None, 1, 2, "engine-1_dp1"),
    (2, None, 3, 2, 3, "engine-1_dp2"),
    (None, 0, 3, 0, 3, "engine-1_dp0"),
    (None, None, 3, None, 3, None),
    (4, None, None, 4, 4, None),  # there is no such rank: its workers will say so
    (-1, None, None, -1, -1, None),
]


@pytest.mark.parametrize(("asked", "on_prefill", "on_decode", "first", "second", "engine"), RANKS)
async def test_a_pinned_rank_wins_over_the_clients_and_transfers_name_the_one_that_prefill_runs_on(
    autojump_clock, asked, on_prefill, on_decode, first, second, engine
):
    players, fields = Players(), {"connector": "MooncakeConnector", "data_parallel_size": 4}
    prefill = prefill_worker(players.prefill, rank=on_prefill, **fields)
    decode = decode_worker(players.decode, rank=on_decode, **fields)
    row = Row(n=1, streams=True, handoff="absent", ending="length")
    client = client_bytes(row) if asked is None else client_bytes(row) + field_9(asked)
    async with open_scene(prefill, decode, router=SETTINGS) as scene:
        assert await play(scene, players, row, client=client) is None
        assert scene.recorder.handoffs == (["consumed"] if engine else [])
    legs = [GenerateRequest().parse(received) for received in (*prefill.received, *decode.received)]
    assert [leg.data_parallel_rank for leg in legs] == [first, second]
    named = json.loads(get_string(decode.received[0], (8,)) or "{}").get("remote_engine_id")
    assert named == engine


def field_9(rank: int) -> bytes:
    return GenerateRequest(data_parallel_rank=rank).SerializeToString()
