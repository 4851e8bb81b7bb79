"""The repository's programs, started as a user starts them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from rlmath.telemetry.metrics_writer import without_times

REPOSITORY = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
TRAIN = ("launch/train_grpo.py", "--config", "configs/demo.yaml")


def wait_for(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"nothing happened within {seconds} s"
        time.sleep(0.05)


def run(
    *command: str,
    expect: int = 0,
    path: Path | None = None,
    timeout: float = 900.0,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python command` in the repository to its end.

    `path` is an additional folder of modules, `variables` are additions to the environment."""
    modules = str(REPOSITORY) if path is None else f"{REPOSITORY}{os.pathsep}{path}"
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=REPOSITORY,
        env=ENVIRONMENT | {"PYTHONPATH": modules} | dict(variables or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except BaseException:  # an interrupt, too
        end_family(process)
        raise
    assert process.returncode == expect, output + errors
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


STARTS = """
import runpy, sys
sys.modules["torch"] = None
for program, *words in {starts!r}:
    sys.argv = [program, *words]
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as ended:
        print("ended with", ended.code, file=sys.stderr)
"""
"""Programs one after the other in one process, in which torch cannot be imported."""


def start_without_torch(
    starts: Sequence[Sequence[str]], variables: Mapping[str, str] | None = None
) -> list[str]:
    """What each of these programs, with its words, says before it ends with status 2."""
    console = run("-c", STARTS.format(starts=starts), variables=variables).stderr
    *messages, remainder = console.split("ended with 2\n")
    assert len(messages) == len(starts) and remainder == "" and "Traceback" not in console, console
    return messages


def free_port() -> int:
    """A port that nobody listens on; somebody may before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def family(pid: int) -> list[psutil.Process]:
    """All descendants of a process."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def end_family(process: subprocess.Popen) -> None:
    """Kill a program and all that it has started.

    A launcher that is killed alone leaves its ranks."""
    for member in [*family(process.pid), process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def torchrun_command(ranks: int, *arguments: str) -> list[str]:
    """The command line of a program under torchrun on this machine."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return [*launcher, *arguments]


def small_run(place: Path, output: Path) -> list[str]:
    """Overrides of the demo's config: a few prompts, a small cache.

    `place` has `data/` and `base/`, whose random model never answers: the entropy gives every step
    an update."""
    return [
        f"run.output_dir={output}",
        f"model.path={place}/base",
        f"data.train_path={place}/data/train.jsonl",
        "data.prompts_per_step=8",
        "optimizer.warmup_steps=1",
        "rollout.group_size=4",
        "rollout.cpu_kv_cache_gib=0.1",
        "algorithm.n_minibatches=2",
        "algorithm.entropy_coef=0.01",
    ]


def metric_rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, float]]:
    """The rows of a run's file."""
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, float]]:
    """The rows without what the clock makes of them: those of equal runs are equal."""
    return [without_times(row) for row in metric_rows(folder, name)]
