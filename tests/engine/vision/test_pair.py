"""Media through a prefill and a decode worker: processed once, told rightly, and the same text as from one worker."""

from __future__ import annotations

import itertools
import json
import logging

import betterproto
import pytest
import trio

from trio_router.engine.settings import Faults
from trio_router.protocol.messages import GenerateRequest, MediaRefs
from trio_router.rpc.metadata import RpcError
from trio_router.testing.origin import picture

from .conftest import PREFILL, with_identity


async def prefill(fleet, request, name="p"):
    request.sampling_params.max_tokens = 1
    request.stream = False
    request.kv_transfer_params_json = json.dumps(PREFILL)
    answer = await fleet.send(name, request)
    assert answer.kv is not None
    return answer.complete


async def through_the_pair(fleet, make, name="d"):
    """A request through both legs, as a router that relays the identity sends them."""
    complete = await prefill(fleet, make())
    leg = with_identity(make(), complete.media_identity)
    leg.kv_transfer_params_json = complete.kv_transfer_params_json
    return await fleet.send(name, leg)


CASES = {
    "one image": ["http://o/red"],
    "two images": ["http://o/red", "http://o/blue"],
    "the same twice": ["http://o/red", "http://o/red"],
    "one film": ["http://o/film"],
    "image and film": ["http://o/red", "http://o/film"],
    "film and image": ["http://o/film", "http://o/red"],
}


class TestOnce:
    @pytest.mark.parametrize("urls", CASES.values(), ids=CASES.keys())
    async def test_the_pair_says_what_one_worker_says_and_only_prefill_looks(self, open_fleet, sees, ask, origin, urls):
        async with open_fleet(p=sees(), d=sees(), w=sees()) as fleet:
            alone = await fleet.send("w", ask(fleet, *urls))
            origin.hits.clear()
            pair = await through_the_pair(fleet, lambda: ask(fleet, *urls))
            assert pair.token_ids == alone.token_ids
            assert pair.complete.prompt_tokens == alone.complete.prompt_tokens > 30
            assert origin.hits.total() == len(urls)
            seen = {name: worker.counters.media_items_processed for name, worker in fleet.workers.items()}
            assert seen == {"p": len(urls), "d": 0, "w": len(urls)}
            assert fleet.workers["d"].counters.pulls == 1
            assert fleet.workers["d"].counters.recomputed_prompt_tokens <= 1

    async def test_what_an_origin_would_give_the_second_time_is_never_asked_for(self, open_fleet, sees, ask, origin):
        origin.items["http://o/turns"] = lambda hit: picture("red") if hit == 1 else picture("blue")
        async with open_fleet(p=sees(), d=sees(), w=sees()) as fleet:
            red = await fleet.send("w", ask(fleet, "http://o/red"))
            pair = await through_the_pair(fleet, lambda: ask(fleet, "http://o/turns"))
            assert pair.token_ids == red.token_ids
            assert origin.hits["http://o/turns"] == 1

    async def test_a_leg_that_keeps_its_references_looks_again_and_says_the_same(self, open_fleet, sees, ask, origin):
        async with open_fleet(p=sees(), d=sees(), w=sees()) as fleet:
            alone = await fleet.send("w", ask(fleet, "http://o/red"))
            complete = await prefill(fleet, ask(fleet, "http://o/red"))
            again = await fleet.send("d", ask(fleet, "http://o/red", kv=json.loads(complete.kv_transfer_params_json)))
            assert again.token_ids == alone.token_ids
            assert fleet.workers["d"].counters.pulls == 1
            assert fleet.workers["d"].counters.media_items_processed == 1

    async def test_the_log_tells_who_had_references_and_who_had_them_processed(self, open_fleet, sees, ask, caplog):
        caplog.set_level(logging.INFO, "trio_router.engine")
        async with open_fleet(p=sees(), d=sees()) as fleet:
            await through_the_pair(fleet, lambda: ask(fleet, "http://o/red"))
        lines = [line for line in caplog.messages if line.startswith("Generate request")]
        told = [(line.count("preprocessed_mm=True"), line.count("media_refs=1")) for line in lines]
        assert told == [(0, 1), (1, 0)]

    async def test_a_mooncake_pair_does_the_same(self, open_fleet, sees, ask, origin):
        push = {"connector": "mooncake"}
        async with open_fleet(p=sees(**push), d=sees(**push), w=sees()) as fleet:
            alone = await fleet.send("w", ask(fleet, "http://o/red"))
            first = ask(fleet, "http://o/red", max_tokens=1, kv={**PREFILL, "transfer_id": "t"})
            first.stream = False
            identity = (await fleet.send("p", first)).complete.media_identity
            kv = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "transfer_id": "t",
                "remote_engine_id": fleet.workers["p"].engine_id,
                "remote_bootstrap_addr": "http://p:2",
            }
            pair = await fleet.send("d", with_identity(ask(fleet, "http://o/red", kv=kv), identity))
            assert pair.token_ids == alone.token_ids
            assert fleet.workers["d"].counters.media_fetches == 0


