"""Rewards from verifier results: the schemes of AReaL and SimpleRL, and penalties for overlong completions."""

from __future__ import annotations

from dataclasses import dataclass

from rlmath.config.schema import RewardConfig


@dataclass(frozen=True)
class Scheme:
    """Converts a verifier result to a reward: (raw reward of the scheme - bias) * scaling - overlong penalty.

    >>> Scheme("correctness").reward(1.0, verified=True, length=90, limit=100, truncated=False)
    5.0
    """

    name: str = "correctness"
    """"correctness": +1 or -1 (AReaL). "mix" and "independent": SimpleRL's, see `raw_reward`."""
    format_penalty: float = -1.0
    """Raw reward of an answer without a box (SimpleRL's FORMAT_PENALTY_VALUE). "correctness" ignores it."""
    output_scaling: float | None = None
    """AReaL's reward_output_scaling. None: 5 for "correctness", so that it gives +5 and -5, else 1."""
    output_bias: float = 0.0
    """AReaL's reward_output_bias, subtracted before scaling."""
    mask_no_eos_with_zero: bool = False
    """A completion cut off at the length limit gets 0, right or wrong (AReaL)."""
    overlong_buffer: int = 0
    """Length of the interval before the limit in which the penalty grows from 0 (tokens; DAPO, arXiv:2503.14476,
    section 3.4); 0: no penalty."""
    overlong_penalty: float = 1.0
    """Penalty at the limit; it grows linearly over the buffer."""

    @classmethod
    def of(cls, reward: RewardConfig) -> Scheme:
        """The scheme that the settings name."""
        return cls(
            reward.scheme,
            reward.format_penalty,
            reward.output_scaling,
            reward.output_bias,
            reward.mask_no_eos_with_zero,
            reward.overlong_buffer,
            reward.overlong_penalty,
        )

    def scale(self, verified: bool) -> float:
        """What a raw reward is multiplied by; `verified`: correctness is a part of it."""
        if self.output_scaling is not None:
            return self.output_scaling
        return 5.0 if verified and self.name == "correctness" else 1.0

    def reward(self, raw: float, verified: bool, length: int, limit: int, truncated: bool) -> float:
        """The reward of a completion of `length` tokens, of at most `limit`.

        `raw` is what `raw_reward` or the user's function gives, or a weighted sum; `verified` is as in `scale`.
        """
        if truncated and self.mask_no_eos_with_zero:
            return 0.0
        scaled = (raw - self.output_bias) * self.scale(verified)
        return scaled - self.overlong_penalty * overlong_share(length, limit, self.overlong_buffer)


def raw_reward(name: str, correct: bool, boxed: bool, format_penalty: float) -> float:
    """The reward before bias and scaling.

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
    """The share of the last `buffer` tokens before the limit that a completion uses, from 0 to 1.

    >>> overlong_share(length=90, limit=100, buffer=20)
    0.5
    """
    if buffer <= 0:
        return 0.0
    return min(1.0, max(0.0, (length - (limit - buffer)) / buffer))
