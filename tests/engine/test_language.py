"""What may follow what: only words that did in the corpus, and never a barred one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_router.engine.language import ENDING_ODDS, Language

DIGESTS = st.integers(0, 2**64 - 1)
EOS = 99
CORPUS = """The cat sat on the mat. The dog ran!

Did the cat run? The
mat sat still."""
WORDS: dict[str, int] = {}


def encode(text: str) -> list[int]:
    return [WORDS.setdefault(word, len(WORDS)) for word in text.replace(".", " .").replace("!", " !").split()]


@pytest.fixture(scope="module")
def little() -> Language:
    return Language.from_corpus(CORPUS, encode=encode, decode=lambda _ids: " x", eos_token_id=EOS)


@settings(deadline=None)
@given(DIGESTS)
def test_a_text_starts_with_a_word_that_starts_a_sentence(little, digest):
    token = little.next_token(digest, earlier=-1, last=1000)
    assert token in {WORDS["The"], WORDS["Did"]}


@settings(deadline=None)
@given(DIGESTS, DIGESTS)
def test_a_word_is_followed_by_what_followed_it_somewhere(little, digest, second):
    token = little.next_token(digest, earlier=WORDS["sat"], last=WORDS["on"])
    assert token == WORDS["the"]
    assert little.next_token(second, earlier=WORDS["on"], last=token) in {WORDS["mat"], WORDS["cat"]}


def test_a_pair_that_was_seen_once_wanders_now_and_then(little):
    steady = {little.next_token((1 << 52) + digest, earlier=WORDS["on"], last=WORDS["the"]) for digest in range(64)}
    wandering = {little.next_token(digest, earlier=WORDS["on"], last=WORDS["the"]) for digest in range(64)}
    assert steady == {WORDS["mat"]}
    assert wandering == {WORDS["mat"], WORDS["cat"]}, "the last word alone decides"


def test_a_text_may_end_after_a_sentence_and_nowhere_else(little):
    endings = [little.next_token(digest << 40, earlier=WORDS["mat"], last=WORDS["."]) for digest in range(120)]
    assert endings.count(EOS) == 120 / ENDING_ODDS
    assert EOS not in {little.next_token(digest << 40, earlier=-1, last=WORDS["cat"]) for digest in range(120)}


@settings(deadline=None)
@given(DIGESTS, st.frozensets(st.integers(0, 30)), st.integers(-1, 30), st.integers(-1, 30), st.booleans())
def test_a_barred_token_is_never_chosen(little, digest, barred, earlier, last, end_too):
    barred = barred | {EOS} if end_too else barred
    assert little.next_token(digest, earlier=earlier, last=last, barred=barred) not in barred


@settings(deadline=None)
@given(DIGESTS)
def test_a_word_that_has_been_begun_is_ended_as_it_was_somewhere_after_that_word(digest):
    # "a cr-ab ran", "the cr-ow flew": after "a cr" only "ab" will do, however the digest wanders.
    pieces = Language(
        [[1, 10, 11, 3], [2, 10, 12, 4]], starters=[1], ends=[], word_starts=[1, 2, 3, 4, 10], eos_token_id=EOS
    )
    assert pieces.next_token(digest, earlier=1, last=10) == 11


def test_a_language_without_a_beginning_is_refused():
    with pytest.raises(ValueError, match="start"):
        Language([], starters=[], ends=[], word_starts=[], eos_token_id=EOS)
