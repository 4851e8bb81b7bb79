"""The figures of a run over all its starts, as rank 0 keeps them: rows of metrics, seconds of phases, tokens."""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlmath.config.length_curriculum import has_length_stages
from rlmath.config.schema import Config
from rlmath.data.dataset import Inputs, SftInputs
from rlmath.data.loader import PromptOrder
from rlmath.trainer.build import Parts
from rlmath.trainer.checkpointing import Training
from rlmath.trainer.grpo import StepRecord
from rlmath.trainer.run_dir import SUMMARY_NAME
from rlmath.trainer.sft import SftStep
from rlmath.trainer.telemetry.alerts import WarningSigns, dropped_sign
from rlmath.trainer.telemetry.console import Progress, step_line
from rlmath.trainer.telemetry.metrics_writer import open_metrics, read_metrics
from rlmath.trainer.telemetry.samples import SampleWriter
from rlmath.trainer.validation import Measured

logger = logging.getLogger(__name__)


class RunAccount:
    """What `metrics.jsonl` and `summary.json` are made of."""

    def __init__(self, config: Config, order: PromptOrder, total_steps: int, steps_done: int) -> None:
        """A run that goes on has `steps_done`, of which the folder has the metrics."""
        self.metrics = open_metrics(config, steps_done + 1)
        self.last: dict[str, float] = {}
        """The metrics of the last step."""
        self._folder = Path(config.run.output_dir)
        self._order = order
        self._total_steps = total_steps
        self._steps_before = steps_done
        self._started = time.perf_counter()
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._seconds_before = self._tokens = 0.0

    def earlier(self) -> Iterator[tuple[int, dict[str, float]]]:
        """(step, metrics) of every row that earlier starts left; their seconds count as the run's."""
        for row in read_metrics(str(self._folder)) if self._steps_before else []:
            self._seconds_before += row.get("seconds/step", 0.0) + row.get("seconds/save", 0.0)
            yield int(row["step"]), {name: value for name, value in row.items() if name != "step"}

    def count(self, metrics: Mapping[str, float], seconds: Mapping[str, float], tokens: float) -> None:
        """A step's metrics, its seconds by phase, and the tokens that `tokens_per_second` counts."""
        self.last = dict(metrics)
        for phase, value in seconds.items():
            self._seconds[phase].append(value)
        self._tokens += tokens

    def progress(self, number: int, epoch: int, step_seconds: float) -> Progress:
        """Where the run stands after step `number`; it and its epoch count from 0."""
        steps_per_epoch = self._order.steps_per_epoch
        return Progress(
            epoch=epoch + 1,
            total_epochs=-(-self._total_steps // steps_per_epoch),
            step=number % steps_per_epoch + 1,
            steps_per_epoch=steps_per_epoch,
            global_step=number + 1,
            total_steps=self._total_steps,
            step_seconds=step_seconds,
            total_seconds=time.perf_counter() - self._started,
            steps_timed=number + 1 - self._steps_before,
        )

    def write_summary(
        self, layout: str, seconds_total: float, tokens: str, more: Mapping[str, object] | None = None
    ) -> None:
        """`seconds_total` are those since this process started; `tokens` is how the counted tokens are named."""
        training = self._seconds_before + time.perf_counter() - self._started
        medians = {phase: round(statistics.median(values), 6) for phase, values in self._seconds.items()}
        summary = {
            "steps": self._total_steps,
            "layout": layout,
            "went_on_after_step": self._steps_before,
            "seconds_total": round(self._seconds_before + seconds_total, 3),
            "seconds_training": round(training, 3),
            tokens: int(self._tokens),
            "tokens_per_second": round(self._tokens / training, 1),
            "median_seconds": medians,
            **(more or {}),
            "last_step": self.last,
        }
        path = self._folder / SUMMARY_NAME
        path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        logger.info("The summary is in %s", path)

    def leave(self) -> None:
        """Close what is open, of a run that ends here or stops before its end."""
        self.metrics.close()


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
    key = "stages.max_new_tokens" if has_length_stages(config) else "rollout.max_new_tokens"
    return WarningSigns(config.telemetry, config.algorithm.loss == "gspo", key)


def phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """The seconds of a step's phases, with those of the memory switch added up as "switch".

    >>> phase_seconds({"seconds/sync": 2.0, "seconds/wake": 0.5, "seconds/sleep": 0.25, "loss": 1.0})
    {'sync': 2.0, 'switch': 0.75}
    """
    found = {name.removeprefix("seconds/"): v for name, v in metrics.items() if name.startswith("seconds/")}
    switch = [found.pop(phase) for phase in SWITCH_PHASES if phase in found]
    return found | {"switch": sum(switch)}


class SftReporter:
    """Rank 0's account of the run."""

    def __init__(self, training: Training, inputs: SftInputs, steps_done: int) -> None:
        """A run that goes on has `steps_done`, of which the folder has the metrics."""
        self._layout = training.mesh.training_layout
        self._account = RunAccount(training.config, inputs.order, inputs.total_steps, steps_done)
        self._held_out: dict[str, float] = {}
        for _, metrics in self._account.earlier():
            self._count(metrics)

    def before_training(self, measured: Mapping[str, float]) -> None:
        """The evaluation of the model as it came: step 0."""
        if measured:
            self._account.metrics.write(0, measured)
            told = ", ".join(f"{name} {value:.4f}" for name, value in measured.items())
            logger.info("Before training: %s", told)

    def step(self, number: int, record: SftStep, memory_gib: float, save_seconds: float) -> None:
        """Step `number`, counted from 0; `save_seconds` is how long saving after the step before it took."""
        metrics = record.metrics | {"memory_gib": memory_gib, "seconds/save": save_seconds}
        self._count(metrics)
        self._account.metrics.write(number + 1, metrics)
        if record.skipped is not None:
            logger.warning(
                "Step %d: the update was skipped: %s. Weights and optimizer stayed as they were",
                number + 1,
                record.skipped,
            )
        progress = self._account.progress(number, record.epoch, metrics["seconds/step"])
        logger.info("%s", step_line(progress, metrics))

    def _count(self, metrics: Mapping[str, float]) -> None:
        self._held_out |= {name: value for name, value in metrics.items() if name.startswith("held_out/")}
        seconds = {
            name.removeprefix("seconds/"): value
            for name, value in metrics.items()
            if name.startswith("seconds/")
        }
        self._account.count(metrics, seconds, metrics.get("n_tokens", 0.0))

    def sum_up(self, seconds_total: float) -> None:
        """Write the summary of the whole run; `seconds_total` are those since this process started."""
        self._account.write_summary(self._layout, seconds_total, "tokens", {"held_out": self._held_out})

    def leave(self) -> None:
        """Close what is open, of a run that ends here or stops before its end."""
        self._account.leave()
