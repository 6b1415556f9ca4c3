"""Media that come processed: with pixels as a router ships them, or as little as a decode worker needs."""

from __future__ import annotations

import json
import struct

import betterproto
import pytest

from trio_router.engine.vision.batches import cache_salt, check_pixels, read_batches
from trio_router.errors import BadRequest
from trio_router.protocol.messages import MediaRefs, Modality, MultimodalInputs, PlaceholderRange, TensorData
from trio_router.rpc.metadata import RpcError

from .conftest import PREFILL, with_identity

PIXELS = TensorData(shape=[4], dtype="float32", inline=struct.pack("<4f", 0, 1, 2, 3))


def grid(*rows) -> TensorData:
    return TensorData(shape=[len(rows), 3], dtype="int64", inline=b"".join(struct.pack("<3q", *row) for row in rows))


def batch(*, pixels=False, tensors=None, **about) -> MultimodalInputs:
    about = {"mm_hashes": ["h"], "mm_placeholders": [PlaceholderRange(offset=1, length=2)], **about}
    made = MultimodalInputs(model_specific_tensors=tensors or {}, **about)
    if pixels:
        made.pixel_values = PIXELS
    return MultimodalInputs.FromString(bytes(made))


class TestReading:
    def test_grids_are_rows_of_items(self):
        spans = [PlaceholderRange(offset=0, length=1), PlaceholderRange(offset=2, length=1)]
        tensors = {"image_grid_thw": grid((1, 2, 2), (1, 2, 4)), "other": PIXELS}
        given = batch(tensors=tensors, batched_keys=["image_grid_thw"], mm_hashes=["a", "b"], mm_placeholders=spans)
        (group,) = read_batches([given], prompt=[9, 9, 9])
        assert [fields["image_grid_thw"].values for fields in group.fields] == [(1, 2, 2), (1, 2, 4)]
        assert all("other" not in fields for fields in group.fields)

    @pytest.mark.parametrize(
        ("modality", "kind"),
        [
            (Modality.VIDEO, "video"),
            (Modality.IMAGE, "image"),
            (Modality.AUDIO, "image"),
            (Modality.UNSPECIFIED, "image"),
        ],
    )
    def test_what_is_no_video_is_taken_for_an_image(self, modality, kind):
        assert read_batches([batch(modality=modality)], prompt=[1, 2, 3])[0].kind == kind

    @pytest.mark.parametrize(("token", "mask"), [(None, None), (7, None), (8, (False, False))])
    def test_the_token_of_embeddings_makes_the_mask(self, token, mask):
        (group,) = read_batches([batch(im_token_id=token)], prompt=[8, 7, 7])
        assert group.placeholders[0].is_embed == mask

    def test_a_span_beyond_the_prompt_has_no_embeddings_there(self):
        for token in (None, 7):
            far = batch(im_token_id=token, mm_placeholders=[PlaceholderRange(offset=2, length=2**31)])
            (group,) = read_batches([far], prompt=[7, 7, 7])
            assert group.placeholders[0].embedded(prompt_length=3) == [2]

    def test_an_image_and_a_video_with_pixels_have_names_of_their_own(self):
        film = batch(pixels=True, modality=Modality.VIDEO)
        assert [group.kind for group in read_batches([batch(pixels=True), film], prompt=[1])] == ["image", "video"]
        with pytest.raises(BadRequest, match="two batches have a tensor 'pixel_values'"):
            read_batches([batch(pixels=True), batch(pixels=True)], prompt=[1])
        with pytest.raises(BadRequest, match="two batches have a tensor 'pixel_values'"):
            read_batches([batch(pixels=True), batch(tensors={"pixel_values": PIXELS})], prompt=[1])

    def test_without_hashes_pixels_make_them(self):
        spans = [PlaceholderRange(offset=0, length=1)] * 2
        (group,) = read_batches([batch(pixels=True, mm_hashes=[], mm_placeholders=spans)], prompt=[1])
        assert len(set(group.hashes)) == 2


class TestTheGate:
    def test_each_batch_needs_pixels_or_the_request_its_state(self):
        with_grid = batch(tensors={"image_grid_thw": grid((1, 2, 2))})
        check_pixels([with_grid], has_params=True)
        check_pixels([batch(pixels=True)], has_params=False)
        with pytest.raises(BadRequest, match="pixel-less leg"):
            check_pixels([batch(pixels=True), with_grid], has_params=False)


