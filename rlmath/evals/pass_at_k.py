"""The estimators of the tables: pass@k and maj@k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

MOST_SAMPLES = 1000
"""Most samples of a problem for which the number of subsets fits a float64."""


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that k of n samples, drawn without replacement, include a correct one.

    `correct` of the n are: 1 - C(n - correct, k) / C(n, k), the unbiased estimate of Chen et al.
    2021 (arXiv:2107.03374, section 2.1). It is computed as a product of k factors, so that nothing
    overflows.

    >>> round(pass_at_k(n=4, correct=1, k=2), 10)  # 3 of the 6 pairs contain it
    0.5
    """
    if not (1 <= k <= n and 0 <= correct <= n):
        raise ValueError(
            f"pass@k of {k} from {n} samples, {correct} right; needed: 1 <= k <= n, 0 <= right <= n"
        )
    if n - correct < k:
        return 1.0
    return 1.0 - math.prod((n - correct - i) / (n - i) for i in range(k))


@dataclass(frozen=True, order=True)
class Vote:
    """Samples of one problem with the same answer."""

    count: int
    right: bool


def majority_at_k(votes: Sequence[Vote], blank: int, k: int) -> float:
    """Probability that the most frequent answer among k samples is correct (maj@k).

    The samples are drawn without replacement. `blank` samples have no answer: they may be drawn,
    and do not vote. Equally frequent answers win with the same probability; without any vote the
    majority is wrong. Exact, no resampling.

    >>> majority_at_k([Vote(2, True), Vote(1, False)], blank=0, k=3)
    1.0
    >>> round(majority_at_k([Vote(2, True), Vote(1, False)], blank=0, k=2), 10)  # 1 pair of right ones, 2 ties
    0.6666666667
    """
    n = sum(vote.count for vote in votes) + blank
    if not 1 <= k <= n <= MOST_SAMPLES or blank < 0 or any(vote.count < 1 for vote in votes):
        raise ValueError(f"maj@k of {k} from {n} samples; needed: 1 <= k <= n <= {MOST_SAMPLES}")
    if k == n:
        most_votes = max((vote.count for vote in votes), default=0)
        winners = [vote.right for vote in votes if vote.count == most_votes]
        return sum(winners) / len(winners) if winners else 0.0
    return _expected_majority(tuple(sorted(votes)), blank, k)


@lru_cache(maxsize=4096)
def _expected_majority(votes: tuple[Vote, ...], blank: int, k: int) -> float:
    if not any(vote.right for vote in votes):
        return 0.0
    n = sum(vote.count for vote in votes) + blank
    most_votes = min(k, max(vote.count for vote in votes))
    right = sum(_right_subsets(votes, blank, k, top) for top in range(1, most_votes + 1))
    return right / math.comb(n, k)


def _right_subsets(votes: Sequence[Vote], blank: int, k: int, top: int) -> float:
    """Number of subsets of k samples whose top answers have `top` votes.

    They are weighted by the share of right top answers."""
    ties = k // top
    right_ties = min(ties, sum(vote.right for vote in votes))
    # ways[s, j, c]: ways to draw s samples from the answers so far so that j have `top` votes, c of
    # them correct.
    ways = np.zeros((k + 1, ties + 1, right_ties + 1))
    for drawn in range(min(blank, k) + 1):
        ways[drawn, 0, 0] = math.comb(blank, drawn)
    for vote in votes:
        extended_ways = np.zeros_like(ways)
        for drawn in range(min(vote.count, top - 1) + 1):
            extended_ways[drawn:] += math.comb(vote.count, drawn) * ways[: k + 1 - drawn]
        if vote.count >= top:
            source_slice, target_slice = (
                (slice(None, -1), slice(1, None)) if vote.right else (slice(None), slice(None))
            )
            extended_ways[top:, 1:, target_slice] += (
                math.comb(vote.count, top) * ways[: k + 1 - top, :-1, source_slice]
            )
        ways = extended_ways
    j = np.arange(1, ties + 1)[:, None]
    return float((ways[k, 1:] * np.arange(right_ties + 1) / j).sum())
