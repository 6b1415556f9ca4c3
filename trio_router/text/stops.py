"""Stop strings over text that arrives in pieces: what may go out now, and where the output ends.

The match is the stop string that is complete first as the text grows, and of those that complete at the same character
the one that began first; so a match never waits for later text and does not depend on how the text was cut. This
module must not know tokens, special or not: token stops are decided before there is text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class StopMatcher:
    """Withholds only the longest suffix that may still become a stop string (a proper prefix of one).

    An Aho-Corasick automaton over the stop strings: its state *is* the withheld suffix. Empty stop strings are
    ignored. One matcher serves one choice of one request; the choices share the automaton.
    """

    __slots__ = ("_automaton", "_held", "_include", "_state", "matched")

    def __init__(self, stops: Iterable[str] | StopAutomaton, *, include: bool = False) -> None:
        """`include` keeps the matched stop string in the text, instead of ending the text before it."""
        self._automaton = stops if isinstance(stops, StopAutomaton) else StopAutomaton(stops)
        self._include = include
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """Take the next piece; returns the text now safe to emit and the stop string that ended the output, if one has.

        After a match every later call returns ("", the match).
        """
        if self.matched is not None:
            return "", self.matched
        automaton = self._automaton
        if not self._state and automaton.first.isdisjoint(text):
            return text, None
        state = self._state
        held = self._held + text
        offset = len(self._held)
        for position, character in enumerate(text, start=offset + 1):
            state = automaton.step(state, character)
            if stop := automaton.completed[state]:
                self.matched, self._held, self._state = stop, "", 0
                return held[: position if self._include else position - len(stop)], stop
        self._state = state
        safe = len(held) - automaton.depth[state]
        self._held = held[safe:]
        return held[:safe], None

    def flush(self) -> str:
        """End the text: returns what was withheld, which has not become a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held


class StopAutomaton:
    """The stop strings of a request, made ready to be looked for.

    States are their prefixes, 0 the empty one; it takes time and memory in proportion to their length (a microsecond
    and 300 bytes for each character), so whoever takes stop strings from outside has to bound them.
    """

    __slots__ = ("_children", "_fallback", "completed", "depth", "first")

    def __init__(self, stops: Iterable[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self.depth = [0]
        # The longest stop string that ends in this state; "" if none does.
        self.completed = [""]
        for stop in filter(None, stops):
            self._add(stop)
        self._link()
        self.first = frozenset(self._children[0])

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._children[state].get(character)
            if following is None:
                following = len(self._children)
                self._children[state][character] = following
                self._children.append({})
                self._fallback.append(0)
                self.depth.append(self.depth[state] + 1)
                self.completed.append("")
            state = following
        self.completed[state] = stop

    def _link(self) -> None:
        # Breadth first: a state's fallback is shorter than the state, so it is finished before it is needed.
        waiting = deque(self._children[0].values())
        while waiting:
            state = waiting.popleft()
            fallback = self._fallback[state]
            self.completed[state] = self.completed[state] or self.completed[fallback]
            for character, child in self._children[state].items():
                self._fallback[child] = self.step(fallback, character)
                waiting.append(child)

    def step(self, state: int, character: str) -> int:
        """The longest prefix of a stop string that ends with this character, given the one that ended before it."""
        children = self._children
        following = children[state].get(character)
        while following is None:
            if state == 0:
                return 0
            state = self._fallback[state]
            following = children[state].get(character)
        return following
