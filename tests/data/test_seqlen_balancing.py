import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmath.data.seqlen_balancing import (
    Budget,
    Cost,
    MinibatchPlan,
    assign_bins,
    balance_ranks,
    plan_minibatches,
)

ATTENTION = Cost(30.0, 1.0)
"""At 30 tokens attention costs as much as everything else."""


@st.composite
def plans(draw) -> dict:
    """Arguments that `plan_minibatches` must be able to serve."""
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=80))
    return {
        "lengths": lengths,
        "n_minibatches": draw(st.integers(1, min(len(lengths), 8))),
        "data_size": draw(st.integers(1, 5)),
        "max_tokens": draw(st.integers(max(lengths), 300)),
        "seed": draw(st.integers(0, 2**40)),
        "cost": draw(st.sampled_from([Cost(1.0, 0.0), ATTENTION, Cost(0.0, 1.0)])),
        "count_multiple": draw(st.integers(1, 4)),
        "shuffle": draw(st.booleans()),
    }


def microbatches(minibatch: MinibatchPlan) -> list[tuple[int, ...]]:
    return [microbatch for rank in minibatch.microbatches_by_rank for microbatch in rank]


def members(minibatch: MinibatchPlan) -> list[int]:
    return [index for microbatch in microbatches(minibatch) for index in microbatch]


def rank_costs(minibatch: MinibatchPlan, lengths: list[int], cost: Cost) -> list[float]:
    return [
        sum(cost.of(lengths[index]) for part in rank for index in part)
        for rank in minibatch.microbatches_by_rank
    ]


@settings(deadline=None, max_examples=50)
@given(plans())
def test_every_sample_is_in_exactly_one_microbatch(plan: dict):
    found = [index for minibatch in plan_minibatches(**plan) for index in members(minibatch)]
    assert sorted(found) == list(range(len(plan["lengths"])))


@settings(deadline=None, max_examples=50)
@given(plans())
def test_minibatches_have_equal_counts_and_the_first_ones_the_remainder(plan: dict):
    sizes = [len(members(minibatch)) for minibatch in plan_minibatches(**plan)]
    assert len(sizes) == plan["n_minibatches"]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@settings(deadline=None, max_examples=50)
@given(plans())
def test_all_ranks_have_the_same_number_of_microbatches_a_multiple_of_what_is_asked(plan: dict):
    for minibatch in plan_minibatches(**plan):
        counts = [len(rank) for rank in minibatch.microbatches_by_rank]
        assert len(counts) == plan["data_size"]
        assert len(set(counts)) == 1 and counts[0] >= 1
        assert counts[0] % plan["count_multiple"] == 0


@settings(deadline=None, max_examples=50)
@given(plans())
def test_no_microbatch_exceeds_the_budget(plan: dict):
    for minibatch in plan_minibatches(**plan):
        for microbatch in microbatches(minibatch):
            assert sum(plan["lengths"][index] for index in microbatch) <= plan["max_tokens"]


@settings(deadline=None, max_examples=50)
@given(plans())
def test_the_same_arguments_give_the_same_plan(plan: dict):
    assert plan_minibatches(**plan) == plan_minibatches(**plan)


@settings(deadline=None, max_examples=50)
@given(plans())
def test_the_microbatches_of_a_rank_come_in_order_of_falling_cost(plan: dict):
    for minibatch in plan_minibatches(**plan):
        for rank in minibatch.microbatches_by_rank:
            costs = [sum(plan["cost"].of(plan["lengths"][index]) for index in part) for part in rank]
            assert costs == sorted(costs, reverse=True)


@settings(deadline=None, max_examples=50)
@given(plans())
def test_ranks_with_room_differ_by_at_most_the_most_costly_sample(plan: dict):
    roomy = plan | {"max_tokens": sum(plan["lengths"]), "count_multiple": 1}
    for minibatch in plan_minibatches(**roomy):
        work = rank_costs(minibatch, plan["lengths"], plan["cost"])
        assert max(work) - min(work) <= plan["cost"].of(max(plan["lengths"]))


