"""The codes a run ends with, and a file that keeps the last one.

torchrun ends with 1 whatever its ranks ended with, and Slurm's srun with the highest code of all nodes, also of those
that it killed. So a run leaves its code in `<output_dir>/exit_status.json`; `launch/exit_status.py` reads it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

FINISHED = 0
FAILURE = 1
"""The run broke."""
MISTAKE = 2
"""The run cannot be as it was asked for."""
SAVED_AND_STOPPED = 75
"""A signal asked the run to stop; it saved a checkpoint first. Start it again to go on (sysexits' EX_TEMPFAIL)."""
NOT_SAVED_IN_TIME = 76
"""A signal asked the run to stop, and it was not done with saving `run.stop_grace_seconds` later."""

MEANINGS = {
    FINISHED: "finished",
    FAILURE: "failed",
    MISTAKE: "mistake in the settings",
    SAVED_AND_STOPPED: "saved and stopped",
    NOT_SAVED_IN_TIME: "not saved in time",
}

FILE_NAME = "exit_status.json"


@dataclass(frozen=True)
class ExitStatus:
    """How a run ended."""

    status: int
    message: str
    """One line: after which step, or why."""


def write_exit_status(output_dir: str | Path, status: int, message: str) -> None:
    """Leave the code for whoever started the run. Any rank may; the last one counts.

    OSError where the folder cannot be written.
    """
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f".{FILE_NAME}.{os.getpid()}.tmp"
    said = {**asdict(ExitStatus(status, message)), "meaning": MEANINGS[status]}
    scratch.write_text(json.dumps(said) + "\n", encoding="utf-8")
    scratch.replace(folder / FILE_NAME)


def clear_exit_status(output_dir: str | Path) -> None:
    """Forget how an earlier run ended: one that is killed must not seem to have ended as the one before."""
    (Path(output_dir) / FILE_NAME).unlink(missing_ok=True)


def read_exit_status(output_dir: str | Path) -> ExitStatus:
    """How the last run in this folder ended; FAILURE where it left no word, or none that can be read."""
    path = Path(output_dir) / FILE_NAME
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        found = ExitStatus(said["status"], said["message"])
    except FileNotFoundError:
        return ExitStatus(FAILURE, f"no {path}: the run was killed, or did not get as far as its settings")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return ExitStatus(FAILURE, f"{path} cannot be read: {error}")
    if found.status not in MEANINGS:
        return ExitStatus(FAILURE, f"{path} has the unknown status {found.status!r}")
    return found
