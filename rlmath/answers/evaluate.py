"""The value of an expression at a point: exact fractions where possible, else 100 digits by mpmath.

Sizes are bounded.

Arithmetic comes first, then the functions, then `evaluate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from mpmath import MPContext

from rlmath.answers.normalize import NotMathematics
from rlmath.answers.syntax_tree import Call, Expr, Num, Sym

DIGITS = 50
MORE_DIGITS = 100
"""Every value that is not exact is computed with both precisions; if they disagree, it is
unknown."""
MP = MPContext()
"""A separate context: other users of mpmath in this process keep their precision."""
MP.dps = MORE_DIGITS
mpf = MP.mpf
mpc = MP.mpc
MAX_BITS = 65_536
"""Largest number that is computed (bits of numerator and denominator, or of the integer part):
2^65536."""
AGREE = mpf(10) ** -65
"""Relative tolerance of equality: 30 of the 100 digits may be lost to rounding."""
ZERO = mpf(10) ** -30
"""Largest error of a sum whose terms cancel."""
MAX_FACTORIAL = 5000
"""Largest number whose factorial is computed exactly."""
MAX_TERMS = 1500
"""Most terms of all sums together, at one point."""
INDEX = "index "
"""Prefix of the letter of a sum's index."""
FINITE = frozenset(("sum", "prod"))
INFINITE = frozenset(("series", "infinite product"))
REPEATED = FINITE | INFINITE
Value = Any
"""A Fraction, or a real or complex number of `MP`."""


class Undefined(Exception):
    """Raised where an expression has no real (or, with i, complex) value.

    Examples are a division by zero and the root of a negative number."""


@dataclass
class Context:
    """The point at which an expression is evaluated, and limits."""

    values: Mapping[str, Fraction]
    complex_numbers: bool
    """Whether roots and logarithms of negative numbers are defined."""
    series_terms: int = 0
    """Number of terms of an infinite sum that stand for it; 0 where it is undefined."""
    terms_left: int = MAX_TERMS


def to_mp(value: Value) -> Any:
    return mpf(value.numerator) / value.denominator if type(value) is Fraction else value


def bounded(value: Value) -> Value:
    """The value; NotMathematics where it is too large to be compared, Undefined if infinite."""
    if type(value) is Fraction:
        if value.numerator.bit_length() > MAX_BITS or value.denominator.bit_length() > MAX_BITS:
            raise NotMathematics("a number too large to be compared")
        return value
    if not is_finite(value):
        raise Undefined
    size = abs(value)
    if size and abs(MP.mag(size)) > MAX_BITS:
        raise NotMathematics("a number too large to be compared")
    return value


def to_real(value: Value) -> Any:
    value = to_mp(value)
    if isinstance(value, mpc):
        raise Undefined
    return value


def is_finite(value: Value) -> bool:
    return type(value) is Fraction or bool(MP.isfinite(value))


def added(a: Value, b: Value) -> Value:
    return a + b if type(a) is Fraction and type(b) is Fraction else to_mp(a) + to_mp(b)


def multiplied(a: Value, b: Value) -> Value:
    return a * b if type(a) is Fraction and type(b) is Fraction else to_mp(a) * to_mp(b)


def divided(a: Value, b: Value) -> Value:
    if b == 0:
        raise Undefined
    return a / b if type(a) is Fraction and type(b) is Fraction else to_mp(a) / to_mp(b)


def is_whole(value: Value) -> bool:
    return type(value) is Fraction and value.denominator == 1


def power(base: Value, exponent: Value, context: Context) -> Value:
    """The power base ** exponent, exact where that is possible."""
    if type(base) is Fraction and type(exponent) is Fraction:
        if base == 0:
            if exponent <= 0:
                raise Undefined
            return Fraction(0)
        if exponent.denominator == 1:
            bits = max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent)
            if bits <= MAX_BITS:
                return base ** int(exponent)
        else:
            return _root(base, exponent, context)
    if base == 0:
        raise Undefined
    if not is_whole(exponent) and not context.complex_numbers and to_real(base) < 0:
        raise Undefined
    check_bits(MP.log(abs(to_mp(base)), 2) * abs(to_mp(exponent)))
    if is_whole(exponent):
        return to_mp(base) ** int(exponent)
    return MP.power(to_mp(base), to_mp(exponent))