@settings(deadline=None, max_examples=50)
@given(plans(), plans())
def test_which_samples_are_a_minibatch_does_not_depend_on_layout_cost_or_budget(plan: dict, other: dict):
    layout = {key: other[key] for key in ("data_size", "cost", "count_multiple")}
    changed = plan | layout | {"max_tokens": plan["max_tokens"] + other["max_tokens"]}
    for ours, theirs in zip(plan_minibatches(**plan), plan_minibatches(**changed), strict=True):
        assert sorted(members(ours)) == sorted(members(theirs))


@settings(deadline=None, max_examples=50)
@given(plans())
def test_without_a_shuffle_minibatches_are_consecutive_samples(plan: dict):
    parts = [sorted(members(minibatch)) for minibatch in plan_minibatches(**plan | {"shuffle": False})]
    assert [index for part in parts for index in part] == list(range(len(plan["lengths"])))


def test_ten_samples_in_three_minibatches():
    sizes = [len(members(m)) for m in plan_minibatches([1] * 10, 3, 2, 100, seed=0)]
    assert sizes == [4, 3, 3]


def test_what_fits_the_budget_is_one_microbatch():
    (minibatch,) = plan_minibatches([3, 4, 5], 1, 1, max_tokens=12, seed=0)
    assert [sorted(microbatch) for microbatch in microbatches(minibatch)] == [[0, 1, 2]]


def test_one_token_over_the_budget_makes_two():
    (minibatch,) = plan_minibatches([3, 4, 5], 1, 1, max_tokens=11, seed=0)
    assert sorted(sorted(microbatch) for microbatch in microbatches(minibatch)) == [[0, 1], [2]]


def test_more_ranks_than_samples_leaves_empty_microbatches():
    (minibatch,) = plan_minibatches([7, 7], 1, 3, max_tokens=7, seed=0)
    assert sorted(microbatches(minibatch)) == [(), (0,), (1,)]


def test_another_seed_gives_another_order():
    first, second = (
        [sorted(members(m)) for m in plan_minibatches([1] * 40, 2, 1, 100, seed)] for seed in (1, 2)
    )
    assert first != second


def test_the_shuffle_is_pinned():
    # random.Random(5) makes 1 0 3 5 2 4 of 0 to 5: a run that is repeated must meet the same minibatches.
    plan = plan_minibatches([1] * 6, 3, 1, 10, seed=5)
    assert [sorted(members(minibatch)) for minibatch in plan] == [[0, 1], [3, 5], [2, 4]]


def test_a_sample_over_the_budget_is_refused():
    with pytest.raises(ValueError, match=r"a sample has 9 tokens.*budget of 8.*max_tokens_per_microbatch"):
        plan_minibatches([3, 9], 1, 1, max_tokens=8, seed=0)


def test_fewer_samples_than_minibatches_are_refused():
    with pytest.raises(ValueError, match="2 samples cannot fill 3 minibatches"):
        plan_minibatches([3, 4], 3, 1, max_tokens=8, seed=0)


def test_five_samples_in_two_minibatches_in_order_of_arrival():
    plan = plan_minibatches([1] * 5, 2, 1, 10, seed=0, shuffle=False)
    assert [sorted(members(minibatch)) for minibatch in plan] == [[0, 1, 2], [3, 4]]


def test_work_is_balanced_not_tokens():
    # 8 tokens cost 64, four of 4 tokens 16 each: 64 each side, though that is 8 tokens against 16.
    (minibatch,) = plan_minibatches([8, 4, 4, 4, 4], 1, 2, max_tokens=16, seed=0, cost=Cost(0.0, 1.0))
    assert sorted(microbatches(minibatch)) == [(0,), (1, 2, 3, 4)]


