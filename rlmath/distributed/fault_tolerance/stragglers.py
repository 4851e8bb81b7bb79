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
from collections.abc import Mapping, Sequence

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
        if self._mesh.world_size == 1:
            return {}
        mine = torch.tensor([alone, answer], dtype=torch.float64)
        rows = (
            [torch.empty_like(mine) for _ in range(self._mesh.world_size)] if self._mesh.rank == 0 else None
        )
        dist.gather(mine, rows)
        if rows is None:
            return {}
        self._steps += 1
        self._recent.append([(float(row[0]), float(row[1])) for row in rows])
        for text in slow_texts(list(self._recent), self._hosts, self._mesh):
            self._warn(text)
        seconds = [row[0] for row in self._recent[-1]]
        return {
            "seconds/alone_usual": usual(seconds),
            "seconds/alone_slowest": max(seconds),
            "seconds/answer_slowest": max(row[1] for row in self._recent[-1]),
        }

    def _warn(self, found: tuple[str, str]) -> None:
        who, text = found
        if self._steps - self._logged_at.get(who, -REPEAT_STEPS) >= REPEAT_STEPS:
            self._logged_at[who] = self._steps
            logger.warning("%s", text)


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
    ranks = range(mesh.world_size)
    stage_of = {rank: rank // (mesh.world_size // mesh.pipeline) for rank in ranks}
    texts = []
    means = {rank: statistics.mean(step[rank][0] for step in steps) for rank in ranks}
    found = [_slow_alone([row[0] for row in step], stage_of) for step in steps]
    alone = _often(found, _slow_alone(list(means.values()), stage_of))
    if alone:
        texts.append((f"alone {_on(alone, hosts)}", _alone_text(alone, means, hosts)))
    means = {rank: statistics.mean(step[rank][1] for step in steps) for rank in ranks}
    found = [_slow_answers([row[1] for row in step]) for step in steps]
    answers = _often(found, _slow_answers(list(means.values())))
    if answers:
        slowest = max(answers, key=lambda rank: means[rank])
        texts.append(
            (
                f"answer {_on(answers, hosts)}",
                f"A slow network or host: the run's key-value store answers rank {slowest} on {hosts[slowest]} after "
                f"{means[slowest]:.2f} s, others after {usual(list(means.values())):.2f} s (over {RECENT_STEPS} "
                f"steps). Slow: {_on(answers, hosts)}. Look at their links",
            )
        )
    return texts


def _alone_text(slow: Sequence[int], means: Mapping[int, float], hosts: Sequence[str]) -> str:
    slowest = max(slow, key=lambda rank: means[rank])
    return (
        f"A slow rank holds the others up: rank {slowest} on {hosts[slowest]} computes for {means[slowest]:.2f} s a "
        f"step, others for {usual(list(means.values())):.2f} s (over {RECENT_STEPS} steps). Slow: "
        f"{_on(slow, hosts)}. Look for other programs, heat and clocks there"
    )


def _slow_alone(seconds: Sequence[float], stage_of: Mapping[int, int]) -> set[int]:
    found = set()
    for stage in set(stage_of.values()):
        members = [rank for rank in stage_of if stage_of[rank] == stage]
        reference = usual([seconds[rank] for rank in members])
        bound = max(SLOW_FACTOR * reference, reference + SLOW_SECONDS)
        found |= {rank for rank in members if seconds[rank] > bound}
    return found


def _slow_answers(seconds: Sequence[float]) -> set[int]:
    bound = max(ANSWER_FACTOR * usual(seconds), ANSWER_SECONDS)
    return {rank for rank, value in enumerate(seconds) if value > bound}


def _often(found: Sequence[set[int]], on_average: set[int]) -> list[int]:
    """Ranks that are slow in most steps, and on average."""
    return sorted(rank for rank in on_average if 2 * sum(rank in one for one in found) > len(found))


def _on(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """ "ranks 2-3 on node1, rank 7 on node3"."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(rank)
    named = [f"{ranks_text(ranks)} on {host}" for host, ranks in by_host.items()]
    return ", ".join(named[:8]) + (f" and those of {len(named) - 8} more hosts" if named[8:] else "")
