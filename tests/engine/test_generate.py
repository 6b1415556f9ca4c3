"""Generate on a single worker: frames, endings, refusals, aborts and time."""

from __future__ import annotations

import logging
from collections import Counter

import betterproto
import pytest
import trio
from grpclib.const import Status

from trio_router.engine.model import load_model
from trio_router.protocol.codec import decode, encode
from trio_router.protocol.messages import (
    AbortRequest,
    GenerateRequest,
    GenerateResponse,
    KvTransferParams,
    MediaRef,
    MediaRefs,
    MultimodalInputs,
    SamplingParams,
    TensorData,
    TokenizedInput,
    VllmEngineStub,
)
from trio_router.rpc.metadata import RpcError

PROMPT = list(range(300, 340))
GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"


@pytest.fixture
async def fleet(open_fleet):
    async with open_fleet(w={}) as fleet:
        yield fleet


class TestFrames:
    async def test_a_stream_is_chunks_and_a_complete_that_repeats_the_last_of_them(self, fleet):
        answer = await fleet.generate("w", PROMPT, max_tokens=7, ignore_eos=True)
        assert [chunk.completion_tokens for chunk in answer.chunks] == [1] * 7
        assert {(chunk.prompt_tokens, chunk.cached_tokens, chunk.index) for chunk in answer.chunks} == {(40, 0, 0)}
        assert answer.complete.output_ids == answer.chunks[-1].token_ids
        assert (answer.complete.completion_tokens, answer.complete.finish_reason) == (1, "length")
        assert answer.complete.kv_transfer_params_json is None

    async def test_without_streaming_only_a_complete_comes_and_it_has_everything(self, fleet):
        streamed = await fleet.generate("w", PROMPT, max_tokens=7, ignore_eos=True)
        whole = await fleet.generate("w", PROMPT, max_tokens=7, ignore_eos=True, stream=False)
        assert whole.chunks == []
        assert (whole.complete.output_ids, whole.complete.completion_tokens) == (streamed.token_ids, 7)
        assert whole.complete.cached_tokens == 32, "the second request finds the prompt's full blocks"

    async def test_choices_interleave_and_each_has_its_own_end(self, fleet):
        answer = await fleet.generate("w", PROMPT, max_tokens=9, ignore_eos=True, n=3, temperature=1.0, seed=5)
        assert Counter(chunk.index for chunk in answer.chunks) == {0: 9, 1: 9, 2: 9}
        assert sorted(complete.index for complete in answer.completes) == [0, 1, 2]
        texts = {tuple(t for c in answer.chunks if c.index == i for t in c.token_ids) for i in range(3)}
        assert len(texts) == 3

    async def test_choices_without_streaming_come_together(self, fleet):
        answer = await fleet.generate("w", PROMPT, n=2, temperature=1.0, seed=5, stream=False, ignore_eos=True)
        assert [complete.index for complete in answer.completes] == [0, 1]
        assert len(set(answer.times)) == 1

    async def test_a_seed_repeats_and_its_absence_does_not(self, fleet):
        async def text(**about):
            return (
                await fleet.generate("w", PROMPT, temperature=1.0, max_tokens=20, ignore_eos=True, **about)
            ).token_ids

        assert await text(seed=1) == await text(seed=1)
        assert await text(seed=1) != await text(seed=2)
        assert await text() != await text()

    async def test_a_text_prompt_is_tokenized_here(self, fleet):
        by_text = await fleet.generate("w", "The harbour wakes")
        ids = await fleet.generate("w", load_model().tokenizer.encode("The harbour wakes"))
        assert by_text.token_ids == ids.token_ids

    async def test_the_answer_is_english(self, fleet):
        answer = await fleet.generate("w", "The harbour wakes", max_tokens=60, ignore_eos=True)
        text = load_model().tokenizer.decode(answer.token_ids)
        words = {word.strip(".,!?").lower() for word in text.split()}
        assert words & {"the", "a", "and", "in", "of", "to", "is"}
        assert text.isprintable()


