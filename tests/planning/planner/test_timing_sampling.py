"""Sampling: by hand, and estimates of partial and asynchronous rollouts by what must hold of them."""

from dataclasses import replace

import pytest

from rlmath.config.schema import RolloutConfig
from rlmath.planning.memory_formulas import engine_bytes
from rlmath.planning.planner.lengths import Batch, Lengths, lengths_with_mean
from rlmath.planning.planner.sampling import (
    EngineCosts,
    Sampled,
    decode_work,
    deferral,
    engine_side,
    play,
    play_slices,
    rollout_of,
    rounds_of_group,
    running_length,
    sampled_once,
    slots_of,
)
from rlmath.planning.planner.training import StepInputs
from rlmath.planning.planner.work import DEFAULTS
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
    whole = decode_work(ONE, Sampled(2, 2, 20, 200), steps=10)
    cut = decode_work(ONE, Sampled(3, 2, 24, 216), steps=10)
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


# ---------------------------------------------------------------- partial rollouts and tail batching

LONG = Batch(512, 16, 6.0, lengths_with_mean(300.0, 1000))
LARGE = with_rollout(
    inputs(replace(CONFIG, data=replace(CONFIG.data, prompts_per_step=32)), 4, batch=LONG),
    group_size=16,
    max_new_tokens=1000,
    max_num_seqs=64,
)


def test_rounds_and_slices_of_completions_that_are_alike():
    """Ten tokens in slices of four are three rounds, of four, four and two tokens."""
    alike = Lengths(10.0, 1e-6, 16)
    assert rounds_of_group(alike, 8, 4) == pytest.approx(3) and rounds_of_group(alike, 8, 16) == 1
    assert play_slices(alike, 4, requests=6, slots=6) == (4, 4)
    assert play_slices(alike, 4, requests=3, slots=1) == (4 + 4 + 2, 4)


def test_a_group_has_as_many_rounds_as_its_longest_completion():
    lengths = LONG.lengths
    assert rounds_of_group(lengths, 1, 500) == pytest.approx(1 + 1 - replace(lengths, longest=500).within)
    assert 1.9 < rounds_of_group(lengths, 16, 500) < 2


def test_carrying_ends_with_slices_and_prefills_them_again():
    wait = rollout_of(LARGE)
    carried = {
        staleness: rollout_of(with_rollout(LARGE, tail="carry", max_staleness=staleness))
        for staleness in (0, 1, 3)
    }
    assert carried[0].steps == pytest.approx(wait.steps, rel=0.1)  # slices as long as the longest completion
    assert carried[0].work.flops == pytest.approx(wait.work.flops)
    assert wait.steps > carried[1].steps > carried[3].steps > wait.sampled.tokens / 4 / 64
    assert wait.work.flops < carried[1].work.flops < carried[3].work.flops
    assert all(found.sampled == wait.sampled for found in carried.values())


def test_deferring_discards_what_the_long_groups_had():
    """Completions of a prompt that are all alike leave no short one in a long group: what is lost is a slice each."""
    lengths = LONG.lengths
    alike, unlike = deferral(lengths, 16, 500, 1.0), deferral(lengths, 16, 500, 0.0)
    assert alike.short == pytest.approx(replace(lengths, longest=500).within, abs=0.01)
    lost = (1 - alike.short) * 500
    assert alike.discarded == pytest.approx(lost / (lost + lengths.mean), rel=0.03)
    assert unlike.short == pytest.approx(replace(lengths, longest=500).within ** 16, abs=1e-3)
    assert alike.short > deferral(lengths, 16, 500).short > unlike.short
    assert (
        deferral(lengths, 16, 1000).short == pytest.approx(1) and deferral(lengths, 16, 1000).discarded == 0
    )


def test_a_step_that_defers_samples_more_than_it_learns_from():
    wait, defer = rollout_of(LARGE), rollout_of(with_rollout(LARGE, tail="defer"))
    assert defer.sampled.finished == 512 and defer.sampled.begun > 512
    discarded = deferral(LONG.lengths, 16, 500).discarded
    assert 1 - wait.sampled.tokens / defer.sampled.tokens == pytest.approx(discarded, abs=0.02)
    assert rollout_of(with_rollout(LARGE, tail="defer", slice_tokens=1000)).steps == pytest.approx(
        wait.steps, rel=0.1
    )


# ---------------------------------------------------------------- engines on ranks of their own

COSTS = EngineCosts(1200, 600, 8, 1.0, 90.0, 4.0, 2.0)


def test_a_step_of_engines_that_train_no_faster_is_where_both_meet():
    """Trainers of 250 s admit 3 sequences into a step of 500 s, and 3 sequences take just these 500 s."""
    assert COSTS.steady(trainer=250.0, staleness=1) == pytest.approx(500.0)


def test_engines_that_are_fast_wait_for_trainers():
    assert COSTS.steady(trainer=5000.0, staleness=4) == pytest.approx(5000.0)
    assert COSTS.steady(100.0, 1) > COSTS.steady(100.0, 2) > COSTS.steady(100.0, 8)


@pytest.mark.parametrize("on_new_weights", ["recompute", "keep", "finish"])
def test_what_engines_do_when_weights_come(on_new_weights: str):
    own = with_rollout(LARGE, ranks=2, max_staleness=4, on_new_weights=on_new_weights)
    side = engine_side(own, DEFAULTS["cuda"], trainer_seconds=10.0)
    assert ("again" in side.work) is (on_new_weights == "recompute")
    assert 0 < side.running <= side.places == RolloutConfig(max_num_seqs=64).max_num_seqs
    turns = engine_side(with_rollout(own, max_staleness=0), DEFAULTS["cuda"], 10.0)
    assert set(turns.work) == {"rollout", "transfer"} and turns.rollout.steps >= 1000
