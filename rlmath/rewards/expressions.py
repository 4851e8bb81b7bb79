"""What an expression is worth: exact fractions where possible, else 50 digits by MP.

Two expressions are the same when they agree wherever both are defined: at one point when they are constant, at several
fixed points when they have symbols (polynomials that agree there by chance are of no concern: the points have
denominators in the hundreds). So no simplification is needed, and none can hang. Sizes are bounded.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from mpmath import MPContext

from rlmath.rewards.grammar import Call, Expr, Num, Sym
from rlmath.rewards.notation import NotMathematics

DIGITS = 50
MP = MPContext()
"""A context of our own: whoever else uses mpmath in this process keeps his precision."""
MP.dps = DIGITS
mpf, mpc = MP.mpf, MP.mpc

MAX_BITS = 4096
"""Largest exact fraction (bits of numerator and denominator); beyond it 50 digits are kept."""
MAX_MAGNITUDE_BITS = 2_000_000
"""Largest size of a number (bits of its whole part): 2^(2,000,000). Beyond it nothing is decided."""
RELATIVE_TOLERANCE = mpf(1) / 10**11
"""How far a decimal of at least `MIN_DIGITS` significant digits may be from the exact value that it stands for."""
MIN_DIGITS = 12
PROTOCOL_TOLERANCE = 1e-4
"""The relative tolerance of the Qwen2.5-Math evaluation."""

_AGREE = mpf(10) ** -30
_ROUNDING = mpf(10) ** -40

Value = Any
"""A Fraction, or a real or complex number of `MP`."""


class Undefined(Exception):
    """No real (or, with i, complex) value here: a division by zero, the root of a negative number."""


@dataclass
class _Context:
    """What an evaluation needs and what it met."""

    values: Mapping[str, Fraction]
    complex_numbers: bool
    largest: Any
    """Largest term of any sum, in absolute value: its rounding bounds the result's."""


# ---------------------------------------------------------------- arithmetic


def _mp(value: Value) -> Any:
    if isinstance(value, Fraction):
        return mpf(value.numerator) / value.denominator
    return value


def _bounded(value: Value) -> Value:
    if isinstance(value, Fraction):
        if value.numerator.bit_length() > MAX_BITS or value.denominator.bit_length() > MAX_BITS:
            return _mp(value)
        return value
    if MP.isnan(value):
        raise Undefined
    size = value if isinstance(value, mpf) else abs(value)
    if MP.isinf(size):
        return value
    if size and abs(MP.mag(size)) > MAX_MAGNITUDE_BITS:
        raise NotMathematics("a number too large to be compared")
    return value


def _real(value: Value) -> Any:
    value = _mp(value)
    if isinstance(value, mpc):
        if abs(value.imag) > _AGREE * (1 + abs(value.real)):
            raise Undefined
        return value.real
    return value


def is_finite(value: Value) -> bool:
    return isinstance(value, Fraction) or bool(MP.isfinite(value))


def added(a: Value, b: Value) -> Value:
    return a + b if isinstance(a, Fraction) and isinstance(b, Fraction) else _mp(a) + _mp(b)


def _multiply(a: Value, b: Value) -> Value:
    return a * b if isinstance(a, Fraction) and isinstance(b, Fraction) else _mp(a) * _mp(b)


def divided(a: Value, b: Value) -> Value:
    if b == 0:
        raise Undefined
    return a / b if isinstance(a, Fraction) and isinstance(b, Fraction) else _mp(a) / _mp(b)


def _is_whole(value: Value) -> bool:
    return isinstance(value, Fraction) and value.denominator == 1


def _power(base: Value, exponent: Value, context: _Context) -> Value:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        if base == 0:
            if exponent <= 0:
                raise Undefined
            return Fraction(0)
        if exponent.denominator == 1:
            bits = max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent)
            if bits <= MAX_BITS:
                return base ** int(exponent)
            _check_size(MP.log(abs(_mp(base)), 2) * _mp(exponent))
            return _mp(base) ** int(exponent)
        return _root(base, exponent, context)
    if base == 0:
        raise Undefined
    if not context.complex_numbers and _real(base) < 0:
        if _is_whole(exponent):
            return _mp(base) ** int(exponent)
        raise Undefined
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        _check_size(MP.log(abs(_mp(base)), 2) * _mp(exponent))
        return _mp(base) ** int(exponent)
    _check_size(MP.log(abs(_mp(base)), 2) * abs(_mp(exponent)))
    return MP.power(_mp(base), _mp(exponent))


