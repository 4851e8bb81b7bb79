"""Advantages from rewards: pure functions in float64.

| kind | advantage of a completion with reward r | source |
|---|---|---|
| "grpo" | (r - group mean) / (group deviation + eps) | GRPO, arXiv:2402.03300 |
| "dr_grpo" | r - group mean | Dr. GRPO, arXiv:2503.20783 |
| "rloo" | r - mean of the others of its group | RLOO, arXiv:2402.14740 |
| "ppo" | r, then normalised over all tokens of the batch | AReaL's PPO without a critic, `adv_norm` |
| "reinforce++" | r - group mean, then normalised likewise | REINFORCE++-baseline, arXiv:2501.03262 |
| "lite_ppo" | (r - group mean) / (deviation of all rewards + eps) | Lite PPO, arXiv:2508.08221 |
| "opo" | r - mean of the group, each weighed by its tokens | OPO, arXiv:2505.23585 |
| "maxrl" | (s - p) / p, s whether r > 0, p the share of the group | MaxRL, arXiv:2602.02710 |
| "pass@k" | k times what r adds to the best of k - 1 others, on average | PKPO, arXiv:2505.15201 |

The last two are estimates of the group, whose expected gradients, over completions of one prompt,
are those of the sum of pass@j / j for j from 1 to G - 1, and of the best reward of k completions
(pass@k, where rewards are 0 and 1). "opo" takes the variance of a completion's gradient to grow
with its tokens.

Several rewards are summed before, or normalised each for itself: `gdpo_advantages` (GDPO,
arXiv:2601.05242).

A group without contrast gets exact zeros from "grpo", "dr_grpo" and "rloo"; so does a completion
that is alone in its group. Groups may be of different sizes: one that was cut short is a smaller
group. A batch without contrast gets exact zeros where it is normalised. A reward that is NaN makes
its group, or the normalised batch, NaN.
"""

# Shape legend: G samples of one group, O its G - 1 others, N samples of the batch, K rewards of a
# sample.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

AdvantageKind = Literal[
    "grpo", "dr_grpo", "rloo", "ppo", "reinforce++", "lite_ppo", "opo", "maxrl", "pass@k"
]
ADVANTAGE_KINDS: tuple[str, ...] = get_args(AdvantageKind)


def advantages(
    rewards: Sequence[Sequence[float]],
    tokens: Sequence[Sequence[int]],
    kind: AdvantageKind,
    eps: float,
    pass_k: int = 2,
) -> list[list[float]]:
    """The advantage of every completion, by group and sample.

    `tokens` are the completions' lengths, the weights of completions in a normalisation over the
    batch, and in the baseline of "opo". `pass_k` is the k of "pass@k".

    >>> advantages([[5.0, -5.0, -5.0, -5.0]], [[1, 1, 1, 1]], "rloo", eps=0.0)
    [[10.0, -3.333333333333333, -3.333333333333333, -3.333333333333333]]
    """
    groups = [torch.tensor(row, dtype=torch.float64) for row in rewards]
    if kind == "opo":
        lengths = [torch.tensor(row, dtype=torch.float64) for row in tokens]
        return [
            length_weighted(rewards_G, tokens_G).tolist()
            for rewards_G, tokens_G in zip(groups, lengths, strict=True)
        ]
    if kind == "pass@k":
        return [best_of_k(row_G, pass_k).tolist() for row_G in groups]
    if kind == "lite_ppo":
        return [row_G.tolist() for row_G in _scaled_by_batch(groups, eps)]
    advantages_of_group = _OF_GROUP[kind]
    by_group = [advantages_of_group(row_G, eps) for row_G in groups]
    if kind not in ("ppo", "reinforce++") or not by_group:
        return [row_G.tolist() for row_G in by_group]
    weights_N = torch.tensor([n for row in tokens for n in row], dtype=torch.float64)
    normalised_N = batch_normalised(torch.cat(by_group), weights_N, eps)
    return [row_G.tolist() for row_G in normalised_N.split([len(row) for row in rewards])]


def centred(rewards_G: Float[Tensor, "G"]) -> Float[Tensor, "G"]:
    """reward - group mean, exact zeros without contrast."""
    return _where_contrast(rewards_G, rewards_G - rewards_G.mean())


def group_normalised(rewards_G: Float[Tensor, "G"], eps: float) -> Float[Tensor, "G"]:
    """(reward - group mean) / (group deviation + eps).

    The deviation is the unbiased one, divided by G - 1.

    >>> group_normalised(torch.tensor([5.0, -5.0]), eps=0.0)
    tensor([ 0.7071, -0.7071])
    """
    if len(rewards_G) < 2:
        return centred(rewards_G)
    return _where_contrast(rewards_G, (rewards_G - rewards_G.mean()) / (rewards_G.std() + eps))


