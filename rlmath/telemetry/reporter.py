"""Reports of rank 0 on a run, over all its starts.

They are metrics.jsonl, console, samples, alerts and summary.json."""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.algorithms.types import GROUP_ADVANTAGES, ScoredGroup
from rlmath.config.length_curriculum import LengthStage, has_length_stages
from rlmath.config.objectives import OBJECTIVES
from rlmath.config.run_files import METRICS_FILE, SUMMARY_FILE, SWITCH_PHASES, write_whole
from rlmath.config.schema import Config, Kind
from rlmath.data.dataset import Inputs, SftInputs
from rlmath.models.learner import MinibatchResult
from rlmath.rewards.reward_manager import first_function_failure
from rlmath.rewards.several_rewards import functions_of, named_rewards
from rlmath.telemetry.alerts import Alerts, dropped_alert
from rlmath.telemetry.console import RECENT_STEPS, remaining_seconds, step_line
from rlmath.telemetry.events import event
from rlmath.telemetry.metrics_writer import Unwritten, open_metrics, read_metrics
from rlmath.telemetry.samples import SampleWriter, samples_file

logger = logging.getLogger(__name__)

FAILURES_STEPS = 50
"""Answers that could not be judged are warned of again so many steps on."""
COUNTED = {"grpo": ("n_valid_tokens", "completion_tokens"), "sft": ("n_tokens", "tokens")}
"""Metric of the summary's `tokens_per_second`, and the name of its sum, by kind of program."""


@dataclass(frozen=True)
class ValidationResult:
    """Accuracy on the files of `validation.paths`."""

    step: int
    """Steps done by the weights that were validated."""
    metrics: dict[str, float]


@dataclass(frozen=True)
class StepRecord:
    """Results of a step that the reporter writes."""

    metrics: dict[str, float]
    groups: Sequence[ScoredGroup] = ()
    """GRPO: all that were sampled."""
    advantages: Sequence[Sequence[float]] = ()
    """GRPO: by group and completion; 0 for what was not learned from."""
    validation: ValidationResult | None = None
    """GRPO: the validation of the weights that the step began with, where one was due."""
    results: Sequence[MinibatchResult] = ()
    """Results of every minibatch."""

    @property
    def skipped(self) -> str | None:
        """Reason why nothing was learned of the step's minibatches.

        None where something was, or there were none."""
        if not self.results or any(result.discarded is None for result in self.results):
            return None
        return self.results[-1].discarded


