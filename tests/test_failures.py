"""A run that breaks ends soon, says why, and leaves no process behind."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

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
def running(place: Path, output: Path) -> Iterator[subprocess.Popen[str]]:
    """A run on 2 ranks that has finished its first step, with its console beside its folder."""
    command = torchrun_command(2, *TRAIN, *small_run(place, output), "run.total_steps=5000")
    console_path = output.with_suffix(".console.txt")
    with console_path.open("w") as console:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=REPOSITORY,
            env=ENVIRONMENT,
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
        wait_for((output / "samples" / "step-000001.jsonl").is_file)  # a step's metrics are written before
        (output / "samples").rename(output / "samples-gone")
        (output / "samples").write_text("in the way")
        assert process.wait(END_SECONDS) != 0
        assert_all_gone(everyone)
    console = output.with_suffix(".console.txt").read_text()
    assert "rank 0 on" in console and "failed; the run ends" in console
    assert "FileExistsError" in console or "NotADirectoryError" in console


@pytest.mark.full  # tests/guard kills ranks of a smaller program, the drill those of a run
def test_a_killed_rank_ends_the_run(arithmetic: Path, tmp_path: Path) -> None:
    with running(arithmetic, tmp_path / "killed") as process:
        everyone = family(process.pid)
        ranks_of(process.pid)["1"].kill()
        assert process.wait(END_SECONDS) != 0
        assert_all_gone(everyone)
