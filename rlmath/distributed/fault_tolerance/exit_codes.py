"""The exit codes of a run, and the file that holds the last one.

torchrun exits with 1 whatever its ranks exited with, and Slurm's srun with the highest code of all nodes, also of those
that it killed. So a run writes its code to `<output_dir>/exit_status.json`; `launch/exit_status.py` reads it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

FINISHED = 0
FAILURE = 1
"""The run failed."""
MISTAKE = 2
"""The settings are invalid."""
SAVED_AND_STOPPED = 75
"""A signal stopped the run, which saved a checkpoint first. Start it again to resume (sysexits' EX_TEMPFAIL)."""
NOT_SAVED_IN_TIME = 76
"""A signal stopped the run, and saving was not complete `run.stop_grace_seconds` later."""
DIVERGED = 77
"""The policy can no longer be trained (`trainer.divergence`): the same command would end likewise."""

MEANINGS = {
    FINISHED: "finished",
    FAILURE: "failed",
    MISTAKE: "mistake in the settings",
    SAVED_AND_STOPPED: "saved and stopped",
    NOT_SAVED_IN_TIME: "not saved in time",
    DIVERGED: "diverged",
}

FILE_NAME = "exit_status.json"


@dataclass(frozen=True)
class ExitStatus:
    """How a run ended."""

    status: int
    message: str
    """One line: after which step, or why."""


def write_exit_status(output_dir: str | Path, status: int, message: str) -> None:
    """Write the exit status. Any rank may; the last one counts. OSError where the folder is not writable."""
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f".{FILE_NAME}.{os.getpid()}.tmp"
    values = {**asdict(ExitStatus(status, message)), "meaning": MEANINGS[status]}
    scratch.write_text(json.dumps(values) + "\n", encoding="utf-8")
    scratch.replace(folder / FILE_NAME)


def clear_exit_status(output_dir: str | Path) -> None:
    """Remove the status of an earlier run: a run that is killed must not show the status of the one before."""
    (Path(output_dir) / FILE_NAME).unlink(missing_ok=True)


def read_exit_status(output_dir: str | Path) -> ExitStatus:
    """How the last run in this folder ended; FAILURE where there is no status, or an unreadable one."""
    path = Path(output_dir) / FILE_NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        found = ExitStatus(values["status"], values["message"])
    except FileNotFoundError:
        return ExitStatus(FAILURE, f"no {path}: the run was killed, or did not get as far as its settings")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return ExitStatus(FAILURE, f"{path} cannot be read: {error}")
    if found.status not in MEANINGS:
        return ExitStatus(FAILURE, f"{path} has the unknown status {found.status!r}")
    return found
