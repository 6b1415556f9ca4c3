"""Which decode legs go by a media identity (I7): the table, what is wrong with one, and the bytes of the leg."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from trio_router.dispatch.identity import (
    IdentityOutcome,
    MediaView,
    fault_of,
    identity_edits,
    judge,
    read_media,
)
from trio_router.dispatch.legs import decode_leg, parse_request, release_leg
from trio_router.errors import BadRequest
from trio_router.protocol.codec import decode, encode
from trio_router.protocol.messages import (
    GenerateComplete,
    GenerateRequest,
    GenerateResponse,
    MediaIdentity,
    MediaRef,
    MediaRefs,
    Modality,
    MultimodalInputs,
    PlaceholderRange,
    TensorData,
    TokenizedInput,
)
from trio_router.protocol.wire import edit, field_bytes, field_varint

IMAGE, VIDEO, AUDIO = Modality.IMAGE, Modality.VIDEO, Modality.AUDIO
PAD = 900
IDS = [1, 2, *[PAD] * 4, 3, *[PAD] * 6, 4, 5, *[PAD + 1] * 8, 6]
UNKNOWN = field_bytes(1000, b"of a later version")


def grid(rows: list[tuple[int, int, int]]) -> TensorData:
    values = b"".join(value.to_bytes(8, "little") for row in rows for value in row)
    return TensorData(shape=[len(rows), 3], dtype="int64", inline=values)


def images() -> MultimodalInputs:
    return MultimodalInputs(
        modality=IMAGE,
        mm_hashes=["a" * 64, "b" * 64],
        mm_placeholders=[PlaceholderRange(offset=2, length=4), PlaceholderRange(offset=7, length=6)],
        model_specific_tensors={"image_grid_thw": grid([(1, 4, 4), (1, 4, 6)])},
        batched_keys=["image_grid_thw"],
        keep_on_cpu_keys=["image_grid_thw"],
    )


def video() -> MultimodalInputs:
    return MultimodalInputs(
        modality=VIDEO,
        mm_hashes=["c" * 64],
        mm_placeholders=[PlaceholderRange(offset=15, length=8)],
        im_token_id=PAD + 1,
        model_specific_tensors={"video_grid_thw": grid([(2, 4, 4)])},
        batched_keys=["video_grid_thw"],
    )


def an_identity(**changes: Any) -> MediaIdentity:
    fields = {"prompt_token_ids": list(IDS), "mm_inputs": images(), "extra_mm_inputs": [video()], **changes}
    return MediaIdentity(**fields)


MEDIA = MediaView(counts={int(IMAGE): 2, int(VIDEO): 1}, schemes=frozenset({"https"}))


class TestTable:
    """Every row that decides; `fault` and what came of the connectors are what their own tests say."""

    @pytest.mark.parametrize(
        ("n", "handed_over", "solicited", "came", "fault", "outcome"),
        [
            (1, True, True, True, None, IdentityOutcome.APPLIED),  # NIXL, Mooncake with an engine id
            (1, True, False, True, None, IdentityOutcome.APPLIED),  # passthrough that gives one unasked
            (1, True, True, False, None, IdentityOutcome.MISSING),
            (1, False, True, True, None, IdentityOutcome.NO_HANDOFF),  # NIXL without params
            (1, False, True, False, None, IdentityOutcome.MISSING),
            (1, False, False, False, None, IdentityOutcome.NOT_SOLICITED),  # Mooncake without an engine id
            (1, False, False, True, None, IdentityOutcome.NO_HANDOFF),
            (1, True, False, False, None, IdentityOutcome.NOT_SOLICITED),  # passthrough
            (1, True, True, True, "bad", IdentityOutcome.INVALID),
            (1, False, True, True, "bad", IdentityOutcome.NO_HANDOFF),
            (3, True, True, True, None, IdentityOutcome.SEVERAL_SAMPLES),
            (3, False, False, False, None, IdentityOutcome.SEVERAL_SAMPLES),
        ],
    )
    def test_a_row(self, n, handed_over, solicited, came, fault, outcome):
        identity = an_identity() if came else None
        given = {"n": n, "handed_over": handed_over, "solicited": solicited, "identity": identity, "fault": fault}
        assert judge(**given) is outcome


def without_grids(batch: MultimodalInputs) -> MultimodalInputs:
    return replace(batch, model_specific_tensors={}, batched_keys=[], keep_on_cpu_keys=[])


def change(batch: Callable[[], MultimodalInputs], **fields: Any) -> MultimodalInputs:
    return replace(batch(), **fields)


def with_grid(tensor: TensorData, name: str = "image_grid_thw") -> MediaIdentity:
    return an_identity(
        mm_inputs=change(images, model_specific_tensors={name: tensor}, batched_keys=[], keep_on_cpu_keys=[])
    )


MALFORMED = {
    "no ids": (an_identity(prompt_token_ids=[]), "no prompt ids"),
    "no batch": (MediaIdentity(prompt_token_ids=IDS), "of {} items"),
    "an image too few": (
        an_identity(mm_inputs=change(images, mm_hashes=["a"], mm_placeholders=[PlaceholderRange(offset=2, length=4)])),
        "items by modality",
    ),
    "a modality too few": (an_identity(extra_mm_inputs=[]), "items by modality"),
    "another modality": (an_identity(extra_mm_inputs=[change(video, modality=AUDIO)]), "items by modality"),
    "a modality twice": (an_identity(extra_mm_inputs=[images(), video()]), "two batches"),
    "an empty hash": (an_identity(mm_inputs=change(images, mm_hashes=["a", ""])), "hash is empty"),
    "an endless hash": (an_identity(mm_inputs=change(images, mm_hashes=["a", "b" * 300])), "very long"),
    "no hashes": (an_identity(mm_inputs=change(images, mm_hashes=[])), "items by modality"),
    "a placeholder too few": (
        an_identity(mm_inputs=change(images, mm_placeholders=[PlaceholderRange(offset=2, length=4)])),
        "1 placeholders for 2",
    ),
    "a placeholder outside": (
        an_identity(extra_mm_inputs=[change(video, mm_placeholders=[PlaceholderRange(offset=15, length=80)])]),
        "not inside",
    ),
    "an empty placeholder": (
        an_identity(extra_mm_inputs=[change(video, mm_placeholders=[PlaceholderRange(offset=15, length=0)])]),
        "not inside",
    ),
    "placeholders out of order": (
        an_identity(
            mm_inputs=change(
                images, mm_placeholders=[PlaceholderRange(offset=7, length=6), PlaceholderRange(offset=2, length=4)]
            )
        ),
        "not in order",
    ),
    "placeholders of two modalities over one another": (
        an_identity(
            extra_mm_inputs=[change(video, im_token_id=None, mm_placeholders=[PlaceholderRange(offset=8, length=8)])]
        ),
        "overlap",
    ),
    "pixels": (
        an_identity(mm_inputs=change(images, pixel_values=TensorData(shape=[1], dtype="uint8", inline=b"x"))),
        "carries pixels",
    ),
    "a token that is in no placeholder": (an_identity(extra_mm_inputs=[change(video, im_token_id=7)]), "im_token_id"),
    "a tensor that is no grid": (with_grid(grid([(1, 4, 4), (1, 4, 6)]), "secret_weights"), "no grid"),
    "a grid with a row too few": (with_grid(grid([(1, 4, 4)])), "not one row"),
    "a grid without a shape": (with_grid(TensorData(dtype="int64", inline=b"")), "not one row"),
    "a grid of endless rows": (
        with_grid(TensorData(shape=[2, 1000], dtype="uint8", inline=bytes(2000))),
        "not one row",
    ),
    "a grid with bytes too few": (
        with_grid(TensorData(shape=[2, 3], dtype="int64", inline=bytes(47))),
        "not the bytes",
    ),
    "a grid of no known type": (
        with_grid(TensorData(shape=[2, 3], dtype="complex64", inline=bytes(48))),
        "not the bytes",
    ),
    "a grid without bytes": (with_grid(TensorData(shape=[2, 3], dtype="int64")), "not the bytes"),
    "a description of nothing": (an_identity(mm_inputs=change(images, keep_on_cpu_keys=["gone"])), "does not have"),
    "a grid that is not laid out by items": (
        an_identity(mm_inputs=change(images, batched_keys=[], keep_on_cpu_keys=[])),
        "laid out by items",
    ),
    "a flat grid": (
        an_identity(mm_inputs=change(images, flat_keys={"image_grid_thw": "sizes"})),
        "laid out by items",
    ),
    "grids for some only": (an_identity(extra_mm_inputs=[without_grids(video())]), "some have none"),
}


class TestFaults:
    def test_a_good_one_has_none(self):
        assert fault_of(an_identity(), media=MEDIA, context_length=len(IDS)) is None

    def test_hashes_alone_are_enough_for_a_model_without_grids(self):
        plain = an_identity(mm_inputs=without_grids(images()), extra_mm_inputs=[without_grids(video())])
        assert fault_of(plain, media=MEDIA, context_length=0) is None

    @pytest.mark.parametrize(("identity", "words"), MALFORMED.values(), ids=MALFORMED)
    def test_i7_what_is_wrong_is_named(self, identity, words):
        assert words in (fault_of(identity, media=MEDIA, context_length=1000) or "")

    def test_i7_ids_are_bounded_by_the_context(self):
        assert "over the context" in (fault_of(an_identity(), media=MEDIA, context_length=len(IDS) - 1) or "")
        assert fault_of(an_identity(), media=MEDIA, context_length=0) is None, "not known"


def a_request(**fields: Any) -> bytes:
    refs = MediaRefs(
        items=[
            MediaRef(modality=IMAGE, url="https://pictures.example/1.png"),
            MediaRef(modality=IMAGE, url="data:image/png;base64,AAAA"),
            MediaRef(modality=VIDEO, url="HTTP://pictures.example/1.gif"),
        ]
    )
    tokenized = TokenizedInput(original_text="two images, one video", input_ids=[1, 2, PAD, 3, PAD, 4, 5, PAD + 1, 6])
    return encode(GenerateRequest(request_id="r", tokenized=tokenized, media_refs=refs, **fields)) + UNKNOWN


class TestReading:
    def test_items_are_counted_by_modality_and_schemes_kept(self):
        assert read_media(a_request()) == MediaView(
            counts={int(IMAGE): 2, int(VIDEO): 1}, schemes=frozenset({"https", "data", "http"})
        )

    def test_a_request_without_references_has_none(self):
        assert read_media(encode(GenerateRequest(text="x"))) is None

    def test_references_to_nothing_are_refused(self):
        with pytest.raises(BadRequest, match="no items"):
            read_media(field_bytes(10, b""))

    def test_a_path_without_a_scheme_has_an_empty_one(self):
        message = encode(GenerateRequest(media_refs=MediaRefs(items=[MediaRef(modality=IMAGE, url="/etc/passwd")])))
        assert read_media(message) == MediaView(counts={int(IMAGE): 1}, schemes=frozenset({""}))


class TestLeg:
    @staticmethod
    def frame(identity: MediaIdentity) -> bytes:
        return encode(GenerateResponse(complete=GenerateComplete(finish_reason="length", media_identity=identity)))

    def leg(self, frame: bytes, identity: MediaIdentity) -> bytes:
        view = parse_request(a_request(), disaggregated=True)
        return decode_leg(view, attempt_id="a", kv_params="{}", media=identity_edits(frame, identity))

    def test_case_b2_ids_and_grids_take_the_place_of_the_references_and_nothing_else_changes(self):
        leg = self.leg(self.frame(an_identity()), an_identity())
        made = decode(GenerateRequest, leg)
        assert made.tokenized.input_ids == IDS
        assert made.tokenized.original_text == "two images, one video"
        assert made.mm_inputs == images()
        assert made.extra_mm_inputs == [video()]
        assert read_media(leg) is None
        rest = dict.fromkeys(((1,), (2, 2), (5,), (7,), (8,), (10,), (11,)))
        assert edit(leg, rest) == edit(a_request(), rest)

    def test_parts_of_a_later_version_are_passed_on(self):
        identity = (
            field_bytes(1, b"".join(bytes([each]) for each in (1, 2, 3)))
            + field_bytes(2, encode(images()) + UNKNOWN)
            + field_bytes(3, encode(video()) + UNKNOWN)
        )
        frame = field_bytes(2, field_bytes(15, identity))
        leg = self.leg(frame, decode(MediaIdentity, identity))
        assert field_bytes(7, encode(images()) + UNKNOWN) in leg
        assert field_bytes(11, encode(video()) + UNKNOWN) in leg
        assert decode(GenerateRequest, leg).tokenized.input_ids == [1, 2, 3]

    def test_ids_that_are_not_packed_are_all_there(self):
        ids = field_bytes(1, b"\x05\x06") + field_varint(1, 300) + field_varint(1, 7)
        frame = field_bytes(2, field_bytes(15, ids))
        leg = self.leg(frame, decode(MediaIdentity, ids))
        assert decode(GenerateRequest, leg).tokenized.input_ids == [5, 6, 300, 7]

    def test_media_that_the_client_had_processed_itself_give_way(self):
        """They cannot stand beside references, but a client may send what it likes."""
        own = change(images, pixel_values=TensorData(shape=[1], dtype="uint8", inline=b"x"))
        view = parse_request(a_request(extra_mm_inputs=[own]), disaggregated=True)
        identity = an_identity(extra_mm_inputs=[])
        leg = decode_leg(view, attempt_id="a", kv_params="{}", media=identity_edits(self.frame(identity), identity))
        assert decode(GenerateRequest, leg).extra_mm_inputs == []

    def test_a_release_fetches_nothing(self):
        leg = release_leg(parse_request(a_request(), disaggregated=True), attempt_id="a", kv_params="{}")
        assert read_media(leg) is None
        assert decode(GenerateRequest, leg).sampling_params.max_tokens == 0
