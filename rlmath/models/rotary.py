"""Frequencies of the rotary position embedding, plain or stretched for longer sequences."""

# Shape legend: F = D/2 frequencies of a head of D dims.

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmath.config.model_shape import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelShape,
    RopeScaling,
    YarnScaling,
)


@dataclass(frozen=True)
class Rotary:
    frequencies_F: Tensor
    """Radians per position."""
    magnitude: float = 1.0
    """Factor of cosines and sines."""


def rotary_frequencies(shape: ModelShape) -> Tensor:
    """F frequencies of the rotary embedding (radians per position)."""
    dim = shape.rotary_dim or shape.head_dim
    plain_F = 1.0 / shape.rope_theta ** (torch.arange(0, dim, 2).float() / dim)
    if shape.rope_scaling is None:
        return plain_F
    return stretched_frequencies(plain_F, shape.rope_theta, shape.rope_scaling)


def stretched_frequencies(frequencies_F: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Frequencies for longer sequences, from F plain ones of base `theta` (radians per position).

    They are those of transformers' `modeling_rope_utils`."""
    match scaling:
        case LinearScaling(factor):
            return frequencies_F / factor
        case LongRopeScaling(short_factors):
            return frequencies_F / torch.tensor(short_factors)
        case Llama3Scaling():
            turns_F = scaling.original_max_positions * frequencies_F / (2 * math.pi)
            span = scaling.high_freq_factor - scaling.low_freq_factor
            kept_share_F = ((turns_F - scaling.low_freq_factor) / span).clamp(0, 1)
        case YarnScaling():
            kept_share_F = 1 - _yarn_ramp(len(frequencies_F), theta, scaling)
    return kept_share_F * frequencies_F + (1 - kept_share_F) * frequencies_F / scaling.factor


def _yarn_ramp(F: int, theta: float, scaling: YarnScaling) -> Tensor:
    """0 for the frequencies that YaRN keeps to 1 for those that it divides, linear between."""

    def index_of(turns: float) -> float:
        """Index (with fraction) of the frequency that turns so often within the original length."""
        return (
            F * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / math.log(theta)
        )

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * F - 1)
    return ((torch.arange(F).float() - low) / ((high - low) or 0.001)).clamp(0, 1)
