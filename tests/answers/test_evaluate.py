"""Values worked out by hand, and the limits on sizes."""

import mpmath

from rlmath.answers.compare_values import same_number, value_of
from rlmath.answers.normalize import NotMathematics, plain_unicode
from rlmath.answers.parser import parse_answer
from rlmath.answers.syntax_tree import Scalar
from tests.answers.table import check_refused


def expr(text: str):
    answer = parse_answer(plain_unicode(text))
    assert isinstance(answer, Scalar)
    return answer.expr


def test_what_has_no_value():
    texts = ["\\frac{1}{0}", "0^0", "\\sqrt{-4}", "\\tan 90^\\circ", "\\infty-\\infty"]
    assert [text for text in texts if value_of(expr(text)) is not None] == []


def test_what_is_too_large_or_lost_in_rounding_is_refused():
    check_refused(
        NotMathematics,
        lambda text: value_of(expr(text)),
        ["9^{9^{9}}", "10^{100000}", "100000!", "e^{e^{20}}", "(10^{60}+\\pi)-10^{60}"],
    )


def test_a_reference_may_be_rounded_and_an_answer_may_not():
    assert same_number(expr("0.333333333333"), expr("\\frac13"))
    assert same_number(expr("0.33333"), expr("\\frac13"))
    assert not same_number(expr("0.33"), expr("\\frac13"))
    assert not same_number(expr("0.33333"), expr("\\frac{3}{10}"))
    assert not same_number(expr("\\frac13"), expr("0.333333333333"))
    assert not same_number(expr("0.333333333333"), expr("0.333333333334"))
    assert same_number(expr("\\frac13"), expr("0.33"), protocol=True)


def test_whoever_else_uses_mpmath_keeps_his_precision():
    assert mpmath.mp.dps == 15
