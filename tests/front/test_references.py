"""Media references of gRPC clients: the rules of chats hold for them, too."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from grpclib.const import Status

from trio_router.engine.vision.settings import MediaSettings
from trio_router.errors import BadRequest, WorkerUnavailable
from trio_router.front.grpc import GENERATE, grpc_server
from trio_router.front.media import MediaDesk
from trio_router.front.references import ReferenceDesk, references_of
from trio_router.front.texts import LoadedText
from trio_router.media.items import Modality
from trio_router.media.mode import WorkerMedia
from trio_router.media.specs import SPECS, ModelFacts
from trio_router.observe.hooks import Observer
from trio_router.protocol.codec import encode
from trio_router.protocol.messages import GenerateRequest, MediaRef, MediaRefs, TokenizedInput, VllmEngineStub
from trio_router.rpc.channel import Channel, open_channel
from trio_router.rpc.metadata import RpcError
from trio_router.service import media_desk
from trio_router.testing.cluster import open_cluster
from trio_router.testing.origin import Origin, picture, reference
from trio_router.testing.scripted import ScriptedWorker, answer, open_scene, plain_worker

PAD = 7
PUBLIC = "http://8.8.8.8/x.png"


class Refused(Observer):
    def __init__(self) -> None:
        self.told: list[tuple[str, str, str]] = []

    def request_refused(self, *, request_id: str, client: str, code: str) -> None:
        self.told.append((request_id, client, code))


class OneToken:
    """A tokenizer that knows the image's anchor, in the place of a text source, too."""

    ready = True

    async def get(self, model: str) -> OneToken:
        return self

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [PAD] if text == SPECS[0].anchors[Modality.IMAGE] else [1, 2, 3]


def request(*urls: str, ids: tuple[int, ...] = (5, PAD, 6), modality: int = 1) -> GenerateRequest:
    refs = MediaRefs(items=[MediaRef(modality=modality, url=url) for url in urls])  # type: ignore[arg-type]  # any number
    return GenerateRequest(request_id="mine", tokenized=TokenizedInput(input_ids=list(ids)), media_refs=refs)


@asynccontextmanager
async def fronted(*, processor: str = "inprocess") -> AsyncIterator[tuple[ScriptedWorker, Channel, Refused]]:
    refused = Refused()
    worker = WorkerMedia(mm_processor=processor)
    desk = MediaDesk(
        lambda name: ModelFacts(name=name, model_type="qwen3_vl"),
        lambda name: (worker,),
        observer=refused,
    )
    plain = plain_worker(answer)
    async with open_scene(plain) as scene, trio.open_nursery() as nursery:
        media = ReferenceDesk(scene.router, media=desk, texts=OneToken())
        server = grpc_server(scene.router, media=media, observer=refused)
        await nursery.start(server.serve, scene.network.listen("front:1"))
        async with open_channel("front:1", dialer=scene.network.dial) as channel:
            yield plain, channel, refused
        nursery.cancel_scope.cancel()


async def failure(channel: Channel, message: bytes) -> RpcError:
    call = await channel.call(GENERATE, message)
    with pytest.raises(RpcError) as caught:
        await call.receive()
    return caught.value


def test_the_plan_is_read_from_the_bytes_in_their_order():
    plan = references_of(encode(request("http://a.example", "data:image/png;base64,AA")))
    assert [(item.url, item.modality, item.part) for item in plan] == [
        ("http://a.example", Modality.IMAGE, "media_refs.items[0]"),
        ("data:image/png;base64,AA", Modality.IMAGE, "media_refs.items[1]"),
    ]
    assert not references_of(encode(GenerateRequest(request_id="x")))


def test_references_in_two_pieces_are_read_as_workers_merge_them():
    first, second = (encode(GenerateRequest(media_refs=request(url).media_refs)) for url in ("http://a", "http://b"))
    assert [item.url for item in references_of(first + second)] == ["http://a", "http://b"]


class Served:
    """A router, as far as it is asked here."""

    def __init__(self, *models: str) -> None:
        self._models = list(models)

    def models(self) -> list[str]:
        return self._models


@pytest.mark.parametrize(
    ("models", "error", "told"),
    [([], WorkerUnavailable, "no worker is ready"), (["a", "b"], BadRequest, "several models are served here: a, b")],
)
async def test_media_need_one_model_and_text_does_not(models, error, told):
    desk = ReferenceDesk(Served(*models), media=MediaDesk(), texts=OneToken())
    await desk.admit(encode(GenerateRequest(request_id="x", tokenized=TokenizedInput(input_ids=[PAD]))))
    with pytest.raises(error, match=told):
        await desk.admit(encode(request(PUBLIC)))


@pytest.mark.parametrize("modality", [0, 4])
def test_a_kind_that_is_none_is_refused(modality):
    with pytest.raises(BadRequest, match=rf"media_refs.items\[0\].modality is {modality}"):
        references_of(encode(request(PUBLIC, modality=modality)))


@pytest.mark.parametrize(
    ("asked", "status", "code"),
    [
        (request("http://127.0.0.1/x.png"), Status.INVALID_ARGUMENT, "media_ref_host_not_allowed"),
        (request("file:///etc/passwd"), Status.INVALID_ARGUMENT, "media_ref_scheme_not_accepted"),
        (request(PUBLIC, modality=2), Status.UNIMPLEMENTED, "multimodal_router_processing_unavailable"),
        (request(PUBLIC, ids=(5, 6)), Status.INVALID_ARGUMENT, "multimodal_prompt_contract_mismatch"),
        (request(PUBLIC, ids=(PAD, PAD)), Status.INVALID_ARGUMENT, "multimodal_prompt_contract_mismatch"),
        (request(PUBLIC, modality=9), Status.INVALID_ARGUMENT, "invalid_request_parameters"),
    ],
)
async def test_what_may_not_be_forwarded_reaches_no_worker_and_is_told_once(autojump_clock, asked, status, code):
    async with fronted() as (plain, channel, refused):
        error = await failure(channel, encode(asked))
        assert error.status is status
        assert refused.told == [("mine", "grpc", code)]
        assert plain.requests == []


async def test_what_may_be_forwarded_is_answered_as_ever(autojump_clock):
    pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    sees = MediaSettings(processor="inprocess")
    async with (
        open_cluster(media=sees, fetcher=Origin({PUBLIC: picture("red")})) as cluster,
        trio.open_nursery() as nursery,
    ):
        desk = media_desk(cluster.router)
        media = ReferenceDesk(cluster.router, media=desk, texts=LoadedText(cluster.model.tokenizer))
        await nursery.start(grpc_server(cluster.router, media=media).serve, cluster.network.listen("front:1"))
        async with open_channel("front:1", dialer=cluster.network.dial) as channel:
            asked = cluster.request(max_tokens=4, media=[reference(PUBLIC)])
            frames = [frame async for frame in VllmEngineStub(channel).generate(asked)]
        nursery.cancel_scope.cancel()
    assert frames[-1].complete.finish_reason == "length"
    assert frames[-1].complete.prompt_tokens > len(asked.tokenized.input_ids)


async def test_where_no_worker_processes_media_nothing_is_forwarded(autojump_clock):
    async with fronted(processor="") as (_, channel, _):
        assert (await failure(channel, encode(request(PUBLIC)))).status is Status.UNIMPLEMENTED


async def test_what_is_no_message_is_told_by_the_router_alone(autojump_clock):
    async with fronted() as (_, channel, refused):
        assert (await failure(channel, b"\xff\xff")).status is Status.INVALID_ARGUMENT
        assert refused.told == []
