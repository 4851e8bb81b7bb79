"""Which completions of a group that is sampled too large are learned from (GRPO-RoC)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmath.algorithms.advantages import advantages
from rlmath.algorithms.dynamic_sampling import Chosen, SelectionRules, choose, select
from rlmath.algorithms.resampling import resampled
from rlmath.algorithms.types import Completion, Prompt, Score, ScoredGroup, Segment, ToolCall

STATUSES = ("ok", "error", "timeout", "memory", "denied")
Answer = tuple[bool, tuple[str, ...], int]
"""Whether an answer is right, the statuses of its calls, and its boxes."""
KEPT = (1, 2, 4, 5, 8, 9, 10, 15)
"""What stays of 16 answers, every other of which is right, with seed 7."""


def group(answers: list[Answer], name: str = "q", step: int = 3) -> ScoredGroup:
    """A group with these answers, each with a turn for every call and one more."""
    completions = []
    for index, (_, statuses, boxes) in enumerate(answers):
        text = "." * len(statuses) + "\\boxed{2}" * boxes
        calls = [ToolCall("1", "1", status, position=g + 1) for g, status in enumerate(statuses)]
        done = Completion(
            index, (7,) * 5, (-0.5,) * 5, text=text, finish_reason="stop", policy_version=0
        )
        segments = (Segment(2, 0, step), Segment(3, 1, step + 1))
        completions.append(replace(done, segments=segments, calls=tuple(calls)))
    scores = [
        Score(float(right), right, "2", verdict="string", boxed=boxes > 0)
        for right, _, boxes in answers
    ]
    prompt = Prompt(name, "?", (5,), solutions=("2",), task="math")
    return ScoredGroup(prompt, tuple(completions), tuple(scores))


def published_faults(answer: Answer) -> Fraction:
    """The two penalties of rStar2's roc.py, with boxes for its answer tags."""
    _, statuses, boxes = answer
    failed = sum(status != "ok" for status in statuses)
    calls = Fraction(failed, len(statuses)) if statuses else Fraction(1, 2)
    turns = len(statuses) + 1
    return calls + (min(Fraction(boxes - 1, turns), Fraction(1)) if boxes else 1)


def published_shares(right: int, wrong: int, most: int) -> tuple[int, int]:
    """Kept right and wrong answers by the steps of roc.py, with its script's 2 of each."""
    n_wrong = round(Fraction(wrong * most, right + wrong))
    n_right = round(Fraction(right * most, right + wrong))
    if n_wrong <= min(2, wrong):
        n_wrong = min(2, wrong)
        n_right = most - n_wrong
    if n_right <= min(2, right):
        n_right = min(2, right)
        n_wrong = most - n_right
    return n_right, n_wrong


