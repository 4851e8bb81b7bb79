"""The cluster that a run is planned for, and how long one of its ranks takes for each work."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

from rlmath.config.files import read_json_object
from rlmath.config.gpu_specs import GPUS, Machine
from rlmath.config.help import counted, nearest_word
from rlmath.config.schema import Config
from rlmath.planning.memory_estimate import Target

CPU = "CPU"
RANKS_PER_NODE = 8
"""GPUs of a server, where nothing else is given."""
CPU_CORE = Machine(CPU, "cpu", flops=50e9, memory=10e9, node=2e9, network=1e9, host=10e9)
"""A rank on a core of its own, in float32.

These are round figures of a server's core with AVX-512 and of messages through its memory."""


@dataclass(frozen=True)
class Coefficients:
    """Coefficients that no data sheet has.

    Shares are of what `Machine` can do at most; a machine may be faster than its figures."""

    flops_share: float
    """Share of the device's FLOP/s reached in training, log-probs and prefill, memory traffic
    included."""
    memory_share: float
    """Share of the bandwidth of the device's memory."""
    link_share: float
    """Share of the bandwidth to devices of the node, to other nodes and to the host."""
    message_seconds: float
    """Seconds of a message or collective, whatever its size."""
    decode_step_seconds: float
    """Seconds of an engine step, whatever its batch: scheduling, start of the kernels."""
    sequence_step_seconds: float
    """Seconds of the host's work for one sequence of an engine step."""
    adapter_seconds: float
    """Seconds of a LoRA adapter of one linear layer in an engine step, whatever its batch."""
    microbatch_seconds: float
    """Seconds of a pass of one micro-batch, forward or backward, whatever its size."""
    token_seconds: float
    """Seconds of the host's work for one token of a step, on every rank: gathering and packing."""
    call_seconds: float
    """Seconds of a call of a tool, from its marker to its output."""
    step_seconds: float
    """Seconds of a step that remain, with putting the engine to sleep and waking it."""


COEFFICIENTS = {
    "cuda": Coefficients(
        flops_share=0.45,
        memory_share=0.7,
        link_share=0.75,
        message_seconds=30e-6,
        decode_step_seconds=4e-3,
        sequence_step_seconds=10e-6,
        adapter_seconds=47e-6,
        microbatch_seconds=5e-3,
        token_seconds=0.2e-6,
        call_seconds=20e-3,
        step_seconds=2.0,
    ),
    "cpu": Coefficients(
        flops_share=0.7,
        memory_share=0.8,
        link_share=0.5,
        message_seconds=3e-3,
        decode_step_seconds=3e-3,
        sequence_step_seconds=60e-6,
        adapter_seconds=60e-6,
        microbatch_seconds=5e-3,
        token_seconds=8e-6,
        call_seconds=20e-3,
        step_seconds=30e-3,
    ),
}
"""Coefficients by kind of device.

docs/planning.md has their sources, and which of them are estimated and not measured."""


RETIRED = "switch_seconds"
"""A name that older files have."""


def read_coefficients(file: Path, kind: str) -> tuple[Coefficients, list[str]]:
    """Coefficients of a JSON file {"kind": "cuda", "coefficients": {name: number}}, and warnings.

    Those that the file leaves out are as in the table. ValueError for another kind of device, for
    an unknown name, and for what is no number above 0."""
    contents = read_json_object(file)
    names = [field.name for field in fields(Coefficients)]
    values = contents.get("coefficients")
    if contents.get("kind") != kind or not isinstance(values, dict):
        raise ValueError(
            f'{file}; needed: {{"kind": "{kind}", "coefficients": {{name: number}}}} '
            "(docs/planning.md)"
        )
    for name, number in values.items():
        if name not in (*names, RETIRED):
            raise ValueError(
                f'{file}: there is no coefficient "{name}".{nearest_word(name, names)}'
            )
        if type(number) not in (int, float) or not 0 < number < float("inf"):
            raise ValueError(
                f"{file}: the coefficient {name} is {number!r}; needed: a number above 0"
            )
    retired_warning = (
        f"{file}: the coefficient {RETIRED} is ignored; step_seconds has the switch of an "
        "engine, too."
    )
    warnings = [retired_warning] if values.pop(RETIRED, None) is not None else []
    return replace(COEFFICIENTS[kind], **values), warnings


