"""Reads everything that a report needs of a run's folder, with bounds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rlmath.config.files import open_regular, read_json_object
from rlmath.config.help import no_run_text
from rlmath.config.run_files import (
    CONFIG_FILE,
    EVENTS_FILE,
    EXIT_STATUS_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    VALIDATION_FILE,
)
from rlmath.config.terminal import visible
from rlmath.report.accuracies import AccuracyRow, evaluation_rows, find_evaluations, validation_rows
from rlmath.report.metrics import Curve, Metrics, read_curves
from rlmath.report.samples import SHOWN_STEPS, number_of, samples_of, text_of
from rlmath.report.settings import Settings, read_settings
from rlmath.telemetry.events import MOST_CHARS, read_events

MOST_LABEL = 60
_MOST_JSON_BYTES = 2**22
MOST_MESSAGES = 200
"""Different warnings and errors of a run."""
MESSAGES = ("error", "alert", "rollback", "resume", "warning")
"""Kinds of events that are shown as messages, in this order."""
MOST_MARKERS = 40
TEACHING = "train/teaching_groups"

Part = TypeVar("Part")


class NoRunError(ValueError):
    """The folder is not that of a run; the text says what was got and what is needed."""


@dataclass
class Message:
    """A warning or an error, as often as it came."""

    kind: str
    """One of MESSAGES."""
    text: str
    time: str
    """Time at which the first came."""
    steps: list[str] = field(default_factory=list)
    """Places where it came: "step 7", or "before the first step of start 2". At most 8."""
    count: int = 1


@dataclass
class Events:
    starts: int = 0
    messages: list[Message] = field(default_factory=list)
    markers: list[dict[str, Any]] = field(default_factory=list)
    """Steps at which the run went on from a checkpoint.

    Each is {"x": steps done there, "kind": "restart" or "rollback"}."""


@dataclass
class ShownRun:
    label: str
    metrics: Metrics
    validation: Metrics
    settings: Settings
    summary: dict[str, Any]
    exit_status: dict[str, Any]
    events: Events
    samples: list[dict[str, Any]]
    validated: list[AccuracyRow] = field(default_factory=list)
    evaluated: list[AccuracyRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Notes on what was left out or could not be read."""

    @property
    def status(self) -> str:
        """ "finished", "diverged", ..., or that the run has not ended."""
        meaning = text_of(self.exit_status.get("meaning"), 40)
        return meaning or "has not ended: it runs, or was killed"

    @property
    def has_failed(self) -> bool:
        return number_of(self.exit_status.get("status")) not in (None, 0.0, 75.0)


