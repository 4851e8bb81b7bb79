"""What the grammar reads, and what it refuses; that equal answers are equal is in test_cases."""

import contextlib
from fractions import Fraction

import pytest

from rlmath.answers.normalize import NotMathematics, Unevaluated, Unsupported
from rlmath.answers.parser import parse_answer
from rlmath.answers.syntax_tree import (
    Call,
    Group,
    Listing,
    MatrixOf,
    Name,
    Num,
    Relation,
    Scalar,
    SetOf,
    Sym,
)
from rlmath.answers.units import DEGREE
from tests.answers.table import check_refused, check_table

X = Sym("x")


def num(value: object) -> Num:
    return Num(Fraction(str(value)))


def test_expressions():
    check_table(
        lambda text: parse_answer(text).expr,
        [
            ("2x", Call("mul", (num(2), X))),
            ("\\frac12", Call("div", (num(1), num(2)))),
            ("\\frac{1}{2}x", Call("mul", (Call("div", (num(1), num(2))), X))),
            ("-x^2", Call("neg", (Call("pow", (X, num(2))),))),
            ("1\\frac{4}{5}", num(1) and Num(Fraction(9, 5))),
            ("3 1/2", Num(Fraction(7, 2))),
            ("\\sin^2 x", Call("pow", (Call("sin", (X,)), num(2)))),
            ("\\sin^{-1} x", Call("arcsin", (X,))),
            ("\\log_2 8", Call("logbase", (num(8), num(2)))),
            ("|x|", Call("abs", (X,))),
            ("{8 \\choose 2}", Call("binom", (num(8), num(2)))),
            ("2**x", Call("pow", (num(2), X))),
        ],
    )


def test_answers_of_all_kinds():
    one, two = Scalar(num(1)), Scalar(num(2))
    assert parse_answer("(1,2]") == Group("(", (one, two), "]")
    assert parse_answer("1, 2") == Listing((one, two), ",")
    assert parse_answer("1 or 2") == Listing((one, two), "or")
    assert parse_answer("\\{1,2\\}") == SetOf((one, two))
    assert parse_answer("x=2") == Relation((Name("x", X), two), ("=",))
    assert parse_answer("f(x)=2") == Relation((Name("f(x)"), two), ("=",))
    assert parse_answer("1<x\\le 2") == Relation((one, Scalar(X), two), ("<", "<="))
    assert parse_answer("\\begin{pmatrix}1&2\\end{pmatrix}") == MatrixOf(((num(1), num(2)),))
    assert parse_answer("90 \\text{ degrees}") == Scalar(num(90), DEGREE)


def test_what_is_to_be_worked_out_is_told_apart():
    check_refused(
        Unevaluated,
        parse_answer,
        ["\\int_0^1 x", "2\\sum_{k} k", "\\lim_{x} x", "\\begin{vmatrix}1&2\\\\3&4\\end{vmatrix}"],
    )


def test_what_is_no_mathematics():
    check_refused(
        NotMathematics,
        parse_answer,
        [
            "not 5",
            "1 2",
            "(1,2",
            "\\unknown{5}",
            "(" * 60 + "1" + ")" * 60,
            "+".join("x" * 120),
            "2" + "^2" * 50,
            "__import__('os')",
        ],
    )


def test_a_shape_that_the_grammar_does_not_read_is_told_apart():
    with pytest.raises(Unsupported):
        parse_answer("\\stackrel{a}{b}")


def test_reading_has_a_bound_on_its_steps():
    for text in ("(" * 12 + "5" + (" m" * 6 + ")") * 12, "(" * 11 + "5" + ("\\text{cm per day})" * 11)):
        with contextlib.suppress(NotMathematics):  # without a bound: minutes
            parse_answer(text)
