"""What planning says of a run with a policy of a shape; its settings give the other shapes."""

from __future__ import annotations

from rlmath.checkpoint.hf.run_shapes import inspect_run_shapes, read_run_shapes
from rlmath.config.length_curriculum import with_longest_lengths
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config, Kind
from rlmath.distributed.mesh import Mesh
from rlmath.planning.checks import shape_problems
from rlmath.planning.memory_estimate import MemoryPlan, Target, plan_rank, plan_ranks
from rlmath.planning.memory_fit import fit_problems, planned_target, start_up_lines


def rank_plan(config: Config, policy: ModelShape, mesh: Mesh, target: Target) -> MemoryPlan:
    return plan_rank(config, read_run_shapes(config, policy), mesh, target=target)


def rank_plans(
    config: Config, policy: ModelShape, world_size: int, target: Target, kind: Kind = "grpo"
) -> list[MemoryPlan]:
    shapes = read_run_shapes(config, policy, kind)
    return plan_ranks(config, shapes, world_size, target=target, kind=kind)


def target_of(config: Config) -> Target:
    return planned_target(config.memory, config.policy, config.run.device)


def problems_of_fit(
    config: Config, policy: ModelShape, world_size: int, kind: Kind = "grpo"
) -> list[str]:
    shapes = read_run_shapes(config, policy, kind)
    return fit_problems(with_longest_lengths(config), shapes, world_size, kind=kind)


def lines_at_start(
    config: Config, policy: ModelShape, world_size: int, kind: Kind = "grpo"
) -> list[str]:
    return start_up_lines(config, read_run_shapes(config, policy, kind), world_size, kind=kind)


def problems_of_shapes(config: Config, policy: ModelShape) -> list[str]:
    return shape_problems(config, inspect_run_shapes(config, policy))
