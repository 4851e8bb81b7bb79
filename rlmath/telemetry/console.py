"""The console of a run, and its log file.

The console has lines for a terminal of 80 columns, of rank 0 alone except for warnings. `run.log`
in the run's folder has all of them with date and level; records of level DEBUG are for the file
alone."""

from __future__ import annotations

import logging
import os
import sys
import textwrap
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from rlmath.config.run_files import LOG_FILE
from rlmath.config.shipped_files import PACKAGE
from rlmath.config.terminal import escape_terminal, visible
from rlmath.telemetry.events import EventFile

logger = logging.getLogger(__name__)

COLUMNS = 80
"""Columns of the lines for steps; what is longer is wrapped on a terminal, to its width."""
LEAST_COLUMNS = 40
"""Columns to which lines are wrapped on a terminal that has fewer."""
RECENT_STEPS = 100
"""Steps whose mean gives the time that is left."""
EARLY_LINES = 1000
"""Lines that are kept for the log file until there is one."""

STEP_LINE_METRICS = {
    "task_reward": ("reward", ".3f"),
    "rollout/accuracy": ("acc", ".3f"),
    "rollout/reward_positive": ("pos", ".3f"),
    "train/loss": ("loss", ".4f"),
    "held_out/loss": ("held-out", ".4f"),
    "rollout/response_length": ("len", ".0f"),
    "no_eos_ratio": ("cut", ".2f"),
    "rollout/staleness": ("stale", ".2f"),
    "rollout/trainer_busy_share": ("trainers busy", ".2f"),
    "rollout/engine_busy_share": ("engines busy", ".2f"),
    "rollout/groups_in_flight": ("in flight", ".0f"),
    "rollout/deferred_groups": ("deferred", ".0f"),
}
"""Metrics of a step's line; their names there, and formats.

The line has those that the step has and that it has room for."""

LIBRARIES = ("vllm", "transformers", "megatron", "torch", "filelock", "urllib3", "asyncio", "py")
"""First parts of the names of loggers that are not ours; "py.warnings" has Python's warnings."""
LIBRARY_LEVEL = "VLLM_LOGGING_LEVEL"
"""Environment variable with the level from which libraries are shown on the console, too."""
FOR_THE_USER = ("vllm.model_executor.model_loader.reload.inplace",)
"""Loggers of libraries whose warnings are for the console.

They are about weights that a sync did not load."""


# ---------------------------------------------------------------- console and log file


def setup_logging(rank: int) -> None:
    """Set up the lines on stderr: everything of rank 0, warnings of the others.

    Of libraries only errors are shown; their warnings are for the log file. No text reaches the
    terminal with control characters (`escape_terminal`), and a line takes a progress bar off the
    terminal first. Call it before vLLM is imported, and `route_library_logs` after other libraries
    are. To see the libraries' lines, set VLLM_LOGGING_LEVEL, TORCH_LOGS, TORCH_CPP_LOG_LEVEL or
    PYTHONWARNINGS."""
    escape_terminal()
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    console = ConsoleHandler()
    console.setFormatter(ConsoleFormatter(rank))
    console.setLevel(logging.INFO)
    handlers: list[logging.Handler] = [console]
    if rank == 0:
        handlers.append(_EarlyLines())
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING, handlers=handlers, force=True
    )
    if rank == 0:
        logging.getLogger("rlmath").setLevel(logging.DEBUG)
    if LIBRARY_LEVEL not in os.environ:
        console.addFilter(_is_for_the_user)
    if "PYTHONWARNINGS" not in os.environ:
        warnings.showwarning = _log_warning
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # until its logs are routed
    route_library_logs()


