"""The GRPO loop.

    weights to the engine -> prompts -> rollout and reward -> selection -> updates (see `update`)

Every rank runs it; the control plane is computed alike everywhere, only tensors are sharded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice

from rlmath.algo.selection import Selection, SelectionRules, select
from rlmath.config import Config, SelectionConfig
from rlmath.data.loader import PromptOrder
from rlmath.model_shape import ModelShape
from rlmath.parallel.mesh import Mesh
from rlmath.policy.actor import Actor
from rlmath.policy.executor import Executor
from rlmath.policy.offload import OffloadSets
from rlmath.rollout.collect import Collector, RolloutSeed
from rlmath.rollout.memory import MemorySwitch
from rlmath.step_metrics import (
    idle_metrics,
    mismatch_metrics,
    pace_metrics,
    rollout_metrics,
    selection_metrics,
    update_metrics,
)
from rlmath.sync.checked import CheckedSync
from rlmath.telemetry.timers import PhaseTimers
from rlmath.types import Prompt, ScoredGroup
from rlmath.update import Updater, UpdateRecord

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


@dataclass(frozen=True)
class Parts:
    """Everything the loop works with, built by `run`."""

    config: Config
    shape: ModelShape
    mesh: Mesh
    prompts: Sequence[Prompt]
    order: PromptOrder
    actor: Actor
    reference: Executor | None
    offload: OffloadSets
    sync: CheckedSync
    switch: MemorySwitch
    collector: Collector
    timers: PhaseTimers


class Trainer:
    """Makes steps, one after the other."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._timers = parts.timers
        self._rules = selection_rules(parts.config.selection)
        self._engine_seconds: list[tuple[float, ...]] = []
        self._updater = Updater(
            parts.config, parts.shape, parts.mesh, parts.actor, parts.reference, parts.offload, self._timers
        )

    def step(self, number: int) -> StepRecord:
        """Step `number`, counted from 0 over the whole run."""
        started = time.perf_counter()
        self._timers.reset()
        parts, timed = self._parts, self._timers.phase
        with parts.switch.generating(parts.actor.learner.updates):
            with timed("probe"):
                probed = parts.sync.probe_engine()
            with timed("rollout"):
                epoch, selection = self._rollout(number)
        record = self._updater.update(selection.learned, number)
        seconds = self._timers.seconds() | {"step": time.perf_counter() - started}
        metrics = self._metrics(selection, record, seconds)
        metrics |= parts.sync.metrics() | parts.switch.metrics() | probed
        return StepRecord(epoch, metrics, selection.sampled, selection.spread(record.advantages))

    def _rollout(self, number: int) -> tuple[int, Selection]:
        """The epoch, and what was sampled: the step's own prompts, then what dynamic sampling asks for."""
        parts, seed = self._parts, RolloutSeed(self._parts.config.run.seed, number)
        epoch, own = parts.order.batch(number)
        indices = chain(own, parts.order.extra(number))
        self._engine_seconds.clear()

        def sample(count: int) -> list[ScoredGroup]:
            prompts = [parts.prompts[i] for i in islice(indices, count)]
            if not prompts:
                return []
            rollout = parts.collector.collect(prompts, seed)
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


def selection_rules(settings: SelectionConfig) -> SelectionRules:
    """The rules that the settings name."""
    return SelectionRules(
        settings.dynamic_sampling,  # type: ignore[arg-type]  # one of the words, as preflight has seen
        settings.min_completion_tokens,
        settings.max_completion_tokens,
        settings.drop_truncated,
    )
