"""Media in chat requests, from the client's side to what the router is given."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import msgspec
import pytest
import trio

import trio_router.engine.assets
from trio_router.front.media import MediaDesk
from trio_router.front.openai.schema import ChatRequest
from trio_router.front.settings import MediaSettings
from trio_router.front.wire import HttpRequest
from trio_router.media.gate import MediaPolicy
from trio_router.media.mode import WorkerMedia
from trio_router.media.specs import ModelFacts
from trio_router.protocol.messages import Modality
from trio_router.text.bundle import TokenizerFiles, read_directory
from trio_router.text.tokenizer import Tokenizer, load

CHAT = "/v1/chat/completions"
ASSETS = Path(trio_router.engine.assets.__file__).parent
PIXEL = "data:image/png;base64,iVBORw0KGgo="
TEMPLATE = b"""
{%- for message in messages %}{{ message.role }}:
{%- if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>
{%- else %}{{ part.text }}{% endif %}{% endfor %}{% endif %};{% endfor %}"""
WORKERS = tuple(
    WorkerMedia(
        mm_processor="inprocess",
        schemes=frozenset({"http", "https", "data"}),
        item_limits="image=3,video=1",
        leg=leg,
    )
    for leg in ("prefill", "decode")
)


@pytest.fixture(scope="module")
def sighted() -> Tokenizer:
    """The shipped tokenizer with a template over parts."""
    files = read_directory(ASSETS)
    return load(TokenizerFiles(contents={**files.contents, "chat_template.jinja": TEMPLATE}))


async def no_addresses(host: str) -> list[str]:
    return ["10.1.2.3"] if host.startswith("inside") else ["8.8.8.8"]


def desk(*workers: WorkerMedia, **settings) -> MediaDesk:
    return MediaDesk(
        lambda name: ModelFacts(name=name, model_type="qwen3_vl"),
        lambda name: workers or WORKERS,
        settings=MediaSettings(**settings),
        addresses=no_addresses,
    )


def asked(*parts: object, **fields) -> dict:
    content = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts]
    return {"model": "tiny-english", "messages": [{"role": "user", "content": content}], **fields}


def image(url: str = PIXEL, **fields) -> dict:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def video(url: str = "https://media.example/a.mp4") -> dict:
    return {"type": "video_url", "video_url": url}


async def test_references_go_to_the_worker_beside_a_prompt_with_one_anchor_each(
    autojump_clock, serve, scripted, frames, sighted
) -> None:
    router = scripted(frames.text("a cat"))
    client = await (await serve(router, media=desk(), texts=sighted)).connect()

    response = await client.post(CHAT, asked("first", image(detail="high"), "then", video(), image("http://m.example")))

    assert response.status == 200
    [request] = router.requests
    assert [(ref.modality, ref.url) for ref in request.media_refs.items] == [
        (Modality.IMAGE, PIXEL),
        (Modality.VIDEO, "https://media.example/a.mp4"),
        (Modality.IMAGE, "http://m.example"),
    ]
    anchors = {name: sighted.encode(f"<|{name}_pad|>")[0] for name in ("image", "video")}
    ids = request.tokenized.input_ids
    assert [token for token in ids if token in anchors.values()] == [
        anchors["image"],
        anchors["video"],
        anchors["image"],
    ]
    pads = "<|vision_start|><|{}_pad|><|vision_end|>"
    assert request.tokenized.original_text == (
        f"user:first{pads.format('image')}then{pads.format('video')}{pads.format('image')};"
    )
    assert not request.mm_inputs.mm_hashes


async def test_a_request_of_text_has_no_references(autojump_clock, serve, scripted, frames, sighted) -> None:
    router = scripted(frames.text("x"))
    client = await (await serve(router, media=desk(), texts=sighted)).connect()

    assert (await client.post(CHAT, asked("hello"))).status == 200
    assert not router.requests[0].media_refs.items


@pytest.mark.parametrize(
    ("parts", "status", "code", "named"),
    [
        ([image(fps=1.0)], 501, "multimodal_router_processing_unavailable", "[0].image_url: the media"),
        (
            ["x", {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}],
            501,
            "multimodal_router_processing_unavailable",
            "messages[0].content[1].input_audio",
        ),
        (
            [image()] * 4,
            400,
            "invalid_multimodal_request",
            "content[3].image_url: the request has 4 images",
        ),
        ([image("file:///etc/passwd")], 400, "media_ref_scheme_not_accepted", "'file'"),
        (
            [image(), image("http://127.0.0.1/")],
            400,
            "media_ref_host_not_allowed",
            "content[1].image_url: the host ",
        ),
        ([image("http://inside.example/")], 400, "media_ref_host_not_allowed", "the host inside.example"),
        ([image("http://0x7f000001/")], 400, "invalid_multimodal_request", "four decimal numbers"),
        ([image("data:image/png;base64,"), "x"], 400, "invalid_multimodal_request", "is empty"),
        ([image(PIXEL + "A" * 1000)], 413, "media_ref_too_large", "500 bytes"),
        ([image(), "<|image_pad|>"], 400, "multimodal_prompt_contract_mismatch", "2 of the token"),
        ([{"type": "file", "file": {}}], 400, "invalid_request_parameters", "messages[0].content[0] is of type 'file'"),
    ],
)
async def test_what_cannot_be_forwarded_is_refused_by_its_part_before_anything_is_sent(
    autojump_clock, serve, scripted, frames, sighted, parts: list, status: int, code: str, named: str
) -> None:
    router = scripted(frames.text("x"))
    media = desk(policy=MediaPolicy(max_image_bytes=500))
    client = await (await serve(router, media=media, texts=sighted)).connect()

    response = await client.post(CHAT, asked(*parts))

    assert (response.status, response.json["error"]["code"]) == (status, code)
    assert response.header("x-smg-error-code") == code
    assert named in response.json["error"]["message"]
    assert router.requests == []
    assert (await client.post(CHAT, asked(image()))).status == 200


async def test_neither_url_nor_payload_is_in_an_error_or_a_log(
    autojump_clock, serve, scripted, frames, sighted, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    client = await (await serve(scripted(frames.text("x")), media=desk(), texts=sighted)).connect()
    secret = "s3cr3t-token"
    for url in (
        f"http://127.0.0.1/{secret}?{secret}",
        f"ftp://media.example/{secret}",
        f"http://{secret}:{secret}@media.example/",
        f"https://inside.example/{secret}",
        f"data:image/png;{secret},{secret}",
        f"data:text/html;base64,{secret}",
        f"http://media.example:{secret}/",
    ):
        body = (await client.post(CHAT, asked(image(url)))).body.decode()
        assert secret not in body
        assert '"error"' in body
    assert (await client.post(CHAT, asked(image(f"https://media.example/{secret}")))).status == 200
    assert secret not in caplog.text


@pytest.mark.parametrize(("url", "held"), [(PIXEL + "A" * 100_000, True), ("https://media.example/a.png", False)])
async def test_case_b7_a_payload_keeps_its_share_of_the_budget_until_its_first_token_is_here(
    autojump_clock, serve, scripted, frames, sighted, url: str, held: bool
) -> None:
    router = scripted([10.0, frames.chunk([300]), 1000.0])
    site = await serve(router, media=desk(), texts=sighted, small_body_bytes=0)
    client = await site.connect()
    body = msgspec.json.encode(asked(image(url)))

    await client.send(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body))
    await trio.sleep(1)

    assert router.outcomes == ["open"]
    assert site.server.held_body_bytes == (len(body) if held else 0)
    gc.collect()
    assert [each for each in gc.get_objects() if isinstance(each, HttpRequest) and each.body] == []
    assert [each for each in gc.get_objects() if isinstance(each, ChatRequest)] == []
    await trio.sleep(10)
    assert router.outcomes == ["open"]
    assert site.server.held_body_bytes == 0
    client.leave()


async def test_case_b7_a_share_is_given_back_when_its_client_leaves(
    autojump_clock, serve, scripted, frames, sighted
) -> None:
    site = await serve(scripted([1000.0]), media=desk(), texts=sighted, small_body_bytes=0)
    client = await site.connect()
    body = msgspec.json.encode(asked(image(PIXEL + "A" * 100_000)))
    await client.send(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body))
    await trio.sleep(1)
    assert site.server.held_body_bytes == len(body)
    client.leave()
    await trio.sleep(1)
    assert site.server.held_body_bytes == 0


async def test_case_b7_a_large_image_passes_and_a_body_over_the_cap_is_told_so(
    autojump_clock, serve, scripted, frames, sighted
) -> None:
    router = scripted(frames.text("x"))
    site = await serve(router, media=desk(), texts=sighted, max_body_bytes=(8 << 20) + 1000, capacity=1 << 22)
    client = await site.connect()

    assert (await client.post(CHAT, asked(image(PIXEL[:-1] + "A" * (8 << 20))))).status == 200
    refused = await client.post(CHAT, asked(image(PIXEL[:-1] + "A" * ((8 << 20) + 1000))))

    assert (refused.status, refused.json["error"]["code"]) == (413, "payload_too_large")
    assert len(router.requests) == 1
