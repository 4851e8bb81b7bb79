"""Runs in the queue, submitted by launch/slurm/submit.py as a user does."""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from launch.slurm.submit import main
from rlmath.telemetry.metrics_writer import without_times
from tests.programs import REPOSITORY
from tests.slurm.cluster import Cluster

START_SECONDS = 180.0
"""The time in which a job has made its first steps on a busy machine."""
END_SECONDS = 240.0
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")
TWO_NODES = ("--nodes=2", "--gpus-per-node=0", "--ranks-per-node=1", "--time=30")


@dataclass(frozen=True)
class Submitted:
    """A run, and its jobs: one, or the links of a chain."""

    cluster: Cluster
    output: Path
    logs: Path
    jobs: tuple[str, ...]

    def said(self, link: int = 0) -> str:
        """What the job's own log holds."""
        path = self.logs / f"{self.jobs[link]}.out"
        return path.read_text() if path.exists() else ""

    def rows(self) -> list[dict[str, Any]]:
        """Metrics, without times."""
        path = self.output / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return [without_times(row, "sync/") for row in rows]

    def last_step(self) -> int:
        rows = self.rows()
        return rows[-1]["step"] if rows else 0

    def state(self, link: int = 0) -> str:
        return self.cluster.job(self.jobs[link], "JobState")

    def wait_for_step(self, step: int) -> None:
        self.cluster.wait_for(
            lambda: self.last_step() >= step or self.state() in ENDED, START_SECONDS, self.log
        )
        assert self.state() not in ENDED, self.said()

    def wait_for_state(self, *states: str, link: int = 0) -> str:
        """The first of these that the job is in."""
        self.cluster.wait_for(lambda: self.state(link) in states, END_SECONDS, self.log)
        return self.state(link)

    def wait_for_requeue(self, restarts: int) -> None:
        """The job is in the queue again.

        What Slurm has it wait for, two minutes, is cut to a few seconds (not to none: in the second
        of its end the nodes would still take it for the start that ended)."""
        self.cluster.wait_for(
            lambda: self.cluster.job(self.jobs[0], "Restarts") == str(restarts),
            END_SECONDS,
            self.log,
        )
        self.wait_for_state("PENDING", "RUNNING")
        self.cluster.ask("scontrol", "update", f"JobId={self.jobs[0]}", "StartTime=now+3seconds")

    @property
    def log(self) -> Path:
        return self.logs / f"{self.jobs[0]}.out"


@dataclass(frozen=True)
class Submitter:
    """Calls the program from a folder; what it has left in the queue goes with it."""

    cluster: Cluster
    folder: Path
    functions: Path | None = None
    """One more folder of modules."""

    def __enter__(self) -> Submitter:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel_all()

    def call(self, *arguments: str) -> tuple[int, str, str]:
        """Its status, what it printed, and what it said of mistakes."""
        environment = self.cluster.environment | {"PYTHONPATH": str(self.functions or "")}
        with mock.patch.dict(os.environ, environment), contextlib.chdir(self.folder):
            return called(*arguments)

    def submit(self, output: Path, *arguments: str) -> Submitted:
        status, out, err = self.call(*arguments)
        assert status == 0, err
        line = next(line for line in out.splitlines() if line.startswith("Queued as job "))
        numbers = line.removeprefix("Queued as job ").partition(",")[0].split()
        logs = next(line.split()[1] for line in out.splitlines() if line.startswith("  script"))
        return Submitted(self.cluster, output, Path(logs).parent, tuple(numbers))

    def queue(self) -> list[str]:
        """Numbers of the jobs that are queued or run."""
        return self.cluster.ask("squeue", "--noheader", "--format=%A").split()

    def cancel_all(self) -> None:
        for number in self.queue():
            self.cluster.ask("scancel", number)
        deadline = time.monotonic() + END_SECONDS
        while self.queue():
            assert time.monotonic() < deadline, "jobs that cannot be cancelled"
            time.sleep(0.2)


def called(*arguments: str) -> tuple[int, str, str]:
    """The same of the program as it is called in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(list(arguments))
        except SystemExit as end:
            status = int(end.code or 0)
    return status, out.getvalue(), err.getvalue()


def config(name: str) -> str:
    return f"--config={REPOSITORY / 'configs' / name}"
