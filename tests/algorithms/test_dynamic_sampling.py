import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmath.algorithms.dynamic_sampling import (
    DROP_REASONS,
    FILTER_REASONS,
    Chosen,
    SelectionRules,
    choose,
    select,
)
from rlmath.algorithms.types import Completion, Prompt, Score, ScoredGroup


def group(
    name: str,
    rewards: list[float],
    correct: list[bool] | None = None,
    lengths: list[int] | None = None,
    truncated: tuple[int, ...] = (),
) -> ScoredGroup:
    """A group whose completions have 5 tokens each.

    A completion with a reward above 0 is right, unless `correct` says otherwise."""
    lengths = lengths or [5] * len(rewards)
    correct = correct or [reward > 0 for reward in rewards]
    completions = tuple(
        Completion(
            g, (1,) * n, (-0.5,) * n, f"{name}-{g}", "length" if g in truncated else "stop", 0
        )
        for g, n in enumerate(lengths)
    )
    scores = tuple(
        Score(reward, right, "", "string") for reward, right in zip(rewards, correct, strict=True)
    )
    return ScoredGroup(Prompt(name, "?", (7,), ("2",), "math"), completions, scores)


MIXED = [1.0, 0.0]
RIGHT = [1.0, 1.0]
ACCURACY = SelectionRules(dynamic="accuracy")


# ---------------------------------------------------------------- one group


def test_where_each_reward_counts_for_itself_a_group_has_contrast_in_any_of_them():
    def with_parts(*parts: tuple[float | None, ...]) -> ScoredGroup:
        scored_group = group("q", [1.0] * len(parts))
        scores = tuple(
            replace(score, parts=row) for score, row in zip(scored_group.scores, parts, strict=True)
        )
        return replace(scored_group, scores=scores)

    rules = SelectionRules(dynamic="reward", parts=(0, 1))
    assert choose(with_parts((1.0, 0.0, 0.5), (0.0, 1.0, 0.5)), rules).dropped is None
    assert (
        choose(with_parts((1.0, 0.0), (0.0, 1.0)), SelectionRules(dynamic="reward")).dropped
        == "uniform"
    )
    # not in one that weighs nothing, and not by one that failed
    assert choose(with_parts((1.0, 0.0, 0.5), (1.0, 0.0, 0.7)), rules).dropped == "uniform"
    assert choose(with_parts((1.0, None), (1.0, 0.0)), rules).dropped == "uniform"


def test_without_rules_all_is_learned_from():
    assert choose(group("q", RIGHT), SelectionRules()) == Chosen((0, 1))
    assert not SelectionRules().drop_anything


@pytest.mark.parametrize(
    ("rewards", "correct", "by_accuracy", "by_reward"),
    [
        ([1.0, 0.0], [True, False], None, None),
        ([1.0, 1.0], [True, True], "right", "uniform"),
        ([0.0, 0.0], [False, False], "wrong", "uniform"),
        ([1.0, 0.5], [True, True], "right", None),  # a bonus tells them apart
        ([-1.0, -0.5], [False, False], "wrong", None),
        ([0.5, 0.5], [True, False], None, "uniform"),  # a malus makes them equal
        ([1.0], [True], "right", "uniform"),
        ([0.0], [False], "wrong", "uniform"),
    ],
)
def test_contrast_is_of_accuracy_or_of_rewards(
    rewards: list[float], correct: list[bool], by_accuracy: str | None, by_reward: str | None
):
    scored_group = group("q", rewards, correct)
    every = tuple(range(len(rewards)))
    assert choose(scored_group, SelectionRules()).dropped is None
    for rules, dropped in ((ACCURACY, by_accuracy), (SelectionRules(dynamic="reward"), by_reward)):
        assert choose(scored_group, rules) == Chosen(() if dropped else every, (), dropped)


@pytest.mark.parametrize(
    ("rules", "samples", "filtered"),
    [
        (SelectionRules(min_tokens=3), (1, 2, 3), ("short",)),  # 3 is long enough
        (SelectionRules(max_tokens=8), (0, 1, 2), ("long",)),  # 8 is short enough
        (SelectionRules(drop_truncated=True), (0, 1), ("truncated", "truncated")),
        (SelectionRules(None, 3, 4, False), (1,), ("short", "long", "long")),
        # one that was cut off is called so, whatever its length
        (SelectionRules(None, 3, 8, True), (1,), ("short", "truncated", "truncated")),
        (SelectionRules(None, 4, 7, True), (), ("short", "short", "truncated", "truncated")),
    ],
)
def test_completions_leave_their_group_by_length(
    rules: SelectionRules, samples: tuple[int, ...], filtered: tuple[str, ...]
):
    scored_group = group("q", [1.0, 0.0, 1.0, 0.0], lengths=[2, 3, 8, 9], truncated=(2, 3))
    assert choose(scored_group, rules) == Chosen(samples, filtered, None if samples else "empty")


