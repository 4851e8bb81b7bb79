"""What a cluster can do at most."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlmath.config.gpu_specs import GPUS
from rlmath.config.help import nearest_word
from rlmath.config.schema import Config
from rlmath.planning.memory_estimate import Target

CPU = "CPU"
RANKS_PER_NODE = 8
"""GPUs of a server, where nothing else is given."""


@dataclass(frozen=True)
class Machine:
    """One device and its links; bytes and FLOPs per second, one direction."""

    name: str
    kind: str
    """"cpu" or "cuda"."""
    flops: float
    memory: float
    node: float
    """To the other devices of its node."""
    network: float
    """To other nodes."""
    host: float
    """To the host's memory."""


CPU_CORE = Machine(CPU, "cpu", 50e9, 10e9, 2e9, 1e9, 10e9)
"""A rank on a core of its own, in float32. Round figures of a server's core with AVX-512 and of messages through its
memory: a calibration measures what they are worth on a given machine."""


@dataclass(frozen=True)
class Cluster:
    """Ranks on nodes, one rank for each device."""

    machine: Machine
    nodes: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks_per_node < 1:
            given = f"{self.nodes} nodes of {self.ranks_per_node} ranks"
            raise ValueError(
                f"the cluster has {given}; needed: at least 1 of each (--nodes, --gpus-per-node)"
            )

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def first(self, ranks: int) -> Cluster:
        """The nodes that the first so many ranks are on, the last of them perhaps in part.

        >>> cluster = Cluster(CPU_CORE, nodes=4, ranks_per_node=8)
        >>> cluster.first(6).nodes, cluster.first(6).ranks, cluster.first(12).nodes
        (1, 6, 2)
        """
        return Cluster(self.machine, -(-ranks // self.ranks_per_node), min(ranks, self.ranks_per_node))

    def in_a_node(self, span: int) -> bool:
        """Whether every block of `span` ranks in a row, beginning at a multiple of it, lies in one node."""
        return self.nodes == 1 or self.ranks_per_node % span == 0

    def describe(self) -> str:
        per_node = f"{self.ranks_per_node} {self.machine.name}"
        if self.nodes == 1:
            return f"1 node of {per_node}"
        return f"{self.nodes} nodes of {per_node}, {self.machine.network * 8 / 1e9:g} Gbit/s each"


def on_gpu(config: Config, name: str | None) -> Config:
    """The settings with the GPU that a plan is for, or "CPU"; None: unchanged."""
    if name is None:
        return config
    memory = replace(config.memory, gpu=None if name == CPU else name, gpu_gib=None)
    run = replace(config.run, device="cpu" if name == CPU else "auto")
    return replace(config, memory=memory, run=run)


def machine_of(config: Config, target: Target, network_gbps: float | None = None) -> Machine:
    """The device that a run is planned for; `network_gbps` (Gbit/s for each device) in place of the table's.

    Errors: ValueError for a GPU whose speed is not known, or a network that carries nothing.
    """
    if network_gbps is not None and not network_gbps > 0:
        raise ValueError(
            f"the network has {network_gbps:g}; needed: above 0 (Gbit/s for each GPU, --network-gbps)"
        )
    if target.kind == "cpu":
        name, found = CPU, CPU_CORE
    else:
        name = config.memory.gpu or ""
        found = _gpu(name)
    network = found.network if network_gbps is None else network_gbps * 1e9 / 8
    return Machine(name, found.kind, found.flops, found.memory, found.node, network, found.host)


def _gpu(name: str) -> Machine:
    if name not in GPUS:
        known = ", ".join(GPUS)
        which = f'of the GPU "{name}"' if name else "of a GPU that has no name"
        raise ValueError(
            f"the speed {which} is not known; name it by --gpu or memory.gpu, one of {known}."
            f"{nearest_word(name, GPUS)}"
        )
    gpu = GPUS[name]
    return Machine(
        name,
        "cuda",
        gpu.bf16_tflops * 1e12,
        gpu.memory_gb_s * 1e9,
        gpu.node_gb_s * 1e9,
        gpu.network_gbit_s * 1e9 / 8,
        gpu.host_gb_s * 1e9,
    )


def cluster_of(
    machine: Machine, ranks: int, nodes: int | None = None, ranks_per_node: int | None = None
) -> Cluster:
    """The nodes that so many ranks take, or those that are given.

    Errors: ValueError where the ranks do not fill the nodes.
    """
    if nodes is not None:
        return Cluster(machine, nodes, RANKS_PER_NODE if ranks_per_node is None else ranks_per_node)
    per_node = min(ranks, RANKS_PER_NODE) if ranks_per_node is None else ranks_per_node
    if per_node < 1 or ranks % per_node:
        options = "--gpus-per-node, of a run that was measured --calibrate-gpus-per-node"
        raise ValueError(f"{ranks} ranks do not fill nodes of {per_node}; give those of a node ({options})")
    return Cluster(machine, ranks // per_node, per_node)
