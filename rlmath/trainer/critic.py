"""The critic's part of a step: values, advantages and returns by GAE, and the critic's updates.

    values -> rewards of tokens (KL, the completion's reward at its last token) -> advantages,
    returns -> minibatches

Values are those of the critic at the step's start, for all tokens, whichever weights of the policy
sampled them. The policy's advantages are normalised over all tokens of the step.
"""

# Shape legend: T packed tokens of one micro-batch, N sampled tokens of it, S samples of it, P
# samples of the step.

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from rlmath.algorithms.gae import explained_variance, gae, length_adaptive_lambda
from rlmath.config.schema import Config
from rlmath.data.dataset import critic_epochs
from rlmath.data.packing import MicroBatch
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.models.critic import Critic, TokenValues, ValueTargets
from rlmath.models.learner import MinibatchResult
from rlmath.models.offload import OffloadSets
from rlmath.trainer.token_advantages import Advantages, PackedStep, RewardKL, StepLogprobs, token_kl

logger = logging.getLogger(__name__)

ESTIMATE_SUMS = """
count returns squared_returns errors squared_errors values advantages squared_advantages kl
""".split()


@dataclass(frozen=True)
class CriticInAdvantages:
    """Gives advantages by the critic as it is, and updates the critic afterwards.

    All training ranks call it alike."""

    critic: Critic
    config: Config
    kl_in_reward: bool
    mesh: Mesh
    offload: OffloadSets
    timers: PhaseTimers

    def apply(
        self, packed: PackedStep, logprobs: StepLogprobs, advantages: Advantages
    ) -> Advantages:
        orders = packed.orders(critic_epochs(self.config), self.config.algorithm.shuffle)
        with self.timers.phase("critic"), self.offload.on_device("critic", "critic_gradients"):
            estimated, targets = self._estimate(packed, logprobs, advantages)
            results = []
            for minibatch_slice in (
                packed.minibatch_slices[index] for order in orders for index in order
            ):
                result = self.critic.learner.learn(
                    estimated.batches[minibatch_slice], targets[minibatch_slice]
                )
                results.append(result)
                if result.discarded is not None:
                    logger.warning(
                        "step %d: minibatch %d of the critic discarded: %s",
                        packed.scored.number + 1,
                        len(results),
                        result.discarded,
                    )
        metrics = estimated.critic_metrics | critic_metrics(results)
        return replace(estimated, critic_results=results, critic_metrics=metrics)

    def _estimate(
        self, packed: PackedStep, logprobs: StepLogprobs, advantages: Advantages
    ) -> tuple[Advantages, list[ValueTargets]]:
        """Advantages and returns of the step's samples.

        A collective."""
        batches = advantages.batches
        groups = packed.scored.groups
        rewards = packed.scored.rewards_PG
        old = logprobs.old
        reference = logprobs.reference
        rewards_P = torch.tensor([reward for row in rewards for reward in row], dtype=torch.float64)
        completions = [completion for group in groups for completion in group.completions]
        truncated_P = torch.tensor(
            [completion.finish_reason == "length" for completion in completions]
        )
        values = self.critic.learner.values(batches)
        rows: list[_TokenEstimates] = []
        if self.mesh.is_last_stage:
            for i, batch in enumerate(batches):
                kl_T = None
                if self.kl_in_reward:
                    assert reference is not None
                    old_T = None if old is None else old[i]
                    kl_T = token_kl(
                        batch, old_T, reference[i], kind=self.config.algorithm.kl_estimator
                    )
                rows.append(
                    self._row(batch, values[i], rewards_P, truncated_P=truncated_P, kl_T=kl_T)
                )
        sums, means_P = self._totals(rows, len(completions))
        count = max(1.0, sums["count"])
        mean = sums["advantages"] / count
        deviation = max(0.0, sums["squared_advantages"] / count - mean**2) ** 0.5
        divisor = deviation + self.config.algorithm.advantage_eps
        scale = 1.0 / divisor if divisor > 0 else 0.0
        empty = torch.empty(0)
        targets = [ValueTargets(empty, empty)] * len(batches)
        learned = batches
        if self.mesh.is_last_stage:  # nothing else looks at advantages and returns
            targets = [row.targets(batch) for batch, row in zip(batches, rows, strict=True)]
            learned = [
                replace(batch, advantages_T=row.spread(batch, (row.advantages_N - mean) * scale))
                for batch, row in zip(batches, rows, strict=True)
            ]
        normalised_means = iter(((means_P - mean) * scale).tolist())
        means_PG = [[next(normalised_means) for _ in group.completions] for group in groups]
        reward_kl = None
        if self.kl_in_reward:
            reward_kl = RewardKL(sums["kl"] / count, sums["kl"] / max(1, len(completions)))
        metrics = {
            "critic/explained_variance": explained_variance(
                *(sums[name] for name in ESTIMATE_SUMS[:5])
            ),
            "critic/value": sums["values"] / count,
            "critic/return": sums["returns"] / count,
        }
        estimated = replace(
            advantages,
            batches=learned,
            means_PG=means_PG,
            reward_kl=reward_kl,
            critic_metrics=metrics,
        )
        return estimated, targets

    def _row(
        self,
        batch: MicroBatch,
        values: TokenValues,
        rewards_P: Tensor,
        truncated_P: Tensor,
        kl_T: Tensor | None,
    ) -> _TokenEstimates:
        """Advantages and returns of one micro-batch, before advantages are normalised.

        The steps of GAE are the sampled tokens: what others wrote between two of them is part of
        the later one's state."""
        settings = self.config.critic
        sampled_T = batch.sampled_T
        samples = torch.tensor(batch.sample_indices, dtype=torch.long)
        lengths_S = torch.bincount(batch.segments_T[sampled_T], minlength=batch.n_segments)[
            : len(samples)
        ]
        has_tokens_S = lengths_S > 0
        samples_S = samples[has_tokens_S]
        tokens_S = lengths_S[has_tokens_S]
        values_N = values.values_T.cpu().double()[sampled_T]
        kl_N = torch.zeros_like(values_N) if kl_T is None else kl_T[sampled_T]
        rewards_N = torch.zeros_like(values_N) - self.config.algorithm.kl_coef * kl_N
        rewards_N[tokens_S.cumsum(0) - 1] += rewards_P[samples_S]
        ends_S = values.ends_S.cpu().double()[: len(samples)][has_tokens_S]
        continued_S = truncated_P[samples_S] & settings.bootstrap_truncated
        ends_S = torch.where(continued_S, ends_S, 0.0)

        def advantages(lambda_S: Tensor) -> Tensor:
            return gae(
                rewards_N,
                values_N,
                end_values_S=ends_S,
                tokens_S=tokens_S,
                gamma=settings.gamma,
                lambda_S=lambda_S,
            )

        fixed_S = torch.full((len(tokens_S),), settings.policy_lambda, dtype=torch.float64)
        alpha = settings.policy_length_alpha
        policy_N = advantages(fixed_S if alpha is None else length_adaptive_lambda(tokens_S, alpha))
        returns_N = advantages(torch.full_like(fixed_S, settings.value_lambda)) + values_N
        return _TokenEstimates(
            samples_S,
            tokens_S,
            values_N=values_N,
            advantages_N=policy_N,
            returns_N=returns_N,
            kl_N=kl_N,
        )

    def _totals(
        self, rows: Sequence[_TokenEstimates], samples: int
    ) -> tuple[dict[str, float], Tensor]:
        """Sums over all tokens of the step, and every sample's mean advantage, on all ranks.

        They are reduced over gloo."""
        totals = torch.zeros(len(ESTIMATE_SUMS) + samples, dtype=torch.float64)
        if self.mesh.counts_loss:
            for row in rows:
                totals[: len(ESTIMATE_SUMS)] += row.sums()
                per_sample = row.advantages_N.split(row.tokens_S.tolist())
                for index, advantages_N in zip(row.samples_S.tolist(), per_sample, strict=True):
                    totals[len(ESTIMATE_SUMS) + index] = advantages_N.mean()
        dist.all_reduce(totals)
        return dict(zip(ESTIMATE_SUMS, totals[: len(ESTIMATE_SUMS)].tolist(), strict=True)), totals[
            len(ESTIMATE_SUMS) :
        ]


