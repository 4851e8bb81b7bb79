"""The experts of a layer as vLLM keeps them: all gate and up projections in one parameter, all down projections in one.

On CPU vLLM packs both for its grouped product, behind filling up an expert's feed-forward units with zeros to a number
that its kernel takes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def holds_packed_experts(module: torch.nn.Module) -> bool:
    """Whether a module of vLLM's keeps experts packed. RuntimeError where it keeps them in a way not known here.

    vLLM 0.32 packs them on CPU; of its kernels for GPUs, the one of the Triton backend takes them as they are.
    """
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    if kernel is None:
        return False
    experts = kernel.fused_experts
    if hasattr(experts, "isa"):
        return not getattr(experts, "_use_zentorch", False)
    backend = getattr(module.quant_method, "unquantized_backend", None)
    if getattr(backend, "name", None) != "TRITON":
        raise RuntimeError(
            f"vLLM lays experts out for {backend}; their weights can be written as Triton's kernel takes them only. "
            "Please report this"
        )
    return False


def pack_experts(module: Any, attribute: str, matrix: Tensor) -> None:
    """Pack the experts of a matrix, one below the other, into `w13_weight` or `w2_weight` of a layer of vLLM's."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    experts = module.quant_method.moe_kernel.fused_experts
    parameter = getattr(module, attribute)
    plain = matrix.view(parameter.shape[0], -1, matrix.shape[1])
    parameter.data.copy_(cpu_prepack_moe_weight(_filled_up(plain, attribute, parameter.shape), experts.isa))


def _filled_up(plain: Tensor, attribute: str, size: torch.Size) -> Tensor:
    """The experts with as many feed-forward units as the packed parameter: behind gate and behind up, zeros."""
    if plain.shape == size:
        return plain
    filled = plain.new_zeros(size)
    if attribute == "w13_weight":
        halves = zip(filled.chunk(2, dim=1), plain.chunk(2, dim=1), strict=True)
        for target, half in halves:
            target[:, : half.shape[1]] = half
    else:
        filled[:, :, : plain.shape[2]] = plain
    return filled
