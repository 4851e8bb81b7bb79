"""Norm, activation, rotation and residuals of Megatron's local layers, in few passes over memory.

Composed of torch's operations they read and write a hidden state some 30 times a layer, which on a
CPU takes as long as a third of the matrix products. These keep little for the backward pass beside
their inputs, and reuse what they allocated. On a GPU they are one kernel each way
(`layer_kernels`), and one more for each weight's gradient.
"""

# Shape legend: T packed tokens, H hidden size, U feed-forward units of this rank, D head dim; of
# attention H heads, G key heads, S = H/G + 2 heads of a group: the queries that share a key, the
# key and the value.

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlmath.models.kernels import triton_kernels

EXACT = (torch.float32, torch.float64)
"""Number formats in which sums over a hidden state may be taken as they are."""


def _kernels(x: Tensor) -> ModuleType | None:
    return triton_kernels("layer_kernels", x.device.type)


class LocalLayer(TransformerLayer):
    """Megatron's parts of a layer, whose residuals are added by the norms."""

    def forward(
        self, hidden_states: Tensor, packed_seq_params: Any, **unused: Any
    ) -> tuple[Tensor, None]:
        """Hidden states behind the layer, [T, 1, H]; there is no second stream."""
        x, normed = self.input_layernorm.behind(hidden_states)
        x, normed = self.pre_mlp_layernorm.behind(
            x, self.self_attention(normed, packed_seq_params)[0]
        )
        return x + self.mlp(normed)[0], None


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm that works under sequence parallelism.

    Megatron's `WrappedTorchNorm` refuses that. With the attribute `sequence_parallel` on the
    weight, Megatron sums its gradient over the tensor-parallel ranks."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """The norm over the last dimension, [..., H]; of the same shape."""
        return self.behind(x)[1]

    def behind(self, x: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x with `added`, and the norm of that sum."""
        if kernels := _kernels(x):
            return kernels.AddNorm.apply(x, added, self.weight, self.eps)
        x = x if added is None else x + added
        return x, _RMSNorm.apply(x, self.weight, self.eps) if x.dtype in EXACT else super().forward(
            x
        )


class _RMSNorm(torch.autograd.Function):
    """y = w x r, with r = (mean x^2 + eps)^-1/2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        r = torch.linalg.vecdot(x, x).div_(x.shape[-1]).add_(eps).rsqrt_()[..., None]
        ctx.save_for_backward(x, weight_H, r)
        return (x * r).mul_(weight_H)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Gradients: d x = r (grad w) - x r^3 s / H and d w = sum over T of (grad x r).

        s is the sum over H of (grad w x)."""
        x, weight_H, r = ctx.saved_tensors
        H = x.shape[-1]
        product = grad * x
        flat_TH = product.reshape(-1, H)
        grad_weight_H = r.flatten() @ flat_TH if ctx.needs_input_grad[1] else None
        s = (flat_TH @ weight_H).view(r.shape)
        through_r = r.pow(3).mul_(s).div_(-H)
        grad_x = torch.mul(grad, weight_H, out=product).mul_(r)
        return grad_x.addcmul_(x, through_r), grad_weight_H, None


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) up of [..., 2U], the gate being the first half; [..., U]."""
    kernels = _kernels(x)
    return (kernels.SwiGLU if kernels else _SwiGLU).apply(x)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, -1)
        torch.mul(grad, up, out=grad_gate)
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        torch.ops.aten.silu.out(gate, out=grad_up)
        grad_up.mul_(grad)
        return grad_x


def split_heads(
    x_TGSD: Tensor,
    bias: Tensor | None,
    norms: Sequence[torch.nn.Module | None],
    angles: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Query [T, H, D], key and value [T, G, D] of their common projection.

    Its bias is added, query and key are normed (by `RMSNorm`s; none, or Megatron's `IdentityOp`),
    and each pair (d, d + R/2) of their first R dims is turned by the token's angle, whose cosines
    and sines are [T, 1, R/2]."""
    T, _, S, D = x_TGSD.shape
    if kernels := _kernels(x_TGSD):
        query_weight, key_weight = (getattr(norm, "weight", None) for norm in norms)
        cos, sin = angles
        return kernels.SplitHeads.apply(
            x_TGSD, getattr(norms[0], "eps", 0.0), bias, query_weight, key_weight, cos, sin
        )
    if bias is not None:
        x_TGSD = x_TGSD + bias.view(x_TGSD.shape[1:])
    *pair, value = x_TGSD.split((S - 2, 1, 1), 2)
    query, key = (
        heads if norm is None else norm(heads) for norm, heads in zip(norms, pair, strict=True)
    )
    query, key = Rotate.apply(query, key, *(angle[:, None] for angle in angles))
    return query.view(T, -1, D), key.squeeze(2), value.squeeze(2)


class Rotate(torch.autograd.Function):
    """Turns each pair (d, d + R/2) of the first R dims of query and key, [T, ..., D].

    Cosines and sines are [T, ..., R/2], or 1 in place of the heads."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        return _rotated(query, cos, sin, sign=1), _rotated(key, cos, sin, sign=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_query: Tensor, grad_key: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return (
            _rotated(grad_query, cos, sin, sign=-1),
            _rotated(grad_key, cos, sin, sign=-1),
            None,
            None,
        )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """x turned by the angle, or by minus the angle where `sign` is -1."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    half = cos.shape[-1]
    out[..., 2 * half :] = x[..., 2 * half :]
    (a, b), (out_a, out_b) = (part[..., : 2 * half].chunk(2, -1) for part in (x, out))
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin, value=sign)
    return out
