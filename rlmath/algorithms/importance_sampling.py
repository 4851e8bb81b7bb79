"""Importance ratios of tokens and sequences, and weights that correct for the sampling engine.

All functions are pure.

Two differences are kept apart, as in AReaL's decoupled PPO (arXiv:2505.24298, after
arXiv:2110.00641): the policy now against the proximal policy, the policy at the start of the step,
is what a loss clips; the proximal policy against the behaviour policy, the engine that sampled, is
corrected by a weight without gradient.
"""

# Shape legend: T packed tokens, S segments (samples) of a pack.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

CorrectionLevel = Literal["token", "sequence"]

MOST_LOG_WEIGHT = 20.0
"""Log weights are clipped to -20 .. 20, so that no weight overflows."""
LEAST_OTHERS = 1e-6
"""Least probability of all other tokens together in `binary_kl`.

Float32 log-probs near 0 say no more about it."""
LEAST_LOGPROB = -50.0
"""Least log-prob of a token in `binary_kl` (nats), so that it is finite."""


@dataclass(frozen=True)
class Correction:
    """Weight of the surrogate for the difference between engine and trainer, and masks for it.

    A token is left out of the surrogate where any mask says so.

    Truncated importance sampling (Yao et al., "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training", 2025) is a `cap`; AReaL's decoupled loss is level "token", its
    `behav_imp_weight_cap` is `mask_high`; IcePop (arXiv:2510.18855) is level "token" with both
    masks; the geometric mask is that of verl's rollout correction; the binary KL is the mask of
    AReaL's KPop.
    """

    level: CorrectionLevel | None
    """The level of the weights.

    "token": proximal / behaviour of that token. "sequence": the product over the completion, for
    all its tokens. None: weight 1, for masks alone."""
    cap: float | None = None
    """Weights above this become this."""
    mask_low: float | None = None
    """Tokens whose weight is below this are left out of the surrogate."""
    mask_high: float | None = None
    """Tokens whose weight (before the cap) is above this are left out of the surrogate."""
    geometric_low: float | None = None
    """Completions whose geometric mean of proximal / behaviour is below this are left out.

    The level does not matter."""
    geometric_high: float | None = None
    """Completions whose geometric mean is above this are left out, too."""
    binary_kl: float | None = None
    """Tokens whose `binary_kl` is above this (nats) are left out, whatever the level."""


@dataclass(frozen=True)
class Corrected:
    """Weights of the surrogate, without gradient."""

    weights_T: Float[Tensor, "T"]
    """0 where masked, and where no token counts."""
    cut_T: Bool[Tensor, "T"]
    """Counted tokens whose weight was capped, bounded by MOST_LOG_WEIGHT, or masked by any mask."""
    masked_geometric_T: Bool[Tensor, "T"]
    """Counted tokens of completions that the geometric mask leaves out."""
    masked_binary_kl_T: Bool[Tensor, "T"]
    """Counted tokens that the mask of the binary KL leaves out."""


def uncorrected(counted_T: Bool[Tensor, "T"], like_T: Float[Tensor, "T"]) -> Corrected:
    """Weight 1 where a token counts."""
    no_tokens_T = torch.zeros_like(counted_T)
    return Corrected(
        counted_T.to(like_T.dtype),
        cut_T=no_tokens_T,
        masked_geometric_T=no_tokens_T,
        masked_binary_kl_T=no_tokens_T,
    )


def segment_sums(
    values_T: Float[Tensor, "T"], segments_T: Int[Tensor, "T"], n_segments: int
) -> Float[Tensor, "S"]:
    """Sum of the values of every segment, in float64.

    On a GPU the order of addition varies, and all ranks that share a loss should clip alike."""
    sums_S = values_T.new_zeros(n_segments, dtype=torch.float64)
    return sums_S.index_add(0, segments_T, values_T.double()).to(values_T.dtype)


def sequence_log_ratio(
    log_ratio_T: Float[Tensor, "T"],
    counted_T: Bool[Tensor, "T"],
    segments_T: Int[Tensor, "T"],
    n_segments: int,
) -> Float[Tensor, "T"]:
    """Log of the geometric mean of a completion's ratios, at each of its tokens.

    The log ratios are 0 where no token counts (GSPO, arXiv:2507.18071)."""
    tokens_S = segment_sums(counted_T.to(log_ratio_T.dtype), segments_T, n_segments)
    mean_S = segment_sums(log_ratio_T, segments_T, n_segments) / tokens_S.clamp(min=1.0)
    return mean_S[segments_T]