def test_the_salt_is_of_all_hashes_in_their_order():
    assert cache_salt([batch(mm_hashes=["a", "b"]), batch(mm_hashes=["c"])]) == "mm:a,b,c"
    assert cache_salt([batch(mm_hashes=["b", "a"])]) == "mm:b,a"
    assert cache_salt([batch(mm_hashes=[])]) is None


async def processed_by_router(fleet, ask, **about):
    """A request with one image as a router sends it that has processed the image itself."""
    first = ask(fleet, "http://o/red", kv=PREFILL, max_tokens=1)
    first.stream = False
    identity = (await fleet.send("p", first)).complete.media_identity
    request = with_identity(ask(fleet, "http://o/red", **about), identity)
    request.mm_inputs.pixel_values = PIXELS
    return request


class TestWithPixels:
    async def test_a_worker_needs_no_references_for_the_same_text(self, open_fleet, sees, ask):
        async with open_fleet(p=sees(), w=sees(), w2=sees()) as fleet:
            alone = await fleet.send("w", ask(fleet, "http://o/red"))
            answer = await fleet.send("w2", await processed_by_router(fleet, ask))
            assert answer.token_ids == alone.token_ids
            assert fleet.workers["w2"].counters.media_items_processed == 0

    async def test_a_prefill_leg_tells_nothing_of_them(self, open_fleet, sees, ask):
        async with open_fleet(p=sees()) as fleet:
            answer = await fleet.send("p", await processed_by_router(fleet, ask, kv=PREFILL))
            assert answer.kv is not None
            assert not betterproto.serialized_on_wire(answer.complete.media_identity)

    async def test_beside_text_they_are_ignored(self, open_fleet, sees):
        async with open_fleet(w=sees()) as fleet:
            request = fleet.request("Good morning.")
            request.mm_inputs = batch(tensors={"image_grid_thw": grid((1, 2, 2))})
            assert (await fleet.send("w", request)).token_ids == (await fleet.generate("w", "Good morning.")).token_ids

    async def test_a_model_of_text_refuses_them(self, open_fleet, sees, ask):
        async with open_fleet(p=sees(), w={}) as fleet:
            with pytest.raises(RpcError, match="text only"):
                await fleet.send("w", await processed_by_router(fleet, ask))

    async def test_a_prompt_with_media_is_not_cut(self, open_fleet, sees, ask):
        async with open_fleet(w=sees()) as fleet:
            with pytest.raises(RpcError, match="truncate_prompt_tokens would cut media"):
                await fleet.send("w", ask(fleet, "http://o/red", truncate_prompt_tokens=5))


async def test_state_that_was_pulled_and_preempted_cannot_be_had_again(open_fleet, sees, ask):
    # Room for two prompts, but for one answer only: it takes even the blocks that the other one leaves behind.
    small = {"num_blocks": 14, "max_context_length": 224}
    async with open_fleet(p=sees(), d=sees(**small)) as fleet:
        legs = []
        for color in ("red", "blue"):
            first = ask(fleet, f"http://o/{color}", kv=PREFILL, max_tokens=1)
            first.stream = False
            complete = (await fleet.send("p", first)).complete
            kv = json.loads(complete.kv_transfer_params_json)
            legs.append(with_identity(ask(fleet, f"http://o/{color}", kv=kv, max_tokens=120), complete.media_identity))
        calls = [await fleet.call("d", leg) for leg in legs]
        ends = [(await fleet.read(call)).complete.finish_reason for call in calls]
        assert sorted(ends) == ["error", "length"]
        assert fleet.workers["d"].counters.preemptions == 1
        assert not fleet.workers["d"].engine.core.dead


async def test_an_empty_message_of_references_counts_as_references(open_fleet, sees):
    async with open_fleet(w=sees()) as fleet:
        request = fleet.request("text")
        request.media_refs = MediaRefs()
        request.media_refs._serialized_on_wire = True
        with pytest.raises(RpcError, match="requires tokenized input"):
            await fleet.send("w", request)
