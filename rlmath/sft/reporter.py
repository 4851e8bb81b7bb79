"""What rank 0 tells about a supervised run: console, metrics, summary."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from rlmath.account import RunAccount
from rlmath.saver import Training
from rlmath.sft.inputs import SftInputs
from rlmath.sft.trainer import SftStep
from rlmath.telemetry.console import step_line

logger = logging.getLogger(__name__)


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
