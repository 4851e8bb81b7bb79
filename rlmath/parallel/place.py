"""Where a rank is, and what is said where ranks meet."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlmath.parallel.device import environment_rank, environment_world_size, local_world_size
from rlmath.parallel.names import hosts_text, ranks_text


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

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
    def speaks_for_node(self) -> bool:
        return self.local_rank == 0

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


def my_place() -> Place:
    """As the launcher's environment says. Without one this is the only rank."""
    rank, world_size = environment_rank(), environment_world_size()
    per_node = local_world_size() or world_size
    node = int(os.environ.get("GROUP_RANK", rank // per_node))
    local_rank = int(os.environ.get("LOCAL_RANK", rank % per_node))
    return Place(rank, world_size, node, local_rank, per_node, socket.gethostname(), os.getpid())


@dataclass(frozen=True)
class Word:
    """What a rank has to say at a roll call."""

    host: str
    node: int
    problem: str | None = None
    """A mistake that it found; it will not go on."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What must be the same on all nodes, by name; of one rank of every node."""
    address: str = ""
    """By which the node reaches the first one, with its interface: "10.0.0.7 (eth0)"; of one rank of every node."""


@dataclass(frozen=True)
class Decision:
    """What rank 0 makes of a roll call."""

    error: str | None = None
    is_mistake: bool = False
    """The user can put it right: a ValueError; else something failed."""


def problems_text(problems: Mapping[int, str], said: Mapping[int, Word]) -> str:
    """What ranks found wrong, each problem once with the ranks that have it; as it stands where all have it."""
    ranks_of: dict[str, list[int]] = {}
    for rank, problem in sorted(problems.items()):
        ranks_of.setdefault(problem, []).append(rank)
    if len(ranks_of) == 1 and len(problems) == len(said):
        return next(iter(ranks_of))
    parts = []
    for problem, ranks in ranks_of.items():
        hosts = list(dict.fromkeys(said[rank].host for rank in ranks))
        parts.append(f"on {hosts_text(hosts)} ({ranks_text(ranks)}): {problem}")
    return "\n".join(
        [*parts, f"{len(problems)} of the {len(said)} ranks that are here found something wrong."]
    )