class TestNoTwoPicturesAreOne:
    async def test_pictures_of_one_size_behind_one_text_have_answers_of_their_own(self, open_fleet, sees, ask, origin):
        colors = ["red", "blue", "lime", "white", "black"]
        origin.items |= {f"http://o/{color}": picture(color) for color in colors}
        async with open_fleet(p=sees(), d=sees(), w=sees()) as fleet:
            texts = []
            for color, _again in itertools.product(colors, range(2)):
                url = f"http://o/{color}"
                alone = (await fleet.send("w", ask(fleet, url))).token_ids
                assert (await through_the_pair(fleet, lambda url=url: ask(fleet, url))).token_ids == alone
                texts.append(tuple(alone))
            assert len(set(texts)) == len(colors)
            # The second time each came from the cache, of prefill and decode alike.
            assert fleet.workers["p"].counters.prefix_hit_tokens >= 64 * len(colors)
            assert fleet.workers["d"].counters.prefix_hit_tokens >= 64 * len(colors)

    async def test_order_matters(self, open_fleet, sees, ask):
        async with open_fleet(w=sees()) as fleet:
            there = await fleet.send("w", ask(fleet, "http://o/red", "http://o/blue"))
            back = await fleet.send("w", ask(fleet, "http://o/blue", "http://o/red"))
            assert there.token_ids != back.token_ids


def without_hash_of_its_own(identity):
    identity.mm_inputs.mm_hashes = ["0" * 64]


def without_grids(identity):
    identity.mm_inputs.model_specific_tensors = {}
    identity.mm_inputs.batched_keys = []


def with_another_grid(identity):
    tensor = identity.mm_inputs.model_specific_tensors["image_grid_thw"]
    tensor.inline = tensor.inline[:8] + tensor.inline[16:24] + tensor.inline[8:16]


def with_a_grid_in_no_rows(identity):
    identity.mm_inputs.batched_keys = []


def with_a_span_moved(identity):
    identity.mm_inputs.mm_placeholders[0].offset -= 1


def with_a_span_too_long(identity):
    identity.mm_inputs.mm_placeholders[0].length += 1000


def with_one_pad(identity):
    identity.prompt_token_ids = [*identity.prompt_token_ids[:5], *identity.prompt_token_ids[6:]]


def with_another_token_for_embeddings(identity):
    identity.mm_inputs.im_token_id = 7


