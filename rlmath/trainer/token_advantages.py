"""Advantages of tokens that more than a completion's reward gives: KL, a teacher, a critic.

A step is scored, packed, given log-probs; then every `AdvantagePart` that the settings have makes
new `Advantages` of the last ones, and the minibatches are learned from. All ranks call all of it
alike.

The teacher adds coef x (log teacher_t - log q_t) to the advantage of token t, q being the policy
that the step began with: on-policy distillation. Its mean over what q samples is -coef x KL(q ||
teacher) of this token; what the token changes for later tokens is not in it.
"""

# Shape legend: P prompts, G completions of a prompt, T packed tokens of one micro-batch, N samples
# of the step.

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlmath.algorithms.advantages import KLTotals, kl_shaped_advantages
from rlmath.algorithms.kl import KLKind, kl_estimate, to_go
from rlmath.algorithms.token_selection import TokenRules, chosen_tokens
from rlmath.algorithms.types import ScoredGroup
from rlmath.config.schema import AlgorithmConfig
from rlmath.data.packing import MicroBatch
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.models.build import Actor
from rlmath.models.learner import MinibatchResult
from rlmath.models.offload import OffloadSets
from rlmath.models.teacher import Teacher

# -------------------------------------------------------- the records of a step, one for each stage


@dataclass(frozen=True)
class ScoredStep:
    """What a step learns from."""

    number: int
    """Number of the step, from 0 over the whole run."""
    groups: Sequence[ScoredGroup]
    rewards_PG: list[list[float]]
    tokens_PG: list[list[int]]
    """Sampled tokens of the completions."""


@dataclass(frozen=True)
class PackedStep:
    """A scored step's samples as this data-parallel rank's micro-batches."""

    scored: ScoredStep
    batches: list[MicroBatch]
    minibatch_slices: tuple[slice, ...]
    """The micro-batches of each minibatch, in `batches`."""
    seed: int
    """Seed of everything that the step shuffles."""

    def orders(self, epochs: int, shuffle: bool) -> list[list[int]]:
        """The order of the minibatches in every epoch."""
        order = list(range(len(self.minibatch_slices)))
        draw = random.Random(self.seed)
        orders = []
        for epoch in range(epochs):
            if epoch > 0 and shuffle:
                draw.shuffle(order)
            orders.append(list(order))
        return orders


@dataclass(frozen=True)
class StepLogprobs:
    """Log-probs of a packed step's tokens at the step's beginning."""

    old: list[Tensor] | None
    """Log-probs under the policy; None: the engine's, or the update's own forward pass's."""
    reference: list[Tensor] | None
    """Log-probs under the reference; None where there is no KL."""
    entropy: list[Tensor] | None = None
    """Entropy of the policy's distribution at each token; None where no token is chosen by it."""


@dataclass(frozen=True)
class Advantages:
    """Advantages of a step's tokens, and what the parts that gave them report of themselves."""

    batches: list[MicroBatch]
    """This rank's micro-batches, with advantages."""
    means_PG: list[list[float]]
    """The mean advantage of every completion."""
    reward_kl: RewardKL | None = None
    critic_results: Sequence[MinibatchResult] = ()
    critic_metrics: Mapping[str, float] = field(default_factory=dict)
    teacher_kl: float | None = None
    """KL(policy || teacher) per token, estimated from the sampled ones (nats)."""


class AdvantagePart(Protocol):
    """A part of the algorithm that changes advantages.

    Critic, KL in the reward, teacher and choice of tokens are such parts."""

    def apply(
        self, packed: PackedStep, logprobs: StepLogprobs, advantages: Advantages
    ) -> Advantages:
        """The advantages with this part in them.

        A collective."""
        ...


# ---------------------------------------------------------------- KL in the reward


@dataclass(frozen=True)
class RewardKL:
    """KL of the sampling policy against the reference, by the chosen estimate (nats)."""

    per_token: float
    per_completion: float


@dataclass(frozen=True)
class KLInReward:
    """Makes the reference's log-probs part of every token's advantage."""

    algorithm: AlgorithmConfig
    mesh: Mesh

    def apply(
        self, packed: PackedStep, logprobs: StepLogprobs, advantages: Advantages
    ) -> Advantages:
        algorithm = self.algorithm
        mesh = self.mesh
        batches = advantages.batches
        rewards = packed.scored.rewards_PG
        tokens = packed.scored.tokens_PG
        old = logprobs.old
        reference = logprobs.reference
        assert reference is not None
        to_go_by_batch = []
        if mesh.is_last_stage:
            to_go_by_batch = [
                _to_go(
                    batch,
                    None if old is None else old[i],
                    reference[i],
                    kind=algorithm.kl_estimator,
                )
                for i, batch in enumerate(batches)
            ]
        totals = _gather_totals(batches, to_go_by_batch, rewards, mesh=mesh)
        shaped = kl_shaped_advantages(
            rewards,
            tokens,
            totals=totals,
            kl_coef=algorithm.kl_coef,
            kind=algorithm.advantage,
            eps=algorithm.advantage_eps,
            pass_k=algorithm.pass_k,
        )
        kl = sum(total.total for row in totals for total in row)
        reward_kl = RewardKL(kl / sum(map(sum, tokens)), kl / sum(map(len, rewards)))
        if mesh.is_last_stage:  # nothing else looks at advantages
            offsets_N = torch.tensor(
                [offset for row in shaped.offsets for offset in row], dtype=torch.float64
            )
            batches = [
                replace(
                    batch,
                    advantages_T=_token_advantages(batch, to_go_T, offsets_N, slope=shaped.slope),
                )
                for batch, to_go_T in zip(batches, to_go_by_batch, strict=True)
            ]
        mean_advantages = [
            [
                offset - shaped.slope * total.mean
                for offset, total in zip(group_offsets, group_totals, strict=True)
            ]
            for group_offsets, group_totals in zip(shaped.offsets, totals, strict=True)
        ]
        return replace(
            advantages, batches=list(batches), means_PG=mean_advantages, reward_kl=reward_kl
        )


