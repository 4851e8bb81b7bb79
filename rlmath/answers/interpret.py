"""Interprets a parsed answer: as a value, a tuple, a set, a relation, a family, ...

Most answers have several interpretations, `(1, 2)` is a point and an interval; `equivalence`
compares them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from itertools import chain

from rlmath.answers.compare_values import mentions, symbols
from rlmath.answers.equivalence import (
    Equivalence,
    Interpretations,
    classes_of,
    plain_exprs,
    single_member,
)
from rlmath.answers.evaluate import is_finite, mpf
from rlmath.answers.normalize import NotMathematics, Unsupported
from rlmath.answers.real_sets import EMPTY, LINE, RealSet, interval, point
from rlmath.answers.solution_sets import (
    PLUS_MINUS,
    any_symbols,
    bound_of,
    difference_of,
    expansions,
    expression_name,
    half_line,
    has_shift,
    is_lone_name,
    mention_signs,
    name_of,
    named_side,
    near,
    relation_side,
    value_of_expression,
    whole_numbers,
)
from rlmath.answers.syntax_tree import (
    DOTS,
    Answer,
    Call,
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

MAX_ITEMS = 200
"""Longest list or set that is compared."""

_NAMED_REALS = {
    "R": LINE,
    "empty": EMPTY,
    "R+": interval(Fraction(0), low_closed=False, high=mpf("inf"), high_closed=False),
    "R0": interval(Fraction(0), low_closed=True, high=mpf("inf"), high_closed=False),
}
_NUMBERED = re.compile(r"[a-z]+_[0-9]")
"""A solution by its number: x_1."""


@lru_cache(maxsize=2048)
def interpret(answer: Answer) -> Interpretations:
    """The interpretations of an answer.

    Raises NotMathematics or Unsupported if it has none."""
    match answer:
        case Scalar():
            return _interpret_scalar(answer)
        case Name():
            raise NotMathematics("a name without a value")
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
            reals = _NAMED_REALS.get(answer.name)
            members = () if answer.name == "empty" else None
            return Interpretations(
                named_set=answer.name, real_set=reals, members=members, is_set=True
            )
        case MatrixOf():
            row = None
            if len(answer.rows) == 1 or len(answer.rows[0]) == 1:
                row = tuple(
                    Interpretations(scalar=Scalar(entry)) for line in answer.rows for entry in line
                )
            return Interpretations(matrix=answer, row=row, brackets="matrix")
        case Piecewise():
            return Interpretations(
                branches=tuple(
                    (value, "".join(condition.split())) for value, condition in answer.branches
                )
            )


def _interpret_set(answer: SetOf) -> Interpretations:
    if any(isinstance(part, Relation) for part in answer.items):
        raise NotMathematics("a set of relations")
    return Interpretations(
        members=expanded_members(answer.items), is_set=True, real_set=_points(answer.items)
    )


def _interpret_described(answer: SetBuilder) -> Interpretations:
    condition = interpret(answer.condition)
    if condition.real_set is None or condition.sign != f"solved {answer.name}":
        raise NotMathematics("a set described by a condition")
    if answer.whole:
        return _whole_numbers(condition.real_set)
    return Interpretations(real_set=condition.real_set)


def _whole_numbers(reals: RealSet) -> Interpretations:
    """The whole numbers of a bounded set of reals, as a set."""
    low, high = whole_numbers(reals)
    if low is None or high is None or high - low >= MAX_ITEMS:
        raise Unsupported(f"more than {MAX_ITEMS} whole numbers")
    numbers = [Scalar(Num(Fraction(number))) for number in range(low, high + 1)]
    return Interpretations(
        members=tuple(map(interpret, numbers)), is_set=True, real_set=_points(numbers)
    )


def _interpret_operation(operation: SetOperation) -> Interpretations:
    """The set of reals of a union, intersection or difference."""
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
        values = [Scalar(chosen[0], scalar.unit) for chosen in expansions([scalar.expr])]
        return Interpretations(
            members=tuple(Interpretations(scalar=value) for value in values),
            is_set=True,
            real_set=_points(values),
        )
    return Interpretations(scalar=scalar)


def _interpret_group(group: Group) -> Interpretations:
    """The interpretations of items in brackets: a point or interval, a ratio, or several."""
    brackets = group.opening + group.closing
    exprs = [part.expr for part in group.items if isinstance(part, Scalar)]
    if any(mentions(expr, PLUS_MINUS) for expr in exprs):
        if len(exprs) < len(group.items):
            raise Unsupported("signs and other things in one group")
        sign_choices = [tuple(Scalar(expr) for expr in chosen) for chosen in expansions(exprs)]
        return Interpretations(
            members=tuple(
                interpret(Group(group.opening, items, group.closing)) for items in sign_choices
            ),
            is_set=True,
        )
    items = tuple(interpret(part) for part in group.items)
    if brackets == "::":
        ratio = None
        if len(items) == 2:
            sides = [
                part.expr for part in group.items if isinstance(part, Scalar) and part.unit is None
            ]
            if len(sides) < 2:
                raise NotMathematics("a ratio of other than numbers")
            ratio = Scalar(Call("div", tuple(sides)))
        return Interpretations(row=items, brackets=brackets, scalar=ratio)
    if len(items) != 2 or group.computed:
        return Interpretations(row=items, brackets="()", line=group.computed)
    return Interpretations(row=items, brackets=brackets, real_set=_interval(group))


def _interval(group: Group) -> RealSet | None:
    """The interval between the two items of a group; None where it is empty or has no bounds."""
    low, high = (bound_of(part) for part in group.items)
    if low is None or high is None:
        return None
    reals = interval(
        low, low_closed=group.opening == "[", high=high, high_closed=group.closing == "]"
    )
    return None if reals.is_empty else reals


def _points(items: Sequence[Answer]) -> RealSet | None:
    """The set of reals of items that are finite numbers; None for other items."""
    bounds = [bound_of(part) for part in items]
    if any(bound is None or not is_finite(bound) for bound in bounds):
        return None
    return RealSet.union([point(bound) for bound in bounds if bound is not None])


def expanded_members(items: Sequence[Answer]) -> tuple[Interpretations, ...]:
    """The interpretations of the items of a list or set, those with plus-minus signs expanded."""
    items = _filled(items)
    if len(items) > MAX_ITEMS:
        raise NotMathematics(f"more than {MAX_ITEMS} items")
    members: list[Interpretations] = []
    for part in items:
        interpreted = interpret(part)
        with_signs = isinstance(part, (Scalar, Group))
        members.extend(
            interpreted.members
            if with_signs and interpreted.members is not None
            else (interpreted,)
        )
    return tuple(members)


def _filled(items: Sequence[Answer]) -> Sequence[Answer]:
    """The items with whole numbers in the place of dots: `1, 2, ..., 5`."""
    if DOTS not in items:
        return items
    dots_index = list(items).index(DOTS)
    exprs_around = [
        part.expr
        for part in (
            *items[max(0, dots_index - 2) : dots_index],
            *items[dots_index + 1 : dots_index + 2],
        )
        if isinstance(part, Scalar)
    ]
    numbers = [
        expr.value for expr in exprs_around if isinstance(expr, Num) and expr.value.denominator == 1
    ]
    if len(numbers) < 3 or len(exprs_around) < 3 or dots_index + 1 == len(items):
        return items
    step = numbers[1] - numbers[0]
    last = numbers[2]
    count = (last - numbers[1]) / step - 1 if step else Fraction(-1)
    if count.denominator != 1 or not 0 <= count <= MAX_ITEMS:
        return items
    filled_in = [Scalar(Num(numbers[1] + step * turn)) for turn in range(1, int(count) + 1)]
    return (*items[:dots_index], *filled_in, *items[dots_index + 1 :])


def _interpret_relation(relation: Relation) -> Interpretations:
    """The interpretations of a membership, a congruence, an equation or an inequality."""
    ops = set(relation.ops)
    if ops == {"in"} and len(relation.sides) == 2:
        element, container = relation.sides
        inner = interpret(container)
        is_point = isinstance(element, Group) or (
            isinstance(element, Name) and element.text.startswith("(")
        )
        if not is_lone_name(element) or (is_point and isinstance(container, Group)):
            raise NotMathematics("the element of the set is not a name")
        return replace(inner, name=name_of(element))
    if ops == {"mod"}:
        *left, right, modulus = (relation_side(side) for side in relation.sides)
        if None in left or right is None or modulus is None:
            raise NotMathematics("a congruence between other than expressions")
        values = (
            [chosen[0] for chosen in expansions([right])]
            if mentions(right, PLUS_MINUS)
            else [right]
        )
        return Interpretations(
            residue=(left[0] if left else None, tuple((value, modulus) for value in values))
        )
    if "==" in ops:
        relation = Relation(relation.sides, tuple("=" if op == "==" else op for op in relation.ops))
        ops = set(relation.ops)
    if ops <= {"=", "~"}:
        return _interpret_equation(relation)
    if ops <= {"<", "<=", ">", ">="} or ops == {"!="}:
        return _interpret_inequality(relation)
    raise Unsupported("a mixture of relations")


def _interpret_equation(relation: Relation) -> Interpretations:
    """The interpretations of an equation: a named value, a number, or a curve."""
    sides = list(relation.sides)
    name = None
    if len(sides) == 2 and is_lone_name(sides[-1]) and not is_lone_name(sides[0]):
        name = name_of(sides.pop())
    names = []
    while len(sides) > 1 and is_lone_name(sides[0]):
        names.append(name_of(sides[0]))
        del sides[0]
    name = name or next(iter(names), None)
    if (
        len(sides) == len(relation.sides)
        and len(sides) > 1
        and (expression := expression_name(sides[0]))
    ):
        name = expression
        del sides[0]
    if len(relation.sides) > 2 and not any_symbols(sides[-1:]):
        # The numbers of `m+n = 7+18 = 25` are the value, if the formula before them has a name or
        # there are two of them.
        numbers = [side for side in sides if not any_symbols([side])]
        sides = numbers if name is not None or len(numbers) > 1 else sides
    value = (
        _common_value(sides, relation.ops) if name is not None or not any_symbols(sides) else None
    )
    difference = (
        difference_of(relation) if len(relation.sides) == 2 and relation.ops == ("=",) else None
    )
    with_signs = len(relation.sides) == 2 and mention_signs(
        [relation_side(side) for side in relation.sides]
    )
    equations = _curves([relation]) if with_signs else None
    if value is None:
        if difference is not None:
            asked_values = tuple(map(interpret, value_of_expression(sides)))
            return Interpretations(difference=difference, sign="=", asked=asked_values)
        raise NotMathematics("sides that differ")
    rounded = interpret(sides[-1]) if relation.ops[-1] == "~" and len(sides) > 1 else None
    interpreted = interpret(value)
    if len(names) > 1 and interpreted.scalar is not None:  # x = y = 0
        pairs = tuple(
            (str(assigned_name), interpreted) for assigned_name in sorted(map(str, names))
        )
        interpreted = replace(
            interpreted, pairs=pairs, row=(interpreted,) * len(pairs), brackets="()"
        )
    return replace(
        interpreted,
        name=name,
        difference=difference,
        sign="=",
        rounded=rounded,
        equations=equations,
    )


def _curves(relations: Sequence[Relation]) -> tuple[Interpretations, ...] | None:
    """The equations of several curves, with both signs of each plus-minus sign.

    None if all are values of names."""
    curves = []
    for relation in relations:
        exprs = [relation_side(side) for side in relation.sides]
        if len(exprs) != 2 or exprs[0] is None or exprs[1] is None:
            return None
        both_sides = [expr for expr in exprs if expr is not None]
        for left, right in expansions(both_sides) if mention_signs(both_sides) else [both_sides]:
            curves.append(
                interpret(Relation((named_side(relation.sides[0], left), Scalar(right)), ("=",)))
            )
    if len(curves) < 2 or all(
        curve.name and curve.scalar and not symbols(curve.scalar.expr) for curve in curves
    ):
        return None
    return tuple(curves) if all(curve.difference is not None for curve in curves) else None


def _common_value(sides: Sequence[Answer], ops: Sequence[str]) -> Answer | None:
    """The value of all sides; None if they differ, as in `1 = 2`."""
    comparison = Equivalence(protocol=False)
    for other, op in zip(sides[1:], ops[len(ops) - len(sides) + 1 :], strict=True):
        first = interpret(sides[0])
        second = interpret(other)
        if op == "=" and comparison.same(first, second):
            continue
        if not (
            op == "~"
            and first.scalar
            and second.scalar
            and near(first.scalar.expr, second.scalar.expr)
        ):
            return None
    return sides[0] if "~" in ops else sides[-1]


def _interpret_inequality(relation: Relation) -> Interpretations:
    """The set of reals that a chain of inequalities in one variable leaves."""
    reals: list[RealSet] = []
    names: set[str] = set()
    for left, op, right in zip(relation.sides, relation.ops, relation.sides[1:], strict=False):
        solved = half_line(left, op, right)
        if solved is None:
            raise Unsupported("an inequality that is not solved")
        names.add(solved[0])
        reals.append(solved[1])
    if len(names) != 1:
        raise Unsupported("inequalities in several variables")
    return Interpretations(
        real_set=RealSet.intersection(reals),
        sign=f"solved {names.pop()}",
        unsolved=has_shift(relation),
    )


def _interpret_listing(listing: Listing) -> Interpretations:
    """The interpretations of a list without brackets."""
    relations = [part for part in listing.items if isinstance(part, Relation)]
    memberships = [
        relation
        for relation in relations
        if relation.ops == ("in",) and isinstance(relation.sides[1], NamedSet)
    ]
    if memberships:  # `letter in set of numbers`
        return _parametrised(listing, memberships)
    if (counted := _with_counted_letter(listing)) is not None:
        return interpret(counted)
    items = expanded_members(listing.items)
    if len(relations) == len(items) and {member.sign == "=" for member in items} == {True, False}:
        raise NotMathematics("equations and inequalities in one list")
    if all(member.residue is not None for member in items):
        return _several_residues(items, listing.joiner)
    if len(relations) == len(listing.items):
        if all(member.name is None and member.real_set is not None for member in items):
            sets = [member.real_set for member in items if member.real_set]
            common_reals = RealSet.intersection(sets)
            # A comma is the intersection unless that is empty, then the union.
            joined = listing.joiner == "or" or (listing.joiner == "," and common_reals.is_empty)
            return Interpretations(
                sign=items[0].sign, real_set=RealSet.union(sets) if joined else common_reals
            )
        if all(member.sign == "=" for member in items):
            return replace(_several_equations(items), equations=_curves(relations))
    return Interpretations(
        members=items, row=items if listing.joiner == "," else None, real_set=_listed_union(items)
    )


def _listed_union(items: Sequence[Interpretations]) -> RealSet | None:
    """The union of intervals in a list: `(-\\infty, 2) or (3, \\infty)`.

    None for points and other items."""
    sets = [
        member.real_set
        for member in items
        if member.real_set is not None and member.row is not None
    ]
    endless = any(real_set.has[0] or real_set.has[-1] for real_set in sets)
    return RealSet.union(sets) if endless and len(sets) == len(items) else None


def _parametrised(listing: Listing, memberships: Sequence[Relation]) -> Interpretations:
    """Answers with a parameter, `x = a + k b, k in Z`; a real parameter is ignored."""
    other_parts = tuple(part for part in listing.items if part not in memberships)
    sets = {side.sides[1] for side in memberships}
    if not other_parts or len(sets) > 1:
        raise Unsupported("several parameters")
    inner = interpret(
        other_parts[0] if len(other_parts) == 1 else Listing(other_parts, listing.joiner)
    )
    named_set = memberships[0].sides[1]
    letters = tuple(
        name for membership in memberships if (name := name_of(membership.sides[0])) is not None
    )
    assert isinstance(named_set, NamedSet)
    if len(letters) < len(memberships) or inner.residue is not None:
        return inner
    members = inner.members if inner.members is not None else single_member(inner)
    rows = tuple(
        plain_exprs((member,) if member.scalar is not None else member.row or (member,))
        for member in members or ()
    )
    if not rows or not all(rows):
        if named_set.name in ("R", "C"):
            return inner
        raise Unsupported("a parameter in other than values")
    family = (named_set.name, letters, rows)
    if named_set.name in ("R", "C") or _is_index(letters[0], inner.name):
        return replace(inner, family=family)
    if len(letters) > 1:
        raise Unsupported("several parameters that are whole numbers")
    return Interpretations(name=inner.name, family=family, residue=classes_of(family, inner.name))


def _with_counted_letter(listing: Listing) -> Listing | None:
    """`2^k, k >= 0` with the set of its letter, None for anything else."""
    *first, last = listing.items
    if not first or not isinstance(last, Relation) or len(last.sides) != 2:
        return None
    letter = name_of(last.sides[0])
    op = last.ops[0]
    low = last.sides[1]
    start = low.expr if isinstance(low, Scalar) else None
    if letter is None or op not in (">", ">=") or start not in (Num(Fraction(0)), Num(Fraction(1))):
        return None
    least = int(start.value) + (op == ">")
    formula = first[-1]
    value = (
        formula.sides[-1] if isinstance(formula, Relation) and formula.ops == ("=",) else formula
    )
    if least > 1 or not isinstance(value, Scalar) or letter not in symbols(value.expr):
        return None
    membership = Relation((Scalar(Sym(letter)), NamedSet("Z+" if least else "Z0")), ("in",))
    return Listing((*first, membership), listing.joiner)


def _is_index(letter: str, name: str | None) -> bool:
    """Whether a name such as `a_n` or `f(n)` has the letter as its index."""
    return name is not None and letter in (
        name.partition("_")[2],
        name.partition("(")[2].removesuffix(")"),
    )


def _several_residues(items: Sequence[Interpretations], joiner: str) -> Interpretations:
    """One residue of several classes: `n = 1 or 4 mod 5`.

    Congruences with different moduli are a system."""
    residues = [congruence.residue for congruence in items if congruence.residue is not None]
    letters = {residue[0] for residue in residues}
    classes = tuple(residue_class for residue in residues for residue_class in residue[1])
    if len(letters) == 1 and (joiner == "or" or len({modulus for _, modulus in classes}) == 1):
        return Interpretations(residue=(residues[0][0], classes))
    return Interpretations(members=tuple(items))


def _several_equations(items: tuple[Interpretations, ...]) -> Interpretations:
    """The interpretations of several equations: values of one name, or of several names."""
    names = [equation.name for equation in items]
    if None in names or any(
        equation.scalar is None and equation.members is None for equation in items
    ):
        return Interpretations(members=items)
    if sum(equation.members is not None for equation in items) > 1 and len(set(names)) > 1:
        raise NotMathematics("several signs in several values")
    bare = tuple(
        Interpretations(
            scalar=equation.scalar,
            members=equation.members,
            is_set=equation.is_set,
            row=equation.row,
            brackets=equation.brackets,
        )
        for equation in items
    )
    if len(set(names)) == 1:
        # x = 0 or x = \\pm 2
        members = chain.from_iterable(solution.members or (solution,) for solution in bare)
        return Interpretations(members=tuple(members), name=names[0])
    pairs = tuple(
        sorted(zip((str(name) for name in names), bare, strict=True), key=lambda pair: pair[0])
    )
    numbered = {name.partition("_")[0] for name in names if name and _NUMBERED.fullmatch(name)}
    members = (
        bare if len(numbered) == 1 and all(map(_NUMBERED.fullmatch, map(str, names))) else None
    )
    return Interpretations(
        row=tuple(value for _, value in pairs), brackets="()", pairs=pairs, members=members
    )