def _check_size(bits: Any) -> None:
    if not abs(bits) < MAX_MAGNITUDE_BITS:
        raise NotMathematics("a number too large to be compared")


def _root(base: Fraction, exponent: Fraction, context: _Context) -> Value:
    """base ** exponent; exact where the root is rational, real for odd roots of negative numbers."""
    if abs(exponent.numerator) > 1000 or exponent.denominator > 1000:
        _check_size(MP.log(abs(_mp(base)), 2) * _mp(exponent))
    index = exponent.denominator
    sign = 1
    if base < 0:
        if context.complex_numbers:
            return MP.power(_mp(base), _mp(exponent))
        if index % 2 == 0:
            raise Undefined
        sign = -1 if exponent.numerator % 2 else 1
        base = -base
    above, below = _whole_root(base.numerator, index), _whole_root(base.denominator, index)
    if above is not None and below is not None:
        return sign * _power(Fraction(above, below), Fraction(exponent.numerator), context)
    return sign * MP.power(_mp(base), _mp(exponent))


def _whole_root(number: int, index: int) -> int | None:
    if number.bit_length() > MAX_BITS or index > 64:
        return None
    root = int(MP.nint(MP.root(mpf(number), index))) if number.bit_length() < 150 else None
    return root if root is not None and root**index == number else None


# ---------------------------------------------------------------- functions


def _sqrt(value: Value, context: _Context) -> Value:
    return _power(value, Fraction(1, 2), context) if isinstance(value, Fraction) else _real_function(
        MP.sqrt, lambda x: x >= 0
    )(value, context)


def _real_function(
    function: Callable, domain: Callable[[Any], bool] = lambda _: True
) -> Callable[[Value, _Context], Value]:
    """A function of mpmath, undefined for real arguments outside of its domain unless complex numbers are about."""

    def evaluate(value: Value, context: _Context) -> Value:
        number = _mp(value)
        if MP.mag(number) > MAX_BITS if number else False:
            raise NotMathematics("an argument too large")
        if not context.complex_numbers and not domain(_real(number)):
            raise Undefined
        try:
            return function(number)
        except (ValueError, ZeroDivisionError) as error:
            raise Undefined from error

    return evaluate


def _exp(value: Value, context: _Context) -> Value:
    _check_size(abs(_mp(value)) * 2)
    return Fraction(1) if value == 0 else MP.exp(_mp(value))


def _factorial(value: Value, context: _Context) -> Value:
    if _is_whole(value):
        number = int(value)
        if number < 0:
            raise Undefined
        if number <= 400:
            return Fraction(int(MP.fac(number)) if number < 20 else _product(2, number))
    _check_size(abs(_mp(value)) * 16)
    return _real_function(MP.factorial, lambda x: x > -1)(value, context)


def _double_factorial(value: Value, context: _Context) -> Value:
    if not _is_whole(value) or not 0 <= value <= 1000:
        raise Undefined
    result = 1
    for number in range(int(value), 1, -2):
        result *= number
    return Fraction(result)


def _product(first: int, last: int) -> int:
    result = 1
    for number in range(first, last + 1):
        result *= number
    return result


def _binomial(n: Value, k: Value) -> Value:
    if _is_whole(n) and _is_whole(k) and 0 <= k <= n <= 400:
        top = min(int(k), int(n - k))
        return Fraction(_product(int(n) - top + 1, int(n)), _product(2, top))
    _check_size(abs(_mp(n)) * 2)
    return MP.binomial(_mp(n), _mp(k))


