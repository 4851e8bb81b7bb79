"""Advantages from groups of rewards: pure functions."""

# Shape legend: P prompts, G samples per prompt.

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def group_normalised(rewards_PG: Float[Tensor, "P G"], eps: float) -> Float[Tensor, "P G"]:
    """(reward - group mean) / (group standard deviation + eps), as in GRPO (arXiv:2402.03300, section 4.1.2).

    The deviation is the unbiased one (divided by G - 1). A group without contrast gets exact zeros,
    one with a NaN gets NaN.

    >>> group_normalised(torch.tensor([[5.0, -5.0], [5.0, 5.0]]), eps=0.0)[0]
    tensor([ 0.7071, -0.7071])
    """
    if rewards_PG.shape[1] < 2:
        raise ValueError(f"a group needs at least 2 samples for a deviation, got {rewards_PG.shape[1]}")
    centred_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    contrast_P1 = rewards_PG.amax(dim=1, keepdim=True) != rewards_PG.amin(dim=1, keepdim=True)
    scaled_PG = centred_PG / (rewards_PG.std(dim=1, keepdim=True) + eps)
    return torch.where(contrast_P1, scaled_PG, torch.zeros_like(centred_PG))
