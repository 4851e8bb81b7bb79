"""A run that breaks ends soon, says why, and leaves no process behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from rlmath.checkpoint.directory import complete_checkpoints
from rlmath.distributed.fault_tolerance.exit_codes import FAILURE, SAVED_AND_STOPPED, read_exit_status
from tests.disks import remount, shrink, small_disk
from tests.programs import (
    ENVIRONMENT,
    REPOSITORY,
    TRAIN,
    end_family,
    family,
    small_run,
    torchrun_command,
)
from tests.selection import matrix

END_SECONDS = 90.0
"""By when a broken run must have ended; far above what it takes, on a busy machine, too."""

pytestmark = pytest.mark.distributed


@contextmanager
def running(place: Path, output: Path, console: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """A run on 2 ranks that has finished its first step, with its console beside its folder."""
    command = torchrun_command(2, *TRAIN, *small_run(place, output), "run.total_steps=5000")
    console_path = console or output.with_suffix(".console.txt")
    with console_path.open("w") as console:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=REPOSITORY,
            env=ENVIRONMENT | {"TMPDIR": str(console_path.parent)},
            stdout=console,
            stderr=console,
            text=True,
        )
        try:
            metrics = output / "metrics.jsonl"
            wait_for(lambda: (metrics.is_file() and metrics.stat().st_size > 0) or process.poll() is not None)
            assert process.poll() is None, console_path.read_text()
            yield process
        finally:
            end_family(process)


def wait_for(condition) -> None:
    deadline = time.monotonic() + END_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"nothing happened within {END_SECONDS} s"
        time.sleep(0.1)


def ranks_of(pid: int) -> dict[str, psutil.Process]:
    found = {}
    for process in family(pid):
        if any("train_grpo.py" in part for part in process.cmdline()):
            found[process.environ()["RANK"]] = process
    return found


def assert_all_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=15)
    assert not alive, f"still there: {[one.cmdline() for one in alive]}"


@matrix
def test_a_rank_that_raises_ends_the_run_and_says_why(arithmetic: Path, tmp_path: Path) -> None:
    output = tmp_path / "raising"
    with running(arithmetic, output) as process:
        everyone = family(process.pid)
        assert len(everyone) >= 4, "two ranks, and the processes that judge for them"
        ranks_of(process.pid)["0"].send_signal(signal.SIGINT)
        assert process.wait(END_SECONDS) != 0
        assert_all_gone(everyone)
    console = output.with_suffix(".console.txt").read_text()
    assert "rank 0 on" in console and "failed; the run ends" in console
    assert "KeyboardInterrupt" in console


@pytest.mark.full  # tests/guard kills ranks of a smaller program, the drill those of a run
def test_a_killed_rank_ends_the_run(arithmetic: Path, tmp_path: Path) -> None:
    with running(arithmetic, tmp_path / "killed") as process:
        everyone = family(process.pid)
        ranks_of(process.pid)["1"].kill()
        assert process.wait(END_SECONDS) != 0
        assert_all_gone(everyone)


@matrix
def test_what_the_disk_refuses_of_the_telemetry_costs_no_step(arithmetic: Path, tmp_path: Path) -> None:
    """Space and inodes run out, come back, and run out again: no row is missing, and the status is there."""
    with small_disk(tmp_path / "disk", "3g", 10_000) as disk:
        output, console = disk / "run", tmp_path / "run.console.txt"
        with running(arithmetic, output, console) as process:
            shrink(disk)
            wait_for(lambda: "samples cannot be written" in console.read_text())
            there, made = len(rows_of(output)), steps_in(console)
            assert not list(tmp_path.glob("*wandb*")), "which a rank that is killed would leave"
            wait_for(lambda: steps_in(console) >= made + 3)
            assert len(rows_of(output)) == there and process.poll() is None
            remount(disk, "3g", 10_000)
            wait_for(lambda: len(rows_of(output)) > there + 3)
            shrink(disk)
            wait_for(lambda: console.read_text().count("samples cannot be written") == 2)
            process.terminate()
            assert process.wait(END_SECONDS) != 0
        told, status, rows = console.read_text(), read_exit_status(output), rows_of(output)
        assert status.status == FAILURE and "which could not be saved" in status.message, told
        assert "No space left on device" in told.partition("was not saved:")[2].splitlines()[0], told
        assert "Not written, as the disk refused it" in told
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)) and len(rows) > there + 3
        assert not list(output.glob(".exit_status*"))


@matrix
def test_a_killed_torchrun_leaves_ranks_that_finish_the_step_save_and_stop(
    arithmetic: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    with running(arithmetic, output) as process:
        everyone = family(process.pid)
        process.kill()
        _, alive = psutil.wait_procs(everyone, timeout=END_SECONDS)
        told = output.with_suffix(".console.txt").read_text()
        assert not alive, told
    status, rows = read_exit_status(output), rows_of(output)
    assert status.status == SAVED_AND_STOPPED, told
    assert complete_checkpoints(output / "checkpoints")[0][0].step == rows[-1]["step"]
    assert told.count("saves after this step") == 1 and told.count("has ended") == 1, told


def rows_of(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def steps_in(console: Path) -> int:
    return console.read_text().count(" finishes. ")
