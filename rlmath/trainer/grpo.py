"""The GRPO loop.

    weights to the engine -> (validation) -> prompts -> rollout and reward -> selection -> updates (see `update`)

Every rank runs it; the control plane is computed alike everywhere, only tensors are sharded.
Lengths are those of the step's stage (`stages`); all else goes on from stage to stage.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from itertools import chain, islice

from rlmath.algorithms.dynamic_sampling import Selection, SelectionRules, select
from rlmath.algorithms.types import ScoredGroup
from rlmath.config.length_curriculum import LengthStage, has_length_stages, length_stage_at
from rlmath.config.schema import SelectionConfig
from rlmath.rollout.sampling import RolloutSeed, training_sampling
from rlmath.trainer.build import Parts
from rlmath.trainer.metrics import (
    idle_metrics,
    mismatch_metrics,
    pace_metrics,
    rollout_metrics,
    selection_metrics,
    update_metrics,
)
from rlmath.trainer.policy_update import Updater, UpdateRecord
from rlmath.trainer.validation import Measured, Validator

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepRecord:
    """What a step leaves for telemetry."""

    epoch: int
    metrics: dict[str, float]
    groups: list[ScoredGroup]
    """All that were sampled."""
    advantages: list[list[float]]
    """By group and completion; 0 for what was not learned from."""
    measured: Measured | None
    """The validation of the weights that the step began with, where one was due."""


class Trainer:
    """Makes steps, one after the other."""

    def __init__(self, parts: Parts, validator: Validator) -> None:
        self._parts = parts
        self._validator = validator
        self._timers = parts.timers
        self._rules = selection_rules(parts.config.selection)
        self._engine_seconds: list[tuple[float, ...]] = []
        self._stage: LengthStage | None = None
        how = (parts.shape, parts.mesh, parts.actor, parts.reference, parts.offload, parts.timers)
        self._updaters = [Updater(stage.config, *how) for stage in parts.stages]

    def step(self, number: int) -> StepRecord | str:
        """Step `number`, counted from 0 over the whole run; or what asked the run to stop while it validated: then
        nothing of the step is made."""
        started = time.perf_counter()
        self._timers.reset()
        parts, timed, stage = self._parts, self._timers.phase, self._enter_stage(number)
        with parts.switch.generating(parts.actor.learner.updates, number):
            with timed("probe"):
                probed = parts.sync.probe_engine()
            measured = self._validator.measure(number)
            if self._validator.stopped_by is not None:
                return self._validator.stopped_by
            with timed("rollout"):
                epoch, selection = self._rollout(number, stage)
        self._validator.keep_if_best(measured)
        record = self._updaters[stage.number].update(selection.learned, number)
        seconds = self._timers.seconds() | {"step": time.perf_counter() - started}
        metrics = self._metrics(selection, record, seconds) | self._stage_metrics(stage)
        metrics |= parts.sync.metrics() | parts.switch.metrics() | probed
        advantages = selection.spread(record.advantages)
        return StepRecord(epoch, metrics, selection.sampled, advantages, measured)

    def validate_at_end(self, steps: int) -> Measured | None:
        """The validation of the weights after all `steps`, where it is not done yet; it needs a switch of its own."""
        if not self._validator.due(steps):
            return None
        with self._parts.switch.generating(self._parts.actor.learner.updates, steps):
            measured = self._validator.measure(steps)
        self._validator.keep_if_best(measured)
        return measured

    def _enter_stage(self, number: int) -> LengthStage:
        stages = self._parts.stages
        stage = length_stage_at(stages, number)
        if stage is not self._stage and has_length_stages(self._parts.config):
            logger.info("%s", stage.line(len(stages)))
        self._stage = stage
        return stage

    def _rollout(self, number: int, stage: LengthStage) -> tuple[int, Selection]:
        """The epoch, and what was sampled: the step's own prompts, then what dynamic sampling asks for."""
        parts, seed = self._parts, RolloutSeed(self._parts.config.run.seed, number)
        how, title = training_sampling(stage.config.rollout), f"rollout {number + 1}"
        epoch, own = parts.order.batch(number)
        indices = chain(own, parts.order.extra(number))
        self._engine_seconds.clear()

        def sample(count: int) -> list[ScoredGroup]:
            prompts = [parts.prompts[i] for i in islice(indices, count)]
            if not prompts:
                return []
            rollout = parts.collector.collect(prompts, how, seed, title)
            self._engine_seconds.append(rollout.engine_seconds)
            return rollout.groups

        selection = select(sample, len(own), parts.config.selection.max_extra_prompts, self._rules)
        if self._rules.drop_anything:
            logger.info("step %d: %s", number + 1, selection.line())
        return epoch, selection

    def _metrics(
        self, selection: Selection, record: UpdateRecord, seconds: dict[str, float]
    ) -> dict[str, float]:
        algorithm, learned = self._parts.config.algorithm, selection.learned
        metrics = rollout_metrics(selection.sampled) | idle_metrics(self._engine_seconds)
        if self._rules.drop_anything:
            metrics |= selection_metrics(selection)
        metrics |= update_metrics(record, learned, metrics["task_reward"], algorithm)
        metrics |= mismatch_metrics(record.results, only_first=not algorithm.recompute_logprobs)
        return metrics | pace_metrics(seconds, selection.sampled, learned, record.passes)

    def _stage_metrics(self, stage: LengthStage) -> dict[str, float]:
        """The stage, counted from 1, and its limit; nothing in a run without stages."""
        if not has_length_stages(self._parts.config):
            return {}
        return {
            "stage": stage.number + 1.0,
            "rollout/max_new_tokens": float(stage.config.rollout.max_new_tokens),
        }


def selection_rules(settings: SelectionConfig) -> SelectionRules:
    """The rules that the settings name."""
    return SelectionRules(
        settings.dynamic_sampling,  # type: ignore[arg-type]  # one of the words, as preflight has seen
        settings.min_completion_tokens,
        settings.max_completion_tokens,
        settings.drop_truncated,
    )
