"""Observers do nothing unless told to, and several are told everything, in order."""

from __future__ import annotations

import inspect

import pytest

from trio_router.observe.hooks import Observer, Observers

HOOKS = [name for name, member in vars(Observer).items() if inspect.isfunction(member)]


def call(observer: Observer, hook: str) -> dict[str, object]:
    """Call a hook with something for each of its parameters; returns what was given."""
    method = getattr(observer, hook)
    parameters = inspect.signature(method).parameters
    given = {name: object() for name in parameters}
    keywords = {name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}
    method(
        *(value for name, value in given.items() if name not in keywords),
        **{name: given[name] for name in keywords},
    )
    return given


class Listening(Observer):
    """Remembers every call, whatever hook it was."""

    def __init__(self, name: str, heard: list[tuple[str, str, dict[str, object]]]) -> None:
        self.name = name
        self.heard = heard

    def __getattribute__(self, hook: str):
        if hook not in HOOKS:
            return super().__getattribute__(hook)
        signature = inspect.signature(getattr(Observer, hook))

        def listen(*args, **kwargs):
            bound = signature.bind(self, *args, **kwargs).arguments
            self.heard.append((self.name, hook, {key: value for key, value in bound.items() if key != "self"}))

        return listen


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_reaches_every_member_in_order(hook):
    heard: list[tuple[str, str, dict[str, object]]] = []
    given = call(Observers(Listening("first", heard), Listening("second", heard)), hook)
    assert heard == [("first", hook, given), ("second", hook, given)]


@pytest.mark.parametrize("hook", HOOKS)
def test_an_observer_that_overrides_nothing_does_nothing(hook):
    call(Observer(), hook)
