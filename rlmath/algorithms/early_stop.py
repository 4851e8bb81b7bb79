"""The bounds beyond which a minibatch is discarded instead of learned from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class EarlyStop:
    """Bounds of a minibatch that may be learned from; None bounds nothing."""

    ratio_high: float | None = 5.0
    """Largest mean importance ratio (RLinf's minibatch early stop, whose bound is 5)."""
    ratio_low: float | None = None
    """Smallest mean importance ratio."""
    kl: float | None = None
    """Largest mean k3 estimate of KL(proximal || new) per token (nats).

    It is the `target_kl` of PPO implementations."""


def discard_reason(sums: Mapping[str, float], grad_norm: float, bounds: EarlyStop) -> str | None:
    """Why a minibatch must be discarded, or None if it may be learned from.

    `sums` are over all sampled tokens of the minibatch, of every micro-batch and data-parallel
    rank: "ratio" to the proximal policy, "proximal_kl" (k3, nats), "loss" and the number of
    "tokens". Means are counted by token, learned or not, whatever its weight in the loss. Whatever
    is not finite discards, with and without bounds.

    >>> sums = {"ratio": 60.0, "proximal_kl": 0.1, "loss": 1.0, "tokens": 10.0}
    >>> discard_reason(sums, 1.0, EarlyStop(ratio_high=5.0))
    'mean importance ratio 6 is above 5'
    """
    finite = {
        "importance ratio": sums["ratio"],
        "approximate KL": sums["proximal_kl"],
        "loss": sums["loss"],
        "gradient norm": grad_norm,
        "number of tokens": sums["tokens"],
    }
    for name, value in finite.items():
        if not math.isfinite(value):
            return f"the {name} is not finite ({value})"
    if not sums["tokens"] > 0:
        return f"no token has a weight (their number is {sums['tokens']:g})"
    ratio = sums["ratio"] / sums["tokens"]
    kl = sums["proximal_kl"] / sums["tokens"]
    if bounds.ratio_high is not None and ratio > bounds.ratio_high:
        return f"mean importance ratio {ratio:.6g} is above {bounds.ratio_high:g}"
    if bounds.ratio_low is not None and ratio < bounds.ratio_low:
        return f"mean importance ratio {ratio:.6g} is below {bounds.ratio_low:g}"
    if bounds.kl is not None and kl > bounds.kl:
        return f"mean approximate KL {kl:.6g} nats per token is above {bounds.kl:g}"
    return None