def check_bits(bits: Any) -> None:
    if not abs(bits) < MAX_BITS:
        raise NotMathematics("a number too large to be compared")


def _root(base: Fraction, exponent: Fraction, context: Context) -> Value:
    """The power base ** exponent of fractions.

    It is exact if the root is rational, and real for odd roots of negative numbers."""
    if abs(exponent.numerator) > 1000 or exponent.denominator > 1000:
        check_bits(MP.log(abs(to_mp(base)), 2) * to_mp(exponent))
    index = exponent.denominator
    sign = 1
    if base < 0:
        if context.complex_numbers:
            return MP.power(to_mp(base), to_mp(exponent))
        if index % 2 == 0:
            raise Undefined
        sign = -1 if exponent.numerator % 2 else 1
        base = -base
    above = _whole_root(base.numerator, index)
    below = _whole_root(base.denominator, index)
    if above is not None and below is not None:
        return sign * power(Fraction(above, below), Fraction(exponent.numerator), context)
    return sign * MP.power(to_mp(base), to_mp(exponent))


def _whole_root(number: int, index: int) -> int | None:
    if number.bit_length() >= 150 or index > 64:
        return None
    root = int(MP.nint(MP.root(mpf(number), index)))
    return root if root**index == number else None


# ---------------------------------------------------------------- functions
def _sqrt(value: Value, context: Context) -> Value:
    if type(value) is Fraction:
        return power(value, Fraction(1, 2), context)
    return _REAL_SQRT(value, context)


def _real_function(
    function: Callable, domain: Callable[[Any], bool] = lambda _: True
) -> Callable[[Value, Context], Value]:
    """A function of mpmath that is undefined for real arguments outside its domain.

    Where complex numbers are allowed, it is defined there, too."""

    def evaluate(value: Value, context: Context) -> Value:
        number = to_mp(value)
        if number and MP.mag(number) > MAX_BITS:
            raise NotMathematics("an argument too large")
        if not context.complex_numbers and not domain(to_real(number)):
            raise Undefined
        try:
            return function(number)
        except (ValueError, ZeroDivisionError) as error:
            raise Undefined from error

    return evaluate


def _exp(value: Value, context: Context) -> Value:
    check_bits(abs(to_mp(value)) * 2)
    return Fraction(1) if value == 0 else MP.exp(to_mp(value))


_whole_factorial = lru_cache(maxsize=64)(math.factorial)


def _factorial(value: Value, context: Context) -> Value:
    """The factorial, exact for whole numbers up to MAX_FACTORIAL."""
    if is_whole(value):
        number = int(value)
        if number < 0:
            raise Undefined
        if number <= MAX_FACTORIAL:
            return Fraction(_whole_factorial(number))
    check_bits(abs(to_mp(value)) * 16)
    return _real_function(MP.factorial, lambda x: x > -1)(value, context)


def _double_factorial(value: Value, context: Context) -> Value:
    """`7!!`, the product of 7, 5, 3 and 1; of whole numbers alone."""
    if not is_whole(value) or not 0 <= value <= MAX_FACTORIAL:
        raise Undefined
    number = int(value)
    return Fraction(math.prod(range(number, 0, -2)))


def _binomial(n: Value, k: Value) -> Value:
    if is_whole(n) and is_whole(k) and 0 <= k <= n <= MAX_FACTORIAL:
        return Fraction(math.comb(int(n), int(k)))
    check_bits(abs(to_mp(n)) * 2)
    return MP.binomial(to_mp(n), to_mp(k))


