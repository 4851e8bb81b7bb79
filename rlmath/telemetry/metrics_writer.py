"""The numbers of a run: `metrics.jsonl`, TensorBoard events and, if asked for, Weights & Biases.

A disk that refuses them costs no step. Rows of metrics wait in memory and are written in order once
there is room.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlmath.config.files import open_regular
from rlmath.config.load import shown_sections
from rlmath.config.run_files import METRICS_FILE, TENSORBOARD_FOLDER, VALIDATION_FILE, write_whole
from rlmath.config.schema import Config
from rlmath.telemetry.wandb import WandbLog

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

Row = dict[str, float]

TIMED = """
seconds/ tokens_per_second/ train/mfu rollout/mfu memory rollout/idle_share rollout/tail_share rollout/batch_fill
rollout/trainer_busy_share rollout/engine_busy_share rollout/sequences_running rollout/scores_waiting sync/latency_s
sync/transfer_s reward/queue_wait validation/seconds tools/wait turns/wait
""".split()
"""Beginnings of the names of metrics that are times and memory, or follow from them.

No two runs have the same."""


def without_times(row: Mapping[str, float], *more: str) -> dict[str, float]:
    """A row without the metrics that differ between any two runs.

    Also without those whose names begin with one of `more`.

    >>> without_times({"step": 1, "seconds/step": 2.5, "sync/sent_gib": 0.5}, "sync/")
    {'step': 1}
    """
    return {name: value for name, value in row.items() if not name.startswith((*TIMED, *more))}


class Unwritten:
    """Telemetry of a run that a (full) disk refuses.

    It is logged when that begins and when it ends, and counted."""

    def __init__(self) -> None:
        self.lost: Counter[str] = Counter()
        """How often each kind was not written for good."""
        self._failing: set[str] = set()

    def attempt(self, kind: str, write: Callable[[], object], lost: int = 1) -> bool:
        """Call `write`, and return whether it raised no OSError.

        An error counts as `lost` of this kind; 0 where it will be written later."""
        try:
            write()
        except OSError as error:
            self.lost[kind] += lost
            if kind not in self._failing:
                self.log_refused(
                    "%s cannot be written: %s. The run continues, and tries again", kind, error
                )
            self._failing.add(kind)
            return False
        if kind in self._failing:
            self._failing.remove(kind)
            loss_text = f"; {self.lost[kind]} were lost" if self.lost[kind] else ""
            logger.info("%s can be written again%s", kind, loss_text)
        return True

    def log_refused(self, text: str, *values: object) -> None:
        """Log a refusal, as a warning where nothing else is refused now."""
        logger.log(logging.DEBUG if self._failing else logging.WARNING, text, *values)


class _RowFile:
    """A file of rows, one a line, each on disk when `append` returns.

    What the disk refuses waits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: list[bytes] = []
        self._is_new = True

    def append(self, line: str) -> None:
        """OSError where it cannot be written now; then it waits."""
        self.waiting.append(line.encode())
        self.flush()

    def flush(self) -> None:
        """Write what waits, all or nothing.

        A line that a killed run left unfinished is cut off first."""
        with self.path.open("a+b", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if self._is_new and size:
                file.seek(0)
                size = file.read().rfind(b"\n") + 1
                os.ftruncate(file.fileno(), size)
            self._is_new = False
            content = memoryview(b"".join(self.waiting))
            try:
                while content:
                    content = content[file.write(content) :]
                os.fsync(file.fileno())
            except OSError:
                self._is_new = True  # its end is looked at again, should this fail, too
                os.ftruncate(file.fileno(), size)
                raise
        self.waiting.clear()


class MetricsWriter:
    """Appends one line a step to `metrics.jsonl`.

    The same numbers go to TensorBoard as scalars and to `wandb`. A line is on disk when `write`
    returns, or is written with a later one if the disk refuses it."""

    def __init__(
        self,
        output_dir: str,
        tensorboard: bool,
        first_step: int = 1,
        wandb: WandbLog | None = None,
        unwritten: Unwritten | None = None,
    ) -> None:
        """Open the files.

        A resumed run gives its `first_step`: TensorBoard then hides what an earlier start wrote
        from there."""
        folder = Path(output_dir)
        self.unwritten = unwritten or Unwritten()
        self._rows = {name: _RowFile(folder / name) for name in (METRICS_FILE, VALIDATION_FILE)}
        self._wandb = wandb
        self._events = _Events(folder / TENSORBOARD_FOLDER, first_step) if tensorboard else None

        def create() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            self._rows[METRICS_FILE].flush()

        self.unwritten.attempt(METRICS_FILE, create, lost=0)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step's numbers.

        JSON has no NaN or infinity: they become "NaN", "Infinity", "-Infinity"."""
        assert "step" not in metrics
        self._write(METRICS_FILE, step, metrics)

    def write_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the numbers of a validation of the weights that `step` left.

        Call it before a later step is written."""
        self._write(VALIDATION_FILE, step, metrics)

    def _write(self, name: str, step: int, metrics: Mapping[str, float]) -> None:
        """Write a row to a file, TensorBoard and W&B."""
        values = {name: float(metrics[name]) for name in sorted(metrics)}
        row = {"step": step, **{name: json_number(value) for name, value in values.items()}}
        line = json.dumps(row, allow_nan=False) + "\n"
        self.unwritten.attempt(name, lambda: self._rows[name].append(line), lost=0)
        if self._events is not None:
            self._write_events(step, values)
        if self._wandb is not None:
            self._wandb.write(step, values)

    def _write_events(self, step: int, values: Mapping[str, float]) -> None:
        """TensorBoard's writer cannot be used after an error: there are no more events then."""
        assert self._events is not None
        try:
            if not self._events.is_broken:
                self._events.add(step, values)
        except OSError as error:
            self._events.close()
            self._events.is_broken = True
            self.unwritten.log_refused("TensorBoard is off from here: %s. The run continues", error)
        self.unwritten.lost["TensorBoard"] += self._events.is_broken

    def flush(self) -> None:
        """Try once more to write the rows that wait."""
        for name, rows in self._rows.items():
            if rows.waiting:
                self.unwritten.attempt(name, rows.flush, lost=0)

    def lost(self) -> dict[str, int]:
        """How much is not written, by kind: rows of a file, samples, values of TensorBoard."""
        counts = dict(self.unwritten.lost)
        counts |= {name: len(rows.waiting) for name, rows in self._rows.items()}
        return {name: count for name, count in counts.items() if count}

    def close(self) -> None:
        self.flush()
        if self._events is not None:
            self._events.close()
        if self._wandb is not None:
            self._wandb.close()


class _Events:
    def __init__(self, folder: Path, first_step: int) -> None:
        self._folder = folder
        self._purge_step = first_step if first_step > 1 else None
        self._writer: SummaryWriter | None = None
        self.is_broken = False
        threading.excepthook = partial(_hook_of_threads, threading.excepthook)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """OSError where the disk refuses them."""
        from torch.utils.tensorboard import SummaryWriter  # here, because it takes seconds

        if self._writer is None:
            self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
        for name, value in values.items():
            self._writer.add_scalar(tensorboard_tag(name), value, step)
        self._writer.flush()

    def close(self) -> None:
        for file in (self._writer.all_writers or {}).values() if self._writer is not None else ():
            with suppress(OSError):  # it is closed, with or without its last events
                file.close()


def _hook_of_threads(
    before: Callable[[threading.ExceptHookArgs], object], args: threading.ExceptHookArgs
) -> None:
    """Hook that hides tracebacks of TensorBoard's thread for what the disk refuses.

    It is raised again at the next write."""
    if not (
        isinstance(args.exc_value, OSError)
        and type(args.thread).__module__.startswith("tensorboard.")
    ):
        before(args)


def open_metrics(
    config: Config, first_step: int = 1, unwritten: Unwritten | None = None
) -> MetricsWriter:
    """The writer of everything that the run's settings ask for."""
    telemetry = config.telemetry
    folder = config.run.output_dir
    wandb = None
    if telemetry.wandb != "off":
        wandb = WandbLog(folder, telemetry, shown_sections(config))
    return MetricsWriter(
        folder, telemetry.tensorboard, first_step, wandb=wandb, unwritten=unwritten
    )


def tensorboard_tag(name: str) -> str:
    """TensorBoard's group of the metrics without one is "main"; each would be a group of its own.

    >>> tensorboard_tag("task_reward"), tensorboard_tag("train/entropy_loss")
    ('main/task_reward', 'train/entropy_loss')
    """
    return name if "/" in name else f"main/{name}"


def read_metrics(output_dir: str, name: str = METRICS_FILE) -> list[dict[str, float]]:
    """The rows of a run's `metrics.jsonl`, or another file of such rows, by rising step.

    NaN and infinities are floats again. ValueError names the line that cannot be read."""
    path = Path(output_dir) / name
    if not path.is_file():
        raise ValueError(
            f"{path}: no such file; {output_dir!r} must be the folder of a run (run.output_dir)"
        )
    rows, damaged = rows_by_step(path)
    for number, error in damaged[:1]:
        remedy = "A resumed run drops such lines; or remove it"
        raise ValueError(f"{path}, line {number}: not a line of metrics ({error}). {remedy}")
    return list(rows.values())


def rows_by_step(
    path: Path, most_bytes: int | None = None
) -> tuple[dict[int, Row], list[tuple[int, Exception]]]:
    """Rows by rising step, and (number from 1, error) of lines that are none.

    Of a step written twice it is the later row; an unfinished last line is skipped. Of a file of
    more than `most_bytes` only every second, third, ... line is read, the last among them. OSError
    where the file cannot be read, ValueError where it is no regular file."""
    rows: dict[int, Row] = {}
    damaged: list[tuple[int, Exception]] = []
    with open_regular(path) as file:
        lines = 0
        every = 1
        if most_bytes is not None and (size := os.fstat(file.fileno()).st_size) > most_bytes:
            every = -(-size // most_bytes)
            lines = sum(part.count(b"\n") for part in iter(lambda: file.read(2**20), b""))
            file.seek(0)
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n") or (lines - number) % every:
                continue
            try:
                row = {key: float(value) for key, value in json.loads(line).items()}
                rows[int(row["step"])] = row
            except (
                ValueError,
                TypeError,
                KeyError,
                AttributeError,
                OverflowError,
                RecursionError,
            ) as error:
                damaged.append((number, error))
    return dict(sorted(rows.items())), damaged


def last_step(path: Path) -> int:
    """The last step that a file of metrics has a row of; 0 where it has none, or is not there."""
    try:
        return max(rows_by_step(path)[0], default=0)
    except (OSError, ValueError):
        return 0


def keep_metrics(output_dir: str | Path, last_step: int, name: str = METRICS_FILE) -> int:
    """Drop the rows of steps after `last_step`, and lines that cannot be read.

    Returns how many rows are left."""
    path = Path(output_dir) / name
    if not path.exists():
        return 0
    rows, damaged = rows_by_step(path)
    if damaged:
        logger.warning("%s: %d lines cannot be read and are dropped", path, len(damaged))
    later = [step for step in rows if step > last_step]
    if later:
        text = "%s: the rows of %d steps after step %d are dropped; the run makes these steps again"
        logger.info(text, path, len(later), last_step)
    rows_left = [row for step, row in rows.items() if step <= last_step]
    lines = (
        json.dumps(
            {
                key: int(number) if key == "step" else json_number(number)
                for key, number in row.items()
            }
        )
        for row in rows_left
    )
    write_whole(path, "".join(line + "\n" for line in lines))
    return len(rows_left)


def json_number(value: float) -> float | str:
    """The value, or "NaN", "Infinity", "-Infinity", which `float` reads back."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
