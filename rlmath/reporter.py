"""What rank 0 tells about a run: console, metrics, samples, summary."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from rlmath.account import RunAccount
from rlmath.inputs import Inputs
from rlmath.parts import Parts
from rlmath.stages import has_stages
from rlmath.telemetry.console import step_line
from rlmath.telemetry.samples import SampleWriter
from rlmath.telemetry.warning_signs import WarningSigns, dropped_sign
from rlmath.trainer import StepRecord
from rlmath.validation import Measured

logger = logging.getLogger(__name__)

SWITCH_PHASES = ("offload", "wake", "wake_kv_cache", "sleep", "restore")
"""Phases of the memory switch (`rollout.memory`); the sync is told apart."""


class Reporter:
    """Rank 0's account of the run."""

    def __init__(self, parts: Parts, inputs: Inputs, folder: Path, steps_done: int = 0) -> None:
        """A run that goes on has `steps_done`, of which the folder has the metrics."""
        self._parts = parts
        self._account = RunAccount(parts.config, inputs.order, inputs.total_steps, steps_done)
        self._samples = SampleWriter(str(folder), parts.config.telemetry.sample_groups_per_step)
        self._signs = _open_signs(parts, inputs, goes_on=steps_done > 0)
        for step, metrics in self._account.earlier():
            self._look_for_signs(step - 1, metrics)
            self._count(metrics)

    def _count(self, metrics: Mapping[str, float]) -> None:
        self._account.count(metrics, phase_seconds(metrics), metrics["n_valid_tokens"])

    def step(self, number: int, record: StepRecord, memory_gib: float, save_seconds: float) -> None:
        """Step `number`, counted from 0; `save_seconds` is how long saving after the step before it took."""
        if record.measured is not None:
            self.validation(record.measured)
        metrics = record.metrics | {"memory_gib": memory_gib, "seconds/save": save_seconds}
        self._count(metrics)
        self._account.metrics.write(number + 1, metrics)
        self._samples.write(number + 1, record.groups, record.advantages, self._account.metrics)
        self._warn_of_failures(number + 1, record, metrics["reward/failures"])
        for text in self._look_for_signs(number, metrics):
            logger.warning("Step %d, a warning sign, told once: %s", number + 1, text)
        progress = self._account.progress(number, record.epoch, metrics["seconds/step"])
        logger.info("%s", step_line(progress, metrics))

    def validation(self, measured: Measured) -> None:
        """Before the step that began with the weights that were measured."""
        self._account.metrics.write_validation(measured.step, measured.metrics)

    def _look_for_signs(self, number: int, metrics: Mapping[str, float]) -> list[str]:
        if any(number == stage.first_step for stage in self._parts.stages):
            self._signs.new_stage()
        return self._signs.after(metrics)

    def _warn_of_failures(self, step: int, record: StepRecord, share: float) -> None:
        if share <= self._parts.config.reward.max_failure_share:
            return
        path = self._samples.write_failure(step, record.groups, record.advantages)
        logger.warning(
            "Step %d: %.1f%% of the answers could not be judged (reward.max_failure_share is %.1f%%); they count as"
            " wrong. One of them is in %s, in full",
            step,
            100 * share,
            100 * self._parts.config.reward.max_failure_share,
            path,
        )

    def sum_up(self, seconds_total: float) -> None:
        """Write the summary of the whole run; `seconds_total` are those since this process started."""
        self._account.write_summary(self._parts.mesh.describe(), seconds_total, "completion_tokens")

    def leave(self) -> None:
        """Close what is open, of a run that ends here or stops before its end."""
        self._account.leave()


def _open_signs(parts: Parts, inputs: Inputs, goes_on: bool) -> WarningSigns:
    config = parts.config
    told = None if goes_on else dropped_sign(inputs.dropped_share, config.telemetry)
    if told is not None:
        logger.warning("A warning sign, told once: %s", told)
    key = "stages.max_new_tokens" if has_stages(config) else "rollout.max_new_tokens"
    return WarningSigns(config.telemetry, config.algorithm.loss == "gspo", key)


def phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """The seconds of a step's phases, with those of the memory switch added up as "switch".

    >>> phase_seconds({"seconds/sync": 2.0, "seconds/wake": 0.5, "seconds/sleep": 0.25, "loss": 1.0})
    {'sync': 2.0, 'switch': 0.75}
    """
    found = {name.removeprefix("seconds/"): v for name, v in metrics.items() if name.startswith("seconds/")}
    switch = [found.pop(phase) for phase in SWITCH_PHASES if phase in found]
    return found | {"switch": sum(switch)}