def _floor(value: Value, up: bool) -> Value:
    """The whole number below, or above with `up`; Undefined where the value is too large."""
    if type(value) is Fraction:
        return Fraction(-(-value // 1) if up else value // 1)
    number = to_real(value)
    if MP.isinf(number) or MP.mag(number) > 150:
        raise Undefined
    nearest = MP.nint(number)
    if abs(number - nearest) < AGREE * (1 + abs(number)):
        return Fraction(int(nearest))
    return Fraction(int(MP.ceil(number) if up else MP.floor(number)))


def _ratio(numerator: Callable, denominator: Callable) -> Callable:
    """The function numerator/denominator, undefined where the denominator is almost zero."""

    def evaluate(number: Any) -> Any:
        below = denominator(number)
        if abs(below) < ZERO:
            raise ZeroDivisionError
        return numerator(number) / below

    return evaluate


_REAL_SQRT = _real_function(MP.sqrt, lambda x: x >= 0)
_ONE_ARGUMENT: dict[str, Callable[[Value, Context], Value]] = {
    "sqrt": _sqrt,
    "exp": _exp,
    "factorial": _factorial,
    "double factorial": _double_factorial,
    "sin": _real_function(MP.sin),
    "cos": _real_function(MP.cos),
    "tan": _real_function(_ratio(MP.sin, MP.cos)),
    "cot": _real_function(_ratio(MP.cos, MP.sin)),
    "sec": _real_function(_ratio(lambda _: 1, MP.cos)),
    "csc": _real_function(_ratio(lambda _: 1, MP.sin)),
    "arcsin": _real_function(MP.asin, lambda x: abs(x) <= 1),
    "arccos": _real_function(MP.acos, lambda x: abs(x) <= 1),
    "arctan": _real_function(MP.atan),
    "sinh": _real_function(MP.sinh),
    "cosh": _real_function(MP.cosh),
    "tanh": _real_function(MP.tanh),
    "ln": _real_function(MP.log, lambda x: x > 0),
    "log": _real_function(MP.log10, lambda x: x > 0),
    "abs": lambda value, _: abs(value),
    "floor": lambda value, _: _floor(value, up=False),
    "ceil": lambda value, _: _floor(value, up=True),
    "neg": lambda value, _: -value,
    "percent": lambda value, _: divided(value, Fraction(100)),
    "deg": lambda value, _: multiplied(to_mp(value) / 180, MP.pi),
}
_TWO_ARGUMENTS = {"add": added, "mul": multiplied, "div": divided, "binom": _binomial}
_CONSTANTS: dict[str, Callable[[], Value]] = {
    "pi": lambda: +MP.pi,
    "e": lambda: +MP.e,
    "i": lambda: mpc(0, 1),
    "inf": lambda: mpf("inf"),
}


def evaluate(expr: Expr, context: Context) -> Value:
    """The value of an expression; infinity only by itself.

    Raises Undefined, or NotMathematics beyond our limits."""
    if isinstance(expr, Num):
        return expr.value
    if isinstance(expr, Sym):
        return context.values[expr.name]
    if not expr.args and expr.name in _CONSTANTS:
        return _CONSTANTS[expr.name]()
    if expr.name in REPEATED:
        return _repeated(expr, context)
    args = [evaluate(arg, context) for arg in expr.args]
    if not all(is_finite(arg) for arg in args):
        if expr.name == "neg":
            return -args[0]
        raise Undefined
    try:
        return bounded(_apply(expr.name, args, context))
    except (ZeroDivisionError, OverflowError) as error:
        raise Undefined from error


def _apply(name: str, args: list[Value], context: Context) -> Value:
    """The value of an operation with finite arguments."""
    if name in _ONE_ARGUMENT:
        return _ONE_ARGUMENT[name](args[0], context)
    a = args[0]
    b = args[-1]
    if name in _TWO_ARGUMENTS:
        return _TWO_ARGUMENTS[name](a, b)
    if name == "pow":
        return power(a, b, context)
    if name == "root":
        return power(a, divided(Fraction(1), b), context)
    if name == "logbase":
        return divided(_ONE_ARGUMENT["ln"](a, context), _ONE_ARGUMENT["ln"](b, context))
    if name in ("min", "max"):
        return (min if name == "min" else max)(args, key=to_real)
    raise NotMathematics(f"no value for {name}")


def _repeated(expr: Call, context: Context) -> Value:
    """The value of a sum or product over an index; of an infinite one that of its first terms."""
    index, low, *high, body = expr.args
    assert isinstance(index, Sym)
    first = evaluate(low, context)
    last = evaluate(high[0], context) if high else first + context.series_terms - 1
    if not (is_whole(first) and is_whole(last)) or last < first - 1 or (not high and last < first):
        raise Undefined
    is_sum = expr.name in ("sum", "series")
    total: Value = Fraction(0 if is_sum else 1)
    inner = replace(context, values=dict(context.values))
    for number in range(int(first), int(last) + 1):
        inner.terms_left -= 1
        if inner.terms_left < 0:
            raise Undefined
        inner.values[index.name] = Fraction(number)  # type: ignore[index]
        term = evaluate(body, inner)
        total = bounded(added(total, term) if is_sum else multiplied(total, term))
    context.terms_left = inner.terms_left
    return total