drawn_answers = st.lists(
    st.tuples(
        st.booleans(),
        st.lists(st.sampled_from(STATUSES), max_size=3).map(tuple),
        st.integers(0, 3),
    ),
    min_size=8,
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(drawn_answers, st.integers(0, 2**31 - 1))
def test_half_of_a_group_is_chosen_as_in_the_published_program(answers: list[Answer], seed: int):
    positions = resampled(group(answers), range(8), 4, seed)
    assert list(positions) == sorted(set(positions)) and len(positions) == 4
    right = [g for g in range(8) if answers[g][0]]
    kept_right = sorted(published_faults(answers[g]) for g in right if g in positions)
    n_right, n_wrong = published_shares(len(right), 8 - len(right), 4)
    assert (len(kept_right), 4 - len(kept_right)) == (n_right, n_wrong)
    assert kept_right == sorted(published_faults(answers[g]) for g in right)[:n_right]


@pytest.mark.parametrize("most", [2, 3, 5, 7])
@pytest.mark.parametrize("n_right", range(9))
def test_any_size_keeps_the_shares_and_some_of_each_kind(n_right: int, most: int):
    answers = [(g < n_right, ("ok",), 1) for g in range(8)]
    positions = resampled(group(answers), range(8), most, seed=1)
    right = sum(g < n_right for g in positions)
    least = 1 if most < 4 else 2
    low = min(n_right, least)
    high = most - min(8 - n_right, least)
    assert len(positions) == most and low <= right <= high
    assert right in (low, high) or abs(right - n_right * most / 8) <= 0.5


def test_a_group_of_no_more_than_these_stays():
    answers = [(g < 2, ("error",), 1) for g in range(4)]
    assert resampled(group(answers), (0, 2, 3), 3, seed=1) == (0, 2, 3)
    assert resampled(group(answers), (0, 2, 3), 4, seed=1) == (0, 2, 3)


def test_the_same_group_is_chosen_from_alike_in_every_process():
    """Neither hashes of a process nor what was drawn before have a part in it."""
    answers = [(g % 2 == 0, ("ok",), 1) for g in range(16)]
    positions = resampled(group(answers), range(16), 8, seed=7)
    assert positions == KEPT
    assert resampled(group(answers), range(16), 8, seed=7) == positions
    others = [
        resampled(group(answers), range(16), 8, seed=8),
        resampled(group(answers, name="p"), range(16), 8, seed=7),
        resampled(group(answers, step=4), range(16), 8, seed=7),
    ]
    assert len({positions, *others}) == 4


def test_a_step_that_ends_a_group_does_not_change_what_is_chosen():
    """A carried group is chosen from anew where its run is resumed."""
    answers = [(g % 2 == 0, ("ok",), 1) for g in range(16)]
    late = group(answers)
    last = late.completions[15]
    longer = replace(last, segments=(Segment(2, 0, 9), Segment(3, 1, 9)))
    late = replace(late, completions=(*late.completions[:15], longer))
    assert resampled(late, range(16), 8, seed=7) == KEPT


def test_wrong_answers_and_right_ones_with_equal_faults_are_drawn_evenly():
    """Failed calls make no wrong answer likelier to stay, or to go."""
    answers = [(g < 4, ("ok",), 1) for g in range(4)]
    answers += [(False, ("error",) if g % 2 else ("ok",), 1) for g in range(12)]
    counts = Counter(
        g for seed in range(600) for g in resampled(group(answers), range(16), 8, seed)
    )
    assert sum(counts[g] for g in range(4)) == 600 * 2
    assert all(240 < counts[g] < 360 for g in range(16))


def test_the_form_of_an_answer_counts_unless_a_function_judges():
    """Failed calls weigh as much as a missing box; one box for a turn is what repeating costs."""
    answers: list[Answer] = [(True, ("ok",), 2), (True, ("ok",), 0), (True, ("error",), 1)]
    answers += [(True, ("ok", "ok"), 1), (True, (), 1), (True, ("ok",), 3)]
    verified = group(answers)
    assert resampled(verified, range(6), 1, seed=1) == (3,)
    assert resampled(verified, range(6), 3, seed=1) == (0, 3, 4)
    scores = tuple(replace(score, verdict="function") for score in verified.scores)
    by_function = replace(verified, scores=scores)
    assert resampled(by_function, range(6), 4, seed=1) == (0, 1, 3, 5)


# ---------------------------------------------------------------- in the choice of a step


def test_filters_come_before_and_contrast_behind():
    """A void completion is in no share; the rare kind of answer stays, so that there is contrast."""
    answers: list[Answer] = [(g == 0, ("ok",), 1) for g in range(8)]
    void = {1, 2}
    rules = SelectionRules(
        "accuracy", is_void=lambda prompt, done: done.sample_index in void, resample_to=4
    )
    for seed in range(8):
        choice = choose(group(answers), replace(rules, seed=seed))
        assert choice.dropped is None
        assert choice.filtered == ("void",) * 2 + ("oversampled",) * 2
        assert len(choice.samples) == 4 and 0 in choice.samples and not void & set(choice.samples)
    all_right = choose(group([(True, ("ok",), 1)] * 8), rules)
    assert all_right == Chosen((), ("void",) * 2 + ("oversampled",) * 2, "right")
    nothing = SelectionRules(is_void=lambda prompt, done: True, resample_to=4)
    assert choose(group(answers), nothing).dropped == "empty"


def test_advantages_are_of_the_kept_completions_alone():
    answers: list[Answer] = [(g < 2, ("ok",), 1) for g in range(8)]
    rules = SelectionRules(resample_to=4, seed=7)
    selection = select(lambda count: [group(answers)] * count, 1, 0, rules=rules)
    (learned,) = selection.learned
    assert learned.rewards == [1.0, 1.0, 0.0, 0.0]
    rows = advantages([learned.rewards], [[5] * 4], "dr_grpo", eps=0.0)
    (spread,) = selection.spread(rows)
    assert spread[:2] == [0.5, 0.5] and Counter(spread[2:]) == {0.0: 4, -0.5: 2}
    assert "completions dropped: 4 oversampled" in selection.line()


def test_a_box_that_is_written_otherwise_makes_no_answer_better() -> None:
    """One that calls without a failure, in a plain box, is as good as any."""
    answers: list[Answer] = [(True, ("ok",), 1), (True, (), 1), (False, (), 0), (False, (), 0)]
    plain = group(answers)
    odd = replace(plain.completions[1], text="\\boxed 2")
    mixed = replace(plain, completions=(plain.completions[0], odd, *plain.completions[2:]))
    assert 0 in resampled(mixed, range(4), 2, seed=1)
    assert 1 not in resampled(mixed, range(4), 2, seed=1)
