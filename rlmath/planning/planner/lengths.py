"""Lengths of a step's completions: a log-normal distribution, cut off at the longest length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

SPREAD = 0.78
"""Standard deviation of the logarithm of a length that is not cut off.

It is from the one step log in the documents of AReaL (7B, six steps of 16,384 completions, longest
16,384 tokens): mean 7,834, 12.4% cut off."""
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Lengths:
    """Lengths of completions in tokens: exp(N(log(median), spread)), cut off at `longest`."""

    median: float
    spread: float
    longest: int

    def at(self, share: float) -> float:
        """The length that a share of all completions does not exceed (tokens); 0 < share < 1."""
        return max(
            1.0, min(self.longest, self.median * math.exp(self.spread * _NORMAL.inv_cdf(share)))
        )

    @property
    def truncated(self) -> float:
        """Share of completions that are cut off."""
        return 1 - _NORMAL.cdf(self._cut)

    @property
    def mean(self) -> float:
        return self.moment(1)

    def moment(self, power: int) -> float:
        """Mean of length ** power: of what lies below the longest, and of what is cut off there."""
        shift = power * self.spread
        below = self.median**power * math.exp(shift * shift / 2) * _NORMAL.cdf(self._cut - shift)
        return below + self.longest**power * self.truncated

    @property
    def _cut(self) -> float:
        """The longest length in deviations from the median."""
        return math.log(self.longest / self.median) / self.spread


def lengths_with_mean(mean: float, longest: int, spread: float = SPREAD) -> Lengths:
    """The distribution whose mean, with what is cut off, is `mean` tokens.

    ValueError where no lengths have that mean.

    >>> round(lengths_with_mean(8000, 16384).truncated, 2)
    0.13
    """
    if not 1 <= mean <= longest:
        raise ValueError(
            f"the mean completion is {mean:g} tokens; needed: from 1 to the longest, {longest} "
            "(--mean-response-tokens, rollout.max_new_tokens)"
        )
    lowest_log = math.log(mean) - 2 * spread * spread - 1
    highest_log = math.log(longest) + 8 * spread
    for _ in range(60):
        middle_log = (lowest_log + highest_log) / 2
        if Lengths(math.exp(middle_log), spread, longest).mean < mean:
            lowest_log = middle_log
        else:
            highest_log = middle_log
    return Lengths(math.exp(highest_log), spread, longest)


@dataclass(frozen=True)
class Batch:
    """The sequences of a step."""

    sequences: int
    group: int
    """Completions of one prompt."""
    prompt_tokens: float
    """Mean length of a prompt."""
    lengths: Lengths
    """Sampled tokens of completions."""
    given_tokens: float = 0.0
    """Mean tokens of a completion that tools gave it."""
    calls: float = 0.0
    """Mean calls of tools in a completion."""

    @property
    def tokens(self) -> float:
        """Tokens of prompts and completions, a prompt counted with each of its completions."""
        return self.sequences * (self.prompt_tokens + self.given_tokens + self.lengths.mean)

    @property
    def squares(self) -> float:
        """Sum of the squares of the sequences' lengths.

        Prompts are taken to be of one length, and all completions to be given equally much."""
        unsampled = self.prompt_tokens + self.given_tokens
        mean = self.lengths.mean
        return self.sequences * (
            unsampled * unsampled + 2 * unsampled * mean + self.lengths.moment(2)
        )