def test_contrast_is_looked_for_in_what_the_filters_leave():
    # what is left is right, wrong, right and wrong
    short_right = group("q", [1.0, 1.0, 0.0], lengths=[5, 5, 9])
    assert choose(short_right, SelectionRules("accuracy", max_tokens=8)) == Chosen(
        (), ("long",), "right"
    )
    assert choose(short_right, SelectionRules("reward", max_tokens=8)) == Chosen(
        (), ("long",), "uniform"
    )
    assert choose(short_right, SelectionRules("accuracy", max_tokens=9)) == Chosen((0, 1, 2))
    assert choose(short_right, SelectionRules("accuracy", min_tokens=6)) == Chosen(
        (), ("short",) * 2, "wrong"
    )
    assert choose(short_right, SelectionRules("accuracy", min_tokens=10)) == Chosen(
        (), ("short",) * 3, "empty"
    )
    assert choose(short_right, SelectionRules(max_tokens=8)) == Chosen((0, 1), ("long",))


# ---------------------------------------------------------------- refills


def sampler(
    kept: Iterator[bool] | list[bool],
) -> tuple[Callable[[int], list[ScoredGroup]], list[int]]:
    """A sampler of groups with contrast where `kept` says so, and how many it was asked for."""
    supply = iter(kept)
    asked = []

    def sample(n: int) -> list[ScoredGroup]:
        start = sum(asked)
        asked.append(n)
        return [
            group(f"q-{start + i}", MIXED if has_contrast else RIGHT)
            for i, has_contrast in enumerate(islice(supply, n))
        ]

    return sample, asked


def pattern(marks: str) -> list[bool]:
    return [mark == "x" for mark in marks if mark != " "]


@pytest.mark.parametrize(
    ("wanted", "max_extra", "marks", "asked", "learned"),
    [
        (4, 99, "xxxx", [4], 4),
        (4, 99, "xx.. xxx.", [4, 4], 4),  # share 2/4, missing 2: 2 / 0.5 = 4
        (5, 99, "xxx.. xxxx", [5, 4], 5),  # share 3/5, missing 2: 3.33
        (4, 99, "xx.. x... xxx", [4, 4, 3], 4),  # then share 3/8, missing 1: 2.67
        (4, 99, ".... xxxx" + "." * 12, [4, 16], 4),  # counts on a share of 1/4: 4 / 0.25 = 16
        (8, 99, "x......." + "x" * 28, [8, 28], 8),  # 1/8 is less than 1/4: 7 / 0.25 = 28
        (4, 10, ".... xxxx......", [4, 10], 4),  # 16 would be beyond 4 + 10
        (4, 5, ".... .....", [4, 5], 0),
        (4, 3, "xx.. x..", [4, 3], 3),
        (4, 6, "xx.. .... xx", [4, 4, 2], 4),  # share 2/8, missing 2: 8, of which 2 are left
        (4, 0, "x...", [4], 1),
        (1, 99, ". .... x..." + "." * 9, [1, 4, 4], 1),
        # share 49/70, missing 21: 21 / 0.7 = 30
        pytest.param(
            70, 99, "x" * 49 + "." * 21 + "x" * 21 + "." * 9, [70, 30], 70, id="an exact quotient"
        ),
    ],
)
def test_refills_ask_for_as_many_as_should_suffice(
    wanted: int, max_extra: int, marks: str, asked: list[int], learned: int
):
    sample, got = sampler(pattern(marks))
    selection = select(sample, wanted, max_extra, ACCURACY)
    assert got == asked
    assert len(selection.learned) == learned
    assert len(selection.sampled) == sum(asked)


def test_what_is_beyond_the_wanted_number_is_surplus_from_the_end():
    # 2 of 4 are kept, then 3 of 4: one too many, the last
    sample, _ = sampler(pattern("x.x. xx.x"))
    selection = select(sample, 4, 99, ACCURACY)
    dropped = [None, "right", None, "right", None, None, "right", "surplus"]
    assert [choice.dropped for choice in selection.chosen] == dropped
    assert [learned_group.prompt.prompt_id for learned_group in selection.learned] == [
        "q-0",
        "q-2",
        "q-4",
        "q-5",
    ]
    assert selection.chosen[-1].samples == ()


@pytest.mark.parametrize("rules", [SelectionRules(), SelectionRules(min_tokens=6)])
def test_without_dynamic_sampling_one_call_is_all(rules: SelectionRules):
    # with the filter every group is empty, and still none is sampled in their place
    sample, asked = sampler(count())  # type: ignore[arg-type]
    selection = select(sample, 3, 99, rules)
    assert asked == [3]
    assert len(selection.learned) == (0 if rules.drop_anything else 3)


# ---------------------------------------------------------------- what came of it

