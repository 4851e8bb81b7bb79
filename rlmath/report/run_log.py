"""Starts, warnings and errors of a run, from its `run.log`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rlmath.config.files import open_regular
from rlmath.config.terminal import visible

MOST_HEAD_BYTES, MOST_TAIL_BYTES = 2**24, 3 * 2**24
"""Read from the beginning and, where the file is larger than both, from its end."""
MOST_MESSAGES = 200
"""Different warnings and errors of a run."""
MOST_CHARS = 1500
"""Of a message."""
MOST_STARTS = 200

_LINE = re.compile(r"(\d{4})(\d\d)(\d\d)-(\d\d:\d\d:\d\d)\.\d{3} ([A-Z]+): (.*)", re.DOTALL)
_STEP_LINE = re.compile(r"step (\d{1,12})/\d+ ")
_OF_STEP = re.compile(r"Step (\d{1,12})(?:, (alert) \(logged once\))?: ")
_START = "Starting: reading settings"
_RESUMED = re.compile(r"Resuming from .*: (\d{1,12}) steps? ")
_LEVELS = {"WARNING": "warning", "ERROR": "error", "CRITICAL": "error"}


@dataclass
class Message:
    """A warning or an error, as often as it came."""

    kind: str
    """ "error", "alert" or "warning"."""
    text: str
    time: str
    """Of the first."""
    steps: list[str] = field(default_factory=list)
    """Where it came: "step 7", "after step 7", "before the first step of start 2". At most 8."""
    count: int = 1


@dataclass
class Start:
    """One start of the run's program."""

    time: str
    resumed_after: int | None = None
    """Steps done in the checkpoint that it resumed from; None: it began with step 1, or broke before."""
    last_step: int | None = None


@dataclass
class Log:
    starts: list[Start] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)


def read_log(path: Path, notes: list[str]) -> Log:
    """What the file tells; nothing where there is none. What was left out is added to `notes`."""
    log = Log()
    found: dict[tuple[str, str], Message] = {}
    left_out = 0
    try:
        for time, level, text in _records(path, notes):
            _follow_starts(log, time, text)
            kind = _LEVELS.get(level)
            if kind is None:
                continue
            of_step = _OF_STEP.match(text)
            where = _where(log)
            if of_step:
                where, text = f"step {of_step[1]}", text[of_step.end() :]
                kind = of_step[2] or kind
            message = found.get((kind, text))
            if message is None:
                if len(found) == MOST_MESSAGES:
                    left_out += 1
                    continue
                message = found[kind, text] = Message(kind, text, time, [where])
                continue
            message.count += 1
            if where not in message.steps and len(message.steps) < 8:
                message.steps.append(where)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read: {visible(str(error))[:200]}")
    if left_out:
        notes.append(
            f"{path.name}: {left_out} more warnings and errors, after {MOST_MESSAGES} different ones, are left out."
        )
    order = ("error", "alert", "warning")
    log.messages = sorted(found.values(), key=lambda one: order.index(one.kind))
    return log


def _follow_starts(log: Log, time: str, text: str) -> None:
    if text.startswith(_START) and len(log.starts) < MOST_STARTS:
        log.starts.append(Start(time))
    elif log.starts and (step := _STEP_LINE.match(text)):
        log.starts[-1].last_step = int(step[1])
    elif log.starts and (resumed := _RESUMED.match(text)):
        log.starts[-1].resumed_after = int(resumed[1])


def _where(log: Log) -> str:
    if not log.starts:
        return "at the start"
    if log.starts[-1].last_step is None:
        return f"before the first step of start {len(log.starts)}"
    return f"after step {log.starts[-1].last_step}"


def _records(path: Path, notes: list[str]) -> Iterator[tuple[str, str, str]]:
    """(time, level, text) of every message; the text has its further lines, all of it at most MOST_CHARS, and no
    control characters. Of messages that are told about nothing but DEBUG lines are left out."""
    record: list[str] = []
    chars = 0
    for raw in _lines(path, notes):
        text = raw.decode("utf-8", "backslashreplace").rstrip("\r\n")
        line = _LINE.match(text) if text[:2] == "20" else None
        if line is None:
            if record and chars < MOST_CHARS:
                record[2] += "\n" + visible(text[: MOST_CHARS - chars])
                chars += len(text) + 1
            continue
        if record:
            yield record[0], record[1], record[2]
        year, month, day, clock, level, message = line.groups()
        record = []
        if level != "DEBUG":
            shown = visible(message[:MOST_CHARS]) + (" ..." if len(message) > MOST_CHARS else "")
            record, chars = [f"{year}-{month}-{day} {clock}", level, shown], len(message)
    if record:
        yield record[0], record[1], record[2]


def _lines(path: Path, notes: list[str]) -> Iterator[bytes]:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        cut = size > MOST_HEAD_BYTES + MOST_TAIL_BYTES
        left = MOST_HEAD_BYTES if cut else size
        for part in range(2 if cut else 1):
            if part == 1:
                file.seek(size - MOST_TAIL_BYTES)
                left = MOST_TAIL_BYTES
                file.readline(2**16)
            while left > 0 and (line := file.readline(2**16)):
                left -= len(line)
                yield line
    if cut:
        notes.append(
            f"{path.name}: of its {size >> 20} MiB only the first {MOST_HEAD_BYTES >> 20} and the last "
            f"{MOST_TAIL_BYTES >> 20} MiB were read."
        )
