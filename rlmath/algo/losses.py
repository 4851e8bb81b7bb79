"""The GRPO loss over packed tokens: sums, never means. Who divides is `policy.learner`, once, by a global count."""

# Shape legend: T packed tokens.

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class TokenInputs:
    """What the loss knows of every token. Only tokens with a weight above 0 are looked at."""

    logprobs_T: Float[Tensor, "T"]
    """Of the policy now, with gradient (nats)."""
    old_logprobs_T: Float[Tensor, "T"]
    """Of the proximal policy, the denominator of the importance ratio."""
    reference_logprobs_T: Float[Tensor, "T"] | None
    """Of the reference; None without KL."""
    advantages_T: Float[Tensor, "T"]
    weights_T: Float[Tensor, "T"]


@dataclass(frozen=True)
class TokenLoss:
    """Sums over the tokens of one micro-batch; all but `loss` are without gradient."""

    loss: Float[Tensor, ""]
    """Clipped surrogate plus weighted KL, with gradient."""
    surrogate: Float[Tensor, ""]
    ratio: Float[Tensor, ""]
    clipped: Float[Tensor, ""]
    """Tokens on which the clipped branch of the surrogate was the one taken."""
    approx_kl: Float[Tensor, ""]
    """old log-prob minus new: the k1 estimate of KL(old || new)."""
    reference_kl: Float[Tensor, ""]
    """k3 estimate of KL(policy || reference)."""


def kl_k3(logprobs_T: Float[Tensor, "T"], reference_T: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
    """Unbiased, never negative estimate of KL(policy || reference): r - 1 - log r with r = reference / policy.

    Schulman, "Approximating KL divergence" (2020), estimator k3; GRPO's equation 4.
    """
    log_r = reference_T - logprobs_T
    return log_r.expm1() - log_r


def grpo_loss(tokens: TokenInputs, clip_ratio: float, kl_coef: float) -> TokenLoss:
    """Clipped surrogate (arXiv:1707.06347, equation 7) with a KL penalty (arXiv:2402.03300), summed over tokens.

    Per token with ratio r and advantage A: max(-A r, -A clip(r, 1 - clip_ratio, 1 + clip_ratio)), times its weight.
    """
    counted_T = tokens.weights_T > 0
    log_ratio_T = torch.where(counted_T, tokens.logprobs_T - tokens.old_logprobs_T, 0.0)
    ratio_T = log_ratio_T.exp()
    plain_T = -tokens.advantages_T * ratio_T
    clipped_T = -tokens.advantages_T * ratio_T.clamp(1.0 - clip_ratio, 1.0 + clip_ratio)
    surrogate_T = torch.maximum(plain_T, clipped_T)
    kl_T = torch.zeros_like(surrogate_T)
    if tokens.reference_logprobs_T is not None:
        kl_T = kl_k3(
            torch.where(counted_T, tokens.logprobs_T, 0.0),
            torch.where(counted_T, tokens.reference_logprobs_T, 0.0),
        )
    weights_T = tokens.weights_T
    return TokenLoss(
        loss=_total(surrogate_T + kl_coef * kl_T, weights_T),
        surrogate=_total(surrogate_T, weights_T).detach(),
        ratio=_total(ratio_T, weights_T).detach(),
        clipped=_total((clipped_T > plain_T).float(), weights_T),
        approx_kl=_total(-log_ratio_T, weights_T).detach(),
        reference_kl=_total(kl_T, weights_T).detach(),
    )


def _total(values_T: Tensor, weights_T: Tensor) -> Tensor:
    """Weighted sum that looks only at tokens with a weight: what stands elsewhere may be anything, even NaN."""
    return torch.where(weights_T > 0, values_T * weights_T, 0.0).sum()
