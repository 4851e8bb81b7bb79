"""Estimates of KL(policy || other) from log-probs of tokens that the policy sampled.

All functions are pure."""

# Shape legend: T packed tokens, S segments (samples) of a pack.

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

KLKind = Literal["k1", "k2", "k3", "abs"]
KL_KINDS: tuple[str, ...] = get_args(KLKind)


def kl_estimate(
    kind: KLKind, logprobs_T: Float[Tensor, "T"], other_T: Float[Tensor, "T"]
) -> Float[Tensor, "T"]:
    """The estimate of every token, with d = log policy - log other (nats).

    "k1": d, unbiased, may be negative. "k2": d^2 / 2. "k3": exp(-d) - 1 + d, unbiased and never
    negative, GRPO's equation 4 and (without its bounds) verl's `low_var_kl`. "abs": |d|. As a loss
    on the policy's own samples, k2 has the expected gradient of KL(policy || other), k3 that of
    KL(other || policy), and k1 none. Source: Schulman, "Approximating KL divergence" (2020);
    arXiv:2402.03300.
    """
    d_T = logprobs_T - other_T
    if kind == "k1":
        return d_T
    if kind == "k2":
        return d_T.square() / 2
    if kind == "abs":
        return d_T.abs()
    return (-d_T).expm1() + d_T


def to_go(values_T: Float[Tensor, "T"], cu_seqlens_S1: Int[Tensor, "S1"]) -> Float[Tensor, "T"]:
    """The sum, for every token, of its own value and of all that follow in its segment.

    >>> to_go(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 3]))
    tensor([3., 2., 4.])
    """
    segments = values_T.split(cu_seqlens_S1.diff().tolist())
    return torch.cat([segment.flip(0).cumsum(0).flip(0) for segment in segments])
