from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
import trio
import trio.testing

from trio_router.errors import LinkError
from trio_router.offload import Threads, inline
from trio_router.rpc.resolve import RACE_DELAY, Target, alternate_families, connect_first, resolve
from trio_router.rpc.transport import CONNECT_TIMEOUT, dial_tcp, open_tcp_listener, split_address

V4, V6 = socket.AF_INET, socket.AF_INET6


@contextmanager
def listening(*, backlog: int = 16) -> Iterator[Target]:
    with closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(backlog)
        yield Target(V4, sock.getsockname())


@contextmanager
def silent() -> Iterator[Target]:
    """An address that answers nothing: a kernel drops who knocks at a full queue."""
    with listening(backlog=0) as target, ExitStack() as knocking:
        for _ in range(4):
            knock = knocking.enter_context(closing(socket.socket()))
            knock.setblocking(False)
            knock.connect_ex(target.address)
        yield target


def refusing() -> Target:
    with listening() as target:
        return target


class AtStep(trio.abc.Instrument):
    """Calls `act` once, after the k-th task step from now."""

    def __init__(self, k: int, act: Callable[[], None]) -> None:
        self.left = k
        self.act = act

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.left -= 1
        if self.left == 0:
            self.act()


class TestNames:
    @pytest.mark.parametrize("host", ["127.0.0.1", "::1", "192.0.2.1"])
    async def test_a_literal_address_bothers_nobody(self, host):
        async def offload(function):
            raise AssertionError("asked for a literal")

        assert [target.address[:2] for target in await resolve(host, port=7, offload=offload)] == [(host, 7)]

    async def test_a_name_is_asked_for_through_the_offload(self):
        asked = []

        async def offload(function):
            asked.append(function)
            return function()

        listener = await open_tcp_listener("localhost", port=0, offload=offload)
        _, port = split_address(listener.address)
        (await dial_tcp(f"localhost:{port}", offload=offload)).close()
        listener.close()
        assert len(asked) == 2

    @pytest.mark.parametrize("offload", [inline, None], ids=["inline", "threads"])
    async def test_a_name_nobody_knows_is_a_link_error(self, offload):
        offload = offload or Threads(1)
        with pytest.raises(LinkError, match=r"cannot connect to no-such-host\.invalid:1: "):
            await dial_tcp("no-such-host.invalid:1", offload=offload)

    async def test_a_resolver_that_never_answers_ends_with_the_dial(self, autojump_clock):
        async def offload(function):
            await trio.sleep_forever()

        began = trio.current_time()
        with pytest.raises(LinkError, match=r"name\.test:1: no answer within 10 s"):
            await dial_tcp("name.test:1", offload=offload)
        assert trio.current_time() - began == CONNECT_TIMEOUT

    async def test_names_are_asked_for_in_threads_of_their_own(self):
        everyone = trio.to_thread.current_default_thread_limiter()
        async with trio.open_nursery() as nursery:
            for number in range(int(everyone.total_tokens)):
                await everyone.acquire_on_behalf_of(number)
            try:
                await resolve("localhost", port=1)
            finally:
                for number in range(int(everyone.total_tokens)):
                    everyone.release_on_behalf_of(number)
            nursery.cancel_scope.cancel()


class TestOrder:
    @pytest.mark.parametrize(
        ("families", "tried"),
        [
            ([], []),
            ([V4], [0]),
            ([V4, V4, V4], [0, 1, 2]),
            ([V6, V6, V6, V4, V4], [0, 3, 1, 2, 4]),
            ([V4, V6, V4], [0, 1, 2]),
        ],
    )
    def test_the_second_try_is_of_the_other_family(self, families, tried):
        targets = [Target(family, (str(number), 1)) for number, family in enumerate(families)]
        assert alternate_families(targets) == [targets[number] for number in tried]


class TestConnecting:
    async def test_a_refusal_passes_the_turn_at_once(self, mock_clock):
        with listening() as open_one:
            sock = await connect_first([refusing(), open_one])
            assert sock.getpeername() == open_one.address
            sock.close()

    async def test_a_silent_address_delays_the_next_one_and_no_more(self, mock_clock):
        connected: list[socket.socket] = []

        async def connect(*targets: Target) -> None:
            connected.append(await connect_first(targets))

        with silent() as black_hole, listening() as open_one:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(connect, black_hole, open_one)
                await trio.testing.wait_all_tasks_blocked()
                assert connected == []
                mock_clock.jump(RACE_DELAY)
            assert connected[0].getpeername() == open_one.address
        connected[0].close()

    async def test_when_nobody_takes_us_every_reason_is_told_once(self):
        with pytest.raises(OSError, match=r"^Connection refused$"):
            await connect_first([refusing(), refusing()])
        with pytest.raises(OSError, match="no address"):
            await connect_first([])
        unreachable = Target(V4, ("255.255.255.255", 1))
        with pytest.raises(OSError, match=r"^Connection refused; \w+"):
            await connect_first([refusing(), unreachable])

    async def test_who_is_cancelled_at_any_step_leaves_no_socket(self):
        # A socket that is forgotten is a ResourceWarning, and those are errors here.
        with listening() as target:
            for k in range(1, 50):
                scope = trio.CancelScope()
                instrument = AtStep(k, scope.cancel)
                trio.lowlevel.add_instrument(instrument)
                with scope:
                    (await connect_first([target, target])).close()
                trio.lowlevel.remove_instrument(instrument)
                if not scope.cancelled_caught:
                    break
        assert k > 3

    async def test_who_is_cancelled_while_addresses_are_silent_leaves_no_socket(self, mock_clock):
        with silent() as black_hole, trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(connect_first, [black_hole, black_hole])
                await trio.testing.wait_all_tasks_blocked()
                mock_clock.jump(RACE_DELAY)
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        assert scope.cancelled_caught