def _samples(batch: MicroBatch) -> Iterator[tuple[int, slice]]:
    """Every sample's number in the step, and its tokens in the pack."""
    bounds = itertools.pairwise(batch.cu_seqlens_S1.tolist())
    for index, (start, end) in zip(batch.sample_indices, bounds, strict=False):
        yield index, slice(start, end)


def _gather_totals(
    batches: Sequence[MicroBatch],
    to_go_by_batch: Sequence[Tensor],
    rewards: Sequence[Sequence[float]],
    mesh: Mesh,
) -> list[list[KLTotals]]:
    """The totals of all samples by group, on every rank; over gloo."""
    totals_N3 = torch.zeros(sum(map(len, rewards)), 3, dtype=torch.float64)
    if mesh.counts_loss:
        for batch, to_go_T in zip(batches, to_go_by_batch, strict=True):
            for index, tokens in _samples(batch):
                K = to_go_T[tokens][batch.sampled_T[tokens]]
                if len(K):
                    totals_N3[index] = torch.stack((K[0], K.mean(), (K - K.mean()).square().sum()))
    dist.all_reduce(totals_N3)
    rows = iter(totals_N3.tolist())
    return [[KLTotals(*next(rows)) for _ in row] for row in rewards]


def _to_go(batch: MicroBatch, old_T: Tensor | None, reference_T: Tensor, kind: KLKind) -> Tensor:
    """The sum of the KL of every sampled token and of those that follow it in its completion.

    It is float64 and on the CPU."""
    kl_T = token_kl(batch, old_T, reference_T, kind=kind)
    return to_go(torch.where(batch.sampled_T, kl_T, 0.0), batch.cu_seqlens_S1)


def token_kl(batch: MicroBatch, old_T: Tensor | None, reference_T: Tensor, kind: KLKind) -> Tensor:
    """The KL of every token (nats), float64, on the CPU; only that of sampled tokens has a meaning.

    `old_T` are the log-probs of the policy that sampled, None to use the engine's own."""
    policy_T = batch.behaviour_logprobs_T if old_T is None else old_T.cpu()
    return kl_estimate(kind, policy_T.double(), reference_T.cpu().double())


def _token_advantages(
    batch: MicroBatch, to_go_T: Tensor, offsets_N: Tensor, slope: float
) -> Tensor:
    padding = batch.n_segments - len(batch.sample_indices)
    offsets_S = torch.cat((offsets_N[list(batch.sample_indices)], offsets_N.new_zeros(padding)))
    advantages_T = offsets_S[batch.segments_T] - slope * to_go_T
    return torch.where(batch.sampled_T, advantages_T, 0.0).float()


# ---------------------------------------------------------------- tokens that count


@dataclass(frozen=True)
class TokensThatCount:
    """Advantages and penalties by `TokenRules`; the last part, since they look at advantages.

    The papers' indicator stands before the policy gradient alone. So a token that is not chosen
    stays a learned one and its advantage becomes 0: the KL to a reference or teacher, the entropy
    bonus and the penalty of "kl_cov" still reach it. Shares are of all sampled tokens, learned or
    not.
    """

    rules: TokenRules
    mesh: Mesh

    def apply(
        self, packed: PackedStep, logprobs: StepLogprobs, advantages: Advantages
    ) -> Advantages:
        batches = advantages.batches
        entropy = logprobs.entropy
        assert entropy is not None
        if not self.mesh.is_last_stage:
            batches = []
            entropy = []
        masks = [batch.sampled_T for batch in batches]
        policy = logprobs.old or [batch.behaviour_logprobs_T for batch in batches]

        def of_own(columns: Sequence[Tensor]) -> Tensor:
            sampled = [
                column.cpu().float()[mask] for column, mask in zip(columns, masks, strict=False)
            ]
            return torch.cat([torch.empty(0), *sampled])

        uniform_N = None
        if self.rules.clip_cov is not None:
            uniform_N = of_own([_uniform(batch, packed.seed) for batch in batches])
        chosen = chosen_tokens(
            self.rules,
            of_own(entropy),
            of_own(policy),
            advantages_N=of_own([batch.advantages_T for batch in batches]),
            uniform_N=uniform_N,
            summed=self._summed,
        )
        sizes = [int(mask.sum()) for mask in masks]
        learned = chosen.learned_N.split(sizes)
        penalty = chosen.penalty_N.split(sizes)
        new_batches = []
        for batch, mask, learned_n, penalty_n in zip(batches, masks, learned, penalty, strict=True):
            advantages_T = batch.advantages_T.clone()
            penalty_T = torch.zeros_like(batch.advantages_T)
            advantages_T[mask] *= learned_n
            penalty_T[mask] = penalty_n
            new_batches.append(
                replace(
                    batch,
                    advantages_T=advantages_T,
                    penalty_T=None if self.rules.kl_cov is None else penalty_T,
                )
            )
        return replace(advantages, batches=new_batches) if self.mesh.is_last_stage else advantages

    def _summed(self, values: Tensor) -> Tensor:
        """The sum over ranks, by gloo; of the ranks that share tokens one counts."""
        total = values.clone() if self.mesh.counts_loss else torch.zeros_like(values)
        dist.all_reduce(total)
        return total