class TestEndings:
    async def test_a_stop_string_ends_inside_the_engine_and_is_named(self, fleet):
        free = await fleet.generate("w", PROMPT, max_tokens=60, ignore_eos=True)
        text = load_model().tokenizer.decode(free.token_ids)
        stop = text[len(text) // 2 :][:6]
        answer = await fleet.generate("w", PROMPT, max_tokens=60, ignore_eos=True, stop=["\x00never", stop])
        assert (answer.complete.finish_reason, answer.complete.matched_stop_str) == ("stop", stop)
        assert answer.token_ids == free.token_ids[: len(answer.token_ids)]
        assert stop in load_model().tokenizer.decode(answer.token_ids)
        assert stop not in load_model().tokenizer.decode(answer.token_ids[:-1])

    async def test_a_stop_token_is_named(self, fleet):
        free = await fleet.generate("w", PROMPT, max_tokens=20, ignore_eos=True)
        answer = await fleet.generate("w", PROMPT, max_tokens=20, ignore_eos=True, stop_token_ids=[free.token_ids[7]])
        assert answer.complete.finish_reason == "stop"
        assert answer.complete.matched_token_id == free.token_ids[7]

    async def test_left_to_itself_the_model_ends_its_text(self, fleet):
        answer = await fleet.generate("w", PROMPT, max_tokens=None)
        assert answer.complete.finish_reason == "stop"
        assert betterproto.which_one_of(answer.complete, "matched_stop") == ("", None)
        assert answer.token_ids[-1] in load_model().tokenizer.eos_token_ids


class TestRefusals:
    @pytest.mark.parametrize(
        ("request_", "complaint"),
        [
            (GenerateRequest(), "empty"),
            (GenerateRequest(tokenized=TokenizedInput()), "empty"),
            (GenerateRequest(text=""), "empty"),
            (GenerateRequest(tokenized=TokenizedInput(input_ids=[1, 4_000_000_000])), "out of vocabulary"),
            (GenerateRequest(tokenized=TokenizedInput(input_ids=[1] * 8192)), "maximum model length"),
            (GenerateRequest(text="a", sampling_params=SamplingParams(max_tokens=0)), "max_tokens"),
            (GenerateRequest(text="a", sampling_params=SamplingParams(temperature=0.0, n=2)), "greedy"),
            (GenerateRequest(text="a", data_parallel_rank=1), "data_parallel_rank"),
            (GenerateRequest(text="a", kv_transfer_params_json="no"), "Invalid kv_transfer_params_json"),
            (GenerateRequest(text="a", kv_transfer_params_json="[1]"), "must be a JSON object"),
            (GenerateRequest(text="a", kv_transfer_params=KvTransferParams(remote_host="h")), "remote_port"),
            (GenerateRequest(text="a", media_refs=MediaRefs(items=[MediaRef(url="http://x")])), "requires tokenized"),
            (
                GenerateRequest(
                    tokenized=TokenizedInput(input_ids=[1]), media_refs=MediaRefs(items=[MediaRef(url="http://x")])
                ),
                "no media processor",
            ),
            (
                GenerateRequest(
                    tokenized=TokenizedInput(input_ids=[1]),
                    mm_inputs=MultimodalInputs(model_specific_tensors={"image_grid_thw": TensorData(shape=[1, 3])}),
                ),
                "requires remote KV",
            ),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    async def test_what_cannot_be_run_is_the_callers_fault_and_says_why(self, fleet, request_, complaint):
        with pytest.raises(RpcError, match=complaint) as caught:
            await fleet.send("w", request_)
        assert caught.value.status is Status.INVALID_ARGUMENT
        assert fleet.workers["w"].counters.refused == 1
        assert fleet.workers["w"].counters.generates == 0

    async def test_bytes_that_are_no_request_harm_nobody_else(self, fleet):
        call = await fleet.channels["w"].call(GENERATE, b"\x0a\xff")
        with pytest.raises(RpcError) as caught:
            await call.receive()
        assert caught.value.status is Status.INVALID_ARGUMENT
        assert (await fleet.generate("w", PROMPT)).complete.finish_reason == "length"

    async def test_media_beside_a_text_prompt_are_ignored(self, fleet):
        request = fleet.request("Hello")
        request.mm_inputs = MultimodalInputs(mm_hashes=["a"])
        assert (await fleet.send("w", request)).token_ids == (await fleet.generate("w", "Hello")).token_ids

    async def test_rank_zero_is_a_rank(self, fleet):
        request = fleet.request(PROMPT)
        request.data_parallel_rank = 0
        assert (await fleet.send("w", request)).complete.finish_reason == "length"


class TestLogLine:
    """One INFO line for each Generate, refused or not; others scrape it."""

    async def test_it_has_the_servicers_words(self, fleet, caplog):
        caplog.set_level(logging.INFO, logger="trio_router.engine")
        pinned = fleet.request(PROMPT, request_id="abc")
        pinned.data_parallel_rank = 0
        await fleet.send("w", pinned)
        refs = fleet.request(PROMPT, request_id="pic", stream=False)
        refs.media_refs = MediaRefs(items=[MediaRef(url="http://x")])
        with pytest.raises(RpcError):
            await fleet.send("w", refs)
        pixels = GenerateRequest(
            request_id="px",
            mm_inputs=MultimodalInputs(pixel_values=TensorData(inline=b"\x00", shape=[1], dtype="uint8")),
        )
        with pytest.raises(RpcError):
            await fleet.send("w", pixels)
        await fleet.send("w", fleet.request("Hi", request_id="t"))
        lines = [record.message for record in caplog.records if record.message.startswith("Generate")]
        rest = "preprocessed_mm=False, media_refs=0, dp_rank="
        assert lines == [
            f"Generate request abc: input_type=tokenized, stream=True, {rest}0",
            f"Generate request pic: input_type=tokenized, stream=False, {rest}None".replace("refs=0", "refs=1"),
            "Generate request px: input_type=None, stream=False, preprocessed_mm=True, media_refs=0, dp_rank=None",
            f"Generate request t: input_type=text, stream=True, {rest}None",
        ]


class TestAbort:
    @pytest.mark.parametrize("stream", [True, False])
    async def test_an_aborted_stream_ends_well_with_the_reason_abort(self, fleet, stream):
        call = await fleet.call(
            "w", fleet.request(PROMPT, request_id="x", stream=stream, max_tokens=4000, ignore_eos=True)
        )
        other = await fleet.call("w", fleet.request(PROMPT, request_id="y", max_tokens=30, ignore_eos=True))
        await trio.sleep(0.0525)
        await VllmEngineStub(fleet.channels["w"]).abort(AbortRequest(request_ids=["x", "unknown"]))
        answer = await fleet.read(call)
        assert answer.complete.finish_reason == "abort"
        assert answer.complete.output_ids == ([] if stream else answer.token_ids)
        assert len(answer.token_ids) == 11, "one with the prefill, one every 5 ms since"
        assert len((await fleet.read(other)).token_ids) == 30
        assert fleet.workers["w"].counters.aborts == 1
        assert fleet.workers["w"].engine.core.cache.held_blocks == 0

    async def test_an_id_in_use_twice_ends_both_and_every_choice(self, fleet):
        calls = [
            await fleet.call("w", fleet.request(PROMPT, request_id="x", max_tokens=400, n=2, temperature=1.0, seed=1))
            for _ in range(2)
        ]
        await trio.sleep(0.05)
        await VllmEngineStub(fleet.channels["w"]).abort(AbortRequest(request_ids=["x"]))
        for call in calls:
            assert [c.finish_reason for c in (await fleet.read(call)).completes] == ["abort", "abort"]
        assert fleet.workers["w"].counters.aborts == 2

    @pytest.mark.parametrize("seconds", [0.0, 0.0001, 0.02])
    async def test_a_client_that_leaves_ends_its_request(self, fleet, seconds):
        call = await fleet.call("w", fleet.request(PROMPT, max_tokens=4000, ignore_eos=True))
        await trio.sleep(seconds)
        call.cancel()
        await trio.sleep(1)
        core = fleet.workers["w"].engine.core
        assert (core.active, core.cache.held_blocks) == (0, 0)
        assert core.counters.aborts == core.counters.generates

    async def test_a_connection_that_breaks_ends_its_requests(self, fleet):
        await fleet.call("w", fleet.request(PROMPT, max_tokens=4000, ignore_eos=True))
        await fleet.call("w", fleet.request(PROMPT, max_tokens=4000, ignore_eos=True))
        await trio.sleep(0.1)
        fleet.channels["w"].close()
        await trio.sleep(1)
        core = fleet.workers["w"].engine.core
        assert (core.active, core.cache.held_blocks, core.counters.aborts) == (0, 0, 2)


class TestTime:
    async def test_a_step_gives_every_running_sequence_one_token_at_once(self, fleet):
        calls = [await fleet.call("w", fleet.request([*PROMPT, i], max_tokens=10, ignore_eos=True)) for i in range(20)]
        answers = [await fleet.read(call) for call in calls]
        assert all(answer.token_ids for answer in answers)
        core = fleet.workers["w"].engine.core
        assert core.counters.generated_tokens == 200
        assert core.counters.steps == 10

    async def test_decoding_takes_a_token_time_each_and_prefill_its_share(self, open_fleet):
        async with open_fleet(w={"prefill_tokens_per_second": 1000.0, "inter_token_seconds": 0.1}) as fleet:
            start = trio.current_time()
            answer = await fleet.generate("w", list(range(100)), max_tokens=4, ignore_eos=True)
            assert [round(at - start, 6) for at in answer.times] == [0.1, 0.2, 0.3, 0.4, 0.4]

    async def test_a_long_prompt_is_prefilled_between_the_tokens_of_others(self, open_fleet):
        settings = {"prefill_tokens_per_second": 1000.0, "inter_token_seconds": 0.01, "max_batched_tokens": 100}
        async with open_fleet(w=settings) as fleet:
            short = await fleet.call("w", fleet.request([1, 2], max_tokens=30, ignore_eos=True))
            long = await fleet.call("w", fleet.request(list(range(1000)), max_tokens=1))
            short_answer, long_answer = await fleet.read(short), await fleet.read(long)
            gaps = [b - a for a, b in zip(short_answer.times, short_answer.times[1:], strict=False)]
            assert max(gaps) < 0.12, "a chunk and a decode step at most"
            assert long_answer.times[0] > 1.0

    async def test_who_comes_first_is_admitted_first(self, open_fleet):
        async with open_fleet(w={"max_num_seqs": 1}) as fleet:
            calls = []
            for number in range(4):
                request = fleet.request([number + 1], max_tokens=5, ignore_eos=True, stream=False)
                calls.append(await fleet.call("w", request))
                await trio.sleep(0.001)
            assert (fleet.workers["w"].engine.core.active, len(fleet.workers["w"].engine.core.waiting)) == (1, 3)
            ends = [(await fleet.read(call)).times[0] for call in calls]
            assert ends == sorted(ends)
            assert len(set(ends)) == 4

    async def test_encoding_is_the_codecs(self, fleet):
        call = await fleet.call("w", fleet.request(PROMPT, max_tokens=3, ignore_eos=True))
        while (data := await call.receive()) is not None:
            assert encode(decode(GenerateResponse, data)) == data
