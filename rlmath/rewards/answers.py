"""Are two answers the same? Every answer has one or more views (a value, a tuple, a set, a set of reals, an equation);
two answers are equal when a view of one equals the same kind of view of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from fractions import Fraction
from functools import lru_cache

from rlmath.rewards.expressions import (
    added,
    divided,
    is_constant,
    is_finite,
    linear,
    mentions,
    mpf,
    proportion,
    same_expression,
    same_number,
    symbols,
    worth,
)
from rlmath.rewards.grammar import (
    Answer,
    Call,
    Expr,
    Group,
    Known,
    Listing,
    MatrixOf,
    Name,
    Num,
    Piecewise,
    Relation,
    Scalar,
    SetOf,
    SetOperation,
    Sym,
)
from rlmath.rewards.notation import NotMathematics, Unsupported
from rlmath.rewards.reals import Bound, RealSet, interval, point, whole_line
from rlmath.rewards.units import DEGREE, PERCENT, RADIAN, Unit, compatible

MAX_ITEMS = 200
"""Longest list or set that is compared."""

_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}


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


def same_answer(gold: Answer, answer: Answer, protocol: bool = False) -> bool:
    """Whether two parsed answers are equal. `protocol`: see `expressions.same_number`.

    Raises NotMathematics or Unsupported where that cannot be said.
    """
    return _Comparison(protocol).same(views(gold), views(answer))


def check_size(answer: object) -> None:
    """Raises NotMathematics when a number in an answer is beyond our limits, or is none, such as 1/0."""
    if isinstance(answer, (Num, Sym, Call)):
        if worth(answer, complex_numbers=True) is None and not symbols(answer):
            raise NotMathematics("it has no value")
    elif isinstance(answer, tuple):
        for part in answer:
            check_size(part)
    elif is_dataclass(answer):
        for part in fields(answer):
            check_size(getattr(answer, part.name))


# ---------------------------------------------------------------- views


@lru_cache(maxsize=2048)
def views(answer: Answer) -> Views:
    """The views of an answer."""
    if isinstance(answer, Scalar):
        return _scalar_views(answer)
    if isinstance(answer, Group):
        return _group_views(answer)
    if isinstance(answer, SetOf) and isinstance(answer.items[0], (Relation, Listing)):
        described = views(answer.items[0])
        if described.reals is None or described.members is not None:
            raise Unsupported("a set described by a condition")
        return Views(reals=described.reals)
    if isinstance(answer, SetOf):
        return Views(members=_flat(answer.items), is_set=True, reals=_points(answer.items))
    if isinstance(answer, Listing):
        return _listing_views(answer)
    if isinstance(answer, Relation):
        return _relation_views(answer)
    if isinstance(answer, SetOperation):
        return Views(reals=_operation(answer))
    if isinstance(answer, MatrixOf):
        return _matrix_views(answer)
    if isinstance(answer, Known):
        reals = {"R": whole_line(), "empty": RealSet(())}.get(answer.name)
        members = () if answer.name == "empty" else None
        return Views(known=answer.name, reals=reals, members=members, is_set=True)
    if isinstance(answer, Piecewise):
        return Views(branches=answer.branches)
    if answer.expr is not None:
        return _scalar_views(Scalar(answer.expr))
    raise NotMathematics("a name without a value")


_SIGNS = frozenset(("pm", "mp"))


def _signed(item: Answer, upper: bool) -> Answer:
    return Scalar(_with_sign(item.expr, upper), item.unit) if isinstance(item, Scalar) else item


def _scalar_views(scalar: Scalar) -> Views:
    if mentions(scalar.expr, _SIGNS):
        values = [Scalar(_with_sign(scalar.expr, upper), scalar.unit) for upper in (True, False)]
        return Views(members=tuple(Views(scalar=value) for value in values), is_set=True, reals=_points(values))
    return Views(scalar=scalar)


def _with_sign(expr: Expr, upper: bool) -> Expr:
    """One of the two values of an expression with plus-minus signs."""
    if not isinstance(expr, Call):
        return expr
    args = tuple(_with_sign(arg, upper) for arg in expr.args)
    if expr.name in ("pm", "mp"):
        left, right = args
        minus = upper == (expr.name == "mp")
        return Call("add", (left, Call("neg", (right,)) if minus else right))
    return Call(expr.name, args)


def _group_views(group: Group) -> Views:
    brackets = group.opening + group.closing
    exprs = [item.expr for item in group.items if isinstance(item, Scalar)]
    if any(mentions(expr, _SIGNS) for expr in exprs):
        both = [Group(group.opening, tuple(_signed(i, up) for i in group.items), group.closing) for up in (True, False)]
        return Views(members=tuple(views(one) for one in both), is_set=True)
    items = tuple(views(item) for item in group.items)
    if brackets == "::":
        ratio = None
        if len(items) == 2:
            ratio = Scalar(Call("div", (_plain(group.items[0]), _plain(group.items[1]))))
        return Views(row=items, brackets=brackets, scalar=ratio)
    pair = len(items) == 2
    return Views(row=items, brackets=brackets if pair else "()", reals=_interval(group) if pair else None)


def _interval(group: Group) -> RealSet | None:
    low, high = (_bound(item) for item in group.items)
    if low is None or high is None:
        return None
    found = interval(low, group.opening == "[", high, group.closing == "]")
    return None if found.is_empty else found


def _bound(item: Answer) -> Bound | None:
    if not isinstance(item, Scalar) or item.unit is not None and item.unit not in (DEGREE, PERCENT):
        return None
    if symbols(item.expr) or mentions(item.expr, frozenset(("i", "pm", "mp"))):
        return None
    value = worth(item.expr)
    return None if value is None else value.value


def _points(items: Sequence[Answer]) -> RealSet | None:
    bounds = [_bound(item) for item in items]
    if any(bound is None for bound in bounds):
        return None
    return RealSet.union([point(bound) for bound in bounds if bound is not None])


def _flat(items: Sequence[Answer]) -> tuple[Views, ...]:
    """Members, plus-minus spread out."""
    if len(items) > MAX_ITEMS:
        raise NotMathematics(f"more than {MAX_ITEMS} items")
    members: list[Views] = []
    for item in items:
        seen = views(item)
        spread = seen.members if isinstance(item, Scalar) and seen.members is not None else (seen,)
        members.extend(spread)
    return tuple(members)


def _listing_views(listing: Listing) -> Views:
    memberships = [item for item in listing.items if _is_membership(item)]
    if memberships:
        return _parametrised(listing, memberships)
    items = _flat(listing.items)
    relations = [item for item in listing.items if isinstance(item, Relation)]
    if len(relations) == len(listing.items):
        if all(item.name is None and item.reals is not None for item in items):
            if len({item.sign for item in items}) > 1:
                return Views(members=items)
            return Views(sign=items[0].sign, reals=_joined([item.reals for item in items if item.reals], listing.joiner))
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
    known, letter = membership.sides[1], _name_of(membership.sides[0])
    if known == Known("R") or letter is None:
        return inner
    members = inner.members if inner.members is not None else _alone(inner)
    if members is None or any(member.scalar is None for member in members):
        raise Unsupported("a parameter in other than values")
    values = tuple(member.scalar.expr for member in members if member.scalar is not None)
    return Views(name=inner.name, family=(str(getattr(known, "name", "")), letter, values))


def _several_equations(items: tuple[Views, ...]) -> Views:
    names = [item.name for item in items]
    if None in names or any(item.scalar is None and item.members is None for item in items):
        return Views(members=items)
    if len(set(names)) == 1:
        bare = tuple(_nameless(item) for item in items)
        return Views(members=bare, name=names[0])
    bare = tuple(_nameless(item) for item in items)
    pairs = tuple(sorted(zip((str(name) for name in names), bare, strict=True), key=lambda pair: pair[0]))
    ordered = sorted(names, key=str) == names
    return Views(members=bare, row=bare if ordered else None, pairs=pairs)


def _nameless(item: Views) -> Views:
    return Views(scalar=item.scalar, members=item.members, is_set=item.is_set, row=item.row, brackets=item.brackets)


def _joined(sets: Sequence[RealSet], joiner: str) -> RealSet:
    """Inequalities side by side: "or" is a union, "and" an intersection, a comma the one that is not empty."""
    both = RealSet.intersection(sets)
    if joiner == "or" or (joiner == "," and both.is_empty):
        return RealSet.union(sets)
    return both


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


def _matrix_views(matrix: MatrixOf) -> Views:
    row = None
    if len(matrix.rows) == 1 or len(matrix.rows[0]) == 1:
        row = tuple(Views(scalar=Scalar(entry)) for line in matrix.rows for entry in line)
    return Views(matrix=matrix, row=row, brackets="matrix")


# ---------------------------------------------------------------- relations


def _relation_views(relation: Relation) -> Views:
    ops = set(relation.ops)
    if ops == {"in"} and len(relation.sides) == 2:
        inner = views(relation.sides[1])
        return replace(inner, name=_name_of(relation.sides[0]))
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


def _name_of(side: Answer) -> str | None:
    if isinstance(side, Name):
        return side.text
    if isinstance(side, Scalar) and isinstance(side.expr, Sym):
        return side.expr.name
    if isinstance(side, Group):
        return "".join(_name_of(item) or "?" for item in side.items)
    return None


def _equation_views(relation: Relation) -> Views:
    sides = list(relation.sides)
    name = None
    if len(sides) == 2 and _is_lone_name(sides[-1]) and not _is_lone_name(sides[0]):
        name = _name_of(sides.pop())
    while len(sides) > 1 and _is_lone_name(sides[0]):
        name = name or _name_of(sides[0])
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
    decimal = sides[-1] if relation.ops[-1] == "~" and len(sides) > 1 else None
    also = (views(decimal),) if decimal is not None else ()
    return replace(views(value), name=name, difference=difference, sign="=", also=also)


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
        return side.opening == "(" and all(_is_lone_name(item) for item in side.items)
    return isinstance(side, Name) or (isinstance(side, Scalar) and isinstance(side.expr, Sym) and side.unit is None)


def _any_symbols(sides: Sequence[Answer]) -> bool:
    return any(isinstance(side, Name) or (isinstance(side, Scalar) and bool(symbols(side.expr))) for side in sides)


def _common_value(sides: Sequence[Answer], ops: Sequence[str]) -> Answer | None:
    """What all sides are worth; None where they differ, so that `1 = 2` is worth nothing."""
    comparison = _Comparison(False)
    for other, op in zip(sides[1:], ops[len(ops) - len(sides) + 1 :], strict=True):
        one, two = views(sides[0]), views(other)
        if op == "=" and comparison.same(one, two):
            continue
        if not (op == "~" and one.scalar and two.scalar and _near(one.scalar.expr, two.scalar.expr)):
            return None
    return sides[0] if "~" in ops else sides[-1]


def _near(one: Expr, other: Expr) -> bool:
    if symbols(one) or symbols(other):
        return False
    a, b = worth(one), worth(other)
    return a is not None and b is not None and abs(a.value - b.value) <= abs(a.value) / 100


def _difference(relation: Relation) -> Expr | None:
    exprs = []
    for side in relation.sides:
        expr = side.expr if isinstance(side, (Name, Scalar)) else None
        if expr is None or (isinstance(side, Scalar) and side.unit is not None and side.otherwise is None):
            return None
        exprs.append(expr)
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
    """(variable, the reals that satisfy it), where one side is linear in one variable, or the absolute value of such,
    and the other is a number."""
    if _bound(left) is not None:
        left, op, right = right, _FLIPPED[op], left
    expr, bound = _relation_side(left), _bound(right)
    if expr is None or bound is None:
        return None
    if not isinstance(expr, Call) or expr.name != "abs":
        return _solved(expr, op, bound)
    inner = expr.args[0]
    upper, lower = _solved(inner, op, bound), _solved(inner, _FLIPPED[op], -bound)
    if upper is None or lower is None:
        return None
    join = RealSet.intersection if op in ("<", "<=", "!=") else RealSet.union
    return upper[0], join([upper[1], lower[1]])


def _relation_side(side: Answer) -> Expr | None:
    if isinstance(side, Name):
        return side.expr if side.expr is not None else Sym(side.text)
    return side.expr if isinstance(side, Scalar) and side.unit is None else None


def _solved(expr: Expr, op: str, bound: Bound) -> tuple[str, RealSet] | None:
    """The reals for which a linear expression stands in this relation to a number."""
    line = linear(expr)
    if line is None or not is_finite(bound):
        return None
    name, slope, start = line
    at = divided(added(bound, -start), slope)
    if slope < 0:
        op = _FLIPPED[op]
    if op == "!=":
        return name, point(at).complement()
    if op in ("<", "<="):
        return name, interval(mpf("-inf"), False, at, op == "<=")
    return name, interval(at, op == ">=", mpf("inf"), False)


def _plain(item: Answer) -> Expr:
    if isinstance(item, Scalar) and item.unit is None:
        return item.expr
    raise NotMathematics("a ratio of other than numbers")


# ---------------------------------------------------------------- comparison


@dataclass(frozen=True)
class _Comparison:
    protocol: bool

    def same(self, gold: Views, answer: Views) -> bool:
        """Whether any view of one equals the same kind of view of the other."""
        if any(self.same(reading, answer) for reading in gold.also):
            return True
        if any(self.same(gold, reading) for reading in answer.also):
            return True
        if gold.difference is not None and answer.difference is not None:
            if self._same_relation(gold, answer):
                return True
        if not _names_agree(gold.name, answer.name) and not (gold.reals and answer.reals):
            return False
        if gold.sign.startswith("solved") and answer.sign.startswith("solved") and gold.sign != answer.sign:
            return False
        if gold.pairs is not None and answer.pairs is not None:
            return self._same_pairs(gold.pairs, answer.pairs)
        return (
            self._same_scalar(gold.scalar, answer.scalar)
            or self._same_row(gold, answer)
            or self._same_members(gold, answer)
            or (gold.reals is not None and answer.reals is not None and gold.reals.same(answer.reals))
            or self._same_matrix(gold.matrix, answer.matrix)
            or self._same_family(gold.family, answer.family)
            or _same_branches(gold.branches, answer.branches)
            or _same_residue(gold.residue, answer.residue)
            or (gold.known is not None and gold.known == answer.known)
        )

    def _same_relation(self, gold: Views, answer: Views) -> bool:
        if gold.sign != answer.sign or gold.difference is None or answer.difference is None:
            return False
        if symbols(gold.difference) != symbols(answer.difference):
            return False
        ratio = proportion(gold.difference, answer.difference)
        return ratio is not None and (gold.sign == "=" or ratio > 0)

    def _same_scalar(self, gold: Scalar | None, answer: Scalar | None) -> bool:
        if gold is None or answer is None:
            return False
        if self._same_quantity(gold, answer):
            return True
        if gold.otherwise is not None and self._same_scalar(gold.otherwise, answer):
            return True
        return answer.otherwise is not None and self._same_scalar(gold, answer.otherwise)

    def _same_quantity(self, gold: Scalar, answer: Scalar) -> bool:
        gold, answer = _whole_unit(gold), _whole_unit(answer)
        if gold.unit is None and answer.unit is None:
            return self._same_expr(gold.expr, answer.expr)
        if gold.unit is None or answer.unit is None:
            with_unit, bare = (gold, answer) if answer.unit is None else (answer, gold)
            assert with_unit.unit is not None
            if with_unit.unit.dimensions == DEGREE.dimensions and not with_unit.unit.nouns:
                if same_expression(bare.expr, Call("deg", (with_unit.expr,))):
                    return True
            if with_unit.unit == PERCENT and self._same_expr(bare.expr, Call("percent", (with_unit.expr,))):
                return True
            return self._same_expr(gold.expr, answer.expr)
        if (gold.unit, answer.unit) in ((DEGREE, RADIAN), (RADIAN, DEGREE)):
            ours, theirs = _in_radians(gold), _in_radians(answer)
            return same_expression(ours, theirs)
        if not compatible(gold.unit, answer.unit):
            return False
        return self._same_expr(_converted(gold, answer.unit), _converted(answer, gold.unit))

    def _same_expr(self, gold: Expr, answer: Expr) -> bool:
        if symbols(gold) or symbols(answer):
            return same_expression(gold, answer) or _same_up_to_constant(gold, answer)
        if same_number(gold, answer, self.protocol):
            return True
        if not self.protocol:
            return False
        hundredfold = Call("mul", (answer, Num(Fraction(100))))
        return same_number(gold, hundredfold, True) or same_number(gold, Call("percent", (answer,)), True)

    def _same_row(self, gold: Views, answer: Views) -> bool:
        if gold.row is None or answer.row is None or len(gold.row) != len(answer.row):
            return False
        if "matrix" in (gold.brackets, answer.brackets) and gold.brackets == answer.brackets:
            return False  # compared as matrices
        if "::" in (gold.brackets, answer.brackets):
            return gold.brackets == answer.brackets and self._same_ratio(gold.row, answer.row)
        if gold.brackets and answer.brackets and "matrix" not in (gold.brackets, answer.brackets):
            if gold.brackets != answer.brackets:
                return False
        if not gold.brackets and not answer.brackets:
            return False  # two bare lists have no order
        return all(self.same(one, other) for one, other in zip(gold.row, answer.row, strict=True))

    def _same_ratio(self, gold: Sequence[Views], answer: Sequence[Views]) -> bool:
        first, second = gold[0].scalar, answer[0].scalar
        if first is None or second is None:
            return False
        for one, other in zip(gold, answer, strict=True):
            if one.scalar is None or other.scalar is None:
                return False
            left = Call("mul", (one.scalar.expr, second.expr))
            if not same_expression(left, Call("mul", (other.scalar.expr, first.expr))):
                return False
        return True

    def _same_members(self, gold: Views, answer: Views) -> bool:
        if gold.members is None and answer.members is None:
            return False
        ours = gold.members if gold.members is not None else _alone(gold)
        theirs = answer.members if answer.members is not None else _alone(answer)
        if ours is None or theirs is None:
            return False
        if gold.is_set or answer.is_set:
            return self._all_in(ours, theirs) and self._all_in(theirs, ours)
        return len(ours) == len(theirs) and self._matched(ours, theirs)

    def _all_in(self, ours: Sequence[Views], theirs: Sequence[Views]) -> bool:
        return all(any(self.same(one, other) for other in theirs) for one in ours)

    def _matched(self, ours: Sequence[Views], theirs: Sequence[Views]) -> bool:
        """Whether each of ours has a partner of its own among theirs."""
        left = list(theirs)
        for one in ours:
            found = next((index for index, other in enumerate(left) if self.same(one, other)), None)
            if found is None:
                return False
            del left[found]
        return True

    def _same_matrix(self, gold: MatrixOf | None, answer: MatrixOf | None) -> bool:
        if gold is None or answer is None or len(gold.rows) != len(answer.rows):
            return False
        if len(gold.rows[0]) != len(answer.rows[0]):
            return False
        pairs = zip(gold.rows, answer.rows, strict=True)
        return all(
            self._same_expr(one, other) for ours, theirs in pairs for one, other in zip(ours, theirs, strict=True)
        )

    def _same_family(
        self, gold: tuple[str, str, tuple[Expr, ...]] | None, answer: tuple[str, str, tuple[Expr, ...]] | None
    ) -> bool:
        """Whether each value of one is a value of the other, its parameter shifted by a whole number or turned."""
        if gold is None or answer is None or gold[0] != answer[0] or len(gold[2]) != len(answer[2]):
            return False
        letter = Sym(_PARAMETER)
        ours = [substituted(expr, gold[1], letter) for expr in gold[2]]
        shifts: list[Expr] = [letter]
        if gold[0] == "Z":
            shifts = [
                Call("add", (Call("mul", (Num(Fraction(turn)), letter)), Num(Fraction(shift))))
                for turn in (1, -1)
                for shift in range(-3, 4)
            ]
        left = list(answer[2])
        for one in ours:
            found = next(
                (
                    index
                    for index, other in enumerate(left)
                    if any(same_expression(one, substituted(other, answer[1], shifted)) for shifted in shifts)
                ),
                None,
            )
            if found is None:
                return False
            del left[found]
        return True

    def _same_pairs(self, gold: Sequence[tuple[str, Views]], answer: Sequence[tuple[str, Views]]) -> bool:
        return len(gold) == len(answer) and all(
            name == other and self.same(one, two)
            for (name, one), (other, two) in zip(gold, answer, strict=True)
        )


_PARAMETER = "the parameter"


def substituted(expr: Expr, name: str, value: Expr) -> Expr:
    """The expression with a value in a symbol's place."""
    if isinstance(expr, Sym):
        return value if expr.name == name else expr
    if isinstance(expr, Num):
        return expr
    return Call(expr.name, tuple(substituted(arg, name, value) for arg in expr.args))


