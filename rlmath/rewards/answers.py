"""Two answers compared, whatever they are."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

from rlmath.rewards.comparison import Comparison
from rlmath.rewards.expressions import symbols, worth
from rlmath.rewards.notation import NotMathematics
from rlmath.rewards.relations import views
from rlmath.rewards.tree import Answer, Call, Num, Sym


def same_answer(gold: Answer, answer: Answer, protocol: bool = False) -> bool:
    """Whether two parsed answers are equal. `protocol`: see `expressions.same_number`.

    Raises NotMathematics or Unsupported where that cannot be said.
    """
    return Comparison(protocol).same(views(gold), views(answer))


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
