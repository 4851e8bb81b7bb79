"""What a cluster can do at most, what one rank does in a phase of a step, and the seconds that this takes.

Every phase's seconds are a sum over the coefficients, the few numbers that no data sheet has: which share of a
machine's speed is reached, and what comes on top. Each stands for a part of the work.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from rlmath.config.files import read_json_object
from rlmath.config.gpu_specs import GPUS, Machine
from rlmath.config.help import nearest_word
from rlmath.config.schema import Config
from rlmath.planning.memory_estimate import Target

CPU = "CPU"
RANKS_PER_NODE = 8
"""GPUs of a server, where nothing else is given."""


CPU_CORE = Machine(CPU, "cpu", flops=50e9, memory=10e9, node=2e9, network=1e9, host=10e9)
"""A rank on a core of its own, in float32. Round figures of a server's core with AVX-512 and of messages through its
memory."""


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
    found = CPU_CORE if target.kind == "cpu" else _gpu(config.memory.gpu or "")
    return found if network_gbps is None else replace(found, network=network_gbps * 1e9 / 8)


def _gpu(name: str) -> Machine:
    if name not in GPUS:
        known = ", ".join(GPUS)
        which = f'of the GPU "{name}"' if name else "of a GPU that has no name"
        raise ValueError(
            f"the speed {which} is not known; name it by --gpu or memory.gpu, one of {known}."
            f"{nearest_word(name, GPUS)}"
        )
    return GPUS[name]


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
        raise ValueError(
            f"{ranks} ranks do not fill nodes of {per_node}; give those of a node (--gpus-per-node)"
        )
    return Cluster(machine, ranks // per_node, per_node)


# ---------------------------------------------------------------- work


@dataclass(frozen=True)
class Work:
    """What the rank does that has the most to do.

    >>> (Work(flops=2.0, messages=1.0) + Work(flops=3.0)).times(2.0)
    Work(flops=10.0, memory=0.0, node=0.0, network=0.0, host=0.0, messages=2.0, decode_steps=0.0, sequence_steps=0.0, \
microbatches=0.0, tokens=0.0, switches=0.0, steps=0.0)
    """

    flops: float = 0.0
    """Matrix multiplications and attention, with what is idle in a pipeline counted as work."""
    memory: float = 0.0
    """Bytes read from and written to the device's memory, beside those of large matrix multiplications."""
    node: float = 0.0
    """Bytes sent to devices of the same node."""
    network: float = 0.0
    """Bytes sent to other nodes."""
    host: float = 0.0
    """Bytes to and from the host's memory."""
    messages: float = 0.0
    """Collectives and messages, whatever their size."""
    decode_steps: float = 0.0
    """Engine steps, whatever their batch."""
    sequence_steps: float = 0.0
    """Tokens sampled: sequences of an engine step, added up over the steps."""
    microbatches: float = 0.0
    """Passes of a micro-batch, a backward pass being one of its own."""
    tokens: float = 0.0
    """Tokens that the host handles one by one: every rank learns all that was sampled."""
    switches: float = 0.0
    """Turns from training to sampling and back."""
    steps: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, name) + getattr(other, name) for name in WORK_NAMES))

    def times(self, factor: float) -> Work:
        return Work(*(factor * getattr(self, name) for name in WORK_NAMES))


WORK_NAMES = tuple(field.name for field in fields(Work))


# ---------------------------------------------------------------- coefficients


@dataclass(frozen=True)
class Coefficients:
    """Above 0. Shares are of what `Machine` can do at most, and may exceed 1 where a machine is faster."""

    flops_share: float
    """Share of the device's FLOP/s, in training, log-probs and prefill."""
    memory_share: float
    """Share of the bandwidth of the device's memory."""
    link_share: float
    """Share of the bandwidth to devices of the node, to other nodes and to the host."""
    message_seconds: float
    """A message or collective, whatever its size."""
    decode_step_seconds: float
    """An engine step, whatever its batch: scheduling, start of the kernels."""
    sequence_step_seconds: float
    """The host's work for one sequence of an engine step."""
    microbatch_seconds: float
    """A pass of one micro-batch, whatever its size."""
    token_seconds: float
    """The host's work for one token of a step, on every rank: gathering and packing."""
    switch_seconds: float
    """Putting the engine to sleep and waking it, beside bytes that move."""
    step_seconds: float
    """What remains of a step."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 < value < float("inf"):
                raise ValueError(f"the coefficient {name} is {value}; needed: a number above 0")


NAMES = tuple(field.name for field in fields(Coefficients))

DEFAULTS = {
    "cuda": Coefficients(
        flops_share=0.55,
        memory_share=0.7,
        link_share=0.75,
        message_seconds=30e-6,
        decode_step_seconds=4e-3,
        sequence_step_seconds=10e-6,
        microbatch_seconds=5e-3,
        token_seconds=0.2e-6,
        switch_seconds=1.0,
        step_seconds=1.0,
    ),
    "cpu": Coefficients(
        flops_share=1.2,
        memory_share=0.8,
        link_share=0.5,
        message_seconds=3e-3,
        decode_step_seconds=3e-3,
        sequence_step_seconds=60e-6,
        microbatch_seconds=5e-3,
        token_seconds=8e-6,
        switch_seconds=8e-3,
        step_seconds=20e-3,
    ),
}
"""By kind of device. Sources, and which of them are estimated and not measured: docs/planning.md."""


def seconds_by_coefficient(work: Work, machine: Machine, coefficients: Coefficients) -> dict[str, float]:
    """Seconds that each coefficient stands for; their sum is the time of the work."""
    of = coefficients
    links = work.node / machine.node + work.network / machine.network + work.host / machine.host
    return {
        "flops_share": work.flops / machine.flops / of.flops_share,
        "memory_share": work.memory / machine.memory / of.memory_share,
        "link_share": links / of.link_share,
        "message_seconds": work.messages * of.message_seconds,
        "decode_step_seconds": work.decode_steps * of.decode_step_seconds,
        "sequence_step_seconds": work.sequence_steps * of.sequence_step_seconds,
        "microbatch_seconds": work.microbatches * of.microbatch_seconds,
        "token_seconds": work.tokens * of.token_seconds,
        "switch_seconds": work.switches * of.switch_seconds,
        "step_seconds": work.steps * of.step_seconds,
    }


def seconds_of(work: Work, machine: Machine, coefficients: Coefficients) -> float:
    return sum(seconds_by_coefficient(work, machine, coefficients).values())


def read_coefficients(file: Path, kind: str) -> Coefficients:
    """Coefficients of a JSON file {"kind": "cuda", "coefficients": {name: number}}; what it leaves out has its default.

    Errors: ValueError for another kind of device, and for what is unknown or no number.
    """
    data = read_json_object(file)
    if data.get("kind") != kind:
        raise ValueError(f'{file}: coefficients of kind "{data.get("kind")}"; this plan is for "{kind}"')
    values = data.get("coefficients")
    if not isinstance(values, dict):
        raise ValueError(f'{file}: it has no "coefficients"; needed: numbers by name (docs/planning.md)')
    for name, value in values.items():
        if name not in NAMES:
            raise ValueError(f'{file}: there is no coefficient "{name}".{nearest_word(str(name), NAMES)}')
        if type(value) not in (int, float):
            raise ValueError(f"{file}: the coefficient {name} is {value!r}; needed: a number above 0")
    return replace(DEFAULTS[kind], **values)
