"""Sampling parameters: the wire's defaults and the engine's refusals."""

from __future__ import annotations

import pytest

from trio_router.engine.sampling import plan_sampling
from trio_router.errors import BadRequest
from trio_router.protocol.messages import ChoiceConstraint, SamplingParams


def test_an_empty_message_samples_one_choice_at_temperature_one():
    plan = plan_sampling(SamplingParams(), vocab_size=100)
    assert (plan.greedy, plan.n, plan.max_tokens, plan.seed) == (False, 1, None, None)


@pytest.mark.parametrize(
    ("params", "greedy"),
    [
        (SamplingParams(temperature=0.0), True),
        (SamplingParams(temperature=0.7), False),
        (SamplingParams(top_k=1), True),
        (SamplingParams(top_k=2), False),
    ],
)
def test_temperature_zero_and_a_single_candidate_are_greedy(params, greedy):
    assert plan_sampling(params, vocab_size=100).greedy is greedy


def test_everything_the_engine_reads_is_carried_over():
    params = SamplingParams(
        temperature=1.0,
        n=3,
        max_tokens=9,
        min_tokens=2,
        stop=["a", "b"],
        stop_token_ids=[4, 5],
        ignore_eos=True,
        seed=-7,
        skip_special_tokens=True,
        truncate_prompt_tokens=11,
    )
    plan = plan_sampling(params, vocab_size=100)
    assert (plan.n, plan.max_tokens, plan.min_tokens, plan.stop) == (3, 9, 2, ("a", "b"))
    assert (plan.stop_token_ids, plan.ignore_eos, plan.seed) == ({4, 5}, True, -7)
    assert (plan.skip_special_tokens, plan.truncate_prompt_tokens) == (True, 11)


@pytest.mark.parametrize(
    ("params", "names"),
    [
        (SamplingParams(temperature=-0.1), "temperature"),
        (SamplingParams(temperature=float("nan")), "temperature"),
        (SamplingParams(top_p=1.5), "top_p"),
        (SamplingParams(top_p=-1.0), "top_p"),
        (SamplingParams(min_p=2.0), "min_p"),
        (SamplingParams(frequency_penalty=3.0), "frequency_penalty"),
        (SamplingParams(presence_penalty=-3.0), "presence_penalty"),
        (SamplingParams(repetition_penalty=-1.0), "repetition_penalty"),
        (SamplingParams(max_tokens=0), "max_tokens"),
        (SamplingParams(max_tokens=3, min_tokens=4), "min_tokens"),
        (SamplingParams(temperature=0.0, n=2), "greedy"),
        (SamplingParams(n=5000), "n must be"),
        (SamplingParams(stop=[""]), "stop"),
        (SamplingParams(stop=["x"] * 65), "stop"),
        (SamplingParams(stop_token_ids=[100]), "stop_token_ids"),
        (SamplingParams(truncate_prompt_tokens=-2), "truncate_prompt_tokens"),
        (SamplingParams(logprobs=0), "logprobs"),
        (SamplingParams(prompt_logprobs=1), "prompt_logprobs"),
        (SamplingParams(regex="a+"), "regex"),
        (SamplingParams(json_schema="{}"), "json_schema"),
        (SamplingParams(json_object=True), "json_object"),
        (SamplingParams(choice=ChoiceConstraint(choices=["a"])), "choice"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(params, names):
    with pytest.raises(BadRequest, match=names):
        plan_sampling(params, vocab_size=100)
