"""A promise about nurseries that every `open_*` function makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import trio


@contextmanager
def plain_errors() -> Iterator[None]:
    """Let a lone error leave a nursery as itself.

    A nursery wraps whatever leaves it in an exception group. Where an API promises a plain error (its block fails with
    what its caller raised), the one real error is taken out; Cancelled beside it says nothing more. Two or more
    real errors stay a group, since dropping one would hide a fault.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        leaves = list(_leaves(group))
        real = [leaf for leaf in leaves if not isinstance(leaf, trio.Cancelled)]
        if len(real) > 1:
            raise
        _raise_as_it_is(real[0] if real else leaves[0])


def _raise_as_it_is(error: BaseException) -> NoReturn:
    # Raising inside an except block makes the group the error's context, and "from" would replace its cause: either
    # would lose what the error says of its own origin.
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context
        del error, context


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
