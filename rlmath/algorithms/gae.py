"""Generalised advantage estimation over a critic's step, and the critic's loss: pure functions.

With r_t the reward of token t, V_t the critic's value of what precedes it, and V after the last
token:

    d_t = r_t + gamma V_t+1 - V_t        A_t = d_t + gamma lambda A_t+1        return of t = A_t + V_t

(GAE, arXiv:1506.02438.) The policy's advantages and the critic's returns have a lambda of their own
each, and the policy's may grow with the completion (VAPO, arXiv:2504.05118, sections 4.1 and 4.2).
"""

# Shape legend: N sampled tokens, completion after completion; S completions; L tokens of the
# longest completion; B tokens of a block, K blocks; T packed tokens.

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

BLOCK = 128
"""Tokens that are summed by one matrix product; the blocks of a completion follow one another."""


def length_adaptive_lambda(tokens_S: Int[Tensor, "S"], alpha: float) -> Float[Tensor, "S"]:
    """VAPO's lambda of a completion with so many tokens: 1 - 1 / (alpha * tokens), 0 at least.

    >>> length_adaptive_lambda(torch.tensor([10, 100]), alpha=0.05)
    tensor([0.0000, 0.8000], dtype=torch.float64)
    """
    return (1.0 - 1.0 / (alpha * tokens_S.double().clamp(min=1.0))).clamp(min=0.0)


def gae(
    rewards_N: Float[Tensor, "N"],
    values_N: Float[Tensor, "N"],
    end_values_S: Float[Tensor, "S"],
    tokens_S: Int[Tensor, "S"],
    gamma: float,
    lambda_S: Float[Tensor, "S"],
) -> Float[Tensor, "N"]:
    """The advantage of every token, float64.

    `end_values_S` are the values after the last token: 0 where the completion ended there; every
    completion has a token."""
    if not len(tokens_S):
        return values_N.double()
    counts = tokens_S.tolist()
    rewards_SL = _rows(rewards_N, counts)
    values_SL = _rows(values_N, counts)
    next_SL = torch.cat((values_SL[:, 1:], values_SL.new_zeros(len(counts), 1)), 1)
    ends_S1 = tokens_S[:, None] - 1
    next_SL = next_SL.scatter(1, ends_S1, end_values_S.double()[:, None])
    inside_SL = torch.arange(values_SL.shape[1]) <= ends_S1
    deltas_SL = torch.where(inside_SL, rewards_SL + gamma * next_SL - values_SL, 0.0)
    return _discounted_to_go(deltas_SL, gamma * lambda_S.double())[inside_SL]


def _rows(values_N: Tensor, counts: list[int]) -> Tensor:
    """[S, L], float64, 0 behind a completion's end."""
    return torch.nn.utils.rnn.pad_sequence(list(values_N.double().split(counts)), batch_first=True)


def _discounted_to_go(
    deltas_SL: Float[Tensor, "S L"], factor_S: Float[Tensor, "S"]
) -> Float[Tensor, "S L"]:
    """Sum over u >= t of factor^(u - t) * delta_u, block by block from the end."""
    S, L = deltas_SL.shape
    K = -(-L // BLOCK)
    deltas_SKB = torch.nn.functional.pad(deltas_SL, (0, K * BLOCK - L)).view(S, K, BLOCK)
    steps_B = torch.arange(BLOCK, dtype=torch.float64)
    distance_BB = steps_B[None, :] - steps_B[:, None]
    weights_SBB = torch.where(
        distance_BB >= 0, factor_S[:, None, None] ** distance_BB.clamp(min=0.0), 0.0
    )
    inner_SKB = torch.einsum("suv,skv->sku", weights_SBB, deltas_SKB)
    reach_SB = factor_S[:, None] ** (BLOCK - steps_B)
    behind_S = deltas_SL.new_zeros(S)
    blocks = []
    for k in reversed(range(K)):
        block_SB = inner_SKB[:, k] + reach_SB * behind_S[:, None]
        behind_S = block_SB[:, 0]
        blocks.append(block_SB)
    return torch.cat(blocks[::-1], 1)[:, :L]


@dataclass(frozen=True)
class ValueLoss:
    """Sums over the tokens of one micro-batch; all but `loss` are without gradient."""

    loss: Float[Tensor, ""]
    """Loss of the learned tokens, with their weights; with gradient."""
    tokens: Float[Tensor, ""]
    clipped: Float[Tensor, ""]
    """Tokens whose gradient the clip took."""


def value_loss(
    values_T: Float[Tensor, "T"],
    old_values_T: Float[Tensor, "T"],
    returns_T: Float[Tensor, "T"],
    weights_T: Float[Tensor, "T"],
    sampled_T: Bool[Tensor, "T"],
    learned_T: Bool[Tensor, "T"],
    clip: float | None,
) -> ValueLoss:
    """Half the squared distance from the return.

    With `clip` it is the greater of that and the same of the value cut to `old_values_T` -+ clip
    (as the critics of AReaL and verl). Tokens that are not sampled may hold anything; those that
    are sampled and not learned are only counted."""
    new_T = torch.where(sampled_T, values_T, 0.0)
    old_T = torch.where(sampled_T, old_values_T, 0.0)
    returns_T = torch.where(sampled_T, returns_T, 0.0)
    plain_T = (new_T - returns_T).square()
    clipped_T = plain_T
    if clip is not None:
        clipped_T = (
            torch.minimum(torch.maximum(new_T, old_T - clip), old_T + clip) - returns_T
        ).square()
    is_clipped_T = sampled_T & (clipped_T > plain_T)
    loss_T = 0.5 * torch.maximum(plain_T, clipped_T)
    return ValueLoss(
        (loss_T * torch.where(learned_T, weights_T, 0.0)).sum(),
        sampled_T.to(values_T.dtype).sum(),
        is_clipped_T.to(values_T.dtype).sum(),
    )


def explained_variance(
    count: float, returns: float, squared_returns: float, errors: float, squared_errors: float
) -> float:
    """1 - variance of the errors / variance of the returns.

    It is computed from sums over `count` tokens of returns, of errors (return - value) and of
    their squares. It is 1 for a critic that is always right, 0 for one that knows only the mean,
    and 0 where all returns are the same.

    >>> explained_variance(2.0, returns=4.0, squared_returns=10.0, errors=1.0, squared_errors=1.0)
    0.75
    """
    if count <= 0:
        return 0.0
    spread = squared_returns / count - (returns / count) ** 2
    left = squared_errors / count - (errors / count) ** 2
    return 1.0 - left / spread if spread > 0 else 0.0
