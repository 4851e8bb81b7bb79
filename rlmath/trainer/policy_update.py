"""From scored groups to a better policy.

groups -> advantages -> samples -> schedule -> pack -> log-probs (old, reference) -> minibatches: loss, early stop, step
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass

from rlmath.algorithms.advantages import advantages
from rlmath.algorithms.losses import Normalisation
from rlmath.algorithms.types import MicroBatch, Sample, ScoredGroup
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config
from rlmath.data.batch_schedule import plan_minibatches, training_cost
from rlmath.data.packing import pack
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.models.build import Actor
from rlmath.models.forward_backward import ForwardBackward, TokenLogprobs
from rlmath.models.learner import MinibatchResult
from rlmath.models.offload import OffloadSets
from rlmath.trainer.kl_in_reward import KLPenalty, RewardKL, shape_by_kl

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UpdateRecord:
    """What a step's updates leave for telemetry."""

    results: list[MinibatchResult]
    """Of every minibatch, in the order of their use."""
    advantages: list[list[float]]
    """By group and completion; with KL inside of the reward the mean over the completion's tokens."""
    reward_kl: RewardKL | None
    """Where KL is part of the reward."""
    passes: float = 0.0
    """How often the samples were learned from; less than `algorithm.epochs` where early stop ended the step."""


@dataclass(frozen=True)
class _Packed:
    """A minibatch of this data-parallel rank, ready to be learned from."""

    batches: list[MicroBatch]
    old: list[TokenLogprobs] | None
    reference: list[TokenLogprobs] | None


class Updater:
    """Makes the updates of a step."""

    def __init__(
        self,
        config: Config,
        shape: ModelShape,
        mesh: Mesh,
        actor: Actor,
        reference: ForwardBackward | None,
        offload: OffloadSets,
        timers: PhaseTimers,
    ) -> None:
        self._config = config
        self._mesh = mesh
        self._actor = actor
        self._reference = reference
        self._offload = offload
        self._timers = timers
        self._cost = training_cost(shape)
        algorithm = config.algorithm
        self._normalisation = Normalisation(
            algorithm.loss_normalisation,  # type: ignore[arg-type]  # one of the words, as preflight has seen
            config.rollout.max_new_tokens,
        )
        self._penalty = None
        if reference is not None and algorithm.kl_in == "reward":
            self._penalty = KLPenalty(
                algorithm.kl_coef,
                algorithm.kl_estimator,  # type: ignore[arg-type]
                algorithm.advantage,  # type: ignore[arg-type]
                algorithm.advantage_eps,
            )

    @property
    def _on_policy(self) -> bool:
        """Whether recomputed log-probs would be those of the only minibatch itself, and nothing else needs them."""
        algorithm = self._config.algorithm
        only_one = algorithm.n_minibatches == 1 and algorithm.epochs == 1
        return algorithm.recompute_logprobs and only_one and self._penalty is None

    def update(self, groups: Sequence[ScoredGroup], number: int) -> UpdateRecord:
        """Learn from the groups of step `number`. Without any completion nothing happens."""
        rewards = [group.rewards for group in groups]
        tokens = [[len(completion.token_ids) for completion in group.completions] for group in groups]
        algorithm, timed = self._config.algorithm, self._timers.phase
        kind: str = algorithm.advantage
        by_group = advantages(rewards, tokens, kind, algorithm.advantage_eps)  # type: ignore[arg-type]
        if not groups:
            return UpdateRecord([], by_group, None)
        with timed("pack"):
            minibatches = self._pack(make_samples(groups, by_group), number)
        flat = [batch for minibatch in minibatches for batch in minibatch]
        old = reference = reward_kl = None
        if algorithm.recompute_logprobs and not self._on_policy:
            with timed("logprobs"):
                old = self._actor.forward_backward.logprobs(flat)
        if self._reference is not None:
            with timed("reference"), self._offload.reference_here():
                reference = self._reference.logprobs(flat)
        if self._penalty is not None:
            assert reference is not None
            flat, by_group, reward_kl = shape_by_kl(
                flat,
                old,
                reference,
                rewards,
                tokens,
                self._penalty,
                self._mesh,
                self._actor.forward_backward.device,
            )
            reference = None
        with timed("update"):
            packed = _regroup([len(minibatch) for minibatch in minibatches], flat, old, reference)
            results = self._epochs(packed, number)
        return UpdateRecord(results, by_group, reward_kl, passes=len(results) / len(minibatches))

    def _pack(self, samples: list[Sample], number: int) -> list[list[MicroBatch]]:
        """This data-parallel rank's micro-batches of every minibatch."""
        config, mesh = self._config, self._mesh
        plan = plan_minibatches(
            [sample.length for sample in samples],
            min(config.algorithm.n_minibatches, len(samples)),
            mesh.data,
            config.policy.max_tokens_per_microbatch,
            seed=self._seed(number),
            cost=self._cost,
            count_multiple=mesh.microbatch_multiple,
            shuffle=config.algorithm.shuffle,
        )
        pad_to_multiple = mesh.tensor if config.parallel.sequence else 1
        return [
            [
                pack(samples, indices, pad_to_multiple, self._normalisation)
                for indices in minibatch.microbatches_by_rank[mesh.data_rank]
            ]
            for minibatch in plan
        ]

    def _epochs(self, minibatches: list[_Packed], number: int) -> list[MinibatchResult]:
        algorithm, results = self._config.algorithm, []
        order = list(range(len(minibatches)))
        draw = random.Random(self._seed(number))
        for epoch in range(algorithm.epochs):
            if epoch > 0 and algorithm.shuffle:
                draw.shuffle(order)
            for index in order:
                minibatch = minibatches[index]
                result = self._actor.learner.learn(
                    minibatch.batches, minibatch.old, minibatch.reference, self._on_policy
                )
                results.append(result)
                if result.discarded is None:
                    continue
                logger.info("step %d: minibatch %d discarded: %s", number + 1, len(results), result.discarded)
                if algorithm.early_stop_action == "end":
                    return results
        return results

    def _seed(self, number: int) -> int:
        return self._config.run.seed * 1_000_003 + number


def make_samples(groups: Sequence[ScoredGroup], by_group: Sequence[Sequence[float]]) -> list[Sample]:
    """All sequences to train on with their advantages, in order of prompt and sample."""
    return [
        Sample(group.prompt.token_ids, completion.token_ids, completion.logprobs, advantage)
        for group, row in zip(groups, by_group, strict=True)
        for completion, advantage in zip(group.completions, row, strict=True)
    ]


def _regroup(
    counts: Sequence[int],
    flat: Sequence[MicroBatch],
    old: Sequence[TokenLogprobs] | None,
    reference: Sequence[TokenLogprobs] | None,
) -> list[_Packed]:
    """The step's micro-batches by minibatch, each with its log-probs."""
    packed, start = [], 0
    for count in counts:
        mine = slice(start, start + count)
        packed.append(
            _Packed(
                list(flat[mine]),
                None if old is None else list(old[mine]),
                None if reference is None else list(reference[mine]),
            )
        )
        start += count
    return packed