def leave_one_out(rewards_G: Float[Tensor, "G"]) -> Float[Tensor, "G"]:
    """reward - mean of the others, which is G / (G - 1) times the distance from the mean of all."""
    G = len(rewards_G)
    return centred(rewards_G) * (G / max(1, G - 1))


def length_weighted(
    rewards_G: Float[Tensor, "G"], tokens_G: Float[Tensor, "G"]
) -> Float[Tensor, "G"]:
    """reward - mean of the group, in which a completion counts as often as it has tokens."""
    total = tokens_G.sum()
    mean = (tokens_G * rewards_G).sum() / total if total > 0 else rewards_G.mean()
    return _where_contrast(rewards_G, rewards_G - mean)


def likelihood_weighted(rewards_G: Float[Tensor, "G"]) -> Float[Tensor, "G"]:
    """(s - p) / p, where s is 1 if the reward is above 0, else 0, and p is the mean of s.

    Zeros where p is 0.

    >>> likelihood_weighted(torch.tensor([5.0, -5.0, -5.0, -5.0])).tolist()
    [3.0, -1.0, -1.0, -1.0]
    """
    right_G = torch.where(rewards_G.isnan(), rewards_G, (rewards_G > 0).to(rewards_G.dtype))
    return _where_contrast(right_G, (right_G - right_G.mean()) / right_G.mean())


def best_of_k(rewards_G: Float[Tensor, "G"], k: int) -> Float[Tensor, "G"]:
    """k times how far a reward is above the best of k - 1 others, on average over their choices.

    The others are of the same group, and a reward below the best of them counts as 0. In a group
    of fewer than k completions, k is the size of the group.

    >>> best_of_k(torch.tensor([1.0, 0.0, 0.0]), 2).tolist(), best_of_k(torch.tensor([1.0, 1.0, 0.0]), 2).tolist()
    ([2.0, 0.0, 0.0], [1.0, 1.0, 0.0])
    """
    G = len(rewards_G)
    k = min(k, G)
    if k < 2:
        return centred(rewards_G)
    chances = [math.comb(j, k - 2) / math.comb(G - 1, k - 1) for j in range(G - 1)]
    chance_O = rewards_G.new_tensor(
        chances
    )  # that the others' j-th reward, from the least, is the best one
    advantages_G = torch.empty_like(rewards_G)
    for g in range(G):
        others_O = torch.cat((rewards_G[:g], rewards_G[g + 1 :])).sort().values
        advantages_G[g] = k * (chance_O * (rewards_G[g] - others_O).clamp(min=0.0)).sum()
    return advantages_G


def _scaled_by_batch(groups: Sequence[Tensor], eps: float) -> list[Tensor]:
    """Every reward's distance from its group's mean, in deviations of all rewards.

    The deviation is divided by the number of rewards less 1."""
    every_N = torch.cat(list(groups)) if groups else torch.zeros(0)
    scale = every_N.std() + eps if len(every_N) > 1 else torch.ones(())
    return [_where_contrast(row_G, centred(row_G) / scale) for row_G in groups]


def batch_normalised(
    values_N: Float[Tensor, "N"], weights_N: Float[Tensor, "N"], eps: float
) -> Float[Tensor, "N"]:
    """(value - mean) / (deviation + eps), both over all tokens.

    It is AReaL's `masked_normalization`: a completion counts as often as it has tokens, and gets 0
    without any."""
    counted_N = weights_N > 0
    if not counted_N.all():
        normalised_N = torch.zeros_like(values_N)
        if counted_N.any():
            normalised_N[counted_N] = batch_normalised(
                values_N[counted_N], weights_N[counted_N], eps
            )
        return normalised_N
    mean = (weights_N * values_N).sum() / weights_N.sum()
    variance = (weights_N * (values_N - mean).square()).sum() / weights_N.sum()
    return _where_contrast(values_N, (values_N - mean) / (variance.sqrt() + eps))


