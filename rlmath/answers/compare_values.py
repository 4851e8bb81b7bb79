"""Compares expressions by value: exact fractions where possible, else 100 digits by mpmath.

Two expressions are equal if they agree wherever both are defined: at one point if they are
constant, at several fixed points if they have symbols. So no simplification is needed, which could
hang. Sizes are bounded.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rlmath.answers.evaluate import (
    AGREE,
    DIGITS,
    INDEX,
    INFINITE,
    MP,
    REPEATED,
    ZERO,
    Context,
    Undefined,
    Value,
    evaluate,
    is_finite,
    is_whole,
    mpc,
    mpf,
    to_mp,
    to_real,
)
from rlmath.answers.normalize import MAX_DIGITS, NotMathematics, Unsupported
from rlmath.answers.syntax_tree import Call, Expr, Num, Sym

RELATIVE_TOLERANCE = mpf(1) / 10**11
"""Tolerance between a decimal of at least `MIN_DIGITS` significant digits and the exact value that
it represents."""
ROUNDING = mpf(2) ** -50
"""Tolerance between such a decimal and a short one: some roundings of a computer's numbers of 53
bits."""
MIN_DIGITS = 12
_SPARE_DIGITS = 3
PROTOCOL_TOLERANCE = 1e-4
"""The relative tolerance of the Qwen2.5-Math evaluation."""


@dataclass(frozen=True)
class ApproximateValue:
    """A value at one point, with a bound of its rounding error."""

    value: Value
    rounding: Any


_REAL_POINTS = 12
_WHOLE_POINTS = 14
_POSITIVE_POINTS = 4
"""Number of the first real points at which all letters are positive."""
_FAR_POINTS = (4, 5, 6, 8)
"""Real points that are evaluated once more, far out: every letter has both signs there."""
_MOST_REACH = 10**40
_SIZES = (
    Fraction(7, 10),
    Fraction(23, 11),
    Fraction(13, 3),
    Fraction(1, 7),
    Fraction(97, 9),
    Fraction(3, 2),
)
_WHOLE_SIZES = (5, 6, 7, 8, 9, 10, 11, 12, 17, 18, 13, 14)
_SMALL_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 1, 3, 9, 12)
_SMALL_LETTERS = frozenset("ijkrst")
_STEPWISE = frozenset(("floor", "ceil", "factorial", "double factorial", "binom", "gcd", "lcm"))
_IMAGINARY = frozenset(("i",))
_REAL_LETTERS = frozenset("xyztuvw")


@lru_cache(maxsize=4096)
def symbols(expr: Expr) -> frozenset[str]:
    """Names of the letters in an expression, but for indices of sums."""
    if isinstance(expr, Sym):
        return frozenset(() if expr.name.startswith(INDEX) else (expr.name,))
    if isinstance(expr, Num):
        return frozenset()
    return frozenset().union(*(symbols(arg) for arg in expr.args))


@lru_cache(maxsize=4096)
def mentions(expr: Expr, names: frozenset[str]) -> bool:
    """Whether any of these operations is in the expression."""
    return isinstance(expr, Call) and (
        expr.name in names or any(mentions(arg, names) for arg in expr.args)
    )


@lru_cache(maxsize=4096)
def _letter_value(name: str, point: int, whole: bool) -> Fraction:
    """The value of a letter at a point.

    Values have all sizes and both signs, and are different for every letter."""
    seed = zlib.crc32(name.encode())
    if whole:
        if point >= len(_WHOLE_SIZES):
            return Fraction((60, 1009)[point - len(_WHOLE_SIZES)] + seed % 97)
        sizes = _SMALL_SIZES if name[:1] in _SMALL_LETTERS else _WHOLE_SIZES
        step = (1, 5, 7, 11)[seed // 12 % 4]  # a different order for every letter
        return Fraction(sizes[(point * step + seed // 97) % len(sizes)])
    offset = Fraction(seed % 89, 977) + Fraction(point * (seed % 7 + 1), 211)
    size = _SIZES[(point + seed) % len(_SIZES)] + offset
    if point < _POSITIVE_POINTS:
        return size
    # Negative at half of the points, different ones for every letter.
    signs = (seed % 7 + 1) & (point - _POSITIVE_POINTS)
    return -size if signs.bit_count() % 2 else size


@lru_cache(maxsize=8192)
def value_of(
    expr: Expr,
    point: int = 0,
    whole: bool | frozenset[str] = False,
    complex_numbers: bool = False,
    series_terms: int = 0,
    scale: int = 1,
) -> ApproximateValue | None:
    """The value at one of the fixed points, None if it is undefined.

    Raises NotMathematics for a constant beyond our limits, or one that is unknown because too many
    digits cancel.

    Letters have whole values if `whole`, or if they are in it. Roots and logarithms of negative
    numbers are defined only with `complex_numbers`, or if i occurs, infinite sums only by their
    first `series_terms`. The letters' values are multiplied by `scale`.
    """
    names = symbols(expr)
    values = {
        name: scale
        * _letter_value(name, point, whole if isinstance(whole, bool) else name in whole)
        for name in names
    }
    context = Context(values, complex_numbers or mentions(expr, _IMAGINARY), series_terms)
    try:
        return _checked_value(expr, context)
    except Undefined:
        return None
    except NotMathematics:
        if values:
            return None
        raise


def _checked_value(expr: Expr, context: Context) -> ApproximateValue:
    """The value with a bound of its error; NotMathematics where rounding loses too many digits."""
    value = evaluate(expr, context)
    if type(value) is Fraction or not is_finite(value):
        return ApproximateValue(value, mpf(0))
    with MP.workdps(DIGITS):
        rough_value = evaluate(expr, context)
    rounding = abs(to_mp(value) - to_mp(rough_value))
    if rounding > ZERO and rounding > abs(value) / 10**20:
        raise NotMathematics("a value lost in rounding")
    return ApproximateValue(value, rounding)


def _agree(first: ApproximateValue, second: ApproximateValue) -> bool:
    """Whether two values are equal up to rounding."""
    a = first.value
    b = second.value
    if type(a) is Fraction and type(b) is Fraction:
        return a == b
    x = to_mp(a)
    y = to_mp(b)
    if MP.isinf(x) or MP.isinf(y):
        return x == y
    difference = abs(x - y)
    if difference <= AGREE * max(abs(x), abs(y)):
        return True
    # A sum whose terms cancel: it is known to be within its rounding error only.
    return difference <= ZERO and difference <= min(first.rounding + second.rounding, ZERO)


def same_expression(first: Expr, second: Expr) -> bool:
    """Whether two expressions are the same function of their symbols, or the same number."""
    if first == second:
        return True
    if mentions(first, REPEATED) or mentions(second, REPEATED):
        return _same_series(first, second)
    letters = symbols(first) | symbols(second)
    has_i = mentions(first, _IMAGINARY) or mentions(second, _IMAGINARY)
    if not letters:
        try:
            a = value_of(first, complex_numbers=has_i)
            b = value_of(second, complex_numbers=has_i)
        except NotMathematics:
            residues = [(_residue(first, prime), _residue(second, prime)) for prime in _PRIMES]
            if any(None in pair for pair in residues):
                raise
            return all(residue == other_residue for residue, other_residue in residues)
        return a is not None and b is not None and _agree(a, b)
    whole = any(mentions(expr, _STEPWISE) or _whole_only(expr) for expr in (first, second))
    steps_of_reals = whole and any(name[:1] in _REAL_LETTERS for name in letters)
    places = [(point, whole) for point in range(_WHOLE_POINTS)]
    if not whole or steps_of_reals:
        places = [(point, False) for point in range(_REAL_POINTS)] + places[: 3 * steps_of_reals]
    pairs = (
        (value_of(first, point, at_whole, has_i), value_of(second, point, at_whole, has_i))
        for point, at_whole in places
    )
    far_values = _far_values(first, second, whole, complex_numbers=has_i)
    return _agree_wherever_defined(pairs, least=2) and all(_agree(a, b) for a, b in far_values)


def _far_values(
    first: Expr, second: Expr, whole: bool = False, complex_numbers: bool = False
) -> Iterator[tuple[ApproximateValue, ApproximateValue]]:
    """Values of both beyond all numbers in them, where `\\max(x, -1000)` is not x.

    They are left out where one is undefined, and where one is an inexact 0, of which no digit is
    known: `1 - 1/(1 + e^{-x})` far out."""
    scale = 10 * min(_reach(first) * _reach(second), _MOST_REACH)
    for point in _FAR_POINTS:
        a, b = (
            value_of(expr, point, whole, complex_numbers, scale=scale) for expr in (first, second)
        )
        if a is not None and b is not None and not (_is_inexact_zero(a) or _is_inexact_zero(b)):
            yield a, b


def _is_inexact_zero(approximation: ApproximateValue) -> bool:
    return type(approximation.value) is not Fraction and abs(approximation.value) <= ZERO


@lru_cache(maxsize=4096)
def _reach(expr: Expr) -> int:
    """The product of the sizes of all numbers in an expression, rounded up."""
    if isinstance(expr, Call) and symbols(expr):
        return min(math.prod(map(_reach, expr.args)), _MOST_REACH)
    approximation = None if isinstance(expr, Sym) else value_of(expr, complex_numbers=True)
    return (
        1
        if approximation is None or not is_finite(approximation.value)
        else min(int(abs(approximation.value)) + 1, _MOST_REACH)
    )


def _agree_wherever_defined(
    pairs: Iterable[tuple[ApproximateValue | None, ApproximateValue | None]], least: int
) -> bool:
    """Whether both values of each pair agree, at `least` pairs or more.

    A pair in which one alone is undefined (None) must be rare."""
    n_agreeing = n_one_sided = 0
    for a, b in pairs:
        if a is None or b is None:
            n_one_sided += (a is None) != (b is None)
            continue
        if not _agree(a, b):
            return False
        n_agreeing += 1
    return n_agreeing >= least and 4 * n_one_sided <= n_agreeing + n_one_sided


_SERIES_TERMS = 9
_STEPS = frozenset(("floor", "ceil"))
_SERIES_POINTS = 8


def _same_series(first: Expr, second: Expr) -> bool:
    """Whether two sums or products of many terms are the same.

    Raises Unsupported for steps, and where only one of the two has infinitely many terms: few
    points do not tell steps from lines."""
    if mentions(first, _STEPS) or mentions(second, _STEPS):
        raise NotMathematics("steps in a sum")
    infinite = {mentions(expr, INFINITE) for expr in (first, second)}
    if len(infinite) > 1:
        raise Unsupported("an infinite sum")
    letters = symbols(first) | symbols(second)
    whole_letters = _whole_letters(first) | _whole_letters(second)
    terms = _SERIES_TERMS if True in infinite else 0
    pairs = (
        (
            value_of(first, point, whole_letters, series_terms=terms),
            value_of(second, point, whole_letters, series_terms=terms),
        )
        for point in range(_SERIES_POINTS if letters else 1)
    )
    return _agree_wherever_defined(pairs, least=4 if letters else 1)


def _whole_letters(expr: Expr) -> frozenset[str]:
    """The letters in the bounds of sums and products, and in factorials and the like."""
    if not isinstance(expr, Call):
        return frozenset()
    if expr.name in _STEPWISE:
        return symbols(expr)
    inner = frozenset().union(*map(_whole_letters, expr.args))
    if expr.name in REPEATED:
        inner |= frozenset().union(*map(symbols, expr.args[1:-1]))
    return inner


_PRIMES = (2**255 - 19, 2**448 - 2**224 - 1, 10**100 + 267)
_MOST_EXPONENT_BITS = 512
"""Less than two exponents differ by whose powers are equal modulo all of the primes."""


def _residue(expr: Expr, prime: int) -> int | None:
    """A number that is too large to be computed, modulo a prime.

    None if it is not of rationals and whole powers. Numbers with the same residues are equal, up to
    a chance that is negligible."""
    if isinstance(expr, Num):
        return expr.value.numerator * pow(expr.value.denominator, -1, prime) % prime
    if not isinstance(expr, Call) or expr.name not in ("add", "neg", "mul", "div", "pow"):
        return None
    first = _residue(expr.args[0], prime)
    if expr.name == "pow":
        exponent = value_of(expr.args[1])
        if not first or exponent is None or exponent.value is None or not is_whole(exponent.value):
            return None
        times = int(exponent.value)
        return pow(first, times, prime) if times.bit_length() <= _MOST_EXPONENT_BITS else None
    second = _residue(expr.args[-1], prime)
    if first is None or second is None or (expr.name == "div" and second == 0):
        return None
    if expr.name == "add":
        return (first + second) % prime
    if expr.name == "neg":
        return -first % prime
    return first * (second if expr.name == "mul" else pow(second, -1, prime)) % prime


def _whole_only(expr: Expr) -> bool:
    """Whether it contains a negative number to the power of a symbol: (-1)^n."""
    if not isinstance(expr, Call):
        return False
    if expr.name == "pow" and symbols(expr.args[1]) and not symbols(expr.args[0]):
        base = value_of(expr.args[0])
        return base is not None and isinstance(base.value, Fraction) and base.value < 0
    return any(_whole_only(arg) for arg in expr.args)


def is_constant(expr: Expr) -> bool:
    """Whether an expression has the same value at all fixed points where it is defined."""
    approximations = [
        approximation
        for point in range(_REAL_POINTS)
        if (approximation := value_of(expr, point)) is not None
    ]
    approximations += [far for far, _ in _far_values(expr, expr)]
    return len(approximations) >= 2 and all(
        _agree(approximations[0], other) for other in approximations[1:]
    )


def are_proportional(first: Expr, second: Expr) -> bool:
    """Whether first = c * second with a real number c other than zero."""
    ratios: list[Any] = []
    near_values = (
        (value_of(first, point), value_of(second, point)) for point in range(_REAL_POINTS)
    )
    for a, b in itertools.chain(near_values, _far_values(first, second)):
        if a is None or b is None or a.value == 0 or b.value == 0:
            continue
        if not (is_finite(a.value) and is_finite(b.value)):
            return False
        ratios.append(to_mp(a.value) / to_mp(b.value))
        if abs(ratios[-1] - ratios[0]) > AGREE * abs(ratios[0]):
            return False
    return len(ratios) >= 2 and not isinstance(ratios[0], mpc)


def same_number(gold: Expr, answer: Expr, protocol: bool = False) -> bool:
    """Whether two constants are equal.

    A reference written as a decimal of at least `MIN_DIGITS` significant digits also equals the
    exact value, if that is no finite decimal, within `RELATIVE_TOLERANCE`, a short one within
    `ROUNDING`, and longer or shorter decimals of at least as many digits. One that looks rounded
    equals exact values, and decimals with more places, that round to it: 33.3 equals 100/3. If the
    reference is exact, the answer must be. With `protocol`, as in the Qwen2.5-Math evaluation, any
    two real numbers within `PROTOCOL_TOLERANCE` are equal, and a decimal of two or more places
    equals a number that rounds to it (3.14 and pi).
    """
    if same_expression(gold, answer):
        return True
    a = value_of(gold)
    b = value_of(answer)
    if a is None or b is None:
        return False
    x = to_mp(a.value)
    y = to_mp(b.value)
    if any(isinstance(value, mpc) or MP.isinf(value) for value in (x, y)):
        return False
    gold_decimal = _decimal(gold)
    answer_decimal = _decimal(answer)
    if protocol:
        if abs(x - y) <= PROTOCOL_TOLERANCE * max(abs(x), abs(y)):
            return True
        pairs = ((gold_decimal, b.value), (answer_decimal, a.value))
        return any(d is not None and _places(d) >= 2 and rounds_to(d, value) for d, value in pairs)
    if gold_decimal is None:
        return False
    if _represents(gold_decimal, b.value):
        return True
    has_more_digits = answer_decimal is None or _places(answer_decimal) > _places(gold_decimal)
    if not (has_more_digits and _rounded_reference(gold_decimal)):
        return False
    half = Fraction(1, 2 * 10 ** _places(gold_decimal))
    if type(b.value) is Fraction:
        return abs(gold_decimal.value - b.value) < half
    return abs(x - y) < to_mp(half)


def _decimal(expr: Expr) -> Num | None:
    return expr if isinstance(expr, Num) and expr.digits is not None else None


def _places(decimal: Num) -> int:
    """Digits after the point, without trailing zeros."""
    enough = (n for n in range(2 * MAX_DIGITS) if (decimal.value * 10**n).denominator == 1)
    return next(enough, 2 * MAX_DIGITS)


def _rounded_reference(decimal: Num) -> bool:
    """Whether a decimal looks rounded.

    It has three digits or more, the last not zero, and is no multiple of 1/16."""
    digits = decimal.digits or 0
    scaled = abs(decimal.value) * 10 ** _places(decimal)
    has_all_digits = scaled.denominator == 1 and len(str(int(scaled))) == digits
    return digits >= 3 and has_all_digits and decimal.value.denominator not in (1, 2, 4, 8, 16)


def _represents(decimal: Num, value: Value) -> bool:
    """Whether a decimal of many digits stands for an exact value."""
    tolerance = RELATIVE_TOLERANCE
    if isinstance(value, Fraction) and _finite(value):
        if not _is_short(value, decimal):
            return False
        tolerance = ROUNDING
    number = to_mp(decimal.value)
    target = to_mp(value)
    if (decimal.digits or 0) < MIN_DIGITS:
        return False
    return abs(number - target) <= tolerance * abs(target) * (1 + AGREE)


def _is_short(value: Fraction, decimal: Num) -> bool:
    """Whether a finite decimal has so few digits that a computer's rounding explains the other one.

    0.3 explains 0.30000000000000004."""
    digits = str(abs(value) * 10 ** _places(Num(value))).strip("0")
    return len(digits) + _SPARE_DIGITS <= (decimal.digits or 0)


def _finite(value: Fraction) -> bool:
    return pow(10, value.denominator.bit_length(), value.denominator) == 0


def rounds_to(expr: Expr, value: Value) -> bool:
    """Whether a value rounds to a number at the last place that the number was written with."""
    if not isinstance(expr, Num) or not _finite(expr.value) or isinstance(to_mp(value), mpc):
        return False
    return abs(to_mp(expr.value) - to_real(value)) <= mpf(10) ** -_places(expr) / 2
