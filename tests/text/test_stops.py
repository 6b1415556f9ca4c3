"""Stop strings: found whatever the cuts, nothing withheld that could go out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_router.text.stops import StopAutomaton, StopMatcher

# Few letters, so that stops overlap, nest and nearly match all the time.
letters = st.text(alphabet="ab€", max_size=12)
stop_lists = st.lists(st.text(alphabet="ab€", max_size=4), max_size=4)


def first_completed(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The brute-force answer: (end, stop) of the match that is complete first; of several, the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if complete:
            return end, max(complete, key=len)
    return None


def may_become_a_stop(text: str, stops: list[str]) -> int:
    """The length of the longest suffix that is a proper prefix of a stop."""
    lengths = [0]
    lengths += [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return max(lengths)


@given(pieces=st.lists(letters, max_size=8), stops=stop_lists, include=st.booleans())
def test_any_split_gives_what_the_whole_text_gives(pieces: list[str], stops: list[str], include: bool):
    matcher = StopMatcher(stops, include=include)
    text = emitted = ""
    for piece in pieces:
        text += piece
        safe, stop = matcher.feed(piece)
        emitted += safe
        expected = first_completed(text, stops)
        if expected is None:
            assert stop is None
            assert matcher.matched is None
            assert emitted == text[: len(text) - may_become_a_stop(text, stops)]
        else:
            end, matched = expected
            assert stop == matcher.matched == matched
            assert emitted == (text[:end] if include else text[: end - len(matched)])
    if first_completed(text, stops) is None:
        assert emitted + matcher.flush() == text
    else:
        assert matcher.flush() == ""


def feed_all(matcher: StopMatcher, text: str) -> list[tuple[str, str | None]]:
    return [matcher.feed(character) for character in text]


def test_a_stop_that_spans_pieces_leaves_the_text_before_it():
    matcher = StopMatcher(["</answer>"])
    assert matcher.feed("forty two</ans") == ("forty two", None)
    assert matcher.feed("wer> and more") == ("", "</answer>")


def test_an_included_stop_stays_but_what_follows_it_does_not():
    matcher = StopMatcher(["END"], include=True)
    assert matcher.feed("the E") == ("the ", None)
    assert matcher.feed("ND is not the end") == ("END", "END")


def test_only_a_possible_beginning_is_withheld():
    matcher = StopMatcher(["\n\nUser:", "###"])
    assert matcher.feed("a long line, and then\n") == ("a long line, and then", None)
    assert matcher.feed("another") == ("\nanother", None)
    assert matcher.feed(" #") == (" ", None)
    assert matcher.flush() == "#"


def test_a_failed_beginning_may_contain_the_real_one():
    matcher = StopMatcher(["aab"])
    assert feed_all(matcher, "aaab") == [("", None), ("", None), ("a", None), ("", "aab")]


def test_of_nested_stops_the_one_complete_first_wins():
    assert StopMatcher(["abcd", "bc"]).feed("xabcd") == ("xa", "bc")


def test_of_stops_complete_at_the_same_character_the_longest_wins():
    assert StopMatcher(["bc", "abc"]).feed("xabcd") == ("x", "abc")


@pytest.mark.parametrize("stops", [[], [""], ["", ""]])
def test_without_a_stop_everything_passes(stops: list[str]):
    matcher = StopMatcher(stops)
    assert matcher.feed("anything") == ("anything", None)
    assert matcher.flush() == ""


def test_nothing_comes_after_a_match():
    matcher = StopMatcher(["."])
    matcher.feed("one. two")
    assert matcher.feed(" three. four") == ("", ".")
    assert matcher.flush() == ""


def test_a_very_long_stop_string_costs_memory_in_proportion_to_its_length():
    stop = "ab" * 50_000
    matcher = StopMatcher([stop])
    assert matcher.feed(stop[:-1]) == ("", None)
    assert matcher.feed("b!") == ("", stop)


def test_matchers_that_share_an_automaton_do_not_share_what_they_have_seen():
    stops = StopAutomaton(["abc", ""])
    one, other = StopMatcher(stops), StopMatcher(stops)
    assert one.feed("ab") == ("", None)
    assert other.feed("c") == ("c", None)
    assert one.feed("c") == ("", "abc")