def gdpo_advantages(
    parts: Sequence[Sequence[Sequence[float | None]]], weights: Sequence[float], eps: float
) -> list[list[float]]:
    """Advantages of several rewards by group and sample (GDPO, arXiv:2601.05242).

    Every reward is normalised in its own group as "grpo" does, their weighted sum over all N
    samples of the batch, whose mean is 0 (the deviation is divided by N - 1). `parts` are the K
    rewards by group and sample, None where one failed, which then adds nothing.

    >>> rewards = [[(1.0, 0.0), (0.0, 0.0)], [(1.0, 1.0), (0.0, None)]]
    >>> advantages_PG = gdpo_advantages(rewards, [1.0, 9.0], eps=0.0)
    >>> [[round(advantage, 3) for advantage in row_G] for row_G in advantages_PG]
    [[0.866, -0.866], [0.866, -0.866]]
    """
    by_group = [_weighted_group(rows, weights, eps) for rows in parts]
    n = sum(len(row_G) for row_G in by_group)
    squares = math.fsum(value * value for row_G in by_group for value in row_G.tolist())
    scale = math.sqrt(squares / (n - 1)) + eps if n > 1 else 0.0
    if squares == 0.0 or scale == 0.0:
        return [[0.0] * len(row_G) for row_G in by_group]
    return [(row_G / scale).tolist() for row_G in by_group]


def _weighted_group(
    rows: Sequence[Sequence[float | None]], weights: Sequence[float], eps: float
) -> Float[Tensor, "G"]:
    """Weighted sum of a group's rewards, each normalised over the samples that have it."""
    sum_G = torch.zeros(len(rows), dtype=torch.float64)
    for k, weight in enumerate(weights):
        indices = [g for g, row in enumerate(rows) if row[k] is not None]
        values = torch.tensor([rows[g][k] for g in indices], dtype=torch.float64)
        sum_G[indices] += weight * group_normalised(values, eps)
    return sum_G


def _where_contrast(rewards_G: Tensor, values_G: Tensor) -> Tensor:
    """`values_G`, or exact zeros where all rewards are the same.

    Rounding must not be divided by itself."""
    if len(rewards_G) and rewards_G.amax() == rewards_G.amin():
        return torch.zeros_like(values_G)
    return values_G


_OF_GROUP: dict[str, Callable[[Tensor, float], Tensor]] = {
    "grpo": group_normalised,
    "dr_grpo": lambda rewards_G, eps: centred(rewards_G),
    "rloo": lambda rewards_G, eps: leave_one_out(rewards_G),
    "ppo": lambda rewards_G, eps: rewards_G,
    "reinforce++": lambda rewards_G, eps: centred(rewards_G),
    "maxrl": lambda rewards_G, eps: likelihood_weighted(rewards_G),
}


# ---------------------------------------------------------------- KL inside of the reward


@dataclass(frozen=True)
class KLTotals:
    """Statistics of one sample for a KL penalty inside of the reward.

    K_t is the KL of token t and of all that follow it (nats)."""

    total: float
    """K of the first token: the KL of the whole completion."""
    mean: float
    """Mean of K_t over the tokens."""
    spread: float
    """Sum over the tokens of the squared distance of K_t from that mean."""


@dataclass(frozen=True)
class ShapedAdvantages:
    """Advantages with KL inside of the reward.

    That of token t of sample i is offsets[i] - slope * K_t."""

    offsets: list[list[float]]
    """Offset of each sample, by group."""
    slope: float


def kl_shaped_advantages(
    rewards: Sequence[Sequence[float]],
    tokens: Sequence[Sequence[int]],
    totals: Sequence[Sequence[KLTotals]],
    kl_coef: float,
    kind: AdvantageKind,
    eps: float,
    pass_k: int = 2,
) -> ShapedAdvantages:
    """Do what `advantages` does, with -kl_coef times its KL added to the reward of every token.

    Kinds that look at groups compare whole completions; "ppo" has a return per token, the reward
    plus the penalties from there on (AReaL's `disable_value`), which is normalised over all tokens
    of the batch."""
    if kind != "ppo":
        shaped = [
            [
                reward - kl_coef * kl.total
                for reward, kl in zip(group_rewards, group_totals, strict=True)
            ]
            for group_rewards, group_totals in zip(rewards, totals, strict=True)
        ]
        return ShapedAdvantages(advantages(shaped, tokens, kind, eps=eps, pass_k=pass_k), 0.0)
    flat = [
        (r - kl_coef * t.mean, n, kl_coef**2 * t.spread)
        for group_rewards, group_tokens, group_totals in zip(rewards, tokens, totals, strict=True)
        for r, n, t in zip(group_rewards, group_tokens, group_totals, strict=True)
        if n
    ]
    count = max(1, sum(n for _, n, _ in flat))
    mean = math.fsum(n * mean_return for mean_return, n, _ in flat) / count
    variance = (
        math.fsum(n * (mean_return - mean) ** 2 + within for mean_return, n, within in flat) / count
    )
    scale = math.sqrt(variance) + eps
    if scale == 0.0:
        return ShapedAdvantages([[0.0] * len(row) for row in rewards], 0.0)
    return ShapedAdvantages([[(r - mean) / scale for r in row] for row in rewards], kl_coef / scale)
