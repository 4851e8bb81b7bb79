"""Log-probabilities and entropy from logits whose vocabulary is split over the tensor-parallel ranks."""

# Shape legend: T packed tokens, V columns of this rank's vocabulary shard.

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ROWS = 2048
"""Tokens that are worked on at a time: bounds the float32 copies beside the logits."""


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        targets_T: Tensor,
        temperature: float,
        vocab_start: int,
        real_columns: int,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        top_T = _row_maxima(logits_TV, temperature, real_columns)
        dist.all_reduce(top_T, op=dist.ReduceOp.MAX, group=group)
        local_T = targets_T - vocab_start
        mine_T = (local_T >= 0) & (local_T < real_columns)
        column_T = local_T.clamp(0, max(real_columns - 1, 0))
        sums_3T = torch.zeros(3, logits_TV.shape[0], dtype=torch.float32, device=logits_TV.device)
        for rows in _chunks(logits_TV.shape[0]):
            shifted = logits_TV[rows, :real_columns].float() / temperature - top_T[rows, None]
            weight = shifted.exp()
            sums_3T[0, rows] = weight.sum(-1)
            sums_3T[1, rows] = (weight * shifted).sum(-1)
            if real_columns:
                target = shifted.gather(1, column_T[rows, None]).squeeze(1)
                sums_3T[2, rows] = torch.where(mine_T[rows], target, 0.0)
        dist.all_reduce(sums_3T, group=group)
        log_norm_T = sums_3T[0].log()
        entropy_T = log_norm_T - sums_3T[1] / sums_3T[0]
        ctx.save_for_backward(logits_TV, top_T + log_norm_T, mine_T, column_T)
        ctx.temperature, ctx.real_columns = temperature, real_columns
        ctx.mark_non_differentiable(entropy_T)
        return sums_3T[2] - log_norm_T, entropy_T

    @staticmethod
    def backward(
        ctx: Any, grad_T: Tensor, _grad_entropy: Tensor
    ) -> tuple[Tensor, None, None, None, None, None]:
        logits_TV, log_sum_T, mine_T, column_T = ctx.saved_tensors
        grad_TV = torch.zeros_like(logits_TV)
        scale_T = grad_T / ctx.temperature
        for rows in _chunks(logits_TV.shape[0]):
            share = (
                logits_TV[rows, : ctx.real_columns].float() / ctx.temperature - log_sum_T[rows, None]
            ).exp()
            chunk = share.mul_(-scale_T[rows, None])
            if ctx.real_columns:
                hit = torch.where(mine_T[rows], scale_T[rows], 0.0)[:, None]
                chunk.scatter_add_(1, column_T[rows, None], hit)
            grad_TV[rows, : ctx.real_columns] = chunk.to(grad_TV.dtype)
        return grad_TV, None, None, None, None, None


def _chunks(rows: int) -> list[slice]:
    return [slice(start, min(start + CHUNK_ROWS, rows)) for start in range(0, rows, CHUNK_ROWS)]


def _row_maxima(logits_TV: Tensor, temperature: float, real_columns: int) -> Tensor:
    if not real_columns:
        return torch.full((logits_TV.shape[0],), -torch.inf, device=logits_TV.device)
    return logits_TV[:, :real_columns].amax(-1).float() / temperature


def vocab_parallel_logprobs(
    logits_TV: Tensor,
    targets_T: Tensor,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Log-probability of every target and entropy of every row under softmax(logits / temperature), float32 (nats).

    `logits_TV` are this rank's V consecutive columns of the padded vocabulary; columns from `vocab_size` on are
    padding, whose probability is 0. Gradients flow through the log-probabilities only.
    """
    V = logits_TV.shape[-1]
    vocab_start = V * group.rank()
    real_columns = min(max(vocab_size - vocab_start, 0), V)
    return _VocabParallelLogprobs.apply(logits_TV, targets_T, temperature, vocab_start, real_columns, group)


def packed_logprobs(
    logits_TV: Tensor, token_ids_T: Tensor, temperature: float, vocab_size: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """As `vocab_parallel_logprobs`, of the packed tokens themselves: entry t is about the token at t, as the logits at
    t - 1 predict it. Entry 0, and what stands at the first token of a segment, means nothing."""
    logprobs, entropy = vocab_parallel_logprobs(
        logits_TV[:-1], token_ids_T[1:], temperature, vocab_size, group
    )
    zero = logprobs.new_zeros(1)
    return torch.cat((zero, logprobs)), torch.cat((zero, entropy))
