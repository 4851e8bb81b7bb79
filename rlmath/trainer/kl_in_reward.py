"""KL inside of the reward: the reference's log-probs become part of every token's advantage."""

# Shape legend: T packed tokens of one micro-batch, N samples of the step.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from rlmath.algorithms.advantages import AdvantageKind, KLTotals, kl_shaped_advantages
from rlmath.algorithms.kl import KLKind, kl_estimate, to_go
from rlmath.data.packing import MicroBatch
from rlmath.distributed.mesh import Mesh
from rlmath.models.forward_backward import TokenLogprobs


@dataclass(frozen=True)
class KLPenalty:
    """How KL is part of the reward; see `AlgorithmConfig`."""

    coef: float
    kind: KLKind
    advantage: AdvantageKind
    eps: float


@dataclass(frozen=True)
class RewardKL:
    """KL of the sampling policy against the reference, by the chosen estimate (nats)."""

    per_token: float
    per_completion: float


def apply_kl_penalty(
    batches: Sequence[MicroBatch],
    old: Sequence[TokenLogprobs] | None,
    reference: Sequence[TokenLogprobs],
    rewards: Sequence[Sequence[float]],
    tokens: Sequence[Sequence[int]],
    penalty: KLPenalty,
    mesh: Mesh,
) -> tuple[list[MicroBatch], list[list[float]], RewardKL]:
    """This rank's micro-batches with new advantages, the mean advantage of every completion, and the KL. A collective.

    `old` are the log-probs of the policy that sampled, None to use the engine's own; `rewards` and `tokens` are those
    of all samples by group, in the order of the step's samples.
    """
    to_go_by_batch = []
    if mesh.is_last_stage:
        to_go_by_batch = [
            _to_go(batch, None if old is None else old[i].logprobs_T, reference[i].logprobs_T, penalty.kind)
            for i, batch in enumerate(batches)
        ]
    totals = _gather_totals(batches, to_go_by_batch, rewards, mesh)
    shaped = kl_shaped_advantages(rewards, tokens, totals, penalty.coef, penalty.advantage, penalty.eps)
    kl = sum(total.total for row in totals for total in row)
    reward_kl = RewardKL(kl / sum(map(sum, tokens)), kl / sum(map(len, rewards)))
    if mesh.is_last_stage:  # nothing else looks at advantages
        offsets_N = torch.tensor([a for row in shaped.offsets for a in row], dtype=torch.float64)
        batches = [
            replace(batch, advantages_T=_token_advantages(batch, to_go_T, offsets_N, shaped.slope))
            for batch, to_go_T in zip(batches, to_go_by_batch, strict=True)
        ]
    mean_advantages = [
        [offset - shaped.slope * total.mean for offset, total in zip(*rows, strict=True)]
        for rows in zip(shaped.offsets, totals, strict=True)
    ]
    return list(batches), mean_advantages, reward_kl


def _gather_totals(
    batches: Sequence[MicroBatch],
    to_go_by_batch: Sequence[Tensor],
    rewards: Sequence[Sequence[float]],
    mesh: Mesh,
) -> list[list[KLTotals]]:
    """Those of all samples by group, on every rank; over gloo."""
    totals_N3 = torch.zeros(sum(map(len, rewards)), 3, dtype=torch.float64)
    if mesh.counts_loss:
        for batch, to_go_T in zip(batches, to_go_by_batch, strict=True):
            counted_T = batch.completion_index_T >= 0
            bounds = batch.cu_seqlens_S1.tolist()
            for index, start, end in zip(batch.sample_indices, bounds, bounds[1:], strict=False):
                K = to_go_T[start:end][counted_T[start:end]]
                if len(K):
                    totals_N3[index] = torch.stack((K[0], K.mean(), (K - K.mean()).square().sum()))
    dist.all_reduce(totals_N3)
    rest = iter(totals_N3.tolist())
    return [[KLTotals(*next(rest)) for _ in row] for row in rewards]


def _to_go(batch: MicroBatch, old_T: Tensor | None, reference_T: Tensor, kind: KLKind) -> Tensor:
    """For every completion token the KL from there to the end of its completion; float64, on the CPU."""
    counted_T, kl_T = batch.completion_index_T >= 0, token_kl(batch, old_T, reference_T, kind)
    return to_go(torch.where(counted_T, kl_T, 0.0), batch.cu_seqlens_S1)


def token_kl(batch: MicroBatch, old_T: Tensor | None, reference_T: Tensor, kind: KLKind) -> Tensor:
    """The KL of every token (nats), of which those of completions have a meaning; float64, on the CPU. `old_T` are the
    log-probs of the policy that sampled, None to use the engine's own."""
    sampled_T = batch.behaviour_logprobs_T if old_T is None else old_T.cpu()
    return kl_estimate(kind, sampled_T.double(), reference_T.cpu().double())


def _token_advantages(batch: MicroBatch, to_go_T: Tensor, offsets_N: Tensor, slope: float) -> Tensor:
    padding = batch.n_segments - len(batch.sample_indices)
    offsets_S = torch.cat((offsets_N[list(batch.sample_indices)], offsets_N.new_zeros(padding)))
    advantages_T = offsets_S[batch.segments_T] - slope * to_go_T
    return torch.where(batch.completion_index_T >= 0, advantages_T, 0.0).float()
