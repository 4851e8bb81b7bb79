"""The views of equations, inequalities, and of answers side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlmath.rewards.answers.equivalence import Comparison
from rlmath.rewards.answers.evaluate import mentions, rounds_to, symbols, worth
from rlmath.rewards.answers.interpret import (
    PLUS_MINUS,
    Views,
    alone,
    bound_of,
    flat,
    name_of,
    register,
    views,
)
from rlmath.rewards.answers.normalize import NotMathematics, Unsupported
from rlmath.rewards.answers.numbers import is_finite, mpf
from rlmath.rewards.answers.real_sets import Bound, RealSet, interval, point
from rlmath.rewards.answers.syntax_tree import (
    Answer,
    Call,
    Expr,
    Group,
    Known,
    Listing,
    Name,
    Num,
    Relation,
    Scalar,
    Sym,
)

_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}


@register
def _relation_views(relation: Relation) -> Views:
    ops = set(relation.ops)
    if ops == {"in"} and len(relation.sides) == 2:
        inner = views(relation.sides[1])
        if not _is_lone_name(relation.sides[0]) or (
            _is_point(relation.sides[0]) and isinstance(relation.sides[1], Group)
        ):
            raise NotMathematics("what is in the set is no name")
        return replace(inner, name=name_of(relation.sides[0]))
    if ops == {"mod"}:
        left, right, modulus = (_relation_side(side) for side in relation.sides)
        if left is None or right is None or modulus is None:
            raise NotMathematics("a congruence between other than expressions")
        return Views(residue=(left, right, modulus))
    if ops <= {"=", "~"}:
        return _equation_views(relation)
    if ops <= {"<", "<=", ">", ">="} or ops == {"!="}:
        return _inequality_views(relation)
    raise Unsupported("a mixture of relations")


def _equation_views(relation: Relation) -> Views:
    sides = list(relation.sides)
    name = None
    if len(sides) == 2 and _is_lone_name(sides[-1]) and not _is_lone_name(sides[0]):
        name = name_of(sides.pop())
    while len(sides) > 1 and _is_lone_name(sides[0]):
        name = name or name_of(sides[0])
        del sides[0]
    if len(sides) == len(relation.sides) and len(sides) > 1 and (written := _named_by_expression(sides[0])):
        name = written
        del sides[0]
    if len(relation.sides) > 2 and not _any_symbols(sides[-1:]):
        sides = _worked_out(sides, named=name is not None)
    value = _common_value(sides, relation.ops) if name is not None or not _any_symbols(sides) else None
    difference = _difference(relation) if len(relation.sides) == 2 and relation.ops == ("=",) else None
    if value is None:
        if difference is None:
            raise NotMathematics("sides that differ")
        return Views(difference=difference, sign="=")
    decimal = sides[-1] if relation.ops[-1] == "~" and len(sides) > 1 and _is_decimal(sides[-1]) else None
    also = (views(decimal),) if decimal is not None else ()
    return replace(views(value), name=name, difference=difference, sign="=", also=also)


def _is_point(side: Answer) -> bool:
    return isinstance(side, Group) or (isinstance(side, Name) and side.text.startswith("("))


def _is_decimal(side: Answer) -> bool:
    return isinstance(side, Scalar) and isinstance(side.expr, Num) and side.expr.digits is not None


def _named_by_expression(side: Answer) -> str | None:
    """A name that is written as an expression: `\\sin\\theta` or `dy/dx`."""
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


def _worked_out(sides: list[Answer], named: bool) -> list[Answer]:
    """The sides of `V = \\pi r^2 h = 36` or `m+n = 7+18 = 25` that are numbers, if what comes before is a formula:
    with a name in front, or worked out in at least two numbers that agree."""
    numbers = [side for side in sides if not _any_symbols([side])]
    return numbers if named or len(numbers) > 1 else sides


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
    """What all sides are worth; None where they differ, so that `1 = 2` is worth nothing."""
    comparison = Comparison(protocol=False)
    for other, op in zip(sides[1:], ops[len(ops) - len(sides) + 1 :], strict=True):
        one, two = views(sides[0]), views(other)
        if op == "=" and comparison.same(one, two):
            continue
        if not (op == "~" and one.scalar and two.scalar and _near(one.scalar.expr, two.scalar.expr)):
            return None
    return sides[0] if "~" in ops else sides[-1]


def _near(one: Expr, other: Expr) -> bool:
    """Whether `one ~ other` rounds a value that is no number yet to one."""
    if symbols(one) or symbols(other) or isinstance(one, Num):
        return isinstance(one, Num) and isinstance(other, Num) and one.value == other.value
    value = worth(one)
    return value is not None and is_finite(value.value) and rounds_to(other, value.value)


def _difference(relation: Relation) -> Expr | None:
    exprs = []
    for side in relation.sides:
        expr = side.expr if isinstance(side, (Name, Scalar)) else None
        if expr is None or (isinstance(side, Scalar) and side.unit is not None and side.otherwise is None):
            return None
        exprs.append(expr)
    if any(mentions(expr, PLUS_MINUS) for expr in exprs):
        return None
    return Call("add", (exprs[0], Call("neg", (exprs[1],))))


def _inequality_views(relation: Relation) -> Views:
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
    return Views(reals=RealSet.intersection(reals), name=None, sign=f"solved {names.pop()}")


def _unsolved(relation: Relation) -> Views:
    if len(relation.ops) != 1:
        raise Unsupported("a chain of inequalities in several variables")
    op = relation.ops[0]
    difference = _difference(relation)
    if difference is None:
        raise NotMathematics("an inequality between other than expressions")
    if op in (">", ">="):
        difference = Call("neg", (difference,))
        op = _FLIPPED[op]
    return Views(difference=difference, sign=op)


def _half_line(left: Answer, op: str, right: Answer) -> tuple[str, RealSet] | None:
    """(variable, the reals that satisfy it), where one side is a variable, or its absolute value, and the other is a
    number. What is still to be solved for the variable is no answer yet."""
    if bound_of(left) is not None:
        left, op, right = right, _FLIPPED[op], left
    expr, bound = _relation_side(left), bound_of(right)
    if expr is None or bound is None:
        return None
    if not is_finite(bound):
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
    """The reals that stand in this relation to a number."""
    if op == "!=":
        return point(bound).complement()
    if op in ("<", "<="):
        return interval(mpf("-inf"), False, bound, op == "<=")
    return interval(bound, op == ">=", mpf("inf"), False)


@register
def _listing_views(listing: Listing) -> Views:
    memberships = [item for item in listing.items if _is_membership(item)]
    if memberships:
        return _parametrised(listing, memberships)
    items = flat(listing.items)
    relations = [item for item in listing.items if isinstance(item, Relation)]
    if len(relations) == len(listing.items):
        if all(item.name is None and item.reals is not None for item in items):
            if len({item.sign for item in items}) > 1:
                return Views(members=items)
            return Views(
                sign=items[0].sign,
                reals=_joined([item.reals for item in items if item.reals], listing.joiner),
            )
        if all(item.sign == "=" for item in items):
            return _several_equations(items)
    if listing.items and isinstance(listing.items[0], Relation) and listing.joiner != "and":
        first = items[0]
        if first.name is not None and first.scalar is not None and not any(item.name for item in items[1:]):
            # x = 1, 2: the name is said once
            return Views(members=(Views(scalar=first.scalar), *items[1:]), name=first.name)
    return Views(members=items, row=items if listing.joiner == "," else None, reals=None)


def _is_membership(item: Answer) -> bool:
    """Whether an item says in which set of numbers a letter lies."""
    return isinstance(item, Relation) and item.ops == ("in",) and isinstance(item.sides[1], Known)


def _parametrised(listing: Listing, memberships: Sequence[Answer]) -> Views:
    """Answers with a parameter, `x = a + k b, k in Z`; to be a real number says nothing more."""
    rest = tuple(item for item in listing.items if item not in memberships)
    if not rest or len(memberships) > 1:
        raise Unsupported("several parameters")
    inner = views(rest[0] if len(rest) == 1 else Listing(rest, listing.joiner))
    (membership,) = memberships
    assert isinstance(membership, Relation)
    known, letter = membership.sides[1], name_of(membership.sides[0])
    assert isinstance(known, Known)
    if known.name == "R" or letter is None:
        return inner
    members = inner.members if inner.members is not None else alone(inner)
    if members is None or any(member.scalar is None for member in members):
        raise Unsupported("a parameter in other than values")
    values = tuple(member.scalar.expr for member in members if member.scalar is not None)
    return Views(name=inner.name, family=(known.name, letter, values))


def _several_equations(items: tuple[Views, ...]) -> Views:
    names = [item.name for item in items]
    if None in names or any(item.scalar is None and item.members is None for item in items):
        return Views(members=items)
    if sum(item.members is not None for item in items) > 1 and len(set(names)) > 1:
        raise NotMathematics("several signs in several values")
    if len(set(names)) == 1:
        bare = tuple(_nameless(item) for item in items)
        return Views(members=bare, name=names[0])
    bare = tuple(_nameless(item) for item in items)
    pairs = tuple(sorted(zip((str(name) for name in names), bare, strict=True), key=lambda pair: pair[0]))
    return Views(row=tuple(value for _, value in pairs), brackets="()", pairs=pairs)


def _nameless(item: Views) -> Views:
    return Views(
        scalar=item.scalar, members=item.members, is_set=item.is_set, row=item.row, brackets=item.brackets
    )


def _joined(sets: Sequence[RealSet], joiner: str) -> RealSet:
    """Inequalities side by side: "or" is a union, "and" an intersection, a comma the one that is not empty."""
    both = RealSet.intersection(sets)
    if joiner == "or" or (joiner == "," and both.is_empty):
        return RealSet.union(sets)
    return both
