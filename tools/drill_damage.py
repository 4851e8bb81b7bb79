"""What a drill does to files: to a run's disk, its newest checkpoints, and its folder.

Every function takes a run and says what it did. Those of the first part work on a run that is
there, the others on the folder of one that has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from rlmath.checkpoint.directory import PARTIAL, complete_checkpoints
from rlmath.config.run_files import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    LOCK_FILE,
    SAMPLES_FOLDER,
    SUMMARY_FILE,
)
from rlmath.distributed.fault_tolerance.exit_codes import FINISHED, write_exit_status
from tools.drill_run import Attempt, wait_for

SAVE_SECONDS = 60.0
"""Time within which a run that saves after every step begins to save again."""
DISK_SIZE = "3g"
MOST_FILES = "100k"
FILE_LIMIT_BYTES = 2**18
NOT_SAVED = "was not saved"
"""What a run says of a checkpoint that the disk refused."""


# ---------------------------------------------------------------- the disk


def mount_disk(folder: Path) -> bool:
    """Put a small disk of its own (tmpfs) under a folder; False where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={DISK_SIZE},nr_inodes={MOST_FILES}"
    return os.geteuid() == 0 and _mount("-t", "tmpfs", "-o", options, "tmpfs", str(folder))


def unmount_disk(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], check=True)


def _mount(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0


def _remount(folder: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(folder)], check=True)


def wait_for_save(attempt: Attempt, rng: random.Random) -> None:
    folder = attempt.output / CHECKPOINTS_FOLDER
    wait_for(lambda: attempt.ended or any(folder.glob(f"*{PARTIAL}")), SAVE_SECONDS, "a save")


def wait_for_refusal(attempt: Attempt, shown: int) -> None:
    wait_for(
        lambda: attempt.ended or attempt.console().count(NOT_SAVED) > shown,
        SAVE_SECONDS,
        "a word about a checkpoint that cannot be saved",
    )


def fill_disk(attempt: Attempt, rng: random.Random) -> str:
    """Fill the disk so that no byte more fits, from now on or from the middle of a save on.

    Where there is no disk of the run's own, no file of its processes may grow beyond
    FILE_LIMIT_BYTES. A run that continues without saving is then killed."""
    moment = rng.choice(["before a save", "in a save"])
    if moment == "in a save":
        wait_for_save(attempt, rng)
    disk = attempt.output.parent
    warnings = attempt.console().count(NOT_SAVED)
    if os.path.ismount(disk):

        def as_large_as_used() -> bool:
            usage = os.statvfs(disk)
            used = (usage.f_blocks - usage.f_bfree) * usage.f_frsize
            return _mount("-o", f"remount,size={used + 2**16}", str(disk))

        # Refused where the run has just written more.
        wait_for(as_large_as_used, SAVE_SECONDS, "a moment at which nothing is written")
        outcome = f"full {moment}"
    else:
        for process in attempt.processes():
            process.rlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT_BYTES, resource.RLIM_INFINITY))
        outcome = f"files limited {moment}"
    wait_for_refusal(attempt, warnings)
    if attempt.ended:
        return f"{outcome}, the run ended by itself"
    return f"{outcome}, the run went on, killed {attempt.kill_a_rank(rng)}"


def free_disk(attempt: Attempt, rng: random.Random) -> str:
    if os.path.ismount(attempt.output.parent):
        _remount(attempt.output.parent, f"size={DISK_SIZE}")
    return "room again"


def use_up_inodes(attempt: Attempt, rng: random.Random) -> str:
    """Leave no inode for a new file until a save has failed for it.

    Does nothing where there is no disk of the run's own."""
    disk = attempt.output.parent
    warnings = attempt.console().count(NOT_SAVED)
    if not os.path.ismount(disk):
        return "no disk of its own, nothing done"

    def as_many_as_there_are() -> bool:
        usage = os.statvfs(disk)
        return _mount("-o", f"remount,nr_inodes={usage.f_files - usage.f_ffree}", str(disk))

    # Refused where the run has just made another file.
    wait_for(as_many_as_there_are, SAVE_SECONDS, "a moment at which no file is made")
    try:
        wait_for_refusal(attempt, warnings)
    finally:
        _remount(disk, f"nr_inodes={MOST_FILES}")
    return "no inode until a save had failed"


