"""Rewards from verifier results, and penalties for overlong completions.

The schemes are those of AReaL, SimpleRL and the papers of objectives."""

from __future__ import annotations

from rlmath.config.schema import RewardConfig

WRONG_ANSWER = {"correctness": -1.0, "plus_minus_one": -1.0, "zero_one": 0.0}
"""Schemes that ask for no box, by what a wrong answer gets."""


def raw_reward(settings: RewardConfig, correct: bool, boxed: bool) -> float:
    """The reward by `reward.scheme`, before bias and scaling (docs/rewards.md has the table)."""
    if settings.scheme in WRONG_ANSWER:
        return 1.0 if correct else WRONG_ANSWER[settings.scheme]
    if boxed:
        return 1.0 if correct else -0.5
    return 0.5 if correct and settings.scheme == "independent" else settings.format_penalty


def reward_scale(settings: RewardConfig, verified: bool) -> float:
    """The factor of a raw reward; `verified`: correctness is a part of it."""
    if settings.output_scaling is not None:
        return settings.output_scaling
    return 5.0 if verified and settings.scheme == "correctness" else 1.0


def scaled_reward(
    settings: RewardConfig, raw: float, verified: bool, length: int, limit: int, truncated: bool
) -> float:
    """The reward of a completion of `length` tokens, of at most `limit`.

    It is (raw - bias) * scaling - overlong penalty.

    `raw` is what `raw_reward` or the user's function gives, or a weighted sum; `verified` is as in
    `reward_scale`.

    >>> scaled_reward(RewardConfig(), 1.0, verified=True, length=90, limit=100, truncated=False)
    5.0
    """
    if truncated and settings.mask_no_eos_with_zero:
        return 0.0
    scaled = (raw - settings.output_bias) * reward_scale(settings, verified)
    return scaled - settings.overlong_penalty * overlong_share(
        length, limit, settings.overlong_buffer
    )


def overlong_share(length: int, limit: int, buffer: int) -> float:
    """The used share (0 to 1) of the last `buffer` tokens before the limit.

    Source: DAPO, arXiv:2503.14476, section 3.4.

    >>> overlong_share(length=90, limit=100, buffer=20)
    0.5
    """
    if buffer <= 0:
        return 0.0
    return min(1.0, max(0.0, (length - (limit - buffer)) / buffer))