@dataclass(frozen=True)
class Cluster:
    """Ranks on nodes, one rank for each device."""

    machine: Machine
    nodes: int
    ranks_per_node: int
    coefficients: Coefficients

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks_per_node < 1:
            size = f"{counted(self.nodes, 'node')} of {counted(self.ranks_per_node, 'rank')}"
            raise ValueError(
                f"the cluster has {size}; needed: at least 1 of each (--nodes, --gpus-per-node)"
            )

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def first(self, ranks: int) -> Cluster:
        """The nodes that the first so many ranks are on, the last of them perhaps in part.

        >>> cluster = Cluster(CPU_CORE, 4, 8, COEFFICIENTS["cpu"])
        >>> cluster.first(6).nodes, cluster.first(6).ranks, cluster.first(12).nodes
        (1, 6, 2)
        """
        nodes = -(-ranks // self.ranks_per_node)
        per_node = min(ranks, self.ranks_per_node)
        return replace(self, nodes=nodes, ranks_per_node=per_node)

    def compute_seconds(self, flops: float) -> float:
        return flops / self.machine.flops / self.coefficients.flops_share

    def memory_seconds(self, size: float) -> float:
        """Seconds to read or write `size` bytes of the device's memory."""
        return size / self.machine.memory / self.coefficients.memory_share

    def host_seconds(self, size: float) -> float:
        """Seconds to move `size` bytes between the device's and the host's memory."""
        return size / self.machine.host / self.coefficients.link_share

    def link_seconds(self, size: float, messages: float, span: int, beside: int = 1) -> float:
        """Seconds in which a rank sends `size` bytes in so many messages to ranks of its block.

        A block is `span` ranks in a row. Where it is on several nodes, the network cards of
        `beside` ranks of a node share the bytes."""
        inside = self.nodes == 1 or self.ranks_per_node % span == 0
        link = self.machine.node if inside else self.machine.network * beside
        return (
            size / link / self.coefficients.link_share
            + messages * self.coefficients.message_seconds
        )

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


def machine_of(name: str | None, target: Target, network_gbps: float | None = None) -> Machine:
    """The device that a run is planned for; `name` is `memory.gpu`.

    `network_gbps` (Gbit/s for each device) replaces the table's. ValueError for a GPU whose speed
    is not known, or a network that carries nothing."""
    if network_gbps is not None and not network_gbps > 0:
        raise ValueError(
            f"the network has {network_gbps:g}; needed: above 0 (Gbit/s for each GPU, "
            "--network-gbps)"
        )
    machine = CPU_CORE
    if target.kind != "cpu":
        name = name or ""
        if name not in GPUS:
            gpu_text = f'of the GPU "{name}"' if name else "of a GPU that has no name"
            raise ValueError(
                f"the speed {gpu_text} is not known; name it by --gpu or memory.gpu, one of "
                f"{', '.join(GPUS)}."
                f"{nearest_word(name, GPUS)}"
            )
        machine = GPUS[name]
    return machine if network_gbps is None else replace(machine, network=network_gbps * 1e9 / 8)


def cluster_of(
    machine: Machine, ranks: int, nodes: int | None = None, ranks_per_node: int | None = None
) -> Cluster:
    """The nodes that so many ranks take, or those that are given.

    ValueError where the ranks do not fill them."""
    if nodes is None:
        per_node = min(ranks, RANKS_PER_NODE) if ranks_per_node is None else ranks_per_node
        if per_node < 1 or ranks % per_node:
            raise ValueError(
                f"{counted(ranks, 'rank', 'do')} not fill nodes of {per_node}; give those of a "
                "node (--gpus-per-node)"
            )
        nodes = ranks // per_node
        ranks_per_node = per_node
    per_node = RANKS_PER_NODE if ranks_per_node is None else ranks_per_node
    return Cluster(machine, nodes, per_node, COEFFICIENTS[machine.kind])
