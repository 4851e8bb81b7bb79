"""What a drill does to a run: each kind disturbs a running attempt, and may damage what it left behind."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlmath.checkpoint.directory import CHECKPOINTS, MANIFEST, PARTIAL, complete_checkpoints
from rlmath.distributed.fault_tolerance.exit_codes import FAILURE, SAVED_AND_STOPPED
from tools.drill_run import Attempt, rank_name, wait_for

SAVE_SECONDS = 60.0
"""By when a run that saves after every step begins to save again."""
DISK_SIZE = "3g"
FILE_LIMIT_BYTES = 2**18

Act = Callable[[Attempt, random.Random], str]


@dataclass(frozen=True)
class Kind:
    """A disturbance."""

    act: Act
    """Does it to a run; says what was done."""
    statuses: tuple[int, ...] = (FAILURE,)
    """What the run may end with."""
    rows: int | None = 2
    """Steps that the run makes before. None: it is disturbed while it starts."""
    spoil: Callable[[Path, random.Random], str] | None = None
    """What is done to the folder after the run has ended."""


# ---------------------------------------------------------------- at a moment of a step


def step_seconds(attempt: Attempt) -> float:
    """Of its quickest step: the first ones compile and warm up."""
    return min(row["seconds/step"] for row in attempt.new_rows())


def kill_any_time(attempt: Attempt, rng: random.Random) -> str:
    time.sleep(rng.uniform(0.0, 2.0) * step_seconds(attempt))
    return attempt.kill_a_rank(rng)


def kill_at_start(attempt: Attempt, rng: random.Random) -> str:
    time.sleep(rng.uniform(0.5, 15.0))
    return attempt.kill_a_rank(rng)


def kill_in(phase: str) -> Act:
    """SIGKILL while the next step is in that phase: rows say how long phases take, and when a step ends."""
    before = {"sync": (), "rollout": ("sync",), "update": ("sync", "rollout")}[phase]

    def act(attempt: Attempt, rng: random.Random) -> str:
        count = len(attempt.new_rows())
        row = attempt.rows_or_end(count + 1, SAVE_SECONDS)[-1]
        start = sum(row.get(f"seconds/{name}", 0.0) for name in ("save", *before))
        time.sleep(start + rng.random() * row.get(f"seconds/{phase}", 0.0))
        return attempt.kill_a_rank(rng)

    return act


def _wait_for_save(attempt: Attempt) -> None:
    folder = attempt.output / CHECKPOINTS
    wait_for(lambda: attempt.ended or any(folder.glob(f"*{PARTIAL}")), SAVE_SECONDS, "a save")


def kill_in_save(attempt: Attempt, rng: random.Random) -> str:
    _wait_for_save(attempt)
    time.sleep(rng.uniform(0.0, 0.08))
    told = attempt.kill_a_rank(rng)
    partial = [path.name for path in (attempt.output / CHECKPOINTS).glob(f"*{PARTIAL}")]
    return f"{told}, leaving {', '.join(partial) or 'nothing half done'}"


# ---------------------------------------------------------------- signals


def to_launcher(number: signal.Signals) -> Act:
    def act(attempt: Attempt, rng: random.Random) -> str:
        time.sleep(rng.random() * step_seconds(attempt))
        attempt.launcher.send_signal(number)
        return "torchrun"

    return act


def to_a_rank(number: signal.Signals) -> Act:
    def act(attempt: Attempt, rng: random.Random) -> str:
        time.sleep(rng.random() * step_seconds(attempt))
        victim = rng.choice(attempt.ranks())
        name = rank_name(victim)
        victim.send_signal(number)
        return name

    return act


# ---------------------------------------------------------------- the disk


def mount_disk(folder: Path) -> bool:
    """Put a small disk of its own (tmpfs) under a folder; False where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_SIZE}", "tmpfs", str(folder)]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0


def unmount_disk(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], check=True)


def _resize(folder: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)


def fill_disk(attempt: Attempt, rng: random.Random) -> str:
    """No byte more fits: from now on, or from the middle of a save on. Where there is no disk of the run's own, no file
    of its processes may grow beyond FILE_LIMIT_BYTES. A run that goes on without saving is then killed."""
    moment = rng.choice(["before a save", "in a save"])
    if moment == "in a save":
        _wait_for_save(attempt)
    disk = attempt.output.parent
    if os.path.ismount(disk):
        there = os.statvfs(disk)
        _resize(disk, str((there.f_blocks - there.f_bfree) * there.f_frsize + 2**16))
        told = f"full {moment}"
    else:
        for process in attempt.processes():
            process.rlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT_BYTES, resource.RLIM_INFINITY))
        told = f"files limited {moment}"
    shown = attempt.console().count("was not saved")
    wait_for(
        lambda: attempt.ended or attempt.console().count("was not saved") > shown,
        SAVE_SECONDS,
        "a word about the full disk",
    )
    if attempt.ended:
        return f"{told}, the run ended by itself"
    return f"{told}, the run went on, killed {attempt.kill_a_rank(rng)}"


def free_disk(output: Path, rng: random.Random) -> str:
    if os.path.ismount(output.parent):
        _resize(output.parent, DISK_SIZE)
    return "room again"


# ---------------------------------------------------------------- damage to the newest checkpoint


def _newest(output: Path) -> Path:
    found, _ = complete_checkpoints(output / CHECKPOINTS)
    return found[0].folder


def _largest_file(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def truncate(output: Path, rng: random.Random) -> str:
    path = _largest_file(_newest(output))
    os.truncate(path, rng.randrange(path.stat().st_size))
    return f"truncated {path.relative_to(output)}"


def flip_a_bit(output: Path, rng: random.Random) -> str:
    path = _largest_file(_newest(output))
    with path.open("r+b") as file:
        place = rng.randrange(path.stat().st_size)
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))
    return f"a bit of byte {place} of {path.relative_to(output)}"


def make_unreadable(output: Path, rng: random.Random) -> str:
    path = _newest(output) / MANIFEST
    path.unlink()
    path.mkdir()
    return f"a folder in the place of {path.relative_to(output)}"


KINDS: dict[str, Kind] = {
    "kill": Kind(kill_any_time),
    "kill-start": Kind(kill_at_start, rows=None),
    "kill-save": Kind(kill_in_save),
    "kill-sync": Kind(kill_in("sync")),
    "kill-rollout": Kind(kill_in("rollout")),
    "kill-update": Kind(kill_in("update")),
    # Without torchrun ranks can still save, but not end a rollout in which engines share the work over its store.
    "kill-launcher": Kind(to_launcher(signal.SIGKILL), (SAVED_AND_STOPPED, FAILURE)),
    "sigterm": Kind(to_launcher(signal.SIGTERM), (SAVED_AND_STOPPED,)),
    "sigusr1": Kind(to_a_rank(signal.SIGUSR1), (SAVED_AND_STOPPED,)),
    "disk-full": Kind(fill_disk, spoil=free_disk),
    "truncated": Kind(kill_any_time, rows=4, spoil=truncate),
    "bit-flip": Kind(kill_any_time, rows=4, spoil=flip_a_bit),
    "unreadable": Kind(kill_any_time, rows=4, spoil=make_unreadable),
}
"""By name, as `--kinds` takes them."""
