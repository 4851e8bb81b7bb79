"""The merge of a LoRA adapter: the weight in effect is W + scale B A.

Rollout engines, exports and conversions get weights with their adapters merged, all by this
function.
"""

# Shape legend: M rows and K columns of the weight, R the adapter's rank.

from __future__ import annotations

import torch
from torch import Tensor

from rlmath.checkpoint.hf.weight_map import MERGED_BLOCK_BYTES


def merged_weight(weight_MK: Tensor, b_MR: Tensor, a_RK: Tensor, scale: float) -> Tensor:
    """W + scale B A of a LoRA adapter, in W's number format.

    Summed in float64 and rounded once, so that it does not depend on the layout or the device; some
    rows at a time."""
    b = b_MR.double()
    a = a_RK.double()
    merged = torch.empty_like(weight_MK)
    rows = max(1, MERGED_BLOCK_BYTES // (8 * weight_MK.shape[1]))
    for merged_block, weight_block, b_block in zip(
        merged.split(rows), weight_MK.split(rows), b.split(rows), strict=True
    ):
        merged_block.copy_(torch.addmm(weight_block.double(), b_block, a, alpha=scale))
    return merged
