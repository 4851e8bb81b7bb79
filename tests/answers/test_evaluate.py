"""Values worked out by hand, and the limits on sizes."""

from fractions import Fraction

import mpmath
import pytest

from rlmath.answers.evaluate import proportion, same_expression, same_number, value_of
from rlmath.answers.normalize import NotMathematics, plain_unicode
from rlmath.answers.parser import parse_answer
from rlmath.answers.syntax_tree import Scalar
from tests.answers.table import check_refused, check_table


def expr(text: str):
    answer = parse_answer(plain_unicode(text))
    assert isinstance(answer, Scalar)
    return answer.expr


def exact_value(text: str) -> Fraction | None:
    found = value_of(expr(text))
    return found.value if found is not None and isinstance(found.value, Fraction) else None


def test_exact_values():
    check_table(
        exact_value,
        [
            ("2^{10}", 1024),
            ("2^{-1}", Fraction(1, 2)),
            ("7!!", 105),
            ("\\binom{5}{2}", 10),
            ("\\sqrt{\\frac{4}{9}}", Fraction(2, 3)),
            ("\\sqrt[3]{-8}", -2),
            ("\\lfloor -3.5 \\rfloor", -4),
            ("50\\%+0", Fraction(1, 2)),
        ],
    )


def test_what_has_no_value():
    texts = [
        "\\frac{1}{0}",
        "0^0",
        "\\sqrt{-4}",
        "\\tan 90^\\circ",
        "\\infty-\\infty",
    ]
    assert [text for text in texts if value_of(expr(text)) is not None] == []


def test_what_is_too_large_or_lost_in_rounding_is_refused():
    check_refused(
        NotMathematics,
        lambda text: value_of(expr(text)),
        ["9^{9^{9}}", "10^{100000}", "100000!", "e^{e^{20}}", "(10^{60}+\\pi)-10^{60}"],
    )


def test_roots_of_negative_numbers_are_complex_where_i_is_about():
    assert same_expression(expr("2i"), expr("\\sqrt{-4}"))
    assert not same_expression(expr("2"), expr("\\sqrt{-4}"))


def test_the_same_function():
    check_table(
        lambda one, other: same_expression(expr(one), expr(other)),
        [
            ("\\sqrt{3+2\\sqrt{2}}-1-\\sqrt{2}", "0", True),
            ("10^{-40}", "0", False),
            ("\\pi^{100}", "\\pi^{100}+3", False),
            ("\\sin^2 x+\\cos^2 x", "1", True),
            ("\\ln x", "\\ln |x|", False),
            ("\\lceil n/2 \\rceil", "\\lfloor (n+1)/2 \\rfloor", True),
            ("(-1)^n", "(-1)^{n+2}", True),
        ],
    )


def test_expressions_in_proportion():
    assert proportion(expr("2x+4y"), expr("x+2y")) == 2
    assert proportion(expr("x"), expr("-3x")) == pytest.approx(-1 / 3)
    assert proportion(expr("x^2"), expr("x")) is None


def test_a_reference_may_be_rounded_and_an_answer_may_not():
    assert same_number(expr("0.333333333333"), expr("\\frac13"))
    assert not same_number(expr("0.33333"), expr("\\frac13"))
    assert not same_number(expr("\\frac13"), expr("0.333333333333"))
    assert not same_number(expr("0.333333333333"), expr("0.333333333334"))
    assert same_number(expr("\\frac13"), expr("0.33"), protocol=True)


def test_whoever_else_uses_mpmath_keeps_his_precision():
    assert mpmath.mp.dps == 15
