"""The prefill worker's end of the side channel: what others may read, have pushed to them, or say of its handoffs.

It looks things up in the core and answers at once; only a lookup of a transfer whose prefill has not ended waits here.
Everything is meant for the engine that the caller named: what is pinned under another rank's name is not there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from .blocks import SLOT_BYTES
from .core import Core
from .ledger import Pin, PinEnd
from .settings import Connector
from .sidechannel import Caller, Contents, Lookup, Read, Welcome

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A lookup that has no answer yet."""

    caller: Caller
    lookup: Lookup


class Exports:
    """An `Exporter` over one core."""

    def __init__(self, core: Core, *, changed: Callable[[], None]) -> None:
        """`changed` is called when blocks may have come back."""
        self._core = core
        self._changed = changed
        self._asked: list[_Asked] = []

    def __repr__(self) -> str:
        return f"<Exports of {self._core.engine_id}, {len(self._asked)} lookups>"

    def welcome(self, *, caller: Caller) -> Welcome:
        core, settings = self._core, self._core.settings
        return Welcome(
            engine_id=caller.engine_id if core.is_engine(caller.engine_id) else core.rank_engine_id(0),
            tp_size=settings.tp_size,
            block_bytes=settings.block_size * SLOT_BYTES,
        )

    def read(self, read: Read, *, caller: Caller) -> bytes | None:
        # Memory is read as it is, pinned or not; but the ranks of a real engine have memories of their own.
        if read.request_id in self._core.ledger.pins and self._pin(read.request_id, caller=caller) is None:
            return None
        try:
            return self._core.cache.read(read.blocks)
        except IndexError:
            return None

    def look_up(self, lookup: Lookup, *, caller: Caller) -> None:
        self._asked.append(_Asked(caller, lookup))
        self.push()

    def withdraw(self, number: int, *, caller: Caller) -> None:
        self._asked = [asked for asked in self._asked if (asked.caller, asked.lookup.number) != (caller, number)]

    def hung_up(self, caller: Caller) -> None:
        self._asked = [asked for asked in self._asked if asked.caller is not caller]

    def push(self) -> None:
        """Send every transfer that has been asked for and is there. Called when the ledger has gained something."""
        if self._core.settings.kv_connector is not Connector.MOONCAKE:
            return
        waiting: list[_Asked] = []
        for asked in self._asked:
            pin = self._pin(asked.lookup.transfer_id, caller=asked.caller)
            if pin is None:
                waiting.append(asked)
            else:
                data = self._core.push(pin, count=asked.lookup.count)
                asked.caller.post(Contents(number=asked.lookup.number, data=data))
                self._changed()
        self._asked = waiting

    def pulled(self, request_id: str, *, caller: Caller) -> None:
        self._end(request_id, how=PinEnd.PULLED, caller=caller)

    def released(self, request_id: str, *, caller: Caller) -> None:
        self._end(request_id, how=PinEnd.RELEASED, caller=caller)

    def renewed(self, request_ids: tuple[str, ...], *, caller: Caller) -> None:
        for request_id in request_ids:
            if self._pin(request_id, caller=caller) is not None:
                self._core.ledger.renew(request_id, now=trio.current_time())

    def _pin(self, request_id: str, *, caller: Caller) -> Pin | None:
        pin = self._core.ledger.pins.get(request_id)
        return None if pin is None or pin.engine_id != caller.engine_id else pin

    def _end(self, request_id: str, *, how: PinEnd, caller: Caller) -> None:
        if self._pin(request_id, caller=caller) is None:
            self._core.counters.stray_notices += 1
            _log.error("notice %r for request %s, which holds no handoff (any more)", how.value, request_id)
        else:
            self._core.end_pin(request_id, how=how)
        self._changed()
