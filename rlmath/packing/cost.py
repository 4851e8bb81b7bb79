"""What training on a sample costs, as a function of its length. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rlmath.model_shape import ModelShape


@dataclass(frozen=True)
class Cost:
    """`linear * n + quadratic * n^2` of a sample of n tokens, in FLOPs (or tokens, see `TOKENS`).

    >>> Cost(2.0, 0.5).of(10)
    70.0
    """

    linear: float
    """Per token: the matrix multiplications with parameters."""
    quadratic: float
    """Per pair of tokens: attention."""

    def of(self, length: int) -> float:
        return self.linear * length + self.quadratic * length * length


TOKENS = Cost(1.0, 0.0)
"""Every token costs the same: right where attention is a small part of the work."""


def training_cost(shape: ModelShape) -> Cost:
    """FLOPs of forward and backward pass, without recomputation of activations.

    A matrix parameter takes part in one multiplication and one addition per token of the forward pass, and in twice as
    many of the backward pass: 6 per parameter and token. The output layer counts, the look-up of embeddings does not.
    The two products of attention (scores, values) take 4 * n^2 * num_heads * head_dim per layer forwards, 12 with the
    backward pass, and half of that where no token looks ahead.

    Sources: PaLM, arXiv:2204.02311, appendix B (6N + 12LHQT per token); Megatron-LM, arXiv:2104.04473, section 5.1
    (the same with gated MLP and grouped queries counted here as they are). PaLM and Megatron do not take the half of
    causal attention; kernels such as FlashAttention do.
    """
    query_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = shape.hidden_size * (2 * query_size + 2 * kv_size)
    mlp = 3 * shape.hidden_size * shape.ffn_size
    output = shape.hidden_size * shape.vocab_size
    parameters = shape.num_layers * (attention + mlp) + output
    return Cost(linear=6.0 * parameters, quadratic=12.0 * shape.num_layers * query_size / 2)
