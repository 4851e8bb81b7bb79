"""When a minibatch is discarded instead of learned from."""

from __future__ import annotations

import math


def discard_reason(
    ratio_sum: float,
    token_count: float,
    loss_sum: float,
    grad_norm: float,
    high: float | None,
    low: float | None,
) -> str | None:
    """Why a minibatch must be discarded, or None if it may be learned from.

    `ratio_sum / token_count` is the mean importance ratio over all tokens of the minibatch, over every
    micro-batch and data-parallel rank (RLinf's minibatch early stop, whose bound is 5).

    >>> discard_reason(60.0, 10.0, 1.0, 1.0, high=5.0, low=None)
    'mean importance ratio 6 is above 5'
    """
    for name, value in (("importance ratio", ratio_sum), ("loss", loss_sum), ("gradient norm", grad_norm)):
        if not math.isfinite(value):
            return f"the {name} is not finite ({value})"
    if not token_count > 0:
        return f"no token has a weight (their sum is {token_count:g})"
    mean = ratio_sum / token_count
    if high is not None and mean > high:
        return f"mean importance ratio {mean:.6g} is above {high:g}"
    if low is not None and mean < low:
        return f"mean importance ratio {mean:.6g} is below {low:g}"
    return None
