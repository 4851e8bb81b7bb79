"""Compares the interpretations of two answers.

They are equal if one kind of interpretation is equal in both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from itertools import chain, combinations, permutations
from operator import eq
from typing import Any

from rlmath.answers.compare_values import (
    are_proportional,
    mentions,
    same_expression,
    same_number,
    symbols,
    value_of,
)
from rlmath.answers.evaluate import to_mp
from rlmath.answers.families import (
    MAX_CONSTANTS,
    linear_in,
    open_index,
    renamed,
    same_line,
    same_progressions,
    substituted,
    with_letter_i,
)
from rlmath.answers.question import Question
from rlmath.answers.real_sets import RealSet
from rlmath.answers.syntax_tree import Call, Expr, MatrixOf, Num, Scalar, Sym
from rlmath.answers.units import DEGREE, PERCENT, RADIAN, Unit, compatible

Family = tuple[str, tuple[str, ...], tuple[tuple[Expr, ...], ...]]
Residue = tuple[Expr | None, tuple[tuple[Expr, Expr], ...]]
Branches = tuple[tuple[Expr, str], ...]


@dataclass(frozen=True)
class Interpretations:
    """The interpretations of an answer; None for those that it does not have."""

    scalar: Scalar | None = None
    name: str | None = None
    """The name that its value is assigned to: "x" in x = 5."""
    row: tuple[Interpretations, ...] | None = None
    """Ordered items: a point, a vector, the sides of a ratio."""
    brackets: str = ""
    """Brackets of the row: "()", "[)", ..., "::" for a ratio, "matrix", or "" for a bare list."""
    members: tuple[Interpretations, ...] | None = None
    """Unordered items."""
    is_set: bool = False
    """Whether repeated members count once."""
    real_set: RealSet | None = None
    difference: Expr | None = None
    """Left side minus right side of an equation."""
    sign: str = ""
    """Sign of the relation: "=", or "solved x" for an inequality in x."""
    matrix: MatrixOf | None = None
    named_set: str | None = None
    family: Family | None = None
    """(set of the parameters, their letters, values or points): their union over all parameters."""
    residue: Residue | None = None
    """(left side, (residue, modulus) of each class) of congruences."""
    branches: Branches | None = None
    """(value, condition) of a function by cases."""
    pairs: tuple[tuple[str, Interpretations], ...] | None = None
    """Several names with their values: x = 1, y = 2."""
    equations: tuple[Interpretations, ...] | None = None
    """Several equations, each with its difference, of which not all are values of names."""
    line: bool = False
    """A point whose parameter stands for all real numbers: `p + t v`."""
    unsolved: bool = False
    """An inequality such as `|x - 2| < 3`: right for itself, no solution of it."""
    rounded: Interpretations | None = None
    """The 3.14 of `x = \\pi \\approx 3.14`."""
    asked: tuple[Interpretations, ...] = ()
    """The number that a sum or product of letters is: 14 of `m + n = 14`."""


@dataclass(frozen=True)
class Equivalence:
    """The comparison of interpretations, with its rules."""

    protocol: bool
    repeats: bool = True
    """Whether a value that one of two lists repeats counts once."""
    question: Question | None = None
    """Its units may stand beside a value whose reference has none; None: any unit."""

    def same(self, gold: Interpretations, answer: Interpretations) -> bool:
        """Whether any interpretation of one equals the same kind of interpretation of the other."""
        is_decimal = (
            gold.scalar is not None
            and isinstance(gold.scalar.expr, Num)
            and gold.scalar.expr.digits
        )
        if is_decimal and answer.rounded is not None and self.same(gold, answer.rounded):
            return True
        if self._same_relation(gold, answer):
            return True
        if answer.asked and gold.scalar is not None and gold.name is None and not gold.sign:
            is_plain = gold.scalar.unit is None and not symbols(gold.scalar.expr)
            return is_plain and self.same(gold, answer.asked[0])
        if answer.unsolved and not gold.unsolved:
            return False
        if not names_agree(gold.name, answer.name):
            return _same_function(gold, answer)
        if (
            gold.sign.startswith("solved")
            and answer.sign.startswith("solved")
            and gold.sign != answer.sign
        ):
            return False
        if gold.pairs is not None and answer.pairs is not None and gold.name == answer.name:
            gold_names = [name for name, _ in gold.pairs]
            answer_names = [name for name, _ in answer.pairs]
            pairs = zip(gold.pairs, answer.pairs, strict=True) if gold_names == answer_names else ()
            all_same = bool(pairs) and all(
                self.same(gold_value, answer_value) for (_, gold_value), (_, answer_value) in pairs
            )
            return all_same or (gold_names == answer_names and _same_line(gold, answer))
        if self._same_scalar(gold.scalar, answer.scalar) or self._same_row(gold, answer):
            return True
        if self._same_members(gold, answer) or self._same_angles(gold, answer):
            return True
        if _same_vector(gold, answer) or _same_vector(answer, gold):
            return True
        for family, open_one in ((gold.family, answer), (answer.family, gold)):
            if (
                family is None
                or open_one.family is not None
                or (open_one is gold and family[0] != "Z")
            ):
                continue
            if _fits_family(family, open_one):
                return True
        if gold.residue is not None and answer.residue is None and answer.family is None:
            answer = replace(answer, residue=_open_classes(answer, gold.residue))
        same_kinds: list[tuple[Any, Any, Callable[[Any, Any], bool]]] = [
            (gold.real_set, answer.real_set, RealSet.same),
            (gold.matrix, answer.matrix, self._same_matrix),
            (gold.family, answer.family, _same_family),
            (gold.branches, answer.branches, _same_branches),
            (gold.residue, answer.residue, _same_residue),
            (gold.named_set, answer.named_set, eq),
        ]
        return any(
            a is not None and b is not None and compare(a, b) for a, b, compare in same_kinds
        )

    def _same_angles(self, gold: Interpretations, answer: Interpretations) -> bool:
        """Whether two families of angles over all integers are the same set.

        One of them may leave out its set."""
        gold_angles = _angles(gold)
        answer_angles = _angles(answer)
        if gold_angles is None or answer_angles is None:
            return False
        gold_exprs, gold_letter = gold_angles
        answer_exprs, answer_letter = answer_angles
        return same_progressions(gold_exprs, gold_letter, answer_exprs, answer_letter=answer_letter)

    def _same_relation(self, gold: Interpretations, answer: Interpretations) -> bool:
        """Whether two equations, or several of each, say the same."""
        if gold.equations is not None and answer.equations is not None:
            return _can_be_paired(gold.equations, answer.equations, self.same)
        if gold.sign != answer.sign or gold.difference is None or answer.difference is None:
            return False
        if gold.name is not None and gold.scalar is not None and not symbols(gold.scalar.expr):
            # x = 2 needs a value, not 2x + 3 = 7; x - 2 = 0 is one
            solution = None if answer.name is not None else _solved_to_zero(answer.difference)
            return (
                solution is not None
                and solution[0] == gold.name
                and same_expression(gold.scalar.expr, solution[1])
            )
        if symbols(gold.difference) != symbols(answer.difference):
            return False
        return are_proportional(gold.difference, answer.difference)

    def _same_scalar(self, gold: Scalar | None, answer: Scalar | None) -> bool:
        if gold is None or answer is None:
            return False
        return (
            self._same_quantity(gold, answer)
            or self._same_scalar(gold.otherwise, answer)
            or self._same_scalar(gold, answer.otherwise)
        )

    def _same_quantity(self, gold: Scalar, answer: Scalar) -> bool:
        """Whether two values, with a unit or without one, are the same."""
        gold = _whole_unit(gold)
        answer = _whole_unit(answer)
        if gold.unit is None and answer.unit is None:
            return self._same_expr(gold.expr, answer.expr)
        if gold.unit is None or answer.unit is None:
            with_unit, bare = (gold, answer) if answer.unit is None else (answer, gold)
            assert with_unit.unit is not None
            in_degrees = with_unit.unit.dimensions == DEGREE.dimensions and not with_unit.unit.nouns
            if in_degrees and same_expression(bare.expr, Call("deg", (with_unit.expr,))):
                return True
            if with_unit.unit.dimensions == PERCENT.dimensions:
                return self._same_percentage(gold, answer, bare is gold)
            in_radians = with_unit.unit == RADIAN and mentions(bare.expr, frozenset(("pi",)))
            may_stand = in_radians or self.question is None or self.question.has(with_unit.unit)
            if bare is gold and not may_stand:
                return False
            return self._same_expr(gold.expr, answer.expr)
        if {gold.unit, answer.unit} == {DEGREE, RADIAN}:
            return same_expression(
                *(Call("deg", (a.expr,)) if a.unit == DEGREE else a.expr for a in (gold, answer))
            )
        if not compatible(gold.unit, answer.unit):
            return False
        return self._same_expr(_converted(gold, answer.unit), _converted(answer, gold.unit))

    def _same_percentage(self, gold: Scalar, answer: Scalar, is_bare: bool) -> bool:
        """Whether a percentage is a number without the sign.

        That is hundredths up to 1, so that `50\\%` is 0.5 and `0.5\\%` is not, and percent above;
        but 1.5 is `150\\%`, as well as 150, where the reference has the sign."""
        size = None if symbols(gold.expr) else value_of(gold.expr)
        is_large = size is None or not abs(to_mp(size.value)) <= 1
        if is_large and self._same_expr(gold.expr, answer.expr):
            return True
        gold_share, answer_share = (
            side.expr if side.unit is None else Call("percent", (side.expr,))
            for side in (gold, answer)
        )
        return not (is_large and is_bare) and self._same_expr(gold_share, answer_share)

    def _same_expr(self, gold: Expr, answer: Expr) -> bool:
        """Whether two expressions are the same; with the protocol also a factor of 100 off."""
        if symbols(gold) or symbols(answer):
            return same_expression(gold, answer)
        if same_number(gold, answer, self.protocol):
            return True
        if not self.protocol:
            return False
        hundredfold = Call("mul", (answer, Num(Fraction(100))))
        return same_number(gold, hundredfold, True) or same_number(
            gold, Call("percent", (answer,)), True
        )

    def _same_row(self, gold: Interpretations, answer: Interpretations) -> bool:
        """Whether two rows of ordered items, such as points, are the same."""
        if gold.row is None or answer.row is None or len(gold.row) != len(answer.row):
            return False
        kinds = {gold.brackets, answer.brackets}
        if kinds == {"::"}:
            return self._same_ratio(gold.row, answer.row)
        if "::" in kinds or kinds in ({"matrix"}, {""}):  # two lists without brackets have no order
            return False
        if "" in kinds and any("[" in brackets or "]" in brackets for brackets in kinds):
            return False  # an interval is no list
        if len(kinds) == 2 and not kinds & {"matrix", ""}:
            return False
        if all(
            self.same(gold_part, answer_part)
            for gold_part, answer_part in zip(gold.row, answer.row, strict=True)
        ):
            return True
        return _same_line(gold, answer)

    def _same_ratio(
        self, gold: Sequence[Interpretations], answer: Sequence[Interpretations]
    ) -> bool:
        """Whether all sides are in proportion, and of neither all are zero."""
        gold_sides = plain_exprs(gold)
        answer_sides = plain_exprs(answer)
        if len(gold_sides) != len(answer_sides) or any(
            all(map(_is_zero, sides)) for sides in (gold_sides, answer_sides)
        ):
            return False
        return all(
            same_expression(Call("mul", (a, d)), Call("mul", (b, c)))
            for (a, c), (b, d) in combinations(zip(gold_sides, answer_sides, strict=True), 2)
        )

    def _same_members(self, gold: Interpretations, answer: Interpretations) -> bool:
        """Whether two sets or lists without order have the same members."""
        if gold.members is None and answer.members is None:
            return False
        gold_members = gold.members if gold.members is not None else single_member(gold)
        answer_members = answer.members if answer.members is not None else single_member(answer)
        if gold_members is None or answer_members is None:
            return False
        is_set = gold.is_set or answer.is_set
        if not is_set and (len(gold_members) == len(answer_members) or not self.repeats):
            return _can_be_paired(gold_members, answer_members, self._same_member)
        all_match = all(
            any(self._same_member(member, other) for other in other_members)
            for members, other_members in (
                (gold_members, answer_members),
                (answer_members, gold_members),
            )
            for member in members
        )
        if is_set or not all_match:
            return all_match
        # A solution that only the longer list repeats counts once.
        shorter = min(gold_members, answer_members, key=len)
        return not any(
            self._same_member(member, other_member)
            for member, other_member in combinations(shorter, 2)
        )

    def _same_member(self, first: Interpretations, second: Interpretations) -> bool:
        """Members are compared as they are: {1} inside a set is not 1."""
        return (first.members is None) == (second.members is None) and self.same(first, second)

    def _same_matrix(self, gold: MatrixOf, answer: MatrixOf) -> bool:
        if len(gold.rows) != len(answer.rows) or len(gold.rows[0]) != len(answer.rows[0]):
            return False
        pairs = zip(chain(*gold.rows), chain(*answer.rows), strict=True)
        return all(self._same_expr(gold_entry, answer_entry) for gold_entry, answer_entry in pairs)


def _same_line(gold: Interpretations, answer: Interpretations) -> bool:
    """Whether two points with one parameter each are the same points together."""
    gold_exprs = plain_exprs(gold.row or ())
    answer_exprs = plain_exprs(answer.row or ())
    if not len(gold_exprs) == len(answer_exprs) > 1:
        return False
    return same_line(gold_exprs, answer_exprs, of_reals=gold.line)


def _solved_to_zero(difference: Expr) -> tuple[str, Expr] | None:
    """(name, value) of `x - 4 = 0`, else None."""
    match difference:
        case Call("add", (Call("add", (Sym(name), number)), Call("neg", (Num(zero),)))) if not (
            zero or symbols(number)
        ):
            return name, Call("neg", (number,))
    return None


_UNIT_VECTORS = (Sym("vector i"), Sym("j"), Sym("k"))


def _same_vector(row: Interpretations, sum_: Interpretations) -> bool:
    """Whether `<1, 2, 3>` is `i + 2j + 3k`, whose i is written as a vector."""
    if row.row is None or sum_.scalar is None or not 2 <= len(row.row) <= 3 or not row.brackets:
        return False
    if not symbols(sum_.scalar.expr) & {"vector i", "j"}:
        return False
    exprs = plain_exprs(row.row)
    if not exprs:
        return False
    terms = [Call("mul", pair) for pair in zip(exprs, _UNIT_VECTORS[: len(exprs)], strict=True)]
    return same_expression(
        reduce(lambda total, term: Call("add", (total, term)), terms),
        with_letter_i(sum_.scalar.expr, _UNIT_VECTORS[0]),
    )


def _is_zero(expr: Expr) -> bool:
    return same_expression(expr, Num(Fraction(0)))


def plain_exprs(values: Sequence[Interpretations]) -> tuple[Expr, ...]:
    """The expressions of values without units; none where one of the values is something else."""
    exprs = [
        value.scalar.expr
        for value in values
        if value.scalar is not None and value.scalar.unit is None
    ]
    return tuple(exprs) if len(exprs) == len(values) else ()


def single_member(value: Interpretations) -> tuple[Interpretations, ...] | None:
    """A value, point or interval as a set of one member; None for anything else."""
    return (
        (value,) if value.scalar is not None or (value.row is not None and value.brackets) else None
    )


def _can_be_paired(
    members: Sequence[Any], other_members: Sequence[Any], are_same: Callable[[Any, Any], bool]
) -> bool:
    """Whether each member is the same as a different one of the other members, and all are used.

    The first match is taken."""
    if len(members) != len(other_members):
        return False
    unpaired = list(other_members)
    for member in members:
        position = next(
            (index for index, other in enumerate(unpaired) if are_same(member, other)), None
        )
        if position is None:
            return False
        del unpaired[position]
    return True


def _angles(value: Interpretations) -> tuple[Sequence[Expr], str] | None:
    """(expressions, their letter) of a family over all integers, or of angles with an index.

    None for other values."""
    if value.family is not None:
        named_set, letters, rows = value.family
        plain = named_set == "Z" and len(letters) == 1 and all(len(row) == 1 for row in rows)
        return ([row[0] for row in rows], letters[0]) if plain else None
    exprs = plain_exprs(value.members if value.members is not None else (value,))
    letter = open_index(exprs)
    return (exprs, letter) if letter is not None and letter != value.name else None


_FIRST = {"N": (0, 1), "Z0": (0,), "Z+": (1,)}


def _same_family(gold: Family, answer: Family) -> bool:
    """Whether the values can be paired, with the parameter shifted by an integer or negated."""
    letter = Sym("the parameter")
    turns = (1,)
    steps = {0}
    if len(gold[1]) != len(answer[1]):
        return False
    if len(gold[1]) != 1:
        return gold[0] == answer[0] and _same_renamed(gold, answer)
    if gold[0] == answer[0] == "Z":
        turns = (1, -1)
        steps = set(range(-3, 4))
    elif gold[0] in _FIRST and answer[0] in _FIRST:
        steps = {low - first for first in _FIRST[gold[0]] for low in _FIRST[answer[0]]}
        steps = {0} if gold[0] == answer[0] else steps
    elif gold[0] != answer[0]:
        return False
    shifts: list[Expr] = [
        Call("add", (Call("mul", (Num(Fraction(turn)), letter)), Num(Fraction(step))))
        for turn in turns
        for step in sorted(steps)
    ]
    gold_rows = [tuple(substituted(expr, gold[1][0], letter) for expr in row) for row in gold[2]]

    def same(first: tuple[Expr, ...], second: tuple[Expr, ...]) -> bool:
        return len(first) == len(second) and any(
            all(
                same_expression(gold_expr, substituted(answer_expr, answer[1][0], shifted))
                for gold_expr, answer_expr in zip(first, second, strict=True)
            )
            for shifted in shifts
        )

    return _can_be_paired(gold_rows, answer[2], same)


def _fits_family(gold: Family, answer: Interpretations) -> bool:
    """Whether an answer is the reference's family with another letter, without its set.

    A letter alone is no family."""
    exprs = plain_exprs(
        answer.row if answer.row is not None and answer.scalar is None else (answer,)
    )
    letters = frozenset().union(*(symbols(expr) for expr in exprs))
    known_letters = frozenset().union(*(symbols(expr) for row in gold[2] for expr in row)) - set(
        gold[1]
    )
    known_letters |= set((answer.name or "").partition("(")[2])  # the x of f(x)
    if not exprs or len(letters - known_letters) != len(gold[1]) or not gold[1]:
        return False
    if len(exprs) == 1 and isinstance(exprs[0], Sym) and "(" not in (answer.name or ""):
        return False
    return _same_family(gold, (gold[0], tuple(sorted(letters - known_letters)), (tuple(exprs),)))


def _same_renamed(gold: Family, answer: Family) -> bool:
    """Whether two families of points are the same with their letters in some order."""
    if len(gold[2]) != 1 or len(answer[2]) != 1 or len(gold[1]) > MAX_CONSTANTS:
        return False
    return any(
        len(gold[2][0]) == len(answer[2][0])
        and all(
            same_expression(gold_expr, renamed(answer_expr, answer[1], order))
            for gold_expr, answer_expr in zip(gold[2][0], answer[2][0], strict=True)
        )
        for order in permutations(gold[1])
    )


def _open_classes(answer: Interpretations, residue: Residue) -> Residue | None:
    """Congruence classes of `n = 5k + 2` whose k has no set, None for anything else."""
    exprs = plain_exprs(answer.members if answer.members is not None else (answer,))
    letters = frozenset().union(*map(symbols, exprs))
    if len(letters) != 1:
        return None
    (letter,) = letters
    if Sym(letter) in exprs or (residue[0] and letter in symbols(residue[0])):
        return None
    return classes_of(("Z", (letter,), tuple((expr,) for expr in exprs)), answer.name)


def classes_of(family: Family, name: str | None) -> Residue | None:
    """`5k + 2` for all integers k as congruence classes; None for other families."""
    named_set, letters, rows = family
    classes = []
    for row in rows:
        if (
            named_set != "Z"
            or len(letters) != 1
            or len(row) != 1
            or symbols(row[0]) != set(letters)
        ):
            return None
        line = linear_in(row[0], letters[0])
        if line is None or line[1].denominator != 1 or line[1] == 0:
            return None
        classes.append((Num(line[0]), Num(abs(line[1]))))
    return (Sym(name) if name else None), tuple(classes)


_INDICES = frozenset("ijkmn")


def _same_function(gold: Interpretations, answer: Interpretations) -> bool:
    """Whether two functions of one name are the same, of `x` or of `t`."""
    mark = "_" if "_" in (gold.name or "") else "("
    (gold_head, _, gold_letter), (answer_head, _, answer_letter) = (
        (function.name or "").partition(mark) for function in (gold, answer)
    )
    gold_letter = gold_letter.removesuffix(")")
    answer_letter = answer_letter.removesuffix(")")
    if mark == "_" and not {gold_letter, answer_letter} <= _INDICES:
        return False
    if (
        gold_head != answer_head
        or len(gold_letter) != 1
        or len(answer_letter) != 1
        or gold.scalar is None
        or answer.scalar is None
    ):
        return False
    if gold_letter in symbols(answer.scalar.expr):
        return False
    return same_expression(
        gold.scalar.expr, substituted(answer.scalar.expr, answer_letter, Sym(gold_letter))
    )


def _same_branches(gold: Branches, answer: Branches) -> bool:
    return len(gold) == len(answer) == len({condition for _, condition in answer}) and all(
        any(
            gold_condition == answer_condition and same_expression(gold_value, answer_value)
            for answer_value, answer_condition in answer
        )
        for gold_value, gold_condition in gold
    )


MAX_MODULUS = 10_000
"""Largest common modulus at which classes of different moduli are compared."""


def _same_residue(gold: Residue, answer: Residue) -> bool:
    """Whether two congruences have the same left side, if both have one, and the same classes."""
    if gold[0] is not None and answer[0] is not None and gold[0] != answer[0]:
        return False
    gold_classes = _whole_classes(gold)
    answer_classes = _whole_classes(answer)
    if gold_classes is None or answer_classes is None:
        return _can_be_paired(
            gold[1],
            answer[1],
            lambda gold_class, answer_class: all(map(same_expression, gold_class, answer_class)),
        )
    common = math.lcm(*(modulus for _, modulus in (*gold_classes, *answer_classes)))
    if common > MAX_MODULUS:
        return gold_classes == answer_classes
    spread = [
        {number for residue, modulus in classes for number in range(residue, common, modulus)}
        for classes in (gold_classes, answer_classes)
    ]
    return spread[0] == spread[1]


def _whole_classes(residue: Residue) -> set[tuple[int, int]] | None:
    """(least residue, modulus) of each class, None if they are not whole numbers."""
    classes = set()
    for pair in residue[1]:
        approximations = [value_of(expr) for expr in pair if not symbols(expr)]
        numbers = [
            approximation.value
            for approximation in approximations
            if approximation is not None and isinstance(approximation.value, Fraction)
        ]
        if (
            len(numbers) < 2
            or any(number.denominator != 1 for number in numbers)
            or numbers[1] == 0
        ):
            return None
        modulus = abs(int(numbers[1]))
        classes.add((int(numbers[0]) % modulus, modulus))
    return classes


def names_agree(first: str | None, second: str | None) -> bool:
    """Whether values assigned to these names may be compared; `y` and `f(x)` name the same."""
    if first is None or second is None or first == second:
        return True
    if first.partition("(")[0] == second or first == second.partition("(")[0]:
        return True  # f and f(x)
    if "a derivative" in (first, second):
        return "'" in first or "'" in second
    return "y" in (first, second) and any(
        name.endswith(")") and len(name) > 1 for name in (first, second)
    )


def _whole_unit(scalar: Scalar) -> Scalar:
    """`90^\\circ` or `50\\%` as a number with a unit."""
    expr = scalar.expr
    if scalar.unit is None and isinstance(expr, Call) and expr.name in ("deg", "percent"):
        return Scalar(expr.args[0], DEGREE if expr.name == "deg" else PERCENT)
    return scalar


def _converted(scalar: Scalar, other: Unit) -> Expr:
    """The value in base units; unchanged if only one of the two has a known unit."""
    assert scalar.unit is not None
    if not (scalar.unit.dimensions and other.dimensions) or scalar.unit.factor == other.factor:
        return scalar.expr
    if isinstance(scalar.expr, Num):
        return Num(scalar.expr.value * scalar.unit.factor)
    return Call("mul", (scalar.expr, Num(scalar.unit.factor)))
