"""Ranks and hosts: places of ranks, reports at a rendezvous, short texts that name many ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

MOST_NAMED = 8


def ranks_text(ranks: Iterable[int]) -> str:
    """Runs of numbers.

    >>> ranks_text([3]), ranks_text([0, 1, 2, 7])
    ('rank 3', 'ranks 0-2, 7')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    is_one_rank = len(runs) == 1 and runs[0][0] == runs[0][1]
    return ("rank " if is_one_rank else "ranks ") + ", ".join(texts)


def hosts_text(hosts: Sequence[str]) -> str:
    """The first few names, and how many more.

    >>> hosts_text(["a", "b"]), hosts_text([f"n{i}" for i in range(10)])
    ('a, b', 'n0, n1, n2, n3, n4, n5, n6, n7 and 2 more')
    """
    ending = f" and {len(hosts) - MOST_NAMED} more" if hosts[MOST_NAMED:] else ""
    return ", ".join(hosts[:MOST_NAMED]) + ending


def environment_world_size() -> int:
    """Ranks of this run from its launcher, 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def environment_rank() -> int:
    """Rank of this process from its launcher, 0 without one."""
    return int(os.environ.get("RANK", "0"))


def local_world_size() -> int | None:
    """Ranks on each node, from the launcher; None where it does not say."""
    size = os.environ.get("LOCAL_WORLD_SIZE")
    return None if size is None else int(size)


@dataclass(frozen=True)
class RankInfo:
    rank: int
    world_size: int
    node: int
    """Number of its node, from 0."""
    local_rank: int
    ranks_per_node: int
    host: str
    pid: int

    @property
    def several_nodes(self) -> bool:
        return self.ranks_per_node < self.world_size

    @property
    def is_node_leader(self) -> bool:
        return self.local_rank == 0

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


def this_rank() -> RankInfo:
    """This rank by the launcher's environment; rank 0 of 1 if that sets nothing."""
    rank = environment_rank()
    world_size = environment_world_size()
    per_node = local_world_size() or world_size
    node = int(os.environ.get("GROUP_RANK", rank // per_node))
    local_rank = int(os.environ.get("LOCAL_RANK", rank % per_node))
    return RankInfo(
        rank,
        world_size,
        node,
        local_rank=local_rank,
        ranks_per_node=per_node,
        host=socket.gethostname(),
        pid=os.getpid(),
    )


@dataclass(frozen=True)
class RankReport:
    """The report that a rank sends at a rendezvous."""

    host: str
    node: int
    problem: str | None = None
    """A mistake that it found; it will not start."""
    may_pass: bool = False
    """The problem is none of the user's: a later start may not have it."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Facts that must be the same on all nodes, by name; sent by one rank of every node."""
    address: str = ""
    """The node's address towards the first one, with its interface: "10.0.0.7 (eth0)".

    One rank of every node sends it."""
    data: str = ""
    """Fingerprint of the data that it has read, if ranks may differ in it."""
    data_makers: str = ""
    """The makers of prompts or sequences, for an error: functions of the user's, the template."""
    gpu: str = ""
    """The rank's GPU, if no other rank may have it."""


@dataclass(frozen=True)
class RendezvousResult:
    """The result that rank 0 draws from the reports."""

    error: str | None = None
    is_mistake: bool = False
    """The user can correct it (raised as ValueError); else something failed."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Values that rank 0 sends to the others."""


def problems_text(problems: Mapping[int, str], reports: Mapping[int, RankReport]) -> str:
    """The problems of ranks, each once with the ranks that have it.

    A problem that all ranks have is unchanged."""
    ranks_of: dict[str, list[int]] = {}
    for rank, problem in sorted(problems.items()):
        ranks_of.setdefault(problem, []).append(rank)
    if len(ranks_of) == 1 and len(problems) == len(reports):
        return next(iter(ranks_of))
    parts = []
    for problem, ranks in ranks_of.items():
        hosts = list(dict.fromkeys(reports[rank].host for rank in ranks))
        parts.append(f"on {hosts_text(hosts)} ({ranks_text(ranks)}): {problem}")
    parts.append(
        f"{len(problems)} of the {len(reports)} ranks that are here found something wrong."
    )
    return "\n".join(parts)
