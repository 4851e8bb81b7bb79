"""Log-probabilities and entropy from logits whose vocabulary is split over the tensor-parallel ranks."""

# Shape legend: T packed tokens, V columns of this rank's vocabulary shard.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ROWS = 2048
"""Tokens that are worked on at a time: bounds the float32 copies beside the logits."""

NOWHERE = -1e30
"""Scaled logit of a token that cannot be sampled: finite, so that 0 times it is 0."""


@dataclass(frozen=True)
class HeldBack:
    """Tokens that the engine may not sample at the start of a completion: the stop tokens, under
    `rollout.min_new_tokens`. The trainer takes them out of the distribution, too."""

    token_ids: tuple[int, ...] = ()
    first: int = 0
    """Positions of a completion, from its start, at which they are held back."""


@dataclass(frozen=True)
class _Shard:
    """This rank's part of the vocabulary, and how its logits are read."""

    temperature: float
    start: int
    columns: int
    """Real columns; those behind are padding."""
    barred_T: Tensor | None
    """Rows in which the barred columns cannot be sampled; None where there are none."""
    barred_columns: tuple[int, ...]

    def scaled(self, logits_TV: Tensor, rows: slice) -> Tensor:
        """A float32 copy of some rows of the real columns, divided by the temperature."""
        scaled = logits_TV[rows, : self.columns].float() / self.temperature
        if self.barred_T is not None:
            for column in self.barred_columns:
                scaled[:, column].masked_fill_(self.barred_T[rows], NOWHERE)
        return scaled

    def row_maxima(self, logits_TV: Tensor) -> Tensor:
        if not self.columns:
            return torch.full((logits_TV.shape[0],), -torch.inf, device=logits_TV.device)
        if self.barred_T is None:
            return logits_TV[:, : self.columns].amax(-1).float() / self.temperature
        return torch.cat([self.scaled(logits_TV, rows).amax(-1) for rows in _chunks(logits_TV.shape[0])])


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, targets_T: Tensor, shard: _Shard, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        top_T = shard.row_maxima(logits_TV)
        dist.all_reduce(top_T, op=dist.ReduceOp.MAX, group=group)
        local_T = targets_T - shard.start
        mine_T = (local_T >= 0) & (local_T < shard.columns)
        column_T = local_T.clamp(0, max(shard.columns - 1, 0))
        sums_3T = torch.zeros(3, logits_TV.shape[0], dtype=torch.float32, device=logits_TV.device)
        for rows in _chunks(logits_TV.shape[0]):
            shifted = shard.scaled(logits_TV, rows) - top_T[rows, None]
            weight = shifted.exp()
            sums_3T[0, rows] = weight.sum(-1)
            sums_3T[1, rows] = (weight * shifted).sum(-1)
            if shard.columns:
                target = shifted.gather(1, column_T[rows, None]).squeeze(1)
                sums_3T[2, rows] = torch.where(mine_T[rows], target, 0.0)
        dist.all_reduce(sums_3T, group=group)
        log_norm_T = sums_3T[0].log()
        entropy_T = log_norm_T - sums_3T[1] / sums_3T[0]
        ctx.save_for_backward(logits_TV, top_T + log_norm_T, mine_T, column_T)
        ctx.shard = shard
        ctx.mark_non_differentiable(entropy_T)
        return sums_3T[2] - log_norm_T, entropy_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor, _grad_entropy: Tensor) -> tuple[Tensor, None, None, None]:
        logits_TV, log_sum_T, mine_T, column_T = ctx.saved_tensors
        shard: _Shard = ctx.shard
        grad_TV = torch.zeros_like(logits_TV)
        scale_T = grad_T / shard.temperature
        for rows in _chunks(logits_TV.shape[0]):
            share = (shard.scaled(logits_TV, rows) - log_sum_T[rows, None]).exp()
            chunk = share.mul_(-scale_T[rows, None])
            if shard.columns:
                hit = torch.where(mine_T[rows], scale_T[rows], 0.0)[:, None]
                chunk.scatter_add_(1, column_T[rows, None], hit)
            grad_TV[rows, : shard.columns] = chunk.to(grad_TV.dtype)
        return grad_TV, None, None, None


def _chunks(rows: int) -> list[slice]:
    return [slice(start, min(start + CHUNK_ROWS, rows)) for start in range(0, rows, CHUNK_ROWS)]


def vocab_parallel_logprobs(
    logits_TV: Tensor,
    targets_T: Tensor,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup,
    barred_T: Tensor | None = None,
    barred_tokens: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:
    """Log-probability of every target and entropy of every row under softmax(logits / temperature), float32 (nats).

    `logits_TV` are this rank's V consecutive columns of the padded vocabulary; columns from `vocab_size` on are
    padding, whose probability is 0, as is that of `barred_tokens` in the rows of `barred_T`. Gradients flow through
    the log-probabilities only.
    """
    V = logits_TV.shape[-1]
    start = V * group.rank()
    columns = min(max(vocab_size - start, 0), V)
    mine = tuple(token - start for token in barred_tokens if start <= token < start + columns)
    shard = _Shard(temperature, start, columns, barred_T if mine else None, mine)
    return _VocabParallelLogprobs.apply(logits_TV, targets_T, shard, group)


def packed_logprobs(
    logits_TV: Tensor,
    token_ids_T: Tensor,
    completion_index_T: Tensor,
    temperature: float,
    vocab_size: int,
    held_back: HeldBack,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """As `vocab_parallel_logprobs`, of the packed tokens themselves: entry t is about the token at t, as the logits at
    t - 1 predict it. Entry 0, and what stands at the first token of a segment, means nothing."""
    index_T = completion_index_T[1:]
    barred_T = (index_T >= 0) & (index_T < held_back.first) if held_back.first else None
    logprobs, entropy = vocab_parallel_logprobs(
        logits_TV[:-1], token_ids_T[1:], temperature, vocab_size, group, barred_T, held_back.token_ids
    )
    zero = logprobs.new_zeros(1)
    return torch.cat((zero, logprobs)), torch.cat((zero, entropy))