def _floor(value: Value, up: bool) -> Value:
    if isinstance(value, Fraction):
        return Fraction(-(-value // 1) if up else value // 1)
    number = _real(value)
    if MP.isinf(number) or MP.mag(number) > 150:
        raise Undefined
    nearest = MP.nint(number)
    if abs(number - nearest) < _AGREE * (1 + abs(number)):
        return Fraction(int(nearest))
    return Fraction(int(MP.ceil(number) if up else MP.floor(number)))


def _integers(values: list[Value]) -> list[int]:
    if not all(_is_whole(value) and abs(value) < 10**200 for value in values):
        raise Undefined
    return [int(value) for value in values]


def _not_at_zero(function: Callable) -> Callable:
    """1/function, undefined where that is zero to rounding."""

    def evaluate(number: Any) -> Any:
        below = function(number)
        if abs(below) < _ROUNDING:
            raise ZeroDivisionError
        return 1 / below

    return evaluate


def _tan(number: Any) -> Any:
    below = MP.cos(number)
    if abs(below) < _ROUNDING:
        raise ZeroDivisionError
    return MP.sin(number) / below


def _cot(number: Any) -> Any:
    below = MP.sin(number)
    if abs(below) < _ROUNDING:
        raise ZeroDivisionError
    return MP.cos(number) / below


_ONE_ARGUMENT: dict[str, Callable[[Value, _Context], Value]] = {
    "sqrt": _sqrt,
    "exp": _exp,
    "factorial": _factorial,
    "factorial2": _double_factorial,
    "sin": _real_function(MP.sin),
    "cos": _real_function(MP.cos),
    "tan": _real_function(_tan),
    "cot": _real_function(_cot),
    "sec": _real_function(_not_at_zero(MP.cos)),
    "csc": _real_function(_not_at_zero(MP.sin)),
    "arcsin": _real_function(MP.asin, lambda x: abs(x) <= 1),
    "arccos": _real_function(MP.acos, lambda x: abs(x) <= 1),
    "arctan": _real_function(MP.atan),
    "sinh": _real_function(lambda x: MP.sinh(x)),
    "cosh": _real_function(lambda x: MP.cosh(x)),
    "tanh": _real_function(MP.tanh),
    "ln": _real_function(MP.log, lambda x: x > 0),
    "log": _real_function(MP.log10, lambda x: x > 0),
    "abs": lambda value, _: abs(value),
    "floor": lambda value, _: _floor(value, up=False),
    "ceil": lambda value, _: _floor(value, up=True),
    "neg": lambda value, _: -value,
    "percent": lambda value, _: divided(value, Fraction(100)),
    "deg": lambda value, _: _multiply(_mp(value) / 180, MP.pi),
}
_CONSTANTS: dict[str, Callable[[], Value]] = {
    "pi": lambda: +MP.pi,
    "e": lambda: +MP.e,
    "i": lambda: mpc(0, 1),
    "inf": lambda: mpf("inf"),
}


def _evaluate(expr: Expr, context: _Context) -> Value:
    if isinstance(expr, Num):
        return expr.value
    if isinstance(expr, Sym):
        return context.values[expr.name]
    if expr.name in _CONSTANTS:
        return _CONSTANTS[expr.name]()
    args = [_evaluate(arg, context) for arg in expr.args]
    try:
        return _bounded(_apply(expr.name, args, context))
    except (ZeroDivisionError, OverflowError) as error:
        raise Undefined from error


def _apply(name: str, args: list[Value], context: _Context) -> Value:
    if name in _ONE_ARGUMENT:
        return _ONE_ARGUMENT[name](args[0], context)
    a, b = args[0], args[-1]
    if name == "add":
        if not (isinstance(a, Fraction) and isinstance(b, Fraction)):
            context.largest = max(context.largest, abs(_mp(a)), abs(_mp(b)))
        return added(a, b)
    if name == "mul":
        return _multiply(a, b)
    if name == "div":
        return divided(a, b)
    if name == "pow":
        return _power(a, b, context)
    if name == "root":
        return _power(a, divided(Fraction(1), b), context)
    if name == "logbase":
        return divided(_ONE_ARGUMENT["ln"](a, context), _ONE_ARGUMENT["ln"](b, context))
    if name == "binom":
        return _binomial(a, b)
    if name in ("min", "max"):
        pick = min if name == "min" else max
        return pick(args, key=_real)
    if name in ("gcd", "lcm"):
        return Fraction((math.gcd if name == "gcd" else math.lcm)(*_integers(args)))
    raise NotMathematics(f"no value for {name}")


# ---------------------------------------------------------------- fingerprints


@dataclass(frozen=True)
class Worth:
    """A value at one point, with what its rounding may be."""

    value: Value
    rounding: Any


_REAL_POINTS = 4
_WHOLE_POINTS = 6
_SMALL_LETTERS = frozenset("ijkrst")
_STEPWISE = frozenset(("floor", "ceil", "factorial", "binom", "gcd", "lcm"))
_IMAGINARY = frozenset(("i",))
_REAL_LETTERS = frozenset("xyztuvw")


@lru_cache(maxsize=4096)
def symbols(expr: Expr) -> frozenset[str]:
    if isinstance(expr, Sym):
        return frozenset((expr.name,))
    if isinstance(expr, Num):
        return frozenset()
    return frozenset().union(*(symbols(arg) for arg in expr.args))


@lru_cache(maxsize=4096)
def mentions(expr: Expr, names: frozenset[str]) -> bool:
    """Whether any of these operations is in the expression."""
    return isinstance(expr, Call) and (expr.name in names or any(mentions(arg, names) for arg in expr.args))


def _value_at(name: str, point: int, whole: bool) -> Fraction:
    seed = zlib.crc32(f"{name}/{point}".encode())
    if whole:
        return Fraction(1 + seed % 3) if name[:1] in _SMALL_LETTERS else Fraction(4 + (seed + point) % 7)
    size = Fraction(211 + seed % 1787, 701)
    return -size if point >= 2 and (seed >> 16) % 2 else size


@lru_cache(maxsize=8192)
def worth(expr: Expr, point: int = 0, whole: bool = False, complex_numbers: bool = False) -> Worth | None:
    """The value at one of the fixed points, None where it is undefined. Raises NotMathematics beyond our limits.

    Roots and logarithms of negative numbers are defined only with `complex_numbers`, or where i is mentioned.
    """
    values = {name: _value_at(name, point, whole) for name in symbols(expr)}
    context = _Context(values, complex_numbers or mentions(expr, _IMAGINARY), mpf(0))
    try:
        value = _evaluate(expr, context)
    except Undefined:
        return None
    return Worth(value, context.largest * _ROUNDING)


def _agree(one: Worth, other: Worth) -> bool:
    a, b = one.value, other.value
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    x, y = _mp(a), _mp(b)
    if MP.isinf(x) or MP.isinf(y):
        return x == y
    difference = abs(x - y)
    return difference <= _AGREE * max(abs(x), abs(y)) or difference <= one.rounding + other.rounding


def same_expression(one: Expr, other: Expr) -> bool:
    """Whether two expressions are the same function of their symbols, or the same number."""
    if one == other:
        return True
    both = symbols(one) | symbols(other)
    about_i = mentions(one, _IMAGINARY) or mentions(other, _IMAGINARY)
    if not both:
        a, b = worth(one, complex_numbers=about_i), worth(other, complex_numbers=about_i)
        return a is not None and b is not None and _agree(a, b)
    whole = any(mentions(expr, _STEPWISE) or _whole_only(expr) for expr in (one, other))
    whole = whole and not any(name[:1] in _REAL_LETTERS for name in both)
    met = 0
    for point in range(_WHOLE_POINTS if whole else _REAL_POINTS):
        a, b = worth(one, point, whole, about_i), worth(other, point, whole, about_i)
        if a is None or b is None:
            continue
        if not _agree(a, b):
            return False
        met += 1
    return met >= 2


def _whole_only(expr: Expr) -> bool:
    """Whether it has a negative number to the power of a symbol: (-1)^n."""
    if not isinstance(expr, Call):
        return False
    if expr.name == "pow" and symbols(expr.args[1]) and not symbols(expr.args[0]):
        base = worth(expr.args[0])
        return base is not None and isinstance(base.value, Fraction) and base.value < 0
    return any(_whole_only(arg) for arg in expr.args)


def linear(expr: Expr) -> tuple[str, Value, Value] | None:
    """(symbol, slope, value at 0) of an expression that is linear in its only symbol, else None."""
    names = symbols(expr)
    if len(names) != 1 or mentions(expr, _IMAGINARY):
        return None
    (name,) = names
    try:
        zero, one, two, five = (
            _evaluate(expr, _Context({name: Fraction(at)}, False, mpf(0))) for at in (0, 1, 2, -5)
        )
    except Undefined:
        return None
    slope = added(one, -zero)
    straight = [_agree(Worth(two, _ROUNDING), Worth(added(one, slope), _ROUNDING))]
    straight.append(_agree(Worth(five, _ROUNDING), Worth(added(zero, _multiply(Fraction(-5), slope)), _ROUNDING)))
    return (name, slope, zero) if all(straight) and slope != 0 else None


def is_constant(expr: Expr) -> bool:
    """Whether an expression has the same value at all points where it is defined."""
    found = [seen for point in range(_REAL_POINTS) if (seen := worth(expr, point)) is not None]
    return len(found) >= 2 and all(_agree(found[0], other) for other in found[1:])


def proportion(one: Expr, other: Expr) -> Any:
    """The constant real number c with one = c * other, or None where there is none (or it is zero)."""
    first = None
    met = 0
    for point in range(_REAL_POINTS):
        a, b = worth(one, point), worth(other, point)
        if a is None or b is None or a.value == 0 or b.value == 0:
            continue
        ratio = _mp(a.value) / _mp(b.value)
        if first is None:
            first = ratio
        elif abs(ratio - first) > _AGREE * abs(first):
            return None
        met += 1
    return _real(first) if met >= 2 and first is not None and not isinstance(first, mpc) else None


# ---------------------------------------------------------------- decimals


def same_number(gold: Expr, answer: Expr, protocol: bool = False) -> bool:
    """Whether two constants are the same.

    A reference written as a decimal of at least `MIN_DIGITS` significant digits stands for the exact value, without a
    finite decimal, that it was rounded from, within `RELATIVE_TOLERANCE`, and for longer and shorter decimals of at
    least as many digits; an answer must be exact where the reference is. With `protocol`, as in the Qwen2.5-Math
    evaluation, any two real numbers within `PROTOCOL_TOLERANCE` are equal, and so is a decimal of two or more places
    to what rounds to it (3.14 and pi).
    """
    if same_expression(gold, answer):
        return True
    a, b = worth(gold), worth(answer)
    if a is None or b is None:
        return False
    if isinstance(_mp(a.value), mpc) or isinstance(_mp(b.value), mpc):
        return False
    if MP.isinf(_mp(a.value)) or MP.isinf(_mp(b.value)):
        return False
    one, other = _decimal(gold), _decimal(answer)
    if protocol:
        x, y = _mp(a.value), _mp(b.value)
        if abs(x - y) <= PROTOCOL_TOLERANCE * max(abs(x), abs(y)):
            return True
        return any(_rounds_to(d, v) for d, v in ((one, b.value), (other, a.value)) if d is not None)
    if one is None and other is not None:
        return other.open_ended and _stands_for(other, a.value)
    if other is None and one is not None:
        return _stands_for(one, b.value)
    if one is not None and other is not None:
        short, long = sorted((one, other), key=lambda decimal: decimal.digits or 0)
        return _stands_for(short, long.value, exact=False) if _places(short) < _places(long) else False
    return False


def _decimal(expr: Expr) -> Num | None:
    return expr if isinstance(expr, Num) and expr.digits is not None else None


def _places(decimal: Num) -> int:
    """Digits behind the point, without zeros at the end."""
    places = 0
    while (decimal.value * 10**places).denominator != 1:
        places += 1
    return places


def _stands_for(decimal: Num, value: Value, exact: bool = True) -> bool:
    if exact and isinstance(value, Fraction) and _finite(value):
        return False
    number, target = _mp(decimal.value), _mp(value)
    if decimal.open_ended and _places(decimal) >= 3:
        return abs(number) <= abs(target) < abs(number) + mpf(10) ** -_places(decimal) and number * target > 0
    if (decimal.digits or 0) < MIN_DIGITS:
        return False
    if not exact:
        return abs(number - target) < mpf(10) ** -_places(decimal)
    return abs(number - target) <= RELATIVE_TOLERANCE * abs(target) * (1 + _AGREE)


def _finite(value: Fraction) -> bool:
    """Whether it is a finite decimal."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def _rounds_to(decimal: Num, value: Value) -> bool:
    places = _places(decimal)
    return places >= 2 and abs(_mp(decimal.value) - _mp(value)) <= mpf(10) ** -places / 2
