"""Rollbacks of a run (`algorithm.rollback`): back to the last good checkpoint, with other seeds and a smaller rate.

    divergence -> last good checkpoint -> weights, optimizer, draws from there -> rollbacks.json
               -> newer checkpoints and rows set aside -> the steps again

The run's folder has the list of its rollbacks in rollbacks.json, which is on the disk before anything in the folder is
changed: a run that is killed at any moment resumes with it, and never makes more rollbacks than `algorithm.rollback`.
Checkpoints have the list, too, for a folder that was copied without the file. A checkpoint that was made before a
rollback, and is newer than where that one went back to, is never resumed from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlmath.checkpoint.directory import Progress
from rlmath.config.files import parse_json, read_regular
from rlmath.config.run_files import ROLLBACKS_FILE, write_whole
from rlmath.data.order import Rollback

VERSION = 1
_MOST_BYTES = 2**20


@dataclass(frozen=True)
class RollbackRecord:
    """A rollback, as the file has it."""

    step: int
    """Steps done in the checkpoint that the run went back to."""
    draw_step: int
    """As `Rollback.draw_step`."""
    diverged_step: int = 0
    """The step, counted from 1, in which the run diverged; 0: not known."""
    reason: str = ""


def read_rollbacks(output_dir: str | Path) -> list[RollbackRecord]:
    """The rollbacks of the run in a folder; none where there is no file. ValueError where the file cannot be used."""
    path = Path(output_dir) / ROLLBACKS_FILE
    try:
        values = parse_json(read_regular(path, _MOST_BYTES).decode())
        if values["version"] != VERSION:
            raise ValueError(f"its form is version {values['version']!r}; needed: {VERSION}")
        return [_read_record(row) for row in values["rollbacks"]]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{path}, the list of the run's rollbacks, cannot be read ({type(error).__name__}: {error}). Restore it; "
            "without it, moved away, the run resumes with the rollbacks that its checkpoints know"
        ) from error


def _read_record(row: dict) -> RollbackRecord:
    step, draw_step, diverged = numbers = [row[name] for name in ("step", "draw_step", "diverged_step")]
    if any(type(one) is not int or not 0 <= one < 2**63 for one in numbers):
        raise ValueError(f"{numbers} are no steps")
    return RollbackRecord(step, draw_step, diverged, str(row["reason"]))


def write_rollbacks(output_dir: str | Path, records: Sequence[RollbackRecord]) -> None:
    """On the disk when it returns, or OSError and the file is as before."""
    path = Path(output_dir) / ROLLBACKS_FILE
    rows = [vars(one) for one in records]
    write_whole(path, json.dumps({"version": VERSION, "rollbacks": rows}, indent=1) + "\n")
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def records_of(
    output_dir: str | Path, progress: Progress | None, there: list[RollbackRecord] | None = None
) -> list[RollbackRecord]:
    """The rollbacks of a run that stands at `progress`: those of the folder's file, or where it has fewer, those of the
    checkpoint. `there` is what the file has, where it is read already. ValueError where the file cannot be used, or is
    that of another run."""
    there = read_rollbacks(output_dir) if there is None else there
    if progress is None:
        return there
    pairs = zip(progress.rollback_steps, progress.rollback_draw_steps, strict=False)
    known = [RollbackRecord(step, draw_step) for step, draw_step in pairs]
    steps = [one.step for one in there]
    if len(there) < len(known):
        return known
    if steps[: len(known)] != list(progress.rollback_steps):
        raise ValueError(
            f"{Path(output_dir) / ROLLBACKS_FILE} has rollbacks to the steps {steps}, the checkpoint of step "
            f"{progress.step} those to {list(progress.rollback_steps)}: the file is that of another run. Restore it, "
            "or move it away"
        )
    return there


def superseded_by(records: Sequence[RollbackRecord], progress: Progress) -> int | None:
    """The rollback, counted from 1, that went back to before a checkpoint which was made before it; None where there is
    none."""
    for number, one in enumerate(records, start=1):
        if number > len(progress.rollback_steps) and one.step < progress.step:
            return number
    return None


def unnumbered(rollbacks: Sequence[Rollback]) -> list[RollbackRecord]:
    return [RollbackRecord(one.step, one.draw_step) for one in rollbacks]


def numbered(records: Sequence[RollbackRecord]) -> tuple[Rollback, ...]:
    """For the order of prompts and the seeds."""
    return tuple(Rollback(number, one.step, one.draw_step) for number, one in enumerate(records, start=1))