FILTERED = group("q-0", [1.0, 0.0, 1.0], lengths=[9, 5, 6])
SOME = select(
    lambda n: [
        FILTERED,
        group("q-1", RIGHT),
        group("q-2", MIXED, lengths=[9, 9]),
        group("q-3", MIXED),
    ],
    count=4,
    max_extra=0,
    rules=SelectionRules("accuracy", max_tokens=8),
)


def test_learned_groups_are_without_what_left_them():
    first, second = SOME.learned
    assert [completion.text for completion in first.completions] == ["q-0-1", "q-0-2"]
    assert first.rewards == [0.0, 1.0]
    assert first.prompt == FILTERED.prompt
    assert second == SOME.sampled[3]


def test_numbers_are_spread_over_all_that_was_sampled():
    spread = SOME.spread([[1.5, -1.5], [0.5, -0.5]])
    assert spread == [[0.0, 1.5, -1.5], [0.0, 0.0], [0.0, 0.0], [0.5, -0.5]]


@pytest.mark.parametrize("values", [[[1.5], [0.5, -0.5]], [[1.5, -1.5, 1.0], [0.5, -0.5]]])
def test_numbers_must_fit_the_learned_completions(values: list[list[float]]):
    with pytest.raises(ValueError, match="zip"):
        SOME.spread(values)


def test_what_is_left_out_is_counted_by_reason():
    assert SOME.dropped_groups() == Counter(right=1, empty=1)
    assert SOME.filtered_completions() == Counter(long=3)
    assert SOME.line() == (
        "2 of 4 sampled groups are learned from, 4 were wanted; groups dropped: 1 empty, 1 right; "
        "completions dropped: 3 long"
    )


def test_the_line_is_short_where_nothing_is_left_out():
    selection = select(lambda n: [group("q", MIXED)] * n, 2, 0, ACCURACY)
    assert selection.line() == "2 of 2 sampled groups are learned from, 2 were wanted"


drawn_groups = st.lists(
    st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.booleans()), min_size=1, max_size=4),
    max_size=40,
)
drawn_rules = st.builds(
    SelectionRules,
    st.sampled_from([None, "accuracy", "reward"]),
    st.integers(0, 4),
    st.none() | st.integers(4, 9),
    st.booleans(),
)


@settings(max_examples=80, deadline=None)
@given(drawn_groups, drawn_rules, st.integers(1, 8), st.integers(0, 20))
def test_whatever_is_sampled_the_bounds_hold(
    drawn: list[list[tuple[bool, int, bool]]], rules: SelectionRules, wanted: int, max_extra: int
):
    stock = [
        group(
            f"q-{i}",
            [float(right) for right, _, _ in row],
            lengths=[n for _, n, _ in row],
            truncated=tuple(g for g, (_, _, cut) in enumerate(row) if cut),
        )
        for i, row in enumerate(drawn)
    ]
    supply = iter(stock)
    asked = []

    def sample(n: int) -> list[ScoredGroup]:
        n_kept = sum(
            choose(scored_group, rules).dropped is None for scored_group in stock[: sum(asked)]
        )
        assert not asked or n_kept < wanted
        asked.append(n)
        return list(islice(supply, n))

    selection = select(sample, wanted, max_extra, rules)
    sampled = selection.sampled
    learned = selection.learned
    assert sampled == stock[: len(sampled)] and len(sampled) <= wanted + max_extra
    assert min(asked) > 0 and (rules.dynamic is not None or asked == [wanted])
    whole = [
        choice
        for choice in (choose(scored_group, rules) for scored_group in sampled)
        if choice.dropped is None
    ]
    assert len(learned) == min(wanted, len(whole))
    if rules.dynamic is not None and len(learned) < wanted:
        assert len(sampled) == min(len(stock), wanted + max_extra)
    for learned_group in learned:
        assert 0 < len(learned_group.completions) == len(learned_group.scores)
        assert all(
            rules.min_tokens <= len(c.token_ids) <= (rules.max_tokens or math.inf)
            for c in learned_group.completions
        )
    # every learned completion has a number of its own, found again at its place
    names = iter(count(1))
    values = [[float(next(names)) for _ in learned_group.completions] for learned_group in learned]
    spread = selection.spread(values)
    assert [len(row) for row in spread] == [
        len(scored_group.completions) for scored_group in sampled
    ]
    completions_by_number = {
        number: sampled[p].completions[g]
        for p, row in enumerate(spread)
        for g, number in enumerate(row)
        if number
    }
    numbered = [number for row in values for number in row]
    assert [completions_by_number[v] for v in numbered] == [
        c for learned_group in learned for c in learned_group.completions
    ]
    assert len(completions_by_number) == len(numbered)
    dropped = selection.dropped_groups()
    filtered = selection.filtered_completions()
    assert dropped.total() == len(sampled) - len(learned)
    assert set(dropped) <= set(DROP_REASONS) and set(filtered) <= set(FILTER_REASONS)
