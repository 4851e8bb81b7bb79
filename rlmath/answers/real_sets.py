"""Sets of real numbers: finite unions of intervals and points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from operator import and_, or_

from rlmath.answers.evaluate import AGREE, MP, Value, is_finite, mpc, to_mp
from rlmath.answers.normalize import NotMathematics

Bound = Value


@dataclass(frozen=True)
class RealSet:
    """The numbers at which it begins or ends, and what it has of the line that they cut.

    >>> RealSet.union([interval(Fraction(0), True, Fraction(1), False), point(Fraction(1))]).has
    (False, True, True, True, False)
    """

    cuts: tuple[Bound, ...] = ()
    """Cuts in rising order."""
    has: tuple[bool, ...] = (True,)
    """Whether what is below the first cut is in the set, the first cut itself, what is between it
    and the next, ..."""

    @property
    def is_empty(self) -> bool:
        return not any(self.has)

    @staticmethod
    def union(sets: Sequence[RealSet]) -> RealSet:
        return reduce(lambda left, right: left._combined(right, or_), sets, EMPTY)

    @staticmethod
    def intersection(sets: Sequence[RealSet]) -> RealSet:
        return reduce(lambda left, right: left._combined(right, and_), sets, LINE)

    def complement(self) -> RealSet:
        return RealSet(self.cuts, tuple(not inside for inside in self.has))

    def same(self, other: RealSet) -> bool:
        return self.has == other.has and not any(map(compare, self.cuts, other.cuts))

    def _combined(self, other: RealSet, join: Callable[[bool, bool], bool]) -> RealSet:
        """The set of the numbers for which `join` holds, given whether each set has them."""
        cuts: list[Bound] = []
        has = [join(self.has[0], other.has[0])]
        i = j = 0
        while i < len(self.cuts) or j < len(other.cuts):
            order = 1 if i == len(self.cuts) else -1 if j == len(other.cuts) else 0
            order = order or compare(self.cuts[i], other.cuts[j])
            cut = self.cuts[i] if order <= 0 else other.cuts[j]
            has_cut = join(self.has[2 * i + (order <= 0)], other.has[2 * j + (order >= 0)])
            i = i + (order <= 0)
            j = j + (order >= 0)
            above = join(self.has[2 * i], other.has[2 * j])
            if not has[-1] == has_cut == above:
                cuts.append(cut)
                has += [has_cut, above]
        return RealSet(tuple(cuts), tuple(has))


LINE = RealSet()
EMPTY = LINE.complement()


def interval(low: Bound, low_closed: bool, high: Bound, high_closed: bool) -> RealSet:
    """An interval; infinite ends are always open."""
    order = compare(low, high)
    if order > 0 or (order == 0 and not (low_closed and high_closed and is_finite(low))):
        return EMPTY
    from_low = RealSet((low,), (False, low_closed, True)) if is_finite(low) else LINE
    to_high = RealSet((high,), (True, high_closed, False)) if is_finite(high) else LINE
    return RealSet.intersection([from_low, to_high])


def point(value: Bound) -> RealSet:
    return interval(value, low_closed=True, high=value, high_closed=True)


def compare(a: Bound, b: Bound) -> int:
    """-1, 0 or 1; 0 within the relative tolerance `AGREE`."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return (a > b) - (a < b)
    if isinstance(a, mpc) or isinstance(b, mpc):
        raise NotMathematics("an order among complex numbers")
    x = to_mp(a)
    y = to_mp(b)
    finite = not (MP.isinf(x) or MP.isinf(y))
    if x == y or (finite and abs(x - y) <= AGREE * max(abs(x), abs(y))):
        return 0
    return 1 if x > y else -1
