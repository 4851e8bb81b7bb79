"""The teacher inside of the advantages: on-policy distillation by the reverse KL of every sampled token.

To the advantage of token t comes coef x (log teacher_t - log q_t), q being the policy that the step began with. Its
mean over what q samples is -coef x KL(q || teacher) of this token; what the token changes for later tokens is not in
it.
"""

# Shape legend: T packed tokens of one micro-batch, N samples of the step.

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from rlmath.data.packing import MicroBatch
from rlmath.distributed.mesh import Mesh
from rlmath.models.forward_backward import TokenLogprobs


@dataclass(frozen=True)
class TeacherAdvantages:
    """What the teacher adds to a step."""

    batches: list[MicroBatch]
    """This rank's, with new advantages."""
    mean_advantages: list[list[float]]
    """By group and completion, over its tokens."""
    kl_per_token: float
    """KL(policy || teacher), estimated from the sampled tokens (nats)."""


def add_teacher_advantages(
    batches: Sequence[MicroBatch],
    policy: Sequence[TokenLogprobs] | None,
    teacher: Sequence[TokenLogprobs],
    mean_advantages: Sequence[Sequence[float]],
    tokens: Sequence[Sequence[int]],
    coef: float,
    vocab_size: int,
    mesh: Mesh,
) -> TeacherAdvantages:
    """This rank's micro-batches with the teacher's part in their advantages. A collective.

    `policy` are the log-probs of the policy that sampled, None to use the engine's own. Tokens from `vocab_size` on are
    not known to both, and get nothing. `mean_advantages` are those without the teacher, `tokens` the numbers of tokens,
    both of all completions by group, in the order of the step's samples.
    """
    gaps = []
    if mesh.is_last_stage:
        gaps = [
            _gap(batch, None if policy is None else policy[i].logprobs_T, teacher[i].logprobs_T, vocab_size)
            for i, batch in enumerate(batches)
        ]
        batches = [  # nothing else looks at advantages
            replace(batch, advantages_T=(batch.advantages_T.double() + coef * gap_T).float())
            for batch, gap_T in zip(batches, gaps, strict=True)
        ]
    sums_N = _gather_sums(batches, gaps, sum(map(len, tokens)), mesh)
    rest = iter(sums_N.tolist())
    mean = [
        [advantage + coef * next(rest) / max(1, count) for advantage, count in zip(*rows, strict=True)]
        for rows in zip(mean_advantages, tokens, strict=True)
    ]
    return TeacherAdvantages(list(batches), mean, -float(sums_N.sum()) / max(1, sum(map(sum, tokens))))


def _gap(batch: MicroBatch, policy_T: Tensor | None, teacher_T: Tensor, vocab_size: int) -> Tensor:
    """The teacher's log-prob minus the policy's, of completion tokens; float64, on the CPU."""
    sampled_T = batch.behaviour_logprobs_T if policy_T is None else policy_T.cpu()
    counted_T = (batch.completion_index_T >= 0) & (batch.token_ids_T < vocab_size)
    return torch.where(counted_T, teacher_T.cpu().double() - sampled_T.double(), 0.0)


def _gather_sums(batches: Sequence[MicroBatch], gaps: Sequence[Tensor], samples: int, mesh: Mesh) -> Tensor:
    """Of every sample's gaps, on every rank; over gloo."""
    sums_N = torch.zeros(samples, dtype=torch.float64)
    if mesh.counts_loss:
        for batch, gap_T in zip(batches, gaps, strict=True):
            bounds = itertools.pairwise(batch.cu_seqlens_S1.tolist())
            for index, (start, end) in zip(batch.sample_indices, bounds, strict=False):
                sums_N[index] = gap_T[start:end].sum()
    dist.all_reduce(sums_N)
    return sums_N