class TestWhatAWrongIdentityDoes:
    @pytest.mark.parametrize(
        "spoil",
        [
            without_hash_of_its_own,
            without_grids,
            with_another_grid,
            with_a_grid_in_no_rows,
            with_a_span_moved,
            with_a_span_too_long,
            with_one_pad,
            with_another_token_for_embeddings,
        ],
    )
    async def test_it_is_taken_and_shows_as_another_text(self, open_fleet, sees, ask, spoil):
        async with open_fleet(p=sees(), d=sees(), w=sees()) as fleet:
            alone = await fleet.send("w", ask(fleet, "http://o/red"))
            complete = await prefill(fleet, ask(fleet, "http://o/red"))
            spoil(complete.media_identity)
            leg = with_identity(ask(fleet, "http://o/red"), complete.media_identity)
            leg.kv_transfer_params_json = complete.kv_transfer_params_json
            answer = await fleet.send("d", leg)
            assert answer.complete.finish_reason == "length"
            assert answer.token_ids != alone.token_ids
            assert not fleet.workers["d"].engine.core.dead

    async def test_expanded_ids_with_no_identity_at_all_are_taken_and_show(self, open_fleet, sees, ask):
        async with open_fleet(p=sees(), d=sees(), w=sees()) as fleet:
            alone = await fleet.send("w", ask(fleet, "http://o/red"))
            complete = await prefill(fleet, ask(fleet, "http://o/red"))
            leg = fleet.request(list(complete.media_identity.prompt_token_ids), ignore_eos=True)
            leg.kv_transfer_params_json = complete.kv_transfer_params_json
            assert (await fleet.send("d", leg)).token_ids != alone.token_ids

    async def refused(self, fleet, leg):
        with pytest.raises(RpcError) as caught:
            await fleet.send("d", leg)
        return caught.value.status.name, caught.value.message

    @pytest.mark.parametrize(
        ("spoil", "status", "complaint"),
        [
            (lambda i: i.mm_inputs.mm_hashes.clear(), "INTERNAL", "without mm_hashes"),
            (lambda i: i.mm_inputs.mm_hashes.append("more"), "INVALID_ARGUMENT", "2 mm_hashes for 1 mm_placeholders"),
            (lambda i: i.extra_mm_inputs.append(i.mm_inputs), "INVALID_ARGUMENT", "one batch per modality"),
            (
                lambda i: setattr(i.mm_inputs.model_specific_tensors["image_grid_thw"], "dtype", "int8"),
                "INVALID_ARGUMENT",
                "unsupported dtype 'int8'",
            ),
            (
                lambda i: setattr(i.mm_inputs.model_specific_tensors["image_grid_thw"], "shape", [2, 3]),
                "INVALID_ARGUMENT",
                "24 bytes are not",
            ),
            (
                lambda i: setattr(i.mm_inputs.model_specific_tensors["image_grid_thw"], "shape", [3]),
                "INVALID_ARGUMENT",
                "not a row for each",
            ),
            (lambda i: i.mm_inputs.flat_keys.update(a="b"), "INTERNAL", "no tensor 'b'"),
        ],
    )
    async def test_what_cannot_be_read_is_refused_and_its_handoff_released(
        self, open_fleet, sees, ask, spoil, status, complaint
    ):
        async with open_fleet(p=sees(), d=sees()) as fleet:
            complete = await prefill(fleet, ask(fleet, "http://o/red"))
            spoil(complete.media_identity)
            leg = with_identity(ask(fleet, "http://o/red"), complete.media_identity)
            leg.kv_transfer_params_json = complete.kv_transfer_params_json
            told = await self.refused(fleet, leg)
            assert told[0] == status
            assert complaint in told[1]
            assert (await fleet.generate("d", [5, 6, 7])).complete.finish_reason == "length"

    async def test_without_kv_params_it_is_refused(self, open_fleet, sees, ask):
        async with open_fleet(p=sees(), d=sees()) as fleet:
            complete = await prefill(fleet, ask(fleet, "http://o/red"))
            leg = with_identity(ask(fleet, "http://o/red"), complete.media_identity)
            assert await self.refused(fleet, leg) == (
                "INVALID_ARGUMENT",
                "multimodal payload carries grid tensors but no pixel_values and no kv_transfer_params;"
                " a pixel-less leg requires remote KV",
            )

    async def test_beside_references_it_is_refused(self, open_fleet, sees, ask):
        async with open_fleet(p=sees(), d=sees()) as fleet:
            complete = await prefill(fleet, ask(fleet, "http://o/red"))
            leg = ask(fleet, "http://o/red", kv=complete.kv_transfer_params_json)
            leg.mm_inputs = complete.media_identity.mm_inputs
            status, message = await self.refused(fleet, leg)
            assert (status, "cannot be combined" in message) == ("INVALID_ARGUMENT", True)

    @pytest.mark.parametrize("kv", [{}, {"do_remote_prefill": False}, {"do_remote_decode": True}])
    async def test_with_params_that_bring_no_state_the_engine_dies_of_it(self, open_fleet, sees, ask, kv):
        async with open_fleet(p=sees(), d=sees()) as fleet:
            complete = await prefill(fleet, ask(fleet, "http://o/red"))
            status, _message = await self.refused(
                fleet, with_identity(ask(fleet, "http://o/red", kv=kv), complete.media_identity)
            )
            assert status == "INTERNAL"
            assert fleet.workers["d"].engine.core.dead

    async def test_with_a_handoff_that_is_gone_it_ends_with_an_error_and_the_engine_lives(self, open_fleet, sees, ask):
        async with open_fleet(p=sees(), d=sees()) as fleet:
            complete = await prefill(fleet, ask(fleet, "http://o/red"))
            kv = {**json.loads(complete.kv_transfer_params_json), "remote_engine_id": "another"}
            answer = await fleet.send("d", with_identity(ask(fleet, "http://o/red", kv=kv), complete.media_identity))
            assert answer.complete.finish_reason == "error"
            assert not fleet.workers["d"].engine.core.dead


