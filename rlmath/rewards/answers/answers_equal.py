"""Two answers compared, whatever they are."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

from rlmath.rewards.answers.equivalence import Comparison, names_agree, same_antiderivative
from rlmath.rewards.answers.evaluate import symbols, worth
from rlmath.rewards.answers.interpret_relations import views
from rlmath.rewards.answers.normalize import NotMathematics
from rlmath.rewards.answers.syntax_tree import Answer, Call, Num, Sym


def same_answer(gold: Answer, answer: Answer, protocol: bool = False) -> bool:
    """Whether two parsed answers are equal. `protocol`: see `expressions.same_number`.

    Raises NotMathematics or Unsupported where that cannot be said.
    """
    one, other = views(gold), views(answer)
    if Comparison(protocol).same(one, other):
        return True
    if one.scalar is None or other.scalar is None or not names_agree(one.name, other.name):
        return False
    return same_antiderivative(one.scalar.expr, other.scalar.expr)


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
