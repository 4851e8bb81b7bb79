"""A run that a drill may disturb: started as a user starts it, watched from outside.

Everything that is known of it is what anybody sees: its files, its console, its processes.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlmath.config.run_files import METRICS_FILE

REPOSITORY = Path(__file__).resolve().parents[1]
_MARK = "RLMATH_DRILL"
LOOK_SECONDS = 0.01
"""How often files are looked for; phases of a tiny run take tens of milliseconds."""
STOP_OPTIONS = (
    "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    "--shutdown-timeout=315",
)
"""So torchrun passes SIGUSR1 on and leaves its ranks the time to save."""


def wait_for(
    condition: Callable[[], bool], seconds: float, event: str, look_seconds: float = LOOK_SECONDS
) -> None:
    """Wait until the condition holds; TimeoutError says what did not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{event} did not come within {seconds:g} s")
        time.sleep(look_seconds)


@dataclass(frozen=True)
class Attempt:
    """One start of the command, from then to its end."""

    launcher: subprocess.Popen[bytes]
    output: Path
    """The run's folder."""
    console_path: Path
    mark: str
    """Mark in the environment of all its processes."""
    lines_before: frozenset[str]
    """Rows of metrics that were there before."""

    @property
    def ended(self) -> bool:
        return self.launcher.poll() is not None

    def new_rows(self) -> list[dict[str, float]]:
        """The rows that this start has written."""
        return [json.loads(line) for line in self._new_lines()]

    def _new_lines(self) -> list[str]:
        return [line for line in metric_lines(self.output) if line not in self.lines_before]

    def rows_or_end(self, count: int, seconds: float) -> list[dict[str, float]]:
        """Its rows, as soon as there are so many, or it has ended."""
        wait_for(
            lambda: self.ended or len(self._new_lines()) >= count,
            seconds,
            f"row {count} of {self.output}",
        )
        return self.new_rows()

    def console(self) -> str:
        return self.console_path.read_text(encoding="utf-8", errors="replace")

    def processes(self) -> list[psutil.Process]:
        """All processes that run with this start's mark, whoever their parent is."""
        marked = []
        for process in psutil.process_iter():
            try:
                if (
                    process.environ().get(_MARK) == self.mark
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    marked.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return marked

    def ranks(self) -> list[psutil.Process]:
        """The ranks that are there: direct children of torchrun."""
        return psutil.Process(self.launcher.pid).children() if not self.ended else []

    def kill_a_rank(self, rng: random.Random) -> str:
        """Send SIGKILL to one of the ranks and return which."""
        ranks = self.ranks()
        if not ranks:
            self.launcher.kill()
            return "no rank yet: torchrun"
        victim = rng.choice(ranks)
        name = rank_name(victim)
        victim.kill()
        return name

    def wait_gone(self, seconds: float) -> list[str]:
        """Wait for the end of all its processes; kill those left and return their commands."""
        try:
            self.launcher.wait(seconds)
            wait_for(
                lambda: not self.processes(), seconds, "the end of its processes", look_seconds=0.2
            )
        except (subprocess.TimeoutExpired, TimeoutError):
            pass
        leftovers = self.processes()
        commands = [" ".join(process.cmdline())[:100] for process in leftovers]
        for process in leftovers:
            process.kill()
        return commands


def rank_name(process: psutil.Process) -> str:
    try:
        return f"rank {process.environ().get('RANK', '?')}"
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return "a rank"


def metric_lines(output: Path, name: str = METRICS_FILE) -> list[str]:
    """Complete lines of a run's file of metrics, without an unfinished last one."""
    path = output / name
    return path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []


def start(
    program: list[str], ranks: int, overrides: list[str], output: Path, console: Path
) -> Attempt:
    """Start a training program, with its `--config`, under torchrun; returns at once."""
    mark = uuid.uuid4().hex
    environment = os.environ | {
        _MARK: mark,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        ),
    }
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        *STOP_OPTIONS,
    ]
    earlier_lines = frozenset(metric_lines(output))
    with console.open("ab") as stream:
        process = subprocess.Popen(
            [sys.executable, *launcher, *program, f"run.output_dir={output}", *overrides],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
        )
    return Attempt(process, output, console, mark=mark, lines_before=earlier_lines)
