"""The merge of a LoRA adapter: the weight in effect is W + scale B A.

Rollout engines, exports and conversions that get weights with their adapters merged get them by
this function. Where a number format is coarse, small updates are rounded away: `kept_share`.
"""

# Shape legend: M rows and K columns of the weight, R the adapter's rank.

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rlmath.checkpoint.hf.weight_map import MERGED_BLOCK_BYTES
from rlmath.distributed.collectives import reduce_over_ranks


def merged_weight(
    weight_MK: Tensor,
    b_MR: Tensor,
    a_RK: Tensor,
    scale: float,
    written: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """W + scale B A of a LoRA adapter, and how much of the update the rounded numbers have.

    The merged weight is in the format `written` (None: W's), but in float32 for float16, whose
    range may be too small. Summed in float64 and rounded once, so that it does not depend on the
    layout or the device; some rows at a time.

    The second tensor, [2] in float64, has <merged - W, U> and <U, U> of the update U = scale B A,
    with all numbers rounded to `written`: their quotient is the share of U that is kept."""
    b = b_MR.double()
    a = a_RK.double()
    rounded = written or weight_MK.dtype
    merged = torch.empty_like(weight_MK, dtype=merged_dtype(written) or rounded)
    norm = scale**2 * torch.sum((b.t() @ b) * (a @ a.t()))
    kept = norm.clone()
    rows = max(1, MERGED_BLOCK_BYTES // (8 * weight_MK.shape[1]))
    for merged_block, weight_block, b_block in zip(
        merged.split(rows), weight_MK.split(rows), b.split(rows), strict=True
    ):
        exact = torch.addmm(weight_block.double(), b_block, a, alpha=scale)
        merged_block.copy_(exact)
        error = exact.neg_().add_(merged_block.to(rounded))
        kept += scale * torch.sum((error @ a.t()) * b_block)
    return merged, torch.stack([kept, norm])


def merged_dtype(written: torch.dtype | None) -> torch.dtype | None:
    """The number format in which merged weights are held until they are `written`."""
    return torch.float32 if written == torch.float16 else written


def kept_share(sums: Iterable[Tensor], over_ranks: bool = True) -> float:
    """The share of the adapters' updates that merged weights have, over the merges of all ranks.

    `sums` are those that `merged_weight` gave on this rank; it is 1 where nothing has been learned.
    A collective, but not with `over_ranks` false: then of this process's merges alone."""
    pairs = [*sums]
    kept, norm = torch.stack(pairs).sum(0).tolist() if pairs else (0.0, 0.0)
    summed = {"kept": kept, "norm": norm}
    if over_ranks:
        summed, _ = reduce_over_ranks(summed, {})
    return summed["kept"] / summed["norm"] if summed["norm"] else 1.0
