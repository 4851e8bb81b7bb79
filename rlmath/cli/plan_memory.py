"""Plan the memory of a run: what every rank holds in each phase of a step, and whether it fits.

rlmath plan-memory --config configs/my.yaml parallel.tensor=2 memory.gpu=H100-80GB

Of the model only config.json is read, and for published models not even that is needed
(configs/models). Of several stages, and validation, the longest is planned; for which device:
`memory_fit.planned_target`. It exits with 2 where the run cannot fit or cannot be planned.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rlmath.checkpoint.hf.config_json import planned_shape, required_shape
from rlmath.checkpoint.hf.run_shapes import RunShapes, inspect_run_shapes
from rlmath.checkpoint.hf.weight_map import parameter_count
from rlmath.config.help import raise_problems
from rlmath.config.load import load_config, make_parser
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config
from rlmath.config.terminal import escape_terminal
from rlmath.planning.checks import memory_problems, setting_problems, shape_problems
from rlmath.planning.memory_estimate import MemoryPlan, Target, mesh_of
from rlmath.planning.memory_fit import (
    GIB,
    adapter_lines,
    all_plans,
    figures,
    planned_target,
    usable_bytes,
)
from rlmath.planning.parallelism import ranks_or_least, roles

MISTAKE = 2
NOT_NEEDED = ("run.output_dir=unused", "data.train_path=unused")
"""Stand-ins for settings that a run needs and a plan can do without."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 if the run fits, MISTAKE if not."""
    escape_terminal()
    parser = make_parser("Plan the memory of a run.")
    parser.add_argument(
        "--ranks",
        type=int,
        help="ranks of the run; without it those of parallel.data, else the least",
    )
    parser.add_argument("--json", action="store_true", help="print plain data, in bytes")
    arguments = parser.parse_intermixed_args(argv)
    try:
        config = load_config(arguments.config, arguments.overrides, stand_ins=NOT_NEEDED)
        ranks = ranks_or_least(config.parallel, config.rollout, arguments.ranks)
        shapes = checked_shapes(config, ranks)
        target = planned_target(config.memory, config.policy, config.run.device)
    except ValueError as error:
        print(error, file=sys.stderr)
        return MISTAKE
    plans = all_plans(config, shapes, ranks, target=target)
    problems = memory_problems(config, shapes, ranks)
    if arguments.json:
        print(json.dumps(as_data(plans, problems, target, ranks), indent=2))
    else:
        lines = [line for plan in plans for line in plan_lines(plan)]
        lines += adapter_lines(config, shapes, ranks, target=target)
        print("\n".join([*heading(config, shapes.policy, ranks, target), *lines]))
    for problem in problems:
        print(f"  - {problem}", file=sys.stderr)
    return MISTAKE if problems else 0


def checked_shapes(config: Config, ranks: int) -> RunShapes:
    """The shapes of the run's models; ValueError for settings that no run could have."""
    shape, _ = required_shape(config.model.path)
    inspected = inspect_run_shapes(config, shape)
    problems = (
        setting_problems(config, inspected.shapes.length_stages, ranks)
        if ranks > 0
        else [f"--ranks is {ranks}; needed: at least 1."]
    )
    if ranks > 0:
        problems += shape_problems(config, inspected)
    raise_problems("this run", problems)
    return inspected.shapes


def as_data(
    plans: list[MemoryPlan], problems: list[str], target: Target, ranks: int
) -> dict[str, Any]:
    """Plain data; sizes in bytes."""
    usable = None if target.total_bytes is None else usable_bytes(target)
    return {
        "device": {
            "kind": target.kind,
            "name": target.name,
            "total": target.total_bytes,
            "usable": usable,
        },
        "ranks": ranks,
        "plans": [
            asdict(plan)
            | {"held": {phase: plan.held(phase) for phase in plan.phases}, "worst": plan.worst}
            for plan in plans
        ],
        "problems": problems,
    }


def heading(config: Config, shape: ModelShape, ranks: int, target: Target) -> list[str]:
    """Model, layout and device."""
    mesh = mesh_of(config.parallel, config.rollout, ranks, rank=0)
    lines = [
        f"{config.model.path}: {parameter_count(shape) / 1e9:.3g} B parameters on {ranks} "
        f"rank{'s' * (ranks != 1)}",
        f"Layout: {mesh.describe()}",
        *filter(None, [roles(ranks, mesh.engine_ranks), planned_shape(config.model.path).note]),
    ]
    if target.total_bytes is None:
        lines.append("Planned for the CPU, in float32; name a GPU by memory.gpu or memory.gpu_gib.")
    else:
        total_gib = target.total_bytes / GIB
        usable_gib = usable_bytes(target) / GIB
        lines.append(
            f"{target.name}: {total_gib:.1f} GiB, of which a run may fill {usable_gib:.1f}"
        )
    return lines


def plan_lines(plan: MemoryPlan) -> list[str]:
    """Parts of every phase (GiB).

    A plan stands for all ranks of its pipeline stage, or of engines."""
    whose = "engines" if plan.is_engine else f"pipeline stage {plan.stage}"
    phases = [f"  {phase}: {figures(plan, phase)}" for phase in plan.phases]
    return [f"Ranks of {whose}, from rank {plan.rank} on:", *phases]


if __name__ == "__main__":
    sys.exit(main())
