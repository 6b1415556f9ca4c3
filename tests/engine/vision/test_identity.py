"""What of processed media is told, and when nothing is."""

from __future__ import annotations

import struct

import pytest

from trio_router.engine.vision.identity import build_media_identity, solicited_identity
from trio_router.engine.vision.items import Group, Placeholder, Processed, Tensor
from trio_router.protocol.messages import Modality


def row(*values, dtype="int64", **about) -> Tensor:
    return Tensor(shape=(len(values),), dtype=dtype, values=values, **about)


def images(*fields, hashes=None, spans=None) -> Group:
    names = hashes if hashes is not None else tuple(f"h{index}" for index in range(len(fields)))
    places = spans or tuple(Placeholder(offset=2 * index, length=2) for index in range(len(names)))
    return Group(kind="image", hashes=names, placeholders=places, fields=fields)


def processed(*groups, prompt=tuple(range(10))) -> Processed:
    return Processed(prompt=list(prompt), groups=groups)


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def build(warnings):
    return lambda *groups, **about: build_media_identity(processed(*groups, **about), warn=warnings.append)


class TestContents:
    def test_ids_hashes_places_and_grids(self, build):
        identity = build(images({"image_grid_thw": row(1, 4, 6)}, {"image_grid_thw": row(1, 2, 2)}))
        batch = identity.mm_inputs
        assert identity.prompt_token_ids == list(range(10))
        assert batch.modality == Modality.IMAGE
        assert batch.mm_hashes == ["h0", "h1"]
        assert [(span.offset, span.length) for span in batch.mm_placeholders] == [(0, 2), (2, 2)]
        grid = batch.model_specific_tensors["image_grid_thw"]
        assert (grid.shape, grid.dtype, grid.inline) == ([2, 3], "int64", struct.pack("<6q", 1, 4, 6, 1, 2, 2))
        assert (batch.batched_keys, batch.keep_on_cpu_keys, batch.flat_keys) == (["image_grid_thw"], [], {})
        assert batch.encoder_input_key is None

    def test_what_stays_off_the_accelerator_is_said(self, build):
        fields = [{"image_grid_thw": row(1, 2, 2)}, {"image_grid_thw": row(1, 2, 2, keep_on_cpu=True)}]
        assert build(images(*fields)).mm_inputs.keep_on_cpu_keys == ["image_grid_thw"]

    @pytest.mark.parametrize("timing", ["second_per_grid_ts", "video_second_per_grid"])
    def test_further_kinds_follow_with_either_name_for_their_timing(self, build, timing):
        fields = {"video_grid_thw": row(2, 2, 2), timing: Tensor(shape=(), dtype="float32", values=(0.5,))}
        film = Group(kind="video", hashes=("v",), placeholders=(Placeholder(offset=4, length=2),), fields=(fields,))
        identity = build(images({"image_grid_thw": row(1, 2, 2)}), film)
        (batch,) = identity.extra_mm_inputs
        assert batch.modality == Modality.VIDEO
        assert list(batch.model_specific_tensors) == ["video_grid_thw", timing]
        assert batch.model_specific_tensors[timing].inline == struct.pack("<f", 0.5)

    def test_other_tensors_are_not_told(self, build):
        batch = build(images({"pixel_values": row(1.0), "image_grid_thw": row(1, 2, 2)})).mm_inputs
        assert list(batch.model_specific_tensors) == ["image_grid_thw"]

    def test_a_model_without_grids_has_hashes_alone(self, build):
        batch = build(images({}, {})).mm_inputs
        assert (batch.mm_hashes, batch.model_specific_tensors) == (["h0", "h1"], {})

    @pytest.mark.parametrize(
        ("dtype", "wire", "code"),
        [("int32", "int64", "q"), ("float64", "float32", "f"), ("uint32", "uint32", "I"), ("float16", "float16", "e")],
    )
    def test_a_dtype_that_the_wire_has_not_is_widened(self, build, dtype, wire, code):
        grid = build(images({"image_grid_thw": row(1, 4, 6, dtype=dtype)})).mm_inputs.model_specific_tensors[
            "image_grid_thw"
        ]
        assert (grid.dtype, grid.inline) == (wire, struct.pack(f"<3{code}", 1, 4, 6))


class TestTheTokenOfEmbeddings:
    @pytest.mark.parametrize(
        ("masks", "token"),
        [
            ([(False, True)], 1),
            ([(True, True)], None),
            ([(False, False)], None),
            ([None], None),
            ([None, (True, True), (True, False)], 4),
            ([(False, True), (True, False)], 1),
        ],
        ids=["mixed", "all", "none", "no mask", "the first mixed one", "not a later one"],
    )
    def test_it_is_the_first_embedding_of_a_mixed_span(self, build, masks, token):
        spans = tuple(Placeholder(offset=2 * i, length=2, is_embed=mask) for i, mask in enumerate(masks))
        assert build(images(*({} for _ in masks), spans=spans)).mm_inputs.im_token_id == token


class TestNone:
    def test_without_a_hash_anywhere(self, build, warnings):
        assert build() is None
        assert build(images(hashes=())) is None
        assert warnings == []

    @pytest.mark.parametrize(
        "fields",
        [
            [{"image_grid_thw": row(1, 2, 2)}, {}],
            [{"image_grid_thw": row(1, 2, 2)}, {"image_grid_thw": row(1, 2)}],
            [{"image_grid_thw": row(1, 2, 2)}, {"image_grid_thw": row(1, 2, 2, dtype="int32")}],
        ],
        ids=["missing", "another shape", "another type"],
    )
    def test_with_a_warning_where_a_grid_is_not_one_row_for_each_item(self, build, warnings, fields):
        assert build(images(*fields)) is None
        assert warnings == ["image_grid_thw is not one row for each of 2 items; no media identity is returned"]


class TestWhoAsksForOne:
    GOOD = processed(images({"image_grid_thw": row(1, 2, 2)}))

    def ask(self, warnings, what=GOOD, *, params, supported=True):
        return solicited_identity(what, params=params, supported=supported, warn=warnings.append)

    @pytest.mark.parametrize("params", [{}, {"do_remote_decode": True}])
    def test_any_params_do(self, warnings, params):
        assert self.ask(warnings, params=params) is not None

    def test_no_params_no_identity_and_nothing_is_said(self, warnings):
        assert self.ask(warnings, params=None, supported=False) is None
        assert warnings == []

    def test_an_older_worker_says_so_before_it_builds(self, warnings):
        assert self.ask(warnings, what=None, params={}, supported=False) is None
        assert len(warnings) == 1
        assert "no media_identity" in warnings[0]

    def test_whatever_fails_is_a_warning(self, warnings):
        bad = processed(images({"image_grid_thw": Tensor(shape=(1,), dtype="int64", values=("x",))}))
        assert self.ask(warnings, what=bad, params={}) is None
        assert warnings[0].startswith("media identity not built (error: ")
        assert warnings[0].endswith("; the decode side will reprocess the media")
