"""A prefill leg by itself: what it still holds when it is left."""

from __future__ import annotations

import pytest
import trio

from trio_router.dispatch.handoff import HandoffBook, HandoffSettings
from trio_router.dispatch.legs import RequestView
from trio_router.dispatch.prefill import PrefillLeg
from trio_router.errors import PrefillFailed
from trio_router.fleet.client import WorkerFacts
from trio_router.fleet.worker import Lease, Worker, WorkerRole, WorkerSpec
from trio_router.testing.scripted import complete, handoff_params

HANDOFF = complete(kv_transfer_params_json=handoff_params())


class Call:
    """A call's record: messages nobody has taken, and whether it has ended."""

    def __init__(self, *messages: bytes, ended: bool) -> None:
        self.messages = list(messages)
        self.ended = ended

    def take_nowait(self) -> list[bytes]:
        taken, self.messages = self.messages, []
        return taken

    async def receive(self) -> bytes | None:
        if self.messages:
            return self.messages.pop(0)
        if not self.ended:
            await trio.sleep_forever()
        return None

    def cancel(self) -> None:
        self.ended = True


@pytest.fixture
def leg() -> PrefillLeg:
    worker = Worker(WorkerSpec(url="grpc://p:1", role=WorkerRole.PREFILL), client=None)
    worker.facts = WorkerFacts(model="tiny", model_info=None, kv_connector="NixlConnector")
    book = HandoffBook(settings=HandoffSettings(), on_end=lambda state: None)
    view = RequestView(message=b"", client_id="c", n=1)
    return PrefillLeg(Lease(worker), view=view, attempt_id="a", transfer_id="t", book=book)


async def test_one_that_was_never_sent_has_nothing_more(leg):
    assert not leg.has_more


@pytest.mark.parametrize(
    ("messages", "ended", "more"),
    [([], False, True), ([HANDOFF], False, True), ([HANDOFF], True, True), ([], True, False)],
)
async def test_it_has_more_while_an_answer_may_come_or_is_there(leg, messages, ended, more):
    leg.call = Call(*messages, ended=ended)
    assert leg.has_more is more


async def test_i2_what_was_read_before_counts_after_the_call_has_been_drained(leg, autojump_clock):
    leg.call = Call(HANDOFF, ended=False)
    with trio.move_on_after(1):
        await leg.finish()
    leg.leave()
    assert leg.has_more
    leg.harvest()
    assert leg.handoff is not None


async def test_i2_a_frame_that_came_when_its_reader_had_just_been_cancelled_is_found(leg):
    leg.call = Call(HANDOFF, ended=False)
    leg.leave()
    leg.harvest()
    assert leg.handoff is not None


async def test_leaving_returns_the_slot_once(leg):
    assert leg.worker.in_flight == 1
    leg.leave()
    leg.leave()
    assert leg.worker.in_flight == 0


async def test_looking_for_a_handoff_in_no_answer(leg):
    with pytest.raises(PrefillFailed):
        leg.harvest()
