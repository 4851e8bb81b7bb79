"""From verdicts to rewards."""

from __future__ import annotations

from rlmath.rewards.verify import Verdict
from rlmath.types import Score

CORRECT = 5.0
WRONG = -5.0


def correctness(verdict: Verdict, correct: float = CORRECT, wrong: float = WRONG) -> float:
    """`correct` for a right answer, `wrong` for every other: wrong, missing, or not to be checked.

    The defaults are those of the AReaL recipes (+5 and -5).
    """
    return correct if verdict.correct else wrong


def score(verdict: Verdict, correct: float = CORRECT, wrong: float = WRONG) -> Score:
    """The record that goes with the completion."""
    return Score(correctness(verdict, correct, wrong), verdict.correct, verdict.extracted, verdict.verdict)