def make_checkpoints_read_only(attempt: Attempt, rng: random.Random) -> str:
    """Make the folder read-only, by a mount or its permissions, until a save has failed for it."""
    folder = attempt.output / CHECKPOINTS_FOLDER
    warnings = attempt.console().count(NOT_SAVED)
    wait_for(folder.is_dir, SAVE_SECONDS, "the folder of checkpoints")
    mounted = os.geteuid() == 0 and _mount("--bind", str(folder), str(folder))
    if mounted:
        _remount(folder, "bind,ro")
    else:
        folder.chmod(0o555)
    try:
        wait_for_refusal(attempt, warnings)
    finally:
        if mounted:
            unmount_disk(folder)
        else:
            folder.chmod(0o755)
    return f"{'mounted read-only' if mounted else 'no permission'} until a save had failed"


def remove_checkpoints(attempt: Attempt, rng: random.Random) -> str:
    """Remove all checkpoints while a run uses them."""
    folder = attempt.output / CHECKPOINTS_FOLDER
    names = [path.name for path in folder.glob("*")]
    shutil.rmtree(folder, ignore_errors=True)
    return f"removed {', '.join(sorted(names)) or 'nothing'}"


# ---------------------------------------------------------------- damage to the newest checkpoints


def _newest(output: Path, number: int = 0) -> Path:
    checkpoints, _ = complete_checkpoints(output / CHECKPOINTS_FOLDER)
    return checkpoints[number].folder


def _largest_file(folder: Path) -> Path:
    return max(
        (path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )


def flip_a_bit(attempt: Attempt, rng: random.Random) -> str:
    return _flip_in(attempt.output, _largest_file(_newest(attempt.output)), rng)


def _flip_in(output: Path, path: Path, rng: random.Random) -> str:
    with path.open("r+b") as file:
        place = rng.randrange(path.stat().st_size)
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))
    return f"a bit of byte {place} of {path.relative_to(output)}"


def damage_two(attempt: Attempt, rng: random.Random) -> str:
    """Damage the newest two checkpoints; the one before them stays whole."""
    paths = [_largest_file(_newest(attempt.output, number)) for number in (0, 1)]
    return "; ".join(_flip_in(attempt.output, path, rng) for path in paths)


# ---------------------------------------------------------------- what else stands in the folder


def pretend_end(attempt: Attempt, rng: random.Random) -> str:
    """The status and the summary of a run that has finished, and a lock that nobody holds."""
    write_exit_status(attempt.output, FINISHED, "all 3 steps are done")
    (attempt.output / SUMMARY_FILE).write_text(json.dumps({"steps": 3}))
    (attempt.output / LOCK_FILE).write_text("4711\n")
    return "it looks finished"


def lose_config(attempt: Attempt, rng: random.Random) -> str:
    path = attempt.output / CONFIG_FILE
    if rng.random() < 0.5:
        path.unlink()
        return f"{CONFIG_FILE} removed"
    path.write_bytes(path.read_bytes()[: rng.randrange(200)])
    return f"{CONFIG_FILE} truncated"


def move_folder(attempt: Attempt, rng: random.Random) -> str:
    """Move the run's folder to another place, with a link where it was; or back again."""
    other_place = attempt.output.with_name("elsewhere")
    if attempt.output.is_symlink():
        attempt.output.unlink()
        other_place.rename(attempt.output)
        return "moved back"
    attempt.output.rename(other_place)
    attempt.output.symlink_to(other_place, target_is_directory=True)
    return "moved, a link in its place"


def remove_samples(attempt: Attempt, rng: random.Random) -> str:
    shutil.rmtree(attempt.output / SAMPLES_FOLDER, ignore_errors=True)
    return "samples removed"


@contextlib.contextmanager
def own_disk(folder: Path, is_needed: bool, files_folder: Path) -> Iterator[None]:
    """A disk of its own under the folder, where one is asked for and allowed.

    At the end its files lie in `files_folder`."""
    mounted = is_needed and mount_disk(folder)
    try:
        yield
    finally:
        if mounted:
            shutil.copytree(folder, files_folder, dirs_exist_ok=True, symlinks=True)
            unmount_disk(folder)
