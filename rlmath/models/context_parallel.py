"""A pack split over context-parallel ranks, and its per-token values gathered again.

Transformer Engine's causal attention needs every segment cut into 2 * C chunks of equal length;
rank r of C computes chunks r and 2 * C - 1 - r, so that all have the same work. Segments are padded
to a multiple of that behind their end, where no real token attends to.
"""

# Shape legend: T packed tokens, S segments, F tokens of the padded segments, C context ranks, N
# tokens of each.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class ContextSplit:
    """The tokens of a pack that each context rank computes."""

    source_CN: Tensor
    """Position in the pack of every rank's tokens, int64; T where there is padding."""
    cu_seqlens_S1: Tensor
    """Cumulative lengths of the padded segments over all ranks, int32."""
    max_seqlen: int
    """Longest padded segment, over all ranks."""

    def share(self, values_T: Tensor, rank: int) -> Tensor:
        """A rank's part [N] of a per-token tensor of the pack, 0 on padding."""
        return torch.cat((values_T, values_T.new_zeros(1)))[self.source_CN[rank]]

    def join(self, values_CN: Tensor, length: int) -> Tensor:
        """The pack's [T] again, of `length` tokens, out of all ranks' shares."""
        whole = values_CN.new_zeros(length + 1).scatter(
            0, self.source_CN.flatten(), values_CN.flatten()
        )
        return whole[:length]


def split_pack(cu_seqlens_S1: Tensor, context: int, multiple: int = 1) -> ContextSplit:
    """Split a pack over `context` ranks, in chunks whose length is a multiple of `multiple`.

    That is the tensor-parallel size under sequence parallelism.

    >>> split_pack(torch.tensor([0, 8, 11]), context=2).source_CN
    tensor([[ 0,  1,  6,  7,  8, 11],
            [ 2,  3,  4,  5,  9, 10]])
    """
    unit = 2 * context * multiple
    lengths_S = cu_seqlens_S1.diff().long()
    padded_S = -(-lengths_S // unit) * unit
    bounds_S1 = torch.cat((padded_S.new_zeros(1), padded_S.cumsum(0)))
    segment_F = torch.repeat_interleave(padded_S)
    offset_F = torch.arange(len(segment_F), device=segment_F.device) - bounds_S1[segment_F]
    real_F = offset_F < lengths_S[segment_F]
    source_F = torch.where(real_F, cu_seqlens_S1[segment_F] + offset_F, cu_seqlens_S1[-1])
    chunk_F = offset_F // (padded_S // (2 * context))[segment_F]
    by_rank = torch.minimum(chunk_F, 2 * context - 1 - chunk_F).argsort(stable=True)
    return ContextSplit(source_F[by_rank].view(context, -1), bounds_S1.int(), int(padded_S.max()))


class _GatherShares(torch.autograd.Function):
    """Gathers all ranks' [N] as [C, N].

    Every rank computes the same loss from it, so a rank's own row of the gradient is the whole
    gradient of its share."""

    @staticmethod
    def forward(ctx: Any, mine_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.row = group.rank()
        shares = [torch.empty_like(mine_N) for _ in range(group.size())]
        dist.all_gather(shares, mine_N.contiguous(), group=group)
        return torch.stack(shares)

    @staticmethod
    def backward(ctx: Any, grad_CN: Tensor) -> tuple[Tensor, None]:
        return grad_CN[ctx.row], None


def gather_and_shift(
    of_next: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    split: ContextSplit,
    token_ids_T: Tensor,
    completion_index_T: Tensor,
    group: dist.ProcessGroup,
) -> tuple[Tensor, ...]:
    """Do `logprobs.shift_to_tokens` for the whole pack, on every context rank.

    `of_next(tokens_N, completion_index_N)` has the values for the tokens that this rank's logits
    predict. A collective of context ranks, with gradient."""
    T = token_ids_T.numel()
    rank = group.rank()
    next_tokens = split.share(token_ids_T.roll(-1), rank)
    next_index = split.share(completion_index_T.roll(-1), rank)
    joined = []
    for values_N in of_next(next_tokens, next_index):
        whole_T = split.join(_GatherShares.apply(values_N, group), T)
        joined.append(torch.cat((whole_T.new_zeros(1), whole_T[:-1])))
    return tuple(joined)
