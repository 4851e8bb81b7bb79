"""Compares the interpretations of two answers: they are equal if one kind of interpretation is equal in both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from itertools import chain
from operator import eq
from typing import Any

from rlmath.rewards.answers.evaluate import (
    is_constant,
    proportion,
    same_expression,
    same_number,
    symbols,
    value_of,
)
from rlmath.rewards.answers.real_sets import RealSet
from rlmath.rewards.answers.syntax_tree import Call, Expr, MatrixOf, Num, Scalar, Sym
from rlmath.rewards.answers.units import DEGREE, PERCENT, RADIAN, Unit, compatible

Family = tuple[str, str, tuple[Expr, ...]]
Residue = tuple[Expr, Expr, Expr]
Branches = tuple[tuple[Expr, str], ...]


@dataclass(frozen=True)
class Interpretations:
    """The interpretations of an answer; None for those that it does not have."""

    scalar: Scalar | None = None
    name: str | None = None
    """What its value is assigned to: "x" in x = 5."""
    row: tuple[Interpretations, ...] | None = None
    """Ordered items: a point, a vector, the sides of a ratio."""
    brackets: str = ""
    """Of the row: "()", "[)", ..., "::" for a ratio, "matrix", or "" for a bare list."""
    members: tuple[Interpretations, ...] | None = None
    """Unordered items."""
    is_set: bool = False
    """Whether repeated members count once."""
    real_set: RealSet | None = None
    difference: Expr | None = None
    """Left side minus right side of an equation or inequality."""
    sign: str = ""
    """Of the relation: "=", "<" or "<=" (flipped so that it points left), or "solved x" for an inequality in x."""
    matrix: MatrixOf | None = None
    named_set: str | None = None
    family: Family | None = None
    """(set of the parameter, its letter, values): the union of the values over all parameters."""
    residue: Residue | None = None
    """Both sides and the modulus of a congruence."""
    branches: Branches | None = None
    """(value, condition) of a function by cases."""
    pairs: tuple[tuple[str, Interpretations], ...] | None = None
    """Several names with their values: x = 1, y = 2."""
    also: tuple[Interpretations, ...] = ()
    """Further readings, such as the rounded value of `x = \\pi \\approx 3.14`."""


@dataclass(frozen=True)
class Equivalence:
    protocol: bool

    def same(self, gold: Interpretations, answer: Interpretations) -> bool:
        """Whether any interpretation of one equals the same kind of interpretation of the other."""
        if any(self.same(reading, answer) for reading in gold.also):
            return True
        rounded = gold.scalar is not None and isinstance(gold.scalar.expr, Num) and gold.scalar.expr.digits
        if rounded and any(self.same(gold, reading) for reading in answer.also):
            return True
        if self._same_relation(gold, answer):
            return True
        if not names_agree(gold.name, answer.name):
            return False
        if gold.sign.startswith("solved") and answer.sign.startswith("solved") and gold.sign != answer.sign:
            return False
        if gold.pairs is not None and answer.pairs is not None:
            return len(gold.pairs) == len(answer.pairs) and all(
                name == other and self.same(one, two)
                for (name, one), (other, two) in zip(gold.pairs, answer.pairs, strict=True)
            )
        if self._same_scalar(gold.scalar, answer.scalar):
            return True
        if self._same_row(gold, answer) or self._same_members(gold, answer):
            return True
        others: dict[str, Callable[[Any, Any], bool]] = {
            "real_set": RealSet.same,
            "matrix": self._same_matrix,
            "family": _same_family,
            "branches": _same_branches,
            "residue": _same_residue,
            "named_set": eq,
        }
        kinds = [(getattr(gold, kind), getattr(answer, kind), same) for kind, same in others.items()]
        return any(a is not None and b is not None and same(a, b) for a, b, same in kinds)

    def _same_relation(self, gold: Interpretations, answer: Interpretations) -> bool:
        if gold.sign != answer.sign or gold.difference is None or answer.difference is None:
            return False
        if gold.name is not None and gold.scalar is not None and not symbols(gold.scalar.expr):
            return False  # x = 2 needs a value, not 2x + 3 = 7
        if symbols(gold.difference) != symbols(answer.difference):
            return False
        ratio = proportion(gold.difference, answer.difference)
        return ratio is not None and (gold.sign == "=" or ratio > 0)

    def _same_scalar(self, gold: Scalar | None, answer: Scalar | None) -> bool:
        if gold is None or answer is None:
            return False
        return (
            self._same_quantity(gold, answer)
            or self._same_scalar(gold.otherwise, answer)
            or self._same_scalar(gold, answer.otherwise)
        )

    def _same_quantity(self, gold: Scalar, answer: Scalar) -> bool:
        gold, answer = _whole_unit(gold), _whole_unit(answer)
        if gold.unit is None and answer.unit is None:
            return self._same_expr(gold.expr, answer.expr)
        if gold.unit is None or answer.unit is None:
            with_unit, bare = (gold, answer) if answer.unit is None else (answer, gold)
            assert with_unit.unit is not None
            in_degrees = with_unit.unit.dimensions == DEGREE.dimensions and not with_unit.unit.nouns
            if in_degrees and same_expression(bare.expr, Call("deg", (with_unit.expr,))):
                return True
            if with_unit.unit == PERCENT and self._same_expr(bare.expr, Call("percent", (with_unit.expr,))):
                return True
            return self._same_expr(gold.expr, answer.expr)
        if (gold.unit, answer.unit) in ((DEGREE, RADIAN), (RADIAN, DEGREE)):
            angles = [Call("deg", (a.expr,)) if a.unit == DEGREE else a.expr for a in (gold, answer)]
            return same_expression(*angles)
        if not compatible(gold.unit, answer.unit):
            return False
        return self._same_expr(_converted(gold, answer.unit), _converted(answer, gold.unit))

    def _same_expr(self, gold: Expr, answer: Expr) -> bool:
        if symbols(gold) or symbols(answer):
            return same_expression(gold, answer)
        if same_number(gold, answer, self.protocol):
            return True
        if not self.protocol:
            return False
        hundredfold = Call("mul", (answer, Num(Fraction(100))))
        return same_number(gold, hundredfold, True) or same_number(gold, Call("percent", (answer,)), True)

    def _same_row(self, gold: Interpretations, answer: Interpretations) -> bool:
        if gold.row is None or answer.row is None or len(gold.row) != len(answer.row):
            return False
        if "matrix" in (gold.brackets, answer.brackets) and gold.brackets == answer.brackets:
            return False  # compared as matrices
        if "::" in (gold.brackets, answer.brackets):
            return gold.brackets == answer.brackets and self._same_ratio(gold.row, answer.row)
        differ = gold.brackets and answer.brackets and gold.brackets != answer.brackets
        if differ and "matrix" not in (gold.brackets, answer.brackets):
            return False
        if not gold.brackets and not answer.brackets:
            return False  # two lists without brackets have no order
        return all(self.same(one, other) for one, other in zip(gold.row, answer.row, strict=True))

    def _same_ratio(self, gold: Sequence[Interpretations], answer: Sequence[Interpretations]) -> bool:
        """Whether all sides are in proportion, with zeros in the same places and at least one nonzero side."""
        pairs = [(one.scalar, other.scalar) for one, other in zip(gold, answer, strict=True)]
        sides = [(one.expr, other.expr) for one, other in pairs if one is not None and other is not None]
        zero = Num(Fraction(0))
        empty = [(same_expression(one, zero), same_expression(other, zero)) for one, other in sides]
        misplaced = any(one != other for one, other in empty)
        if len(sides) < len(pairs) or misplaced or all(one for one, _ in empty):
            return False
        pivot, base = next(side for side, (is_zero, _) in zip(sides, empty, strict=True) if not is_zero)
        return all(
            same_expression(Call("mul", (one, base)), Call("mul", (other, pivot))) for one, other in sides
        )

    def _same_members(self, gold: Interpretations, answer: Interpretations) -> bool:
        if gold.members is None and answer.members is None:
            return False
        ours = gold.members if gold.members is not None else single_member(gold)
        theirs = answer.members if answer.members is not None else single_member(answer)
        if ours is None or theirs is None:
            return False
        if not (gold.is_set or answer.is_set):
            return _can_be_paired(ours, theirs, self._same_member)
        return all(
            any(self._same_member(one, other) for other in others)
            for members, others in ((ours, theirs), (theirs, ours))
            for one in members
        )

    def _same_member(self, one: Interpretations, other: Interpretations) -> bool:
        """Members are compared as they are: {1} inside a set is not 1."""
        return (one.members is None) == (other.members is None) and self.same(one, other)

    def _same_matrix(self, gold: MatrixOf, answer: MatrixOf) -> bool:
        if len(gold.rows) != len(answer.rows) or len(gold.rows[0]) != len(answer.rows[0]):
            return False
        pairs = zip(chain(*gold.rows), chain(*answer.rows), strict=True)
        return all(self._same_expr(one, other) for one, other in pairs)


def single_member(value: Interpretations) -> tuple[Interpretations, ...] | None:
    """A value, point or interval as a set of one member; None for anything else."""
    return (value,) if value.scalar is not None or (value.row is not None and value.brackets) else None


def _can_be_paired(ours: Sequence[Any], theirs: Sequence[Any], same: Callable[[Any, Any], bool]) -> bool:
    """Whether each of ours is the same as a different one of theirs, and all are used; the first match is taken."""
    if len(ours) != len(theirs):
        return False
    left = list(theirs)
    for one in ours:
        found = next((index for index, other in enumerate(left) if same(one, other)), None)
        if found is None:
            return False
        del left[found]
    return True


def _same_family(gold: Family, answer: Family) -> bool:
    """Whether the values can be paired, with the parameter shifted by an integer or negated."""
    if gold[0] != answer[0]:
        return False
    _, name, theirs = answer
    letter = Sym("the parameter")
    ours = [substituted(expr, gold[1], letter) for expr in gold[2]]
    shifts: list[Expr] = [letter]
    if gold[0] == "Z":
        shifts = [
            Call("add", (Call("mul", (Num(Fraction(turn)), letter)), Num(Fraction(shift))))
            for turn in (1, -1)
            for shift in range(-3, 4)
        ]

    def same(one: Expr, other: Expr) -> bool:
        return any(same_expression(one, substituted(other, name, shifted)) for shifted in shifts)

    return _can_be_paired(ours, theirs, same)


def substituted(expr: Expr, name: str, value: Expr) -> Expr:
    """The expression with a symbol replaced by a value."""
    if isinstance(expr, Sym):
        return value if expr.name == name else expr
    if isinstance(expr, Num):
        return expr
    return Call(expr.name, tuple(substituted(arg, name, value) for arg in expr.args))


def same_antiderivative(gold: Expr, answer: Expr) -> bool:
    """Whether both are functions plus a free constant C, and differ by a constant."""
    functions = [_without_constant(expr) for expr in (gold, answer)]
    if functions[0] is None or functions[1] is None or symbols(functions[0]) != symbols(functions[1]):
        return False
    return is_constant(Call("add", (functions[0], Call("neg", (functions[1],)))))


def _without_constant(expr: Expr) -> Expr | None:
    """The function f of `f + C`; None if the constant is not a separate term or may be a coefficient."""
    terms = _summands(expr)
    constants = [term for term in terms if term in (Sym("C"), Sym("c"))]
    others = frozenset().union(*(symbols(term) for term in terms)) - {"C", "c"}
    variables = others & _VARIABLES
    if len(constants) != 1 or not variables or others & _COEFFICIENTS:
        return None
    if constants == [Sym("c")] and len(others) > 1:
        return None
    rest = [term for term in terms if term not in constants]
    if any({"C", "c"} & symbols(term) for term in rest):
        return None
    return reduce(lambda total, term: Call("add", (total, term)), rest, Num(Fraction(0)))


def _summands(expr: Expr) -> list[Expr]:
    if isinstance(expr, Call) and expr.name == "add":
        return [*_summands(expr.args[0]), *_summands(expr.args[1])]
    return [expr]


_VARIABLES = frozenset(("x", "t", "u", "y", "z", "theta", "s", "r"))
_COEFFICIENTS = frozenset(("A", "B", "D", "b", "d"))


def _same_branches(gold: Branches, answer: Branches) -> bool:
    return len(gold) == len(answer) == len({condition for _, condition in answer}) and all(
        any(condition == other and same_expression(value, one) for one, other in answer)
        for value, condition in gold
    )


def _same_residue(gold: Residue, answer: Residue) -> bool:
    """Whether two congruences have the same letter and modulus, and residues that differ by a multiple of it."""
    if gold[0] != answer[0] or not same_expression(gold[2], answer[2]):
        return False
    if same_expression(gold[1], answer[1]):
        return True
    values = [value_of(expr) for expr in (gold[1], answer[1], gold[2]) if not symbols(expr)]
    numbers = [found.value for found in values if found is not None and isinstance(found.value, Fraction)]
    return len(numbers) == 3 and numbers[2] != 0 and (numbers[0] - numbers[1]) % numbers[2] == 0


def names_agree(one: str | None, other: str | None) -> bool:
    """Whether values assigned to these names may be compared; `y` and `f(x)` name the same."""
    if one is None or other is None or one == other:
        return True
    return "y" in (one, other) and any(name.endswith(")") and len(name) > 1 for name in (one, other))


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
