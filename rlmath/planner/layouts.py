"""Every layout that a run could have on a cluster, and how long a step would take on each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config
from rlmath.planner.coefficients import Coefficients
from rlmath.planner.lengths import Batch
from rlmath.planner.machines import Cluster
from rlmath.planner.step import StepPlan, plan_step
from rlmath.trainer.preflight.checks import device_problems, setting_problems, shape_problems
from rlmath.trainer.preflight.length_curriculum import of_longest_stage
from rlmath.trainer.preflight.memory_estimate import Target
from rlmath.trainer.preflight.memory_fit import fit_problems


@dataclass(frozen=True)
class Comparison:
    """The layouts of a run on a cluster."""

    plans: tuple[StepPlan, ...]
    """Those that are legal and fit, fastest first."""
    without_room: int
    """Layouts that the memory of the devices is too small for."""


def with_layout(config: Config, tensor: int, pipeline: int, engine: int) -> Config:
    """The settings with another layout; data-parallel ranks are what remains. Chunks and uneven stages belong to the
    layout that the settings have, and are left out of another."""
    same = tensor == config.parallel.tensor and pipeline == config.parallel.pipeline
    stages = {} if same else {"virtual_pipeline": 1, "first_stage_layers": None, "last_stage_layers": None}
    parallel = replace(config.parallel, data=None, tensor=tensor, pipeline=pipeline, **stages)
    rollout = replace(config.rollout, tensor_parallel=engine)
    return replace(config, parallel=parallel, rollout=rollout)


def layouts_of(config: Config, shape: ModelShape, cluster: Cluster) -> Iterator[Config]:
    """TP x PP x engine TP that no check refuses; tensor-parallel ranks stay within a node."""
    inside = _divisors(cluster.ranks_per_node)
    for tensor in inside:
        for pipeline in _divisors(shape.num_layers):
            for engine in inside:
                found = with_layout(config, tensor, pipeline, engine)
                if not problems_of(found, shape, cluster):
                    yield found


def problems_of(config: Config, shape: ModelShape, cluster: Cluster) -> list[str]:
    """What keeps a run from this layout, but for memory."""
    return [
        *setting_problems(config, cluster.ranks),
        *shape_problems(config, shape),
        *(device_problems(config, shape, on_gpu=False) if cluster.machine.kind == "cpu" else ()),
    ]


def memory_problems(config: Config, shape: ModelShape, cluster: Cluster) -> list[str]:
    """What of the longest stage does not fit the devices."""
    return of_longest_stage(config, lambda largest: fit_problems(largest, shape, cluster.ranks))


def compare(
    config: Config,
    shape: ModelShape,
    target: Target,
    cluster: Cluster,
    batch: Batch,
    coefficients: Coefficients,
) -> Comparison:
    """`config` is that of one stage; ties go to the layout with fewer ranks to a copy of the model."""
    plans, without_room = [], 0
    for found in layouts_of(config, shape, cluster):
        if memory_problems(found, shape, cluster):
            without_room += 1
        else:
            plans.append(plan_step(found, shape, target, cluster, batch, coefficients))
    return Comparison(tuple(sorted(plans, key=_order)), without_room)


def _order(plan: StepPlan) -> tuple[float, int, int]:
    return plan.step_seconds, plan.mesh.tensor * plan.mesh.pipeline, plan.mesh.engine_size


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
