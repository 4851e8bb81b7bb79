"""Norm, activation and rotation of Megatron's local layers, each one autograd function of few passes over memory.

Composed of torch's operations they read and write a hidden state some 30 times a layer, which on a CPU takes as long as
a third of the matrix products. These keep little for the backward pass beside their inputs, and reuse what they
allocated. On a GPU they are one kernel each way: the norm is torch's, the others are in `layer_kernels`.
"""

# Shape legend: T packed tokens, H hidden size, U feed-forward units of this rank, D head dim; of the rotation H heads
# and G key heads.

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable

EXACT = (torch.float32, torch.float64)
"""Number formats in which sums over a hidden state may be taken as they are."""
KERNEL_DEVICES = {"cuda"}
"""Kinds of device with kernels for these, where Triton is installed: it comes with torch's CUDA builds."""


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm that works under sequence parallelism, which Megatron's `WrappedTorchNorm` refuses: with
    the attribute `sequence_parallel` on the weight, Megatron sums its gradient over the tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """The norm over the last dimension, [..., H]; of the same shape."""
        if x.dtype not in EXACT:
            return super().forward(x)
        return _RMSNorm.apply(x, self.weight, self.eps)


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
        """With s = sum over H of (grad w x): d x = r (grad w) - x r^3 s / H, d w = sum over T of (grad x r)."""
        x, weight_H, r = ctx.saved_tensors
        H = x.shape[-1]
        product = grad * x
        flat_TH = product.reshape(-1, H)
        grad_weight_H = r.flatten() @ flat_TH if ctx.needs_input_grad[1] else None
        s = (flat_TH @ weight_H).view(r.shape)
        through_r = r.pow(3).mul_(s).div_(-H)
        grad_x = torch.mul(grad, weight_H, out=product).mul_(r)
        return grad_x.addcmul_(x, through_r), grad_weight_H, None


@cache
def _kernels(kind: str) -> ModuleType | None:
    """The kernels for tensors on this kind of device; None: torch's operations."""
    if kind not in KERNEL_DEVICES or find_spec("triton") is None:
        return None
    from rlmath.models import layer_kernels

    return layer_kernels


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) up of [..., 2U], the gate being the first half; [..., U]."""
    return _SwiGLU.apply(x)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        if kernels := _kernels(x.device.type):
            return kernels.swiglu(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if kernels := _kernels(x.device.type):
            return kernels.swiglu_gradient(grad, x)
        gate, up = x.chunk(2, -1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, -1)
        torch.mul(grad, up, out=grad_gate)
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        torch.ops.aten.silu.out(gate, out=grad_up)
        grad_up.mul_(grad)
        return grad_x


def rotate(query_THD: Tensor, key_TGD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key with each pair (d, d + R/2) of every head's first R dims turned by its token's angle; cosines and
    sines are [T, 1, R/2]."""
    return _Rotate.apply(query_THD, key_TGD, cos, sin)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_THD: Tensor, key_TGD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        return _both_rotated(query_THD, key_TGD, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THD: Tensor, grad_TGD: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return *_both_rotated(grad_THD, grad_TGD, cos, sin, -1), None, None


def _both_rotated(
    query_THD: Tensor, key_TGD: Tensor, cos: Tensor, sin: Tensor, sign: int
) -> tuple[Tensor, Tensor]:
    """By the angle, or by minus the angle."""
    if kernels := _kernels(query_THD.device.type):
        return kernels.rotated(query_THD, key_TGD, cos, sin, sign)
    return _rotated(query_THD, cos, sin, sign), _rotated(key_TGD, cos, sin, sign)


def _rotated(x_THD: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    out = torch.empty_like(x_THD, memory_format=torch.contiguous_format)
    half = cos.shape[-1]
    out[..., 2 * half :] = x_THD[..., 2 * half :]
    (a, b), (out_a, out_b) = (x[..., : 2 * half].split(half, -1) for x in (x_THD, out))
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin, value=sign)
    return out
