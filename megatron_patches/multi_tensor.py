"""Operations of a GPU on all tensors of a kind at once, without Transformer Engine and apex.

Upstream: megatron-core 0.16.1 to 0.19.2 then goes over tensors one by one, and its norm of
gradients waits for each of them (`utils.local_multi_tensor_l2_norm`, `local_multi_tensor_scale`);
it copies stepped parameters back one by one in any case
(`DistributedOptimizer._copy_main_params_to_model_params`,
`optimizer._multi_tensor_copy_this_to_that`); and gradients of weights are added to their float32
buffers by the product itself only with apex's kernel (`fused_weight_gradient_mlp_cuda`), while
torch's `addmm` can. Can go: when Megatron-Core uses torch's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def patch() -> None:
    """Use torch's operations on many tensors, and its product that adds."""
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import layers
    from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = norm
    if clip_grads.multi_tensor_scale_impl is local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = scale
    optimizer._multi_tensor_copy_this_to_that = copy
    DistributedOptimizer._copy_main_params_to_model_params = copy_stepped
    if not layers._grad_accum_fusion_available:
        layers._grad_accum_fusion_available = True
        # By that name Megatron would have imported apex's module.
        vars(layers)["fused_weight_gradient_mlp_cuda"] = SimpleNamespace(
            wgrad_gemm_accum_fp32=add_product, wgrad_gemm_accum_fp16=add_product
        )


def norm(
    chunk_size: int, unused: Tensor, tensors: Sequence[list[Tensor]], *more: Any
) -> tuple[Tensor, None]:
    """L2 norm of all elements of the first list, [1]."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors[0]))).view(1), None


def scale(chunk_size: int, unused: Tensor, tensors: Sequence[list[Tensor]], factor: float) -> None:
    """Multiply the first list by `factor`, in place: the second is the same."""
    assert tensors[0] is tensors[1]
    torch._foreach_mul_(tensors[0], factor)


def copy(this: list[Tensor], that: list[Tensor], overflow_buf: Tensor | None = None) -> None:
    """Copy the first list to the second."""
    if this:
        torch._foreach_copy_(that, this)


def copy_stepped(self: Any) -> None:
    """Copy what the optimizer stepped to this rank's part of the parameters' buffer."""
    if self.is_stub_optimizer:
        return
    stepped = []
    targets = []
    for shard_groups, parameter_groups in (
        (self.shard_fp32_from_float16_groups, self.model_float16_groups),
        (self.shard_fp32_groups, self.model_fp32_groups),
    ):
        for shards, parameters in zip(shard_groups, parameter_groups, strict=True):
            for main, parameter in zip(shards, parameters, strict=True):
                shard_range = self._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
                number, _, bucket = self.model_param_gbuf_map[parameter]
                buffer = self.buffers[number].buckets[bucket].param_data.view(-1)
                stepped.append(main)
                targets.append(buffer[shard_range.start : shard_range.end])
    copy(stepped, targets)


def add_product(x_TK: Tensor, grad_TN: Tensor, main_grad_NK: Tensor) -> None:
    """Add the gradient of a weight, grad' x, to its buffer, always in the buffer's format."""
    torch.addmm(main_grad_NK, grad_TN.t(), x_TK, out_dtype=main_grad_NK.dtype, out=main_grad_NK)