def binary_kl(
    proximal_T: Float[Tensor, "T"], behaviour_T: Float[Tensor, "T"]
) -> Float[Tensor, "T"]:
    """KL(Bernoulli(p) || Bernoulli(b)) of a sampled token's two probabilities, in float64.

    They are given by their logs (nats).

    p log(p / b) + (1 - p) log((1 - p) / (1 - b)), with 1 - p and 1 - b at least LEAST_OTHERS and
    the logs at least LEAST_LOGPROB: always finite, and 0 where both are the same. A NaN stays one.

    >>> round(float(binary_kl(torch.tensor([0.5]).log(), torch.tensor([0.25]).log())), 6)
    0.143841
    """
    max_logprob = math.log1p(-LEAST_OTHERS)
    log_p_T = proximal_T.double().clamp(LEAST_LOGPROB, max_logprob)
    log_b_T = behaviour_T.double().clamp(LEAST_LOGPROB, max_logprob)
    others_p_T = -log_p_T.expm1()
    others_b_T = -log_b_T.expm1()
    return log_p_T.exp() * (log_p_T - log_b_T) + others_p_T * (others_p_T.log() - others_b_T.log())


@torch.no_grad()
def interpolated_proximal(
    logprobs_T: Float[Tensor, "T"],
    behaviour_T: Float[Tensor, "T"],
    lag_T: Int[Tensor, "T"],
    updates: int,
) -> Float[Tensor, "T"]:
    """Log-probs of the policy at the step's start (nats), interpolated.

    They are between those of the engine, whose weights are `lag_T` optimizer steps older, and those
    of the policy now, `updates` steps later: on the straight line over the steps (A-3PO,
    arXiv:2512.06547; AReaL: prox_logp_method=loglinear). Without any step they are the policy's
    own.

    >>> now = torch.tensor([-1.0, -1.0])
    >>> engine = torch.tensor([-2.0, -2.0])
    >>> lag = torch.tensor([3, 0])
    >>> interpolated_proximal(now, engine, lag, updates=1).tolist()
    [-1.25, -2.0]
    """
    if updates == 0:
        return logprobs_T.clone()
    share_T = lag_T / (lag_T + updates)
    return behaviour_T + share_T * (logprobs_T - behaviour_T)


def proximal_logprobs(
    logprobs_T: Float[Tensor, "T"],
    behaviour_T: Float[Tensor, "T"],
    recomputed_T: Float[Tensor, "T"] | None,
    interpolated_T: Float[Tensor, "T"] | None,
    on_policy: bool,
) -> Float[Tensor, "T"]:
    """Log-probs of the policy at the step's start, without gradient.

    The first of these that exists:

    1. `recomputed_T`, of a pass before the step's first update;
    2. `interpolated_T`, of `interpolated_proximal`;
    3. if `on_policy`, `logprobs_T`, those of the policy now: no update has changed it yet;
    4. `behaviour_T`, those of the engine that sampled.
    """
    if recomputed_T is not None:
        return recomputed_T
    if interpolated_T is not None:
        return interpolated_T
    return logprobs_T.detach() if on_policy else behaviour_T


@torch.no_grad()
def corrected(
    proximal_T: Float[Tensor, "T"],
    behaviour_T: Float[Tensor, "T"],
    counted_T: Bool[Tensor, "T"],
    segments_T: Int[Tensor, "T"],
    n_segments: int,
    correction: Correction,
) -> Corrected:
    """The weights, from log-probs of the proximal and of the behaviour policy.

    Both are 0 where no token counts."""
    log_ratio_T = log_weight_T = proximal_T - behaviour_T
    if correction.level == "sequence":
        log_weight_T = segment_sums(log_ratio_T, segments_T, n_segments)[segments_T]
    elif correction.level is None:
        log_weight_T = torch.where(log_ratio_T.isnan(), log_ratio_T, 0.0)
    bounded_T = log_weight_T.clamp(-MOST_LOG_WEIGHT, MOST_LOG_WEIGHT)
    raw_T = bounded_T.exp()
    geometric_T = binary_T = torch.zeros_like(counted_T)
    if correction.geometric_low is not None or correction.geometric_high is not None:
        mean_T = sequence_log_ratio(log_ratio_T, counted_T, segments_T, n_segments=n_segments)
        mean_T = mean_T.clamp(-MOST_LOG_WEIGHT, MOST_LOG_WEIGHT).exp()
        geometric_T = _outside(mean_T, correction.geometric_low, correction.geometric_high)
    if correction.binary_kl is not None:
        binary_T = binary_kl(proximal_T, behaviour_T) > correction.binary_kl
    masked_T = _outside(raw_T, correction.mask_low, correction.mask_high) | geometric_T | binary_T
    weights_T = raw_T if correction.cap is None else raw_T.clamp(max=correction.cap)
    cut_T = masked_T | (weights_T < raw_T) | (bounded_T != log_weight_T)
    return Corrected(
        torch.where(counted_T & ~masked_T, weights_T, 0.0),
        cut_T=counted_T & cut_T,
        masked_geometric_T=counted_T & geometric_T,
        masked_binary_kl_T=counted_T & binary_T,
    )


def _outside(
    values_T: Float[Tensor, "T"], low: float | None, high: float | None
) -> Bool[Tensor, "T"]:
    """Whether a value is below `low` or above `high`, where there are such bounds.

    A NaN is not."""
    outside_T = torch.zeros_like(values_T, dtype=torch.bool)
    if low is not None:
        outside_T |= values_T < low
    if high is not None:
        outside_T |= values_T > high
    return outside_T
