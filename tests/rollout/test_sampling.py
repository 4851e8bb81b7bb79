import itertools
from dataclasses import replace

import pytest

from rlmath.algorithms.types import PartialCompletion, Prompt, ToolCall
from rlmath.config.schema import RolloutConfig
from rlmath.rollout.sampling import (
    RolloutSeed,
    SamplingSettings,
    group_requests,
    request_seed,
    requests_of,
    training_sampling,
)

PROMPTS = [Prompt(f"q-{n}", f"{n}+1=", (n, 50, 51), (str(n + 1),), "math") for n in range(7)]


def test_a_seed_never_changes_between_versions():
    # The first 8 bytes of `printf 1/4/2/q-17 | sha256sum`, half of them.
    assert (
        request_seed(run_seed=1, step=4, prompt_id="q-17", sample_index=2)
        == 0xC1481B3E234EB8E3 >> 1
    )


def test_ingredients_do_not_run_into_each_other():
    names = ("1", "11", "1/1", "1/1/1", "")
    seeds = [
        request_seed(run_seed, step, name, sample)
        for run_seed, step, sample, name in itertools.product((1, 11), (1, 11), (1, 11), names)
    ]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize("prompt_id", ["", "ü", "\ud800", "q" * 10_000])
def test_any_name_has_a_seed_that_fits_63_bits(prompt_id: str):
    assert 0 <= request_seed(2**31 - 1, 10**6, prompt_id, 511) < 2**63


def test_every_sample_of_every_prompt_is_a_request():
    settings = RolloutConfig(group_size=3, min_new_tokens=2, max_new_tokens=9, temperature=0.7)
    requests_PG = group_requests(
        PROMPTS, training_sampling(settings), RolloutSeed(run_seed=1, step=4)
    )
    assert [[request.key for request in row] for row in requests_PG] == [
        [(p, g) for g in range(3)] for p in range(7)
    ]
    request = requests_PG[2][1]
    assert request.token_ids == (2, 50, 51)
    assert request.seed == request_seed(1, 4, "q-2", 1)
    assert (request.min_new_tokens, request.max_new_tokens) == (2, 9)
    assert (request.temperature, request.top_p) == (0.7, 1.0)
    assert len({request.seed for row in requests_PG for request in row}) == 21


def test_a_prompt_that_comes_again_in_a_step_gets_other_samples():
    seed = RolloutSeed(run_seed=1, step=4)
    settings = SamplingSettings(3, 1.0, 1.0, 0, 9)
    requests = group_requests([PROMPTS[0], PROMPTS[1], PROMPTS[0], PROMPTS[0]], settings, seed)
    assert [request.seed for request in requests[0]] == [
        request_seed(1, 4, "q-0", g) for g in (0, 1, 2)
    ]
    assert [request.seed for request in requests[2]] == [
        request_seed(1, 4, "q-0", g) for g in (3, 4, 5)
    ]
    assert len({request.seed for row in requests for request in row}) == 12
    assert [request.key for request in requests[3]] == [(3, 0), (3, 1), (3, 2)]


def test_a_slice_continues_where_the_completion_stands():
    settings = SamplingSettings(
        samples=2, temperature=1.0, top_p=1.0, min_new_tokens=6, max_new_tokens=20
    )
    request = requests_of(PROMPTS[3], 0, settings, RolloutSeed(1, 4))[1]
    begun = replace(request, slice_tokens=8)
    assert begun.token_ids == (3, 50, 51)
    assert (begun.least_now, begun.most_now) == (6, 8)
    second = replace(begun, so_far=PartialCompletion((9, 8, 7, 6), (-1.0,) * 4))
    assert (second.least_now, second.most_now) == (2, 8)
    assert begun.seed == second.seed == request_seed(1, 4, "q-3", 1), (
        "its noise goes on by position"
    )
    whole = replace(second, slice_tokens=None)
    assert (whole.least_now, whole.most_now) == (2, 16)
    call = ToolCall("1", "1", "ok", position=3)
    answered = PartialCompletion().extended((9, 8), (-1.0,) * 2, policy_version=0, step=0)
    behind_output = replace(whole, so_far=answered.answered([call], [7] * 30))
    assert (behind_output.least_now, behind_output.most_now) == (4, 18), "outputs do not count"
    last = replace(begun, so_far=PartialCompletion((9,) * 17, (-1.0,) * 17))
    assert (last.least_now, last.most_now) == (0, 3)
    short_request = replace(request, slice_tokens=4)
    assert (short_request.least_now, short_request.most_now) == (4, 4), (
        "vLLM refuses a larger least number"
    )
    finished = replace(begun, so_far=PartialCompletion((9,) * 20, (-1.0,) * 20))
    with pytest.raises(AssertionError, match="it has 20 of 20 tokens"):
        finished.most_now  # noqa: B018
