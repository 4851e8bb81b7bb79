from hypothesis import given, settings
from hypothesis import strategies as st

from rlmath.data.seqlen_balancing import Budget, pack_evenly, pack_tightly


def budget_of(lengths: list[int], max_tokens: int, power: int = 1) -> Budget:
    return Budget(lengths, [float(n**power) for n in lengths], max_tokens)


lengths_and_budgets = st.lists(st.integers(1, 50), min_size=1, max_size=60).flatmap(
    lambda lengths: st.tuples(st.just(lengths), st.integers(max(lengths), 200))
)


def test_the_longest_goes_first_and_into_the_fullest_bin_with_room():
    # 7 | 6 | 4 fills 6 (10) | 2 joins 7 (9) | 2 opens a bin: the others have room for 0 and 1
    budget = budget_of([4, 6, 2, 7, 2], 10)
    assert pack_tightly(budget, range(5)) == [[3, 2], [1, 0], [4]]


def test_only_the_members_named_are_packed():
    assert pack_tightly(budget_of([4, 6, 2, 7], 10), [2, 3]) == [[3, 2]]


def test_the_longest_goes_first_and_into_the_cheapest_bin():
    # 9 | 8 | 5 joins 8 (13) | 4 joins 9 (13) | 3 joins the first of two alike
    budget = budget_of([9, 8, 5, 4, 3], 100)
    assert pack_evenly(budget, [0, 1, 2, 3, 4], 2) == [[0, 3, 4], [1, 2]]


def test_the_cheapest_bin_is_that_with_least_work_not_with_fewest_tokens():
    # Squares: 6 (36) | 5 (25) | 3 joins 5 (34) | 2 joins that again (38), by tokens it would join 6
    budget = budget_of([6, 5, 3, 2], 10, power=2)
    assert pack_evenly(budget, range(4), 2) == [[0], [1, 2, 3]]


def test_a_bin_without_room_is_passed_over():
    # 6 | 5 | 3 joins 5 | 2 would join 6 with 9 tokens a bin; with squares 5 + 3 is cheaper, but has room for 1
    assert pack_evenly(budget_of([6, 5, 3, 2], 9, power=2), range(4), 2) == [[0, 3], [1, 2]]


def test_ties_are_broken_by_index():
    assert pack_evenly(budget_of([4, 4, 4, 4], 8), [3, 1, 2, 0], 2) == [[0, 2], [1, 3]]


def test_an_even_spread_that_does_not_fit_is_refused():
    # 4 | 4 | 3 + 4 | 3 + 4 | 3 finds rooms of 2 and 2, though 4 + 3 and 3 + 3 + 3 would be 7 and 9
    assert pack_evenly(budget_of([4, 4, 3, 3, 3], 9), range(5), 2) is None


@settings(deadline=None, max_examples=50)
@given(lengths_and_budgets)
def test_tight_bins_hold_every_sample_once_within_the_budget(drawn: tuple[list[int], int]):
    lengths, max_tokens = drawn
    bins = pack_tightly(budget_of(lengths, max_tokens), range(len(lengths)))
    assert sorted(index for bin_ in bins for index in bin_) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in bin_) <= max_tokens for bin_ in bins)


@settings(deadline=None, max_examples=50)
@given(lengths_and_budgets)
def test_no_two_tight_bins_would_fit_into_one(drawn: tuple[list[int], int]):
    lengths, max_tokens = drawn
    bins = pack_tightly(budget_of(lengths, max_tokens), range(len(lengths)))
    least = sorted(sum(lengths[index] for index in bin_) for bin_ in bins)[:2]
    assert len(least) < 2 or sum(least) > max_tokens


@settings(deadline=None, max_examples=50)
@given(lengths_and_budgets, st.integers(1, 10))
def test_even_bins_hold_every_sample_once_within_the_budget(drawn: tuple[list[int], int], n_bins: int):
    lengths, max_tokens = drawn
    bins = pack_evenly(budget_of(lengths, max_tokens, power=2), range(len(lengths)), n_bins)
    if bins is not None:
        assert len(bins) == n_bins
        assert sorted(index for bin_ in bins for index in bin_) == list(range(len(lengths)))
        assert all(sum(lengths[index] for index in bin_) <= max_tokens for bin_ in bins)
