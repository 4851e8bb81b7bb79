"""Confidence intervals of accuracies and of their differences.

They are of the accuracy on problems like those that were answered: problems are what was drawn, and
more answers to one problem tell less than more problems. No interval has the width 0, as that of a
bootstrap has where all answers are right, or all wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import NormalDist, fmean

Interval = tuple[float, float]
"""Lower and upper end."""
LEVEL = 0.95


def wilson_interval(share: float, observations: float, level: float = LEVEL) -> Interval:
    """The score interval of a share of so many observations.

    Source: Wilson 1927, J. Am. Stat. Assoc. 22:209. The number of observations may be a fraction:
    an effective one. ValueError unless the share is from 0 to 1 and the others are above 0.

    >>> [round(end, 4) for end in wilson_interval(0.0, 12.0)]
    [0.0, 0.2425]
    >>> [round(end, 4) for end in wilson_interval(1.0, 500.0)]
    [0.9924, 1.0]
    """
    if not (0 <= share <= 1 and observations > 0):
        raise ValueError(
            f"an interval of a share of {share} in {observations} observations; needed: a share "
            "from 0 to 1, and at "
            "least one observation"
        )
    z = _deviations(level)
    shrunk = 1 + z * z / observations
    centre = (share + z * z / (2 * observations)) / shrunk
    half = z / shrunk * sqrt(share * (1 - share) / observations + (z / (2 * observations)) ** 2)
    low = 0.0 if share == 0 else max(0.0, centre - half)
    high = 1.0 if share == 1 else min(1.0, centre + half)
    return low, high


def accuracy_interval(shares: Sequence[float], samples: int = 1, level: float = LEVEL) -> Interval:
    """The interval of the mean of `shares`: Wilson's, for `effective_problems`.

    `shares` has for each problem the share of right ones of its `samples` answers. With one answer
    a problem, the effective problems are their number. ValueError without any problem.

    >>> accuracy_interval([1.0, 0.0, 1.0, 1.0]) == wilson_interval(0.75, 4.0)
    True
    """
    return wilson_interval(
        fmean(shares) if shares else 0.0, effective_problems(shares, samples), level
    )


def effective_problems(shares: Sequence[float], samples: int) -> float:
    """How many problems that are answered once tell as much as these.

    It is their number, divided by the design effect (Kish 1965), which is the variance of the
    shares over that of right and wrong answers with the same mean. Both are taken with two problems
    more that are right and two that are wrong (Agresti and Coull 1998, Am. Stat. 52:119), so that
    few problems, or shares that are all the same, do not look certain. It is at most the number of
    answers.

    >>> effective_problems([0.0, 1.0, 1.0], 1), round(effective_problems([0.5] * 20, 8), 1)
    (3.0, 120.0)
    """
    problems = len(shares)
    if samples == 1 or not problems:
        return float(problems)
    with_added = [*shares, 0.0, 0.0, 1.0, 1.0]
    mean = fmean(with_added)
    variance = fmean((share - mean) ** 2 for share in with_added)
    design_effect = variance / (mean * (1 - mean))
    return min(problems / design_effect, float(problems * samples))


def difference_interval(differences: Sequence[float], level: float = LEVEL) -> Interval:
    """The interval of the mean of `differences` of two shares of right answers (from -1 to 1).

    There is one difference for each problem. The interval is a normal one, after half a problem is
    added of each of both right, both wrong, and only the one or the other right (Agresti and Min
    2005, Stat. Med. 24:729). ValueError without any problem.

    >>> [round(end, 3) for end in difference_interval([0.0] * 12)]
    [-0.14, 0.14]
    """
    if not differences:
        raise ValueError("an interval of a difference without problems; needed: at least one")
    problems = len(differences) + 2
    mean = sum(differences) / problems
    variance = (sum(difference**2 for difference in differences) + 1) / problems - mean**2
    half = _deviations(level) * sqrt(variance / problems)
    return max(-1.0, mean - half), min(1.0, mean + half)


def _deviations(level: float) -> float:
    """Standard deviations from the mean that hold the middle `level` of a normal distribution.

    ValueError unless it is between 0 and 1."""
    if not 0 < level < 1:
        raise ValueError(f"an interval at level {level}; needed: a level between 0 and 1")
    return NormalDist().inv_cdf((1 + level) / 2)