class TestHashesOnly:
    def hashes_of(self, fleet, ask, complete):
        leg = with_identity(ask(fleet, "http://o/red"), complete.media_identity)
        leg.mm_inputs.model_specific_tensors, leg.mm_inputs.batched_keys = {}, []
        leg.kv_transfer_params_json = complete.kv_transfer_params_json
        return leg

    async def test_they_keep_prompts_apart_in_the_cache_and_the_model_sees_nothing(self, open_fleet, sees, ask, caplog):
        async with open_fleet(p=sees(), d=sees({"language_model_only": True}), w=sees()) as fleet:
            alone = await fleet.send("w", ask(fleet, "http://o/red"))
            first, second = [await prefill(fleet, ask(fleet, url)) for url in ("http://o/red", "http://o/blue")]
            answer = await fleet.send("d", self.hashes_of(fleet, ask, first))
            # Positions are those of a text: not what one worker would have said.
            assert answer.token_ids != alone.token_ids
            await fleet.send("d", self.hashes_of(fleet, ask, second))
            assert fleet.workers["d"].counters.prefix_hit_tokens == 0
            assert fleet.workers["d"].counters.pulls == 2
        assert sum("hashes only" in message for message in caplog.messages) == 2

    async def test_without_a_handoff_they_are_taken_and_the_text_is_wrong(self, open_fleet, sees, ask):
        async with open_fleet(p=sees(), w=sees()) as fleet:
            alone = await fleet.send("w", ask(fleet, "http://o/red"))
            leg = self.hashes_of(fleet, ask, await prefill(fleet, ask(fleet, "http://o/red")))
            leg.kv_transfer_params_json = None
            assert (await fleet.send("w", leg)).token_ids != alone.token_ids


FLAT = {"position_grids": False}


