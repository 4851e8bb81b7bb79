"""Sampling, counted by hand."""

from dataclasses import replace

import pytest

from rlmath.planning.memory_formulas import engine_bytes
from rlmath.planning.planner.lengths import Batch, Lengths, lengths_with_mean
from rlmath.planning.planner.rollout import plan_rollout, slots_of
from rlmath.planning.planner.training import StepInputs
from tests.planning.planner.shapes import (
    BATCH,
    CONFIG,
    GPU,
    HEAD_FLOPS,
    LAYER_FLOPS,
    PAIR_FLOPS,
    TINY,
    inputs,
)

KV_BYTES = 2 * 4 * 2 * 4 * 2
"""Bytes of a token: keys and values, layers, heads, head dim, bfloat16."""
TOKEN_FLOPS = 4 * LAYER_FLOPS + HEAD_FLOPS
RUNNING = BATCH.prompt_tokens + 5
"""Tokens of a sequence that is being decoded, on average: its prompt and half of its completion."""


def with_rollout(one: StepInputs, **changes: object) -> StepInputs:
    return replace(one, config=replace(one.config, rollout=replace(one.config.rollout, **changes)))


def alike(sequences: int, slots: int) -> StepInputs:
    """Completions of ten tokens, each of another prompt of six."""
    batch = Batch(sequences, 1, 6.0, Lengths(10.0, 1e-6, 16))
    return with_rollout(inputs(CONFIG, 1, batch=batch), max_num_seqs=slots)


def test_engine_steps_of_completions_that_are_alike():
    for sequences, slots, steps in ((8, 8, 10), (8, 4, 20), (80, 4, 200)):
        assert plan_rollout(alike(sequences, slots)).steps == pytest.approx(steps, abs=1)
    few = alike(4, 4).batch
    assert plan_rollout(inputs(CONFIG, 16, batch=few)).steps == pytest.approx(10, abs=1), (
        "most engines have none"
    )


def test_the_last_steps_are_those_of_the_longest():
    lengths = lengths_with_mean(100, 1000)
    few, many = (
        plan_rollout(
            with_rollout(inputs(CONFIG, 16, batch=Batch(n, 1, 6.0, lengths)), max_num_seqs=64)
        )
        for n in (16 * 64, 16 * 512)
    )
    assert few.slots == many.slots == 64 and few.steps == pytest.approx(
        lengths.at(1 - 0.5 / 1024), abs=1
    )
    assert many.steps == pytest.approx(512 * 100 / 64 - 100 + 1000, abs=1)


def test_work_of_decoding_is_that_of_every_token():
    """Ten tokens of each of three sequences, one by one, beside the prompts."""
    read = 3 * sum(6 + position for position in range(10))
    flops = 30 * TOKEN_FLOPS + 2 * PAIR_FLOPS * read + 3 * 6 * (TOKEN_FLOPS + 6 * PAIR_FLOPS)
    three = alike(3, 3)
    cluster = three.cluster
    fast = replace(three.cluster.machine, flops=1.0)
    assert plan_rollout(
        replace(three, cluster=replace(cluster, machine=fast))
    ).seconds == pytest.approx(flops, rel=0.01)
    weights = engine_bytes(TINY, CONFIG.rollout, "cuda", 2, GPU.total_bytes).weights
    fast = replace(cluster.machine, memory=1.0)
    seconds = plan_rollout(replace(three, cluster=replace(cluster, machine=fast))).seconds
    assert seconds == pytest.approx(10 * weights + read * KV_BYTES, rel=0.02)
    slow = replace(cluster.coefficients, decode_step_seconds=1e6, sequence_step_seconds=1.0)
    seconds = plan_rollout(replace(three, cluster=replace(cluster, coefficients=slow))).seconds
    assert seconds == pytest.approx(10e6 + 30, rel=1e-4)


def test_as_many_sequences_as_settings_requests_and_the_cache_allow():
    eight = alike(8, 4)
    assert slots_of(eight, requests=8) == 4
    assert slots_of(eight, requests=3) == 3
    rollout = replace(
        CONFIG.rollout, max_num_seqs=200, max_num_batched_tokens=256, memory_share=0.5
    )
    engine = engine_bytes(TINY, rollout, "cuda", 2, GPU.total_bytes)
    cache = 100.5 * RUNNING * KV_BYTES
    small = replace(GPU, total_bytes=round(2 * (cache + engine.weights + engine.workspace)))
    smaller = replace(eight, config=replace(CONFIG, rollout=rollout), target=small)
    assert slots_of(smaller, requests=500) == 100


def test_more_engines_have_less_to_do_until_only_the_longest_is_left():
    batch = Batch(512, 16, 6.0, lengths_with_mean(4.0, 16))
    steps = [plan_rollout(inputs(CONFIG, n, batch=batch)).steps for n in (1, 2, 8, 128, 512)]
    assert steps == sorted(steps, reverse=True) and steps[-2:] == [16, 16]


def test_ranks_of_an_engine_share_its_work_and_sum_hidden_states():
    two = replace(CONFIG, rollout=replace(CONFIG.rollout, tensor_parallel=2))
    whole, split = (
        plan_rollout(inputs(config, n, flops=1.0)) for config, n in ((CONFIG, 1), (two, 2))
    )
    assert split.seconds == pytest.approx(whole.seconds / 2)
    one_node = inputs(two, 2, node=1.0)
    assert plan_rollout(one_node).seconds == pytest.approx(8 * 10 * 8 * 2 * 2 * 4, rel=1e-3)
    with_tools = plan_rollout(with_given_tokens(one_node, 5.0))
    assert with_tools.seconds == pytest.approx(8 * 15 * 8 * 2 * 2 * 4, rel=1e-3)


