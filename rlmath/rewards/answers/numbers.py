"""Arithmetic on exact fractions where possible, else with 100 digits by mpmath; sizes are bounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from mpmath import MPContext

from rlmath.rewards.answers.normalize import NotMathematics

DIGITS = 50
MORE_DIGITS = 100
"""Every value that is not exact is computed with both precisions; if they disagree, it is unknown."""
MP = MPContext()
"""A separate context: other users of mpmath in this process keep their precision."""
MP.dps = MORE_DIGITS
mpf, mpc = MP.mpf, MP.mpc
MAX_BITS = 65_536
"""Largest number that is computed (bits of numerator and denominator, or of the integer part): 2^65536."""
AGREE = mpf(10) ** -65
"""Relative tolerance of equality: 30 of the 100 digits may be lost to rounding."""
ZERO = mpf(10) ** -30
"""Largest error of a sum whose terms cancel."""
Value = Any
"""A Fraction, or a real or complex number of `MP`."""


class Undefined(Exception):
    """There is no real (or, with i, complex) value: a division by zero, the root of a negative number."""


@dataclass
class Context:
    """The inputs of an evaluation."""

    values: Mapping[str, Fraction]
    complex_numbers: bool
    """Whether roots and logarithms of negative numbers are defined."""


def to_mp(value: Value) -> Any:
    if isinstance(value, Fraction):
        return mpf(value.numerator) / value.denominator
    return value


def bounded(value: Value) -> Value:
    if isinstance(value, Fraction):
        if value.numerator.bit_length() > MAX_BITS or value.denominator.bit_length() > MAX_BITS:
            raise NotMathematics("a number too large to be compared")
        return value
    if not is_finite(value):
        raise Undefined
    size = value if isinstance(value, mpf) else abs(value)
    if size and abs(MP.mag(size)) > MAX_BITS:
        raise NotMathematics("a number too large to be compared")
    return value


def to_real(value: Value) -> Any:
    value = to_mp(value)
    if isinstance(value, mpc):
        if abs(value.imag) > AGREE * (1 + abs(value.real)):
            raise Undefined
        return value.real
    return value


def is_finite(value: Value) -> bool:
    return isinstance(value, Fraction) or bool(MP.isfinite(value))


def added(a: Value, b: Value) -> Value:
    return a + b if isinstance(a, Fraction) and isinstance(b, Fraction) else to_mp(a) + to_mp(b)


def multiplied(a: Value, b: Value) -> Value:
    return a * b if isinstance(a, Fraction) and isinstance(b, Fraction) else to_mp(a) * to_mp(b)


def divided(a: Value, b: Value) -> Value:
    if b == 0:
        raise Undefined
    return a / b if isinstance(a, Fraction) and isinstance(b, Fraction) else to_mp(a) / to_mp(b)


def is_whole(value: Value) -> bool:
    return isinstance(value, Fraction) and value.denominator == 1


def power(base: Value, exponent: Value, context: Context) -> Value:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        if base == 0:
            if exponent <= 0:
                raise Undefined
            return Fraction(0)
        if exponent.denominator == 1:
            bits = max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent)
            if bits <= MAX_BITS:
                return base ** int(exponent)
            check_bits(MP.log(abs(to_mp(base)), 2) * to_mp(exponent))
            return to_mp(base) ** int(exponent)
        return _root(base, exponent, context)
    if base == 0:
        raise Undefined
    if is_whole(exponent):
        check_bits(MP.log(abs(to_mp(base)), 2) * to_mp(exponent))
        return to_mp(base) ** int(exponent)
    if not context.complex_numbers and to_real(base) < 0:
        raise Undefined
    check_bits(MP.log(abs(to_mp(base)), 2) * abs(to_mp(exponent)))
    return MP.power(to_mp(base), to_mp(exponent))


def check_bits(bits: Any) -> None:
    if not abs(bits) < MAX_BITS:
        raise NotMathematics("a number too large to be compared")


def _root(base: Fraction, exponent: Fraction, context: Context) -> Value:
    """base ** exponent; exact if the root is rational, real for odd roots of negative numbers."""
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
    above, below = _whole_root(base.numerator, index), _whole_root(base.denominator, index)
    if above is not None and below is not None:
        return sign * power(Fraction(above, below), Fraction(exponent.numerator), context)
    return sign * MP.power(to_mp(base), to_mp(exponent))


def _whole_root(number: int, index: int) -> int | None:
    if number.bit_length() >= 150 or index > 64:
        return None
    root = int(MP.nint(MP.root(mpf(number), index)))
    return root if root**index == number else None
