"""GRPO: one step, from weights to weights, in the order in which this file reads.

    weights to the engine -> (probe, validation) -> prompts -> rollout and rewards -> selection ->
    advantages -> samples -> schedule -> packing -> log-probs (old, reference) -> critic -> teacher
    -> minibatches: loss, early stop, update -> metrics

Every rank runs it. The control plane (prompts, selection, advantages, schedule) is computed alike
on all ranks; only tensors are sharded. Lengths are those of the step's length stage; weights,
optimizer, learning-rate schedule, order of prompts and seeds continue from stage to stage.

From advantages to the update it is `policy_update.py`, the formulas are in `algorithms/`, the life
cycle around the step is in `rlmath.run.loop`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

from rlmath.algorithms.types import RoutesAt, ScoredGroup
from rlmath.checkpoint.directory import CRITIC_CONFIG, Progress
from rlmath.config import length_curriculum
from rlmath.config.length_curriculum import LengthStage
from rlmath.config.run_files import write_whole
from rlmath.config.schema import Config
from rlmath.data.dataset import Inputs, ValidationFile, measured_rows
from rlmath.data.micro_batches import forward_cost
from rlmath.data.prompt_curriculum import HISTORY
from rlmath.data.routes import places_of
from rlmath.distributed.mesh import Mesh
from rlmath.rewards.reward_manager import FailedSteps, RewardWorkers
from rlmath.rewards.several_rewards import functions_of, summed_rewards
from rlmath.telemetry.events import event
from rlmath.telemetry.reporter import StepRecord, ValidationResult
from rlmath.trainer.base import Export, Interrupted
from rlmath.trainer.context import RankContext
from rlmath.trainer.metrics import (
    UpdateRecord,
    engine_metrics,
    mfu_metrics,
    mismatch_metrics,
    pace_metrics,
    part_metrics,
    rollout_metrics,
    routing_metrics,
    selection_metrics,
    teacher_metrics,
    teaching_metrics,
    unreplayed_metrics,
    update_metrics,
)
from rlmath.trainer.policy_update import PolicyTrainer, token_counts
from rlmath.trainer.recorder import StepRecorder
from rlmath.trainer.rollouts.engines import open_engine_workers, open_engines
from rlmath.trainer.rollouts.synchronous import StepRollout, selection_rules
from rlmath.trainer.step_hooks import StepHooks
from rlmath.trainer.tool_metrics import tool_metrics, wait_metrics
from rlmath.trainer.turn_metrics import turn_metrics
from rlmath.trainer.validation import Validator
from rlmath.trainer.void_turns import void_rule

logger = logging.getLogger(__name__)


class GrpoTrainer(PolicyTrainer):
    """Samples with vLLM, scores, and updates the policy: `step` is the algorithm."""

    weight_syncs_per_step: ClassVar = 1
    validator: Validator
    """Made by `begin`."""

    @staticmethod
    def open_workers(
        config: Config,
        mesh: Mesh,
        inputs: Inputs | None = None,
        validation: Sequence[ValidationFile] = (),
    ) -> AbstractContextManager[RewardWorkers | None]:
        """The reward workers of an engine's first rank."""
        measured = measured_rows(config, () if inputs is None else inputs.prompts, validation)
        return open_engine_workers(config, mesh, measured)

    def __init__(self, context: RankContext[Inputs]) -> None:
        """Build engine, actor and reference; the engine sleeps afterwards.

        With a bridge the engines are elsewhere."""
        super().__init__(context)
        config = context.config
        self.inputs = context.inputs
        self.reward_fingerprint = context.reward_fingerprint
        self.entered_length_stage: int | None = None
        self.hooks = StepHooks(config, context.mesh.rank)
        self.failed_steps = FailedSteps(config.reward.timeout_seconds)
        context.on_phase("build engine")
        self.engines = open_engines(context, self.timers, self.hooks.keep)
        self.rollouts = self.engines.rollouts
        context.on_phase("build model")
        self.build_models(context)
        self.engines.connect(self.actor, self.offload)
        self.recorder = StepRecorder(self, config.telemetry.capture_steps)
        self.rules = selection_rules(config)
        self.validation_files = context.validation

    @property
    def layout(self) -> str:
        return self.mesh.describe()

    def begin(
        self, steps_done: int, export: Export, asked_to_stop: Callable[[], str | None]
    ) -> None:
        self.validator = Validator(
            self.config,
            self.mesh,
            self.engines.collector,
            timers=self.timers,
            files=self.validation_files,
            steps_done=steps_done,
            total_steps=self.total_steps,
            export=export,
            asked_to_stop=asked_to_stop,
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
        if functions_of(self.config.reward):
            self.failed_steps.check(rollout.scores)
        own_advantages = self.own_advantages(selection.learned)
        history = self.rollouts.commit()
        routes = self.engines.routes
        in_flight: list[RoutesAt] = []
        if routes is not None:
            in_flight = places_of(self.rollouts.parts_in_flight)
            learned = (part for group in selection.learned for part in group.completions)
            routes.keep_only([*places_of(learned), *in_flight])
        with self.timers.phase("capture"):
            self.recorder.before_update(
                number,
                stage.number,
                selection,
                own_advantages=own_advantages,
                routes=routes,
            )
        update = self.updaters[stage.number].update(
            selection.learned, number, own_advantages, routes=routes
        )
        if routes is not None:
            routes.keep_only(in_flight)  # a skipped update has fetched none
        with self.timers.phase("capture"):
            self.recorder.after_update(update)
        self.move_reference(number + 1)
        seconds = self.timers.seconds() | {"step": time.perf_counter() - started}
        metrics = self.metrics(stage, rollout, update, seconds) | history | probed
        metrics |= self.control_entropy(update)
        metrics |= self.hooks.metrics(selection.sampled)
        return StepRecord(
            metrics,
            groups=selection.sampled,
            advantages=selection.spread(update.advantages),
            validation=validated,
            results=update.results or update.critic_results,
        )

    def metrics(
        self,
        stage: LengthStage,
        rollout: StepRollout,
        update: UpdateRecord,
        seconds: dict[str, float],
    ) -> dict[str, float]:
        """All metrics of a step, under the names that `metrics.jsonl` has."""
        algorithm = self.config.algorithm
        selection = rollout.selection
        learned = selection.learned
        metrics = rollout_metrics(selection.sampled) | part_metrics(
            selection.sampled, self.config.reward
        )
        metrics |= engine_metrics(rollout.rounds) | rollout.metrics
        if self.rules.drop_anything:
            metrics |= selection_metrics(selection)
        metrics |= update_metrics(update, learned, metrics["task_reward"], settings=algorithm)
        if self.config.tools.format is not None:
            metrics |= tool_metrics(selection, void_rule(self.config), self.config.tools)
            metrics |= wait_metrics(rollout.rounds, "tools")
        if self.config.answers_turns:
            metrics |= turn_metrics(selection, self.config.turns.feedback is not None)
            metrics |= wait_metrics(rollout.rounds, "turns")
        in_loss = self.teacher is not None and self.config.teacher.loss == "full"
        metrics |= teaching_metrics(update, sampled=len(selection.sampled), every_group=in_loss)
        metrics |= update.critic_metrics | routing_metrics(update.routing)
        metrics |= unreplayed_metrics(update.unreplayed)
        if self.teacher is not None:
            metrics |= teacher_metrics(update)
        metrics |= mismatch_metrics(update.results, only_first=not algorithm.recomputes)
        metrics |= pace_metrics(
            seconds,
            sampled_tokens=rollout.sampled_tokens,
            sampled=selection.sampled,
            learned=learned,
            passes=update.passes,
        )
        if self.peak_flops is not None:
            metrics |= mfu_metrics(
                seconds,
                sampled_tokens=rollout.sampled_tokens,
                sampled=selection.sampled,
                learned=learned,
                passes=update.passes,
                forward=forward_cost(self.shape),
                trained=self.updaters[stage.number].cost,
                peak_flops=self.peak_flops,
            )
        if length_curriculum.has_length_stages(self.config):
            metrics["stage"] = stage.number + 1.0
            metrics["rollout/max_new_tokens"] = float(stage.config.rollout.max_new_tokens)
        return metrics | self.engines.metrics()

    def own_advantages(self, groups: Sequence[ScoredGroup]) -> list[list[float]] | None:
        """Advantages by the user's function; None without one, or where no reward is learned from.

        A collective. UserFunctionError where it fails."""
        if self.teacher is not None and not self.config.teacher.with_rewards:
            return None
        rewards_PG = [summed_rewards(group, self.config.reward) for group in groups]
        return self.hooks.advantages(rewards_PG, token_counts(groups))

    def enter_length_stage(self, number: int) -> LengthStage:
        """The length stage of a step; logged where it is the first one of this start."""
        stage = length_curriculum.length_stage_at(self.shapes.length_stages, number)
        if (
            length_curriculum.has_length_stages(self.config)
            and stage.number != self.entered_length_stage
        ):
            logger.info(
                "%s",
                stage.line(len(self.shapes.length_stages)),
                extra=event("length stage", stage.first_step),
            )
            self.entered_length_stage = stage.number
        return stage

    def checkpoint_files(self) -> dict[str, bytes]:
        files = self.rollouts.rank_files()
        if self.mesh.rank != 0:
            return files
        files |= self.rollouts.files()
        if self.critic is not None:
            files[CRITIC_CONFIG] = self.critic_config
        return files

    def resume(self, folder: Path, progress: Progress) -> None:
        super().resume(folder, progress)
        changed = progress.reward_fingerprint not in ("", self.reward_fingerprint)
        self.rollouts.resume(folder, progress.step, changed)

    def validate_at_end(self) -> ValidationResult | None:
        """Validate the weights after all steps, where that is due; the engine wakes for it."""
        if not self.validator.due(self.total_steps):
            return None
        with self.engines.generating(self.actor.learner.updates, self.total_steps):
            validated = self.validator.validate(self.total_steps)
        self.validator.keep_if_best(validated)
        return validated

    def next_draw_step(self, steps_done: int) -> int:
        """The first step for which nothing is drawn; groups in flight are of later steps."""
        return max(steps_done, -(-self.rollouts.next_draw // self.order.prompts_per_step))

    def at_end(self) -> dict[str, Any]:
        curriculum = self.rollouts.curriculum
        if self.mesh.rank == 0:
            for line in curriculum.lines():
                logger.info("%s", line)
            path = Path(self.config.run.output_dir) / HISTORY
            try:
                write_whole(path, curriculum.file())
            except OSError as error:
                logger.warning("%s cannot be written: %s", path, error)
        return {"history": curriculum.summary()}

    def write_last_step(self, reason: str) -> None:
        self.recorder.write(reason)

    def close(self, status: int) -> None:
        self.engines.close(status)
        self.hooks.close()