class TestAModelWithoutGrids:
    @pytest.mark.parametrize("urls", CASES.values(), ids=CASES.keys())
    @pytest.mark.parametrize("eyes", [True, False], ids=["a worker that sees", "a language model only"])
    async def test_hashes_are_all_that_a_decode_worker_needs(self, open_fleet, sees, ask, origin, urls, eyes):
        decode = sees({**FLAT, "language_model_only": not eyes})
        async with open_fleet(p=sees(FLAT), d=decode, w=sees(FLAT)) as fleet:
            alone = await fleet.send("w", ask(fleet, *urls))
            pair = await through_the_pair(fleet, lambda: ask(fleet, *urls))
            assert pair.token_ids == alone.token_ids
            assert fleet.workers["d"].counters.media_items_processed == 0

    async def test_they_have_to_be_the_right_ones_and_have_to_come_with_state(self, open_fleet, sees, ask):
        async with open_fleet(p=sees(FLAT), d=sees(FLAT), w=sees(FLAT)) as fleet:
            alone = await fleet.send("w", ask(fleet, "http://o/red"))
            complete = await prefill(fleet, ask(fleet, "http://o/red"))
            assert complete.media_identity.mm_inputs.model_specific_tensors == {}
            bare = with_identity(ask(fleet, "http://o/red"), complete.media_identity)
            assert (await fleet.send("w", bare)).token_ids != alone.token_ids
            complete.media_identity.mm_inputs.mm_hashes = ["0" * 64]
            wrong = with_identity(ask(fleet, "http://o/red"), complete.media_identity)
            wrong.kv_transfer_params_json = complete.kv_transfer_params_json
            assert (await fleet.send("d", wrong)).token_ids != alone.token_ids


class TestALanguageModelOnly:
    async def test_it_refuses_references_and_tensors(self, open_fleet, sees, ask):
        async with open_fleet(p=sees(), d=sees({"language_model_only": True})) as fleet:
            complete = await prefill(fleet, ask(fleet, "http://o/red"))
            with pytest.raises(RpcError, match="no media processor"):
                await fleet.send("d", ask(fleet, "http://o/red"))
            leg = with_identity(ask(fleet, "http://o/red"), complete.media_identity)
            leg.kv_transfer_params_json = complete.kv_transfer_params_json
            with pytest.raises(RpcError, match="language model only"):
                await fleet.send("d", leg)


class TestAnOlderWorker:
    async def test_it_returns_no_identity_and_says_so_once_for_each_request(self, open_fleet, sees, ask, caplog):
        async with open_fleet(p=sees({"identity": False})) as fleet:
            complete = await prefill(fleet, ask(fleet, "http://o/red"))
            assert not betterproto.serialized_on_wire(complete.media_identity)
        assert sum("no media_identity" in message for message in caplog.messages) == 1


class TestAnIdentityGoneWrong:
    async def test_a_fault_changes_what_is_told_and_nothing_else(self, open_fleet, sees, ask):
        def forget_grids(identity):
            identity.mm_inputs.model_specific_tensors = {}
            return identity

        async with open_fleet(p=sees()) as fleet:
            right = await prefill(fleet, ask(fleet, "http://o/red"))
            for change, told in ((forget_grids, (True, [])), (lambda _identity: None, (False, []))):
                fleet.workers["p"].faults = Faults(change_identity=change)
                wrong = (await prefill(fleet, ask(fleet, "http://o/red"))).media_identity
                present = betterproto.serialized_on_wire(wrong)
                assert (present, list(wrong.mm_inputs.model_specific_tensors)) == told
            fleet.workers["p"].faults = Faults()
            again = await prefill(fleet, ask(fleet, "http://o/red"))
            assert bytes(again.media_identity) == bytes(right.media_identity)


