"""The work between training and sampling: weights into the engines, and what leaves the device and comes back."""

from __future__ import annotations

import math

from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config
from rlmath.distributed.mesh import Mesh
from rlmath.planner.machines import Cluster
from rlmath.planner.work import Work
from rlmath.rollout.weight_sync.reshard_plan import bucket_bytes
from rlmath.trainer.preflight.memory_estimate import MemoryPlan, Target
from rlmath.trainer.preflight.memory_formulas import engine_bytes

BUCKET_MESSAGES = 2
"""Of a round: a rank sends and receives."""


def sync_work(config: Config, shape: ModelShape, mesh: Mesh, target: Target, cluster: Cluster) -> Work:
    """Every engine rank's weights: copied from the rank's own shard as far as it has them, else sent by another.

    The plan of a sync (`sync.plan`) says this exactly, copy by copy; here it is reckoned from the two layouts as if the
    model were one even row of numbers, which costs nothing for a thousand ranks.
    """
    weights = engine_bytes(shape, config.rollout, target.kind, target.itemsize, target.total_bytes).weights
    received = weights * (1 - own_share(mesh))
    rounds = math.ceil(received / bucket_bytes(config.sync.bucket_mib, target.kind, mesh.world_size))
    replica = math.lcm(mesh.tensor * mesh.context, mesh.expert * mesh.expert_tensor)
    inside = cluster.in_a_node(replica if mesh.pipeline == 1 else mesh.world_size)
    return Work(
        memory=2.0 * weights,
        node=received if inside else 0.0,
        network=0.0 if inside else received,
        messages=BUCKET_MESSAGES * rounds,
    )


def own_share(mesh: Mesh) -> float:
    """Share of its engine's weights that a rank holds itself, mean over the ranks.

    >>> own_share(Mesh(0, 4, tensor=2, pipeline=1, engine_size=1)), own_share(Mesh(0, 4, 2, 1, engine_size=2))
    (0.5, 1.0)
    """
    tensor, engine = mesh.tensor, mesh.engine_size
    period = math.lcm(tensor, engine)
    total = sum(_overlap(rank % tensor, tensor, rank % engine, engine) * engine for rank in range(period))
    return total / period / mesh.pipeline / mesh.expert


def _overlap(part: int, parts: int, other: int, others: int) -> float:
    """Length that [part, part + 1] / parts and [other, other + 1] / others have in common."""
    low = max(part / parts, other / others)
    return max(0.0, min((part + 1) / parts, (other + 1) / others) - low)


def switch_work(config: Config, plan: MemoryPlan, target: Target) -> Work:
    """A turn to sampling and back: what is offloaded goes to the host and comes back. Gradients hold nothing then, and
    are given up, not moved."""
    memory = config.memory
    offloaded = {"optimizer": memory.offload_optimizer, "parameters": memory.offload_parameters}
    moved = sum(plan.part(name) for name, leaves in offloaded.items() if leaves)
    return Work(switches=1) + _there_and_back(moved, target)


def reference_switch_work(config: Config, plan: MemoryPlan, target: Target) -> Work:
    """An offloaded reference model comes for its log-probs only, and leaves after them."""
    return _there_and_back(plan.part("reference") if config.memory.offload_reference else 0, target)


def _there_and_back(size: int, target: Target) -> Work:
    """On CPU, host and device are the same memory."""
    if target.kind == "cpu":
        return Work(memory=2.0 * 2.0 * size)
    return Work(host=2.0 * size)
