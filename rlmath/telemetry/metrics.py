"""The numbers of a run: `metrics.jsonl` and TensorBoard events."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


class MetricsWriter:
    """Appends one line a step to `metrics.jsonl`, and the same numbers as TensorBoard scalars.

    A line is on disk when `write` returns. One that a killed run left unfinished is cut off on opening.
    """

    def __init__(self, output_dir: str, tensorboard: bool, first_step: int = 1) -> None:
        """A run that goes on says its `first_step`: TensorBoard then hides what an earlier start wrote from there."""
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        _cut_unfinished_line(folder / METRICS_FILE)
        self._file = (folder / METRICS_FILE).open("a", encoding="utf-8")
        self._events = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # here, because it takes seconds

            purge = first_step if first_step > 1 else None
            self._events = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=purge)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's numbers. JSON has no NaN or infinity: they become "NaN", "Infinity", "-Infinity"."""
        assert "step" not in metrics
        values = {name: float(metrics[name]) for name in sorted(metrics)}
        row = {"step": step, **{name: json_number(value) for name, value in values.items()}}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(name, value, step)
            self._events.flush()

    def write_text(self, tag: str, text: str, step: int) -> None:
        """Markdown for TensorBoard's text page; nothing without TensorBoard."""
        if self._events is not None:
            self._events.add_text(tag, text, step)

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()


def read_metrics(output_dir: str) -> list[dict[str, float]]:
    """The rows of a run's `metrics.jsonl` by rising step, with NaN and infinities as floats again.

    Of a step written twice (a resumed run) the later row counts. An unfinished last line is skipped. Raises
    ValueError naming the line that cannot be read.
    """
    path = Path(output_dir) / METRICS_FILE
    if not path.is_file():
        raise ValueError(f"{path}: no such file; {output_dir!r} must be the folder of a run (run.output_dir)")
    rows: dict[int, dict[str, float]] = {}
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = {name: float(value) for name, value in json.loads(line).items()}
            rows[int(row["step"])] = row
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: not a line of metrics ({error})") from error
    return [rows[step] for step in sorted(rows)]


def keep_metrics(output_dir: str | Path, last_step: int) -> int:
    """Drop the rows of steps after `last_step`, for a run that goes on from there. Returns how many rows are left."""
    path = Path(output_dir) / METRICS_FILE
    if not path.exists():
        return 0
    rows = [row for row in read_metrics(str(output_dir)) if row["step"] <= last_step]
    lines = (
        json.dumps({name: int(v) if name == "step" else json_number(v) for name, v in row.items()})
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


def _cut_unfinished_line(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        with path.open("r+b") as file:
            file.truncate(end)
