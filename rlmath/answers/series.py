"""Sums and products of many terms: with an index, `\\sum_{k=1}^n k`, or with dots, `1 + 2 + ... + n`.

A finite one is evaluated term by term at several values of its bounds. Of an infinite one only the first terms are:
it is compared only with another infinite one. Dots are read where a pattern explains every term that is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from rlmath.answers.evaluate import same_expression, symbols, value_of
from rlmath.answers.families import substituted
from rlmath.answers.normalize import NotMathematics, Unevaluated
from rlmath.answers.numbers import INDEX
from rlmath.answers.syntax_tree import Call, Expr, Num, Sym

_FIRST_INDICES = range(-2, 13)
_MAX_WRITTEN = 8
"""Most terms that are written before or after the dots."""


def repeated(name: str, letter: str, low: Expr, high: Expr, body: Expr) -> Expr:
    """The sum or product of a body over a letter. Raises NotMathematics where its terms cannot be computed."""
    index = Sym(INDEX + letter)
    inside = _with_imaginary(body, index) if letter == "i" else substituted(body, letter, index)
    if any(letter in name.partition("_")[2] for name in symbols(inside)):  # x_k
        raise NotMathematics("a sequence without values")
    if letter in symbols(low) | symbols(high):
        raise NotMathematics("an index in its own bounds")
    if high == Call("inf"):
        return Call("series" if name == "sum" else "infinite product", (index, low, inside))
    return Call(name, (index, low, high, inside))


def _with_imaginary(expr: Expr, index: Sym) -> Expr:
    """The expression with an index where it has an i."""
    if expr == Call("i"):
        return index
    if not isinstance(expr, Call):
        return expr
    return Call(expr.name, tuple(_with_imaginary(arg, index) for arg in expr.args))


def operands(expr: Expr, operation: str) -> list[Expr]:
    """The terms of a sum, or the factors of a product, in their order."""
    found: list[Expr] = []
    while isinstance(expr, Call) and expr.name == operation:
        found.append(expr.args[1])
        expr = expr.args[0]
    return [expr, *reversed(found)]


def explained(before: Sequence[Expr], after: Sequence[Expr], operation: str) -> Expr:
    """The sum ("add") or product ("mul") of terms of which dots leave out those in the middle. Raises Unevaluated if no
    pattern explains all that are written."""
    if len(before) < 2 or not after or len(before) > _MAX_WRITTEN or len(after) > _MAX_WRITTEN:
        raise Unevaluated("dots between too few terms")
    name = "sum" if operation == "add" else "prod"
    found = _by_last_term(before, after, name) or _by_steps(before, after, name)
    if found is None:
        raise Unevaluated("dots without a pattern")
    return found


def _by_last_term(before: Sequence[Expr], after: Sequence[Expr], name: str) -> Expr | None:
    """The terms as the last one with other values of its letter: `1 + 4 + ... + n^2`."""
    last = after[-1]
    for letter in sorted(symbols(last) - frozenset().union(*map(symbols, before))):
        for start in _FIRST_INDICES:

            def at(turn: int, letter: str = letter) -> Expr:
                return substituted(last, letter, Num(Fraction(turn)))

            def back(turns: int, letter: str = letter) -> Expr:
                return substituted(last, letter, Call("add", (Sym(letter), Num(Fraction(-turns)))))

            if not all(same_expression(at(start + i), term) for i, term in enumerate(before)):
                continue
            if all(same_expression(back(turns), term) for turns, term in enumerate(reversed(after))):
                index = Sym(INDEX + letter)
                body = substituted(last, letter, index)
                return Call(name, (index, Num(Fraction(start)), Sym(letter), body))
    return None


def _by_steps(before: Sequence[Expr], after: Sequence[Expr], name: str) -> Expr | None:
    """The terms as an arithmetic progression: `n (n-1) ... 1`."""
    step_expr = _minus(before[1], before[0])
    steps = {value.value for point in range(3) if (value := value_of(step_expr, point)) is not None}
    step = next(iter(steps)) if len(steps) == 1 else None
    if not isinstance(step, Fraction) or step == 0:
        return None

    def moved(term: Expr, turns: int) -> Expr:
        return Call("add", (term, Num(step * turns)))

    if not all(same_expression(moved(before[0], i), term) for i, term in enumerate(before)):
        return None
    if not all(same_expression(moved(after[-1], -i), term) for i, term in enumerate(reversed(after))):
        return None
    index = Sym(f"{INDEX}term")
    count = Call("div", (_minus(after[-1], before[0]), Num(step)))
    body = Call("add", (before[0], Call("mul", (Num(step), index))))
    return Call(name, (index, Num(Fraction(0)), count, body))


def _minus(one: Expr, other: Expr) -> Expr:
    return Call("add", (one, Call("neg", (other,))))
