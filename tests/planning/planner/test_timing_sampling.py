"""Sampling, counted by hand."""

from dataclasses import replace

import pytest

from rlmath.planning.memory_formulas import engine_bytes
from rlmath.planning.planner.lengths import Batch, Lengths, lengths_with_mean
from rlmath.planning.planner.sampling import (
    Sampled,
    decode_work,
    play,
    rollout_of,
    running_length,
    sampled_once,
    slots_of,
)
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
"""Of a token: keys and values, layers, heads, head dim, bfloat16."""
ONE = inputs(CONFIG, 1)
RUNNING = running_length(BATCH.prompt_tokens, sampled_once(ONE))


def with_rollout(one: StepInputs, **changes: object) -> StepInputs:
    return replace(one, config=replace(one.config, rollout=replace(one.config.rollout, **changes)))


def test_engine_steps_of_completions_that_are_alike():
    assert play(Lengths(10.0, 1e-6, 16), requests=8, slots=8, sequences=8) == (10, 10)
    assert play(Lengths(10.0, 1e-6, 16), requests=8, slots=4, sequences=8) == (20, 10)
    assert play(Lengths(10.0, 1e-6, 16), requests=9, slots=4, sequences=9) == (30, 10)


def test_the_last_steps_are_those_of_the_longest():
    lengths = lengths_with_mean(100, 1000)
    steps, tail = play(lengths, requests=64, slots=64, sequences=8192)
    assert steps == tail == 1000
    steps, tail = play(lengths, requests=512, slots=64, sequences=8192)
    assert 512 * 100 / 64 < steps < 512 * 100 / 64 + 1000 and 0 < tail <= 1000


def test_work_of_decoding_is_that_of_every_token():
    """Ten tokens of each of three sequences, one by one."""
    three = replace(ONE, batch=Batch(3, 1, 6.0, Lengths(10.0, 1e-6, 16)))
    work = decode_work(three, sampled_once(three), steps=10)
    read = 3 * sum(6 + position for position in range(10))
    pairs = 2 * PAIR_FLOPS * read
    weights = engine_bytes(TINY, CONFIG.rollout, "cuda", 2, GPU.total_bytes).weights
    assert work.flops == pytest.approx(30 * (4 * LAYER_FLOPS + HEAD_FLOPS) + pairs, rel=0.1)
    assert work.memory == pytest.approx(10 * weights + read * KV_BYTES + 30 * 4 * 4 * 32, rel=0.1)
    assert work.decode_steps == 10 and work.sequence_steps == pytest.approx(30)


def test_a_completion_that_is_cut_off_reads_what_is_before_its_end():
    """Two of ten tokens, and one of which only four are sampled."""
    whole = decode_work(ONE, Sampled(2, 20, 200), steps=10)
    cut = decode_work(ONE, Sampled(3, 24, 216), steps=10)
    assert cut.memory - whole.memory == pytest.approx((4 * 6 + 4 * 4 / 2) * KV_BYTES + 4 * 4 * 4 * 32)
    pairs = 2 * PAIR_FLOPS * (4 * 6 + 4 * 4 / 2)
    assert cut.flops - whole.flops == pytest.approx(4 * (4 * LAYER_FLOPS + HEAD_FLOPS) + pairs)
    assert cut.sequence_steps - whole.sequence_steps == 4


def test_a_long_completion_runs_for_long_and_is_half_done():
    alike, mixed = Lengths(10.0, 1e-6, 16), lengths_with_mean(1000, 10000)
    one, other = (replace(ONE, batch=Batch(8, 2, 6.0, lengths)) for lengths in (alike, mixed))
    assert running_length(6.0, sampled_once(one)) == pytest.approx(6 + 5)
    assert running_length(6.0, sampled_once(other)) > 6 + 500


def test_as_many_sequences_as_settings_requests_and_the_cache_allow():
    assert slots_of(ONE, RUNNING, requests=8) == 4
    assert slots_of(ONE, RUNNING, requests=3) == 3
    rollout = replace(CONFIG.rollout, max_num_seqs=200, max_num_batched_tokens=256, memory_share=0.5)
    engine = engine_bytes(TINY, rollout, "cuda", 2, GPU.total_bytes)
    cache = 100.5 * RUNNING * KV_BYTES
    small = replace(GPU, total_bytes=round(2 * (cache + engine.weights + engine.workspace)))
    smaller = replace(ONE, config=replace(CONFIG, rollout=rollout), target=small)
    assert slots_of(smaller, RUNNING, requests=500) == 100


def test_more_engines_have_less_to_do_until_only_the_longest_is_left():
    batch = Batch(512, 16, 6.0, lengths_with_mean(4.0, 16))
    work = [rollout_of(inputs(CONFIG, n, batch=batch)) for n in (1, 2, 8, 128, 512)]
    steps = [found.steps for found in work]
    assert steps == sorted(steps, reverse=True) and steps[-2:] == [16, 16]
    assert [found.work.sequence_steps for found in work[:2]] == pytest.approx([2048, 1024], rel=1e-3)


def test_ranks_of_an_engine_share_its_work_and_sum_hidden_states():
    two = replace(CONFIG, rollout=replace(CONFIG.rollout, tensor_parallel=2))
    alone, split = rollout_of(ONE).work, rollout_of(inputs(two, 2)).work
    assert split.flops == pytest.approx(alone.flops / 2)
    assert split.node == pytest.approx(split.sequence_steps * 8 * 2 * 2 * 4 * 1.0)
    assert split.messages == split.decode_steps * 2 * 4


def test_a_prompt_is_read_once_for_its_group_where_whole_blocks_hold_it():
    def prefill(prompt: float) -> float:
        one = replace(ONE, batch=replace(BATCH, prompt_tokens=prompt))
        return rollout_of(one).work.flops - decode_work(one, sampled_once(one), 1).flops

    per_token = 4 * LAYER_FLOPS + HEAD_FLOPS
    assert prefill(8.0) == pytest.approx(8 * 8 * (per_token + 8 * PAIR_FLOPS))
    assert prefill(16.0) == pytest.approx(8 / 2 * 16 * (per_token + 16 * PAIR_FLOPS))


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
    turns = rollout_of(with_rollout(LARGE, ranks=2, max_staleness=0))
    ahead = rollout_of(with_rollout(LARGE, ranks=2, max_staleness=4, on_new_weights=on_new_weights))
    assert turns.steps > 1200 and turns.tail_steps > 0
    if on_new_weights == "finish":
        assert ahead == turns
    else:
        assert (ahead.steps, ahead.tail_steps, ahead.slots) == (pytest.approx(1200, abs=1), 0, 64)


def test_the_longest_completion_is_finished_within_the_staleness():
    few = with_rollout(LARGE, ranks=2, max_staleness=2, max_num_seqs=512)
    alone = rollout_of(with_rollout(few, max_staleness=0)).steps
    assert alone == 1000 and rollout_of(few).steps == 500
