"""Sampling with partial rollouts: completions that are alike by hand, others against a run with every sample."""

import math
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest

from rlmath.algorithms.dynamic_sampling import Chosen
from rlmath.algorithms.partial_rollouts import (
    Flight,
    FlightRules,
    GroupInFlight,
    advance_carry,
    with_reserve,
)
from rlmath.algorithms.types import Completion, PartialCompletion, Score, ScoredCompletion
from rlmath.config.schema import Config
from rlmath.planning.planner.lengths import Batch, Lengths, lengths_with_mean
from rlmath.planning.planner.machines import Cluster
from rlmath.planning.planner.partial_rollouts import (
    CARRIED_TOKEN,
    DEFER_STEPS,
    LEAST_LENGTHS,
    OWN_CARRIED_TOKEN,
    STEPS,
    Carried,
    DeferringState,
    SteadyState,
    alike_lengths,
    deferring_rollout_of,
    deferring_state,
    partial_rollout_of,
    play_rounds,
    play_slices,
    prefill_again_work,
    steady_state,
)
from rlmath.planning.planner.rollout import Rollout, Sampled, rollout_of, sampled_once, sampling_work
from tests.planning.planner.shapes import CONFIG, GPU, LAYER_FLOPS, MACHINE, PAIR_FLOPS, TINY

ALIKE = Lengths(10.0, 1e-6, 16)
BATCH = Batch(sequences=8, group=2, prompt_tokens=6.0, lengths=ALIKE)
"""Four groups of two."""
MIXED = lengths_with_mean(2400, 8000)
"""3% are cut off."""
MANY = Batch(sequences=1024, group=16, prompt_tokens=6.0, lengths=MIXED)
ONE_ENGINE = Cluster(MACHINE, 1, 1)


def carrying(slice_tokens: int, groups: int, staleness: int, prompts: int = 4) -> Config:
    """An engine has places for 64 sequences."""
    rollout = replace(
        CONFIG.rollout,
        tail="carry",
        slice_tokens=slice_tokens,
        max_groups_in_flight=groups,
        max_staleness=staleness,
        max_num_seqs=64,
    )
    return replace(CONFIG, rollout=rollout, data=replace(CONFIG.data, prompts_per_step=prompts))


def carried(config: Config, batch: Batch = BATCH, cluster: Cluster = ONE_ENGINE) -> Rollout:
    return partial_rollout_of(config, TINY, GPU, cluster, batch, cluster.ranks)


def whole(config: Config, batch: Batch = BATCH, cluster: Cluster = ONE_ENGINE) -> Rollout:
    return rollout_of(config, TINY, GPU, cluster, batch, cluster.ranks)


# ---------------------------------------------------------------- by hand


def test_without_staleness_and_in_one_slice_it_is_as_if_every_completion_were_waited_for():
    config = carrying(slice_tokens=16, groups=4, staleness=0)
    assert replace(carried(config), carry=None) == whole(config)


def test_without_staleness_slices_cost_only_what_they_prefill_again():
    """Rounds of 4, 4 and 2 tokens: eight completions have 4 before the second, and 8 before the third."""
    config = carrying(slice_tokens=4, groups=4, staleness=0)
    found, waited = carried(config), whole(config)
    assert found.carry is not None and found.carry.rounds == 3 and found.carry.staleness == 0
    assert (found.slots, found.requests, found.steps, found.tail_steps) == (8, 8, 10, 10)
    again = prefill_again_work(config, TINY, GPU, ONE_ENGINE, 6.0, Carried(16, 8 * 12, 8 * (16 + 64)))
    assert found.carry.prefilled_again == 96
    assert found.work.flops == pytest.approx(waited.work.flops + again.flops)
    assert found.work.memory == pytest.approx(waited.work.memory + again.memory)
    assert found.work.tokens == pytest.approx(waited.work.tokens + (CARRIED_TOKEN + OWN_CARRIED_TOKEN) * 96)


