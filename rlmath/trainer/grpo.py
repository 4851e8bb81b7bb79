"""GRPO: one step, from weights to weights, in the order in which this file reads.

    weights to the engine -> (probe, validation) -> prompts -> rollout and rewards -> selection -> advantages -> samples
    -> schedule -> packing -> log-probs (old, reference) -> critic -> teacher -> minibatches: loss, early stop, update
    -> metrics

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

from rlmath.algorithms.advantages import advantages, gdpo_advantages
from rlmath.algorithms.losses import Normalisation
from rlmath.algorithms.types import MicroBatch, Sample, ScoredGroup
from rlmath.checkpoint.directory import CRITIC, CRITIC_CONFIG, REFERENCE, Progress
from rlmath.checkpoint.hf.weights import load_hf_weights
from rlmath.checkpoint.sharded_state import SavedModel
from rlmath.config import length_curriculum as curriculum
from rlmath.config.length_curriculum import LengthStage
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config
from rlmath.data.curriculum import HISTORY
from rlmath.data.dataset import Inputs, critic_epochs, most_critic_updates, most_updates
from rlmath.data.loader import Rollback
from rlmath.data.packing import pack
from rlmath.data.seqlen_balancing import plan_minibatches, training_cost
from rlmath.distributed.bridge import Bridge
from rlmath.distributed.device import Device
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.models.build import Actor, build_actor, build_critic, build_reference, build_teacher, copy_weights
from rlmath.models.critic import Critic
from rlmath.models.forward_backward import ForwardBackward, TokenLogprobs
from rlmath.models.hf_config import critic_config_file, critic_shape_of, teacher_shape_of
from rlmath.models.learner import MinibatchResult
from rlmath.models.offload import OffloadSets, SetName, training_sets
from rlmath.models.teacher import Teacher, TeacherStates
from rlmath.rewards.reward_manager import RewardWorkers, open_reward_workers, raise_if_every_call_failed
from rlmath.rewards.several_rewards import functions_of, named_rewards, summed_rewards
from rlmath.rewards.user_functions import UserFunctionError
from rlmath.trainer.checkpointing import Checkpointer
from rlmath.trainer.critic import CriticEstimates, CriticUpdater, critic_metrics
from rlmath.trainer.engines import open_engines
from rlmath.trainer.kl_in_reward import KLPenalty, apply_kl_penalty
from rlmath.trainer.loop import Interrupted, Trainer
from rlmath.trainer.metrics import (
    UpdateRecord,
    engine_metrics,
    mfu_metrics,
    mismatch_metrics,
    pace_metrics,
    part_metrics,
    rollout_metrics,
    selection_metrics,
    teacher_metrics,
    update_metrics,
)
from rlmath.trainer.reporter import StepRecord, ValidationResult
from rlmath.trainer.rollouts import StepRollout, selection_rules
from rlmath.trainer.startup import PreparedRun
from rlmath.trainer.step_hooks import StepHooks
from rlmath.trainer.teacher_advantages import TeacherAdvantages, add_teacher_advantages
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
    def open_workers(config: Config, mesh: Mesh) -> AbstractContextManager[RewardWorkers | None]:
        """The reward workers of an engine's first rank."""
        if not mesh.is_engine_leader:
            return nullcontext()
        return open_reward_workers(config.reward, config.run.plugins)

    def __init__(
        self,
        prepared: PreparedRun[Inputs],
        mesh: Mesh,
        device: Device,
        workers: RewardWorkers | None = None,
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
        self.hooks = StepHooks(config, mesh.rank)
        on_phase("build engine")
        self.engines = open_engines(
            prepared, mesh, device, self.timers, workers, bridge, on_progress, self.hooks.keep
        )
        self.rollouts = self.engines.rollouts
        on_phase("build model")
        updates = most_updates(config, inputs.total_steps)
        self.actor = build_actor(config, shape, mesh, device, updates, inputs.stop_token_ids)
        self.reference = None
        if config.algorithm.kl_coef > 0:
            self.reference = build_reference(config, shape, mesh, device, inputs.stop_token_ids)
        self.reference_moved = False
        """Whether it is another than the model that the run started from."""
        self.critic = None
        critic_shape = critic_shape_of(config, shape)
        if critic_shape is not None:
            updates = most_critic_updates(config, inputs.total_steps)
            self.critic = build_critic(config, critic_shape, mesh, device, updates)
            self.critic.forward_backward.on_microbatch = on_progress
            folder = Path(config.critic.path or config.model.path)
            self.critic_config = critic_config_file(folder, critic_shape)
        self.teacher = None
        if (teacher_shape := teacher_shape_of(config)) is not None:
            self.teacher = build_teacher(config, shape, teacher_shape, mesh, device, inputs.stop_token_ids)
            self.teacher.forward_backward.on_microbatch = on_progress
        self.actor.forward_backward.on_microbatch = on_progress
        in_update = config.teacher.loss == "full"
        self.offload = training_sets(
            self.actor, self.reference, config.memory, device, self.critic, self.teacher, in_update
        )
        self.engines.connect(self.actor, self.offload)
        self.rules = selection_rules(config.selection, config.reward)
        self.updaters = [
            PolicyUpdater(
                stage.config,
                shape,
                mesh,
                self.actor,
                self.reference,
                self.offload,
                self.timers,
                self.critic,
                self.teacher,
            )
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
        started, failed = time.perf_counter(), None
        self.timers.reset()
        stage = self.enter_length_stage(number)
        with self.engines.generating(self.actor.learner.updates, number):  # weights to the engine
            with self.timers.phase("probe"):
                probed = self.engines.probe()
            validated = self.validator.validate(number)
            if self.validator.stopped_by is not None:
                return Interrupted(self.validator.stopped_by)
            with self.timers.phase(self.engines.phase):
                try:
                    rollout = self.rollouts.step(number, stage)
                except UserFunctionError as error:  # raised when the engines have left their phase
                    failed = error
        if failed is not None:
            raise failed
        selection = rollout.selection
        if self.rules.drop_anything:
            logger.info("step %d: %s", number + 1, selection.line())
        self.validator.keep_if_best(validated)
        if functions_of(self.config.reward):
            raise_if_every_call_failed(rollout.scores)
        own_advantages = self.own_advantages(selection.learned)
        history = self.rollouts.commit()
        update = self.updaters[stage.number].update(selection.learned, number, own_advantages)
        self.move_reference(number + 1)
        seconds = self.timers.seconds() | {"step": time.perf_counter() - started}
        metrics = self.metrics(stage, rollout, update, seconds) | history | probed
        metrics |= self.hooks.metrics(selection.sampled)
        return StepRecord(
            rollout.epoch,
            metrics,
            selection.sampled,
            selection.spread(update.advantages),
            validated,
            update.results or update.critic_results,
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
        metrics = rollout_metrics(selection.sampled) | part_metrics(selection.sampled, self.config.reward)
        metrics |= engine_metrics(rollout.rounds) | rollout.metrics
        if self.rules.drop_anything:
            metrics |= selection_metrics(selection)
        metrics |= update_metrics(update, learned, metrics["task_reward"], algorithm)
        metrics |= update.critic_metrics
        if self.teacher is not None:
            metrics |= teacher_metrics(update)
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

    def own_advantages(self, groups: Sequence[ScoredGroup]) -> list[list[float]] | None:
        """By a function of the user's; None where there is none, or no reward is learned from. A collective.
        UserFunctionError where it fails."""
        teaches_alone = self.teacher is not None and not self.config.teacher.with_rewards
        if teaches_alone or not self.hooks.gives_advantages:
            return None
        rewards_PG = [summed_rewards(group, self.config.reward) for group in groups]
        return self.hooks.advantages(rewards_PG, token_counts(groups))

    def enter_length_stage(self, number: int) -> LengthStage:
        """The length stage of a step; logged where it is the first one of this start."""
        stage = curriculum.length_stage_at(self.length_stages, number)
        if curriculum.has_length_stages(self.config) and stage.number != self.entered_length_stage:
            logger.info("%s", stage.line(len(self.length_stages)))
            self.entered_length_stage = stage.number
        return stage

    def move_reference(self, steps_done: int) -> None:
        """The policy becomes the reference, where that is due after so many steps."""
        every = self.config.algorithm.reference_every_steps
        if self.reference is None or every is None or steps_done % every:
            return
        with self.offload.on_device("reference"):
            copy_weights(self.actor.chunks, self.reference.chunks)
        self.reference_moved = True
        logger.info("The reference is the policy of step %d from here on", steps_done)

    @property
    def models(self) -> list[SavedModel]:
        models = super().models
        if self.critic is not None:
            models.append(SavedModel(CRITIC, self.critic.chunks, self.critic.learner.optimizer))
        if self.reference is not None:
            models.append(SavedModel(REFERENCE, self.reference.chunks, None))
        return models

    def saved_models(self) -> list[SavedModel]:
        return [one for one in self.models if one.name != REFERENCE or self.reference_moved]

    def models_on_device(self, models: Sequence[SavedModel]) -> AbstractContextManager[Any]:
        names = {one.name for one in models}
        sets: tuple[SetName, ...] = ("critic", "reference")
        return self.offload.on_device(*(name for name in sets if name in names))

    @property
    def critic_updates(self) -> int:
        return 0 if self.critic is None else self.critic.learner.updates

    def checkpoint_files(self) -> dict[str, bytes]:
        if self.mesh.rank != 0:
            return {}
        files = self.rollouts.files()
        if self.critic is not None:
            files[CRITIC_CONFIG] = self.critic_config
        return files

    def resume(self, folder: Path, progress: Progress) -> None:
        if self.critic is not None:
            self.critic.learner.restore_schedule(progress.critic_updates)
        if self.reference is not None:
            if self.reference_moved and not progress.has_model(REFERENCE):  # after a rollback
                with self.offload.on_device("reference"):
                    load_hf_weights(self.reference.chunks, self.config.model.path, self.shape, self.mesh)
            self.reference_moved = progress.has_model(REFERENCE)
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

    def roll_back(self, rollbacks: Sequence[Rollback]) -> None:
        super().roll_back(rollbacks)
        if self.critic is not None:
            self.critic.learner.lr_scale = self.actor.learner.lr_scale

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
        others = [self.reference]
        others += [None if one is None else one.forward_backward for one in (self.critic, self.teacher)]
        return super().busy_seconds() + sum(one.pop_busy_seconds() for one in others if one is not None)

    def close(self, status: int) -> None:
        self.engines.close(status)
        self.hooks.close()


# ---------------------------------------------------------------- from scored groups to a better policy


@dataclass(frozen=True)
class Minibatch:
    """One optimizer step of this data-parallel rank."""

    batches: list[MicroBatch]
    old: list[TokenLogprobs] | None
    """Log-probs under the policy that the step began with; None: those of the engine are used."""
    reference: list[TokenLogprobs] | None
    """Log-probs under the reference; None: no KL in the loss."""
    teacher: TeacherStates | None
    """What gives the teacher's whole distributions; None: they are not in the loss."""


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
    critic: Critic | None = None
    teacher: Teacher | None = None

    def __post_init__(self) -> None:
        algorithm, max_new_tokens = self.config.algorithm, self.config.rollout.max_new_tokens
        self.cost = training_cost(self.shape)
        self.normalisation = Normalisation(algorithm.loss_normalisation, max_new_tokens)
        self.penalty = None
        if self.reference is not None and algorithm.kl_in == "reward":
            kind = "ppo" if algorithm.advantage == "gae" else algorithm.advantage
            self.penalty = KLPenalty(algorithm.kl_coef, algorithm.kl_estimator, kind, algorithm.advantage_eps)
        self.critic_updater = None
        if self.critic is not None:
            self.critic_updater = CriticUpdater(
                self.critic, self.config.critic, algorithm.advantage_eps, self.penalty, self.mesh
            )

    @property
    def on_policy(self) -> bool:
        """Whether the old log-probs are those of the update's own forward pass, so that no extra pass is needed: one
        minibatch, one epoch, and neither KL in the reward nor a teacher in the advantages."""
        algorithm = self.config.algorithm
        only_one = algorithm.n_minibatches == 1 and algorithm.epochs == 1
        in_advantages = self.penalty is not None or self.teaches("advantage")
        return algorithm.recompute_logprobs and only_one and not in_advantages

    def teaches(self, loss: str) -> bool:
        """Whether there is a teacher whose part has this place, a word of `TeacherConfig.loss`."""
        return self.teacher is not None and self.config.teacher.loss == loss

    def update(
        self,
        groups: Sequence[ScoredGroup],
        number: int,
        own_advantages: list[list[float]] | None = None,
    ) -> UpdateRecord:
        """Learn from the groups of step `number`, with the advantages that a function of the user's gave, if it did.
        Without any completion nothing happens. A collective."""
        algorithm, timed = self.config.algorithm, self.timers.phase
        rewards_PG = [summed_rewards(group, self.config.reward) for group in groups]
        tokens_PG = token_counts(groups)
        advantages_PG = own_advantages
        if advantages_PG is None:
            advantages_PG = self.reward_advantages(groups, rewards_PG, tokens_PG)
        if not groups:
            return UpdateRecord([], advantages_PG, None)

        with timed("pack"):
            packed = self.pack_minibatches(make_samples(groups, advantages_PG), number)
        batches = list(chain.from_iterable(packed))

        old = reference = reward_kl = None
        pretrains = self.critic is not None and number < self.config.critic.pretrain_steps
        needed = self.penalty is not None or not pretrains
        if algorithm.recompute_logprobs and not self.on_policy and needed:
            with timed("logprobs"):
                old = self.actor.forward_backward.logprobs(batches)
        if self.reference is not None and needed:
            with timed("reference"), self.offload.on_device("reference"):
                reference = self.reference.logprobs(batches)
        seed, shuffle = step_seed(self.config.run.seed, number), algorithm.shuffle
        orders = minibatch_orders(len(packed), algorithm.epochs, shuffle, seed)
        critic_results: list[MinibatchResult] = []
        of_critic: dict[str, float] = {}
        if self.critic_updater is not None:
            estimates, critic_results, of_critic = self.update_critic(
                batches, packed, groups, rewards_PG, old, reference, number
            )
            batches, advantages_PG = estimates.batches, estimates.advantages
            reward_kl = estimates.reward_kl
        elif self.penalty is not None:
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
        if self.penalty is not None:
            reference = None
        if pretrains:
            return UpdateRecord(
                [], advantages_PG, reward_kl, critic_results=critic_results, critic_metrics=of_critic
            )

        states = teacher_kl = None
        if self.teaches("full"):
            states = self.teacher_states(batches)
        elif self.teaches("advantage"):
            taught = self.teacher_advantages(batches, old, advantages_PG, tokens_PG)
            batches, advantages_PG = taught.batches, taught.mean_advantages
            teacher_kl = taught.kl_per_token

        with timed("update"), self.offload.on_device("teacher_head"):
            minibatches = [
                Minibatch(
                    batches[i:j],
                    old[i:j] if old else None,
                    reference[i:j] if reference else None,
                    states[i:j] if states else None,
                )
                for i, j in bounds_of(packed)
            ]
            results = self.run_minibatches(minibatches, orders, number)
        passes = len(results) / len(minibatches)
        return UpdateRecord(results, advantages_PG, reward_kl, passes, critic_results, of_critic, teacher_kl)

    def reward_advantages(
        self,
        groups: Sequence[ScoredGroup],
        rewards_PG: Sequence[Sequence[float]],
        tokens_PG: Sequence[Sequence[int]],
    ) -> list[list[float]]:
        """By group and completion; 0 where the critic will give them, or the teacher alone is learned from."""
        algorithm, teacher = self.config.algorithm, self.config.teacher
        if algorithm.advantage == "gae" or (self.teacher is not None and not teacher.with_rewards):
            return [[0.0] * len(row) for row in rewards_PG]
        if self.config.reward.combine == "gdpo":
            weights = [one.weight for one in named_rewards(self.config.reward)]
            parts_PG = [[score.parts for score in group.scores] for group in groups]
            return gdpo_advantages(parts_PG, weights, algorithm.advantage_eps)
        if not groups:
            return []
        return advantages(rewards_PG, tokens_PG, algorithm.advantage, algorithm.advantage_eps)

    def update_critic(
        self,
        batches: Sequence[MicroBatch],
        packed: Sequence[Sequence[MicroBatch]],
        groups: Sequence[ScoredGroup],
        rewards_PG: Sequence[Sequence[float]],
        old: Sequence[TokenLogprobs] | None,
        reference: Sequence[TokenLogprobs] | None,
        number: int,
    ) -> tuple[CriticEstimates, list[MinibatchResult], dict[str, float]]:
        """Advantages by the critic as it is, its own updates afterwards, and its metrics. A collective."""
        assert self.critic_updater is not None
        seed, shuffle = step_seed(self.config.run.seed, number), self.config.algorithm.shuffle
        orders = minibatch_orders(len(packed), critic_epochs(self.config), shuffle, seed)
        with self.timers.phase("critic"), self.offload.on_device("critic", "critic_gradients"):
            estimates = self.critic_updater.estimate(batches, groups, rewards_PG, old, reference)
            minibatches = [estimates.batches[i:j] for i, j in bounds_of(packed)]
            targets = [estimates.targets[i:j] for i, j in bounds_of(packed)]
            results = self.critic_updater.learn(minibatches, targets, orders, number)
        return estimates, results, estimates.metrics | critic_metrics(results)

    def teacher_states(self, batches: Sequence[MicroBatch]) -> TeacherStates:
        """For the loss on the whole vocabulary. A collective."""
        assert self.teacher is not None
        with self.timers.phase("teacher"), self.offload.on_device("teacher", "teacher_head"):
            return self.teacher.states(batches)

    def teacher_advantages(
        self,
        batches: Sequence[MicroBatch],
        old: Sequence[TokenLogprobs] | None,
        advantages_PG: Sequence[Sequence[float]],
        tokens_PG: Sequence[Sequence[int]],
    ) -> TeacherAdvantages:
        """The micro-batches with the teacher's part in their advantages; `old` are the recomputed log-probs, None to
        compare the engine's. A collective."""
        assert self.teacher is not None
        common, policy = self.teacher.vocab_size, old
        with self.timers.phase("teacher"):
            # Both distributions are compared over the tokens that both know.
            if common < self.shape.vocab_size:
                policy = self.actor.forward_backward.logprobs(batches, common)
            with self.offload.on_device("teacher", "teacher_head"):
                scored = self.teacher.logprobs(batches)
        coef = self.config.teacher.coef
        return add_teacher_advantages(
            batches, policy, scored, advantages_PG, tokens_PG, coef, common, self.mesh
        )

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

    def run_minibatches(
        self, minibatches: Sequence[Minibatch], orders: Sequence[Sequence[int]], number: int
    ) -> list[MinibatchResult]:
        """One optimizer step on each, in every epoch; a minibatch whose ratio leaves its bounds is discarded."""
        algorithm, results = self.config.algorithm, []
        for order in orders:
            for index in order:
                minibatch = minibatches[index]
                result = self.actor.learner.learn(
                    minibatch.batches,
                    minibatch.old,
                    minibatch.reference,
                    self.on_policy,
                    minibatch.teacher,
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


def token_counts(groups: Sequence[ScoredGroup]) -> list[list[int]]:
    """Lengths of the completions by group and sample."""
    return [[len(one.token_ids) for one in group.completions] for group in groups]


def minibatch_orders(count: int, epochs: int, shuffle: bool, seed: int) -> list[list[int]]:
    """The order of a step's minibatches in every epoch."""
    order, draw = list(range(count)), random.Random(seed)
    orders = []
    for epoch in range(epochs):
        if epoch > 0 and shuffle:
            draw.shuffle(order)
        orders.append(list(order))
    return orders


def bounds_of(packed: Sequence[Sequence[MicroBatch]]) -> list[tuple[int, int]]:
    """Where each minibatch's micro-batches begin and end in the list of all."""
    return list(pairwise(accumulate(map(len, packed), initial=0)))


def step_seed(run_seed: int, number: int) -> int:
    """The seed of everything that step `number` shuffles."""
    return run_seed * 1_000_003 + number
