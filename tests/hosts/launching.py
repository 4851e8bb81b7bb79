"""torchrun on all hosts of a cluster, and what came of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.hosts.cluster import PORT, Node, Program

RANKS = 2
"""Ranks on each node."""


@dataclass
class Launch:
    """A program under torchrun on all nodes."""

    programs: list[Program]

    def end_within(self, seconds: float) -> list[int]:
        deadline = time.monotonic() + seconds
        return [
            program.ends_within(max(1.0, deadline - time.monotonic())) for program in self.programs
        ]

    @property
    def consoles(self) -> str:
        return "\n".join(
            f"== {program.console_path.name}\n{program.console}" for program in self.programs
        )

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            ended = [program for program in self.programs if program.process.poll() is not None]
            assert not ended, self.consoles[-8000:]
            assert time.monotonic() < deadline, f"not within {seconds} s:\n{self.consoles[-8000:]}"
            time.sleep(0.05)


def launch(
    nodes: Sequence[Node],
    console: Path,
    *program: str,
    count: int | None = None,
    options: Sequence[str] = (),
    **environment: str,
) -> Launch:
    """Start it on these nodes, of `count` that torchrun is to wait for."""
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={count or len(nodes)}",
        f"--nproc-per-node={RANKS}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=node0:{PORT}",
        "--rdzv-id=test",
        *options,
    )
    return Launch([node.start([*torchrun, *program], console, environment) for node in nodes])
