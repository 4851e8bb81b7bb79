"""Interprets a parsed answer: as a value, a tuple, a set, a set of reals, a relation, a family with a parameter, ...

Most answers have several interpretations, `(1, 2)` is a point and an interval; `equivalence` compares them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from rlmath.rewards.answers.equivalence import Equivalence, Interpretations, single_member
from rlmath.rewards.answers.evaluate import mentions, rounds_to, symbols, value_of
from rlmath.rewards.answers.normalize import NotMathematics, Unsupported
from rlmath.rewards.answers.numbers import is_finite, mpf
from rlmath.rewards.answers.real_sets import Bound, RealSet, interval, point, whole_line
from rlmath.rewards.answers.syntax_tree import (
    Answer,
    Call,
    Expr,
    Group,
    Listing,
    MatrixOf,
    Name,
    NamedSet,
    Num,
    Piecewise,
    Relation,
    Scalar,
    SetBuilder,
    SetOf,
    SetOperation,
    Sym,
)
from rlmath.rewards.answers.units import DEGREE, PERCENT

MAX_ITEMS = 200
"""Longest list or set that is compared."""

PLUS_MINUS = frozenset(("pm", "mp"))
MAX_SIGNS = 4
"""Most plus-minus signs that are expanded."""

_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}


@lru_cache(maxsize=2048)
def interpret(answer: Answer) -> Interpretations:
    """The interpretations of an answer. Raises NotMathematics or Unsupported if it has none."""
    match answer:
        case Scalar():
            return _interpret_scalar(answer)
        case Name():
            if answer.expr is None:
                raise NotMathematics("a name without a value")
            return interpret(Scalar(answer.expr))
        case Group():
            return _interpret_group(answer)
        case Listing():
            return _interpret_listing(answer)
        case Relation():
            return _interpret_relation(answer)
        case SetOf():
            return _interpret_set(answer)
        case SetBuilder():
            return _interpret_described(answer)
        case SetOperation():
            return _interpret_operation(answer)
        case NamedSet():
            reals = {"R": whole_line(), "empty": RealSet(())}.get(answer.name)
            members = () if answer.name == "empty" else None
            return Interpretations(named_set=answer.name, real_set=reals, members=members, is_set=True)
        case MatrixOf():
            row = None
            if len(answer.rows) == 1 or len(answer.rows[0]) == 1:
                row = tuple(Interpretations(scalar=Scalar(entry)) for line in answer.rows for entry in line)
            return Interpretations(matrix=answer, row=row, brackets="matrix")
        case Piecewise():
            return Interpretations(branches=answer.branches)


def _interpret_set(answer: SetOf) -> Interpretations:
    if any(isinstance(item, Relation) for item in answer.items):
        raise NotMathematics("a set of relations")
    return Interpretations(
        members=expanded_members(answer.items), is_set=True, real_set=_points(answer.items)
    )


def _interpret_described(answer: SetBuilder) -> Interpretations:
    condition = interpret(answer.condition)
    if condition.real_set is None or condition.sign != f"solved {answer.name}":
        raise NotMathematics("a set described by a condition")
    return Interpretations(real_set=condition.real_set)


def _interpret_operation(operation: SetOperation) -> Interpretations:
    sets = []
    for part in operation.parts:
        real_set = interpret(part).real_set
        if real_set is None:
            raise Unsupported("a set operation on other than sets of real numbers")
        sets.append(real_set)
    if operation.op == "union":
        return Interpretations(real_set=RealSet.union(sets))
    if operation.op == "without":
        sets = [sets[0], *(other.complement() for other in sets[1:])]
    return Interpretations(real_set=RealSet.intersection(sets))


def _interpret_scalar(scalar: Scalar) -> Interpretations:
    if mentions(scalar.expr, PLUS_MINUS):
        values = [Scalar(chosen[0], scalar.unit) for chosen in _expansions([scalar.expr])]
        return Interpretations(
            members=tuple(Interpretations(scalar=value) for value in values),
            is_set=True,
            real_set=_points(values),
        )
    return Interpretations(scalar=scalar)


def _expansions(exprs: Sequence[Expr]) -> list[tuple[Expr, ...]]:
    """The values of expressions with plus-minus signs: two for one sign, or for signs linked by a minus-plus; else all
    combinations of signs."""
    signs = sum(_count_plus_minus(expr) for expr in exprs)
    linked = signs < 2 or any(mentions(expr, frozenset(("mp",))) for expr in exprs)
    if signs > MAX_SIGNS:
        raise NotMathematics(f"more than {MAX_SIGNS} plus-minus signs")
    patterns = [(True,), (False,)] if linked else list(itertools.product((True, False), repeat=signs))
    cycles = [itertools.cycle(pattern) for pattern in patterns]
    return [tuple(_with_signs(expr, uppers) for expr in exprs) for uppers in cycles]


def _count_plus_minus(expr: Expr) -> int:
    if not isinstance(expr, Call):
        return 0
    return (expr.name == "pm") + sum(_count_plus_minus(arg) for arg in expr.args)


def _with_signs(expr: Expr, uppers: Iterator[bool]) -> Expr:
    """An expression with each plus-minus sign replaced from left to right: the upper sign where `uppers` is true."""
    if not isinstance(expr, Call):
        return expr
    if expr.name not in PLUS_MINUS:
        return Call(expr.name, tuple(_with_signs(arg, uppers) for arg in expr.args))
    left = _with_signs(expr.args[0], uppers)
    upper = next(uppers)
    right = _with_signs(expr.args[1], uppers)
    minus = upper == (expr.name == "mp")
    return Call("add", (left, Call("neg", (right,)) if minus else right))


def _interpret_group(group: Group) -> Interpretations:
    brackets = group.opening + group.closing
    exprs = [item.expr for item in group.items if isinstance(item, Scalar)]
    if any(mentions(expr, PLUS_MINUS) for expr in exprs):
        if len(exprs) < len(group.items):
            raise Unsupported("signs and other things in one group")
        every = [tuple(Scalar(expr) for expr in chosen) for chosen in _expansions(exprs)]
        return Interpretations(
            members=tuple(interpret(Group(group.opening, items, group.closing)) for items in every),
            is_set=True,
        )
    items = tuple(interpret(item) for item in group.items)
    if brackets == "::":
        ratio = None
        if len(items) == 2:
            sides = [item.expr for item in group.items if isinstance(item, Scalar) and item.unit is None]
            if len(sides) < 2:
                raise NotMathematics("a ratio of other than numbers")
            ratio = Scalar(Call("div", tuple(sides)))
        return Interpretations(row=items, brackets=brackets, scalar=ratio)
    if len(items) != 2:
        return Interpretations(row=items, brackets="()")
    return Interpretations(row=items, brackets=brackets, real_set=_interval(group))


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
    value = value_of(item.expr)
    return None if value is None else value.value


def _points(items: Sequence[Answer]) -> RealSet | None:
    bounds = [bound_of(item) for item in items]
    if any(bound is None or not is_finite(bound) for bound in bounds):
        return None
    return RealSet.union([point(bound) for bound in bounds if bound is not None])


def expanded_members(items: Sequence[Answer]) -> tuple[Interpretations, ...]:
    """The members, with plus-minus expanded."""
    if len(items) > MAX_ITEMS:
        raise NotMathematics(f"more than {MAX_ITEMS} items")
    members: list[Interpretations] = []
    for item in items:
        found = interpret(item)
        members.extend(found.members if isinstance(item, Scalar) and found.members is not None else (found,))
    return tuple(members)


def name_of(side: Answer) -> str | None:
    if isinstance(side, Name):
        return side.text
    if isinstance(side, Scalar) and isinstance(side.expr, Sym):
        return side.expr.name
    if isinstance(side, Group):
        return "".join(name_of(item) or "?" for item in side.items)
    return None


def _interpret_relation(relation: Relation) -> Interpretations:
    ops = set(relation.ops)
    if ops == {"in"} and len(relation.sides) == 2:
        element, container = relation.sides
        inner = interpret(container)
        is_point = isinstance(element, Group) or (isinstance(element, Name) and element.text.startswith("("))
        if not _is_lone_name(element) or (is_point and isinstance(container, Group)):
            raise NotMathematics("the element of the set is not a name")
        return replace(inner, name=name_of(element))
    if ops == {"mod"}:
        left, right, modulus = (_relation_side(side) for side in relation.sides)
        if left is None or right is None or modulus is None:
            raise NotMathematics("a congruence between other than expressions")
        return Interpretations(residue=(left, right, modulus))
    if ops <= {"=", "~"}:
        return _interpret_equation(relation)
    if ops <= {"<", "<=", ">", ">="} or ops == {"!="}:
        return _interpret_inequality(relation)
    raise Unsupported("a mixture of relations")


def _interpret_equation(relation: Relation) -> Interpretations:
    sides = list(relation.sides)
    name = None
    if len(sides) == 2 and _is_lone_name(sides[-1]) and not _is_lone_name(sides[0]):
        name = name_of(sides.pop())
    while len(sides) > 1 and _is_lone_name(sides[0]):
        name = name or name_of(sides[0])
        del sides[0]
    if len(sides) == len(relation.sides) and len(sides) > 1 and (expression := _expression_name(sides[0])):
        name = expression
        del sides[0]
    if len(relation.sides) > 2 and not _any_symbols(sides[-1:]):
        # Of `V = \pi r^2 h = 36` or `m+n = 7+18 = 25` the numbers, if the sides before are a formula: it has a name,
        # or at least two numbers follow it.
        numbers = [side for side in sides if not _any_symbols([side])]
        sides = numbers if name is not None or len(numbers) > 1 else sides
    value = _common_value(sides, relation.ops) if name is not None or not _any_symbols(sides) else None
    difference = _difference(relation) if len(relation.sides) == 2 and relation.ops == ("=",) else None
    if value is None:
        if difference is None:
            raise NotMathematics("sides that differ")
        return Interpretations(difference=difference, sign="=")
    last = sides[-1].expr if len(sides) > 1 and isinstance(sides[-1], Scalar) else None
    is_decimal = isinstance(last, Num) and last.digits is not None
    also = (interpret(sides[-1]),) if relation.ops[-1] == "~" and is_decimal else ()
    return replace(interpret(value), name=name, difference=difference, sign="=", also=also)


def _expression_name(side: Answer) -> str | None:
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


def _is_lone_name(side: Answer) -> bool:
    if isinstance(side, Group):
        return side.opening in ("(", ":") and all(_is_lone_name(item) for item in side.items)
    return isinstance(side, Name) or (
        isinstance(side, Scalar) and isinstance(side.expr, Sym) and side.unit is None
    )


def _any_symbols(sides: Sequence[Answer]) -> bool:
    return any(
        isinstance(side, Name) or (isinstance(side, Scalar) and bool(symbols(side.expr))) for side in sides
    )


def _common_value(sides: Sequence[Answer], ops: Sequence[str]) -> Answer | None:
    """The value of all sides; None if they differ, as in `1 = 2`."""
    comparison = Equivalence(protocol=False)
    for other, op in zip(sides[1:], ops[len(ops) - len(sides) + 1 :], strict=True):
        one, two = interpret(sides[0]), interpret(other)
        if op == "=" and comparison.same(one, two):
            continue
        if not (op == "~" and one.scalar and two.scalar and _near(one.scalar.expr, two.scalar.expr)):
            return None
    return sides[0] if "~" in ops else sides[-1]


def _near(one: Expr, other: Expr) -> bool:
    """Whether `one ~ other` rounds an expression that is not a literal number to one."""
    if symbols(one) or symbols(other) or isinstance(one, Num):
        return isinstance(one, Num) and isinstance(other, Num) and one.value == other.value
    value = value_of(one)
    return value is not None and is_finite(value.value) and rounds_to(other, value.value)


def _difference(relation: Relation) -> Expr | None:
    exprs: list[Expr] = []
    for side in relation.sides:
        expr = side.expr if isinstance(side, (Name, Scalar)) else None
        if expr is None or (isinstance(side, Scalar) and side.unit is not None and side.otherwise is None):
            return None
        exprs.append(expr)
    if any(mentions(expr, PLUS_MINUS) for expr in exprs):
        return None
    return Call("add", (exprs[0], Call("neg", (exprs[1],))))


def _interpret_inequality(relation: Relation) -> Interpretations:
    reals: list[RealSet] = []
    names: set[str] = set()
    for left, op, right in zip(relation.sides, relation.ops, relation.sides[1:], strict=False):
        solved = _half_line(left, op, right)
        if solved is None:
            return _unsolved(relation)
        names.add(solved[0])
        reals.append(solved[1])
    if len(names) != 1:
        raise Unsupported("inequalities in several variables")
    return Interpretations(real_set=RealSet.intersection(reals), sign=f"solved {names.pop()}")


def _unsolved(relation: Relation) -> Interpretations:
    if len(relation.ops) != 1:
        raise Unsupported("a chain of inequalities in several variables")
    op = relation.ops[0]
    difference = _difference(relation)
    if difference is None:
        raise NotMathematics("an inequality between other than expressions")
    if op in (">", ">="):
        difference = Call("neg", (difference,))
        op = _FLIPPED[op]
    return Interpretations(difference=difference, sign=op)


def _half_line(left: Answer, op: str, right: Answer) -> tuple[str, RealSet] | None:
    """(variable, the reals that satisfy it) if one side is a variable, or its absolute value, and the other is a
    number; None for an inequality that is not solved."""
    if bound_of(left) is not None:
        left, op, right = right, _FLIPPED[op], left
    expr, bound = _relation_side(left), bound_of(right)
    if expr is None or bound is None or not is_finite(bound):
        return None
    if isinstance(expr, Sym):
        return expr.name, _beyond(op, bound)
    if isinstance(expr, Call) and expr.name == "abs" and isinstance(expr.args[0], Sym):
        join = RealSet.intersection if op in ("<", "<=", "!=") else RealSet.union
        return expr.args[0].name, join([_beyond(op, bound), _beyond(_FLIPPED[op], -bound)])
    return None


def _relation_side(side: Answer) -> Expr | None:
    if isinstance(side, Name):
        return side.expr if side.expr is not None else Sym(side.text)
    return side.expr if isinstance(side, Scalar) and side.unit is None else None


def _beyond(op: str, bound: Bound) -> RealSet:
    """The reals x with `x op bound`."""
    if op == "!=":
        return point(bound).complement()
    if op in ("<", "<="):
        return interval(mpf("-inf"), False, bound, op == "<=")
    return interval(bound, op == ">=", mpf("inf"), False)


def _interpret_listing(listing: Listing) -> Interpretations:
    relations = [item for item in listing.items if isinstance(item, Relation)]
    memberships = [one for one in relations if one.ops == ("in",) and isinstance(one.sides[1], NamedSet)]
    if memberships:  # `letter in set of numbers`
        return _parametrised(listing, memberships)
    items = expanded_members(listing.items)
    if len(relations) == len(listing.items):
        if all(item.name is None and item.real_set is not None for item in items):
            if len({item.sign for item in items}) > 1:
                return Interpretations(members=items)
            sets = [item.real_set for item in items if item.real_set]
            both = RealSet.intersection(sets)
            # A comma is the intersection unless that is empty, then the union.
            joined = listing.joiner == "or" or (listing.joiner == "," and both.is_empty)
            return Interpretations(sign=items[0].sign, real_set=RealSet.union(sets) if joined else both)
        if all(item.sign == "=" for item in items):
            return _several_equations(items)
    if listing.items and isinstance(listing.items[0], Relation) and listing.joiner != "and":
        first = items[0]
        if first.name is not None and first.scalar is not None and not any(item.name for item in items[1:]):
            # x = 1, 2: the name is written once
            return Interpretations(
                members=(Interpretations(scalar=first.scalar), *items[1:]), name=first.name
            )
    return Interpretations(members=items, row=items if listing.joiner == "," else None)


def _parametrised(listing: Listing, memberships: Sequence[Relation]) -> Interpretations:
    """Answers with a parameter, `x = a + k b, k in Z`; a real parameter is ignored."""
    rest = tuple(item for item in listing.items if item not in memberships)
    if not rest or len(memberships) > 1:
        raise Unsupported("several parameters")
    inner = interpret(rest[0] if len(rest) == 1 else Listing(rest, listing.joiner))
    (membership,) = memberships
    named_set, letter = membership.sides[1], name_of(membership.sides[0])
    assert isinstance(named_set, NamedSet)
    if named_set.name == "R" or letter is None:
        return inner
    members = inner.members if inner.members is not None else single_member(inner)
    if members is None or any(member.scalar is None for member in members):
        raise Unsupported("a parameter in other than values")
    values = tuple(member.scalar.expr for member in members if member.scalar is not None)
    return Interpretations(name=inner.name, family=(named_set.name, letter, values))


def _several_equations(items: tuple[Interpretations, ...]) -> Interpretations:
    names = [item.name for item in items]
    if None in names or any(item.scalar is None and item.members is None for item in items):
        return Interpretations(members=items)
    if sum(item.members is not None for item in items) > 1 and len(set(names)) > 1:
        raise NotMathematics("several signs in several values")
    bare = tuple(
        Interpretations(
            scalar=item.scalar, members=item.members, is_set=item.is_set, row=item.row, brackets=item.brackets
        )
        for item in items
    )
    if len(set(names)) == 1:
        return Interpretations(members=bare, name=names[0])
    pairs = tuple(sorted(zip((str(name) for name in names), bare, strict=True), key=lambda pair: pair[0]))
    return Interpretations(row=tuple(value for _, value in pairs), brackets="()", pairs=pairs)