def _same_up_to_constant(gold: Expr, answer: Expr) -> bool:
    """Whether both are antiderivatives, with a term + C, that differ by a constant."""
    if not all(_CONSTANT in symbols(expr) for expr in (gold, answer)):
        return False
    zero, one = Num(Fraction(0)), Num(Fraction(1))
    bare = [substituted(expr, _CONSTANT, zero) for expr in (gold, answer)]
    for expr, without in zip((gold, answer), bare, strict=True):
        if not same_expression(substituted(expr, _CONSTANT, one), Call("add", (without, one))):
            return False
    return symbols(gold) == symbols(answer) and is_constant(Call("add", (bare[0], Call("neg", (bare[1],)))))


_CONSTANT = "C"


def _same_branches(
    gold: tuple[tuple[Expr, str], ...] | None, answer: tuple[tuple[Expr, str], ...] | None
) -> bool:
    if gold is None or answer is None or len(gold) != len(answer):
        return False
    return all(
        any(condition == other and same_expression(value, one) for one, other in answer)
        for value, condition in gold
    ) and len({condition for _, condition in answer}) == len(answer)


def _same_residue(gold: tuple[Expr, Expr, Expr] | None, answer: tuple[Expr, Expr, Expr] | None) -> bool:
    """Whether two congruences are of one letter, to one modulus, and of numbers that differ by a multiple of it."""
    if gold is None or answer is None or gold[0] != answer[0] or not same_expression(gold[2], answer[2]):
        return False
    if same_expression(gold[1], answer[1]):
        return True
    values = [worth(expr) for expr in (gold[1], answer[1], gold[2]) if not symbols(expr)]
    numbers = [found.value for found in values if found is not None and isinstance(found.value, Fraction)]
    return len(numbers) == 3 and numbers[2] != 0 and (numbers[0] - numbers[1]) % numbers[2] == 0


