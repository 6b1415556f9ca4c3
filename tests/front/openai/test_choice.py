"""One choice's visible text."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_router.front.openai.choice import Choice, TextRules
from trio_router.protocol.messages import GenerateComplete

LENGTH = GenerateComplete(finish_reason="length")
TEXTS = st.lists(st.sampled_from(["Hello", " wor", "ld", "中", "😀", " ", "STOP", "ST", "\n", "a"]), max_size=30).map(
    "".join
)


def told(choice: Choice, token_ids: list[int], *, cuts: list[int], fast: bool) -> str:
    """All that a choice says, its tokens in pieces, one at a time by the fast way where there is one."""
    text = ""
    for begin, end in zip([0, *cuts], [*cuts, len(token_ids)], strict=True):
        piece = token_ids[begin:end]
        if fast and len(piece) == 1 and piece[0] not in choice.hidden:
            ready = choice.json_piece(piece[0])
            if ready is not None:
                text += msgspec.json.decode(ready)
                continue
        text += choice.text(piece)
    return text + choice.finish(LENGTH)


@given(data=st.data(), text=TEXTS, fast=st.booleans())
def test_pieces_of_any_size_say_the_same_by_either_way(tokenizer, data, text: str, fast: bool) -> None:
    token_ids = tokenizer.encode(text)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(token_ids)), max_size=len(token_ids))))

    said = told(Choice(0, rules=TextRules(tokenizer=tokenizer)), token_ids, cuts=cuts, fast=fast)

    assert said == text


@given(data=st.data(), text=TEXTS, show=st.booleans(), fast=st.booleans())
def test_case_c7_a_stop_ends_the_text_however_it_is_cut(tokenizer, data, text: str, show: bool, fast: bool) -> None:
    token_ids = tokenizer.encode(text)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(token_ids)), max_size=len(token_ids))))
    choice = Choice(0, rules=TextRules(tokenizer=tokenizer, stops=("STOP",), show_stops=show))

    said = told(choice, token_ids, cuts=cuts, fast=fast)

    before, stop, _ = text.partition("STOP")
    assert said == before + (stop if show else "")
    assert (choice.finish_reason, choice.matched_stop) == (("stop", "STOP") if stop else ("length", None))


@pytest.mark.parametrize("at_once", [True, False])
def test_a_hidden_token_ends_the_text_after_what_was_withheld(tokenizer, at_once: bool) -> None:
    [stop] = tokenizer.encode(" this")
    token_ids = [*tokenizer.encode("Hello wo"), stop, *tokenizer.encode("never")]
    rules = TextRules(tokenizer=tokenizer, hidden=frozenset({stop}), stops=("world",))
    choice = Choice(0, rules=rules)

    said = told(choice, token_ids, cuts=[] if at_once else list(range(1, len(token_ids))), fast=True)

    assert said == "Hello wo"
    assert choice.finish_reason == "stop"


def test_an_unfinished_character_becomes_a_replacement_at_the_end(tokenizer) -> None:
    choice = Choice(0, rules=TextRules(tokenizer=tokenizer))

    assert choice.text(tokenizer.encode("中")[:2]) == ""
    assert choice.finish(LENGTH) == "\N{REPLACEMENT CHARACTER}"


def test_what_the_worker_matched_is_told(tokenizer) -> None:
    by_string, by_token = (Choice(0, rules=TextRules(tokenizer=tokenizer)) for _ in range(2))

    by_string.finish(GenerateComplete(finish_reason="stop", matched_stop_str="END"))
    by_token.finish(GenerateComplete(finish_reason="stop", matched_token_id=7))

    assert (by_string.matched_stop, by_token.matched_stop) == ("END", 7)


def test_special_tokens_show_only_when_asked_for(tokenizer) -> None:
    token_ids = tokenizer.encode("<|im_start|>Hello")

    assert Choice(0, rules=TextRules(tokenizer=tokenizer)).text(token_ids) == "Hello"
    shown = TextRules(tokenizer=tokenizer, skip_special_tokens=False)
    assert Choice(0, rules=shown).text(token_ids) == "<|im_start|>Hello"
