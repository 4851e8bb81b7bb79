"""Weights of files, and names over several files."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmath.algorithms.types import Prompt
from rlmath.data.loader import check_weights, with_unique_names
from rlmath.data.order import PromptOrder, Share, epoch_order

SHARES = st.lists(
    st.builds(Share, st.integers(1, 30), st.sampled_from([0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0])),
    min_size=1,
    max_size=4,
).map(tuple)


def test_places_are_the_rounded_product_and_at_least_one():
    assert [Share(10, weight).places for weight in (0.01, 0.25, 0.5, 1.0, 1.25, 2.0)] == [
        1,
        3,
        5,
        10,
        13,
        20,
    ]


@given(SHARES, st.integers(0, 5), st.integers(0, 1000), st.booleans())
def test_an_epoch_has_every_files_share_and_no_prompt_more_often_than_it_must(
    shares, epoch, seed, shuffle
):
    order = epoch_order(shares, seed, epoch, shuffle)
    counts = Counter(order)
    first = 0
    for share in shares:
        file_counts = [counts[index] for index in range(first, first + share.n_prompts)]
        assert sum(file_counts) == share.places
        # A window of an endless sequence of permutations: at most one more turn than it has whole
        # ones, and one less.
        assert max(file_counts) <= -(-share.places // share.n_prompts) + 1
        assert min(file_counts) >= share.places // share.n_prompts - 1
        first += share.n_prompts
    assert len(order) == sum(share.places for share in shares)


@given(st.integers(1, 20), st.integers(1, 6), st.integers(0, 100))
def test_a_share_of_one_part_in_k_goes_through_the_file_in_k_epochs(per_epoch, k, seed):
    shares = (Share(3, 1.0), Share(per_epoch * k, 1 / k))
    seen = [
        index
        for epoch in range(k)
        for index in epoch_order(shares, seed, epoch, True)
        if index >= 3
    ]
    assert sorted(seen) == list(range(3, 3 + per_epoch * k))


def test_without_shuffling_the_files_follow_each_other():
    shares = (Share(2, 2.0), Share(4, 0.5))
    assert [epoch_order(shares, 1, epoch, False) for epoch in range(3)] == [
        (0, 1, 0, 1, 2, 3),
        (0, 1, 0, 1, 4, 5),
        (0, 1, 0, 1, 2, 3),
    ]


def test_a_weighted_order_is_a_function_of_the_step():
    shares = (Share(10, 2.0), Share(40, 0.5))
    order = PromptOrder(50, 8, seed=3, shuffle=True, shares=shares)
    assert (order.n_places, order.steps_per_epoch, order.left_out_per_epoch) == (40, 5, 0)
    walked = [order.batch(step) for step in range(12)]
    assert PromptOrder(50, 8, seed=3, shuffle=True, shares=shares).batch(11) == walked[11]
    assert [epoch for epoch, _ in walked] == [0] * 5 + [1] * 5 + [2] * 2
    epoch = Counter(index for _, batch in walked[:5] for index in batch)
    assert all(epoch[index] == 2 for index in range(10)) and sum(epoch.values()) == 40
    assert "8 of 50 prompts (40 places an epoch by data.train_weights) a step" in order.line()
    with pytest.raises(
        ValueError,
        match=r"only 50 prompts are left after filtering, which data\.train_weights makes 40",
    ):
        PromptOrder(50, 41, seed=3, shuffle=True, shares=shares)


def test_extra_prompts_of_heavier_files_come_earlier():
    shares = (Share(100, 4.0), Share(100, 0.25))
    order = PromptOrder(200, 5, seed=1, shuffle=True, shares=shares)
    extra = list(order.extra(7))
    assert sorted([*extra, *set(order.batch(7)[1])]) == list(range(200))
    assert sum(index < 100 for index in extra[:50]) > 40
    assert extra == list(order.extra(7)) != list(order.extra(8))


def prompts(*names):
    return [Prompt(name, "text", (1,), ("1",), "math") for name in names]


def test_names_get_their_files_name_only_where_they_clash():
    files = [
        ("a/one.jsonl", prompts("0", "1")),
        ("b/two.jsonl", prompts("1", "2")),
        ("c/two.jsonl", prompts("1")),
    ]
    assert [prompt.prompt_id for prompt in with_unique_names(files)] == [
        "0",
        "1",
        "two/1",
        "2",
        "3:two/1",
    ]


@given(st.lists(st.lists(st.sampled_from("01ab/"), unique=True), max_size=5))
def test_names_stay_unique(names):
    files = [
        ("f.jsonl", prompts(*["f/" + name for name in file_names], *file_names))
        for file_names in names
    ]
    prompt_ids = [prompt.prompt_id for prompt in with_unique_names(files)]
    assert (
        len(prompt_ids) == len(set(prompt_ids)) == sum(2 * len(file_names) for file_names in names)
    )


def test_weights_and_paths_must_fit():
    check_weights(["a", "b"], [])
    check_weights(["a", "b"], [1.0, 0.5])
    with pytest.raises(ValueError, match="train_weights has 1 numbers for 2 files"):
        check_weights(["a", "b"], [1.0])
    for repeated_path in ("a", "./a", "b/../a"):
        with pytest.raises(ValueError, match=f"'{repeated_path}' is there twice"):
            check_weights(["a", "b", repeated_path], [])
