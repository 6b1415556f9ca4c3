"""What the demo finds wrong, and the picture it draws."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from trio_router.demo.story import SeenImage, Story, Timings, WorkerTally, picture, problems_of

IDLE = WorkerTally(
    name="prefill-2",
    role="prefill",
    address="127.0.0.1:2",
    generates=0,
    computed_prompt_tokens=0,
    recomputed_prompt_tokens=0,
    pulls=0,
    pulled_tokens=0,
    generated_tokens=0,
    ledger_entries=0,
    lease_expired=0,
)
STORY = Story(
    ok=True,
    problems=[],
    prompt="Hello?",
    text="The sea.",
    finish_reason="stop",
    connector="nixl",
    prefill_worker="prefill-1",
    decode_worker="decode-1",
    prompt_tokens=18,
    tokens=48,
    kv_pulls=1,
    pulled_tokens=18,
    recomputed_prompt_tokens=0,
    ledger_entries=0,
    handoffs=["consumed"],
    requests_in_flight=0,
    timings_ms=Timings(
        queue=1.0, prefill=100.0, handoff=20.0, decode=879.0, first_token=121.0, per_token=18.7, total=1000.0
    ),
    workers=[replace(IDLE, name="prefill-1", generates=1, computed_prompt_tokens=18), IDLE],
)
SEEN = SeenImage(
    source="sample",
    width=640,
    height=480,
    fetched={"prefill-1": 1, "decode-1": 0},
    processed={"prefill-1": 1, "decode-1": 0},
    identity=["applied"],
)
WITH_PICTURE = replace(STORY, image=SEEN)


class TestProblems:
    def test_a_good_chat_has_none(self):
        assert problems_of(STORY) == []

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            ({"timings_ms": None}, "the request has no record, or did not end well"),
            ({"prefill_worker": None}, "no prefill worker took part"),
            ({"decode_worker": None}, "no decode worker took part"),
            ({"tokens": 0}, "no token came"),
            ({"text": ""}, "no token came"),
            ({"finish_reason": "abort"}, "the answer ended with 'abort'"),
            ({"finish_reason": None}, "the answer ended with None"),
            ({"kv_pulls": 0}, "0 KV transfers instead of one"),
            ({"kv_pulls": 2}, "2 KV transfers instead of one"),
            ({"pulled_tokens": 0}, "no KV state came over"),
            ({"recomputed_prompt_tokens": 18}, "18 prompt tokens were computed twice"),
            ({"ledger_entries": 1}, "1 handoffs are still held"),
            ({"handoffs": ["released"]}, "the handoff ended as ['released']"),
            ({"handoffs": []}, "the handoff ended as []"),
            ({"requests_in_flight": 1}, "1 requests are still in flight"),
            ({"workers": [replace(IDLE, lease_expired=1)]}, "1 handoffs expired"),
        ],
    )
    def test_each_thing_that_is_off_is_one(self, change, problem):
        assert problems_of(replace(STORY, **change)) == [problem]

    def test_a_picture_that_was_seen_once_is_none(self):
        assert problems_of(WITH_PICTURE) == []

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            ({"fetched": {"prefill-1": 2}}, "the picture was fetched twice on prefill-1"),
            ({"fetched": {"prefill-1": 0}}, "the picture was fetched nowhere"),
            ({"processed": {}}, "the picture was processed nowhere"),
            ({"processed": {"decode-1": 1}}, "the picture was processed once on decode-1"),
            (
                {"processed": {"prefill-1": 1, "decode-1": 3}},
                "the picture was processed once on prefill-1 and 3 times on decode-1",
            ),
            ({"identity": ["invalid"]}, "the picture's identity was judged as ['invalid']"),
            ({"identity": []}, "the picture's identity was judged as []"),
        ],
    )
    def test_each_thing_that_is_off_with_a_picture_is_one(self, change, problem):
        assert problems_of(replace(WITH_PICTURE, image=replace(SEEN, **change))) == [problem]


class TestJson:
    def test_without_a_picture_nothing_is_said_of_one(self):
        assert "image" not in msgspec.to_builtins(STORY)
        assert msgspec.to_builtins(WITH_PICTURE)["image"]["processed"] == {"prefill-1": 1, "decode-1": 0}


class TestPicture:
    def test_bars_follow_one_another_and_are_as_long_as_their_time(self):
        bars = [
            line[22:53] for line in picture(STORY, plain=True).splitlines() if line.startswith("  ") and "#" in line
        ]
        starts = [bar.index("#") for bar in bars]
        lengths = [bar.count("#") for bar in bars]
        # 30 cells for 1000 ms; the queue's 1 ms is shown all the same.
        assert starts == [0, 0, 3, 3]
        assert lengths == [1, 3, 1, 26]

    def test_it_names_the_workers_and_the_times(self):
        shown = picture(STORY)
        assert "where 1.00 s went" in shown
        assert "prefill-1: 18 prompt tokens" in shown
        assert "prefill-1 → decode-1: 18 tokens of KV" in shown
        assert "decode-1: 18.7 ms a token" in shown
        assert "first token after 121.0 ms" in shown

    def test_it_fits_a_terminal_of_a_hundred_columns(self):
        assert max(map(len, picture(STORY).splitlines())) <= 100

    def test_plain_is_ascii(self):
        assert picture(STORY, plain=True).isascii()
        assert picture(WITH_PICTURE, plain=True).isascii()
        assert not picture(STORY).isascii()

    def test_a_failed_chat_tells_what_is_wrong_and_has_no_bars(self):
        shown = picture(
            replace(STORY, ok=False, problems=["no token came", "1 handoffs are still held"], timings_ms=None)
        )
        assert "This is not as it should be:\n  - no token came\n  - 1 handoffs are still held" in shown
        assert "went" not in shown.split("what the workers counted", maxsplit=1)[0]

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            ({}, "one 640x480 image, processed once on prefill-1, identity relayed"),
            (
                {"processed": {"prefill-1": 1, "decode-1": 1}, "identity": ["missing"]},
                "one 640x480 image, processed once on prefill-1 and once on decode-1, identity not relayed (missing)",
            ),
            (
                {"width": None, "height": None, "processed": {}, "identity": []},
                "one image, processed nowhere, identity not relayed (no decode leg)",
            ),
        ],
    )
    def test_it_says_in_a_line_what_the_workers_saw(self, change, told):
        shown = picture(replace(STORY, image=replace(SEEN, **change)), plain=True)
        assert f"what the workers saw\n\n  {told}\n" in shown

    def test_of_a_chat_without_a_picture_it_says_nothing_of_the_kind(self):
        assert "saw" not in picture(STORY)
