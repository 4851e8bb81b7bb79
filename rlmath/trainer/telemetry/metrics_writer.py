"""The numbers of a run: `metrics.jsonl`, TensorBoard events and, if asked for, Weights & Biases."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from rlmath.config.schema import Config
from rlmath.trainer.telemetry.wandb import WandbLog

METRICS_FILE = "metrics.jsonl"
VALIDATION_FILE = "validation.jsonl"
"""Of the validations, in rows like those of the steps; the row of step 0 is that of the model before training."""


class MetricsWriter:
    """Appends one line a step to `metrics.jsonl`, and the same numbers as TensorBoard scalars and to `wandb`.

    A line is on disk when `write` returns. One that a killed run left unfinished is cut off on opening.
    """

    def __init__(
        self, output_dir: str, tensorboard: bool, first_step: int = 1, wandb: WandbLog | None = None
    ) -> None:
        """A resumed run gives its `first_step`: TensorBoard then hides what an earlier start wrote from there."""
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        path = folder / METRICS_FILE
        if path.exists():
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self._file = path.open("a", encoding="utf-8")
        self._wandb = wandb
        self._events = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # here, because it takes seconds

            purge = first_step if first_step > 1 else None
            self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's numbers. JSON has no NaN or infinity: they become "NaN", "Infinity", "-Infinity"."""
        assert "step" not in metrics
        self._write(self._file, step, metrics)

    def write_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The numbers of a validation of the weights that `step` left: a row of `validation.jsonl`, and the same
        scalars. Before that of a later step is written."""
        with (self._folder / VALIDATION_FILE).open("a", encoding="utf-8") as file:
            self._write(file, step, metrics)

    def _write(self, file: TextIO, step: int, metrics: Mapping[str, float]) -> None:
        values = {name: float(metrics[name]) for name in sorted(metrics)}
        row = {"step": step, **{name: json_number(value) for name, value in values.items()}}
        file.write(json.dumps(row, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(tensorboard_tag(name), value, step)
            self._events.flush()
        if self._wandb is not None:
            self._wandb.write(step, values)

    def write_text(self, tag: str, text: str, step: int) -> None:
        """Markdown for TensorBoard's text page; nothing without TensorBoard."""
        if self._events is not None:
            self._events.add_text(tag, text, step)

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()
        if self._wandb is not None:
            self._wandb.close()


def open_metrics(config: Config, first_step: int = 1) -> MetricsWriter:
    """Everything that the run's settings ask for."""
    telemetry, folder = config.telemetry, config.run.output_dir
    wandb = None
    if telemetry.wandb != "off":
        wandb = WandbLog(folder, telemetry, dataclasses.asdict(config))
    return MetricsWriter(folder, telemetry.tensorboard, first_step, wandb)


def tensorboard_tag(name: str) -> str:
    """TensorBoard's group of the metrics without one is "main"; each would be a group of its own.

    >>> tensorboard_tag("task_reward"), tensorboard_tag("train/entropy_loss")
    ('main/task_reward', 'train/entropy_loss')
    """
    return name if "/" in name else f"main/{name}"


def read_metrics(output_dir: str, name: str = METRICS_FILE) -> list[dict[str, float]]:
    """The rows of a run's `metrics.jsonl`, or another file of such rows, by rising step, with NaN and infinities as
    floats again.

    Of a step written twice (a resumed run) the later row counts. An unfinished last line is skipped. Raises
    ValueError naming the line that cannot be read.
    """
    path = Path(output_dir) / name
    if not path.is_file():
        raise ValueError(f"{path}: no such file; {output_dir!r} must be the folder of a run (run.output_dir)")
    rows: dict[int, dict[str, float]] = {}
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = {key: float(value) for key, value in json.loads(line).items()}
            rows[int(row["step"])] = row
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: not a line of metrics ({error})") from error
    return [rows[step] for step in sorted(rows)]


def keep_metrics(output_dir: str | Path, last_step: int, name: str = METRICS_FILE) -> int:
    """Drop the rows of steps after `last_step`, for a run that resumes from there. Returns how many rows are left."""
    path = Path(output_dir) / name
    if not path.exists():
        return 0
    rows = [row for row in read_metrics(str(output_dir), name) if row["step"] <= last_step]
    lines = (
        json.dumps({key: int(v) if key == "step" else json_number(v) for key, v in row.items()})
        for row in rows
    )
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    return len(rows)


def json_number(value: float) -> float | str:
    """The value, or "NaN", "Infinity", "-Infinity", which `float` reads back."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