def route_library_logs() -> None:
    """Send what libraries log from WARNING on to the handlers of `setup_logging` alone.

    Some, as torch and transformers, install handlers of their own and set levels when they are
    imported: call it again after that."""
    level = os.environ.get(LIBRARY_LEVEL, "WARNING")
    for name, library_logger in list(logging.root.manager.loggerDict.items()):
        has_torch_logs = name.startswith("torch") and "TORCH_LOGS" in os.environ
        if isinstance(library_logger, logging.Logger) and _is_library(name) and not has_torch_logs:
            library_logger.handlers.clear()
            library_logger.propagate = True
    for library in LIBRARIES:
        if library != "torch" or "TORCH_LOGS" not in os.environ:
            logging.getLogger(library).setLevel(level)


def _is_library(name: str) -> bool:
    return name.partition(".")[0] in LIBRARIES


def _is_for_the_user(record: logging.LogRecord) -> bool:
    return (
        record.levelno >= logging.ERROR
        or not _is_library(record.name)
        or record.name in FOR_THE_USER
    )


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A Python warning as a line; only that of a file of the user's is for the console."""
    of_library = filename.startswith(str(PACKAGE)) or "-packages" in filename
    log = logging.getLogger("py.warnings") if of_library else logger
    log.warning("%s:%d: %s: %s", filename, lineno, category.__name__, message)


def open_log_file(output_dir: str | Path) -> None:
    """Append this process's lines, those before included, to `run.log` in the folder.

    Events are also appended to `events.jsonl`. OSError where it cannot be opened; what the disk
    refuses later is lost, with one warning."""
    root = logging.getLogger()
    file = _LogFile(Path(output_dir) / LOG_FILE, encoding="utf-8", errors="backslashreplace")
    file.setFormatter(
        _LogFileFormatter("%(asctime)s.%(msecs)03d %(levelname)s: %(message)s", "%Y%m%d-%H:%M:%S")
    )
    events = EventFile(output_dir)
    events.addFilter(_is_for_the_user)
    for handler in list(root.handlers):
        if isinstance(handler, (_EarlyLines, _LogFile, EventFile)):
            root.removeHandler(handler)
            handler.close()
        if isinstance(handler, _EarlyLines):
            for record in handler.records:
                file.handle(record)
                events.handle(record)
    root.addHandler(file)
    root.addHandler(events)


class ConsoleFormatter(logging.Formatter):
    """ "18:43:01 WARNING: text", of ranks but the first with their number.

    On a terminal, lines that are too long are wrapped between words, but for tracebacks; else a
    message stays on its line, for programs that search it. Lines of other ranks replace the bar of
    the first on a terminal; it draws the bar again."""

    def __init__(self, rank: int) -> None:
        name = "" if rank == 0 else f" rank {rank}"
        super().__init__(f"%(asctime)s{name} %(levelname)s: %(message)s", "%H:%M:%S")
        self._over_bar = rank != 0

    def format(self, record: logging.LogRecord) -> str:
        """A record's text, wrapped and drawn over a bar where that is on a terminal."""
        text = super().format(record)
        if record.levelno == logging.INFO:
            text = text.replace(" INFO: ", " ", 1)
        width = terminal_width()
        if width is None:
            return text
        text = text if record.exc_info else wrapped(text, width)
        return over_bar(text, width) if self._over_bar else text


class _LogFileFormatter(logging.Formatter):
    """A library's line names its logger."""

    def format(self, record: logging.LogRecord) -> str:
        text = visible(super().format(record))
        return text.replace(": ", f": {record.name}: ", 1) if _is_library(record.name) else text


class ConsoleHandler(logging.StreamHandler):  # type: ignore[type-arg]
    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)

    def close(self) -> None:
        """Remove the bars, which would stay on the terminal.

        `logging.shutdown` calls it, also before `os._exit`."""
        close_bars()
        super().close()


def close_bars() -> None:
    """Take all progress bars off the terminal, before the last line of a process.

    Otherwise they are drawn below a line."""
    for bar in list(tqdm._instances):  # type: ignore[attr-defined]
        bar.close()


