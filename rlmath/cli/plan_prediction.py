"""A whole run on a cluster, predicted: the step of every stage, and its epochs."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, replace

from rlmath.checkpoint.hf.config_json import required_shape
from rlmath.checkpoint.hf.run_shapes import RunShapes, inspect_run_shapes
from rlmath.config.help import raise_problems
from rlmath.config.length_curriculum import LengthStage, checked_length_stages, planned_steps
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config
from rlmath.data.audit import EXAMPLES
from rlmath.planning.checks import file_problems, memory_problems, run_problems, value_problems
from rlmath.planning.memory_estimate import Target
from rlmath.planning.memory_fit import planned_target
from rlmath.planning.parallelism import ranks_or_least
from rlmath.planning.planner.cluster import (
    Cluster,
    cluster_of,
    machine_of,
    on_gpu,
    read_coefficients,
)
from rlmath.planning.planner.step import (
    Comparison,
    StepPlan,
    batch_of,
    compare_layouts,
    plan_step,
    problems_of,
    step_inputs,
)
from rlmath.run.prepare import dropped_warning, read_inputs, try_data


@dataclass(frozen=True)
class RunPrediction:
    config: Config
    shapes: RunShapes
    note: str
    target: Target
    cluster: Cluster
    stages: tuple[tuple[LengthStage, StepPlan], ...]
    memory_problems: tuple[str, ...]
    steps_per_epoch: int | None
    """Steps of an epoch; None if the number of prompts is not known."""
    warnings: tuple[str, ...]
    """Irregularities of the files' prompts, and of a file of coefficients."""
    layouts: Comparison | None
    """Layouts for the last stage, which has the longest contexts; None if not asked for."""

    @property
    def step_seconds(self) -> float:
        """Mean over the steps of the run."""
        steps = [max(1, stage.steps) for stage, _ in self.stages]
        total = sum(
            count * plan.step_seconds for count, (_, plan) in zip(steps, self.stages, strict=True)
        )
        return total / sum(steps)

    @property
    def total_steps(self) -> int | None:
        return (
            None
            if self.steps_per_epoch is None
            else planned_steps(self.config, self.steps_per_epoch)
        )


def predict_run(config: Config, asked: Namespace) -> RunPrediction:
    """Steps of all stages, and whether they fit the memory.

    `asked` are the options of `rlmath plan`. ValueError that lists what keeps the run from having
    this layout on this cluster."""
    config = on_gpu(config, asked.gpu)
    raise_problems("this run", value_problems(config))
    shape, note = required_shape(config.model.path)
    target = planned_target(config.memory, config.policy, config.run.device)
    machine = machine_of(config.memory.gpu, target, asked.network_gbps)
    if asked.nodes is not None:
        # Another cluster than that of the settings: what remains of the ranks is data parallel.
        config = replace(config, parallel=replace(config.parallel, data=None))
    ranks = ranks_or_least(config.parallel, config.rollout, None)
    cluster = cluster_of(machine, ranks, asked.nodes, ranks_per_node=asked.gpus_per_node)
    file_warnings: list[str] = []
    if asked.coefficients is not None:
        coefficients, file_warnings = read_coefficients(asked.coefficients, target.kind)
        cluster = replace(cluster, coefficients=coefficients)
    inspected = inspect_run_shapes(config, shape)
    raise_problems("this run", problems_of(config, inspected, cluster))
    if config.rollout.tail == "carry" or config.rollout.ranks > 0:
        # A reward function of the user's is not looked for.
        reward = replace(config.reward, function=None, rewards=[], weights=[], combine="sum")
        verified = replace(config, reward=reward)
        stages = checked_length_stages(verified)
        raise_problems(
            "this run",
            run_problems(
                verified,
                cluster.ranks,
                replace(inspected, shapes=replace(inspected.shapes, length_stages=stages)),
            ),
        )
    steps_per_epoch, warnings = _steps_per_epoch(config, shape, asked)
    shapes = inspected.shapes
    if steps_per_epoch is not None:
        shapes = shapes.with_total_steps(config, planned_steps(config, steps_per_epoch))
    inputs = [
        step_inputs(
            stage.config,
            replace(shapes, length_stages=(stage,)),
            target,
            cluster=cluster,
            batch=batch_of(
                stage.config,
                mean_response=asked.mean_response_tokens,
                mean_prompt=asked.mean_prompt_tokens,
                mean_given=asked.mean_given_tokens,
                mean_calls=asked.mean_calls,
            ),
        )
        for stage in shapes.length_stages
    ]
    return RunPrediction(
        config,
        shapes,
        note=note,
        target=target,
        cluster=cluster,
        stages=tuple(zip(shapes.length_stages, map(plan_step, inputs), strict=True)),
        memory_problems=tuple(memory_problems(config, shapes, cluster.ranks)),
        steps_per_epoch=steps_per_epoch,
        warnings=(*file_warnings, *warnings),
        layouts=compare_layouts(inputs[-1]) if asked.layouts > 0 else None,
    )


def _steps_per_epoch(
    config: Config, shape: ModelShape, asked: Namespace
) -> tuple[int | None, tuple[str, ...]]:
    """Steps of the given number of prompts, or of the files if they exist; warnings about files."""
    if asked.prompts is not None:
        if asked.prompts < config.data.prompts_per_step:
            problem = f"--prompts is {asked.prompts}; needed: at least data.prompts_per_step"
            raise ValueError(f"{problem}, {config.data.prompts_per_step}")
        return asked.prompts // config.data.prompts_per_step, ()
    if any(file_problems(config)):
        return None, ()
    run_data = try_data(config, shape, read_inputs(config, shape), examples=EXAMPLES)
    dropped = dropped_warning(config, run_data)
    return run_data.inputs.order.steps_per_epoch, (
        *run_data.warnings,
        *([dropped] if dropped else ()),
    )
