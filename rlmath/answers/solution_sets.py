"""Readings of relations and their sides: bounds, plus-minus signs, names and values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction

from rlmath.answers.compare_values import mentions, rounds_to, symbols, value_of
from rlmath.answers.evaluate import MP, divided, is_finite, mpf, to_mp
from rlmath.answers.families import linear_in, operands
from rlmath.answers.normalize import NotMathematics
from rlmath.answers.real_sets import Bound, RealSet, interval, point
from rlmath.answers.syntax_tree import Answer, Call, Expr, Group, Name, Num, Relation, Scalar, Sym
from rlmath.answers.units import DEGREE, PERCENT

PLUS_MINUS = frozenset(("pm", "mp"))
MAX_SIGNS = 4
"""Most plus-minus signs that are expanded."""

FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}


def name_of(side: Answer) -> str | None:
    """The name that a side is; None where it is no name."""
    if isinstance(side, Name):
        return side.text
    if isinstance(side, Scalar) and isinstance(side.expr, Sym):
        return side.expr.name
    if isinstance(side, Group):
        return "".join(name_of(part) or "?" for part in side.items)
    return None


def bound_of(side: Answer) -> Bound | None:
    """The number that a side is; None where it is none."""
    if not isinstance(side, Scalar) or (
        side.unit is not None and side.unit not in (DEGREE, PERCENT)
    ):
        return None
    if symbols(side.expr) or mentions(side.expr, frozenset(("i", "pm", "mp"))):
        return None
    value = value_of(side.expr)
    return None if value is None else value.value


def expansions(exprs: Sequence[Expr]) -> list[tuple[Expr, ...]]:
    """The values of expressions with plus-minus signs.

    There are two for one sign or for signs that a minus-plus links, else all combinations."""
    signs = sum(_count_plus_minus(expr) for expr in exprs)
    linked = signs < 2 or any(mentions(expr, frozenset(("mp",))) for expr in exprs)
    if signs > MAX_SIGNS:
        raise NotMathematics(f"more than {MAX_SIGNS} plus-minus signs")
    patterns = (
        [(True,), (False,)] if linked else list(itertools.product((True, False), repeat=signs))
    )
    cycles = [itertools.cycle(pattern) for pattern in patterns]
    return [tuple(_with_signs(expr, uppers) for expr in exprs) for uppers in cycles]


def _count_plus_minus(expr: Expr) -> int:
    if not isinstance(expr, Call):
        return 0
    return (expr.name == "pm") + sum(_count_plus_minus(arg) for arg in expr.args)


def _with_signs(expr: Expr, uppers: Iterator[bool]) -> Expr:
    """An expression with each plus-minus sign replaced, from left to right.

    It has the upper sign where `uppers` is true."""
    if not isinstance(expr, Call):
        return expr
    if expr.name not in PLUS_MINUS:
        return Call(expr.name, tuple(_with_signs(arg, uppers) for arg in expr.args))
    left = _with_signs(expr.args[0], uppers)
    upper = next(uppers)
    right = _with_signs(expr.args[1], uppers)
    minus = upper == (expr.name == "mp")
    return Call("add", (left, Call("neg", (right,)) if minus else right))


def half_line(left: Answer, op: str, right: Answer) -> tuple[str, RealSet] | None:
    """(variable, the reals that satisfy it) of a relation of x or |x| to a number; else None."""
    if bound_of(left) is not None:
        left, op, right = right, FLIPPED[op], left
    expr = relation_side(left)
    bound = bound_of(right)
    if expr is None or bound is None or (op == "!=" and not is_finite(bound)):
        return None
    if isinstance(expr, Sym):
        return expr.name, _beyond(op, bound)
    if isinstance(expr, Call) and expr.name == "abs" and is_finite(bound):
        linear_form = linear(expr.args[0])
        if linear_form is None:
            return None
        letter, slope, start = linear_form
        join = RealSet.intersection if op in ("<", "<=", "!=") else RealSet.union
        high = divided(bound - start, slope)
        low = divided(-bound - start, slope)
        above, below = (op, FLIPPED[op]) if slope > 0 else (FLIPPED[op], op)
        return letter, join([_beyond(above, high), _beyond(below, low)])
    return None


def linear(expr: Expr) -> tuple[str, Fraction, Fraction] | None:
    """(letter, slope, value at 0) of a linear expression with fractions, `2x - 1`.

    None for other expressions."""
    letters = symbols(expr)
    if len(letters) != 1:
        return None
    (letter,) = letters
    line = linear_in(expr, letter)
    return (letter, line[1], line[0]) if line is not None and line[1] else None


def whole_numbers(reals: RealSet) -> tuple[int | None, int | None]:
    """The least and the greatest whole number of an interval, None where it has no end."""
    has = reals.has
    cuts = list(reals.cuts)
    if has[0] + has[-1] + len(cuts) != 2 or (len(cuts) == 2 and not has[2]):
        raise NotMathematics("whole numbers of several intervals")
    low = None if has[0] else int(MP.ceil(to_mp(cuts[0])))
    high = None if has[-1] else int(MP.floor(to_mp(cuts[-1])))
    if low is not None and low == cuts[0] and not has[1]:
        low += 1
    if high is not None and high == cuts[-1] and not has[-2]:
        high -= 1
    return low, high


def relation_side(side: Answer) -> Expr | None:
    if isinstance(side, Name):
        return side.expr if side.expr is not None else Sym(side.text)
    return side.expr if isinstance(side, Scalar) and side.unit is None else None


def _beyond(op: str, bound: Bound) -> RealSet:
    """The reals x with `x op bound`."""
    if op == "!=":
        return point(bound).complement()
    if op in ("<", "<="):
        return interval(mpf("-inf"), low_closed=False, high=bound, high_closed=op == "<=")
    return interval(bound, low_closed=op == ">=", high=mpf("inf"), high_closed=False)


def mention_signs(exprs: Sequence[Expr | None]) -> bool:
    return any(expr is not None and mentions(expr, PLUS_MINUS) for expr in exprs)


def named_side(side: Answer, expr: Expr) -> Answer:
    return side if isinstance(side, Name) else Scalar(expr)


def value_of_expression(sides: Sequence[Answer]) -> tuple[Answer, ...]:
    """The second of two sides, if it may be the value asked for of the first; else nothing.

    An example is 14 of `m + n = 14`."""
    if len(sides) != 2:
        return ()
    expr = relation_side(sides[0])
    value = sides[1]
    if not isinstance(expr, Call) or not isinstance(value, Scalar) or value.unit is not None:
        return ()
    number = bound_of(value)
    if number is None or number == 0 or mentions(value.expr, _UNIT_SIGNS):
        return ()
    if not _is_plain(expr) or len(symbols(expr)) < 2:
        return ()
    terms = operands(expr, expr.name)
    if len(set(terms)) < len(terms):  # m + m + n
        return ()
    return () if symbols(expr) <= _UNKNOWNS else (value,)


_UNIT_SIGNS = frozenset(("deg", "percent"))
_UNKNOWNS = frozenset("xyz")


def _is_plain(expr: Expr, in_product: bool = False) -> bool:
    """Whether it is a sum or product of letters, without coefficients.

    Examples are `m + n`, `ab + bc` and `(r + 1)(s + 1)`."""
    if isinstance(expr, Num):
        return in_product and expr.value > 0
    if isinstance(expr, Sym):
        return True
    if expr.name == "mul":
        return all(not isinstance(arg, Num) and _is_plain(arg, True) for arg in expr.args)
    return expr.name == "add" and all(_is_plain(arg, in_product) for arg in expr.args)


def expression_name(side: Answer) -> str | None:
    """The name of a left side that is an expression: `\\sin\\theta` or `dy/dx`."""
    expr = side.expr if isinstance(side, Scalar) else None
    if not isinstance(expr, Call):
        return None
    if expr.name in ("sin", "cos", "tan") and isinstance(expr.args[0], Sym):
        return f"{expr.name} {expr.args[0].name}"
    if expr.name == "div" and all(isinstance(arg, Call) and arg.name == "mul" for arg in expr.args):
        heads = [arg.args[0] for arg in expr.args if isinstance(arg, Call)]
        if heads == [Sym("d"), Sym("d")]:
            return "a derivative"
    return None


def is_lone_name(side: Answer) -> bool:
    if isinstance(side, Group):
        return side.opening in ("(", ":") and all(is_lone_name(part) for part in side.items)
    return isinstance(side, Name) or (
        isinstance(side, Scalar) and isinstance(side.expr, Sym) and side.unit is None
    )


def any_symbols(sides: Sequence[Answer]) -> bool:
    return any(
        isinstance(side, Name) or (isinstance(side, Scalar) and bool(symbols(side.expr)))
        for side in sides
    )


def difference_of(relation: Relation) -> Expr | None:
    """The left side minus the right side; None where they are no plain expressions."""
    exprs: list[Expr] = []
    for side in relation.sides:
        expr = side.expr if isinstance(side, (Name, Scalar)) else None
        if isinstance(side, Scalar) and side.unit is not None:
            expr = side.otherwise.expr if side.otherwise is not None else None
        if expr is None:
            return None
        exprs.append(expr)
    if any(mentions(expr, PLUS_MINUS) for expr in exprs):
        return None
    return Call("add", (exprs[0], Call("neg", (exprs[1],))))


def has_shift(relation: Relation) -> bool:
    """Whether the absolute value in it is of other than a letter: `|x - 2|`."""
    sides = [side.expr for side in relation.sides if isinstance(side, Scalar)]
    return any(
        isinstance(expr, Call) and bool(symbols(expr)) and not isinstance(expr.args[0], Sym)
        for expr in sides
    )


def near(first: Expr, second: Expr) -> bool:
    """Whether `first ~ second` rounds an expression that is not a literal number to one."""
    if symbols(first) or symbols(second) or isinstance(first, Num):
        return isinstance(first, Num) and isinstance(second, Num) and first.value == second.value
    value = value_of(first)
    return value is not None and is_finite(value.value) and rounds_to(second, value.value)