def _uniform(batch: MicroBatch, seed: int) -> Tensor:
    """A random number for every token, the same on every layout."""
    numbers_T = torch.zeros_like(batch.advantages_T)
    for index, tokens in _samples(batch):
        draw = torch.Generator().manual_seed((seed * 1_000_003 + index) % 2**63)
        numbers_T[tokens] = torch.rand(tokens.stop - tokens.start, generator=draw)
    return numbers_T


# ---------------------------------------------------------------- teacher


def add_teacher_advantages(
    advantages: Advantages,
    policy: Sequence[Tensor] | None,
    teacher: Sequence[Tensor],
    tokens: Sequence[Sequence[int]],
    coef: float,
    vocab_size: int,
    mesh: Mesh,
) -> Advantages:
    """The advantages with the teacher's part in them.

    A collective. `policy` are the log-probs of the policy that sampled, None to use the engine's
    own. Tokens from `vocab_size` on are not known to both, and get nothing. `tokens` are the
    numbers of sampled tokens of all completions by group."""
    batches = advantages.batches
    gaps = []
    if mesh.is_last_stage:
        gaps = [
            _gap(batch, None if policy is None else policy[i], teacher[i], vocab_size=vocab_size)
            for i, batch in enumerate(batches)
        ]
        batches = [  # nothing else looks at advantages
            replace(batch, advantages_T=(batch.advantages_T.double() + coef * gap_T).float())
            for batch, gap_T in zip(batches, gaps, strict=True)
        ]
    sums_N = torch.zeros(sum(map(len, tokens)), dtype=torch.float64)
    if mesh.counts_loss:
        for batch, gap_T in zip(batches, gaps, strict=True):
            for index, tokens_of_sample in _samples(batch):
                sums_N[index] = gap_T[tokens_of_sample].sum()
    dist.all_reduce(sums_N)  # over gloo
    teacher_sums = iter(sums_N.tolist())
    mean = [
        [
            advantage + coef * next(teacher_sums) / max(1, count)
            for advantage, count in zip(group_advantages, group_tokens, strict=True)
        ]
        for group_advantages, group_tokens in zip(advantages.means_PG, tokens, strict=True)
    ]
    kl_per_token = -float(sums_N.sum()) / max(1, sum(map(sum, tokens)))
    return replace(advantages, batches=batches, means_PG=mean, teacher_kl=kl_per_token)


def _gap(batch: MicroBatch, policy_T: Tensor | None, teacher_T: Tensor, vocab_size: int) -> Tensor:
    """The teacher's log-prob minus the policy's, of sampled tokens; float64, on the CPU."""
    known_T = batch.sampled_T & (batch.token_ids_T < vocab_size)
    student_T = batch.behaviour_logprobs_T if policy_T is None else policy_T.cpu()
    return torch.where(known_T, teacher_T.cpu().double() - student_T.double(), 0.0)


@dataclass(frozen=True)
class TeacherInAdvantages:
    """Makes the teacher's log-probs part of every token's advantage."""

    teacher: Teacher
    actor: Actor
    coef: float
    vocab_size: int
    """Size of the policy's vocabulary."""
    offload: OffloadSets
    timers: PhaseTimers
    mesh: Mesh

    def apply(
        self, packed: PackedStep, logprobs: StepLogprobs, advantages: Advantages
    ) -> Advantages:
        common = self.teacher.vocab_size
        policy = logprobs.old
        with self.timers.phase("teacher"):
            # Both distributions are compared over the tokens that both know.
            if common < self.vocab_size:
                policy = self.actor.forward_backward.logprobs(advantages.batches, common)
            with self.offload.on_device("teacher", "teacher_head"):
                scored = self.teacher.logprobs(advantages.batches)
        return add_teacher_advantages(
            advantages,
            policy,
            scored,
            tokens=packed.scored.tokens_PG,
            coef=self.coef,
            vocab_size=common,
            mesh=self.mesh,
        )