def test_every_rank_joins_all_slices_and_an_engine_lays_out_its_own_requests():
    """Of the eight completions, each of two engines has four."""
    config = carrying(slice_tokens=4, groups=4, staleness=0)
    engines = Cluster(MACHINE, 1, 2)
    found, waited = carried(config, cluster=engines), whole(config, cluster=engines)
    assert found.carry is not None and found.carry.prefilled_again == 48
    host = CARRIED_TOKEN * 96 + OWN_CARRIED_TOKEN * 48
    assert found.work.tokens == pytest.approx(waited.work.tokens + host)


def test_a_steady_state_by_hand():
    """Completions of 10 tokens in slices of 4; of the 8 groups that are in flight, a step learns from 4.

    Every other step begins with nothing in flight and 8 new groups: three rounds bring them to 4, 8 and 10 tokens, and
    it learns from 4 of them. The next step has the other 4, complete: it draws nothing and makes no round.
    """
    state = steady_state(ALIKE, 2, FlightRules(4, 8, max_staleness=1), 4)
    assert state.rounds_of_a_step == 1.5
    assert state.carried == Carried(count=(16 + 16) / 2, tokens=16 * (4 + 8) / 2, squares=16 * (16 + 64) / 2)
    assert [one.slices_S.tolist() for one in state.rounds[:3]] == [[4] * 16, [4] * 16, [2] * 16]
    # Half of what is learned is of the same step, half of the step before.
    assert state.staleness == pytest.approx(1 / 2) and state.oldest == 1
    found = carried(carrying(slice_tokens=4, groups=8, staleness=1))
    assert (found.slots, found.requests, found.steps, found.tail_steps) == (16, 16, 5, 5)


def test_one_round_is_enough_for_as_many_steps_as_groups_may_wait():
    """Every fourth step samples 16 groups whole; it and the three after it learn from 4 each."""
    state = steady_state(ALIKE, 2, FlightRules(4, 16, max_staleness=3), 16)
    assert len(state.rounds) == STEPS / 4 and state.rounds_of_a_step == 0.25
    assert state.carried == Carried()
    assert all(one.slices_S.tolist() == [10] * 32 for one in state.rounds)
    assert state.staleness == pytest.approx((0 + 1 + 2 + 3) / 4) and state.oldest == 3


def test_prefilling_again_takes_engine_steps_too():
    config = carrying(slice_tokens=4, groups=8, staleness=1)
    config = replace(config, rollout=replace(config.rollout, max_num_batched_tokens=64))
    assert carried(config).steps == 5 + 192 / 64, "16 completions a step, 96 tokens and 16 prompts of 6"


def test_more_sequences_than_places_take_turns_within_a_round():
    """Two steps have three rounds of 16 slices: 4, 4 and 2 tokens each. On an engine with 6 places, of 16 requests 6
    begin, 6 more, and the last 4; of 8 requests 6, and the last 2."""
    rules = FlightRules(4, 8, max_staleness=1)
    turn = (4 + 4 + 2) / 2
    for share, slots, turns in ((1.0, 16, 1), (1.0, 8, 2), (1.0, 6, 3), (0.5, 8, 1), (0.5, 6, 2)):
        assert play_rounds(ALIKE, 2, rules, 4, share, slots) == (turns * turn, turn)


def test_requests_begin_when_a_place_is_free():
    """The older half has 2 tokens to go; behind each of them another begins, with 4."""
    slices = np.repeat([2, 4], 8)
    assert play_slices(slices, 16, slots=8) == (2 + 4, 4)
    assert play_slices(slices, 8, slots=4) == (2 + 4, 4), "half of them, evenly spread"
    assert play_slices(slices, 8, slots=8) == (4, 4)


