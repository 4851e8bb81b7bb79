"""Expressions with free letters: constants, progressions, lines, and sums over an index.

Constants are arbitrary ones; progressions are `start + k step`.

A finite sum is evaluated term by term at several values of its bounds. Of an infinite one only the
first terms are: it is compared only with another infinite one. Dots are read where a pattern
explains every term that is written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import reduce
from itertools import permutations
from typing import Any

from rlmath.answers.compare_values import is_constant, mentions, same_expression, symbols, value_of
from rlmath.answers.evaluate import INDEX, MP, is_finite, mpc, mpf, to_mp
from rlmath.answers.normalize import NotMathematics, Unevaluated
from rlmath.answers.syntax_tree import Call, Expr, Num, Sym


def substituted(expr: Expr, name: str, value: Expr) -> Expr:
    """The expression with a symbol replaced by a value."""
    if isinstance(expr, Sym):
        return value if expr.name == name else expr
    if isinstance(expr, Num):
        return expr
    return Call(expr.name, tuple(substituted(arg, name, value) for arg in expr.args))


def with_letter_i(expr: Expr, letter: Sym) -> Expr:
    """The expression with a letter where it has an i.

    That is the unit vector of `2i + 3j`, or the index of a sum."""
    if expr == Call("i"):
        return letter
    if not isinstance(expr, Call):
        return expr
    return Call(expr.name, tuple(with_letter_i(arg, letter) for arg in expr.args))


def renamed(expr: Expr, names: Sequence[str], others: Sequence[str]) -> Expr:
    """The expression with other names of its letters."""
    for name in names:
        expr = substituted(expr, name, Sym(f"once {name}"))
    for name, other in zip(names, others, strict=True):
        expr = substituted(expr, f"once {name}", Sym(other))
    return expr


def same_antiderivative(gold: Expr, answer: Expr) -> bool:
    """Whether both are functions plus a free constant C, and differ by a constant."""
    functions = [_without_constant(expr) for expr in (gold, answer)]
    if (
        functions[0] is None
        or functions[1] is None
        or symbols(functions[0]) != symbols(functions[1])
    ):
        return False
    return is_constant(Call("add", (functions[0], Call("neg", (functions[1],)))))


def _without_constant(expr: Expr) -> Expr | None:
    """The function f of `f + C`.

    None if the constant is not a separate term or may be a coefficient."""
    terms = _summands(expr)
    constants = [term for term in terms if term in (Sym("C"), Sym("c"))]
    letters = frozenset().union(*(symbols(term) for term in terms)) - {"C", "c"}
    variables = letters & _VARIABLES
    if len(constants) != 1 or not variables or letters & _COEFFICIENTS:
        return None
    if constants == [Sym("c")] and len(letters) > 1:
        return None
    function_terms = [term for term in terms if term not in constants]
    if any({"C", "c"} & symbols(term) for term in function_terms):
        return None
    return reduce(lambda total, term: Call("add", (total, term)), function_terms, Num(Fraction(0)))


def _summands(expr: Expr) -> list[Expr]:
    if isinstance(expr, Call) and expr.name == "add":
        return [*_summands(expr.args[0]), *_summands(expr.args[1])]
    return [expr]


_VARIABLES = frozenset(("x", "t", "u", "y", "z", "theta", "s", "r"))
_COEFFICIENTS = frozenset(("A", "B", "D", "b", "d"))


_ARBITRARY = re.compile(r"[Cc]_[0-9]")
_ARBITRARY_LETTERS = frozenset("ABCDcK")
MAX_CONSTANTS = 3


def same_up_to_constants(gold: Expr, answer: Expr, declared: Sequence[str] = ()) -> bool:
    """Whether both are the same but for the order of C_1, C_2, or with other letters.

    Other letters are capitals or declared ones."""
    gold_letters = sorted(name for name in symbols(gold) if _ARBITRARY.fullmatch(name))
    if not gold_letters and any(_ARBITRARY.fullmatch(name) for name in symbols(answer)):
        # A e^x + B, answered with C_1 and C_2.
        gold_letters = sorted(symbols(gold) & (_ARBITRARY_LETTERS - {"c"}))
    answer_letters = sorted(
        name
        for name in symbols(answer) - (symbols(gold) - set(gold_letters))
        if _ARBITRARY.fullmatch(name) or name in _ARBITRARY_LETTERS or name in declared
    )
    if not 2 <= len(gold_letters) == len(answer_letters) <= MAX_CONSTANTS:
        return False
    return any(
        same_expression(gold, renamed(answer, answer_letters, order))
        for order in permutations(gold_letters)
    )


_RENAMED = frozenset(
    ("A", "B", "C", "D", "K", "a", "b", "c", "d", "k", "m", "alpha", "lambda", "C_1", "c_1")
)
_FREE = frozenset(("C", "C_1", "c_1", "K"))
"""Letters that are constants of integration wherever they occur."""


def same_up_to_renaming(gold: Expr, answer: Expr, declared: Sequence[str]) -> bool:
    """Whether both are one function with other letters of its constants.

    Examples are `Ce^x` and `Ae^x`, declared `cx` and `kx`."""
    gold_letters = symbols(gold) - symbols(answer)
    answer_letters = symbols(answer) - symbols(gold)
    if (
        not 1 <= len(gold_letters) == len(answer_letters) <= MAX_CONSTANTS
        or not symbols(gold) & symbols(answer) & _VARIABLES
    ):
        return False
    if not answer_letters <= _RENAMED or not (
        gold_letters <= _FREE or (answer_letters <= set(declared) and gold_letters <= _RENAMED)
    ):
        return False
    names = sorted(answer_letters)
    return any(
        same_expression(gold, renamed(answer, names, order))
        for order in permutations(sorted(gold_letters))
    )


def same_line(gold: Sequence[Expr], answer: Sequence[Expr], of_reals: bool) -> bool:
    """Whether two points, linear in one parameter, are the same line.

    Unless the gold parameter is `of_reals`, the step must be the same, from another of its points:
    `(1 + 3t, 2t)`, `(4 + 3s, 2 + 2s)`."""
    gold_line = _line(gold)
    answer_line = _line(answer)
    if gold_line is None or answer_line is None or len(gold) != len(answer):
        return False
    (start, step), (answer_start, answer_step) = gold_line, answer_line
    ratio = next(b / a for a, b in zip(step, answer_step, strict=True) if a) if any(step) else 0
    if ratio == 0 or (not of_reals and abs(ratio) != 1):
        return False
    shift = next((b - a) / c for a, b, c in zip(start, answer_start, step, strict=True) if c)
    if not of_reals and shift.denominator != 1:
        return False
    return all(
        d == ratio * c and b - a == shift * c
        for a, b, c, d in zip(start, answer_start, step, answer_step, strict=True)
    )


def _line(exprs: Sequence[Expr]) -> tuple[list[Fraction], list[Fraction]] | None:
    """(point at 0, difference to that at 1) of expressions linear in one parameter.

    None for other expressions."""
    letters = frozenset().union(*map(symbols, exprs))
    if len(letters) != 1 or not letters <= PARAMETERS:
        return None
    (letter,) = letters
    lines = [line for expr in exprs if (line := linear_in(expr, letter)) is not None]
    return (
        ([start for start, _ in lines], [step for _, step in lines])
        if len(lines) == len(exprs)
        else None
    )


def linear_in(expr: Expr, letter: str) -> tuple[Fraction, Fraction] | None:
    """(value at 0, slope) of an expression with fractions that is linear in its only letter.

    None for other expressions."""
    if not symbols(expr) <= {letter}:
        return None
    points = (0, 1, 2, 7, -30)
    approximations = [value_of(substituted(expr, letter, Num(Fraction(point)))) for point in points]
    values = [
        approximation.value
        for approximation in approximations
        if approximation is not None and isinstance(approximation.value, Fraction)
    ]
    if len(values) < len(points):
        return None
    start = values[0]
    slope = values[1] - values[0]
    return (start, slope) if values == [start + point * slope for point in points] else None


PARAMETERS = frozenset(("t", "s", "u", "r", "k", "lambda", "mu", "alpha"))

# ---------------------------------------------------------------- progressions
_INDICES = frozenset(("k", "n", "m", "l", "j"))
_ANGLES = frozenset(("pi", "deg"))
MAX_TERMS = 400
"""Most classes of one common step."""
_CLASS_DIGITS = 30

Progression = tuple[mpf, mpf]
"""(start, step)"""


def open_index(exprs: Sequence[Expr]) -> str | None:
    """The one letter of angles such as `\\pi/3 + 2k\\pi` whose set is not written.

    None for other expressions."""
    letters = frozenset().union(*map(symbols, exprs))
    if (
        len(letters) != 1
        or not letters <= _INDICES
        or not all(mentions(expr, _ANGLES) for expr in exprs)
    ):
        return None
    return next(iter(letters))


def same_progressions(
    gold: Sequence[Expr], gold_letter: str, answer: Sequence[Expr], answer_letter: str
) -> bool:
    """Whether two unions of progressions are the same set.

    An example is `(-1)^k a + k\\pi` and `a + 2k\\pi, \\pi - a + 2k\\pi`."""
    gold_progressions = _progressions(gold, gold_letter)
    answer_progressions = _progressions(answer, answer_letter)
    if gold_progressions is None or answer_progressions is None:
        return False
    period = _common_step([step for _, step in (*gold_progressions, *answer_progressions)])
    if period is None:
        return False
    return _classes(gold_progressions, period) == _classes(answer_progressions, period)


def _progressions(exprs: Sequence[Expr], letter: str) -> list[Progression] | None:
    """The progressions of values at k = 0, 1, 2, ...

    None if they are not linear in k, or in k of one parity."""
    progressions: list[Progression] = []
    for expr in exprs:
        if symbols(expr) != {letter}:
            return None
        values = []
        for k in range(-2, 6):
            value = value_of(substituted(expr, letter, Num(Fraction(k))))
            if value is None or not is_finite(value.value) or isinstance(value.value, mpc):
                return None
            values.append(to_mp(value.value))
        steps = [after - before for before, after in zip(values, values[2:], strict=False)]
        if abs(steps[0]) < _TINY or any(
            abs(step - steps[0]) > _TINY * abs(steps[0]) for step in steps
        ):
            return None
        if abs(values[1] - values[0] - steps[0] / 2) <= _TINY * abs(steps[0]):
            progressions.append((values[0], abs(steps[0]) / 2))
        else:
            progressions += [(values[0], abs(steps[0])), (values[1], abs(steps[0]))]
    return progressions


_TINY = mpf(10) ** -40


def _common_step(steps: Sequence[Any]) -> Any:
    """The least common multiple of steps, real numbers of mpmath.

    None if their ratios are not small fractions."""
    multiple = 1
    for step in steps:
        with MP.workdps(50):
            ratio = Fraction(str(MP.nstr(step / steps[0], 40))).limit_denominator(MAX_TERMS)
        if abs(step / steps[0] - to_mp(ratio)) > _TINY * 10**10 or ratio == 0:
            return None
        multiple = math.lcm(multiple, ratio.numerator)
    period = multiple * steps[0]
    return period if all(period / step <= MAX_TERMS for step in steps) else None


def _classes(progressions: Sequence[Progression], period: Any) -> set[int]:
    """Each class of values modulo the period, as a rounded fraction of it."""
    unit = 10**_CLASS_DIGITS
    return {
        int(MP.nint((start + turn * step) / period * unit)) % unit
        for start, step in progressions
        for turn in range(int(MP.nint(period / step)))
    }


# ---------------------------------------------------------------- sums and products of many terms
_FIRST_INDICES = range(-2, 13)
_MAX_WRITTEN = 8
"""Most terms that are written before or after the dots."""


def repeated(name: str, letter: str, low: Expr, high: Expr, body: Expr) -> Expr:
    """The sum or product of a body over a letter.

    Raises NotMathematics where its terms cannot be computed."""
    index = Sym(INDEX + letter)
    inside = with_letter_i(body, index) if letter == "i" else substituted(body, letter, index)
    if any(letter in name.partition("_")[2] for name in symbols(inside)):  # x_k
        raise NotMathematics("a sequence without values")
    if letter in symbols(low) | symbols(high):
        raise NotMathematics("an index in its own bounds")
    if high == Call("inf"):
        return Call("series" if name == "sum" else "infinite product", (index, low, inside))
    return Call(name, (index, low, high, inside))


def operands(expr: Expr, operation: str) -> list[Expr]:
    """The terms of a sum, or the factors of a product, in their order."""
    last_first: list[Expr] = []
    while isinstance(expr, Call) and expr.name == operation:
        last_first.append(expr.args[1])
        expr = expr.args[0]
    return [expr, *reversed(last_first)]


def explained(before: Sequence[Expr], after: Sequence[Expr], operation: str) -> Expr:
    """The sum ("add") or product ("mul") of terms with dots between.

    Raises Unevaluated if no pattern explains them."""
    if len(before) < 2 or not after or len(before) > _MAX_WRITTEN or len(after) > _MAX_WRITTEN:
        raise Unevaluated("dots between too few terms")
    name = "sum" if operation == "add" else "prod"
    series = _by_last_term(before, after, name)
    if series is None:
        raise Unevaluated("dots without a pattern")
    return series


def _by_last_term(before: Sequence[Expr], after: Sequence[Expr], name: str) -> Expr | None:
    """The terms as the last one with other values of its letter: `1 + 4 + ... + n^2`.

    None where that does not explain them."""
    last = after[-1]
    for letter in sorted(symbols(last) - frozenset().union(*map(symbols, before))):
        for start in _FIRST_INDICES:

            def at(turn: int, letter: str = letter) -> Expr:
                return substituted(last, letter, Num(Fraction(turn)))

            def back(turns: int, letter: str = letter) -> Expr:
                return substituted(last, letter, Call("add", (Sym(letter), Num(Fraction(-turns)))))

            if not all(same_expression(at(start + i), term) for i, term in enumerate(before)):
                continue
            if all(
                same_expression(back(turns), term) for turns, term in enumerate(reversed(after))
            ):
                index = Sym(INDEX + letter)
                body = substituted(last, letter, index)
                return Call(name, (index, Num(Fraction(start)), Sym(letter), body))
    return None
