import itertools

import pytest

from rlmath.rollout.collect import RolloutSeed, engine_requests
from rlmath.rollout.sampling import request_seed
from rlmath.types import Prompt

PROMPTS = [Prompt(f"q-{n}", f"{n}+1=", (n, 50, 51), (str(n + 1),), "math") for n in range(7)]


def test_a_seed_never_changes_between_versions():
    # The first 8 bytes of `printf 1/4/2/q-17 | sha256sum`, half of them.
    assert request_seed(run_seed=1, step=4, prompt_id="q-17", sample_index=2) == 0xC1481B3E234EB8E3 >> 1


@pytest.mark.parametrize(
    "changed", [{"run_seed": 2}, {"step": 5}, {"prompt_id": "q-18"}, {"sample_index": 3}], ids=str
)
def test_a_seed_depends_on_everything_it_is_made_of(changed: dict):
    usual = {"run_seed": 1, "step": 4, "prompt_id": "q-17", "sample_index": 2}
    assert request_seed(**usual) != request_seed(**usual | changed)


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


@pytest.mark.parametrize("engines", [1, 2, 3, 8])
def test_every_sample_of_every_prompt_is_asked_of_one_engine(engines: int):
    seed = RolloutSeed(run_seed=1, step=4)
    shares = [engine_requests(PROMPTS, 3, engines, index, seed) for index in range(engines)]
    keys = [request.key for share in shares for request in share]
    assert sorted(keys) == [(p, g) for p in range(7) for g in range(3)]
    prompts_of = [{request.key[0] for request in share} for share in shares]
    assert max(map(len, prompts_of)) - min(map(len, prompts_of)) <= 1
    assert sum(map(len, prompts_of)) == 7, "a group is sampled whole, by one engine"


def test_a_request_is_the_same_whichever_engine_gets_it():
    seed = RolloutSeed(run_seed=1, step=4)
    (alone,) = [engine_requests(PROMPTS, 2, 1, 0, seed)]
    shared = [request for index in range(3) for request in engine_requests(PROMPTS, 2, 3, index, seed)]
    assert sorted(shared, key=lambda request: request.key) == alone
    assert alone[5].key == (2, 1)
    assert alone[5].token_ids == (2, 50, 51)
    assert alone[5].seed == request_seed(1, 4, "q-2", 1)
    assert len({request.seed for request in alone}) == 14
