from fractions import Fraction

from mpmath import mpf

from rlmath.answers.numbers import MP
from rlmath.answers.real_sets import RealSet, compare, interval, point, whole_line

INFINITY = MP.mpf("inf")


def between(low, high, ends: str = "()") -> RealSet:
    return interval(Fraction(low), ends[0] == "[", Fraction(high), ends[1] == "]")


def test_unions():
    for parts, whole in (
        ([between(0, 2), between(1, 3)], between(0, 3)),
        ([between(0, 1, "[)"), between(1, 2, "[)")], between(0, 2, "[)")),
        ([between(0, 1), point(Fraction(1))], between(0, 1, "(]")),
        ([between(0, 1, "[]"), between(0, 1)], between(0, 1, "[]")),
    ):
        assert RealSet.union(parts).same(whole), whole
        assert RealSet.union(parts[::-1]).same(whole), whole


def test_touching_open_ends_leave_a_gap():
    assert len(RealSet.union([between(0, 1), between(1, 2)]).intervals) == 2


def test_intersections_and_complements():
    assert RealSet.intersection([between(0, 3), between(1, 5, "[]")]).same(between(1, 3, "[)"))
    assert RealSet.intersection([between(0, 1), between(1, 2)]).is_empty
    rest = point(Fraction(0)).complement()
    assert rest.same(
        RealSet.union(
            [interval(-INFINITY, False, Fraction(0), False), interval(Fraction(0), False, INFINITY, False)]
        )
    )
    assert rest.complement().same(point(Fraction(0)))
    assert whole_line().complement().is_empty


def test_infinite_ends_are_open_however_they_are_written():
    assert interval(Fraction(0), True, INFINITY, True).same(interval(Fraction(0), True, INFINITY, False))


def test_order():
    assert compare(Fraction(1, 3), Fraction(1, 2)) == -1
    assert compare(MP.sqrt(2), MP.sqrt(2)) == 0
    assert compare(INFINITY, Fraction(5)) == 1
    assert compare(-INFINITY, INFINITY) == -1
    assert compare(MP.sqrt(mpf(4)), Fraction(2)) == 0
