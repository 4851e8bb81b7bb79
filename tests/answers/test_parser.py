"""What the grammar reads, and what it refuses; that equal answers are equal is in test_cases."""

import contextlib

import pytest

from rlmath.answers.lexer import tokenize
from rlmath.answers.normalize import NotMathematics, Unevaluated, Unsupported, plain_unicode
from rlmath.answers.parser import parse_answer
from tests.answers.table import check_refused


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
            "+".join("x" * 300),
            "2" + "^2" * 300,
            "__import__('os')",
        ],
    )


def test_a_shape_that_the_grammar_does_not_read_is_told_apart():
    with pytest.raises(Unsupported):
        parse_answer("\\stackrel{a}{b}")


def test_reading_has_a_bound_on_its_steps():
    for text in (
        "(" * 12 + "5" + (" m" * 6 + ")") * 12,
        "(" * 11 + "5" + ("\\text{cm per day})" * 11),
    ):
        with contextlib.suppress(NotMathematics):  # without a bound: minutes
            parse_answer(text)


def test_control_characters_are_no_mathematics():
    check_refused(NotMathematics, plain_unicode, ["\x00", "5\x07", "\ud800", "\x7f"])


def test_what_is_no_notation():
    check_refused(NotMathematics, tokenize, ["1" * 401, "1e999", "\\text{5", "5\\", "#€"])


def test_scripts_of_unicode_are_those_of_latex():
    assert plain_unicode("a₁₂ + x²⁰") == "a_{12} + x^{20}"