def test_work_of_prefilling_two_completions_again():
    """They have 3 and 5 tokens behind a prompt of 6."""
    again = Carried(count=2, tokens=8, squares=9 + 25)
    work = prefill_again_work(CONFIG, TINY, GPU, ONE_ENGINE, 6.0, again)
    assert work.flops == pytest.approx(20 * 4 * LAYER_FLOPS + (81 + 121) * PAIR_FLOPS)
    # Norms 4 x 8, query, key and value twice 24, three times 16 of the feed-forward network; written and read, 2 bytes.
    assert work.memory == 20 * 4 * (32 + 48 + 48) * 2 * 2
    two = replace(CONFIG, rollout=replace(CONFIG.rollout, tensor_parallel=2))
    split = prefill_again_work(two, TINY, GPU, Cluster(MACHINE, 1, 2), 6.0, again)
    assert split.flops == pytest.approx(work.flops / 2)
    assert split.node == pytest.approx(20 * 8 * 2 * 2 * 4)  # hidden size, bytes, two sums in each of 4 layers
    assert split.messages == 0, "its engine steps have them"


# ---------------------------------------------------------------- against a run with every sample


def run_of_every_sample(group: int, rules: FlightRules, length: int, warm_up: int) -> list[list[int]]:
    """By round, after so many steps, the slices and, behind, the tokens before the round of all unfinished samples."""
    number = group * max(rules.groups_per_step, -(-LEAST_LENGTHS // group))
    quantiles = np.array([round(MIXED.at((i + 0.5) / number)) for i in range(number)])
    random, lengths, rounds = np.random.default_rng(0), [], []

    def sample_round(groups: list[GroupInFlight]) -> list[GroupInFlight]:
        while len(lengths) < flight.next_draw:
            lengths.extend(random.permutation(quantiles).reshape(-1, group).tolist())
        slices, before, after = [], [], []
        for one in groups:
            samples = list(one.samples)
            for g in one.unfinished:
                done, end = len(samples[g].token_ids), lengths[one.draw][g]
                slices.append(min(length, end - done))
                before.append(done)
                tokens = range(done + slices[-1])
                samples[g] = PartialCompletion(tokens)
                if len(tokens) == end:
                    answer = Completion(g, tokens, (), "", "stop", 0)
                    samples[g] = ScoredCompletion(answer, Score(0.0, False, "", ""))
            after.append(replace(one, samples=tuple(samples)))
        rounds.append([*slices, *before])
        return after

    flight = Flight()
    for step in range(warm_up + STEPS):
        if step == warm_up:
            rounds.clear()
        advance_carry(flight, rules, step, 10**6, group, sample_round, lambda one: Chosen((0,)))
    return rounds


@pytest.mark.parametrize(("in_flight", "staleness", "length"), [(6, 1, 3000), (12, 2, 2000), (12, 3, 1500)])
def test_one_completion_stands_for_its_group(in_flight: int, staleness: int, length: int):
    rules = FlightRules(4, in_flight, staleness)
    exact = run_of_every_sample(4, rules, length, warm_up=2 * (staleness + 1) + 2)
    state = steady_state(MIXED, 4, rules, length)
    assert len(exact) == len(state.rounds)
    for numbers, one in zip(exact, state.rounds, strict=True):
        slices, before = np.split(np.array(numbers), 2)
        assert one.slices_S.tolist() == slices.tolist()
        assert one.carried == Carried((before > 0).sum(), before.sum(), (before.astype(float) ** 2).sum())


# ---------------------------------------------------------------- what more of a setting does


def state_of(length: int, times: float, staleness: int, groups: int = 64) -> SteadyState:
    """With so many times the groups of a step in flight."""
    return steady_state(MIXED, 16, FlightRules(groups, round(times * groups), staleness), length)


@pytest.mark.parametrize(("length", "times", "staleness"), [(2000, 1.25, 1), (2000, 3, 2), (1000, 8, 7)])
def test_a_step_samples_as_many_tokens_as_it_learns_from(length: int, times: float, staleness: int):
    state = state_of(length, times, staleness)
    sampled = sum(int(one.slices_S.sum()) for one in state.rounds) / STEPS
    assert sampled == pytest.approx(state.sequences * MIXED.mean, rel=0.01)
    assert 0 < state.staleness < state.oldest <= staleness


def test_a_large_step_is_as_a_small_one():
    small, large = state_of(2000, 3, 2, groups=32), state_of(2000, 3, 2, groups=64)
    assert small.rounds_of_a_step == pytest.approx(large.rounds_of_a_step, rel=0.02)
    assert small.carried.tokens * 2 == pytest.approx(large.carried.tokens, rel=0.02)
    assert state_of(2000, 3, 2, groups=512).sequences == 64 * 16


@pytest.mark.full
def test_the_more_groups_in_flight_the_fewer_engine_steps():
    """Slices of a quarter of the longest completion: with one or two times a step's groups in flight, all groups begin
    together and are complete after four rounds, which are the work of one or two steps. With more they mix, until most
    steps make no round at all."""
    engines = Cluster(MACHINE, 1, 32)  # with 2,048 places, for 1,024 sequences of a step
    steps = [
        carried(carrying(2000, round(64 * times), 7, prompts=64), MANY, engines).steps
        for times in (1, 2, 3, 4, 8)
    ]
    waited = whole(carrying(2000, 64, 0, prompts=64), MANY, engines).steps
    assert waited == 8000 <= steps[0], "with no more than a step's groups all must be finished"
    assert steps == sorted(steps, reverse=True)
    assert steps[:2] == pytest.approx([4 * 2000, 4 * 2000 / 2], rel=0.002), (
        "a few steps more to prefill again"
    )
    tokens_of_an_engine = MANY.sequences * MIXED.mean / 32
    assert tokens_of_an_engine / 64 <= steps[-1] < 2000, "less than one slice, as there is less than a round"


def test_the_longer_slices_are_the_fewer_rounds_there_are():
    rounds = [state_of(length, 8, 7).rounds_of_a_step for length in (8000, 4000, 2000, 1000)]
    assert rounds[0] == 1 / 8, "eight steps learn from what one has sampled"
    assert rounds == sorted(rounds) and rounds[2] < 0.5 < rounds[3] <= 1


@pytest.mark.full
def test_the_shorter_the_slices_the_more_is_prefilled_again():
    again = [state_of(length, 2, 1).carried.tokens for length in (8000, 4000, 2000, 1000, 500)]
    assert again[0] == 0 and again == sorted(again)
    assert again[4] > 1.8 * again[3]


def test_more_engines_make_no_round_shorter_than_its_slices():
    config = carrying(2000, 256, 3, prompts=64)
    found = [carried(config, MANY, Cluster(MACHINE, 1, n)) for n in (1, 4, 16, 64)]
    steps = [one.steps for one in found]
    assert steps == sorted(steps, reverse=True) and steps[-1] == pytest.approx(2000, rel=0.02)
    for one, engines in zip(found, (1, 4, 16, 64), strict=True):
        assert one.steps * one.slots >= MANY.sequences * MIXED.mean / engines * 0.99
        assert one.carry is not None and one.carry.prefilled_again * engines == pytest.approx(
            state_of(2000, 4, 3).carried.tokens
        )


# ---------------------------------------------------------------- defer


@dataclass(frozen=True)
class TwoLengths(Lengths):
    """A share of the completions have `short` tokens, the others the longest."""

    short: int = 3
    share: float = 0.5

    def at(self, share: float) -> float:
        return self.short if share < self.share else self.longest


FOUR = FlightRules(4, sys.maxsize, 0)
"""Four groups a step."""
HALF_LONG = TwoLengths(0.0, 0.0, longest=9)


def deferring(slice_tokens: int, prompts: int = 4) -> Config:
    rollout = replace(CONFIG.rollout, tail="defer", slice_tokens=slice_tokens, max_num_seqs=64)
    return replace(CONFIG, rollout=rollout, data=replace(CONFIG.data, prompts_per_step=prompts))


def deferred(config: Config, batch: Batch = BATCH, cluster: Cluster = ONE_ENGINE, **share: float) -> Rollout:
    return deferring_rollout_of(config, TINY, GPU, cluster, batch, cluster.ranks, **share)


def test_with_slices_of_the_longest_completion_nothing_is_deferred():
    found, waited = deferred(deferring(16)), whole(deferring(16))
    assert found.defer is not None
    assert (found.defer.rounds, found.defer.deferred, found.defer.discarded) == (1, 0, 0)
    assert (found.slots, found.requests, found.steps, found.tail_steps) == (8, 8, 10, 10)
    assert found.sampled == Sampled(begun=8, finished=8, tokens=80, squares=800)
    for name in ("flops", "memory", "tokens", "decode_steps", "sequence_steps"):
        assert getattr(found.work, name) == pytest.approx(getattr(waited.work, name)), name


def test_where_no_completion_fits_a_slice_every_group_is_sampled_twice():
    """Ten tokens each, in slices of four: when less than four groups are deferred, a short round samples as many as if
    a quarter of them would be complete, and all are deferred. Every step samples four of them whole."""
    new = with_reserve(4, 0.25)
    found = deferred(deferring(4))
    assert found.defer is not None
    assert found.defer.rounds == pytest.approx(1 + 4 / new, abs=1 / DEFER_STEPS)
    assert found.steps == round(10 + 4 * 4 / new) and found.defer.deferred == 1
    sampled = found.sampled
    assert sampled.begun == pytest.approx(8 + 8, rel=0.02) and sampled.finished == 8
    assert sampled.tokens == pytest.approx(8 * 10 + 8 * 4, rel=0.01)
    assert sampled.squares == pytest.approx(8 * 100 + 8 * 16, rel=0.01)
    assert found.defer.discarded == pytest.approx(32 / 112, rel=0.02)
    assert found.work.tokens == pytest.approx(sampled.begun * 6 + sampled.tokens), (
        "prompts and all that is sampled"
    )
    work = sampling_work(CONFIG, TINY, GPU, ONE_ENGINE, BATCH, sampled, 1, found.steps)
    assert found.work.flops == work.flops and found.work.memory == work.memory
    assert found.work.flops > 1.3 * whole(deferring(4)).work.flops


def test_rounds_of_short_groups_and_of_long_ones():
    """All completions of half of the groups have 3 tokens, the others' 9; slices of 4."""
    state = deferring_state(HALF_LONG, 2, FOUR, 4, prompt_share=1.0)
    for one in state.short:
        long = int((one.slices_S == 4).sum())
        short = len(one.slices_S) - long
        assert sorted(one.slices_S.tolist()) == [3] * short + [4] * long
        assert one.sampled == Sampled(short + long, short, 3 * short + 4 * long, 9 * short + 16 * long)
    assert {len(one.slices_S) for one in state.whole} <= {2, 4, 6, 8}, "what a step is missing"
    assert all((one.slices_S == 9).all() for one in state.whole)
    assert state.deferred == pytest.approx(1 / 2, abs=0.03)
    assert state.learned_tokens == pytest.approx(8 * (3 + 9) / 2, rel=0.03)
    # What is sampled is learned, or it is of a deferred group's short round, or of a complete group beyond a step's.
    discarded = DEFER_STEPS * (state.sampled.tokens - state.learned_tokens)
    of_long = sum(4 * (one.slices_S == 4).sum() for one in state.short)
    beyond = sum(3 * (one.slices_S == 3).sum() for one in state.short) - 3 * 8 * DEFER_STEPS * (
        1 - state.deferred
    )
    assert discarded == pytest.approx(of_long + beyond)


def test_engine_steps_are_those_of_short_and_of_whole_rounds():
    """Engines with as many places as sequences; and one with 8, which a whole round fills."""
    state = deferring_state(HALF_LONG, 2, FOUR, 4, prompt_share=1.0)
    batch = replace(BATCH, lengths=HALF_LONG)
    config = deferring(4)
    found = deferred(config, batch, prompt_share=1.0)
    steps = (4 * len(state.short) + 9 * len(state.whole)) / DEFER_STEPS
    assert found.steps == found.tail_steps == round(steps)
    assert found.requests == found.slots == max(len(one.slices_S) for one in state.short)
    half = deferred(config, batch, Cluster(MACHINE, 1, 2), prompt_share=1.0)
    assert half.requests == half.slots == math.ceil(found.requests / 2) and half.steps == found.steps
    assert half.sampled == found.sampled and half.work.tokens == found.work.tokens, (
        "every rank gets all tokens"
    )
    few = replace(config, rollout=replace(config.rollout, max_num_seqs=8))
    most = sum(math.ceil(len(one.slices_S) / 8) * 4 for one in state.short) + 9 * len(state.whole)
    found = deferred(few, batch, prompt_share=1.0)
    assert found.slots == 8 and steps < found.steps <= round(most / DEFER_STEPS)


@pytest.mark.parametrize(("prompt_share", "power"), [(0.0, 4), (1.0, 1)])
def test_the_share_of_deferred_groups(prompt_share: float, power: int):
    """With lengths of their own all four completions must be short; else all are where one is."""
    state = deferring_state(MIXED, 4, FlightRules(64, sys.maxsize, 0), 4000, prompt_share)
    short = sum(MIXED.at((i + 0.5) / 1000) <= 4000 for i in range(1000)) / 1000
    assert state.deferred == pytest.approx(1 - short**power, abs=0.02)


def test_completions_of_a_group_are_alike_and_all_are_spread_as_before():
    lengths = Lengths(1e6, 1.0, sys.maxsize)
    spread = np.array([lengths.at((i + 0.5) / 16000) for i in range(16000)])
    for share in (0.0, 0.7, 1.0):
        lengths_NG = alike_lengths(spread, 4, share, np.random.default_rng(0))
        assert lengths_NG.shape == (4000, 4) and (np.sort(lengths_NG.ravel()) == spread).all()
        logs_NG = np.log(lengths_NG)
        within = logs_NG.var(1, ddof=1).mean()
        assert 1 - within / logs_NG.var() == pytest.approx(share, abs=0.03)


def deferring_of(length: int, prompt_share: float, groups: int = 64) -> DeferringState:
    return deferring_state(MIXED, 16, FlightRules(groups, sys.maxsize, 0), length, prompt_share)


@pytest.mark.full
def test_the_more_alike_the_less_is_deferred_and_discarded():
    states = [deferring_of(4000, share) for share in (0.0, 0.5, 0.9)]
    shares = [one.deferred for one in states]
    assert shares == sorted(shares, reverse=True) and shares[0] > 0.9 and shares[-1] < 0.4
    sampled = [one.sampled.tokens for one in states]
    assert sampled == sorted(sampled, reverse=True)
    slices = [deferring_of(length, 0.7).deferred for length in (2000, 4000, 6000, 8000)]
    assert slices == sorted(slices, reverse=True) and slices[-1] == 0


def test_a_step_of_deferring_learns_as_many_tokens_as_one_that_waits():
    state = deferring_of(4000, 0.7)
    assert state.learned_tokens == pytest.approx(state.sequences * MIXED.mean, rel=0.03)
    assert state.sampled.tokens > 1.3 * state.learned_tokens
    large = deferring_of(4000, 0.7, groups=512)
    assert large.sequences == 64 * 16 and large.sampled == state.sampled


def test_slices_of_the_longest_take_the_engine_steps_of_waiting():
    """Where requests wait for places, but for when the longest of them begins."""
    for engines, error in ((1, 0.08), (4, 0.08), (32, 0)):
        cluster = Cluster(MACHINE, 1, engines)
        found = deferred(deferring(8000, 64), MANY, cluster)
        assert found.steps == pytest.approx(whole(deferring(8000, 64), MANY, cluster).steps, rel=error)
        assert found.sampled.tokens == pytest.approx(sampled_once(MANY).tokens, rel=0.01)


def test_deferring_has_fewer_engine_steps_than_waiting_where_completions_are_alike():
    cluster = Cluster(MACHINE, 1, 32)  # with 2,048 places, for 1,024 sequences of a step
    steps = [deferred(deferring(4000, 64), MANY, cluster, prompt_share=share).steps for share in (0, 0.7, 1)]
    assert steps[0] > 8000 > steps[1] > steps[2] > 4000
