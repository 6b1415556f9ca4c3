"""The simulated engine as a value: who waits, who runs, what a step computes, and how requests end.

Pure and synchronous: time comes in as numbers, tokens go out through outlets, and pulls are only asked for. The
scheduler drives it; nothing else changes a sequence's phase.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from .blocks import KvCache
from .counters import Counters
from .handoff import Handoff, KvParams, handoff_params
from .language import Language
from .ledger import Ledger, Pin, PinEnd
from .sequence import EngineFailure, Finish, FinishReason, Phase, Sequence
from .settings import Connector, Faults, Role, WorkerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the next step will compute: prompt chunks by sequence, and the sequences that decode one token."""

    chunks: list[tuple[Sequence, int]]
    decodes: list[Sequence]
    chunk_tokens: int


class Core:
    """One engine. Everything that needs a wait happens between its methods, never inside them."""

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        language: Language,
        engine_id: str,
        transfer_address: str,
        draw: Callable[[], float],
    ) -> None:
        """`transfer_address` is where handoffs can be pulled; `draw` gives numbers in [0, 1) for fault rates."""
        self.settings = settings
        self.engine_id = engine_id
        self.transfer_address = transfer_address
        self.cache = KvCache(num_blocks=settings.num_blocks, block_size=settings.block_size)
        self.ledger = Ledger(self.cache, lease_seconds=settings.lease)
        self.counters = Counters()
        self.faults = Faults()
        self.dead = False
        self.waiting: deque[Sequence] = deque()
        self.pulling: list[Sequence] = []
        self.running: list[Sequence] = []
        self._blocked_at: tuple[Sequence, int] | None = None
        self._handed_on = _HANDED_ON.get(settings.kv_connector, frozenset[FinishReason]())
        self._ranks = itertools.cycle(range(settings.dp_size))
        self._language = language
        self._draw = draw

    def __repr__(self) -> str:
        state = "dead" if self.dead else "alive"
        waiting, pulling, running = len(self.waiting), len(self.pulling), len(self.running)
        return f"<Core {state} {waiting} waiting {pulling} pulling {running} running {self.cache!r}>"

    @property
    def active(self) -> int:
        """Sequences in the window. One that pulls has its place already."""
        return len(self.running) + len(self.pulling)

    # ---- ranks

    def next_rank(self) -> int:
        """The rank of a request that does not ask for one: each in turn."""
        return next(self._ranks)

    def rank_engine_id(self, rank: int) -> str:
        """What handoffs call the engine of a rank, as vLLM names it."""
        return self.engine_id if self.settings.dp_size == 1 else f"{self.engine_id}_dp{rank}"

    def is_engine(self, engine_id: str) -> bool:
        """Whether a handoff may name this worker, or a rank of it, so. The base id of several ranks names none."""
        return any(engine_id == self.rank_engine_id(rank) for rank in range(self.settings.dp_size))

    # ---- admission

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence; admission is first come, first served."""
        self.waiting.append(sequence)

    def admit(self, *, now: float) -> list[Sequence]:
        """Move sequences into the window while there are places and blocks. Returns those that must pull first."""
        to_pull: list[Sequence] = []
        while self.waiting and self.active < self.settings.max_num_seqs and not self.dead:
            sequence = self.waiting[0]
            if sequence.directive.fatal is not None and not sequence.generated:
                self.die()
                break
            if self._blocked_at == (sequence, self.cache.releases) or not self._give_blocks(sequence):
                # Looked for again only when blocks have come back.
                self._blocked_at = (sequence, self.cache.releases)
                break
            if sequence.pull is None and sequence.lacks_pixels and sequence.directive.pull is None:
                # Nothing brings the state, and an encoder is run without its input (seen on vLLM 0.32).
                self.die()
                break
            self.waiting.popleft()
            if sequence.pull is not None:
                sequence.move(Phase.PULLING)
                self.pulling.append(sequence)
                to_pull.append(sequence)
            else:
                self._start(sequence, now=now)
        return to_pull

    def _give_blocks(self, sequence: Sequence) -> bool:
        """Blocks for the whole context so far, the front of it from the prefix cache where that has it."""
        cache = self.cache
        size = cache.block_size
        hits = cache.match(sequence.reusable_hashes(size))
        fresh = -(-len(sequence.tokens) // size) - len(hits)
        # A block for each of those that run already: else the newcomer would be preempted with its prefill wasted.
        if not cache.fits(hits, fresh=fresh + len(self.running)):
            return False
        cache.retain(hits)
        allocated = cache.allocate(fresh)
        assert allocated is not None  # noqa: S101 - `fits` said so
        sequence.blocks = hits + allocated
        hit_tokens = len(hits) * size
        sequence.resume(cache, length=hit_tokens)
        if not sequence.generated:
            sequence.cached_tokens = hit_tokens
            self.counters.prefix_hit_tokens += hit_tokens
        return True

    def _start(self, sequence: Sequence, *, now: float) -> None:
        rate = self.faults.error_rate
        # Media whose state was pulled, and then lost to a preemption, can be computed by nobody here.
        if sequence.lacks_pixels or (rate and self._draw() < rate):
            self._end(sequence, finish=Finish(reason=FinishReason.ERROR), token_ids=[], now=now)
            return
        sequence.move(Phase.RUNNING)
        self.running.append(sequence)

    # ---- pulls

    def loaded(self, sequence: Sequence, *, data: bytes, now: float) -> None:
        """A pull has brought the blocks that the prefix cache did not have. Raises ValueError if the size is wrong."""
        self.pulling.remove(sequence)
        if sequence.phase is Phase.FINISHED:
            self._drop_blocks(sequence)
            return
        hit_tokens = sequence.computed
        own = sequence.blocks[hit_tokens // self.cache.block_size :]
        self.cache.write(own, data=data)
        self.counters.pulls += 1
        self.counters.pulled_tokens += sequence.prompt_length - hit_tokens
        sequence.resume(self.cache, length=sequence.prompt_length)
        sequence.publish(self.cache)
        handoff = sequence.pull
        if isinstance(handoff, Handoff) and handoff.cached_tokens is not None:
            sequence.cached_tokens = handoff.cached_tokens
        self._start(sequence, now=now)

    def load_failed(self, sequence: Sequence, *, now: float) -> None:
        """A pull came to nothing: the request ends with an error the caller may retry, and without a token."""
        self.pulling.remove(sequence)
        if sequence.phase is Phase.FINISHED:
            self._drop_blocks(sequence)
        else:
            self.counters.failed_pulls += 1
            self._end(sequence, finish=Finish(reason=FinishReason.ERROR), token_ids=[], now=now)

    # ---- steps

    def plan(self, *, now: float) -> Step | None:
        """The next step's work with its blocks allocated, or None when nobody can be moved on."""
        budget = self.settings.max_batched_tokens
        chunks: list[tuple[Sequence, int]] = []
        decodes: list[Sequence] = []
        for sequence in list(self.running):
            remaining = sequence.prefill_end - sequence.computed
            if remaining > 0:
                count = min(remaining, budget)
                if count:
                    budget -= count
                    chunks.append((sequence, count))
            elif (
                (len(sequence.tokens) > sequence.prompt_length or self._may_begin(sequence, now=now))
                and sequence.phase is Phase.RUNNING
                and self._make_room(sequence)
            ):
                decodes.append(sequence)
        # Making room for one may have preempted another that was counted in before it.
        chunks = [(sequence, count) for sequence, count in chunks if sequence.phase is Phase.RUNNING]
        decodes = [sequence for sequence in decodes if sequence.phase is Phase.RUNNING]
        if not chunks and not decodes:
            return None
        return Step(chunks=chunks, decodes=decodes, chunk_tokens=sum(count for _sequence, count in chunks))

    def seconds(self, step: Step) -> float:
        """How long a step takes."""
        decoding = self.settings.inter_token_seconds if step.decodes else 0.0
        return decoding + step.chunk_tokens / self.settings.prefill_tokens_per_second

    def perform(self, step: Step, *, now: float) -> None:
        """Do what was planned, except for sequences that have ended since; every token of the step leaves now."""
        self.counters.steps += 1
        for sequence, count in step.chunks:
            if sequence.phase is Phase.RUNNING:
                self._count_prompt(sequence, count=count)
                sequence.compute(self.cache, count=count)
                if not sequence.is_prefilling and (sequence.generated or self._may_begin(sequence, now=now)):
                    self._emit(sequence, now=now)
        for sequence in step.decodes:
            if sequence.phase is Phase.RUNNING:
                pending = len(sequence.tokens) - sequence.computed
                if pending:
                    sequence.compute(self.cache, count=pending)
                self._emit(sequence, now=now)

    @property
    def next_ready(self) -> float | None:
        """When the first sequence held back by a delay may go on; None when there is none."""
        return min((sequence.ready_at for sequence in self.running if sequence.ready_at is not None), default=None)

    def _may_begin(self, sequence: Sequence, *, now: float) -> bool:
        """Whether a sequence whose context is ready may give its first token."""
        faults = self.faults
        # The delay first: one that is over and not taken back would have the engine look again and again.
        if faults.first_frame_delay_seconds and sequence.ready_at is None:
            sequence.ready_at = now + faults.first_frame_delay_seconds
        if sequence.ready_at is not None:
            if sequence.ready_at > now:
                return False
            sequence.ready_at = None
        return not (faults.hold_prefill and sequence.directive.pin)

    def _make_room(self, sequence: Sequence) -> bool:
        """A block for the token that the next step computes, taken from the youngest if need be."""
        cache = self.cache
        if len(sequence.tokens) <= len(sequence.blocks) * cache.block_size:
            return True
        while True:
            fresh = cache.allocate(1)
            if fresh is not None:
                sequence.blocks += fresh
                return True
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False

    def _preempt(self, sequence: Sequence) -> None:
        self.counters.preemptions += 1
        self.running.remove(sequence)
        self._drop_blocks(sequence)
        sequence.rewind()
        sequence.move(Phase.WAITING)
        self.waiting.appendleft(sequence)

    def _count_prompt(self, sequence: Sequence, *, count: int) -> None:
        of_prompt = max(0, min(sequence.computed + count, sequence.prompt_length) - sequence.computed)
        self.counters.computed_prompt_tokens += of_prompt
        if self.settings.role == Role.DECODE or sequence.directive.pull is not None:
            self.counters.recomputed_prompt_tokens += of_prompt

    def _emit(self, sequence: Sequence, *, now: float) -> None:
        token = sequence.sample(self._language)
        self.counters.generated_tokens += 1
        finish = sequence.judge(token)
        if finish is None:
            sequence.outlet.put(sequence, token_ids=[token], finish=None)
        else:
            self._end(sequence, finish=finish, token_ids=[token], now=now)

    # ---- endings

    def _end(self, sequence: Sequence, *, finish: Finish, token_ids: list[int], now: float) -> None:
        if sequence.phase is Phase.RUNNING:
            self.running.remove(sequence)
        sequence.move(Phase.FINISHED)
        self.counters.finished += 1
        if sequence.directive.pin and finish.reason in self._handed_on and not self.faults.drop_handoff:
            finish = Finish(reason=finish.reason, matched=finish.matched, kv_params=self._pin(sequence, now=now))
        self._drop_blocks(sequence)
        sequence.outlet.put(sequence, token_ids=token_ids, finish=finish)

    def _pin(self, sequence: Sequence, *, now: float) -> KvParams | None:
        """Move the computed blocks from the sequence to the ledger; the rest stay for `_drop_blocks`.

        Returns what the leg tells of it: nothing when they are kept to be pushed, for the other leg knows their name.
        """
        count = -(-sequence.computed // self.cache.block_size)
        blocks = tuple(sequence.blocks[:count])
        del sequence.blocks[:count]
        engine_id = self.rank_engine_id(sequence.rank)
        transfer_id = sequence.directive.transfer_id
        if transfer_id is not None and transfer_id in self.ledger.pins:
            # Transfer ids are others' to choose: of two with one name the later is what a lookup means.
            self.end_pin(transfer_id, how=PinEnd.RELEASED)
        name = transfer_id or sequence.internal_id
        self.ledger.pin(name, engine_id=engine_id, blocks=blocks, num_tokens=sequence.computed, now=now)
        self.counters.pinned += 1
        if transfer_id is not None:
            return None
        return handoff_params(
            address=self.transfer_address,
            engine_id=engine_id,
            request_id=sequence.internal_id,
            blocks=blocks,
            num_tokens=sequence.computed,
            cached_tokens=sequence.cached_tokens,
            tp_size=self.settings.tp_size,
        )

    def _drop_blocks(self, sequence: Sequence) -> None:
        self.cache.release(sequence.blocks)
        sequence.blocks = []

    def abort(self, sequence: Sequence) -> bool:
        """End a sequence from outside; its outlet gets an `abort`. False when it has ended before.

        One that is pulling keeps its blocks until the pull is over: the peer is still writing into them. One that
        would hang for ever for want of a request id takes the engine with it, as was seen on a real one.
        """
        if sequence.phase is Phase.FINISHED:
            return False
        was = sequence.phase
        sequence.move(Phase.FINISHED)
        if was is Phase.WAITING:
            self.waiting.remove(sequence)
        elif was is Phase.RUNNING:
            self.running.remove(sequence)
        if was is not Phase.PULLING:
            self._drop_blocks(sequence)
        sequence.outlet.put(sequence, token_ids=[], finish=_ABORTED)
        if was is Phase.PULLING and isinstance(sequence.pull, Handoff) and sequence.pull.request_id is None:
            self.die()
        return True

    def push(self, pin: Pin, *, count: int) -> bytes | None:
        """The contents of the last `count` blocks of a pin, which ends with that. None when it has not as many."""
        if count > len(pin.blocks):
            return None
        data = self.cache.read(pin.blocks[len(pin.blocks) - count :])
        self.end_pin(pin.request_id, how=PinEnd.PULLED)
        return data

    def end_pin(self, request_id: str, *, how: PinEnd) -> Pin | None:
        """A notice about a handoff has come. None, counted as stray, when it is not held."""
        pin = self.ledger.end(request_id, how=how)
        if pin is None:
            self.counters.stray_notices += 1
        elif how is PinEnd.PULLED:
            self.counters.pulled += 1
        else:
            self.counters.released += 1
        return pin

    def expire_pins(self, *, now: float) -> int:
        """End the pins whose lease has run out; returns how many."""
        expired = len(self.ledger.expire(now))
        self.counters.lease_expired += expired
        return expired

    def die(self) -> None:
        """The engine is gone: everything in it fails, and so will everything that comes."""
        if self.dead:
            return
        self.dead = True
        sequences = [*self.waiting, *self.pulling, *self.running]
        self.waiting.clear()
        self.running.clear()
        for sequence in sequences:
            if sequence.phase is not Phase.FINISHED:
                sequence.move(Phase.FINISHED)
                sequence.outlet.fail(EngineFailure.DEAD)


# Which endings of a prefill leg leave something to hand on (vLLM 0.32): Mooncake keeps blocks only at the length limit.
_HANDED_ON: Final = {
    Connector.NIXL: frozenset({FinishReason.STOP, FinishReason.LENGTH}),
    Connector.MOONCAKE: frozenset({FinishReason.LENGTH}),
}
_ABORTED = Finish(reason=FinishReason.ABORT)