@dataclass(frozen=True)
class _TokenEstimates:
    """One micro-batch's sampled tokens, sample after sample; float64, on the CPU."""

    samples_S: Tensor
    """Numbers in the step of the samples that have tokens."""
    tokens_S: Tensor
    values_N: Tensor
    advantages_N: Tensor
    returns_N: Tensor
    kl_N: Tensor

    def sums(self) -> Tensor:
        """Sums over the tokens, in the order of ESTIMATE_SUMS."""
        errors_N = self.returns_N - self.values_N
        columns = (
            torch.ones_like(errors_N),
            self.returns_N,
            self.returns_N.square(),
            errors_N,
            errors_N.square(),
            self.values_N,
            self.advantages_N,
            self.advantages_N.square(),
            self.kl_N,
        )
        return torch.stack(columns).sum(1)

    def spread(self, batch: MicroBatch, values_N: Tensor) -> Tensor:
        """Values of sampled tokens laid out over the pack, float32; 0 elsewhere."""
        packed_T = torch.zeros(len(batch.token_ids_T), dtype=torch.float32)
        packed_T[batch.sampled_T] = values_N.float()
        return packed_T

    def targets(self, batch: MicroBatch) -> ValueTargets:
        return ValueTargets(self.spread(batch, self.values_N), self.spread(batch, self.returns_N))


def critic_metrics(results: Sequence[MinibatchResult]) -> dict[str, float]:
    """Metrics of the minibatches that were learned from, means over tokens.

    They are those of all minibatches where every one was discarded."""
    learned_results = [result for result in results if result.discarded is None]
    counted = learned_results or results

    def mean(name: str, weight_name: str) -> float:
        return sum(result.sums[name] for result in counted) / max(
            1.0, sum(result.sums[weight_name] for result in counted)
        )

    return {
        "critic/loss": mean("loss", "denominator"),
        "critic/clip_share": mean("clipped", "tokens"),
        "critic/grad_norm": sum(result.grad_norm for result in counted) / len(counted),
        "critic/learning_rate": results[-1].learning_rate,
        "critic/discarded_minibatches": float(len(results) - len(learned_results)),
    }
