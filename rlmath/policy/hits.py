"""Whether a token is the likeliest of all, from logits whose vocabulary is split over the tensor-parallel ranks."""

# Shape legend: T packed tokens, V columns of this rank's vocabulary shard.

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from rlmath.policy.logprobs import NOWHERE


def next_hits(
    logits_TV: Tensor, targets_T: Tensor, vocab_size: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """1.0 where no token of the vocabulary has a larger logit than the target, else 0.0; and the largest logit of the
    row (float32). No tensor of the logits' size is made, and they stay as they are. A collective."""
    V = logits_TV.shape[-1]
    start = V * group.rank()
    columns = min(max(vocab_size - start, 0), V)
    tops_2T = torch.full((2, len(targets_T)), NOWHERE, dtype=torch.float32, device=logits_TV.device)
    if columns:
        local_T = targets_T - start
        mine_T = (local_T >= 0) & (local_T < columns)
        target_T = logits_TV.gather(1, local_T.clamp(0, columns - 1)[:, None])[:, 0].float()
        tops_2T[0] = torch.where(mine_T, target_T, NOWHERE)
        tops_2T[1] = logits_TV[:, :columns].amax(-1).float()
    dist.all_reduce(tops_2T, op=dist.ReduceOp.MAX, group=group)
    return (tops_2T[0] >= tops_2T[1]).float(), tops_2T[1]
