"""Log-probabilities, entropy and the KL to a teacher, from logits split over tensor-parallel ranks.

THE BACKWARD PASS OVERWRITES THE LOGITS WITH THEIR GRADIENT. They are the largest tensor of a step
(packed tokens times vocabulary), so nothing of their size is allocated beside them, neither forward
nor backward: after `backward()` the tensor that was passed in holds its own gradient. It must
belong to nobody else, and a second backward pass through the same graph is an error.

Both passes read each logit from memory once, and (backward) write it once: on a GPU by kernels
(`logprob_kernels.py`), elsewhere by torch's operations over chunks of rows small enough to stay in
the cache. As in a stable softmax, logits are shifted by the row's maximum; they are scaled to bits,
exponents of 2, since torch's `exp2` takes a quarter of the time of its `exp` on a CPU. Sums are in
float32.

The teacher's logits are never whole: they are computed for a block of rows at a time
(`TeacherRows`).
"""

# Shape legend: T packed tokens, R rows of a chunk or block, V columns of this rank's vocabulary
# shard, H hidden units of the teacher.

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlmath.models.kernels import triton_kernels
from rlmath.models.scratch_sizes import CHUNK_BYTES, TEACHER_BLOCK_BYTES

MASKED_LOGIT = -1e30
"""Scaled logit (bits) of a token that cannot be sampled: finite, so that 0 times it is 0."""

LN2 = math.log(2)


@dataclass(frozen=True)
class TeacherRows:
    """A teacher's distribution at every row: softmax(hidden x output layer / temperature)."""

    hidden_TH: Tensor
    head_VH: Tensor
    """This rank's rows of the output layer, for the tokens of its columns of the logits."""
    vocab_size: int
    """Tokens that both models know; others are left out of both distributions."""


@dataclass(frozen=True)
class MinTokensMask:
    """Tokens that the engine masks at the start of a completion.

    They are the stop tokens, under `rollout.min_new_tokens`. The trainer masks them, too, so that
    both have the same distribution."""

    token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    """Positions of a completion, from its start, at which they are masked."""


def next_logprobs(
    logits_TV: Tensor,
    next_ids_T: Tensor,
    next_index_T: Tensor,
    temperature: float,
    vocab_size: int,
    min_tokens_mask: MinTokensMask,
    group: dist.ProcessGroup,
    teacher: TeacherRows | None = None,
) -> tuple[Tensor, ...]:
    """Do `vocab_parallel_logprobs` for the token that each row predicts, with the engine's mask.

    `next_index_T` are these tokens' positions in their completions, below 0 in prompts."""
    masked_T = None
    if min_tokens_mask.min_tokens:
        masked_T = (next_index_T >= 0) & (next_index_T < min_tokens_mask.min_tokens)
    return vocab_parallel_logprobs(
        logits_TV,
        next_ids_T,
        temperature,
        vocab_size=vocab_size,
        group=group,
        masked_T=masked_T,
        masked_tokens=min_tokens_mask.token_ids,
        teacher=teacher,
    )


def shift_to_tokens(
    of_next: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    token_ids_T: Tensor,
    completion_index_T: Tensor,
) -> tuple[Tensor, ...]:
    """Values per token from `of_next(tokens, completion_index)`, shifted by one.

    `of_next` has them for the token that each row predicts; shifted, entry t is about the token at
    t, which the logits at t - 1 predict. Entry 0 is 0, and that of the first token of a segment has
    no meaning."""
    row_values = of_next(token_ids_T.roll(-1), completion_index_T.roll(-1))
    return tuple(torch.cat((values_T.new_zeros(1), values_T[:-1])) for values_T in row_values)


