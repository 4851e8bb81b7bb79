"""The batch script on a real Slurm: a signal leads to a saved run, a telling status, and a place in the queue.

Skips itself where Slurm does not answer. Its nodes must see the repository's outputs/ folder, and need no GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.programs import ENVIRONMENT, REPOSITORY, small_run

START_SECONDS = 300.0
REQUEUE_SECONDS = 420.0
"""A job that is queued again does not begin at once: Slurm waits two minutes."""


def slurm_answers() -> bool:
    if shutil.which("sbatch") is None:
        return False
    return subprocess.run(["sinfo"], capture_output=True, timeout=30, check=False).returncode == 0


pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not slurm_answers(), reason="no Slurm answers"),
]


@pytest.fixture
def output() -> Iterator[Path]:
    """A run's folder that Slurm's nodes see, too."""
    folder = REPOSITORY / "outputs" / f"slurm-test-{uuid.uuid4().hex}"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def submit(place: Path, output: Path, steps: int, **environment: str) -> str:
    """The id of a job on one node with two ranks."""
    shutil.copytree(place / "data", output.parent / output.name / "in" / "data")
    shutil.copytree(place / "base", output.parent / output.name / "in" / "base")
    overrides = (f"run.total_steps={steps}", "save.ckpt_freq_steps=1")
    options = ("--parsable", "--nodes=1", "--gpus-per-node=0", f"--output={output}/job.out")
    settings = small_run(output / "in", output / "run")
    script = ("launch/slurm/train_grpo.sbatch", "configs/demo.yaml", *settings, *overrides)
    more = {"RANKS_PER_NODE": "2", "HEAD_ADDRESS": "127.0.0.1", **environment}
    done = subprocess.run(
        ["sbatch", *options, *script],
        cwd=REPOSITORY,
        env=ENVIRONMENT | more,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def rows(output: Path) -> int:
    path = output / "run" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def job(number: str, key: str) -> str:
    """What Slurm says of a job: its "JobState", "ExitCode", "Restarts"."""
    said = subprocess.run(["scontrol", "show", "job", number], capture_output=True, text=True, check=True)
    return next(word.partition("=")[2] for word in said.stdout.split() if word.startswith(f"{key}="))


def wait_for(condition: Callable[[], bool], seconds: float, output: Path) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, (output / "job.out").read_text()
        time.sleep(1)


def test_a_signal_saves_the_run_which_goes_on_from_the_queue(arithmetic: Path, output: Path) -> None:
    number = submit(arithmetic, output, 12, REQUEUE="1")
    wait_for(lambda: rows(output) >= 2, START_SECONDS, output)
    subprocess.run(["scancel", "--signal=USR1", number], check=True)
    wait_for(lambda: job(number, "Restarts") == "1", START_SECONDS, output)
    assert "status 75 (saved and stopped)" in (output / "job.out").read_text()
    done = rows(output)
    assert 2 <= done < 12
    wait_for(lambda: job(number, "JobState") in ("COMPLETED", "FAILED"), REQUEUE_SECONDS, output)
    assert job(number, "ExitCode") == "0:0", (output / "job.out").read_text()
    steps = [json.loads(line)["step"] for line in (output / "run" / "metrics.jsonl").open()]
    assert steps == list(range(1, 13))


def test_without_requeue_the_job_ends_with_the_status_of_the_run(arithmetic: Path, output: Path) -> None:
    number = submit(arithmetic, output, 5000)
    wait_for(lambda: rows(output) >= 2, START_SECONDS, output)
    subprocess.run(["scancel", "--signal=USR1", number], check=True)
    wait_for(lambda: job(number, "JobState") in ("COMPLETED", "FAILED"), START_SECONDS, output)
    assert job(number, "ExitCode") == f"{os.EX_TEMPFAIL}:0", (output / "job.out").read_text()
