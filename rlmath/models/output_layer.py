"""Logits in float32 from the output layer of a 16-bit model (`policy.head_dtype`).

The products of its numbers are exact in float32, and are summed and kept there: what is not rounded
are the logits themselves. vLLM's engines do the same (`ModelConfig.head_dtype`). The gradient of
the logits is rounded to the model's format before it is multiplied, which then is as fast as
without.
"""

# Shape legend: N tokens of this rank (a share of T with sequence parallelism), T packed tokens of
# one micro-batch, V vocabulary shard, H hidden size.

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlmath.models.scratch_sizes import CHUNK_BYTES


def float32_logits(
    layer: ColumnParallelLinear,
    hidden_N1H: Tensor,
    weight: Tensor | None = None,
    runtime_gather_output: bool | None = None,
) -> tuple[Tensor, None]:
    """Logits [T, 1, V] in float32, in place of the forward pass of Megatron's output layer.

    It is called like that; `weight` is the embedding's where it is tied."""
    if layer.sequence_parallel:
        hidden_T1H = gather_from_sequence_parallel_region(hidden_N1H)
    else:
        hidden_T1H = copy_to_tensor_model_parallel_region(hidden_N1H)
    logits_TV = _Float32Logits.apply(hidden_T1H[:, 0], layer.weight if weight is None else weight)
    return logits_TV[:, None], None


def float32_product(hidden_TH: Tensor, weight_VH: Tensor) -> Tensor:
    """hidden weight^T, [T, V] float32; torch has it for factors of 16 bits on a GPU alone."""
    if hidden_TH.is_cuda:
        return torch.mm(hidden_TH, weight_VH.t(), out_dtype=torch.float32)
    return torch.mm(hidden_TH.float(), weight_VH.float().t())


class _Float32Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_VH: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_TH if ctx.needs_input_grad[1] else None, weight_VH)
        return float32_product(hidden_TH, weight_VH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TV: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden_TH, weight_VH = ctx.saved_tensors
        grad_TV = _rounded_in_place(grad_TV, weight_VH.dtype)
        grad_weight_VH = torch.mm(grad_TV.t(), hidden_TH) if ctx.needs_input_grad[1] else None
        return torch.mm(grad_TV, weight_VH), grad_weight_VH


def _rounded_in_place(grad_TV: Tensor, dtype: torch.dtype) -> Tensor:
    """A float32 gradient in a format of 16 bits, in the first half of its own memory.

    It is as large as the logits (`logprobs`), and nobody reads it afterwards. Some rows are rounded
    at a time, since a row is written where others are read."""
    T, V = grad_TV.shape
    assert grad_TV.is_contiguous()
    rounded_TV = grad_TV.view(-1).view(dtype)[: T * V].view(T, V)
    rows = max(1, CHUNK_BYTES[grad_TV.device.type] // (grad_TV.element_size() * V))
    for rounded_RV, grad_RV in zip(rounded_TV.split(rows), grad_TV.split(rows), strict=True):
        rounded_RV.copy_(grad_RV.to(dtype))
    return rounded_TV
