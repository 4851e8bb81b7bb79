"""The views of an answer: a value, a tuple, a set, a set of reals. Those of relations and lists are in `relations`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, singledispatch

from rlmath.rewards.answers.evaluate import mentions, symbols, worth
from rlmath.rewards.answers.normalize import NotMathematics, Unsupported
from rlmath.rewards.answers.numbers import is_finite
from rlmath.rewards.answers.real_sets import Bound, RealSet, interval, point, whole_line
from rlmath.rewards.answers.syntax_tree import (
    Answer,
    Call,
    Described,
    Expr,
    Group,
    Known,
    MatrixOf,
    Name,
    Piecewise,
    Relation,
    Scalar,
    SetOf,
    SetOperation,
    Sym,
)
from rlmath.rewards.answers.units import DEGREE, PERCENT

MAX_ITEMS = 200
"""Longest list or set that is compared."""

PLUS_MINUS = frozenset(("pm", "mp"))
MAX_SIGNS = 4
"""Most plus-minus signs that are spread out."""


@dataclass(frozen=True)
class Views:
    """How an answer can be seen; what it is not stays None."""

    scalar: Scalar | None = None
    name: str | None = None
    """What its value is given to: "x" of x = 5."""
    row: tuple[Views, ...] | None = None
    """In order: a point, a vector, the sides of a ratio."""
    brackets: str = ""
    """Of the row: "()", "[)", ..., "::" for a ratio, "matrix", or "" for a bare list."""
    members: tuple[Views, ...] | None = None
    """Without order."""
    is_set: bool = False
    """Whether members that come twice count once."""
    reals: RealSet | None = None
    difference: Expr | None = None
    """Left side minus right side of an equation or inequality."""
    sign: str = ""
    """Of the relation: "=", "<" or "<=" (turned so that it points left)."""
    matrix: MatrixOf | None = None
    known: str | None = None
    family: tuple[str, str, tuple[Expr, ...]] | None = None
    """(set of the parameter, its letter, values): all values for all parameters."""
    residue: tuple[Expr, Expr, Expr] | None = None
    """Both sides and the modulus of a congruence."""
    branches: tuple[tuple[Expr, str], ...] | None = None
    """(value, condition) of a function by cases."""
    pairs: tuple[tuple[str, Views], ...] | None = None
    """Several names with their values: x = 1, y = 2."""
    also: tuple[Views, ...] = field(default=())
    """Further readings."""


@lru_cache(maxsize=2048)
def views(answer: Answer) -> Views:
    """The views of an answer. Raises NotMathematics or Unsupported where it has none."""
    return _views(answer)


@singledispatch
def _views(answer: Answer) -> Views:
    raise Unsupported(f"an answer of kind {type(answer).__name__}")


register = _views.register
"""Decorates the function that makes the views of one kind of answer."""


@register
def _piecewise_views(answer: Piecewise) -> Views:
    return Views(branches=answer.branches)


@register
def _known_views(answer: Known) -> Views:
    reals = {"R": whole_line(), "empty": RealSet(())}.get(answer.name)
    members = () if answer.name == "empty" else None
    return Views(known=answer.name, reals=reals, members=members, is_set=True)


@register
def _name_views(answer: Name) -> Views:
    if answer.expr is None:
        raise NotMathematics("a name without a value")
    return views(Scalar(answer.expr))


@register
def _set_views(answer: SetOf) -> Views:
    if any(isinstance(item, Relation) for item in answer.items):
        raise NotMathematics("a set of relations")
    return Views(members=flat(answer.items), is_set=True, reals=_points(answer.items))


@register
def _described_views(answer: Described) -> Views:
    condition = views(answer.condition)
    if condition.reals is None or condition.sign != f"solved {answer.name}":
        raise NotMathematics("a set described by a condition")
    return Views(reals=condition.reals)


@register
def _operation_views(answer: SetOperation) -> Views:
    return Views(reals=_operation(answer))


@register
def _scalar_views(scalar: Scalar) -> Views:
    if mentions(scalar.expr, PLUS_MINUS):
        values = [Scalar(chosen[0], scalar.unit) for chosen in _expansions([scalar.expr])]
        return Views(
            members=tuple(Views(scalar=value) for value in values), is_set=True, reals=_points(values)
        )
    return Views(scalar=scalar)


def _expansions(exprs: Sequence[Expr]) -> list[tuple[Expr, ...]]:
    """The values of expressions with plus-minus signs: of one sign, or signs tied by a minus-plus, two; of more signs
    all combinations."""
    signs = sum(_count(expr, "pm") for expr in exprs)
    tied = signs < 2 or any(mentions(expr, frozenset(("mp",))) for expr in exprs)
    if signs > MAX_SIGNS:
        raise NotMathematics(f"more than {MAX_SIGNS} plus-minus signs")
    patterns = [(True,), (False,)] if tied else list(itertools.product((True, False), repeat=signs))
    return [_chosen(exprs, itertools.cycle(pattern)) for pattern in patterns]


def _count(expr: Expr, name: str) -> int:
    if not isinstance(expr, Call):
        return 0
    return (expr.name == name) + sum(_count(arg, name) for arg in expr.args)


def _chosen(exprs: Sequence[Expr], uppers: Iterator[bool]) -> tuple[Expr, ...]:
    return tuple(_with_signs(expr, uppers) for expr in exprs)


def _with_signs(expr: Expr, uppers: Iterator[bool]) -> Expr:
    """An expression with each plus-minus sign as `uppers` says, from left to right."""
    if not isinstance(expr, Call):
        return expr
    if expr.name not in PLUS_MINUS:
        return Call(expr.name, tuple(_with_signs(arg, uppers) for arg in expr.args))
    left = _with_signs(expr.args[0], uppers)
    upper = next(uppers)
    right = _with_signs(expr.args[1], uppers)
    minus = upper == (expr.name == "mp")
    return Call("add", (left, Call("neg", (right,)) if minus else right))


@register
def _group_views(group: Group) -> Views:
    brackets = group.opening + group.closing
    exprs = [item.expr for item in group.items if isinstance(item, Scalar)]
    if any(mentions(expr, PLUS_MINUS) for expr in exprs):
        if len(exprs) < len(group.items):
            raise Unsupported("signs and other things in one group")
        every = [tuple(Scalar(expr) for expr in chosen) for chosen in _expansions(exprs)]
        return Views(
            members=tuple(views(Group(group.opening, items, group.closing)) for items in every), is_set=True
        )
    items = tuple(views(item) for item in group.items)
    if brackets == "::":
        ratio = None
        if len(items) == 2:
            ratio = Scalar(Call("div", (_plain(group.items[0]), _plain(group.items[1]))))
        return Views(row=items, brackets=brackets, scalar=ratio)
    pair = len(items) == 2
    return Views(row=items, brackets=brackets if pair else "()", reals=_interval(group) if pair else None)


def _interval(group: Group) -> RealSet | None:
    low, high = (bound_of(item) for item in group.items)
    if low is None or high is None:
        return None
    found = interval(low, group.opening == "[", high, group.closing == "]")
    return None if found.is_empty else found


def bound_of(item: Answer) -> Bound | None:
    if not isinstance(item, Scalar) or (item.unit is not None and item.unit not in (DEGREE, PERCENT)):
        return None
    if symbols(item.expr) or mentions(item.expr, frozenset(("i", "pm", "mp"))):
        return None
    value = worth(item.expr)
    return None if value is None else value.value


def _points(items: Sequence[Answer]) -> RealSet | None:
    bounds = [bound_of(item) for item in items]
    if any(bound is None or not is_finite(bound) for bound in bounds):
        return None
    return RealSet.union([point(bound) for bound in bounds if bound is not None])


def flat(items: Sequence[Answer]) -> tuple[Views, ...]:
    """Members, plus-minus spread out."""
    if len(items) > MAX_ITEMS:
        raise NotMathematics(f"more than {MAX_ITEMS} items")
    members: list[Views] = []
    for item in items:
        seen = views(item)
        spread = seen.members if isinstance(item, Scalar) and seen.members is not None else (seen,)
        members.extend(spread)
    return tuple(members)


def _operation(operation: SetOperation) -> RealSet:
    sets = []
    for part in operation.parts:
        seen = views(part)
        reals = seen.reals
        if reals is None:
            raise Unsupported("a set operation on other than sets of real numbers")
        sets.append(reals)
    if operation.op == "union":
        return RealSet.union(sets)
    if operation.op == "intersection":
        return RealSet.intersection(sets)
    return RealSet.intersection([sets[0], *(other.complement() for other in sets[1:])])


@register
def _matrix_views(matrix: MatrixOf) -> Views:
    row = None
    if len(matrix.rows) == 1 or len(matrix.rows[0]) == 1:
        row = tuple(Views(scalar=Scalar(entry)) for line in matrix.rows for entry in line)
    return Views(matrix=matrix, row=row, brackets="matrix")


def _plain(item: Answer) -> Expr:
    if isinstance(item, Scalar) and item.unit is None:
        return item.expr
    raise NotMathematics("a ratio of other than numbers")


def name_of(side: Answer) -> str | None:
    if isinstance(side, Name):
        return side.text
    if isinstance(side, Scalar) and isinstance(side.expr, Sym):
        return side.expr.name
    if isinstance(side, Group):
        return "".join(name_of(item) or "?" for item in side.items)
    return None


def alone(seen: Views) -> tuple[Views, ...] | None:
    """A value as a set of one."""
    return (seen,) if seen.scalar is not None or (seen.row is not None and seen.brackets) else None
