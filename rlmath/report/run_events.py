"""Starts, warnings and errors of a run, from its `events.jsonl`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlmath.report.samples import number_of, text_of
from rlmath.telemetry.events import MOST_CHARS, read_events

MOST_MESSAGES = 200
"""Different warnings and errors of a run."""
MESSAGES = ("error", "alert", "warning")
"""Kinds of events that are shown as messages, in this order."""


@dataclass
class Message:
    """A warning or an error, as often as it came."""

    kind: str
    """One of MESSAGES."""
    text: str
    time: str
    """When the first came."""
    steps: list[str] = field(default_factory=list)
    """Where it came: "step 7", or "before the first step of start 2". At most 8."""
    count: int = 1


@dataclass
class Start:
    """One start of the run's program."""

    time: str
    resumed_after: int | None = None
    """Steps done in the checkpoint that it resumed from; None: it began with step 1, or broke before."""
    last_step: int | None = None


@dataclass
class Events:
    starts: list[Start] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)


def events_of(path: Path, last_step: int, notes: list[str]) -> Events:
    """What the file tells of a run that has come to `last_step`. What was left out is added to `notes`. OSError
    where it cannot be read, ValueError where it is no regular file."""
    found, damaged, left_out = Events(), 0, 0
    messages: dict[tuple[str, str], Message] = {}
    for row in read_events(path):
        if isinstance(row, ValueError):
            damaged += 1
            continue
        _follow_starts(found, row)
        key = row["kind"], text_of(row.get("text"), MOST_CHARS)
        if row["kind"] not in MESSAGES:
            continue
        if key in messages:
            messages[key].count += 1
        elif len(messages) < MOST_MESSAGES:
            messages[key] = Message(*key, text_of(row["time"], 40))
        else:
            left_out += 1
            continue
        step = _step_of(row)
        where = f"before the first step of start {len(found.starts)}" if step is None else f"step {step}"
        if where not in messages[key].steps and len(messages[key].steps) < 8:
            messages[key].steps.append(where)
    if damaged:
        notes.append(f"{path.name}: {damaged} lines are no events and were left out.")
    if left_out:
        notes.append(
            f"{path.name}: {left_out} more warnings and errors, after {MOST_MESSAGES} different ones, are left out."
        )
    if found.starts:
        found.starts[-1].last_step = last_step or None
    found.messages = sorted(messages.values(), key=lambda one: MESSAGES.index(one.kind))
    return found


def _follow_starts(found: Events, row: dict[str, Any]) -> None:
    if row["kind"] == "start":
        found.starts.append(Start(text_of(row["time"], 40)))
    elif found.starts and row["kind"] == "resume":
        found.starts[-1].resumed_after = _step_of(row)
    elif found.starts and row["kind"] == "took back":
        last = number_of(row.get("last_step"))
        found.starts[-1].last_step = None if last is None else int(last)


def _step_of(row: dict[str, Any]) -> int | None:
    step = number_of(row.get("step"))
    return None if step is None else int(step)
