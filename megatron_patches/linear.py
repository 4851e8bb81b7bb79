"""Patches the products on CPU in the autograd functions of Megatron's linear layers.

They are in `megatron.core.tensor_parallel.layers`.

Upstream: megatron-core 0.16.1 to 0.19.2, `LinearWithGradAccumulationAndAsyncCommunication` and
`LinearWithFrozenWeight` multiply with `torch.matmul`. Why: `rlmath.distributed.cpu_matmul`; the
linear layers take most of an update. Can go: when torch gives float32 products to oneDNN on
processors where that is faster.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlmath.distributed.cpu_matmul import linear, weight_gradient


def patch() -> None:
    """Let linear layers multiply by `cpu_matmul`."""
    layers.LinearWithGradAccumulationAndAsyncCommunication = _Linear
    layers.LinearWithFrozenWeight = _FrozenLinear


class _Linear(torch.autograd.Function):
    """Megatron's linear layer without what a CPU has no use for.

    It has neither fused accumulation nor deferred gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: list[Tensor] | None,
        wgrad_deferral_limit: int | None,
        group: dist.ProcessGroup,
        *weight_shards: int,
    ) -> Tensor:
        """`weight_shards`: 1, which 0.19 adds, where a weight is whole."""
        assert (
            not gradient_accumulation_fusion
            and grad_output_buffer is None
            and set(weight_shards) <= {1}
        )
        ctx.more = (None,) * len(weight_shards)
        ctx.save_for_backward(x, weight_NK)
        ctx.has_bias = bias_N is not None
        ctx.group = group
        ctx.sums_gradient = allreduce_dgrad
        ctx.sequence_parallel = sequence_parallel
        return linear(_gathered(x, group) if sequence_parallel else x, weight_NK, bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the input, the weight and the bias; None for other arguments."""
        x, weight_NK = ctx.saved_tensors
        grad_x = linear(grad, weight_NK.t())
        grad_TN = grad.reshape(-1, grad.shape[-1])
        if ctx.sequence_parallel:
            share = torch.empty(x.shape, dtype=x.dtype)
            gathered = _gathered(x, ctx.group)
            waiting = layers.dist_reduce_scatter_func(share, grad_x, group=ctx.group, async_op=True)
            x = gathered
            grad_x = share
        elif ctx.sums_gradient:
            waiting = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        grad_weight_NK = weight_gradient(grad_TN, x.reshape(-1, x.shape[-1]))
        grad_bias_N = grad_TN.sum(0) if ctx.has_bias else None
        if ctx.sequence_parallel or ctx.sums_gradient:
            waiting.wait()
        return grad_x, grad_weight_NK, grad_bias_N, None, None, None, None, None, None, *ctx.more


class _FrozenLinear(layers.LinearWithFrozenWeight):
    """The linear layer of models that are only read, and of those that learn by adapters."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        allreduce_dgrad: bool,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.save_for_backward(weight_NK)
        ctx.sums_gradient = allreduce_dgrad
        ctx.group = group
        return linear(x, weight_NK, bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight_NK,) = ctx.saved_tensors
        grad_x = linear(grad, weight_NK.t())
        if ctx.sums_gradient:
            dist.all_reduce(grad_x, group=ctx.group)
        return grad_x, None, None, None, None


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' shares of the tokens, in Megatron's buffer for it.

    The next call overwrites the buffer."""
    shape = [x.shape[0] * group.size(), *x.shape[1:]]
    buffer = layers.get_global_memory_buffer().get_tensor(shape, x.dtype, "mpu")
    layers.dist_all_gather_func(buffer, x.contiguous(), group=group)
    return buffer
