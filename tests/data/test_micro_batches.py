"""Plans of minibatches: their invariants, which are the module's, and cases worked out by hand."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmath.data import micro_batches
from rlmath.data.micro_batches import (
    Bin,
    Budget,
    Cost,
    MinibatchPlan,
    balance_ranks,
    pack_evenly,
    pack_tightly,
    plan_minibatches,
)

ATTENTION = Cost(30.0, 1.0)
"""Attention costs as much as everything else at 30 tokens."""
COST_OF_1_5B = Cost(9.3e9, 2.6e5)
"""FLOPs of a model of 1.5B parameters."""


def lengths_of_long_reasoning(limit: int, count: int) -> list[int]:
    """Tokens of prompt and answer; 9 to 17% of the answers are cut at the limit."""
    draw = random.Random(limit)
    return [106 + min(limit, 1 + int(draw.lognormvariate(8.4, 1.4))) for _ in range(count)]


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


@settings(deadline=None, max_examples=100)
@given(plans())
def test_the_invariants_of_a_plan(plan: dict):
    lengths = plan["lengths"]
    minibatches = plan_minibatches(**plan)
    assert sorted(index for minibatch in minibatches for index in members(minibatch)) == list(
        range(len(lengths))
    )
    sizes = [len(members(minibatch)) for minibatch in minibatches]
    assert len(sizes) == plan["n_minibatches"]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    for minibatch in minibatches:
        counts = [len(rank) for rank in minibatch.microbatches_by_rank]
        assert len(counts) == plan["data_size"] and len(set(counts)) == 1
        assert counts[0] >= 1 and counts[0] % plan["count_multiple"] == 0
        for microbatch in microbatches(minibatch):
            assert sum(lengths[index] for index in microbatch) <= plan["max_tokens"]
        for rank in minibatch.microbatches_by_rank:
            costs = [sum(plan["cost"].of(lengths[index]) for index in part) for part in rank]
            assert costs == sorted(costs, reverse=True)
    assert plan_minibatches(**plan) == minibatches
    if not plan["shuffle"]:
        assert [index for minibatch in minibatches for index in sorted(members(minibatch))] == list(
            range(len(lengths))
        )


@settings(deadline=None, max_examples=50)
@given(plans())
def test_ranks_with_room_differ_by_at_most_the_most_costly_sample(plan: dict):
    roomy = plan | {"max_tokens": sum(plan["lengths"]), "count_multiple": 1}
    for minibatch in plan_minibatches(**roomy):
        work = rank_costs(minibatch, plan["lengths"], plan["cost"])
        assert max(work) - min(work) <= plan["cost"].of(max(plan["lengths"]))


@settings(deadline=None, max_examples=50)
@given(plans(), plans())
def test_which_samples_are_a_minibatch_does_not_depend_on_layout_cost_or_budget(
    plan: dict, other: dict
):
    layout = {key: other[key] for key in ("data_size", "cost", "count_multiple")}
    changed = plan | layout | {"max_tokens": plan["max_tokens"] + other["max_tokens"]}
    for minibatch, changed_minibatch in zip(
        plan_minibatches(**plan), plan_minibatches(**changed), strict=True
    ):
        assert sorted(members(minibatch)) == sorted(members(changed_minibatch))


def test_the_shuffle_is_pinned():
    # random.Random(5) makes 1 0 3 5 2 4 of 0 to 5: a run that is repeated must meet the same
    # minibatches.
    plan = plan_minibatches([1] * 6, 3, 1, 10, seed=5)
    assert [sorted(members(minibatch)) for minibatch in plan] == [[0, 1], [3, 5], [2, 4]]


def test_a_sample_over_the_budget_is_refused():
    with pytest.raises(
        ValueError, match=r"a sample has 9 tokens.*budget of 8.*max_tokens_per_microbatch"
    ):
        plan_minibatches([3, 9], 1, 1, max_tokens=8, seed=0)


def test_fewer_samples_than_minibatches_are_refused():
    with pytest.raises(ValueError, match="2 samples cannot fill 3 minibatches"):
        plan_minibatches([3, 4], 3, 1, max_tokens=8, seed=0)


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
    # 10 against 8 with bins of 5: each bin of 3 + 1 has room for one token more, every exchange
    # brings two or more.
    ranks = [[[0], [1]], [[2, 4], [3, 5]]]
    balance_ranks(Budget([5, 5, 3, 3, 1, 1], [5.0, 5.0, 3.0, 3.0, 1.0, 1.0], 5), ranks)
    assert ranks == [[[0], [1]], [[2, 4], [3, 5]]]


@pytest.mark.parametrize("limit", [16_384, 28_672])
@pytest.mark.parametrize("data_size", [8, 32])
def test_lengths_of_long_reasoning_fill_the_budget_and_load_ranks_alike(limit: int, data_size: int):
    lengths = lengths_of_long_reasoning(limit, 2048)
    for minibatch in plan_minibatches(
        lengths, 2, data_size, limit + 4096, seed=1, cost=COST_OF_1_5B
    ):
        tokens = sum(lengths[index] for index in members(minibatch))
        bound = -(-tokens // ((limit + 4096) * data_size))
        assert len(minibatch.microbatches_by_rank[0]) <= 1.02 * bound
        work = rank_costs(minibatch, lengths, COST_OF_1_5B)
        assert max(work) - min(work) <= 0.02 * sum(work) / data_size


# ---------------------------------------------------------------- bins


def budget_of(lengths: list[int], max_tokens: int, power: int = 1) -> Budget:
    return Budget(lengths, [float(n**power) for n in lengths], max_tokens)


lengths_and_budgets = st.lists(st.integers(1, 50), min_size=1, max_size=60).flatmap(
    lambda lengths: st.tuples(st.just(lengths), st.integers(max(lengths), 200))
)


def test_the_longest_goes_first_and_into_the_fullest_bin_with_room():
    # 7 | 6 | 4 fills 6 (10) | 2 joins 7 (9) | 2 opens a bin: the others have room for 0 and 1
    budget = budget_of([4, 6, 2, 7, 2], 10)
    assert pack_tightly(budget, range(5)) == [[3, 2], [1, 0], [4]]


@settings(deadline=None, max_examples=50)
@given(lengths_and_budgets)
def test_no_two_tight_bins_would_fit_into_one(drawn: tuple[list[int], int]):
    lengths, max_tokens = drawn
    bins = pack_tightly(budget_of(lengths, max_tokens), range(len(lengths)))
    least = sorted(sum(lengths[index] for index in bin_) for bin_ in bins)[:2]
    assert len(least) < 2 or sum(least) > max_tokens


# ---------------------------------------------------------------- hundreds of ranks


def by_the_plain_rule(budget: Budget, n_bins: int) -> list[Bin] | None:
    """The longest sample first, each into the cheapest bin with room.

    Every bin is examined for every sample."""
    bins: list[Bin] = [[] for _ in range(n_bins)]
    for index in budget.longest_first(range(len(budget.lengths))):
        room = [n for n in range(n_bins) if budget.tokens([*bins[n], index]) <= budget.max_tokens]
        if not room:
            return None
        bins[min(room, key=lambda n: (budget.cost(bins[n]), n))].append(index)
    return bins


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60),
    n_bins=st.integers(1, 30),
    max_tokens=st.integers(10, 60),
)
def test_even_bins_are_those_of_the_plain_rule(
    lengths: list[int], n_bins: int, max_tokens: int
) -> None:
    # Whole numbers: sums are exact in any order.
    budget = Budget(lengths, [float(n + n * n) for n in lengths], max_tokens)
    assert pack_evenly(budget, range(len(lengths)), n_bins) == by_the_plain_rule(budget, n_bins)


@pytest.mark.parametrize("ranks", [8, 128, 512])
def test_exchanges_are_looked_for_between_a_bounded_number_of_pairs_for_each_rank(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [0]
    exchange = micro_batches._exchange

    def counted(*args, **named) -> bool:
        pairs[0] += 1
        return exchange(*args, **named)

    monkeypatch.setattr(micro_batches, "_exchange", counted)
    lengths = lengths_of_long_reasoning(28_672, 8 * ranks)
    plan_minibatches(lengths, 1, ranks, 32_768, seed=1, cost=COST_OF_1_5B)
    assert 0 < pairs[0] <= 16 * ranks
