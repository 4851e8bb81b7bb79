"""Compares functions by cases whose conditions are intervals of one letter, at points of every interval."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from rlmath.answers.evaluate import same_expression, symbols, value_of
from rlmath.answers.families import substituted
from rlmath.answers.numbers import is_finite
from rlmath.answers.real_sets import RealSet, compare
from rlmath.answers.syntax_tree import Expr, Num

_INSIDE = (Fraction(1, 7), Fraction(2, 5), Fraction(11, 23), Fraction(2, 3), Fraction(9, 11))
_BEYOND = (Fraction(3, 13), Fraction(7, 5), Fraction(19, 7), Fraction(5), Fraction(35, 3))
MAX_ENDS = 12

Cases = tuple[str, tuple[tuple[Expr, RealSet], ...]]
"""(letter, (value, where it holds) of each case)."""


def same_cases(gold: Cases, answer: Cases) -> bool | None:
    """Whether two functions by cases are the same; None if that cannot be decided."""
    if gold[0] != answer[0]:
        return None
    ends: set[Fraction] = set()
    for _, where in (*gold[1], *answer[1]):
        for part in where.intervals:
            for bound in (part.low, part.high):
                if isinstance(bound, Fraction):
                    ends.add(bound)
                elif is_finite(bound):
                    return None
    if len(ends) > MAX_ENDS:
        return None
    met = 0
    for at in _points(sorted(ends)):
        one, other = _value(gold, at), _value(answer, at)
        if one is None or other is None:
            if (one is None) != (other is None):
                return False
            continue
        if not same_expression(one, other):
            return False
        met += 1
    return met > len(_INSIDE)


def _points(ends: Sequence[Fraction]) -> list[Fraction]:
    """Every end, and points between and beyond them."""
    if not ends:
        return [sign * far for far in _BEYOND for sign in (1, -1)]
    inside = [low + (high - low) * part for low, high in pairwise(ends) for part in _INSIDE]
    return [*ends, *inside, *(ends[0] - far for far in _BEYOND), *(ends[-1] + far for far in _BEYOND)]


def _value(cases: Cases, at: Fraction) -> Expr | None:
    """The value of the first case that holds at a point; None if none does, or it has no value there."""
    letter, branches = cases
    for value, where in branches:
        if _contains(where, at):
            found = substituted(value, letter, Num(at))
            return found if symbols(found) or value_of(found) is not None else None
    return None


def _contains(where: RealSet, at: Fraction) -> bool:
    for part in where.intervals:
        low, high = compare(part.low, at), compare(at, part.high)
        if (low < 0 or (low == 0 and part.low_closed)) and (high < 0 or (high == 0 and part.high_closed)):
            return True
    return False
