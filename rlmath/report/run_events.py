"""Restarts, rollbacks, warnings and errors of a run, from its `events.jsonl`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlmath.report.samples import number_of, text_of
from rlmath.telemetry.events import MOST_CHARS, read_events

MOST_MESSAGES = 200
"""Different warnings and errors of a run."""
MESSAGES = ("error", "alert", "rollback", "resume", "warning")
"""Kinds of events that are shown as messages, in this order."""
MOST_MARKERS = 40


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
class Events:
    starts: int = 0
    messages: list[Message] = field(default_factory=list)
    markers: list[dict[str, Any]] = field(default_factory=list)
    """Steps at which the run went on from a checkpoint: {"x": steps done there, "kind": "restart" or "rollback"}."""


def events_of(path: Path, notes: list[str]) -> Events:
    """What the file tells. What was left out is added to `notes`. OSError where it cannot be read, ValueError where it
    is no regular file."""
    found, damaged, left_out, is_beginning = Events(), 0, 0, False
    messages: dict[tuple[str, str], Message] = {}
    for row in read_events(path):
        if isinstance(row, ValueError):
            damaged += 1
            continue
        kind, step = row["kind"], number_of(row.get("step"))
        if kind == "rollback" or (kind == "resume" and is_beginning):
            found.markers.append({"x": step, "kind": "rollback" if kind == "rollback" else "restart"})
        is_beginning = kind == "start" or (is_beginning and kind != "resume")
        found.starts += kind == "start"
        if kind not in MESSAGES:
            continue
        key = kind, text_of(row.get("text"), MOST_CHARS)
        if key in messages:
            messages[key].count += 1
        elif len(messages) < MOST_MESSAGES:
            messages[key] = Message(*key, text_of(row["time"], 40))
        else:
            left_out += 1
            continue
        where = f"before the first step of start {found.starts}" if step is None else f"step {step:.0f}"
        if where not in messages[key].steps and len(messages[key].steps) < 8:
            messages[key].steps.append(where)
    if damaged:
        notes.append(f"{path.name}: {damaged} lines are no events and were left out.")
    if left_out:
        notes.append(
            f"{path.name}: {left_out} more warnings and errors, after {MOST_MESSAGES} different ones, are left out."
        )
    del found.markers[MOST_MARKERS:]
    found.messages = sorted(messages.values(), key=lambda one: MESSAGES.index(one.kind))
    return found