class Reporter:
    """Rank 0's record of a run."""

    def __init__(
        self,
        config: Config,
        inputs: Inputs | SftInputs,
        kind: Kind,
        length_stages: Sequence[LengthStage],
        layout: str,
        steps_done: int = 0,
    ) -> None:
        """A resumed run has `steps_done`, whose metrics are in its folder."""
        self._config = config
        self._total_steps = inputs.total_steps
        self._layout = layout
        self._token_metric, self._token_sum = COUNTED[kind]
        self._steps_before = steps_done
        self._started = time.perf_counter()
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._seconds_before = self._tokens = 0.0
        self._last: dict[str, float] = {}
        self._held_out: dict[str, float] | None = {} if kind == "sft" else None
        self._unwritten = Unwritten()
        self._step_ends: deque[float] = deque(maxlen=RECENT_STEPS + 1)
        self._metrics = open_metrics(config, steps_done + 1, self._unwritten)
        names = [reward.name for reward in named_rewards(config.reward)]
        self._samples = SampleWriter(
            config.run.output_dir, config.telemetry.sample_groups_per_step, names
        )
        self._first_steps = {stage.first_step for stage in length_stages}
        self._next_failures_warning = 0
        self._alerts = None
        if kind == "grpo":
            dropped = None if steps_done else dropped_alert(inputs.dropped_share, config.telemetry)
            if dropped is not None:
                logger.warning("%s", dropped, extra=event("alert", 0, text=dropped))
            key = "stages.max_new_tokens" if has_length_stages(config) else "rollout.max_new_tokens"
            self._alerts = Alerts(
                config.telemetry,
                clips_whole_completions=OBJECTIVES[config.algorithm.loss].clips_whole_completions,
                length_key=key,
                group_relative=config.algorithm.advantage in GROUP_ADVANTAGES
                and (config.teacher.path is None or config.teacher.with_rewards),
            )
        has_rows = steps_done and (Path(config.run.output_dir) / METRICS_FILE).is_file()
        for row in read_metrics(config.run.output_dir) if has_rows else []:
            self._seconds_before += row.get("seconds/step", 0.0) + row.get("seconds/save", 0.0)
            metrics = {name: value for name, value in row.items() if name != "step"}
            self._look_for_alerts(int(row["step"]) - 1, metrics)
            self._count(metrics)

    def before_training(self, metrics: Mapping[str, float]) -> None:
        """Report the evaluation of the model as it came: step 0."""
        if metrics:
            self._metrics.write(0, metrics)
            text = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            logger.info("Before training: %s", text)

    def step(self, number: int, record: StepRecord, run_metrics: Mapping[str, float]) -> None:
        """Report step `number`, counted from 0.

        `run_metrics` is what the life cycle measured (`seconds/save` is of the step before)."""
        if record.validation is not None:
            self.validation(record.validation)
        metrics = record.metrics | run_metrics
        self._count(metrics)
        self._metrics.write(number + 1, metrics)
        if record.groups:
            self._write_samples(number + 1, record, metrics["reward/failures"])
        if record.skipped is not None:
            text = "Step %d: the update was skipped: %s. Weights and optimizer stayed as they were"
            logger.warning(text, number + 1, record.skipped)
        for text in self._look_for_alerts(number, metrics):
            extra = event("alert", number + 1, text=text)
            logger.warning("step %d: %s", number + 1, text, extra=extra)
        self._step_ends.append(time.perf_counter())
        seconds_left = remaining_seconds(self._step_ends, self._total_steps - number - 1)
        line = step_line(
            number + 1,
            self._total_steps,
            metrics["seconds/step"],
            remaining=seconds_left,
            metrics=metrics,
        )
        logger.info("%s", line, extra=event("step", number + 1))

    def _write_samples(self, step: int, record: StepRecord, failures: float) -> None:
        """`failures`: share of the answers that could not be judged (0 to 1).

        Too many are warned of every FAILURES_STEPS; the log file has every such step."""
        self._unwritten.attempt(
            "samples", lambda: self._samples.write(step, record.groups, record.advantages)
        )
        limit = self._config.reward.max_failure_share
        worst = self._config.reward.function_failure
        if failures <= limit:
            return
        written = self._unwritten.attempt(
            "samples of failures",
            lambda: self._samples.write_failure(step, record.groups, record.advantages),
        )
        path = samples_file(self._config.run.output_dir, step, "failure")
        place = (
            f"One of them is in {path}, in full"
            if written
            else "None of them could be written to disk"
        )
        outcome = (
            f"they count as wrong, or get reward.function_failure={worst:g}, or do without "
            "that reward"
        )
        if functions_of(self._config.reward) and (
            first_failure := first_function_failure(record.groups)
        ):
            place += f". The first failure:\n{first_failure}"
        level = logging.DEBUG
        if step >= self._next_failures_warning:
            level = logging.WARNING
            self._next_failures_warning = step + FAILURES_STEPS
        text = (
            "Step %d: %.1f%% of the answers could not be judged (reward.max_failure_share is "
            "%.1f%%); %s. %s"
        )
        logger.log(level, text, step, 100 * failures, 100 * limit, outcome, place)

    def validation(self, measured: ValidationResult) -> None:
        """Write a validation.

        Call it before the step that began with the weights that were measured."""
        self._metrics.write_validation(measured.step, measured.metrics)

    def write_summary(self, seconds_total: float, trainer_summary: Mapping[str, Any]) -> None:
        """Write the summary of the whole run.

        `seconds_total` are the seconds since this process started; `trainer_summary` is what the
        trainer adds."""
        self._metrics.flush()
        training = self._seconds_before + time.perf_counter() - self._started
        medians = {
            phase: round(statistics.median(values), 6) for phase, values in self._seconds.items()
        }
        summary = {
            "steps": self._total_steps,
            "layout": self._layout,
            "went_on_after_step": self._steps_before,
            "seconds_total": round(self._seconds_before + seconds_total, 3),
            "seconds_training": round(training, 3),
            self._token_sum: int(self._tokens),
            "tokens_per_second": round(self._tokens / training, 1),
            "median_seconds": medians,
            **({} if self._held_out is None else {"held_out": self._held_out}),
            "not_written": self._metrics.lost(),
            **trainer_summary,
            "last_step": self._last,
        }
        path = Path(self._config.run.output_dir) / SUMMARY_FILE
        text = json.dumps(summary, indent=2) + "\n"
        if self._unwritten.attempt(SUMMARY_FILE, lambda: write_whole(path, text)):
            logger.info("The summary is in %s", path, extra=event("end", self._total_steps))

    def close(self) -> None:
        """Close the files, and log what the disk refused.

        The run ends here or stops before its end."""
        self._metrics.close()
        if lost := self._metrics.lost():
            text = ", ".join(f"{name}: {count}" for name, count in lost.items())
            logger.warning("Not written, as the disk refused it (files, rows or values): %s", text)

    def _count(self, metrics: Mapping[str, float]) -> None:
        """Add a step's metrics to what the summary will have."""
        self._last = dict(metrics)
        for phase, value in phase_seconds(metrics).items():
            self._seconds[phase].append(value)
        self._tokens += metrics.get(
            self._token_metric, 0.0
        )  # row 0 of supervised training has none
        if self._held_out is not None:
            self._held_out |= {
                name: value for name, value in metrics.items() if name.startswith("held_out/")
            }

    def _look_for_alerts(self, number: int, metrics: Mapping[str, float]) -> list[str]:
        if self._alerts is None:
            return []
        if number in self._first_steps:
            self._alerts.reset()
        return self._alerts.check(metrics)


def phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """The seconds of a step's phases.

    Those of the memory switch, where it has been used, are added up as "switch".

    >>> phase_seconds({"seconds/sync": 2.0, "seconds/wake": 0.5, "seconds/sleep": 0.25, "loss": 1.0})
    {'sync': 2.0, 'switch': 0.75}
    """
    seconds = {
        name.removeprefix("seconds/"): value
        for name, value in metrics.items()
        if name.startswith("seconds/")
    }
    switch = [seconds.pop(phase) for phase in SWITCH_PHASES if phase in seconds]
    return seconds | ({"switch": sum(switch)} if switch else {})