def vocab_parallel_logprobs(
    logits_TV: Tensor,
    targets_T: Tensor,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup,
    masked_T: Tensor | None = None,
    masked_tokens: tuple[int, ...] = (),
    teacher: TeacherRows | None = None,
) -> tuple[Tensor, ...]:
    """Log-probs of the targets and entropies of the rows under softmax(logits / temperature).

    They are float32 (nats). With a teacher there is also KL(student || teacher) of every row over
    the tokens that both know (nats): sum of p (log p - log t), both at the temperature and with the
    same tokens masked.

    `logits_TV` are this rank's V consecutive columns of the padded vocabulary; columns from
    `vocab_size` on are padding, whose probability is 0, as is that of `masked_tokens` in the rows
    of `masked_T`. Gradients flow through all results. THE BACKWARD PASS OVERWRITES `logits_TV` WITH
    ITS GRADIENT: pass logits that nobody else reads, as a view if need be, but not as a slice of
    rows, whose own backward pass would allocate a full tensor. A second backward pass raises
    RuntimeError.
    """

    def shard_of(tokens: int) -> _Shard:
        start, columns = _own_columns(logits_TV, tokens, group)
        masked_columns = tuple(
            token - start for token in masked_tokens if start <= token < start + columns
        )
        return _Shard(
            temperature,
            start,
            columns,
            masked_T=masked_T if masked_columns else None,
            masked_columns=masked_columns,
        )

    shard = shard_of(vocab_size)
    if teacher is None:
        return _VocabParallelLogprobs.apply(logits_TV, targets_T, shard, group)
    both = shard_of(min(vocab_size, teacher.vocab_size))
    return _VocabParallelTeacherKL.apply(logits_TV, targets_T, shard, both, group, teacher)


