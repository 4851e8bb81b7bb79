"""What rank 0 tells about a run: console, metrics, samples, summary."""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from rlmath.inputs import Inputs
from rlmath.run_folder import SUMMARY_NAME
from rlmath.telemetry.console import Progress, step_line
from rlmath.telemetry.metrics import MetricsWriter, read_metrics
from rlmath.telemetry.samples import SampleWriter
from rlmath.trainer import Parts, StepRecord

logger = logging.getLogger(__name__)

SWITCH_PHASES = ("offload", "wake", "wake_kv_cache", "sleep", "restore")
"""Phases of the memory switch (`rollout.memory`); the sync is told apart."""


class Reporter:
    """Rank 0's account of the run."""

    def __init__(self, parts: Parts, inputs: Inputs, folder: Path, steps_done: int = 0) -> None:
        """A run that goes on has `steps_done`, of which the folder has the metrics."""
        self._parts = parts
        self._inputs = inputs
        self._folder = folder
        self._steps_before = steps_done
        self._metrics = MetricsWriter(str(folder), parts.config.telemetry.tensorboard, steps_done + 1)
        self._samples = SampleWriter(str(folder), parts.config.telemetry.sample_groups_per_step)
        self._started = time.perf_counter()
        self._last: dict[str, float] = {}
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._tokens = 0.0
        self._seconds_before = 0.0
        for row in read_metrics(str(folder)) if steps_done else []:
            self._count({name: value for name, value in row.items() if name != "step"})
            self._seconds_before += row["seconds/step"] + row["seconds/save"]

    def _count(self, metrics: dict[str, float]) -> None:
        self._last = metrics
        for phase, seconds in phase_seconds(metrics).items():
            self._seconds[phase].append(seconds)
        self._tokens += metrics["n_valid_tokens"]

    def step(self, number: int, record: StepRecord, memory_gib: float, save_seconds: float) -> None:
        """Step `number`, counted from 0; `save_seconds` is how long saving after the step before it took."""
        metrics = record.metrics | {"memory_gib": memory_gib, "seconds/save": save_seconds}
        self._count(metrics)
        self._metrics.write(number + 1, metrics)
        self._samples.write(number + 1, record.groups, record.advantages, self._metrics)
        self._warn_of_failures(number + 1, record, metrics["reward/failures"])
        logger.info("%s", step_line(self._progress(number, record.epoch, metrics["seconds/step"]), metrics))

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

    def _progress(self, number: int, epoch: int, step_seconds: float) -> Progress:
        steps_per_epoch = self._inputs.order.steps_per_epoch
        return Progress(
            epoch=epoch + 1,
            total_epochs=-(-self._inputs.total_steps // steps_per_epoch),
            step=number % steps_per_epoch + 1,
            steps_per_epoch=steps_per_epoch,
            global_step=number + 1,
            total_steps=self._inputs.total_steps,
            step_seconds=step_seconds,
            total_seconds=time.perf_counter() - self._started,
            steps_timed=number + 1 - self._steps_before,
        )

    def close(self, seconds_total: float) -> None:
        """Write the summary of the whole run; `seconds_total` are those since this process started."""
        seconds_training = self._seconds_before + time.perf_counter() - self._started
        summary = {
            "steps": self._inputs.total_steps,
            "layout": self._parts.mesh.describe(),
            "went_on_after_step": self._steps_before,
            "seconds_total": round(self._seconds_before + seconds_total, 3),
            "seconds_training": round(seconds_training, 3),
            "completion_tokens": int(self._tokens),
            "tokens_per_second": round(self._tokens / seconds_training, 1),
            "median_seconds": {
                phase: round(statistics.median(values), 6) for phase, values in self._seconds.items()
            },
            "last_step": self._last,
        }
        path = self._folder / SUMMARY_NAME
        path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        self._metrics.close()
        logger.info("The summary is in %s", path)


def phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """The seconds of a step's phases, with those of the memory switch added up as "switch".

    >>> phase_seconds({"seconds/sync": 2.0, "seconds/wake": 0.5, "seconds/sleep": 0.25, "loss": 1.0})
    {'sync': 2.0, 'switch': 0.75}
    """
    found = {name.removeprefix("seconds/"): v for name, v in metrics.items() if name.startswith("seconds/")}
    switch = [found.pop(phase) for phase in SWITCH_PHASES if phase in found]
    return found | {"switch": sum(switch)}
