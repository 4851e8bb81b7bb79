from fractions import Fraction

from rlmath.answers.lexer import AS_WRITTEN, Reading, tokenize
from rlmath.answers.normalize import NotMathematics, plain_unicode, without_layout
from tests.answers.table import check_refused, check_table


def number(text: str) -> Fraction | None:
    (token,) = tokenize(text)
    return token.value


def texts(text: str, reading: Reading = AS_WRITTEN) -> list[str]:
    return [token.text for token in tokenize(text, reading)]


def test_unicode_becomes_latex():
    check_table(
        plain_unicode,
        [
            ("√12", "\\sqrt {12}"),
            ("3½", "3\\frac{1}{2}"),
            ("x²⁰", "x^{20}"),
            ("−5", "-5"),
            ("5\u200b", "5"),
            ("90°", "90^\\circ "),
        ],
    )


def test_control_characters_are_no_mathematics():
    check_refused(NotMathematics, plain_unicode, ["\x00", "5\x07", "\ud800", "\x7f"])


def test_layout_goes():
    check_table(
        without_layout,
        [
            ("$\\left( 3,\\; 4 \\right)$", "( 3,  4 )"),
            ("10,\\!080", "10,080"),
            ("1\\\\[4pt]2", "1\\\\ 2"),
            ("\\color{red}{42}", "{42}"),
            ("14{:}15", "14:15"),
        ],
    )


def test_one_number():
    check_table(
        number,
        [
            ("1.50", Fraction(3, 2)),
            (".5", Fraction(1, 2)),
            ("1,234,567.5", Fraction(2469135, 2)),
            ("3{,}5", Fraction(7, 2)),
            ("1.5e3", Fraction(1500)),
            ("0.\\overline{3}", Fraction(1, 3)),
            ("0.\\dot{1}4285\\dot{7}", Fraction(1, 7)),
            ("2.1454545\\ldots", Fraction(118, 55)),
        ],
    )


def test_doubtful_digits_have_two_readings():
    assert texts("1,234") == ["1,234"]
    assert texts("1,234", Reading(commas_group=False)) == ["1", ",", "234"]
    assert texts("(1,234)") == ["(", "1", ",", "234", ")"]
    assert texts("3e-2") == ["3e-2"]
    assert texts("3e-2", Reading(e_is_exponent=False)) == ["3", "e", "-", "2"]


def test_words_in_text_are_prose():
    number, word = tokenize("5\\text{ cm}")
    assert (number.prose, word.text, word.prose, word.space) == (False, "cm", True, True)


def test_what_is_no_notation():
    check_refused(NotMathematics, tokenize, ["1" * 401, "1e999", "\\text{5", "5\\", "#€"])
