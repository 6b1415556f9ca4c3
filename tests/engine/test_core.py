"""The engine as a value: text depends on the whole context; blocks, phases and endings always add up."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from trio_router.engine.blocks import chain_hashes
from trio_router.engine.handoff import Directive, read_directive
from trio_router.engine.ledger import PinEnd
from trio_router.engine.sequence import EngineFailure, FinishReason, Phase
from trio_router.engine.settings import Connector, Faults

EOS = 63
PIN = Directive(pin=True)

prompts = st.lists(st.integers(0, 59), min_size=1, max_size=40)
hypothesis_with_fixtures = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def generate(make_core, submit, run):
    """What a fresh engine says to a prompt."""

    def do(prompt, *, core=None, **plan):
        core = core or make_core()
        _sequence, listener = submit(core, prompt, **plan)
        run(core)
        return listener

    return do


@pytest.fixture
def hand_over(make_core, submit, run):
    """Prefill on one engine, then pull into another; `spoil` may act on the prefill side in between."""

    def do(prompt, *, spoil=None, change=None, prefill=None, decode=None, max_tokens=24):
        prefill = prefill or make_core("p")
        decode = decode or make_core("d", role="decode")
        _sequence, listener = submit(prefill, prompt, directive=PIN, max_tokens=1)
        run(prefill)
        params = {**listener.finish.kv_params, **(change or {})}
        if spoil is not None:
            spoil(prefill, params)
        prompt_blocks = -(-len(prompt) // decode.cache.block_size)
        sequence, listener = submit(
            decode,
            prompt,
            directive=read_directive(params, prompt_blocks=prompt_blocks, connector=Connector.NIXL),
            max_tokens=max_tokens,
        )
        assert decode.admit(now=0.0) == [sequence]
        needed = len(sequence.blocks) - sequence.computed // decode.cache.block_size
        data = prefill.cache.read(sequence.pull.blocks[-needed:])
        prefill.end_pin(params["remote_request_id"], how=PinEnd.PULLED)
        decode.loaded(sequence, data=data, now=0.0)
        run(decode)
        return listener, prefill, decode

    return do


class TestText:
    """The next token is a function of the whole context."""

    @hypothesis_with_fixtures
    @given(prompt=prompts, other=st.integers(0, 59), data=st.data())
    def test_a_changed_token_anywhere_changes_the_text(self, generate, prompt, other, data):
        place = data.draw(st.integers(0, len(prompt) - 1))
        changed = [*prompt[:place], other, *prompt[place + 1 :]]
        same = generate(prompt, max_tokens=24, ignore_eos=True).token_ids
        assert (generate(changed, max_tokens=24, ignore_eos=True).token_ids == same) == (changed == prompt)

    @hypothesis_with_fixtures
    @given(prompt=prompts, chunk=st.integers(1, 9), block=st.integers(1, 16), width=st.integers(1, 3))
    def test_how_it_was_computed_does_not_matter(self, generate, make_core, prompt, chunk, block, width):
        reference = make_core(block_size=block, num_blocks=128)
        core = make_core(block_size=block, num_blocks=128, max_batched_tokens=chunk, max_num_seqs=width)
        expected = generate(prompt, core=reference, max_tokens=24, ignore_eos=True).token_ids
        assert generate(prompt, core=core, max_tokens=24, ignore_eos=True).token_ids == expected
        again = generate(prompt, core=core, max_tokens=24, ignore_eos=True).token_ids
        assert again == expected, "a prefix hit changes the work, not the text"

    def test_a_second_request_finds_the_prefix_of_the_first(self, generate, make_core):
        core = make_core()
        generate(list(range(11)), core=core)
        generate(list(range(11)), core=core)
        assert core.counters.prefix_hit_tokens == 8
        assert core.counters.computed_prompt_tokens == 11 + 3

    def test_an_answer_becomes_a_prefix_of_the_next_turn(self, generate, make_core):
        core = make_core()
        answer = generate(list(range(10)), core=core, max_tokens=10, ignore_eos=True).token_ids
        generate([*range(10), *answer, 5], core=core)
        # The last sampled token was never computed, so the fifth block was not full.
        assert core.counters.prefix_hit_tokens == 16

    def test_seeds_and_choices_sample_differently_and_repeatably(self, make_core, submit, run):
        def text(seed, index):
            core = make_core()
            _sequence, listener = submit(
                core, [1, 2, 3], greedy=False, seed=seed, index=index, max_tokens=24, ignore_eos=True
            )
            run(core)
            return tuple(listener.token_ids)

        texts = {text(seed, index) for seed in (1, 2) for index in (0, 1)}
        assert len(texts) == 4
        assert text(1, 0) in texts


class TestEndings:
    def test_length_counts_the_answer_or_the_whole_context(self, generate):
        assert len(generate([1, 2], max_tokens=5, ignore_eos=True).token_ids) == 5
        whole = generate([1, 2], max_tokens=None, ignore_eos=True)
        assert (len(whole.token_ids), whole.finish.reason) == (126, FinishReason.LENGTH)

    def test_end_of_text_stops_without_a_match_unless_it_is_ignored(self, generate):
        ended = next(
            listener
            for start in range(60)
            if (listener := generate([start], max_tokens=100)).finish.reason is FinishReason.STOP
        )
        assert ended.token_ids[-1] == EOS
        assert ended.finish.matched is None
        assert EOS not in ended.token_ids[:-1]

    def test_a_stop_token_is_reported_and_part_of_the_answer(self, generate):
        free = generate([3], max_tokens=20, ignore_eos=True).token_ids
        stopped = generate([3], max_tokens=20, ignore_eos=True, stop_token_ids=frozenset({free[6]}))
        assert stopped.token_ids == free[: free.index(free[6]) + 1]
        assert stopped.finish.matched == free[6]

    @pytest.mark.parametrize("minimum", [1, 7, 15])
    def test_nothing_stops_before_the_minimum(self, generate, minimum):
        every_word = frozenset(range(0, 63, 2))
        listener = generate([3], max_tokens=30, min_tokens=minimum, stop_token_ids=every_word)
        assert not every_word & set(listener.token_ids[:minimum])
        assert EOS not in listener.token_ids[:minimum]
        assert len(listener.token_ids) > minimum

    def test_an_injected_error_ends_before_the_first_token(self, make_core, submit, run):
        core = make_core()
        core.faults = Faults(error_rate=1.0)
        _sequence, listener = submit(core, [1, 2, 3], directive=PIN)
        run(core)
        assert (listener.token_ids, listener.finish.reason) == ([], FinishReason.ERROR)
        assert listener.finish.kv_params is None
        assert core.cache.held_blocks == 0


class TestHandoff:
    """What a decode worker says is what it pulled, right or wrong."""

    @hypothesis_with_fixtures
    @given(prompt=prompts)
    def test_a_pulled_context_reads_like_a_computed_one(self, generate, hand_over, prompt):
        listener, prefill, decode = hand_over(prompt)
        assert listener.token_ids == generate(prompt, max_tokens=24).token_ids
        assert decode.counters.recomputed_prompt_tokens == 0
        assert decode.counters.pulled_tokens == len(prompt)
        assert len(prefill.ledger) == 0
        assert prefill.cache.held_blocks == decode.cache.held_blocks == 0

    def test_only_what_is_not_in_the_own_cache_is_pulled(self, make_core, hand_over, generate):
        decode = make_core("d", role="decode")
        hand_over(list(range(10)), decode=decode)
        listener, _prefill, _decode = hand_over([*range(10), 20, 21, 22], decode=decode)
        assert decode.counters.pulled_tokens == 10 + 13 - 8
        assert listener.token_ids == generate([*range(10), 20, 21, 22], max_tokens=24).token_ids

    def test_a_handoff_whose_blocks_were_reused_gives_a_wrong_text_and_poisons_the_cache(
        self, make_core, hand_over, generate
    ):
        prompt = list(range(30, 42))

        def reuse(prefill, params):
            prefill.ledger.expire(1e9)
            while prefill.cache.match(chain_hashes(prompt, block_size=4)):
                generate([*range(prefill.counters.steps % 50, 50)], core=prefill, max_tokens=40)

        right = generate(prompt, max_tokens=24).token_ids
        decode = make_core("d", role="decode")
        listener, _prefill, _decode = hand_over(prompt, spoil=reuse, decode=decode)
        assert listener.finish.reason is not FinishReason.ERROR
        assert listener.token_ids != right
        assert generate(prompt, core=decode, max_tokens=24).token_ids != right

    def test_a_stale_handoff_whose_blocks_nobody_reused_still_reads_right(self, hand_over, generate):
        prompt = list(range(30, 42))
        listener, prefill, _decode = hand_over(prompt, spoil=lambda prefill, params: prefill.expire_pins(now=1e9))
        assert listener.token_ids == generate(prompt, max_tokens=24).token_ids
        assert (prefill.counters.lease_expired, prefill.counters.stray_notices) == (1, 1)

    def test_more_blocks_than_the_prompt_needs_give_a_wrong_text(self, hand_over, generate):
        prompt = list(range(30, 42))
        listener, _prefill, _decode = hand_over(prompt, change={"remote_block_ids": [[0, 1, 2, 3]]})
        assert listener.token_ids != generate(prompt, max_tokens=24).token_ids

    def test_a_prefill_leg_holds_exactly_its_prompt(self, make_core, submit, run):
        core = make_core()
        sequence, listener = submit(core, list(range(10)), directive=PIN, max_tokens=1)
        run(core)
        (pin,) = core.ledger.pins.values()
        assert (pin.num_tokens, len(pin.blocks), core.cache.held_blocks) == (10, 3, 3)
        assert listener.finish.kv_params["remote_num_tokens"] == 10
        assert listener.finish.kv_params["remote_block_ids"] == [list(pin.blocks)]
        assert listener.finish.kv_params["remote_request_id"] == sequence.internal_id

    def test_an_aborted_prefill_leg_pins_nothing(self, make_core, submit):
        core = make_core()
        sequence, listener = submit(core, list(range(10)), directive=PIN, max_tokens=1)
        core.admit(now=0.0)
        core.abort(sequence)
        assert listener.finish.reason is FinishReason.ABORT
        assert listener.finish.kv_params is None
        assert len(core.ledger) == core.cache.held_blocks == 0

    def test_a_dropped_handoff_pins_nothing(self, make_core, submit, run):
        core = make_core()
        core.faults = Faults(drop_handoff=True)
        _sequence, listener = submit(core, list(range(10)), directive=PIN, max_tokens=1)
        run(core)
        assert listener.finish.kv_params is None
        assert core.cache.held_blocks == 0

    def test_a_failed_load_ends_with_an_error_and_frees_the_blocks(self, make_core, submit):
        core = make_core(role="decode")
        params = {"do_remote_prefill": True, "remote_block_ids": [[1, 2, 3]], "remote_engine_id": "e"}
        params |= {"remote_host": "h", "remote_port": 1, "remote_request_id": "r"}
        sequence, listener = submit(
            core, list(range(10)), directive=read_directive(params, prompt_blocks=3, connector=Connector.NIXL)
        )
        core.admit(now=0.0)
        core.load_failed(sequence, now=0.0)
        assert (listener.token_ids, listener.finish.reason) == ([], FinishReason.ERROR)
        assert (core.cache.held_blocks, core.active) == (0, 0)

    def test_a_leg_aborted_while_it_pulls_keeps_its_blocks_until_nobody_writes_to_them(self, make_core, submit):
        core = make_core(role="decode")
        params = {"do_remote_prefill": True, "remote_block_ids": [[1, 2, 3]], "remote_engine_id": "e"}
        params |= {"remote_host": "h", "remote_port": 1, "remote_request_id": "r"}
        sequence, listener = submit(
            core, list(range(10)), directive=read_directive(params, prompt_blocks=3, connector=Connector.NIXL)
        )
        core.admit(now=0.0)
        core.abort(sequence)
        assert listener.finish.reason is FinishReason.ABORT
        assert (core.cache.held_blocks, core.active) == (3, 1)
        core.loaded(sequence, data=bytes(3 * 4 * 8), now=0.0)
        assert (core.cache.held_blocks, core.active) == (0, 0)
        assert core.counters.pulls == 0

    def test_a_decode_worker_without_a_handoff_counts_what_it_computes(self, make_core, submit, run):
        core = make_core(role="decode")
        submit(core, list(range(10)))
        run(core)
        assert core.counters.recomputed_prompt_tokens == 10


class TestDeath:
    def test_a_malformed_handoff_kills_the_engine_when_it_is_scheduled(self, make_core, submit):
        core = make_core(max_num_seqs=1)
        first, first_listener = submit(core, [1, 2, 3])
        _bad, bad_listener = submit(core, [1], directive=Directive(fatal="remote_block_ids are missing"))
        core.admit(now=0.0)
        assert not core.dead, "it waits for a place"
        core.abort(first)
        core.admit(now=0.0)
        assert core.dead
        assert bad_listener.failure is EngineFailure.DEAD
        assert first_listener.failure is None

    def test_a_handoff_without_a_request_id_hangs_and_then_kills(self, make_core, submit):
        core = make_core(role="decode")
        params = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "e"}
        params |= {"remote_host": "h", "remote_port": 1}
        sequence, _listener = submit(
            core, [1, 2], directive=read_directive(params, prompt_blocks=1, connector=Connector.NIXL)
        )
        _other, other_listener = submit(core, [1, 2])
        core.admit(now=0.0)
        assert not core.dead
        core.abort(sequence)
        assert core.dead
        assert other_listener.failure is EngineFailure.DEAD


class TestHolding:
    def test_a_held_prefill_is_computed_and_gives_its_token_when_it_is_let_go(self, make_core, submit, run):
        core = make_core()
        core.faults = Faults(hold_prefill=True)
        _sequence, held = submit(core, [1, 2, 3], directive=PIN, max_tokens=1)
        _other, plain = submit(core, [1, 2, 3])
        run(core)
        assert (held.token_ids, plain.finish is None) == ([], False)
        assert core.counters.computed_prompt_tokens == 6
        core.faults = Faults()
        run(core)
        assert held.finish.reason is FinishReason.LENGTH

    def test_a_first_token_waits_for_its_time(self, make_core, submit, run):
        core = make_core()
        core.faults = Faults(first_frame_delay_seconds=2.0)
        _sequence, listener = submit(core, [1, 2, 3])
        run(core, now=10.0)
        assert (listener.token_ids, core.next_ready) == ([], 12.0)
        run(core, now=12.0)
        assert len(listener.token_ids) == 8
        assert core.next_ready is None


class TestAdmission:
    def test_a_newcomer_leaves_a_block_for_each_that_runs(self, make_core, submit):
        core = make_core(num_blocks=10, max_context_length=40)
        for start in (0, 20):
            submit(core, list(range(start, start + 16)), max_tokens=4)
        core.admit(now=0.0)
        assert (len(core.running), core.cache.free_blocks) == (2, 2)
        submit(core, [50], max_tokens=1)
        core.admit(now=0.0)
        assert len(core.waiting) == 1, "one block is there, but the two that run will need it"
        while core.waiting:
            core.perform(core.plan(now=0.0), now=0.0)
            core.admit(now=0.0)
        assert core.counters.preemptions == 0


class EngineMachine(RuleBasedStateMachine):
    """Requests, aborts, notices, steps and time in any order on a cache that is too small for them."""

    sequences = Bundle("sequences")
    make_core = submit = staticmethod(lambda *a, **k: None)

    @initialize(width=st.integers(1, 4), blocks=st.integers(10, 16), chunk=st.integers(1, 12))
    def begin(self, width, blocks, chunk):
        self.core = self.make_core(
            num_blocks=blocks, max_context_length=40, max_num_seqs=width, max_batched_tokens=chunk
        )
        self.now = 0.0
        self.listeners = {}
        self.prompts = {}

    @rule(target=sequences, prompt=st.lists(st.integers(0, 3), min_size=1, max_size=30), pin=st.booleans())
    def submit_one(self, prompt, pin):
        sequence, listener = self.submit(
            self.core, prompt, directive=Directive(pin=pin), max_tokens=1 if pin else 9, ignore_eos=True
        )
        self.listeners[sequence] = listener
        self.prompts[sequence] = prompt
        return sequence

    @rule(sequence=sequences)
    def abort(self, sequence):
        finished = self.listeners[sequence].finish is not None
        assert self.core.abort(sequence) is not finished

    @rule()
    def step(self):
        self.core.admit(now=self.now)
        step = self.core.plan(now=self.now)
        if step is None:
            assert not self.core.running, "nobody is stuck in the window"
        else:
            assert step.chunk_tokens <= self.core.settings.max_batched_tokens
            self.core.perform(step, now=self.now)

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds):
        self.now += seconds
        self.core.expire_pins(now=self.now)

    @rule(sequence=sequences, how=st.sampled_from([PinEnd.PULLED, PinEnd.RELEASED]))
    def notice(self, sequence, how):
        held = sequence.internal_id in self.core.ledger.pins
        assert (self.core.end_pin(sequence.internal_id, how=how) is not None) is held

    @invariant()
    def every_held_block_has_an_owner(self):
        if not hasattr(self, "core"):
            return
        core = self.core
        owned = Counter(block for sequence in self.listeners for block in sequence.blocks)
        owned.update(block for pin in core.ledger.pins.values() for block in pin.blocks)
        assert owned == core.cache._held
        assert all(not s.blocks for s in self.listeners if s.phase in (Phase.WAITING, Phase.FINISHED))
        assert core.active <= core.settings.max_num_seqs

    @invariant()
    def every_text_is_the_one_an_idle_engine_would_give(self):
        if not hasattr(self, "core"):
            return
        for sequence, listener in self.listeners.items():
            if listener.finish is not None and listener.finish.reason is FinishReason.LENGTH:
                key = (tuple(self.prompts[sequence]), len(listener.token_ids))
                if key not in self.texts:
                    reference = self.make_core(num_blocks=10, max_context_length=40)
                    _same, alone = self.submit(reference, list(key[0]), max_tokens=key[1], ignore_eos=True)
                    while (step := (reference.admit(now=0.0), reference.plan(now=0.0))[1]) is not None:
                        reference.perform(step, now=0.0)
                    self.texts[key] = alone.token_ids
                assert listener.token_ids == self.texts[key]

    def teardown(self):
        """Left alone, everything comes to an end and every block comes back."""
        if not hasattr(self, "core"):
            return
        for _ in range(400):
            self.step()
            self.now += 1.0
            self.core.expire_pins(now=self.now)
            self.every_held_block_has_an_owner()
        assert all(listener.finish is not None for listener in self.listeners.values())
        assert self.core.cache.held_blocks == len(self.core.waiting) == 0
        counters = self.core.counters
        assert counters.pinned == counters.pulled + counters.released + counters.lease_expired


def test_the_engine_keeps_its_books_whatever_happens(make_core, submit):
    class Machine(EngineMachine):
        texts: ClassVar[dict] = {}

    Machine.make_core, Machine.submit = staticmethod(make_core), staticmethod(submit)
    run_state_machine_as_test(Machine, settings=settings(max_examples=40, stateful_step_count=30, deadline=None))
