"""GRPO: one step, from weights to weights, in the order in which this file reads.

    weights to the engine -> (probe, validation) -> prompts -> rollout and rewards -> selection -> advantages -> samples
    -> schedule -> packing -> log-probs (old, reference) -> minibatches: loss, early stop, update -> metrics

Every rank runs it. The control plane (prompts, selection, advantages, schedule) is computed alike on all ranks; only
tensors are sharded. Lengths are those of the step's length stage; weights, optimizer, learning-rate schedule, order of
prompts and seeds continue from stage to stage.

The formulas are in `algorithms/`, the loss of a minibatch in `models/learner.py`, the schedule in
`data/seqlen_balancing.py`, the life cycle around the step in `loop.py`.
"""

# Shape legend: P prompts, G completions of a prompt.

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, ClassVar

from rlmath.algorithms.advantages import advantages
from rlmath.algorithms.losses import Normalisation
from rlmath.algorithms.types import MicroBatch, Sample, ScoredGroup
from rlmath.checkpoint.directory import Progress
from rlmath.config import length_curriculum as curriculum
from rlmath.config.length_curriculum import LengthStage
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config
from rlmath.data.curriculum import HISTORY
from rlmath.data.dataset import Inputs, most_updates
from rlmath.data.packing import pack
from rlmath.data.seqlen_balancing import plan_minibatches, training_cost
from rlmath.distributed.bridge import Bridge
from rlmath.distributed.device import Device
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.models.build import Actor, build_actor, build_reference
from rlmath.models.forward_backward import ForwardBackward, TokenLogprobs
from rlmath.models.learner import MinibatchResult
from rlmath.models.offload import OffloadSets, training_sets
from rlmath.rewards.reward_manager import open_reward_workers, raise_if_every_call_failed
from rlmath.rewards.worker_pool import VerifierPool
from rlmath.trainer.checkpointing import Checkpointer
from rlmath.trainer.engines import open_engines
from rlmath.trainer.kl_in_reward import KLPenalty, apply_kl_penalty
from rlmath.trainer.loop import Interrupted, Trainer
from rlmath.trainer.metrics import (
    UpdateRecord,
    engine_metrics,
    mfu_metrics,
    mismatch_metrics,
    pace_metrics,
    rollout_metrics,
    selection_metrics,
    update_metrics,
)
from rlmath.trainer.reporter import StepRecord, ValidationResult
from rlmath.trainer.rollouts import StepRollout, selection_rules
from rlmath.trainer.startup import PreparedRun
from rlmath.trainer.telemetry.metrics_writer import write_whole
from rlmath.trainer.validation import Validator

logger = logging.getLogger(__name__)


