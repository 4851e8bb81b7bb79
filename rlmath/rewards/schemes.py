"""From verdicts to rewards: the schemes of AReaL and SimpleRL, and what becomes of answers that are too long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from rlmath.algorithms.types import Score
from rlmath.rewards.custom_function import FunctionResult
from rlmath.rewards.verifier import FAILURES, Verdict

SchemeName = Literal["correctness", "mix", "independent"]
SCHEMES: tuple[str, ...] = get_args(SchemeName)


@dataclass(frozen=True)
class Scheme:
    """How a verdict becomes a reward: (raw reward of the scheme - bias) * scaling, then what length costs.

    >>> Scheme("correctness").reward(Verdict(True, "5", "string"), boxed=True, length=90, limit=100, truncated=False)
    5.0
    """

    name: SchemeName = "correctness"
    """"correctness": +1 or -1 (AReaL). "mix" and "independent": SimpleRL's, see `raw_reward`."""
    format_penalty: float = -1.0
    """Raw reward of an answer without a box (SimpleRL's FORMAT_PENALTY_VALUE). "correctness" does not look at it."""
    output_scaling: float | None = None
    """AReaL's reward_output_scaling. None: 5 for "correctness", so that it gives +5 and -5, else 1."""
    output_bias: float = 0.0
    """AReaL's reward_output_bias, subtracted before scaling."""
    mask_no_eos_with_zero: bool = False
    """A completion cut off at the length limit gets 0, right or wrong (AReaL)."""
    overlong_buffer: int = 0
    """Tokens before the limit in which length begins to cost (DAPO, arXiv:2503.14476, section 3.4); 0: none."""
    overlong_penalty: float = 1.0
    """What the full length costs; in between it grows evenly."""

    @property
    def scaling(self) -> float:
        if self.output_scaling is not None:
            return self.output_scaling
        return 5.0 if self.name == "correctness" else 1.0

    def reward(self, verdict: Verdict, boxed: bool, length: int, limit: int, truncated: bool) -> float:
        """The reward of a completion of `length` tokens, of at most `limit`."""
        raw = raw_reward(self.name, verdict.correct, boxed, self.format_penalty)
        return self._after_length((raw - self.output_bias) * self.scaling, length, limit, truncated)

    def function_reward(self, number: float, length: int, limit: int, truncated: bool) -> float:
        """The same for the number of a function of the user's: scaling applies where it was set."""
        scaling = 1.0 if self.output_scaling is None else self.output_scaling
        return self._after_length((number - self.output_bias) * scaling, length, limit, truncated)

    def _after_length(self, reward: float, length: int, limit: int, truncated: bool) -> float:
        if truncated and self.mask_no_eos_with_zero:
            return 0.0
        return reward - self.overlong_penalty * overlong_share(length, limit, self.overlong_buffer)


def raw_reward(name: SchemeName, correct: bool, boxed: bool, format_penalty: float) -> float:
    """The scheme's own number.

    "correctness" gives 1 or -1. SimpleRL's "mix" gives 1 or -0.5, and `format_penalty` to whatever has no box;
    "independent" gives 1 (right, boxed), 0.5 (right, no box), -0.5 (wrong, boxed) or `format_penalty`.
    """
    if name == "correctness":
        return 1.0 if correct else -1.0
    if name == "mix":
        return (1.0 if correct else -0.5) if boxed else format_penalty
    if correct:
        return 1.0 if boxed else 0.5
    return -0.5 if boxed else format_penalty


def overlong_share(length: int, limit: int, buffer: int) -> float:
    """How far a length is into the last `buffer` tokens before the limit, from 0 to 1.

    >>> overlong_share(length=90, limit=100, buffer=20)
    0.5
    """
    if buffer <= 0:
        return 0.0
    return min(1.0, max(0.0, (length - (limit - buffer)) / buffer))


def score(scheme: Scheme, verdict: Verdict, boxed: bool, length: int, limit: int, truncated: bool) -> Score:
    """The record that goes with a judged completion."""
    reward = scheme.reward(verdict, boxed, length, limit, truncated)
    return Score(reward, verdict.correct, verdict.extracted, verdict.verdict, boxed)


def function_score(
    scheme: Scheme,
    result: FunctionResult,
    worst: float,
    boxed: bool,
    length: int,
    limit: int,
    truncated: bool,
) -> Score:
    """The record that goes with a completion that the user's function rewarded; one that it could not, gets `worst`.

    It counts as correct where the function says so in a metric "correct", else where its reward is above 0.
    """
    if result.failure in FAILURES:
        reward = scheme.function_reward(worst, length, limit, truncated)
        return Score(reward, False, result.message, str(result.failure), boxed)
    reward = scheme.function_reward(result.reward, length, limit, truncated)
    correct = dict(result.metrics).get("correct", result.reward) > 0
    return Score(reward, correct, "", "function", boxed, result.metrics)
