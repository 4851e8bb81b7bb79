"""Whether a supervised run fits its GPU: there is no engine, and training is the only phase."""

from __future__ import annotations

from rlmath.config import Config
from rlmath.memory_checks import GIB, RESERVE, figures, planned_target, usable_bytes
from rlmath.memory_plan import MemoryPlan, Target, largest, plan_ranks
from rlmath.model_shape import ModelShape

PHASE = "update"
_OF_THE_ENGINE = "engine_workspace"


def plan_training(config: Config, shape: ModelShape, world_size: int, target: Target) -> list[MemoryPlan]:
    """The plan of the first rank of every pipeline stage. The layout must have no problems (`layout_checks`)."""
    return [
        MemoryPlan(
            plan.rank,
            plan.stage,
            {PHASE: {part: size for part, size in plan.phases[PHASE].items() if part != _OF_THE_ENGINE}},
        )
        for plan in plan_ranks(config, shape, world_size, target)
    ]


def fit_problems(config: Config, shape: ModelShape, world_size: int) -> list[str]:
    """What does not fit the GPU; empty on CPU."""
    target = planned_target(config)
    if target.total_bytes is None:
        return []
    plan, phase = largest(plan_training(config, shape, world_size, target))
    if plan.held(phase) <= usable_bytes(target):
        return []
    policy, parallel = config.policy, config.parallel
    return [
        f"memory: rank {plan.rank} (pipeline stage {plan.stage}) needs {figures(plan, phase)}; {target.name} has "
        f"{target.total_bytes / GIB:.2f} GiB, of which a run may fill {usable_bytes(target) / GIB:.2f} (without "
        f"{RESERVE}). Lower policy.max_tokens_per_microbatch (now {policy.max_tokens_per_microbatch}, at least "
        f"sft.max_sequence_tokens={config.sft.max_sequence_tokens}), set policy.recompute_granularity=full "
        f"policy.recompute_method=uniform policy.recompute_num_layers=1, or raise parallel.tensor (now "
        f"{parallel.tensor}) or parallel.pipeline (now {parallel.pipeline})."
    ]


def start_up_line(config: Config, shape: ModelShape, world_size: int) -> str:
    """The plan of the rank that holds the most."""
    target = planned_target(config)
    plan, phase = largest(plan_training(config, shape, world_size, target))
    return f"Planned memory of rank {plan.rank} (pipeline stage {plan.stage}) on {target.name}: {figures(plan, phase)}"