def _alone(seen: Views) -> tuple[Views, ...] | None:
    """A value as a set of one."""
    return (seen,) if seen.scalar is not None or (seen.row is not None and seen.brackets) else None


def _names_agree(one: str | None, other: str | None) -> bool:
    """Whether values given to these names may be the same; `y` and `f(x)` are one habit."""
    if one is None or other is None or one == other:
        return True
    return "y" in (one, other) and any(name.endswith(")") and len(name) > 1 for name in (one, other))


def _whole_unit(scalar: Scalar) -> Scalar:
    """`90^\\circ` and `50\\%` as a number with a unit."""
    expr = scalar.expr
    if scalar.unit is None and isinstance(expr, Call) and expr.name in ("deg", "percent"):
        return Scalar(expr.args[0], DEGREE if expr.name == "deg" else PERCENT)
    return scalar


def _in_radians(angle: Scalar) -> Expr:
    return Call("deg", (angle.expr,)) if angle.unit == DEGREE else angle.expr


def _converted(scalar: Scalar, other: Unit) -> Expr:
    """The value in base units; as it is where only one of the two has a known unit."""
    assert scalar.unit is not None
    if not (scalar.unit.dimensions and other.dimensions) or scalar.unit.factor == other.factor:
        return scalar.expr
    if isinstance(scalar.expr, Num):
        return Num(scalar.expr.value * scalar.unit.factor, scalar.expr.digits)
    return Call("mul", (scalar.expr, Num(scalar.unit.factor)))
