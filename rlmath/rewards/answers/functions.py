"""The functions of expressions, and the value of an expression at a point."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rlmath.rewards.answers.normalize import NotMathematics
from rlmath.rewards.answers.numbers import (
    AGREE,
    MAX_BITS,
    MP,
    ZERO,
    Context,
    Undefined,
    Value,
    added,
    bounded,
    check_bits,
    divided,
    is_finite,
    is_whole,
    mpc,
    mpf,
    multiplied,
    power,
    to_mp,
    to_real,
)
from rlmath.rewards.answers.syntax_tree import Expr, Num, Sym

MAX_FACTORIAL = 5000
"""Largest number whose factorial is computed exactly."""


def _sqrt(value: Value, context: Context) -> Value:
    if isinstance(value, Fraction):
        return power(value, Fraction(1, 2), context)
    return _REAL_SQRT(value, context)


def _real_function(
    function: Callable, domain: Callable[[Any], bool] = lambda _: True
) -> Callable[[Value, Context], Value]:
    """A function of mpmath, undefined for real arguments outside its domain unless complex numbers are allowed."""

    def evaluate(value: Value, context: Context) -> Value:
        number = to_mp(value)
        if MP.mag(number) > MAX_BITS if number else False:
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


def _factorial(value: Value, context: Context) -> Value:
    if is_whole(value):
        number = int(value)
        if number < 0:
            raise Undefined
        if number <= MAX_FACTORIAL:
            return Fraction(_whole_factorial(number))
    check_bits(abs(to_mp(value)) * 16)
    return _real_function(MP.factorial, lambda x: x > -1)(value, context)


def _double_factorial(value: Value, context: Context) -> Value:
    if not is_whole(value) or not 0 <= value <= 1000:
        raise Undefined
    result = 1
    for number in range(int(value), 1, -2):
        result *= number
    return Fraction(result)


@lru_cache(maxsize=64)
def _whole_factorial(number: int) -> int:
    return math.factorial(number)


def _binomial(n: Value, k: Value) -> Value:
    if is_whole(n) and is_whole(k) and 0 <= k <= n <= MAX_FACTORIAL:
        return Fraction(math.comb(int(n), int(k)))
    check_bits(abs(to_mp(n)) * 2)
    return MP.binomial(to_mp(n), to_mp(k))


def _floor(value: Value, up: bool) -> Value:
    if isinstance(value, Fraction):
        return Fraction(-(-value // 1) if up else value // 1)
    number = to_real(value)
    if MP.isinf(number) or MP.mag(number) > 150:
        raise Undefined
    nearest = MP.nint(number)
    if abs(number - nearest) < AGREE * (1 + abs(number)):
        return Fraction(int(nearest))
    return Fraction(int(MP.ceil(number) if up else MP.floor(number)))


def _integers(values: list[Value]) -> list[int]:
    if not all(is_whole(value) and abs(value) < 10**200 for value in values):
        raise Undefined
    return [int(value) for value in values]


def _ratio(numerator: Callable, denominator: Callable) -> Callable:
    """numerator/denominator, undefined where the denominator is zero up to rounding."""

    def evaluate(number: Any) -> Any:
        below = denominator(number)
        if abs(below) < ZERO:
            raise ZeroDivisionError
        return numerator(number) / below

    return evaluate


def _one(_: Any) -> int:
    return 1


_REAL_SQRT = _real_function(MP.sqrt, lambda x: x >= 0)
_ONE_ARGUMENT: dict[str, Callable[[Value, Context], Value]] = {
    "sqrt": _sqrt,
    "exp": _exp,
    "factorial": _factorial,
    "factorial2": _double_factorial,
    "sin": _real_function(MP.sin),
    "cos": _real_function(MP.cos),
    "tan": _real_function(_ratio(MP.sin, MP.cos)),
    "cot": _real_function(_ratio(MP.cos, MP.sin)),
    "sec": _real_function(_ratio(_one, MP.cos)),
    "csc": _real_function(_ratio(_one, MP.sin)),
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

_CONSTANTS: dict[str, Callable[[], Value]] = {
    "pi": lambda: +MP.pi,
    "e": lambda: +MP.e,
    "i": lambda: mpc(0, 1),
    "inf": lambda: mpf("inf"),
}


def evaluate(expr: Expr, context: Context) -> Value:
    """The value of an expression. Infinity is a value only by itself. Raises Undefined, or NotMathematics beyond our
    limits."""
    if isinstance(expr, Num):
        return expr.value
    if isinstance(expr, Sym):
        return context.values[expr.name]
    if expr.name in _CONSTANTS:
        return _CONSTANTS[expr.name]()
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
    if name in _ONE_ARGUMENT:
        return _ONE_ARGUMENT[name](args[0], context)
    a, b = args[0], args[-1]
    if name == "add":
        return added(a, b)
    if name == "mul":
        return multiplied(a, b)
    if name == "div":
        return divided(a, b)
    if name == "pow":
        return power(a, b, context)
    if name == "root":
        return power(a, divided(Fraction(1), b), context)
    if name == "logbase":
        return divided(_ONE_ARGUMENT["ln"](a, context), _ONE_ARGUMENT["ln"](b, context))
    if name == "binom":
        return _binomial(a, b)
    if name in ("min", "max"):
        pick = min if name == "min" else max
        return pick(args, key=to_real)
    if name in ("gcd", "lcm"):
        return Fraction((math.gcd if name == "gcd" else math.lcm)(*_integers(args)))
    raise NotMathematics(f"no value for {name}")