def read_runs(folders: Sequence[str | Path], evaluations: Sequence[Path] = ()) -> list[ShownRun]:
    """The runs in these folders; a folder given twice counts once.

    `evaluations` are folders of evaluations of their models, beside those that are found. Errors:
    NoRunError."""
    paths = list({path.resolve(): path for path in map(Path, folders)}.values())
    for path in paths:
        require_run(path)
    return [_read_run(path, max(1, SHOWN_STEPS // len(paths)), evaluations) for path in paths]


def require_run(folder: Path) -> None:
    """NoRunError where a run has not left its metrics in the folder."""
    try:
        open_regular(folder / METRICS_FILE).close()
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and not folder.is_dir():
            problem = "which is not there"
        else:
            reason = error.strerror if isinstance(error, OSError) else error
            problem = (
                f"which has no {METRICS_FILE} that can be read ({reason}; the first step of a run "
                "writes it)"
            )
        text = visible(no_run_text(folder, problem))
        raise NoRunError(text.replace("\n", "\\n")) from error


def label_of(folder: Path) -> str:
    """The folder as it was given, or the end of its path, on one line.

    One inside the current folder is named from there."""
    with contextlib.suppress(OSError, ValueError):  # the current folder is gone, or another
        folder = folder.relative_to(Path.cwd())
    visible_folder = visible(str(folder)).replace("\n", "\\n").replace("\t", "\\t")
    return (
        visible_folder
        if len(visible_folder) <= MOST_LABEL
        else f"…{visible_folder[1 - MOST_LABEL :]}"
    )


def _read_run(folder: Path, most_steps: int, evaluations: Sequence[Path]) -> ShownRun:
    """What a run's folder holds for a report; NoRunError where its metrics cannot be read."""
    notes: list[str] = []

    def read(name: str, read_part: Callable[[Path], Part], missing: Part) -> Part:
        """A part of the folder, which need not be there."""
        try:
            return read_part(folder / name)
        except FileNotFoundError:
            return missing
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            notes.append(f"{name} cannot be read: {visible(str(error))[:200]}")
            return missing

    try:
        metrics = read_curves(folder / METRICS_FILE, notes)
    except (OSError, ValueError) as error:
        raise NoRunError(f"{folder / METRICS_FILE} cannot be read: {error}") from error
    validation = read(VALIDATION_FILE, lambda path: read_curves(path, notes), Metrics())
    settings = read(CONFIG_FILE, read_settings, {})
    return ShownRun(
        label_of(folder),
        metrics=with_teaching_groups(metrics),
        validation=validation,
        settings=settings,
        summary=read(SUMMARY_FILE, _read_object, {}),
        exit_status=read(EXIT_STATUS_FILE, _read_object, {}),
        events=read(EVENTS_FILE, lambda path: events_of(path, notes), Events()),
        samples=samples_of(folder, notes, most_steps),
        validated=validation_rows(validation),
        evaluated=evaluation_rows(find_evaluations(folder, settings, evaluations, notes=notes)),
        notes=notes,
    )


def with_teaching_groups(metrics: Metrics) -> Metrics:
    """The metrics, with teaching groups of earlier releases made of what they logged.

    No more groups taught than were learned from, where any were selected, and no more than had
    different rewards."""
    if TEACHING in metrics.curves:
        return metrics
    contrast = metrics.curve("rollout/groups_with_contrast")
    sampled = metrics.curve("selection/groups_sampled").by_step()
    learned = metrics.curve("selection/groups_learned").by_step()
    values = [
        min(share, learned.get(step, 0.0) / sampled[step]) if sampled.get(step) else share
        for step, share in zip(contrast.steps, contrast.values, strict=True)
    ]
    curves = {**metrics.curves, TEACHING: Curve(contrast.steps, values)}
    return Metrics(curves, metrics.last_step) if values else metrics


def _read_object(path: Path) -> dict[str, Any]:
    open_regular(path).close()  # a file that is not there is no damaged one
    return read_json_object(path, _MOST_JSON_BYTES)


def events_of(path: Path, notes: list[str]) -> Events:
    """The events of a file; what was left out is added to `notes`.

    Errors: as `read_events`."""
    events = Events()
    damaged = 0
    left_out = 0
    is_beginning = False
    messages: dict[tuple[str, str], Message] = {}
    for row in read_events(path):
        if isinstance(row, ValueError):
            damaged += 1
            continue
        kind = row["kind"]
        step = number_of(row.get("step"))
        if kind == "rollback" or (kind == "resume" and is_beginning):
            events.markers.append(
                {"x": step, "kind": "rollback" if kind == "rollback" else "restart"}
            )
        is_beginning = kind == "start" or (is_beginning and kind not in ("resume", "checkpoint"))
        events.starts += kind == "start"
        if kind not in MESSAGES:
            continue
        message_text = text_of(row.get("text"), MOST_CHARS)
        key = (kind, message_text)
        if key in messages:
            messages[key].count += 1
        elif len(messages) < MOST_MESSAGES:
            messages[key] = Message(kind, text=message_text, time=text_of(row["time"], 40))
        else:
            left_out += 1
            continue
        place = (
            f"before the first step of start {events.starts}"
            if step is None
            else f"step {step:.0f}"
        )
        if place not in messages[key].steps and len(messages[key].steps) < 8:
            messages[key].steps.append(place)
    if damaged:
        notes.append(f"{path.name}: {damaged} lines are no events and were left out.")
    if left_out:
        notes.append(
            f"{path.name}: {left_out} more warnings and errors, after {MOST_MESSAGES} different "
            "ones, are left out."
        )
    del events.markers[MOST_MARKERS:]
    events.messages = sorted(messages.values(), key=lambda message: MESSAGES.index(message.kind))
    return events
