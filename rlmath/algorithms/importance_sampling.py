"""Importance ratios of tokens and of sequences, and weights that correct for the engine that sampled: pure functions.

Two differences are kept apart, as in AReaL's decoupled PPO (arXiv:2505.24298, after arXiv:2110.00641): the policy
now against the proximal policy, the policy at the start of the step, is what a loss clips; the proximal policy against
the behaviour policy, the engine that sampled, is corrected by a weight without gradient.
"""

# Shape legend: T packed tokens, S segments (samples) of a pack.

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

CorrectionLevel = Literal["token", "sequence"]

MOST_LOG_WEIGHT = 20.0
"""Log weights are clipped to -20 .. 20, so that no weight overflows: e^20 is 5e8."""


@dataclass(frozen=True)
class Correction:
    """Weight of the surrogate for the difference between the engine and the trainer.

    Truncated importance sampling (Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
    2025) is a `cap`; AReaL's decoupled loss is level "token", its `behav_imp_weight_cap` is `mask_high`; IcePop
    (arXiv:2510.18855) is level "token" with both masks.
    """

    level: CorrectionLevel
    """"token": proximal / behaviour of that token. "sequence": the product over the completion, for all its tokens."""
    cap: float | None = None
    """Weights above this become this."""
    mask_low: float | None = None
    """Tokens whose weight is below this are left out of the surrogate."""
    mask_high: float | None = None
    """Tokens whose weight (before the cap) is above this are left out of the surrogate."""


@dataclass(frozen=True)
class Corrected:
    """Weights of the surrogate, without gradient."""

    weights_T: Float[Tensor, "T"]
    """0 where masked, and where no token counts."""
    cut_T: Bool[Tensor, "T"]
    """Counted tokens whose weight was capped, bounded by MOST_LOG_WEIGHT, or masked."""


def segment_sums(
    values_T: Float[Tensor, "T"], segments_T: Int[Tensor, "T"], n_segments: int
) -> Float[Tensor, "S"]:
    """Sum of the values of every segment, in float64: on a GPU the order of addition varies, and all ranks that share a
    loss should clip alike."""
    sums_S = values_T.new_zeros(n_segments, dtype=torch.float64)
    return sums_S.index_add(0, segments_T, values_T.double()).to(values_T.dtype)


def sequence_log_ratio(
    log_ratio_T: Float[Tensor, "T"],
    counted_T: Bool[Tensor, "T"],
    segments_T: Int[Tensor, "T"],
    n_segments: int,
) -> Float[Tensor, "T"]:
    """Log of the geometric mean of a completion's ratios, at each of its tokens (GSPO, arXiv:2507.18071).

    `log_ratio_T` is 0 where no token counts.
    """
    tokens_S = segment_sums(counted_T.to(log_ratio_T.dtype), segments_T, n_segments)
    mean_S = segment_sums(log_ratio_T, segments_T, n_segments) / tokens_S.clamp(min=1.0)
    return mean_S[segments_T]


@torch.no_grad()
def corrected(
    log_weight_T: Float[Tensor, "T"],
    counted_T: Bool[Tensor, "T"],
    segments_T: Int[Tensor, "T"],
    n_segments: int,
    correction: Correction,
) -> Corrected:
    """The weights for log proximal - log behaviour, which is 0 where no token counts."""
    if correction.level == "sequence":
        log_weight_T = segment_sums(log_weight_T, segments_T, n_segments)[segments_T]
    bounded_T = log_weight_T.clamp(-MOST_LOG_WEIGHT, MOST_LOG_WEIGHT)
    raw_T = bounded_T.exp()
    masked_T = torch.zeros_like(counted_T)
    if correction.mask_low is not None:
        masked_T |= raw_T < correction.mask_low
    if correction.mask_high is not None:
        masked_T |= raw_T > correction.mask_high
    weights_T = raw_T if correction.cap is None else raw_T.clamp(max=correction.cap)
    cut_T = counted_T & (masked_T | (weights_T < raw_T) | (bounded_T != log_weight_T))
    return Corrected(torch.where(counted_T & ~masked_T, weights_T, 0.0), cut_T)