class TestWhoGetsAnIdentity:
    async def test_nobody_who_sent_no_kv_params(self, open_fleet, sees, ask):
        async with open_fleet(w=sees()) as fleet:
            answer = await fleet.send("w", ask(fleet, "http://o/red"))
            assert not betterproto.serialized_on_wire(answer.complete.media_identity)

    async def test_every_choice_has_it_whatever_the_params_say(self, open_fleet, sees, ask):
        async with open_fleet(w=sees()) as fleet:
            answer = await fleet.send("w", ask(fleet, "http://o/red", kv={}, n=3, temperature=1.0))
            identities = {bytes(complete.media_identity) for complete in answer.completes}
            assert (len(answer.completes), len(identities)) == (3, 1)
            assert identities != {b""}

    async def test_it_has_grids_and_places_and_no_pixels(self, open_fleet, sees, ask):
        async with open_fleet(p=sees()) as fleet:
            identity = (await prefill(fleet, ask(fleet, "http://o/red", "http://o/film"))).media_identity
            image, film = identity.mm_inputs, identity.extra_mm_inputs[0]
            assert not any(betterproto.serialized_on_wire(batch.pixel_values) for batch in (image, film))
            assert list(image.model_specific_tensors) == ["image_grid_thw"]
            assert list(film.model_specific_tensors) == ["video_grid_thw", "video_second_per_grid"]
            assert (image.im_token_id, film.im_token_id) == (None, 2047)
            assert image.keep_on_cpu_keys == ["image_grid_thw"]
            ids = identity.prompt_token_ids
            for batch, pad in ((image, 2046), (film, 2047)):
                (span,) = batch.mm_placeholders
                assert ids[span.offset : span.offset + span.length].count(pad) == ids.count(pad) > 1


class TestRequestsThatCannotBeServed:
    async def test_a_broken_picture_harms_nobody_a_hundred_times(self, open_fleet, sees, ask, origin):
        origin.items["http://o/broken"] = picture("red")[:40]
        async with open_fleet(w=sees()) as fleet:
            wanted = (await fleet.send("w", ask(fleet, "http://o/red"))).token_ids
            for _ in range(100):
                with pytest.raises(RpcError, match=r"media_refs\[0\]: image cannot be decoded") as caught:
                    await fleet.send("w", ask(fleet, "http://o/broken"))
                assert caught.value.status.name == "INVALID_ARGUMENT"
                assert (await fleet.send("w", ask(fleet, "http://o/red", max_tokens=12))).token_ids == wanted
            assert fleet.workers["w"].engine.core.cache.held_blocks == 0

    @pytest.mark.parametrize("failure", ["broken", "leaving"])
    async def test_what_fails_while_it_is_fetched_releases_its_handoff(self, open_fleet, sees, ask, origin, failure):
        async with open_fleet(p=sees(), d=sees()) as fleet:
            kv = json.loads((await prefill(fleet, ask(fleet, "http://o/red"))).kv_transfer_params_json)
            assert len(fleet.workers["p"].ledger) == 1
            # Only a worker that has met this one before delivers a notice at once.
            await fleet.generate("d", [3] * 40, kv=await fleet.prefill("p", [3] * 40))

            origin.items["http://o/slow"] = None
            if failure == "broken":
                with pytest.raises(RpcError):
                    await fleet.send("d", ask(fleet, "http://o/none", kv=kv))
            else:
                call = await fleet.call("d", ask(fleet, "http://o/slow", kv=kv))
                await trio.sleep(0.1)
                call.cancel()
            await trio.sleep(1)
            assert len(fleet.workers["p"].ledger) == 0
            assert fleet.workers["p"].counters.released == 1

    async def test_more_references_than_anchors_fail_and_fewer_pass(self, open_fleet, sees, ask):
        async with open_fleet(w=sees()) as fleet:
            request = ask(fleet, "http://o/red")
            request.media_refs.items.append(request.media_refs.items[0])
            with pytest.raises(RpcError) as caught:
                await fleet.send("w", request)
            assert caught.value.status.name == "INTERNAL"
            request = ask(fleet, "http://o/red", "http://o/blue")
            request.media_refs.items.pop()
            assert (await fleet.send("w", request)).complete.finish_reason == "length"

    async def test_an_empty_list_is_refused(self, open_fleet, sees, ask):
        async with open_fleet(w=sees()) as fleet:
            request = fleet.request([1, 2, 3])
            request.media_refs = MediaRefs(items=[])
            data = bytes(request) + b"\x52\x00"
            with pytest.raises(RpcError, match="carries no items"):
                await fleet.send("w", GenerateRequest.FromString(data))
