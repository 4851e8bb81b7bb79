"""Planning for hundreds of ranks gives what the plain rule gives, and looks at no more pairs than there is need for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmath.data import seqlen_balancing
from rlmath.data.seqlen_balancing import Bin, Budget, pack_evenly, plan_minibatches
from tools.bench_packing import COST, draw_lengths


def by_the_plain_rule(budget: Budget, n_bins: int) -> list[Bin] | None:
    """The longest sample first, each into the cheapest bin with room: every bin is looked at for every sample."""
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
def test_even_bins_are_those_of_the_plain_rule(lengths: list[int], n_bins: int, max_tokens: int) -> None:
    # Whole numbers: sums are exact in any order.
    budget = Budget(lengths, [float(n + n * n) for n in lengths], max_tokens)
    assert pack_evenly(budget, range(len(lengths)), n_bins) == by_the_plain_rule(budget, n_bins)


@pytest.mark.parametrize("ranks", [8, 128, 512])
def test_exchanges_are_looked_for_between_a_bounded_number_of_pairs_for_each_rank(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs, exchange = [0], seqlen_balancing._exchange

    def counted(*args, **named) -> bool:
        pairs[0] += 1
        return exchange(*args, **named)

    monkeypatch.setattr(seqlen_balancing, "_exchange", counted)
    plan_minibatches(draw_lengths(28_672, 8 * ranks, seed=1), 1, ranks, 32_768, seed=1, cost=COST)
    assert 0 < pairs[0] <= 16 * ranks
