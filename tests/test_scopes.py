"""A nursery's lone error leaves `plain_errors` as itself, with its own story intact."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from trio_router.scopes import plain_errors


async def run(*tasks: Callable[[], Awaitable[None]], body: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint):
    with plain_errors():
        async with trio.open_nursery() as nursery:
            for task in tasks:
                nursery.start_soon(task)
            await body()


async def fail() -> None:
    try:
        raise OSError("the cause")
    except OSError as exc:
        raise ValueError("the error") from exc


async def fail_without_a_cause() -> None:
    try:
        raise OSError("handled")
    except OSError:
        raise ValueError("the error")  # noqa: B904  # the implicit context is what is looked at


async def test_nothing_wrong_is_nothing_raised():
    await run(trio.lowlevel.checkpoint)


@pytest.mark.parametrize("where", ["task", "body"])
async def test_the_one_error_comes_out_bare_with_its_cause(where):
    with pytest.raises(ValueError, match="the error") as caught:
        await (run(fail) if where == "task" else run(body=fail))
    assert isinstance(caught.value.__cause__, OSError)


async def test_an_implicit_context_is_kept_as_it_was():
    with pytest.raises(ValueError, match="the error") as caught:
        await run(fail_without_a_cause)
    assert caught.value.__cause__ is None
    assert isinstance(caught.value.__context__, OSError)
    assert not caught.value.__suppress_context__


async def test_tasks_cancelled_because_of_it_say_nothing_more():
    with pytest.raises(ValueError, match="the error"):
        await run(fail, trio.sleep_forever, body=trio.sleep_forever)


async def test_two_errors_stay_together():
    async def fail_too() -> None:
        raise KeyError("another")

    with pytest.raises(ExceptionGroup) as caught:
        await run(fail, fail_too)
    assert {type(error) for error in caught.value.exceptions} == {ValueError, KeyError}


async def test_an_error_in_a_nursery_within_comes_out_bare_too():
    async def nested() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)

    with pytest.raises(ValueError, match="the error"):
        await run(nested)


async def test_a_cancellation_passes_to_the_scope_it_belongs_to():
    with trio.CancelScope() as scope:
        scope.cancel()
        await run(trio.sleep_forever, trio.sleep_forever, body=trio.sleep_forever)
    assert scope.cancelled_caught


async def test_without_a_nursery_an_error_is_left_alone():
    error = ValueError("plain")
    with pytest.raises(ValueError, match="plain") as caught, plain_errors():
        raise error
    assert caught.value is error
