"""The figures of a run over all its starts, as rank 0 keeps them: rows of metrics, seconds of phases, tokens."""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlmath.config import Config
from rlmath.data.loader import PromptOrder
from rlmath.run_folder import SUMMARY_NAME
from rlmath.telemetry.console import Progress
from rlmath.telemetry.metrics import open_metrics, read_metrics

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
