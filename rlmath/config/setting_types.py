"""Types of settings: ranges of numbers, and texts that may name a function of the user's."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Range:
    """Finite numbers from `low` to `high`, without an end that is open."""

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    why: str = ""
    """Printed with the range when a value is outside."""

    def holds(self, value: float) -> bool:
        """Whether the value lies in the range.

        NaN, infinities and what has more than 63 bits never do."""
        if isinstance(value, int) and abs(value) >= 2**63:
            return False
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return math.isfinite(value) and above and below

    def needed(self, values: Collection[float]) -> str:
        """The needed values, where `values` were got and some lie outside.

        >>> Range(0).needed([math.inf]), Range(0).needed([-1])
        ('a finite number, at least 0', 'at least 0')
        """
        if any(isinstance(value, int) and abs(value) >= 2**63 for value in values):
            return f"{self}, of at most 63 bits"
        bounded = self.low > -math.inf or self.high < math.inf
        return (
            f"a finite number, {self}"
            if bounded and not all(map(math.isfinite, values))
            else str(self)
        )

    def __str__(self) -> str:
        """ "above 0, at most 1"."""
        if self.low == self.high:
            return f"{self.low:g}"
        low = (
            f"{'above' if self.open_low else 'at least'} {self.low:.10g}"
            if self.low > -math.inf
            else ""
        )
        high = (
            f"{'below' if self.open_high else 'at most'} {self.high:.10g}"
            if self.high < math.inf
            else ""
        )
        return ", ".join(filter(None, (low, high))) or "a finite number"


@dataclass(frozen=True)
class TakesFunction:
    """Mark of a text setting that also takes a function of the user's.

    `kind` is its kind in `rlmath.workers.hooks`."""

    kind: str


@dataclass(frozen=True)
class NamedValues:
    """Mark of a list of texts "name=value" that may be written as a mapping.

    The values are JSON or plain texts."""


@dataclass(frozen=True)
class Words:
    """Words that a text setting may be, where it is not a Literal."""

    words: tuple[str, ...]


PositiveInt = Annotated[int, Range(1)]
NonNegativeInt = Annotated[int, Range(0)]
PositiveFloat = Annotated[float, Range(0, open_low=True)]
NonNegativeFloat = Annotated[float, Range(0)]
FiniteFloat = Annotated[float, Range(-math.inf)]
Fraction = Annotated[float, Range(0, 1)]
PositiveFraction = Annotated[float, Range(0, 1, open_low=True)]
FractionBelowOne = Annotated[float, Range(0, 1, open_high=True)]
Seconds = Annotated[float, Range(0, 30 * 86400, open_low=True)]
HeartbeatSeconds = Annotated[float, Range(5, 30 * 86400, why="Ranks beat once a second.")]
