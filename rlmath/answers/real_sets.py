"""Sets of real numbers, finite unions of intervals and points, and functions by cases with such sets as conditions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cmp_to_key
from itertools import pairwise

from rlmath.answers.evaluate import same_expression, symbols, value_of
from rlmath.answers.families import substituted
from rlmath.answers.normalize import NotMathematics
from rlmath.answers.numbers import AGREE, MP, Value, is_finite, mpc, mpf, to_mp
from rlmath.answers.syntax_tree import Expr, Num

Bound = Value


@dataclass(frozen=True)
class Interval:
    low: Bound
    low_closed: bool
    high: Bound
    high_closed: bool

    @property
    def is_empty(self) -> bool:
        order = compare(self.low, self.high)
        return order > 0 or (order == 0 and not (self.low_closed and self.high_closed))


@dataclass(frozen=True)
class RealSet:
    """Sorted intervals that neither overlap nor touch.

    >>> RealSet.union([interval(Fraction(0), True, Fraction(1), False), point(Fraction(1))]).intervals[0].high_closed
    True
    """

    intervals: tuple[Interval, ...]

    @property
    def is_empty(self) -> bool:
        return not self.intervals

    @staticmethod
    def union(sets: Sequence[RealSet]) -> RealSet:
        parts = [part for one in sets for part in one.intervals if not part.is_empty]
        parts.sort(key=cmp_to_key(lambda a, b: compare(a.low, b.low) or b.low_closed - a.low_closed))
        merged: list[Interval] = []
        for part in parts:
            if merged and _touch(merged[-1], part):
                last = merged[-1]
                order = compare(last.high, part.high)
                high = last if order > 0 or (order == 0 and last.high_closed) else part
                merged[-1] = Interval(last.low, last.low_closed, high.high, high.high_closed)
            else:
                merged.append(part)
        return RealSet(tuple(merged))

    @staticmethod
    def intersection(sets: Sequence[RealSet]) -> RealSet:
        result = sets[0]
        for other in sets[1:]:
            result = RealSet.union(
                [RealSet((_overlap(a, b),)) for a in result.intervals for b in other.intervals]
            )
        return result

    def complement(self) -> RealSet:
        """The real numbers outside the set."""
        result = whole_line()
        for part in self.intervals:
            below = Interval(mpf("-inf"), False, part.low, not part.low_closed)
            above = Interval(part.high, not part.high_closed, mpf("inf"), False)
            result = RealSet.intersection([result, RealSet.union([RealSet((below,)), RealSet((above,))])])
        return result

    def same(self, other: RealSet) -> bool:
        return len(self.intervals) == len(other.intervals) and all(
            compare(a.low, b.low) == 0
            and compare(a.high, b.high) == 0
            and (a.low_closed, a.high_closed) == (b.low_closed, b.high_closed)
            for a, b in zip(self.intervals, other.intervals, strict=True)
        )


def interval(low: Bound, low_closed: bool, high: Bound, high_closed: bool) -> RealSet:
    """An interval; infinite ends are always open."""
    one = Interval(low, low_closed and is_finite(low), high, high_closed and is_finite(high))
    return RealSet(() if one.is_empty else (one,))


def point(value: Bound) -> RealSet:
    return interval(value, True, value, True)


def whole_line() -> RealSet:
    return interval(mpf("-inf"), False, mpf("inf"), False)


def compare(a: Bound, b: Bound) -> int:
    """-1, 0 or 1; 0 within the relative tolerance `AGREE`."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return (a > b) - (a < b)
    if isinstance(a, mpc) or isinstance(b, mpc):
        raise NotMathematics("an order among complex numbers")
    x, y = to_mp(a), to_mp(b)
    finite = not (MP.isinf(x) or MP.isinf(y))
    if x == y or (finite and abs(x - y) <= AGREE * max(abs(x), abs(y))):
        return 0
    return 1 if x > y else -1


def _touch(left: Interval, right: Interval) -> bool:
    order = compare(left.high, right.low)
    return order > 0 or (order == 0 and (left.high_closed or right.low_closed))


def _overlap(a: Interval, b: Interval) -> Interval:
    low_order, high_order = compare(a.low, b.low), compare(a.high, b.high)
    low, high = (a if low_order >= 0 else b), (a if high_order <= 0 else b)
    low_closed = a.low_closed and b.low_closed if low_order == 0 else low.low_closed
    high_closed = a.high_closed and b.high_closed if high_order == 0 else high.high_closed
    return Interval(low.low, low_closed, high.high, high_closed)


# ---------------------------------------------------------------- functions by cases
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
