"""A whole run on a cluster, predicted: the step of every stage, and its epochs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlmath.config.help import raise_problems
from rlmath.config.length_curriculum import LengthStage, length_stages, planned_steps
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config
from rlmath.data.audit import EXAMPLES
from rlmath.models.hf_config import required_shape
from rlmath.planning.checks import file_problems, memory_problems, run_problems, value_problems
from rlmath.planning.memory_estimate import Target
from rlmath.planning.memory_fit import planned_target
from rlmath.planning.parallelism import ranks_or_least
from rlmath.planning.planner.lengths import Batch
from rlmath.planning.planner.step import StepPlan, batch_of, plan_step, problems_of, step_inputs
from rlmath.planning.planner.training import StepInputs
from rlmath.planning.planner.work import Cluster, Coefficients, cluster_of, machine_of, on_gpu
from rlmath.planning.prepare import dropped_warning, read_inputs, try_data


@dataclass(frozen=True)
class Asked:
    """What a plan needs beside the settings; None: as in the settings, or typical."""

    gpu: str | None = None
    nodes: int | None = None
    ranks_per_node: int | None = None
    network_gbps: float | None = None
    mean_response: float | None = None
    """Tokens."""
    mean_prompt: float | None = None
    prompts: int | None = None
    """Training prompts, where the files are not there."""


@dataclass(frozen=True)
class ClusterPlacement:
    """A run that has passed all checks but that of memory, and where it is to be."""

    config: Config
    shape: ModelShape
    note: str
    target: Target
    cluster: Cluster

    def inputs(self, config: Config, batch: Batch) -> StepInputs:
        """What the work of a step follows from, with the settings of one stage."""
        return step_inputs(config, self.shape, self.target, self.cluster, batch)


@dataclass(frozen=True)
class RunPrediction:
    """What a run would take."""

    place: ClusterPlacement
    stages: tuple[tuple[LengthStage, StepPlan], ...]
    memory_problems: tuple[str, ...]
    steps_per_epoch: int | None
    """None where the number of prompts is not known."""
    warnings: tuple[str, ...]
    """What is odd about the prompts of the files."""

    @property
    def step_seconds(self) -> float:
        """Mean over the steps of the run."""
        steps = [max(1, stage.steps) for stage, _ in self.stages]
        total = sum(count * plan.step_seconds for count, (_, plan) in zip(steps, self.stages, strict=True))
        return total / sum(steps)

    @property
    def total_steps(self) -> int | None:
        config, per_epoch = self.place.config, self.steps_per_epoch
        return None if per_epoch is None else planned_steps(config, per_epoch)

    @property
    def last_step(self) -> StepInputs:
        """The step of the last stage, which has the longest contexts."""
        stage, plan = self.stages[-1]
        return self.place.inputs(stage.config, plan.batch)


def place_run(config: Config, asked: Asked) -> ClusterPlacement:
    """Model, device and cluster of a run; ValueError that lists what keeps it from having this layout there."""
    config = on_gpu(config, asked.gpu)
    raise_problems("this run", value_problems(config))
    shape, note = required_shape(config.model.path)
    target = planned_target(config)
    machine = machine_of(config, target, asked.network_gbps)
    if asked.nodes is not None:
        # Another cluster than that of the settings: what remains of the ranks is data parallel.
        config = replace(config, parallel=replace(config.parallel, data=None))
    cluster = cluster_of(machine, ranks_or_least(config, None), asked.nodes, asked.ranks_per_node)
    raise_problems("this run", problems_of(config, shape, cluster))
    if config.rollout.tail == "carry" or config.rollout.ranks > 0:
        # A reward function of the user's is not looked for.
        reward = replace(config.reward, function=None, rewards=[], weights=[], combine="sum")
        raise_problems("this run", run_problems(replace(config, reward=reward), cluster.ranks, shape))
    return ClusterPlacement(config, shape, note, target, cluster)


def predict_run(place: ClusterPlacement, asked: Asked, coefficients: Coefficients) -> RunPrediction:
    """Steps of all stages, and whether they fit the memory."""
    config = place.config
    steps_per_epoch, warnings = _steps_per_epoch(config, place.shape, asked)
    total = None if steps_per_epoch is None else planned_steps(config, steps_per_epoch)
    planned = []
    for stage in length_stages(config, total):
        batch = batch_of(stage.config, asked.mean_response, asked.mean_prompt)
        inputs = place.inputs(stage.config, batch)
        planned.append((stage, plan_step(inputs, coefficients)))
    problems = memory_problems(config, place.shape, place.cluster.ranks)
    return RunPrediction(place, tuple(planned), tuple(problems), steps_per_epoch, warnings)


def _steps_per_epoch(config: Config, shape: ModelShape, asked: Asked) -> tuple[int | None, tuple[str, ...]]:
    """Steps of the prompts that are given, or of the files where they are there; and warnings about the latter."""
    if asked.prompts is not None:
        if asked.prompts < config.data.prompts_per_step:
            problem = f"--prompts is {asked.prompts}; needed: at least data.prompts_per_step"
            raise ValueError(f"{problem}, {config.data.prompts_per_step}")
        return asked.prompts // config.data.prompts_per_step, ()
    if any(file_problems(config)):
        return None, ()
    data = try_data(config, shape, read_inputs(config, shape), examples=EXAMPLES)
    dropped = dropped_warning(config, data)
    return data.inputs.order.steps_per_epoch, (*data.warnings, *([dropped] if dropped else ()))
