from fractions import Fraction

from rlmath.answers.lexer import tokenize
from rlmath.answers.normalize import plain_unicode
from rlmath.answers.units import DEGREE, PERCENT, Unit, compatible, read_unit
from tests.answers.table import check_table


def unit(text: str) -> Unit | None:
    return read_unit(tokenize(plain_unicode(text)))


def dimensions_and_factor(text: str):
    found = unit(text)
    return found and (found.dimensions, found.factor)


def test_known_units():
    check_table(
        dimensions_and_factor,
        [
            ("\\text{ cm}", ((("length", 1),), Fraction(1, 100))),
            ("\\text{cm}^2", ((("length", 2),), Fraction(1, 10_000))),
            ("\\text{ square feet}", ((("length", 2),), Fraction(3048, 10_000) ** 2)),
            ("\\text{ miles per hour}", ((("length", 1), ("time", -1)), Fraction(1609344, 3_600_000))),
            ("\\text{ mph}", ((("length", 1), ("time", -1)), Fraction(1609344, 3_600_000))),
            ("\\text{ km}/\\text{h}", ((("length", 1), ("time", -1)), Fraction(5, 18))),
            ("\\text{ g}/\\text{cm}^{3}", ((("length", -3), ("mass", 1)), Fraction(10**6))),
            ("\\text{ s}^{-1}", ((("time", -1),), Fraction(1))),
            ("\\text{ liters}", ((("length", 3),), Fraction(1, 1000))),
            ("\\text{ cents}", ((("dollar", 1),), Fraction(1, 100))),
        ],
    )


def test_marks_and_nouns():
    assert unit("^\\circ") == DEGREE
    assert unit("^{\\circ}\\text{C}") == Unit((("celsius", 1),))
    assert unit("\\%") == PERCENT
    assert unit("\\text{ green apples}") == Unit(nouns=("green", "apple"))
    assert unit("\\text{ million dollars}") == Unit((("dollar", 1),), multiplier=10**6)


def test_what_is_no_unit():
    texts = ["\\text{ is wrong}", "\\text{ or more}", "\\text{ halves}", "x", "ab", "\\text{ cm}/", "+"]
    assert [text for text in texts if unit(text) is not None] == []


def test_what_can_be_compared():
    apples, oranges = Unit(nouns=("apple",)), Unit(nouns=("orange",))
    metres, seconds = Unit((("length", 1),)), Unit((("time", 1),))
    assert compatible(apples, apples) and compatible(apples, Unit(nouns=("green", "apple")))
    assert not compatible(apples, oranges)
    assert compatible(metres, metres) and not compatible(metres, seconds)