def is_argmax(
    logits_TV: Tensor, targets_T: Tensor, vocab_size: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """1.0 where no token has a larger logit than the target, else 0.0; and the row's largest logit.

    Both are float32. No tensor of the logits' size is made, and they are not changed. A collective.
    """
    start, columns = _own_columns(logits_TV, vocab_size, group)
    tops_2T = torch.full(
        (2, len(targets_T)), MASKED_LOGIT, dtype=torch.float32, device=logits_TV.device
    )
    if columns:
        local_T = targets_T - start
        mine_T = (local_T >= 0) & (local_T < columns)
        target_T = logits_TV.gather(1, local_T.clamp(0, columns - 1)[:, None])[:, 0].float()
        tops_2T[0] = torch.where(mine_T, target_T, MASKED_LOGIT)
        tops_2T[1] = logits_TV[:, :columns].amax(-1).float()
    dist.all_reduce(tops_2T, op=dist.ReduceOp.MAX, group=group)
    return (tops_2T[0] >= tops_2T[1]).float(), tops_2T[1]


def _own_columns(logits_TV: Tensor, vocab_size: int, group: dist.ProcessGroup) -> tuple[int, int]:
    """(first token, real columns) of this rank's vocabulary shard."""
    V = logits_TV.shape[-1]
    start = V * group.rank()
    return start, min(max(vocab_size - start, 0), V)


# ------------------------------------------------------------- the passes over one vocabulary shard


@dataclass(frozen=True)
class _Shard:
    """This rank's part of the vocabulary, and how its logits are read."""

    temperature: float
    start: int
    columns: int
    """Real columns; those behind are padding."""
    masked_T: Tensor | None
    """Rows in which `masked_columns` cannot be sampled; None where there are none."""
    masked_columns: tuple[int, ...]

    @property
    def bits(self) -> float:
        """The factor from a logit to an exponent of 2."""
        return 1 / (self.temperature * LN2)

    def chunks(self, logits_TV: Tensor) -> list[slice]:
        """The rows, `CHUNK_BYTES` at a time; none where this rank has no real column."""
        return self.rows_of(logits_TV, CHUNK_BYTES)

    def rows_of(self, logits_TV: Tensor, chunk_bytes: dict[str, int]) -> list[slice]:
        """The rows, so many float32 bytes at a time; none where this rank has no real column."""
        if not self.columns:
            return []
        rows = logits_TV.shape[0]
        step = max(1, chunk_bytes[logits_TV.device.type] // (4 * self.columns))
        return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]

    def at(self, rows: slice) -> _Shard:
        """The shard for some rows alone."""
        return self if self.masked_T is None else replace(self, masked_T=self.masked_T[rows])

    def scratch(self, logits_TV: Tensor) -> tuple[Tensor, Tensor]:
        """Two float32 chunks to work in."""
        rows = max((chunk.stop - chunk.start for chunk in self.chunks(logits_TV)), default=0)
        return torch.empty(
            2, rows, self.columns, dtype=torch.float32, device=logits_TV.device
        ).unbind()

    def neg_max(self, logits_TV: Tensor, rows: slice, scratch_RV: Tensor) -> Tensor:
        """Minus the largest scaled logit of each row among those that can be sampled (bits)."""
        raw_RV = logits_TV[rows, : self.columns]
        if self.masked_T is not None:
            raw_RV = scratch_RV[: raw_RV.shape[0]].copy_(raw_RV)
            self.mask(raw_RV, rows, MASKED_LOGIT)
        return raw_RV.amax(-1).float().mul_(-self.bits)

    def shifted_logits(
        self, logits_TV: Tensor, rows: slice, neg_max_T: Tensor, out_RV: Tensor
    ) -> Tensor:
        """Scaled logits plus `neg_max_T` (bits), written to the head of `out_RV`.

        A fused multiply-add costs large logits no digits: the rounding of `neg_max_T` is common to
        a row and cancels."""
        raw_RV = logits_TV[rows, : self.columns]
        return torch.add(
            neg_max_T[rows, None], raw_RV, alpha=self.bits, out=out_RV[: raw_RV.shape[0]]
        )

    def mask(self, values_RV: Tensor, rows: slice, value: float) -> None:
        """Overwrite the entries of the masked tokens."""
        if self.masked_T is not None:
            for column in self.masked_columns:
                values_RV[:, column].masked_fill_(self.masked_T[rows], value)


@dataclass(frozen=True)
class _RowSums:
    """What the backward pass needs of every row, over the whole vocabulary."""

    neg_max_T: Tensor
    """Minus the largest scaled logit (bits); for the kernels minus the largest logit."""
    mass_T: Tensor
    """Sum of 2^b, b being the shifted logits."""
    logprobs_T: Tensor
    entropy_T: Tensor
    mine_T: Tensor
    """Whether this shard holds the target."""
    column_T1: Tensor
    """The target's column, where it does."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (
            self.neg_max_T,
            self.mass_T,
            self.logprobs_T,
            self.entropy_T,
            self.mine_T,
            self.column_T1,
        )

    def at(self, rows: slice) -> _RowSums:
        return _RowSums(*(tensor[rows] for tensor in self.tensors))


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, targets_T: Tensor, shard: _Shard, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        sums = _row_sums(logits_TV, targets_T, shard, group)
        ctx.save_for_backward(logits_TV, *sums.tensors)
        ctx.shard = shard
        return sums.logprobs_T, sums.entropy_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_T: Tensor | None, grad_entropy_T: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        """The gradient, in the storage of the logits."""
        if grad_logprobs_T is None and grad_entropy_T is None:
            return None, None, None, None
        logits_TV, *tensors = ctx.saved_tensors
        # Shares the version counter of the saved logits: once it is written, another backward pass
        # is refused.
        grad_TV = logits_TV.detach()
        _overwrite_with_gradient(
            grad_TV,
            _RowSums(*tensors),
            ctx.shard,
            grad_logprobs_T=grad_logprobs_T,
            grad_entropy_T=grad_entropy_T,
        )
        return grad_TV, None, None, None


def _row_sums(
    logits_TV: Tensor, targets_T: Tensor, shard: _Shard, group: dist.ProcessGroup
) -> _RowSums:
    """The sums over all shards.

    A collective."""
    local_T = targets_T - shard.start
    mine_T = (local_T >= 0) & (local_T < shard.columns)
    column_T1 = local_T.clamp(0, max(shard.columns - 1, 0))[:, None]
    if kernels := triton_kernels("logprob_kernels", logits_TV.device.type):
        own_neg_max_T, sums_3T = kernels.shard_sums(
            logits_TV,
            shard.columns,
            shard.temperature,
            column_T1=column_T1,
            masked_T=shard.masked_T,
            masked_columns=shard.masked_columns,
        )
        unit_bits = shard.bits
    else:
        own_neg_max_T, sums_3T = _local_sums(logits_TV, shard)
        sums_3T[2] = _shifted_targets(logits_TV, column_T1, own_neg_max_T, shard)
        unit_bits = 1.0
    top_T = -own_neg_max_T
    dist.all_reduce(top_T, op=dist.ReduceOp.MAX, group=group)
    neg_max_T = -top_T
    _shift_further(sums_3T, (neg_max_T - own_neg_max_T) * unit_bits, mine_T)
    dist.all_reduce(sums_3T, group=group)
    mass_T, moment_T, target_T = sums_3T.unbind()
    log_mass_T = mass_T.log()
    entropy_T = (log_mass_T - LN2 * moment_T / mass_T).clamp_(min=0)
    logprobs_T = (LN2 * target_T - log_mass_T).clamp_(max=0)
    return _RowSums(
        neg_max_T,
        mass_T,
        logprobs_T=logprobs_T,
        entropy_T=entropy_T,
        mine_T=mine_T,
        column_T1=column_T1,
    )


def _overwrite_with_gradient(
    grad_TV: Tensor,
    sums: _RowSums,
    shard: _Shard,
    grad_logprobs_T: Tensor | None,
    grad_entropy_T: Tensor | None,
) -> None:
    """Turn logits into their gradient.

    With p the probabilities and H the entropy: d logprob / d logit_j = ([j is the target] - p_j) /
    temperature, d H / d logit_j = -p_j (log p_j + H) / temperature. A row whose incoming gradients
    are all 0 gets exactly 0, whatever its logits hold.
    """
    if kernels := triton_kernels("logprob_kernels", grad_TV.device.type):
        kernels.overwrite_with_gradient(
            grad_TV,
            shard.columns,
            shard.temperature,
            row_sums=sums.tensors,
            grad_logprobs_T=grad_logprobs_T,
            grad_entropy_T=grad_entropy_T,
            masked_T=shard.masked_T,
            masked_columns=shard.masked_columns,
        )
        return
    logprobs_T = sums.logprobs_T
    entropy_T = sums.entropy_T
    mass_T = sums.mass_T
    zero_T = torch.zeros_like(mass_T)
    pull_T = zero_T if grad_logprobs_T is None else grad_logprobs_T / shard.temperature
    spread_T = zero_T if grad_entropy_T is None else grad_entropy_T / shard.temperature
    idle_T = (pull_T == 0) & (spread_T == 0)
    offset_T = (spread_T * (mass_T.log() - entropy_T) - pull_T) / mass_T
    slope_T = None if grad_entropy_T is None else spread_T * -LN2 / mass_T
    _write_gradient(
        grad_TV, shard, idle_T=idle_T, neg_max_T=sums.neg_max_T, offset_T=offset_T, slope_T=slope_T
    )
    # 1 - p of the target has lost its digits where p is close to 1.
    target_T = (
        -torch.expm1(logprobs_T) * pull_T - logprobs_T.exp() * (logprobs_T + entropy_T) * spread_T
    )
    # One entry of each row whose target this shard holds.
    other_T1 = grad_TV.gather(1, sums.column_T1)
    grad_TV.scatter_(
        1,
        sums.column_T1,
        torch.where(sums.mine_T[:, None], target_T[:, None].to(other_T1), other_T1),
    )
    shard.mask(grad_TV, slice(None), 0.0)
    grad_TV[:, shard.columns :].zero_()
    _clear_rows(grad_TV, idle_T)


def _local_sums(logits_TV: Tensor, shard: _Shard) -> tuple[Tensor, Tensor]:
    """Sums of this shard alone: `_Shard.neg_max` of every row, and the sums.

    With b the shifted logits (bits, 0 at most), rows 0 and 1 of the sums are the mass, sum of 2^b,
    and the moment, sum of b 2^b."""
    T = logits_TV.shape[0]
    neg_max_T = torch.full((T,), -MASKED_LOGIT, dtype=torch.float32, device=logits_TV.device)
    sums_3T = torch.zeros(3, T, dtype=torch.float32, device=logits_TV.device)
    scratch = shard.scratch(logits_TV)
    for rows in shard.chunks(logits_TV):
        neg_max_T[rows] = shard.neg_max(logits_TV, rows, scratch[0])
        bits_RV = shard.shifted_logits(logits_TV, rows, neg_max_T, out_RV=scratch[0])
        shard.mask(bits_RV, rows, MASKED_LOGIT)
        weight_RV = torch.exp2(bits_RV, out=scratch[1][: bits_RV.shape[0]])
        torch.sum(weight_RV, -1, out=sums_3T[0, rows])
        torch.sum(bits_RV.mul_(weight_RV), -1, out=sums_3T[1, rows])
    return neg_max_T, sums_3T


def _shifted_targets(
    logits_TV: Tensor, column_T1: Tensor, neg_max_T: Tensor, shard: _Shard
) -> Tensor:
    """The scaled logit of each row's target plus `neg_max_T` (bits)."""
    bits_T = torch.add(neg_max_T, logits_TV.gather(1, column_T1)[:, 0], alpha=shard.bits)
    if shard.masked_T is not None:
        for column in shard.masked_columns:
            bits_T.masked_fill_(shard.masked_T & (column_T1[:, 0] == column), MASKED_LOGIT)
    return bits_T


def _shift_further(sums_3T: Tensor, by_T: Tensor, mine_T: Tensor) -> None:
    """Shift mass, moment and target of a shard, in place.

    They become what they would be had `by_T` (bits, 0 at most) been added to its `neg_max_T`; the
    target becomes 0 where another shard holds it."""
    mass_T, moment_T, target_T = sums_3T.unbind()
    scale_T = by_T.exp2()
    moment_T.addcmul_(by_T, mass_T).mul_(scale_T)
    mass_T.mul_(scale_T)
    target_T.add_(by_T).masked_fill_(~mine_T, 0.0)


def _write_gradient(
    grad_TV: Tensor,
    shard: _Shard,
    idle_T: Tensor,
    neg_max_T: Tensor,
    offset_T: Tensor,
    slope_T: Tensor | None,
) -> None:
    """Turn logits into (slope * b + offset) * 2^b, b being the shifted logits (bits).

    It is done chunk by chunk; None is a slope of 0. Idle rows may hold anything afterwards."""
    scratch = shard.scratch(grad_TV)
    for rows in shard.chunks(grad_TV):
        # Of a GPU the host would have to wait for the answer.
        if idle_T.device.type == "cpu" and bool(idle_T[rows].all()):
            continue
        bits_RV = shard.shifted_logits(grad_TV, rows, neg_max_T, out_RV=scratch[0])
        out_RV = grad_TV[rows, : shard.columns]
        if slope_T is None:
            torch.mul(bits_RV.exp2_(), offset_T[rows, None], out=out_RV)
            continue
        weight_RV = torch.exp2(bits_RV, out=scratch[1][: bits_RV.shape[0]])
        torch.mul(
            bits_RV.mul_(slope_T[rows, None]).add_(offset_T[rows, None]), weight_RV, out=out_RV
        )


def _clear_rows(grad_TV: Tensor, idle_T: Tensor) -> None:
    """Set the idle rows to 0, whatever they hold.

    On CPU only these are written; of a GPU the host would have to wait for their number, and a pass
    over all rows takes a fraction of what the gradient took."""
    if idle_T.device.type == "cpu":
        grad_TV.index_fill_(0, idle_T.nonzero()[:, 0], 0.0)
    else:
        grad_TV.masked_fill_(idle_T[:, None], 0.0)


# ---------------------------------------------------------------- the KL to a teacher


class _VocabParallelTeacherKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        targets_T: Tensor,
        shard: _Shard,
        both: _Shard,
        group: dist.ProcessGroup,
        teacher: TeacherRows,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`both` is the shard of the tokens that both models know."""
        ctx.set_materialize_grads(False)
        sums = _row_sums(logits_TV, targets_T, shard, group)
        neg_max_2T, mass_2T, kl_T = _teacher_kl(logits_TV, both, group, teacher)
        # Saved, the teacher's hidden states are freed with the logits; as an attribute they would
        # stay for the pass.
        ctx.save_for_backward(
            logits_TV,
            teacher.hidden_TH,
            teacher.head_VH,
            neg_max_2T,
            mass_2T,
            kl_T,
            *sums.tensors,
        )
        ctx.shard = shard
        ctx.both = both
        ctx.vocab_size = teacher.vocab_size
        return sums.logprobs_T, sums.entropy_T, kl_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_logprobs_T: Tensor | None,
        grad_entropy_T: Tensor | None,
        grad_kl_T: Tensor | None,
    ) -> tuple[Tensor | None, None, None, None, None, None]:
        """The gradient, in the storage of the logits, block by block.

        That of the KL is made from a block's logits, and added to the block when the rest of its
        gradient stands there."""
        logits_TV, hidden_TH, head_VH, neg_max_2T, mass_2T, kl_T, *tensors = ctx.saved_tensors
        sums = _RowSums(*tensors)
        shard = ctx.shard
        both = ctx.both
        grad_TV = logits_TV.detach()
        teacher = TeacherRows(hidden_TH, head_VH, ctx.vocab_size)
        if grad_kl_T is None:
            _overwrite_with_gradient(
                grad_TV, sums, shard, grad_logprobs_T=grad_logprobs_T, grad_entropy_T=grad_entropy_T
            )
            return grad_TV, None, None, None, None, None
        # A rank without a token that both know has other real columns, or none.
        for rows in both.rows_of(logits_TV, TEACHER_BLOCK_BYTES) or [slice(0, logits_TV.shape[0])]:
            kl_gradient_RV = None
            if both.columns:
                kl_gradient_RV = _teacher_kl_gradient(
                    logits_TV,
                    both,
                    rows=rows,
                    teacher=teacher,
                    neg_max_2T=neg_max_2T,
                    mass_2T=mass_2T,
                    kl_T=kl_T,
                    grad_kl_T=grad_kl_T,
                )
            _overwrite_with_gradient(
                grad_TV[rows],
                sums.at(rows),
                shard.at(rows),
                grad_logprobs_T=None if grad_logprobs_T is None else grad_logprobs_T[rows],
                grad_entropy_T=None if grad_entropy_T is None else grad_entropy_T[rows],
            )
            if kl_gradient_RV is not None:
                grad_TV[rows, : both.columns] += kl_gradient_RV
            del kl_gradient_RV  # before the next one is made
        return grad_TV, None, None, None, None, None


def _teacher_kl(
    logits_TV: Tensor, both: _Shard, group: dist.ProcessGroup, teacher: TeacherRows
) -> tuple[Tensor, Tensor, Tensor]:
    """Minus the largest scaled logit (bits) and the mass of both models, and the KL of every row.

    Row 0 is the student's, row 1 the teacher's. The KL is the sum of p (b - c) - log mass + log
    mass of the teacher, b and c being the shifted logits. A collective."""
    T = logits_TV.shape[0]
    device = logits_TV.device
    own_neg_max_2T = torch.full((2, T), -MASKED_LOGIT, dtype=torch.float32, device=device)
    sums_3T = torch.zeros(3, T, dtype=torch.float32, device=device)
    for rows in both.rows_of(logits_TV, TEACHER_BLOCK_BYTES):
        _add_block_sums(
            logits_TV, both, rows=rows, teacher=teacher, neg_max_2T=own_neg_max_2T, sums_3T=sums_3T
        )
    top_2T = -own_neg_max_2T
    dist.all_reduce(top_2T, op=dist.ReduceOp.MAX, group=group)
    neg_max_2T = -top_2T
    by_2T = neg_max_2T - own_neg_max_2T
    sums_3T[2].addcmul_(by_2T[0] - by_2T[1], sums_3T[0]).mul_(by_2T[0].exp2())
    sums_3T[:2].mul_(by_2T.exp2())
    dist.all_reduce(sums_3T, group=group)
    mass_2T = sums_3T[:2]
    log_mass_2T = mass_2T.log()
    kl_T = (LN2 * sums_3T[2] / mass_2T[0] - log_mass_2T[0] + log_mass_2T[1]).clamp_(min=0)
    return neg_max_2T, mass_2T, kl_T


def _add_block_sums(
    logits_TV: Tensor,
    both: _Shard,
    rows: slice,
    teacher: TeacherRows,
    neg_max_2T: Tensor,
    sums_3T: Tensor,
) -> None:
    """Write what a block has in this shard alone.

    That is both models' maxima and masses, and the sum of 2^b (b - c)."""
    student_RV, teacher_RV = _block(
        logits_TV, both, rows, teacher=teacher, neg_max_2T=neg_max_2T, find_max=True
    )
    weight_RV = student_RV.exp2()
    torch.sum(weight_RV, -1, out=sums_3T[0, rows])
    torch.sum(weight_RV.mul_(student_RV.sub_(teacher_RV)), -1, out=sums_3T[2, rows])
    torch.sum(teacher_RV.exp2_(), -1, out=sums_3T[1, rows])


def _block(
    logits_TV: Tensor,
    both: _Shard,
    rows: slice,
    teacher: TeacherRows,
    neg_max_2T: Tensor,
    find_max: bool,
) -> list[Tensor]:
    """The shifted logits of student and teacher (bits, float32), masked tokens at `MASKED_LOGIT`.

    With `find_max` their maxima are first written to `neg_max_2T`, by which they are shifted."""
    shard = both.at(rows)
    shifted = []
    raw = (logits_TV[rows], torch.mm(teacher.hidden_TH[rows], teacher.head_VH[: both.columns].t()))
    for model, raw_RV in enumerate(raw):
        every = slice(0, raw_RV.shape[0])
        bits_RV = torch.empty(every.stop, both.columns, dtype=torch.float32, device=raw_RV.device)
        if find_max:
            neg_max_2T[model, rows] = shard.neg_max(raw_RV, every, bits_RV)
        shard.shifted_logits(raw_RV, every, neg_max_2T[model, rows], out_RV=bits_RV)
        shard.mask(bits_RV, every, MASKED_LOGIT)
        shifted.append(bits_RV)
    return shifted


def _teacher_kl_gradient(
    logits_TV: Tensor,
    both: _Shard,
    rows: slice,
    teacher: TeacherRows,
    neg_max_2T: Tensor,
    mass_2T: Tensor,
    kl_T: Tensor,
    grad_kl_T: Tensor,
) -> Tensor:
    """The gradient of a block: d KL / d logit_j = p_j (log p_j - log t_j - KL) / temperature.

    It is multiplied by the incoming gradient, float32. A row whose incoming gradient is 0 gets
    exactly 0."""
    student_RV, teacher_RV = _block(
        logits_TV, both, rows, teacher=teacher, neg_max_2T=neg_max_2T, find_max=False
    )
    log_mass_2R = mass_2T[:, rows].log()
    weight_RV = torch.sub(student_RV, teacher_RV, out=teacher_RV).mul_(LN2)
    weight_RV.add_((log_mass_2R[1] - log_mass_2R[0] - kl_T[rows])[:, None])
    weight_RV.mul_(student_RV.exp2_()).mul_(
        (grad_kl_T[rows] / both.temperature / mass_2T[0, rows])[:, None]
    )
    return weight_RV.masked_fill_((grad_kl_T[rows] == 0)[:, None], 0.0)
