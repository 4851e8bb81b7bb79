"""The exit codes of a run, the file with the last one, and torchrun's report of a failed rank.

torchrun exits with 1 whatever its ranks exited with, and Slurm's srun with the highest code of all
nodes, also of those that it killed. So a run writes its code to `<output_dir>/exit_status.json`;
`launch/exit_status.py` reads it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rlmath.config.files import read_json
from rlmath.config.run_files import EXIT_STATUS_FILE
from rlmath.config.terminal import visible

logger = logging.getLogger(__name__)

FINISHED = 0
FAILURE = 1
MISTAKE = 2
"""The settings are invalid."""
NOTHING_COMPARED = 3
"""A replay of a step that has nothing to compare, such as one that made no update."""
SAVED_AND_STOPPED = 75
"""A signal stopped the run, which saved first unless it had made no step.

Start it again to resume (EX_TEMPFAIL)."""
NOT_SAVED_IN_TIME = 76
"""A signal stopped the run, and saving was not complete `run.stop_grace_seconds` later."""
DIVERGED = 77
"""The policy can no longer be trained (`run.divergence`).

The same command would end in the same way."""

MEANINGS = {
    FINISHED: "finished",
    FAILURE: "failed",
    MISTAKE: "mistake in the settings",
    NOTHING_COMPARED: "nothing compared",
    SAVED_AND_STOPPED: "stopped on request",
    NOT_SAVED_IN_TIME: "not saved in time",
    DIVERGED: "diverged",
}

RESERVED_NAME = f".{EXIT_STATUS_FILE}.reserved"
"""Holds the space for the status on a disk that is full when the run ends."""
RESERVED_BYTES = 4096
SCRATCH = re.compile(rf"\.{re.escape(EXIT_STATUS_FILE)}\.\d+\.tmp")
"""Names of files that a rank leaves which is killed while it writes the status."""

WAITS_NAME = "waits"
"""Empty file beside a rank's error file: it waits for torchrun to end it."""
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class ExitStatus:
    status: int
    message: str
    """After which step, or why; for a refusal also the lines that list its problems."""


AGAIN = "the same command"


def again_text(saved_step: int | None) -> str:
    """The text on what the same command does after a run has ended.

    >>> again_text(12), again_text(None)
    ('the same command resumes after step 12', 'the same command starts from the beginning')
    """
    if saved_step is None:
        return f"{AGAIN} starts from the beginning"
    return f"{AGAIN} resumes after step {saved_step}"


def write_exit_status(output_dir: str | Path, status: int, message: str) -> None:
    """Write the exit status.

    Any rank may; the last one counts. On a full disk it is written into the file that
    `reserve_exit_status` made, or over an earlier status; what is refused even then is logged."""
    folder = Path(output_dir)
    scratch = folder / f".{EXIT_STATUS_FILE}.{os.getpid()}.tmp"
    target = folder / EXIT_STATUS_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch.write_text(_as_json(status, message), encoding="ascii")
        scratch.replace(target)
        (folder / RESERVED_NAME).unlink(missing_ok=True)
        return
    except OSError as error:
        write_error = error
        with suppress(OSError):
            scratch.unlink()
    with suppress(OSError):
        (folder / RESERVED_NAME).rename(scratch)  # of several ranks one gets it
        _overwrite(scratch, _fitting_json(status, message))
        scratch.replace(target)
        return
    try:
        _overwrite(target, _fitting_json(status, message))
    except OSError:
        text = "the exit status %d (%s) cannot be written: %s"
        logger.error(text, status, message.partition("\n")[0], write_error)


def _as_json(status: int, message: str) -> str:
    return json.dumps({**asdict(ExitStatus(status, message)), "meaning": MEANINGS[status]}) + "\n"


def _fitting_json(status: int, message: str) -> bytes:
    while len(content := _as_json(status, message)) > RESERVED_BYTES:
        message = message[: len(message) * 3 // 4]
    return content.encode("ascii")


def _overwrite(path: Path, content: bytes) -> None:
    """Write over a file in place; one that is as large already needs no further block or inode."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        if os.pwrite(descriptor, content, 0) == len(content):
            os.ftruncate(descriptor, len(content))
            os.fsync(descriptor)
            return
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def reserve_exit_status(output_dir: str | Path) -> None:
    """Remove an earlier status, and reserve space for that of this run.

    The folder's only user calls it before a run starts."""
    folder = Path(output_dir)
    clear_exit_status(folder)
    for path in folder.iterdir():
        if SCRATCH.fullmatch(path.name):
            path.unlink()
    with suppress(OSError), (folder / RESERVED_NAME).open("wb") as file:
        file.write(b" " * RESERVED_BYTES)
        file.flush()
        os.fsync(file.fileno())


def clear_exit_status(output_dir: str | Path) -> None:
    """Remove the status of an earlier run.

    A run that is killed must not show the status of the one before."""
    (Path(output_dir) / EXIT_STATUS_FILE).unlink(missing_ok=True)


def read_exit_status(output_dir: str | Path) -> ExitStatus:
    """The exit status of the last run in this folder; FAILURE if it is missing or unreadable."""
    path = Path(output_dir) / EXIT_STATUS_FILE
    try:
        values = read_json(path)
        exit_status = ExitStatus(values["status"], values["message"])
    except FileNotFoundError:
        if not path.parent.is_dir():
            reason = "the run has not made it, or the path is another one"
            return ExitStatus(FAILURE, f'there is no folder "{path.parent}": {reason}')
        return ExitStatus(
            FAILURE, f"no {path}: the run was killed, or did not get as far as its settings"
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        return ExitStatus(FAILURE, f"{path} cannot be read: {error}")
    if exit_status.status not in MEANINGS:
        return ExitStatus(FAILURE, f"{path} has the unknown status {exit_status.status!r}")
    return exit_status


# ---------------------------------------------------------------- torchrun's report


def report_to_torchrun(message: str) -> None:
    """Let torchrun name the cause in its report of a failed rank, the last that it prints.

    Without torchrun nothing."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    text = visible(message)
    details = {"py_callstack": text, "timestamp": str(int(time.time()))}
    partial = Path(f"{path}.tmp")  # torchrun raises on half a file
    with suppress(OSError):
        partial.write_text(
            json.dumps({"message": {"message": text, "extraInfo": details}}), encoding="utf-8"
        )
        partial.replace(path)


def wait_for_torchrun(seconds: float) -> None:
    """Wait so long; if torchrun ends this rank meanwhile, exit with 0.

    For a rank whose error another one reports: of each rank that fails, or that a signal ends,
    torchrun prints seven lines more."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(FINISHED))
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):
            Path(path).with_name(WAITS_NAME).touch()
    time.sleep(seconds)
    signal.signal(signal.SIGTERM, before)


def wait_for_waiting_ranks(seconds: float) -> None:
    """Wait until the other ranks of the node are in `wait_for_torchrun`, at most so long.

    The first rank of a node under torchrun calls it before it ends with an error."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not path:
        return
    # It has a folder for each rank.
    folder = Path(path).parents[1]
    deadline = time.monotonic() + seconds
    while not all((folder / str(rank) / WAITS_NAME).exists() for rank in range(1, ranks)):
        if time.monotonic() > deadline:
            return
        time.sleep(POLL_SECONDS)
