"""Sets of real numbers: finite unions of intervals and points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cmp_to_key

from rlmath.answers.evaluate import AGREE, MP, Value, is_finite, mpc, mpf, to_mp
from rlmath.answers.normalize import NotMathematics

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
