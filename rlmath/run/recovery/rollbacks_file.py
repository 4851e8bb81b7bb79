"""rollbacks.json: the rollbacks of a run, which `rollback` makes.

It is on the disk before anything else in the run's folder is changed: a run that is killed at any
moment resumes with it, and never makes more rollbacks than `algorithm.rollback`. Checkpoints have
the list, too, for a folder that was copied without the file. One that was made before a rollback,
and is newer than where that one went back to, is never resumed from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from rlmath.checkpoint.directory import Progress
from rlmath.config.files import parse_json, read_regular
from rlmath.config.run_files import ROLLBACKS_FILE, write_whole
from rlmath.data.order import Rollback

VERSION = 1
_MOST_BYTES = 2**20


def read_rollbacks(output_dir: str | Path) -> list[Rollback]:
    """The rollbacks of the run in a folder; none where there is no file.

    ValueError where the file cannot be used."""
    path = Path(output_dir) / ROLLBACKS_FILE
    try:
        values = parse_json(read_regular(path, _MOST_BYTES).decode())
        if values["version"] != VERSION:
            raise ValueError(f"its form is version {values['version']!r}; needed: {VERSION}")
        return [
            _read_rollback(number, row) for number, row in enumerate(values["rollbacks"], start=1)
        ]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{path}, the list of the run's rollbacks, cannot be read ({type(error).__name__}: "
            f"{error}). Restore it; "
            "without it, moved away, the run resumes with the rollbacks that its checkpoints know"
        ) from error


def _read_rollback(number: int, row: dict) -> Rollback:
    step, draw_step, diverged = steps = [
        row[name] for name in ("step", "draw_step", "diverged_step")
    ]
    if any(type(step_number) is not int or not 0 <= step_number < 2**63 for step_number in steps):
        raise ValueError(f"{steps} are no steps")
    return Rollback(number, step, draw_step, diverged_step=diverged, reason=str(row["reason"]))


def write_rollbacks(output_dir: str | Path, rollbacks: Sequence[Rollback]) -> None:
    """Write a run's rollbacks, which are on the disk when this returns.

    After an OSError the file is as before."""
    path = Path(output_dir) / ROLLBACKS_FILE
    rows = [
        {name: value for name, value in vars(rollback).items() if name != "number"}
        for rollback in rollbacks
    ]
    write_whole(path, json.dumps({"version": VERSION, "rollbacks": rows}, indent=1) + "\n")
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rollbacks_of(
    output_dir: str | Path,
    progress: Progress | None,
    file_rollbacks: list[Rollback] | None = None,
) -> list[Rollback]:
    """The rollbacks of a run that stands at `progress`.

    They are those of the folder's file, or those of the checkpoint if the file has fewer.
    `file_rollbacks` are those of the file if it is read already. ValueError if the file cannot be
    used, or is that of another run."""
    if file_rollbacks is None:
        file_rollbacks = read_rollbacks(output_dir)
    if progress is None:
        return file_rollbacks
    steps = zip(progress.rollback_steps, progress.rollback_draw_steps, strict=False)
    checkpoint_rollbacks = [
        Rollback(number, step, draw_step) for number, (step, draw_step) in enumerate(steps, start=1)
    ]
    if len(file_rollbacks) < len(checkpoint_rollbacks):
        return checkpoint_rollbacks
    if [rollback.step for rollback in file_rollbacks[: len(checkpoint_rollbacks)]] != list(
        progress.rollback_steps
    ):
        raise ValueError(
            f"{Path(output_dir) / ROLLBACKS_FILE} has rollbacks to the steps "
            f"{[rollback.step for rollback in file_rollbacks]}, the "
            f"checkpoint of step {progress.step} those to {list(progress.rollback_steps)}: the "
            "file is that of another "
            "run. Restore it, or move it away"
        )
    return file_rollbacks


def superseded_by(rollbacks: Sequence[Rollback], progress: Progress) -> Rollback | None:
    """The first rollback that discarded a checkpoint's steps; None if there is none.

    The checkpoint was made before it, and is of a later step than the one it went back to."""
    later = rollbacks[len(progress.rollback_steps) :]
    return next((rollback for rollback in later if rollback.step < progress.step), None)