def test_a_count_that_must_be_a_multiple_spreads_the_samples_over_more_microbatches():
    # Three of 9 tokens would do (6 + 3, 5 + 4, 5 + 4); four are asked for.
    (minibatch,) = plan_minibatches([6, 3, 5, 4, 5, 4], 1, 1, max_tokens=9, seed=0, count_multiple=4)
    assert [sum((6, 3, 5, 4, 5, 4)[i] for i in part) for part in microbatches(minibatch)] == [8, 8, 6, 5]


def test_fewer_samples_than_microbatches_that_are_asked_for_leave_empty_ones():
    (minibatch,) = plan_minibatches([3, 3], 1, 1, max_tokens=9, seed=0, count_multiple=4)
    assert microbatches(minibatch) == [(0,), (1,), (), ()]


def test_bins_are_assigned_in_rounds_the_most_costly_to_the_rank_with_least_work():
    # Round one 9, 7, 5 to ranks 0, 1, 2; round two 4, 2, 1 to ranks 2, 1, 0.
    lengths = [9, 7, 5, 4, 2, 1]
    budget = Budget(lengths, [float(n) for n in lengths], 9)
    assert assign_bins(budget, [[i] for i in range(6)], 3) == [[[0], [5]], [[1], [4]], [[2], [3]]]


def test_a_sample_that_fits_moves_to_the_lighter_rank():
    # 8 against 4: giving 2 away makes 6 each, no swap does.
    ranks = [[[0, 1]], [[2, 3]]]
    balance_ranks(Budget([6, 2, 3, 1], [6.0, 2.0, 3.0, 1.0], 8), ranks)
    assert ranks == [[[0]], [[2, 3, 1]]]


def test_samples_are_swapped_where_none_can_be_given():
    # 9 against 7: a swap of 6 and 5 makes 8 each; there is no room in bins of 6 for one more.
    ranks = [[[0], [1]], [[2], [3]]]
    balance_ranks(Budget([6, 3, 5, 2], [6.0, 3.0, 5.0, 2.0], 6), ranks)
    assert ranks == [[[2], [1]], [[0], [3]]]


def test_ranks_stay_as_they_are_where_the_budget_allows_no_exchange():
    # 10 against 8 with bins of 5: each bin of 3 + 1 has room for one token more, every exchange brings two or more.
    ranks = [[[0], [1]], [[2, 4], [3, 5]]]
    balance_ranks(Budget([5, 5, 3, 3, 1, 1], [5.0, 5.0, 3.0, 3.0, 1.0, 1.0], 5), ranks)
    assert ranks == [[[0], [1]], [[2, 4], [3, 5]]]


@pytest.mark.parametrize("limit", [16_384, 28_672])
@pytest.mark.parametrize("data_size", [8, 32])
def test_lengths_of_long_reasoning_fill_the_budget_and_load_ranks_alike(limit: int, data_size: int):
    draw = random.Random(limit)
    lengths = [106 + min(limit, 1 + int(draw.lognormvariate(8.4, 1.4))) for _ in range(2048)]
    cost = Cost(9.3e9, 2.6e5)
    for minibatch in plan_minibatches(lengths, 2, data_size, limit + 4096, seed=1, cost=cost):
        tokens = sum(lengths[index] for index in members(minibatch))
        bound = -(-tokens // ((limit + 4096) * data_size))
        assert len(minibatch.microbatches_by_rank[0]) <= 1.02 * bound
        work = rank_costs(minibatch, lengths, cost)
        assert max(work) - min(work) <= 0.02 * sum(work) / data_size


def test_the_plan_itself_is_even():
    # without the exchange of samples the worst of these minibatches is off by more
    draw = random.Random(4)
    lengths = [min(16_000, int(draw.lognormvariate(8.5, 0.9)) + 1) for _ in range(1024)]
    cost = Cost(9e9, 2.6e5)
    for minibatch in plan_minibatches(lengths, 2, 8, 20_000, seed=1, cost=cost):
        work = [
            sum(cost.of(lengths[i]) for part in rank for i in part) for rank in minibatch.microbatches_by_rank
        ]
        assert max(work) - min(work) <= 0.005 * sum(work) / len(work)
