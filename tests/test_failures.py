"""A run that breaks ends soon, says why, and leaves no process behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from rlmath.checkpoint.capture import read_capture
from rlmath.checkpoint.directory import complete_checkpoints
from rlmath.distributed.fault_tolerance.exit_codes import SAVED_AND_STOPPED, read_exit_status
from tests.programs import (
    ENVIRONMENT,
    REPOSITORY,
    TRAIN,
    end_family,
    family,
    run,
    small_run,
    torchrun_command,
    wait_for,
)
from tests.selection import matrix

END_SECONDS = 240.0
"""Time in which a broken run must have ended; far above what it takes, on a busy machine, too."""

pytestmark = pytest.mark.distributed


@contextmanager
def running(
    place: Path,
    output: Path,
    console: Path | None = None,
    path: Path | None = None,
    more: Sequence[str] = (),
) -> Iterator[subprocess.Popen[str]]:
    """A run on 2 ranks that has finished its first step.

    Its console is beside its folder; torchrun leads a process group. `path` is an additional folder
    of modules, `more` are settings."""
    command = torchrun_command(2, *TRAIN, *small_run(place, output), "run.total_steps=5000", *more)
    modules = os.pathsep.join(map(str, filter(None, [REPOSITORY, path])))
    console_path = console or output.with_suffix(".console.txt")
    with console_path.open("w") as console:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=REPOSITORY,
            env=ENVIRONMENT | {"TMPDIR": str(console_path.parent), "PYTHONPATH": modules},
            process_group=0,
            stdout=console,
            stderr=console,
            text=True,
        )
        try:
            metrics = output / "metrics.jsonl"
            wait_for(
                lambda: (
                    (metrics.is_file() and metrics.stat().st_size > 0) or process.poll() is not None
                )
            )
            assert process.poll() is None, console_path.read_text()
            yield process
        finally:
            end_family(process)


def ranks_of(pid: int) -> dict[str, psutil.Process]:
    processes = {}
    for process in family(pid):
        if any("train_grpo.py" in part for part in process.cmdline()):
            processes[process.environ()["RANK"]] = process
    return processes


def assert_all_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=15)
    assert not alive, f"still there: {[process.cmdline() for process in alive]}"


RAISES = """
import signal

def fail(*_):
    raise LookupError("no such prompt")

signal.signal(signal.SIGUSR2, fail)
"""
"""A module that Python imports as it starts."""


@pytest.mark.full
def test_a_rank_that_raises_ends_the_run_and_says_why(arithmetic: Path, tmp_path: Path) -> None:
    output = tmp_path / "raising"
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "sitecustomize.py").write_text(RAISES)
    with running(arithmetic, output, path=tmp_path / "modules") as process:
        everyone = family(process.pid)
        assert len(everyone) >= 4, "two ranks, and the processes that judge for them"
        raise_until_it_ends(ranks_of(process.pid)["0"])
        assert process.wait(END_SECONDS) != 0
        assert_all_gone(everyone)
    console = output.with_suffix(".console.txt").read_text()
    assert "rank 0 on" in console and "failed; the run ends" in console
    assert "LookupError: no such prompt" in console
    assert "LookupError: no such prompt" in (output / "run.log").read_text()
    (captured,) = (output / "captures").iterdir()
    assert "LookupError: no such prompt" in read_capture(captured).reason


@matrix
def test_a_template_that_draws_random_numbers_ends_the_start(
    arithmetic: Path, tmp_path: Path
) -> None:
    """Each rank would sample completions of other prompts."""
    template = tmp_path / "dice.jinja"
    template.write_text("{{ range(1000) | random }}: {{ messages[0].content }}")
    rows = [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(100)]
    rows_file = tmp_path / "rows.jsonl"
    rows_file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    changes = (
        f"data.train_path={rows_file}",
        "data.max_prompt_tokens=128",
        f"data.chat_template={template}",
    )
    command = torchrun_command(2, *TRAIN, *small_run(arithmetic, tmp_path / "run"), *changes)
    process = run(*command, expect=1)
    assert "the data: rank 1 read other prompts than rank 0" in process.stderr
    assert f"and clocks: data.chat_template={template}" in process.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def raise_until_it_ends(rank: psutil.Process) -> None:
    """Send SIGUSR2 until the rank has ended, three times at most.

    A signal may arrive inside a library's callback, from which exceptions do not propagate."""
    for _ in range(3):
        rank.send_signal(signal.SIGUSR2)
        _, alive = psutil.wait_procs([rank], timeout=END_SECONDS / 4)
        if not alive:
            return


def own_lines(console: str) -> list[str]:
    """The lines of the ranks: torchrun prints its own traceback when it is interrupted."""
    return [line for line in console.splitlines() if re.match(r"\d\d:\d\d:\d\d ", line)]


@pytest.mark.full
def test_control_c_saves_and_says_that_the_same_command_resumes(
    arithmetic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal sends SIGINT to the group of torchrun; its ranks have groups of their own.

    Torchrun waits as long as that of `rlmath train`: on a busy machine the first save is slow."""
    monkeypatch.setitem(ENVIRONMENT, "PET_SHUTDOWN_TIMEOUT", "315")
    output = tmp_path / "run"
    with running(arithmetic, output) as process:
        everyone = family(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(END_SECONDS) != 0
        assert_all_gone(everyone)
    console = output.with_suffix(".console.txt").read_text()
    status = read_exit_status(output)
    rows = rows_of(output)
    assert status.status == SAVED_AND_STOPPED, console
    step = rows[-1]["step"]
    assert complete_checkpoints(output / "checkpoints")[0][0].step == step
    lines = own_lines(console)
    saving = f"Saving step {step} in {output}/checkpoints, then the run stops ..."
    (announced,) = (number for number, line in enumerate(lines) if line.endswith(saving))
    (saved,) = (
        number for number, line in enumerate(lines) if f" Checkpoint of step {step}: " in line
    )
    assert "Ctrl-C again ends it at once, without saving" in console and announced < saved, console
    assert lines[-1].endswith(
        f"after step {step}, which is saved: the same command resumes after step {step}"
    ), console
    assert "KeyboardInterrupt" not in console and console.count("Traceback") == console.count(
        "SignalException: "
    ), console
    steps = [
        line
        for line in own_lines(console)
        if re.match(r"\d\d:\d\d:\d\d step +\d+/\d+ reward ", line)
    ]
    assert steps and max(map(len, steps)) <= 80, steps


def rows_of(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
