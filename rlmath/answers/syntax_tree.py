"""The syntax tree of an answer: expressions, and the kinds of answers that consist of them."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from rlmath.answers.units import Unit

# ---------------------------------------------------------------- expressions


@dataclass(frozen=True)
class Num:
    """A number."""

    value: Fraction
    digits: int | None = None
    """Significant digits, if it was written with a decimal point."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.value, self.digits)))

    def __hash__(self) -> int:  # kept: expressions are looked up often
        return self._hash  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Sym:
    """A letter or other symbol."""

    name: str


@dataclass(frozen=True)
class Call:
    """An operation or function with its arguments.

    Names are "add", "mul", "div", "pow", "neg", "pm", "sqrt", "sin", "pi" (no arguments) ..."""

    name: str
    args: tuple[Expr, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.name, self.args)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]


Expr = Num | Sym | Call

# ---------------------------------------------------------------- answers


@dataclass(frozen=True)
class Scalar:
    """An expression, with a unit perhaps."""

    expr: Expr
    unit: Unit | None = None
    otherwise: Scalar | None = None
    """A second reading: `5 m` is 5 metres or the product of 5 and m."""


DOTS = Scalar(Sym("\\ldots"))
"""An item of a list that stands for others: `1, 2, ..., n`."""


@dataclass(frozen=True)
class Group:
    """Items in brackets, or a ratio: a point, an interval, a vector."""

    opening: str
    items: tuple[Answer, ...]
    closing: str
    computed: bool = False
    """Whether it is written as a sum or multiple of points: `(1, 2) + t(3, 4)`."""


@dataclass(frozen=True)
class SetOf:
    """A set of listed members."""

    items: tuple[Answer, ...]


@dataclass(frozen=True)
class Listing:
    """A list of items without brackets."""

    items: tuple[Answer, ...]
    joiner: str
    """"," "and" or "or"."""


@dataclass(frozen=True)
class Relation:
    """A chain of relations: `sides[0] ops[0] sides[1] ...`.

    The ops are "=", "<", "<=", ">", ">=", "!=", "~", "in" and "==" (an open congruence). A
    congruence has the one op "mod"; its sides are [left side,] residue and modulus."""

    sides: tuple[Answer, ...]
    ops: tuple[str, ...]


@dataclass(frozen=True)
class Name:
    """The name that a value is assigned to: `x`, `f(x)`, `m_{max}`, `(x, y)`."""

    text: str
    expr: Expr | None = None
    """The name as an expression, if it is one."""


@dataclass(frozen=True)
class SetOperation:
    """An operation on sets."""

    op: str
    """"union", "intersection" or "without"."""
    parts: tuple[Answer, ...]


@dataclass(frozen=True)
class MatrixOf:
    """A matrix by its rows."""

    rows: tuple[tuple[Expr, ...], ...]


@dataclass(frozen=True)
class NamedSet:
    """A set with a name: "R", "Z", "N", "Q", "C" or "empty", or a part of one.

    "Z+" and "R+" are the positive numbers, "Z0" and "R0" those that are not negative."""

    name: str


@dataclass(frozen=True)
class SetBuilder:
    """The real or whole numbers that satisfy a condition: `{x | condition}`."""

    name: str
    condition: Answer
    whole: bool = False


@dataclass(frozen=True)
class Piecewise:
    """A piecewise function: (value, condition) in any order."""

    branches: tuple[tuple[Expr, str], ...]


AnySet = SetOf | SetOperation | NamedSet | SetBuilder
Answer = Scalar | Group | Listing | Relation | Name | MatrixOf | Piecewise | AnySet
