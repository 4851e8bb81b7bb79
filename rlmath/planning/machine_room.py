"""Room on this machine for the ranks of a run: a GPU for each, or cores and memory for all.

`rlmath train`, `sft`, `eval`, `replay` and `demo` start no more ranks than that unless
OVERSUBSCRIBE asks for it, and a dry run for the CPU says so. torchrun and Slurm start as many as
they are told to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from rlmath.config.help import counted
from rlmath.distributed.memory import total_bytes

GIB = 2**30
OVERSUBSCRIBE = "--oversubscribe"
RANKS_PER_CORE = 4
"""Most ranks of a core.

A rank computes with one thread at least, and waits for the others in every collective."""
FEW_RANKS = 8
"""Ranks that are never too many for the cores: enough for a small model in any layout."""
PROCESS_GIB = 0.6
"""Memory of the processes of a rank on CPU, beside what is planned.

These are torch, vLLM, reward workers and the writer of checkpoints. Measured, with shared memory
divided among the ranks: 0.79 GiB for a rank of the demo, of which 0.17 are planned."""


@dataclass(frozen=True)
class Machine:
    """Resources that ranks share: GPUs that a run may use, else cores and memory (bytes)."""

    gpus: int
    cores: int
    memory: int

    @property
    def most_ranks(self) -> int:
        return self.gpus or max(RANKS_PER_CORE * self.cores, FEW_RANKS)

    def __str__(self) -> str:
        """ "2 GPUs", "2 cores"."""
        return counted(self.gpus, "GPU") if self.gpus else counted(self.cores, "core")


def this_machine(gpus: int) -> Machine:
    """This machine with so many GPUs, and the cores and the memory that this process may use."""
    return Machine(gpus, cores=len(os.sched_getaffinity(0)), memory=total_bytes())


def room_problems(ranks: int, machine: Machine, planned_bytes: int = 0) -> Iterator[str]:
    """Problems of so many ranks on this machine.

    On CPU `planned_bytes` is what all of them hold by the plan.

    >>> machine = Machine(gpus=0, cores=2, memory=24 * GIB)
    >>> print(next(room_problems(64, machine)))
    64 ranks on 2 cores: they compute at the same time, and above 8 they mostly wait for each other.
    """
    if machine.gpus:
        if ranks > machine.gpus:
            yield f"{counted(ranks, 'rank')} on {machine}: every rank takes a GPU of its own."
        return
    if ranks > machine.most_ranks:
        yield (
            f"{counted(ranks, 'rank')} on {machine}: they compute at the same time, and above "
            f"{machine.most_ranks} "
            "they mostly wait for each other."
        )
    needed = planned_bytes + int(ranks * PROCESS_GIB * GIB)
    if needed > machine.memory:
        yield (
            f"{counted(ranks, 'rank', 'need')} about {needed / GIB:.1f} GiB "
            f"({planned_bytes / GIB:.1f} planned, "
            f"{PROCESS_GIB:g} for the processes of each), and this machine has "
            f"{machine.memory / GIB:.1f}: the kernel "
            "would kill the run."
        )


def room_advice(ranks: int) -> str:
    """The advice that follows the problems of so many ranks."""
    change = "Start fewer" if ranks > 1 else "Take a smaller model or shorter sequences"
    return f"{change}, or say {OVERSUBSCRIBE}."


def refuse_crowding(ranks: int, machine: Machine, planned_bytes: int = 0) -> None:
    """Raise a ValueError where this machine has no room for so many ranks."""
    if problems := list(room_problems(ranks, machine, planned_bytes)):
        raise ValueError(f"{' '.join(problems)} {room_advice(ranks)}")
