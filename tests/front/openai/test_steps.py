"""The client leaves at the k-th step of the whole run, for every k: nothing may be left behind."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
import trio

from trio_router.errors import LinkError
from trio_router.front.app import HttpFront
from trio_router.front.texts import LoadedText
from trio_router.rpc.memory import MemoryNetwork

END = b"0\r\n\r\n"


class AtStep(trio.abc.Instrument):
    """Calls `action` before the k-th task step counted from `arm`."""

    def __init__(self, step: int, action) -> None:
        self._left = step
        self._action = action

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._left -= 1
        if self._left == 0:
            self._action()


async def one_run(router, tokenizer, *, body: bytes, step: int, request_bytes) -> bool:
    """Whether the answer was complete before the client left."""
    network = MemoryNetwork(capacity_bytes=700)
    front = HttpFront(router, LoadedText(tokenizer))
    async with trio.open_nursery() as nursery:
        await nursery.start(front.serve, network.listen("a:1"))
        link = await network.dial("a:1")
        link.send_nowait(request_bytes("POST", "/v1/chat/completions", body=body))
        leave = AtStep(step, link.close)
        trio.lowlevel.add_instrument(leave)
        received = b""
        # A client that has left finds its own link closed.
        with contextlib.suppress(LinkError):
            while not received.endswith(END):
                await link.wait_readable()
                received += link.recv_nowait(300) or b""
        trio.lowlevel.remove_instrument(leave)
        await trio.sleep(0.5)
        complete = received.endswith(END)
        if not complete:
            assert front.server.connections == 0
        assert front.server.held_body_bytes <= len(body)
        nursery.cancel_scope.cancel()
    return complete


@pytest.mark.parametrize("fails", [False, True])
def test_leaving_at_any_step_ends_the_request(scripted, frames, tokenizer, request_bytes, fails: bool) -> None:
    body = msgspec.json.encode({"messages": [{"role": "user", "content": "Hi"}], "stream": True})
    script = [1.0, *frames.text("Hello")]
    if fails:
        script[-1] = frames.complete("error")
    outcomes: set[str] = set()
    for step in range(1, 200):
        router = scripted([part for frame in script for part in (frame, 1.0)][1:])
        clock = trio.testing.MockClock(autojump_threshold=0)

        async def main(router=router, step=step) -> bool:
            return await one_run(router, tokenizer, body=body, step=step, request_bytes=request_bytes)

        complete = trio.run(main, clock=clock)
        outcomes.update(router.outcomes)
        assert "open" not in router.outcomes
        assert len(router.outcomes) <= 1
        if complete:
            break
    else:
        raise AssertionError("the run never completed")

    assert outcomes == {"cancelled", "failed" if fails else "ok"}