class GrpoTrainer(Trainer):
    """Samples with vLLM, scores, and updates the policy: `step` is the algorithm."""

    kind: ClassVar = "grpo"
    weight_syncs_per_step: ClassVar = 1
    validator: Validator
    """Made by `begin`."""

    @staticmethod
    def open_workers(config: Config, mesh: Mesh) -> AbstractContextManager[VerifierPool | None]:
        """The reward workers of an engine's first rank."""
        return open_reward_workers(config.reward) if mesh.is_engine_leader else nullcontext()

    def __init__(
        self,
        prepared: PreparedRun[Inputs],
        mesh: Mesh,
        device: Device,
        workers: VerifierPool | None = None,
        on_phase: Callable[[str], None] = lambda name: None,
        on_progress: Callable[[], None] = lambda: None,
        bridge: Bridge | None = None,
    ) -> None:
        """Builds engine, actor and reference on this rank; the engine sleeps afterwards. With a `bridge` the engines
        are elsewhere."""
        super().__init__(prepared, mesh, device, workers, on_phase, on_progress, bridge)
        config, shape, inputs = prepared.config, prepared.shape, prepared.inputs
        self.inputs, self.reward_fingerprint = inputs, prepared.origin.reward
        self.length_stages = curriculum.length_stages(config, inputs.total_steps)
        self.entered_length_stage: int | None = None
        on_phase("build engine")
        self.engines = open_engines(prepared, mesh, device, self.timers, workers, bridge, on_progress)
        self.rollouts = self.engines.rollouts
        on_phase("build model")
        updates = most_updates(config, inputs.total_steps)
        self.actor = build_actor(config, shape, mesh, device, updates, inputs.stop_token_ids)
        self.reference = None
        if config.algorithm.kl_coef > 0:
            self.reference = build_reference(config, shape, mesh, device, inputs.stop_token_ids)
        self.actor.forward_backward.on_microbatch = on_progress
        self.offload = training_sets(self.actor, self.reference, config.memory, device)
        self.engines.connect(self.actor, self.offload)
        self.rules = selection_rules(config.selection)
        self.updaters = [
            PolicyUpdater(stage.config, shape, mesh, self.actor, self.reference, self.offload, self.timers)
            for stage in self.length_stages
        ]
        self.validation_files = prepared.validation

    @property
    def layout(self) -> str:
        return self.mesh.describe()

    def begin(self, progress: Progress | None, checkpointer: Checkpointer) -> None:
        self.validator = Validator(
            self.config,
            self.mesh,
            self.engines.collector,
            self.timers,
            self.validation_files,
            steps_done=0 if progress is None else progress.step,
            total_steps=self.total_steps,
            export=checkpointer.export,
            asked_to_stop=checkpointer.asked_to_stop,
        )

    def step(self, number: int) -> StepRecord | Interrupted:
        """One step: `number` counts from 0 over the whole run."""
        started = time.perf_counter()
        self.timers.reset()
        stage = self.enter_length_stage(number)
        with self.engines.generating(self.actor.learner.updates, number):  # weights to the engine
            with self.timers.phase("probe"):
                probed = self.engines.probe()
            validated = self.validator.validate(number)
            if self.validator.stopped_by is not None:
                return Interrupted(self.validator.stopped_by)
            with self.timers.phase(self.engines.phase):
                rollout = self.rollouts.step(number, stage)
        selection = rollout.selection
        if self.rules.drop_anything:
            logger.info("step %d: %s", number + 1, selection.line())
        self.validator.keep_if_best(validated)
        if self.config.reward.function is not None:
            raise_if_every_call_failed(rollout.scores)
        history = self.rollouts.commit()
        update = self.updaters[stage.number].update(selection.learned, number)
        seconds = self.timers.seconds() | {"step": time.perf_counter() - started}
        metrics = self.metrics(stage, rollout, update, seconds) | history | probed
        return StepRecord(
            rollout.epoch,
            metrics,
            selection.sampled,
            selection.spread(update.advantages),
            validated,
            update.results,
        )

    def metrics(
        self,
        stage: LengthStage,
        rollout: StepRollout,
        update: UpdateRecord,
        seconds: dict[str, float],
    ) -> dict[str, float]:
        """All metrics of a step, under the names that `metrics.jsonl` has."""
        algorithm, selection = self.config.algorithm, rollout.selection
        learned = selection.learned
        metrics = rollout_metrics(selection.sampled) | engine_metrics(rollout.rounds) | rollout.metrics
        if self.rules.drop_anything:
            metrics |= selection_metrics(selection)
        metrics |= update_metrics(update, learned, metrics["task_reward"], algorithm)
        metrics |= mismatch_metrics(update.results, only_first=not algorithm.recompute_logprobs)
        sampled = rollout.sampled_tokens, selection.sampled, learned
        metrics |= pace_metrics(seconds, *sampled, update.passes)
        if self.peak_flops is not None:
            cost = self.updaters[stage.number].cost
            metrics |= mfu_metrics(seconds, *sampled, update.passes, cost, self.peak_flops)
        if curriculum.has_length_stages(self.config):
            metrics["stage"] = stage.number + 1.0
            metrics["rollout/max_new_tokens"] = float(stage.config.rollout.max_new_tokens)
        return metrics | self.engines.metrics()

    def enter_length_stage(self, number: int) -> LengthStage:
        """The length stage of a step; logged where it is the first one of this start."""
        stage = curriculum.length_stage_at(self.length_stages, number)
        if curriculum.has_length_stages(self.config) and stage.number != self.entered_length_stage:
            logger.info("%s", stage.line(len(self.length_stages)))
            self.entered_length_stage = stage.number
        return stage

    def checkpoint_files(self) -> dict[str, bytes]:
        return self.rollouts.files() if self.mesh.rank == 0 else {}

    def resume(self, folder: Path, progress: Progress) -> None:
        changed = progress.reward_fingerprint not in ("", self.reward_fingerprint)
        self.rollouts.resume(folder, progress.step, changed)

    def validate_at_end(self) -> ValidationResult | None:
        """The validation of the weights after all steps, where it is due and not done; the engine wakes for it."""
        if not self.validator.due(self.total_steps):
            return None
        with self.engines.generating(self.actor.learner.updates, self.total_steps):
            validated = self.validator.validate(self.total_steps)
        self.validator.keep_if_best(validated)
        return validated

    def next_draw_step(self, steps_done: int) -> int:
        """Groups in flight were drawn for later steps."""
        return max(steps_done, -(-self.rollouts.next_draw // self.order.prompts_per_step))

    def at_end(self) -> dict[str, Any]:
        curriculum = self.rollouts.curriculum
        if self.mesh.rank == 0:
            for line in curriculum.lines():
                logger.info("%s", line)
            path = Path(self.config.run.output_dir) / HISTORY
            try:
                write_whole(path, curriculum.file().decode())
            except OSError as error:
                logger.warning("%s cannot be written: %s", path, error)
        return {"history": curriculum.summary()}

    def busy_seconds(self) -> float:
        reference = 0.0 if self.reference is None else self.reference.pop_busy_seconds()
        return super().busy_seconds() + reference

    def close(self, status: int) -> None:
        self.engines.close(status)


# ---------------------------------------------------------------- from scored groups to a better policy


@dataclass(frozen=True)
class Minibatch:
    """One optimizer step of this data-parallel rank."""

    batches: list[MicroBatch]
    old: list[TokenLogprobs] | None
    """Log-probs under the policy that the step began with; None: those of the engine are used."""
    reference: list[TokenLogprobs] | None
    """Log-probs under the reference; None: no KL in the loss."""


@dataclass(eq=False, repr=False)
class PolicyUpdater:
    """The updating half of a step; it needs no engine. One for each length stage."""

    config: Config
    shape: ModelShape
    mesh: Mesh
    actor: Actor
    reference: ForwardBackward | None
    offload: OffloadSets
    timers: PhaseTimers

    def __post_init__(self) -> None:
        algorithm, max_new_tokens = self.config.algorithm, self.config.rollout.max_new_tokens
        self.cost = training_cost(self.shape)
        self.normalisation = Normalisation(algorithm.loss_normalisation, max_new_tokens)
        self.penalty = None
        if self.reference is not None and algorithm.kl_in == "reward":
            self.penalty = KLPenalty(
                algorithm.kl_coef, algorithm.kl_estimator, algorithm.advantage, algorithm.advantage_eps
            )

    @property
    def on_policy(self) -> bool:
        """Whether the old log-probs are those of the update's own forward pass, so that no extra pass is needed: one
        minibatch, one epoch, and no KL in the reward."""
        algorithm = self.config.algorithm
        only_one = algorithm.n_minibatches == 1 and algorithm.epochs == 1
        return algorithm.recompute_logprobs and only_one and self.penalty is None

    def update(self, groups: Sequence[ScoredGroup], number: int) -> UpdateRecord:
        """Learn from the groups of step `number`. Without any completion nothing happens. A collective."""
        algorithm, timed = self.config.algorithm, self.timers.phase
        rewards_PG = [group.rewards for group in groups]
        tokens_PG = [[len(one.token_ids) for one in group.completions] for group in groups]
        advantages_PG = advantages(rewards_PG, tokens_PG, algorithm.advantage, algorithm.advantage_eps)
        if not groups:
            return UpdateRecord([], advantages_PG, None)

        with timed("pack"):
            packed = self.pack_minibatches(make_samples(groups, advantages_PG), number)
        batches = list(chain.from_iterable(packed))

        old = reference = reward_kl = None
        if algorithm.recompute_logprobs and not self.on_policy:
            with timed("logprobs"):
                old = self.actor.forward_backward.logprobs(batches)
        if self.reference is not None:
            with timed("reference"), self.offload.reference_on_device():
                reference = self.reference.logprobs(batches)
        if self.penalty is not None:
            assert reference is not None
            batches, advantages_PG, reward_kl = apply_kl_penalty(
                batches,
                old,
                reference,
                rewards_PG,
                tokens_PG,
                self.penalty,
                self.mesh,
            )
            reference = None

        with timed("update"):
            bounds = pairwise(accumulate(map(len, packed), initial=0))
            minibatches = [
                Minibatch(batches[i:j], old[i:j] if old else None, reference[i:j] if reference else None)
                for i, j in bounds
            ]
            results = self.run_minibatches(minibatches, number)
        return UpdateRecord(results, advantages_PG, reward_kl, passes=len(results) / len(minibatches))

    def pack_minibatches(self, samples: Sequence[Sample], number: int) -> list[list[MicroBatch]]:
        """This data-parallel rank's micro-batches of every minibatch."""
        config, mesh = self.config, self.mesh
        schedule = plan_minibatches(
            [sample.length for sample in samples],
            min(config.algorithm.n_minibatches, len(samples)),
            mesh.data,
            config.policy.max_tokens_per_microbatch,
            seed=step_seed(config.run.seed, number),
            cost=self.cost,
            count_multiple=mesh.microbatch_multiple,
            shuffle=config.algorithm.shuffle,
        )
        pad_to_multiple = mesh.tensor if config.parallel.sequence else 1
        return [
            [
                pack(samples, indices, pad_to_multiple, self.normalisation)
                for indices in minibatch.microbatches_by_rank[mesh.data_rank]
            ]
            for minibatch in schedule
        ]

    def run_minibatches(self, minibatches: Sequence[Minibatch], number: int) -> list[MinibatchResult]:
        """One optimizer step on each, in every epoch; a minibatch whose ratio leaves its bounds is discarded."""
        algorithm, results = self.config.algorithm, []
        order = list(range(len(minibatches)))
        draw = random.Random(step_seed(self.config.run.seed, number))
        for epoch in range(algorithm.epochs):
            if epoch > 0 and algorithm.shuffle:
                draw.shuffle(order)
            for index in order:
                minibatch = minibatches[index]
                result = self.actor.learner.learn(
                    minibatch.batches, minibatch.old, minibatch.reference, self.on_policy
                )
                results.append(result)
                if result.discarded is None:
                    continue
                logger.info("step %d: minibatch %d discarded: %s", number + 1, len(results), result.discarded)
                if algorithm.early_stop_action == "end":
                    return results
        return results


def make_samples(groups: Sequence[ScoredGroup], advantages_PG: Sequence[Sequence[float]]) -> list[Sample]:
    """All sequences to train on with their advantages, in order of prompt and completion."""
    return [
        Sample(group.prompt.token_ids, completion.token_ids, completion.logprobs, advantage)
        for group, row in zip(groups, advantages_PG, strict=True)
        for completion, advantage in zip(group.completions, row, strict=True)
    ]


def step_seed(run_seed: int, number: int) -> int:
    """The seed of everything that step `number` shuffles."""
    return run_seed * 1_000_003 + number
