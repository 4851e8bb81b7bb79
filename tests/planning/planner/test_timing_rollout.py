"""Sampling, against a play of every engine step with every sequence."""

from dataclasses import replace

import pytest

from rlmath.planning.memory_formulas import engine_bytes
from rlmath.planning.planner.lengths import Batch, Lengths, lengths_with_mean
from rlmath.planning.planner.machines import Cluster
from rlmath.planning.planner.rollout import (
    Sampled,
    decode_work,
    play,
    rollout_of,
    running_length,
    sampled_once,
    slots_of,
)
from tests.planning.planner.shapes import (
    BATCH,
    CONFIG,
    GPU,
    HEAD_FLOPS,
    LAYER_FLOPS,
    MACHINE,
    PAIR_FLOPS,
    TINY,
)

KV_BYTES = 2 * 4 * 2 * 4 * 2
"""Of a token: keys and values, layers, heads, head dim, bfloat16."""
RUNNING = running_length(BATCH.prompt_tokens, sampled_once(BATCH))


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
    sampled = sampled_once(Batch(3, 1, 6.0, Lengths(10.0, 1e-6, 16)))
    work = decode_work(CONFIG, TINY, GPU, 6.0, sampled, steps=10)
    read = 3 * sum(6 + position for position in range(10))
    pairs = 2 * PAIR_FLOPS * read
    weights = engine_bytes(TINY, CONFIG.rollout, "cuda", 2, GPU.total_bytes).weights
    assert work.flops == pytest.approx(30 * (4 * LAYER_FLOPS + HEAD_FLOPS) + pairs, rel=0.1)
    assert work.memory == pytest.approx(10 * weights + read * KV_BYTES + 30 * 4 * 4 * 32, rel=0.1)
    assert work.decode_steps == 10 and work.sequence_steps == pytest.approx(30)


def test_a_completion_that_is_cut_off_reads_what_is_before_its_end():
    """Two of ten tokens, and one of which only four are sampled."""
    steps = {"steps": 10}
    whole = decode_work(CONFIG, TINY, GPU, 6.0, Sampled(2, 2, 20, 200), **steps)
    cut = decode_work(CONFIG, TINY, GPU, 6.0, Sampled(3, 2, 24, 216), **steps)
    assert cut.memory - whole.memory == pytest.approx((4 * 6 + 4 * 4 / 2) * KV_BYTES + 4 * 4 * 4 * 32)
    pairs = 2 * PAIR_FLOPS * (4 * 6 + 4 * 4 / 2)
    assert cut.flops - whole.flops == pytest.approx(4 * (4 * LAYER_FLOPS + HEAD_FLOPS) + pairs)
    assert cut.sequence_steps - whole.sequence_steps == 4


def test_a_long_completion_runs_for_long_and_is_half_done():
    alike, mixed = Lengths(10.0, 1e-6, 16), lengths_with_mean(1000, 10000)
    assert running_length(6.0, sampled_once(Batch(8, 2, 6.0, alike))) == pytest.approx(6 + 5)
    assert running_length(6.0, sampled_once(Batch(8, 2, 6.0, mixed))) > 6 + 500


def test_as_many_sequences_as_settings_requests_and_the_cache_allow():
    assert slots_of(CONFIG, TINY, GPU, RUNNING, requests=8) == 4
    assert slots_of(CONFIG, TINY, GPU, RUNNING, requests=3) == 3
    rollout = replace(CONFIG.rollout, max_num_seqs=200, max_num_batched_tokens=256, memory_share=0.5)
    engine = engine_bytes(TINY, rollout, "cuda", 2, GPU.total_bytes)
    cache = 100.5 * RUNNING * KV_BYTES
    small = replace(GPU, total_bytes=round(2 * (cache + engine.weights + engine.workspace)))
    assert slots_of(replace(CONFIG, rollout=rollout), TINY, small, RUNNING, requests=500) == 100


def test_more_engines_have_less_to_do_until_only_the_longest_is_left():
    batch = Batch(512, 16, 6.0, lengths_with_mean(4.0, 16))
    work = [rollout_of(CONFIG, TINY, GPU, Cluster(MACHINE, 1, n), batch, n) for n in (1, 2, 8, 128, 512)]
    steps = [found.steps for found in work]
    assert steps == sorted(steps, reverse=True) and steps[-2:] == [16, 16]
    assert [found.work.sequence_steps for found in work[:2]] == pytest.approx([2048, 1024], rel=1e-3)


def test_ranks_of_an_engine_share_its_work_and_sum_hidden_states():
    two = replace(CONFIG, rollout=replace(CONFIG.rollout, tensor_parallel=2))
    alone = rollout_of(CONFIG, TINY, GPU, Cluster(MACHINE, 1, 1), BATCH, 1).work
    split = rollout_of(two, TINY, GPU, Cluster(MACHINE, 1, 2), BATCH, 2).work
    assert split.flops == pytest.approx(alone.flops / 2)
    assert split.node == pytest.approx(split.sequence_steps * 8 * 2 * 2 * 4 * 1.0)
    assert split.messages == split.decode_steps * 2 * 4


def test_a_prompt_is_read_once_for_its_group_where_whole_blocks_hold_it():
    def prefill(prompt: float) -> float:
        batch = replace(BATCH, prompt_tokens=prompt)
        found = rollout_of(CONFIG, TINY, GPU, Cluster(MACHINE, 1, 1), batch, 1).work
        return found.flops - decode_work(CONFIG, TINY, GPU, prompt, sampled_once(batch), 1).flops

    per_token = 4 * LAYER_FLOPS + HEAD_FLOPS
    assert prefill(8.0) == pytest.approx(8 * 8 * (per_token + 8 * PAIR_FLOPS))
    assert prefill(16.0) == pytest.approx(8 / 2 * 16 * (per_token + 16 * PAIR_FLOPS))
