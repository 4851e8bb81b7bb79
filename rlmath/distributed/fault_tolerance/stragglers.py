"""Names the ranks that slow the others down.

Ranks wait for each other in every collective, so the seconds of whole phases are the same on all. Compared are the
seconds in which a rank computes on its own (`ForwardBackward.pop_busy_seconds`: until the gradients of all are summed),
and how long the run's key-value store takes to answer it, which measures its network. Work is balanced by FLOPs, so a
rank that needs longer than those of its pipeline stage is slower. Ranks of one model replica wait for each other: with
a slow one among them, all of them need longer.

One gather of two numbers per rank and step.
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
from rlmath.distributed.ranks import ranks_text

logger = logging.getLogger(__name__)

RECENT_STEPS = 5
"""A rank is slow if it was slow in most of so many steps: one step may be chance."""
SLOW_FACTOR = 1.5
"""A slow rank takes at least so many times the usual seconds of its pipeline stage,"""
SLOW_SECONDS = 0.5
"""and so many seconds more: on shared cores, short steps vary by chance."""
ANSWER_SECONDS = 0.25
"""An answer of the store is slow if it takes longer (seconds) and ANSWER_FACTOR times the usual."""
ANSWER_FACTOR = 4.0
REPEAT_STEPS = 100
"""The same warning is repeated only after so many steps."""

Bound = Callable[[float], float]
"""The most seconds of a rank that is not slow, from the usual ones."""


class StragglerDetector:
    """On every rank; rank 0 logs. The constructor is a collective."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._hosts = gather_to_rank_zero(socket.gethostname()) or []
        """By rank, on rank 0."""
        self._recent: deque[list[tuple[float, float]]] = deque(maxlen=RECENT_STEPS)
        self._steps = 0
        self._logged_at: dict[str, int] = {}

    def after_step(self, alone: float, answer: float) -> dict[str, float]:
        """Returns metrics on rank 0, {} elsewhere; logs warnings. A collective of all ranks after every step.

        `alone` are the seconds that this rank computed on its own in the step, `answer` the longest wait for the
        store."""
        world_size = self._mesh.world_size
        if world_size == 1:
            return {}
        mine = torch.tensor([alone, answer], dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(world_size)] if self._mesh.rank == 0 else None
        dist.gather(mine, rows)
        if rows is None:
            return {}
        self._steps += 1
        self._recent.append([(float(row[0]), float(row[1])) for row in rows])
        for who, text in slow_texts(list(self._recent), self._hosts, self._mesh):
            if self._steps - self._logged_at.get(who, -REPEAT_STEPS) >= REPEAT_STEPS:
                self._logged_at[who] = self._steps
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
    """(who, warning) of the recent steps, each by rank (seconds alone, seconds until the store answered)."""
    if len(steps) < RECENT_STEPS:
        return []
    kinds: tuple[tuple[str, int, Bound], ...] = (
        ("alone", mesh.world_size // mesh.pipeline, lambda x: max(SLOW_FACTOR * x, x + SLOW_SECONDS)),
        ("answer", mesh.world_size, lambda x: max(ANSWER_FACTOR * x, ANSWER_SECONDS)),
    )
    texts = []
    for column, (kind, alike, bound) in enumerate(kinds):
        by_step = [[row[column] for row in step] for step in steps]
        means = [statistics.mean(values) for values in zip(*by_step, strict=True)]
        found = [_slow(values, alike, bound) for values in by_step]
        on_average = _slow(means, alike, bound)
        slow = sorted(rank for rank in on_average if 2 * sum(rank in one for one in found) > len(steps))
        if not slow:
            continue
        slowest = max(slow, key=means.__getitem__)
        who, seconds = f"rank {slowest} on {hosts[slowest]}", f"{means[slowest]:.2f} s"
        others, where = f"{usual(means):.2f} s (over {RECENT_STEPS} steps)", _on(slow, hosts)
        if kind == "alone":
            text = (
                f"A slow rank holds the others up: {who} computes for {seconds} a step, others for {others}. "
                f"Slow: {where}. Look for other programs, heat and clocks there"
            )
        else:
            text = (
                f"A slow network or host: the run's key-value store answers {who} after {seconds}, others after "
                f"{others}. Slow: {where}. Look at their links"
            )
        texts.append((f"{kind} {where}", text))
    return texts


def _slow(seconds: Sequence[float], alike: int, bound: Bound) -> set[int]:
    """The ranks above the bound; compared are so many consecutive ones at a time."""
    found: set[int] = set()
    for first in range(0, len(seconds), alike):
        most = bound(usual(seconds[first : first + alike]))
        found |= {rank for rank in range(first, first + alike) if seconds[rank] > most}
    return found


def _on(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """ "ranks 2-3 on node1, rank 7 on node3"."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(rank)
    named = [f"{ranks_text(ranks)} on {host}" for host, ranks in by_host.items()]
    return ", ".join(named[:8]) + (f" and those of {len(named) - 8} more hosts" if named[8:] else "")
