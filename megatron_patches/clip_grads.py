"""Patches `clip_grad_by_total_norm_fp32` where Megatron's optimizer uses it.

Upstream: megatron-core 0.16.1 to 0.19.2 asserts that a gradient's type is 'torch.cuda.FloatTensor'.
Why, and can go: as `optimizer`.
"""

from __future__ import annotations

from megatron_patches.optimizer import with_cuda_type_names


def patch() -> None:
    """Let gradients on the CPU be clipped."""
    from megatron.core.optimizer import optimizer

    optimizer.clip_grad_by_total_norm_fp32 = with_cuda_type_names(
        optimizer.clip_grad_by_total_norm_fp32
    )
