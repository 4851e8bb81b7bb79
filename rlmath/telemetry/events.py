"""Events of a run as data: `events.jsonl`, with a row for every start, checkpoint and warning.

Events are warnings and errors of the log, and lines with `extra=event(...)`. A row has "time",
"kind", "step" (steps done, or the step that the event is of) and "text", and whatever else the
event was given."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlmath.config.files import open_regular, parse_json
from rlmath.config.run_files import EVENTS_FILE, write_whole
from rlmath.config.terminal import visible

logger = logging.getLogger(__name__)

MOST_EVENTS = 10_000
"""Rows that a start of a run writes."""
MOST_CHARS = 1500
"""Characters of an event's text."""
LASTING = ("start", "resume", "took back", "rollback", "end")
"""Kinds that stay where a run goes back to an earlier step and repeats later steps."""


def event(kind: str, step: int | None = None, **fields: Any) -> dict[str, Any]:
    """The `extra` of a line of the log that is an event, too.

    Its text is the line's if there is no `text` in `fields`. The kind "step" is not written:
    warnings that follow are of this step."""
    return {"event": {"kind": kind, **({} if step is None else {"step": step}), **fields}}


class EventFile(logging.Handler):
    """Appends events of the log to a run's `events.jsonl`.

    Each is in the file when the line has been logged. A disk that refuses one costs the run a
    warning, and further events."""

    def __init__(self, output_dir: str | Path) -> None:
        super().__init__()
        self._path = Path(output_dir) / EVENTS_FILE
        self._step: int | None = None
        self._left = MOST_EVENTS

    def emit(self, record: logging.LogRecord) -> None:
        """Append the event of a record, if it is one."""
        event_fields = getattr(record, "event", None)
        if event_fields is None and record.levelno < logging.WARNING:
            return
        fields = {"kind": "warning" if record.levelno < logging.ERROR else "error"} | (
            event_fields or {}
        )
        if fields["kind"] == "step":
            self._step = fields["step"]
            return
        if self._left == 0:
            return
        self._left -= 1
        text = visible(fields.pop("text", None) or self.format(record))[:MOST_CHARS]
        timestamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        row = {"time": timestamp, "step": self._step, "text": text} | fields
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            self._left = 0
            logger.warning(
                "%s cannot be written: %s. The run continues without it", self._path, error
            )


def read_events(path: Path) -> Iterator[dict[str, Any] | ValueError]:
    """The ended rows of a file of events, or why a line is none.

    OSError where it cannot be read, ValueError where it is no regular file."""
    with open_regular(path) as file:
        lines = file.read().split(b"\n")[:-1]
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line.decode("utf-8"))
            if not (isinstance(row["kind"], str) and isinstance(row["time"], str)):
                raise ValueError("no kind or time")
            yield row
        except (ValueError, KeyError, TypeError) as error:
            yield ValueError(f"line {number}: not an event ({type(error).__name__})")


def take_back_events(output_dir: str | Path, steps_done: int, last_step: int) -> None:
    """Drop the events of steps after `steps_done` for a run that resumes there after `last_step`.

    May raise OSError."""
    path = Path(output_dir) / EVENTS_FILE
    if not path.is_file():
        return
    rows = [row for row in read_events(path) if not isinstance(row, ValueError)]
    kept_rows = [
        row for row in rows if row["kind"] in LASTING or (row.get("step") or 0) <= steps_done
    ]
    timestamp = time.strftime("%Y-%m-%d %H:%M:%S")
    kept_rows.append(
        {
            "time": timestamp,
            "kind": "took back",
            "step": steps_done,
            "text": "",
            "last_step": last_step,
        }
    )
    write_whole(path, "".join(json.dumps(row) + "\n" for row in kept_rows))
