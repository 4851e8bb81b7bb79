"""Tokens of a step chosen by their entropy, or by how much they move it: pure functions.

| rule | tokens | source |
|---|---|---|
| entropy_share | those of the highest entropies keep their advantage, the others get 0 | arXiv:2506.01939 |
| clip_cov | a random few of a large covariance get 0 | Clip-Cov, arXiv:2505.22617 |
| kl_cov | those of the largest covariances pay for moving from the proximal policy | KL-Cov, the same |

The covariance of a token is (its log-prob - the mean) x (its advantage - the mean): a high one
lowers the entropy. All are of the policy at the step's beginning, and of the whole step: ranks
share histograms, never tokens, so that the choice depends neither on the layout nor on
micro-batches.
"""

# Shape legend: N sampled tokens of this rank.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Summed = Callable[[Tensor], Tensor]
"""Sum of a tensor over all ranks that have tokens of their own; a collective."""

_BINS = 2**16


@dataclass(frozen=True)
class TokenRules:
    """Rules by which tokens are chosen; None: no such rule.

    A share is of all tokens of the step, and stands for at least one."""

    entropy_share: float | None = None
    clip_cov: float | None = None
    """Share of the tokens whose advantage becomes 0.

    They are drawn among those with a covariance from `clip_low` to `clip_high`."""
    clip_low: float = 1.0
    clip_high: float = 5.0
    kl_cov: float | None = None
    kl_coef: float = 1.0
    """Weight of abs(log policy - log proximal) at the tokens of `kl_cov`."""


@dataclass(frozen=True)
class ChosenTokens:
    """What the rules say of this rank's tokens."""

    learned_N: Bool[Tensor, "N"]
    """Tokens whose advantage counts; it is 0 for others, whose other parts of the loss stay."""
    penalty_N: Float[Tensor, "N"]
    """Weight of abs(log policy - log proximal) in the loss."""


def chosen_tokens(
    rules: TokenRules,
    entropy_N: Float[Tensor, "N"],
    logprobs_N: Float[Tensor, "N"],
    advantages_N: Float[Tensor, "N"],
    uniform_N: Float[Tensor, "N"] | None,
    summed: Summed,
) -> ChosenTokens:
    """What the rules choose, from entropies and log-probs (nats).

    `uniform_N` are random numbers from 0 to 1, which only `clip_cov` needs. A collective."""
    learned_N = torch.ones_like(logprobs_N, dtype=torch.bool)
    penalty_N = torch.zeros_like(logprobs_N)
    if rules.entropy_share is not None:
        learned_N &= among_largest(entropy_N, rules.entropy_share, summed)
    if rules.clip_cov is not None or rules.kl_cov is not None:
        covariance_N = covariances(logprobs_N, advantages_N, summed)
        if rules.clip_cov is not None:
            assert uniform_N is not None
            inside_N = (covariance_N >= rules.clip_low) & (covariance_N <= rules.clip_high)
            drawn_N = among_largest(torch.where(inside_N, uniform_N, -1.0), rules.clip_cov, summed)
            learned_N &= ~(inside_N & drawn_N)
        if rules.kl_cov is not None:
            penalty_N[among_largest(covariance_N, rules.kl_cov, summed)] = rules.kl_coef
    return ChosenTokens(learned_N, penalty_N)


def covariances(
    logprobs_N: Float[Tensor, "N"], advantages_N: Float[Tensor, "N"], summed: Summed
) -> Float[Tensor, "N"]:
    """(log-prob - mean) x (advantage - mean) with means over the tokens of all ranks, in float64.

    A collective."""
    both_2N = torch.stack((logprobs_N, advantages_N)).double()
    sums = summed(torch.cat((both_2N.sum(1), both_2N.new_tensor([both_2N.shape[1]]))))
    return (both_2N - (sums[:2] / sums[2].clamp(min=1.0))[:, None]).prod(0)


def among_largest(values_N: Float[Tensor, "N"], share: float, summed: Summed) -> Bool[Tensor, "N"]:
    """Whether a value is among the largest of all ranks, exactly as float32.

    These are int(share x their number) values, at least one, and whatever equals the smallest of
    them. A collective.

    >>> among_largest(torch.tensor([3.0, 1.0, 2.0, 2.0]), 0.5, summed=lambda one: one).tolist()
    [True, False, True, True]
    """
    keys_N = _ordered_keys(values_N)
    high_N = keys_N // _BINS
    low_N = keys_N % _BINS
    counts_by_high = summed(torch.bincount(high_N, minlength=_BINS))
    total = int(counts_by_high.sum())
    if total == 0:
        return torch.ones_like(values_N, dtype=torch.bool)
    high, rank_in_bin = _bin_of(counts_by_high, max(1, int(share * total)))
    low, _ = _bin_of(summed(torch.bincount(low_N[high_N == high], minlength=_BINS)), rank_in_bin)
    return keys_N >= high * _BINS + low


def _ordered_keys(values_N: Float[Tensor, "N"]) -> Tensor:
    """Numbers from 0 to 2^32 - 1 in the order of the values as float32; a NaN is the largest."""
    plain_N = torch.where(values_N.isnan(), torch.inf, values_N.float()) + 0.0  # -0 becomes 0
    bits_N = plain_N.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    return torch.where(bits_N >= 2**31, 2**32 - 1 - bits_N, bits_N + 2**31)


def _bin_of(counts: Tensor, rank: int) -> tuple[int, int]:
    """The bin of the value of this rank, and its rank within the bin.

    Ranks are counted from the largest value and from 1."""
    above = counts.flip(0).cumsum(0)
    index = int(torch.searchsorted(above, rank))
    before = int(above[index - 1]) if index else 0
    return len(counts) - 1 - index, rank - before