class _EarlyLines(logging.Handler):
    """The last records, until there is a file for them."""

    def __init__(self) -> None:
        super().__init__()
        self.records: deque[logging.LogRecord] = deque(maxlen=EARLY_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class _LogFile(logging.FileHandler):
    _refused = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Warn once where the disk refuses a line."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._refused:
            self._refused = True
            logger.warning(
                "%s cannot be written: %s. The run continues without it", self.baseFilename, error
            )


def terminal_width(stream: TextIO | None = None) -> int | None:
    """Columns of the terminal that a stream is, by default stderr; None where it is none.

    They are COLUMNS where the terminal does not know its size (0, as in a container)."""
    stream = sys.stderr if stream is None else stream
    try:
        if not stream.isatty():
            return None
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return None
    return max(columns or COLUMNS, LEAST_COLUMNS)


def over_bar(text: str, width: int) -> str:
    """The text over a progress bar of another process.

    Such a bar may stand on the terminal's line."""
    first, newline, remainder = text.partition("\n")
    return f"\r{first.ljust(width - 1)}{newline}{remainder}"


def wrapped(text: str, width: int) -> str:
    """The text with lines of at most so many columns.

    Longer words, such as paths, and commands, whose lines begin with "$ ", stay whole.

    >>> print(wrapped("12:00:00 a line that is too long", 24))
    12:00:00 a line that is
      too long
    """
    lines = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        fits = len(line) <= width or line.lstrip().startswith("$ ")
        lines += (
            [line]
            if fits
            else textwrap.wrap(
                line,
                width,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
    return "\n".join(lines)


# ---------------------------------------------------------------- a step's line


def remaining_seconds(step_ends: Sequence[float], steps_left: int) -> float | None:
    """Seconds that a run still takes; None where only the first step is known, which warms up.

    They follow from the ends of this start's last steps (seconds), between which validations and
    saves lie.

    >>> remaining_seconds([20.0, 29.0, 31.0], 7)
    38.5
    """
    if len(step_ends) < 2:
        return None
    return steps_left * (step_ends[-1] - step_ends[0]) / (len(step_ends) - 1)


def step_line(
    step: int,
    total_steps: int,
    seconds: float,
    remaining: float | None,
    metrics: Mapping[str, float],
    columns: int = COLUMNS - len("00:00:00 "),
) -> str:
    """A step's line of at most so many columns; steps count from 1.

    It has those of STEP_LINE_METRICS that there is room for.

    >>> step_line(3, 38, 1.234, 66.2, {"task_reward": -0.25, "other": 1.0})
    'step  3/38 reward -0.250 1.23s left 1:06'
    """
    start = f"step {step:>{len(str(total_steps))}}/{total_steps}"
    end = f" {seconds_text(seconds)}s"
    if remaining is not None:
        end += f" left {duration(remaining)}"
    line_metrics = STEP_LINE_METRICS | {
        name: (name.removeprefix("reward/"), ".2f") for name in _parts(metrics)
    }
    for name, (short, form) in line_metrics.items():
        part = f" {short} {metrics[name]:{form}}" if name in metrics else ""
        if len(start) + len(part) + len(end) <= columns:
            start += part
    return start + end


def _parts(metrics: Mapping[str, float]) -> list[str]:
    """The metrics of several rewards, which have a share of failures beside them."""
    return [name for name in metrics if f"{name}/failures" in metrics]


def seconds_text(seconds: float) -> str:
    """Three digits: "0.42", "41.7", "417"."""
    return f"{seconds:.{2 if seconds < 9.995 else 1 if seconds < 99.95 else 0}f}"


def duration(seconds: float) -> str:
    """ "0:07", "1:06:40"; from a day on "2d03h".

    >>> duration(7.4), duration(4000), duration(183_600)
    ('0:07', '1:06:40', '2d03h')
    """
    rounded = round(seconds)
    if rounded >= 86_400:
        return f"{rounded // 86_400}d{rounded % 86_400 // 3600:02d}h"
    minutes = f"{rounded // 60 % 60:02d}:{rounded % 60:02d}"
    return f"{rounded // 3600}:{minutes}" if rounded >= 3600 else minutes.removeprefix("0")
