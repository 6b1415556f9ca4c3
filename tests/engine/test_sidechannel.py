"""The side channel: frames survive every split, and a peer's nonsense costs that peer only."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_router.engine.sidechannel import (
    MAX_FRAME_BYTES,
    Contents,
    FramePipe,
    Hello,
    Lookup,
    Pulled,
    Read,
    Release,
    Renew,
    Welcome,
    Withdraw,
    serve_side_channel,
)
from trio_router.errors import LinkError, ProtocolViolation
from trio_router.rpc.memory import MemoryNetwork, memory_link

frames = st.one_of(
    st.builds(Hello, engine_id=st.text(), tp_size=st.integers(0, 64)),
    st.builds(Welcome, engine_id=st.text(), tp_size=st.integers(0, 64), block_bytes=st.integers(0, 2**32)),
    st.builds(
        Read, number=st.integers(0, 2**60), blocks=st.lists(st.integers(0, 2**40)).map(tuple), request_id=st.text()
    ),
    st.builds(Lookup, number=st.integers(0, 2**60), transfer_id=st.text(), count=st.integers(0, 2**40)),
    st.builds(Withdraw, number=st.integers(0, 2**60)),
    st.builds(Contents, number=st.integers(0, 2**60), data=st.none() | st.binary(max_size=3000)),
    st.builds(Pulled, request_id=st.text()),
    st.builds(Release, request_id=st.text()),
    st.builds(Renew, request_ids=st.lists(st.text()).map(tuple)),
)


@settings(deadline=None)
@given(st.lists(frames, max_size=8), st.integers(1, 50))
def test_frames_arrive_whole_and_in_order_through_any_pipe(sent, capacity):
    async def main():
        left, right = memory_link(capacity)
        sender, receiver = FramePipe(left), FramePipe(right)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.write)
            for frame in sent:
                sender.post(frame)
            assert [await receiver.receive() for _ in sent] == sent
            await sender.flushed()
            nursery.cancel_scope.cancel()

    trio.run(main)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ((MAX_FRAME_BYTES + 1).to_bytes(4, "big"), "frame of"),
        (b"\x00\x00\x00\x01\xc1", "cannot be read"),
        (b"\x00\x00\x00\x07\x91\xa5weird", "cannot be read"),
        (b"\x00\x00\x00\x00", "cannot be read"),
    ],
)
async def test_bytes_that_are_no_frame_are_a_violation(data, complaint):
    left, right = memory_link()
    left.send_nowait(data)
    with pytest.raises(ProtocolViolation, match=complaint):
        await FramePipe(right).receive()


async def test_the_end_of_the_transport_is_a_link_error():
    left, right = memory_link()
    left.send_nowait(b"\x00\x00")
    left.close()
    with pytest.raises(LinkError):
        await FramePipe(right).receive()


class Memory:
    """An engine that has two blocks and remembers what it was told, and by a caller of which engine."""

    def __init__(self):
        self.told = []

    def welcome(self, *, caller):
        return Welcome(engine_id=caller.engine_id, tp_size=1, block_bytes=4)

    def read(self, read, *, caller):
        return None if max(read.blocks) > 1 else b"".join(b"%04d" % block for block in read.blocks)

    def look_up(self, lookup, *, caller):
        self.told.append(("look up", lookup.transfer_id, lookup.count, caller.engine_id))
        caller.post(Contents(number=lookup.number, data=b"state"))

    def withdraw(self, number, *, caller):
        self.told.append(("withdraw", number, caller.engine_id))

    def hung_up(self, caller):
        self.told.append(("hung up", caller.engine_id))

    def pulled(self, request_id, *, caller):
        self.told.append(("pulled", request_id, caller.engine_id))

    def released(self, request_id, *, caller):
        self.told.append(("released", request_id, caller.engine_id))

    def renewed(self, request_ids, *, caller):
        self.told.append(("renewed", *request_ids, caller.engine_id))


@pytest.fixture
async def served(nursery):
    network, memory = MemoryNetwork(), Memory()
    nursery.start_soon(lambda: serve_side_channel(network.listen("p:2"), exporter=memory))
    return network, memory


async def connect(network, nursery):
    await trio.testing.wait_all_tasks_blocked()
    pipe = FramePipe(await network.dial("p:2"))

    async def write():
        try:
            await pipe.write()
        except LinkError:
            return

    nursery.start_soon(write)
    return pipe


async def test_questions_are_answered_and_notices_passed_on(served, nursery):
    network, memory = served
    pipe = await connect(network, nursery)
    pipe.post(Hello(engine_id="e", tp_size=1))
    assert await pipe.receive() == Welcome(engine_id="e", tp_size=1, block_bytes=4)
    pipe.post(Renew(request_ids=("a", "b")))
    pipe.post(Read(number=7, blocks=(1, 0), request_id="a"))
    pipe.post(Read(number=8, blocks=(0, 2), request_id="a"))
    pipe.post(Lookup(number=9, transfer_id="x", count=3))
    pipe.post(Withdraw(number=9))
    pipe.post(Pulled(request_id="a"))
    pipe.post(Release(request_id="b"))
    assert await pipe.receive() == Contents(number=7, data=b"00010000")
    assert await pipe.receive() == Contents(number=8, data=None)
    assert await pipe.receive() == Contents(number=9, data=b"state")
    await trio.testing.wait_all_tasks_blocked()
    notices = [("look up", "x", 3, "e"), ("withdraw", 9, "e"), ("pulled", "a", "e"), ("released", "b", "e")]
    assert memory.told == [("renewed", "a", "b", "e"), *notices]
    pipe.close()
    await trio.testing.wait_all_tasks_blocked()
    assert memory.told[-1] == ("hung up", "e")


async def test_a_peer_that_talks_nonsense_is_cut_off_and_the_next_is_served(served, nursery, caplog):
    network, _memory = served
    bad = await connect(network, nursery)
    bad.post(Contents(number=1, data=b""))
    with pytest.raises(LinkError):
        await bad.receive()
    assert "asked for nothing" in caplog.text
    good = await connect(network, nursery)
    good.post(Read(number=1, blocks=(0,), request_id="a"))
    assert await good.receive() == Contents(number=1, data=b"0000")
