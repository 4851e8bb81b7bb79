from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmath.evals.pass_at_k import Vote, majority_at_k, pass_at_k
from rlmath.evals.results import answer_key, useful_k


def pass_by_subsets(n: int, correct: int, k: int) -> float:
    """The share of all subsets of k samples that have a right one."""
    right = [i < correct for i in range(n)]
    passes = [any(subset) for subset in itertools.combinations(right, k)]
    return sum(passes) / len(passes)


@settings(max_examples=75, deadline=None)
@given(st.data())
def test_pass_at_k_is_the_share_of_all_subsets(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 11))
    k = data.draw(st.integers(1, n))
    correct = data.draw(st.integers(0, n))
    assert pass_at_k(n, correct, k) == pytest.approx(pass_by_subsets(n, correct, k), abs=1e-12)


def test_pass_at_k_neither_overflows_nor_cancels() -> None:
    n, correct, k = 10_000, 1, 2_000
    assert pass_at_k(n, correct, k) == pytest.approx(k / n, rel=1e-9)
    exact = 1 - math.comb(900, 450) / math.comb(1000, 450)
    assert pass_at_k(1000, 100, 450) == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 1, 5), (4, 5, 1), (4, -1, 1), (4, 1, 0)])
def test_impossible_counts_are_refused(n: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match="needed"):
        pass_at_k(n, correct, k)


def majority_by_subsets(votes: list[Vote], blank: int, k: int) -> float:
    """Every subset of k samples votes; answers that are equally frequent share the win."""
    samples: list[int | None] = [
        number for number, vote in enumerate(votes) for _ in range(vote.count)
    ]
    samples += [None] * blank
    total = 0.0
    subsets = 0
    for subset in itertools.combinations(samples, k):
        subsets += 1
        counts = {answer: subset.count(answer) for answer in subset if answer is not None}
        best = [answer for answer, count in counts.items() if count == max(counts.values())]
        total += sum(votes[answer].right for answer in best) / len(best) if best else 0.0
    return total / subsets


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_majority_is_the_mean_over_all_subsets(data: st.DataObject) -> None:
    votes = [
        Vote(data.draw(st.integers(1, 4)), data.draw(st.booleans()))
        for _ in range(data.draw(st.integers(0, 4)))
    ]
    blank = data.draw(st.integers(0 if votes else 1, 3))
    k = data.draw(st.integers(1, sum(vote.count for vote in votes) + blank))
    assert majority_at_k(votes, blank, k) == pytest.approx(
        majority_by_subsets(votes, blank, k), abs=1e-12
    )


def test_majority_of_the_most_samples_is_a_probability() -> None:
    value = majority_at_k([Vote(300, True), Vote(299, False), Vote(1, False)], 400, 64)
    assert 0.5 < value < 0.6


def test_every_k_that_the_samples_allow() -> None:
    assert useful_k(0) == () and useful_k(1) == (1,) and useful_k(32) == (1, 2, 4, 8, 16, 32)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("1/2", "0.5", True),
        ("(B)", "B", True),
        ("\\text{Even}", "even", True),
        ("\\sqrt{2}", "\\sqrt{3}", False),
        ("\x00", "\x01", False),
    ],
)
def test_answers_that_are_written_alike_are_one_vote(one: str, other: str, same: bool) -> None:
    assert (answer_key(one) == answer_key(other)) is same
