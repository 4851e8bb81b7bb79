"""Names the ranks that slow the others down.

Ranks wait for each other in every collective, so the seconds of whole phases are the same on all.
Compared are the seconds in which a rank computes on its own (`ForwardBackward.pop_busy_seconds`:
until the gradients of all are summed), and how long the run's key-value store takes to answer it,
which measures its network. Work is balanced by FLOPs, so a rank that needs longer than those of its
pipeline stage is slower. Ranks of one model replica wait for each other: with a slow one among
them, all of them need longer. One gather of two numbers per rank and step.
"""

from __future__ import annotations

import logging
import socket
import statistics
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from rlmath.distributed.collectives import gather_to_rank_zero
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.ranks import hosts_text

logger = logging.getLogger(__name__)

RECENT_STEPS = 5
"""A rank is slow if it was slow in most of so many steps: one step may be chance."""
SLOW_FACTOR = 1.5
SLOW_SECONDS = 0.5
"""A slow rank exceeds its pipeline stage's usual seconds by such a factor and so many seconds."""
ANSWER_FACTOR = 4.0
ANSWER_SECONDS = 0.25
"""A slow answer of the store takes more than so many times the usual, and so many seconds."""
REPEAT_STEPS = 100
"""The same warning is repeated only after so many steps."""


class StragglerDetector:
    """Finds slow ranks; every rank has one, and rank 0 logs.

    The constructor is a collective."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._hosts = gather_to_rank_zero(socket.gethostname()) or []
        """Host names by rank, on rank 0."""
        self._recent: deque[list[tuple[float, float]]] = deque(maxlen=RECENT_STEPS)
        self._steps = 0
        self._logged_at: dict[str, int] = {}

    def after_step(self, own_seconds: float, wait_seconds: float) -> dict[str, float]:
        """Metrics on rank 0, {} elsewhere; logs warnings.

        A collective of all ranks after every step. `own_seconds` are the seconds that this rank
        computed on its own in the step, `wait_seconds` the longest wait for the store."""
        world_size = self._mesh.world_size
        if world_size == 1:
            return {}
        local_seconds = torch.tensor([own_seconds, wait_seconds], dtype=torch.float64)
        rows = (
            [torch.empty_like(local_seconds) for _ in range(world_size)]
            if self._mesh.rank == 0
            else None
        )
        dist.gather(local_seconds, rows)
        if rows is None:
            return {}
        self._steps += 1
        self._recent.append([(float(row[0]), float(row[1])) for row in rows])
        for label, text in slow_texts(list(self._recent), self._hosts, self._mesh):
            if self._steps - self._logged_at.get(label, -REPEAT_STEPS) >= REPEAT_STEPS:
                self._logged_at[label] = self._steps
                logger.warning("%s", text)
        seconds = [row[0] for row in self._recent[-1]]
        return {
            "seconds/alone_usual": usual(seconds),
            "seconds/alone_slowest": max(seconds),
            "seconds/answer_slowest": max(row[1] for row in self._recent[-1]),
        }


def usual(values: Sequence[float]) -> float:
    """The lower quartile: with two nodes, a slow half is not the reference.

    >>> usual([1.0, 1.1, 2.0, 2.1]), usual([3.0, 1.0])
    (1.1, 1.0)
    """
    return sorted(values)[len(values) // 4]


def slow_texts(
    steps: Sequence[Sequence[tuple[float, float]]], hosts: Sequence[str], mesh: Mesh
) -> list[tuple[str, str]]:
    """Pairs of (label, warning) about ranks that were slow in the recent steps.

    Each step has for each rank the seconds alone, and the seconds until the store answered."""
    if len(steps) < RECENT_STEPS:
        return []
    seconds_alone, answers = (
        [[row[column] for row in step] for step in steps] for column in (0, 1)
    )
    ranks_per_stage = mesh.world_size // mesh.pipeline
    texts = []
    if slow := _slow_ranks(
        seconds_alone, ranks_per_stage, lambda usual: max(SLOW_FACTOR * usual, usual + SLOW_SECONDS)
    ):
        text = (
            "compute longer in a step than others and hold them up: "
            f"{_seconds(seconds_alone, slow, hosts)}. Look for "
        )
        texts.append((f"alone {slow}", f"Slow ranks {text}other programs, heat and clocks there"))
    if slow := _slow_ranks(
        answers, mesh.world_size, lambda usual: max(ANSWER_FACTOR * usual, ANSWER_SECONDS)
    ):
        text = (
            "get later answers from the run's key-value store than others: "
            f"{_seconds(answers, slow, hosts)}. Look "
        )
        texts.append((f"answer {slow}", f"Ranks on a slow network or host {text}at their links"))
    return texts


def _slow_ranks(
    steps: Sequence[Sequence[float]], alike: int, bound: Callable[[float], float]
) -> list[int]:
    """The ranks above the bound in most of the steps and on average.

    Groups of `alike` consecutive ranks are compared."""
    means = [statistics.mean(values) for values in zip(*steps, strict=True)]

    def above(seconds: Sequence[float]) -> set[int]:
        limits = [
            bound(usual(seconds[first : first + alike])) for first in range(0, len(seconds), alike)
        ]
        return {
            rank
            for rank, rank_seconds in enumerate(seconds)
            if rank_seconds > limits[rank // alike]
        }

    ranks_above = [above(seconds) for seconds in steps]
    return sorted(
        rank
        for rank in above(means)
        if 2 * sum(rank in ranks for ranks in ranks_above) > len(steps)
    )


def _seconds(steps: Sequence[Sequence[float]], slow: Sequence[int], hosts: Sequence[str]) -> str:
    """The seconds of slow ranks and the usual ones as text, the slowest first.

    For example "rank 3 on node1 2.40 s, rank 2 on node1 2.00 s; usual are 1.10 s (over 5
    steps)"."""
    means = [statistics.mean(values) for values in zip(*steps, strict=True)]
    slowest = sorted(slow, key=means.__getitem__, reverse=True)
    named = hosts_text([f"rank {rank} on {hosts[rank]} {means[rank]:.2f} s" for rank in slowest])
    return f"{named}; usual are {usual(means):.2f} s (over {RECENT_STEPS} steps)"