def test_a_prompt_is_read_once_for_its_group_where_whole_blocks_hold_it():
    def prefill(prompt: float) -> float:
        single, pair = (
            plan_rollout(
                inputs(
                    CONFIG, 1, batch=replace(BATCH, prompt_tokens=prompt, group=group), flops=1.0
                )
            )
            for group in (1, 2)
        )
        return single.seconds - pair.seconds

    assert prefill(8.0) == 0.0
    assert prefill(16.0) == pytest.approx(8 / 2 * 16 * (TOKEN_FLOPS + 16 * PAIR_FLOPS))


LONG = Batch(512, 16, 6.0, lengths_with_mean(300.0, 1000))
LARGE = with_rollout(
    inputs(replace(CONFIG, data=replace(CONFIG.data, prompts_per_step=32)), 4, batch=LONG),
    group_size=16,
    max_new_tokens=1000,
    max_num_seqs=64,
)


@pytest.mark.parametrize("on_new_weights", ["recompute", "keep", "finish"])
def test_engines_of_their_own_wait_for_the_longest_where_steps_may_not_overlap(on_new_weights: str):
    """512 completions of 300 tokens on 2 engines of 64 places are 1,200 steps without a tail."""
    turns = plan_rollout(with_rollout(LARGE, ranks=2, max_staleness=0))
    ahead = plan_rollout(
        with_rollout(LARGE, ranks=2, max_staleness=4, on_new_weights=on_new_weights)
    )
    assert turns.steps == pytest.approx(1200 - 300 + 1000, abs=1)
    if on_new_weights == "finish":
        assert ahead == turns
    else:
        assert ahead.steps == pytest.approx(1200, abs=1)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"ranks": 2, "max_staleness": 2}, 500),
        ({"tail": "carry", "max_staleness": 1}, 500),
        ({"tail": "carry", "max_staleness": 9}, 100),
        ({"tail": "defer"}, 500),
        ({}, 1000),
    ],
)
def test_the_longest_completion_is_finished_within_its_steps(settings: dict, steps: int):
    """A completion for every place: 300 tokens on average, 1,000 at most."""
    assert plan_rollout(with_rollout(LARGE, max_num_seqs=512, **settings)).steps == pytest.approx(
        steps, abs=1
    )


# ---------------------------------------------------------------- tools


def with_given_tokens(inputs: StepInputs, tokens: float, calls: float = 0.0) -> StepInputs:
    """The same completions, each of which so many calls give so many tokens."""
    return replace(inputs, batch=replace(inputs.batch, given_tokens=tokens, calls=calls))


def rollout_seconds(inputs: StepInputs, **speeds: float) -> float:
    """Seconds of a rollout on a machine without limits, but for these."""
    machine = replace(inputs.cluster.machine, **speeds)
    return plan_rollout(replace(inputs, cluster=replace(inputs.cluster, machine=machine))).seconds


def test_given_tokens_are_computed_but_not_decoded():
    """Four tokens in the middle of three completions: sequences of 20 tokens, not of 16."""
    three = alike(3, 3)
    with_tools = with_given_tokens(three, 4.0)
    more_flops = 3 * (4 * TOKEN_FLOPS + (20**2 - 16**2) * PAIR_FLOPS)
    flops = rollout_seconds(with_tools, flops=1.0) - rollout_seconds(three, flops=1.0)
    assert flops == pytest.approx(more_flops)
    # The last five sampled tokens of each read four more.
    more_bytes = 3 * 5 * 4 * KV_BYTES
    read_bytes = rollout_seconds(with_tools, memory=1.0) - rollout_seconds(three, memory=1.0)
    assert read_bytes == pytest.approx(more_bytes)
    assert plan_rollout(with_tools).steps == plan_rollout(three).steps


def test_given_tokens_take_places_of_the_cache():
    """While a completion is sampled, half of them are there on average."""
    rollout = replace(
        CONFIG.rollout, max_num_seqs=200, max_num_batched_tokens=256, memory_share=0.5
    )
    engine = engine_bytes(TINY, rollout, "cuda", 2, GPU.total_bytes)
    cache = 60.5 * (RUNNING + 4) * KV_BYTES
    small = replace(GPU, total_bytes=round(2 * (cache + engine.weights + engine.workspace)))
    with_tools = with_given_tokens(alike(8, 4), 8.0)
    smaller = replace(with_tools, config=replace(CONFIG, rollout=rollout), target=small)
    assert slots_of(smaller, requests=500) == 60


@pytest.mark.parametrize(
    ("step_seconds", "waiting"),
    [
        (1e-3, 8 * 3 / 2 - 20e-3),  # 24 calls of a second, two at a time, are what takes time
        (10.0, 3),  # they end while others are sampled, but for the last completion's
    ],
)
def test_an_engine_waits_for_calls_that_take_longer_than_sampling(
    step_seconds: float, waiting: float
):
    """Eight completions of ten tokens and three calls, on four places: twenty steps."""
    eight = with_given_tokens(alike(8, 4), 0.0, calls=3.0)
    coefficients = replace(
        eight.cluster.coefficients, call_seconds=1.0, decode_step_seconds=step_seconds
    )
    plan = plan_rollout(replace(eight, cluster=replace(eight.cluster, coefficients=coefficients)))
    assert plan.waiting_seconds == pytest.approx(waiting, rel=1e-4)
    assert plan.seconds == pytest.approx(20 * step_seconds + waiting, rel=1e-4)
