"""Parts of chat messages: what clients write, and what is made of it."""

from __future__ import annotations

import msgspec
import pytest

from trio_router.errors import BadRequest
from trio_router.front.openai.parts import MAX_ITEMS, media_plan, template_part
from trio_router.front.openai.schema import ChatRequest, parse
from trio_router.media.items import Form, MediaPlan, Modality, Obstacle

URL = "https://media.example/a.png"


def request_of(*contents: object) -> ChatRequest:
    messages = [{"role": "user", "content": content} for content in contents]
    return parse(ChatRequest, msgspec.json.encode({"messages": messages}))


def plan_of(*parts: dict) -> MediaPlan:
    return media_plan(request_of(list(parts)))


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
@pytest.mark.parametrize("form", [URL, {"url": URL}, {"url": URL, "detail": "low"}, {"url": URL, "x": 1, "fps": None}])
def test_an_url_is_a_string_or_in_an_object(kind, form):
    [item] = plan_of({"type": f"{kind}_url", f"{kind}_url": form})
    assert (item.modality, item.url, item.form, item.hints) == (kind, URL, Form.REFERENCE, ())
    assert item.part == f"messages[0].content[0].{kind}_url"


def test_the_plan_is_in_the_order_of_messages_and_their_parts():
    text = {"type": "text", "text": "see:"}
    request = request_of(
        "hello",
        [
            text,
            {"type": "video_url", "video_url": "http://x/1"},
            text,
            {"type": "image_url", "image_url": "http://x/2"},
        ],
        [{"type": "image_url", "image_url": "http://x/3"}],
    )
    assert [(item.modality, item.url, item.part) for item in media_plan(request)] == [
        (Modality.VIDEO, "http://x/1", "messages[1].content[1].video_url"),
        (Modality.IMAGE, "http://x/2", "messages[1].content[3].image_url"),
        (Modality.IMAGE, "http://x/3", "messages[2].content[0].image_url"),
    ]


def test_no_more_are_looked_at_than_any_model_could_take():
    image = {"type": "image_url", "image_url": URL}
    assert len(plan_of(*[image] * MAX_ITEMS)) == MAX_ITEMS
    with pytest.raises(BadRequest, match="more than 1024 items") as caught:
        plan_of(*[image] * (MAX_ITEMS + 1), {"type": "never looked at"})
    assert caught.value.error_code == "invalid_multimodal_request"
    assert caught.value.message.startswith("messages[0].content[1024].image_url: ")


@pytest.mark.parametrize(
    ("part", "hints"),
    [
        ({"type": "image_url", "image_url": {"url": URL, "max_long_side_pixel": 512}}, ("max_long_side_pixel",)),
        ({"type": "video_url", "video_url": {"url": URL, "fps": 0.5}}, ("fps",)),
        ({"type": "video_url", "video_url": URL, "fps": 2}, ("fps",)),
        (
            {"type": "video_url", "video_url": {"url": URL, "fps": 1}, "max_long_side_pixel": 9},
            ("max_long_side_pixel", "fps"),
        ),
    ],
)
def test_hints_are_found_in_the_item_or_beside_it(part, hints):
    [item] = plan_of(part)
    assert item.hints == hints
    assert item.obstacle is Obstacle.HINT


@pytest.mark.parametrize(
    ("part", "obstacle"),
    [
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, Obstacle.AUDIO),
        ({"type": "audio_url", "audio_url": URL}, Obstacle.AUDIO),
        ({"type": "image_embeds", "image_embeds": {"a": "AAAA"}}, Obstacle.EMBEDDINGS),
        ({"type": "audio_embeds"}, Obstacle.EMBEDDINGS),
    ],
)
def test_what_workers_cannot_be_given_is_in_the_plan_all_the_same(part, obstacle):
    [item] = plan_of(part)
    assert item.obstacle is obstacle
    assert "AAAA" not in item.url


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (
            {"type": "file", "file": {}},
            "messages[0].content[0] is of type 'file'; there are text, image_url, video_url",
        ),
        ({"type": ""}, "messages[0].content[0] is of type ''"),
        ({"type": "x" * 100}, "is of type '" + "x" * 40 + "';"),
        ({"type": "image_url"}, "messages[0].content[0].image_url is missing"),
        ({"type": "image_url", "video_url": URL}, "messages[0].content[0].image_url is missing"),
        ({"type": "input_audio"}, "messages[0].content[0].input_audio is missing"),
    ],
)
def test_a_part_that_is_incomplete_or_unknown_is_refused_by_its_place(part, told):
    with pytest.raises(BadRequest) as caught:
        plan_of(part)
    assert told in caught.value.message
    assert caught.value.error_code == "invalid_request_parameters"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {}},
        {"type": "image_url", "image_url": {"url": 1}},
        {"type": "image_url", "image_url": {"url": URL, "max_long_side_pixel": 0}},
        {"type": "video_url", "video_url": {"url": URL, "fps": -1}},
        {"type": "video_url", "video_url": {"url": URL, "fps": "2"}},
        {"type": "input_audio", "input_audio": {}},
    ],
)
def test_what_is_of_the_wrong_type_is_named_by_its_path(part):
    with pytest.raises(BadRequest, match=r"at `\$\.messages\[0\]\.content\[0\]\.") as caught:
        plan_of(part)
    assert URL not in caught.value.message


def test_a_template_is_told_the_kind_and_nothing_else():
    [message] = request_of([{"type": "video_url", "video_url": URL}, {"type": "text", "text": "x"}]).messages
    assert isinstance(message.content, list)
    assert [template_part(part, where="") for part in message.content] == [
        {"type": "video"},
        {"type": "text", "text": "x"},
    ]
