"""The predicted seconds of a step on a cluster, by phase, on one layout or on every one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rlmath.checkpoint.hf.run_shapes import InspectedShapes, RunShapes
from rlmath.config.length_curriculum import feedback_tokens, tool_tokens, unsampled_limit
from rlmath.config.schema import NO_LORA, AlgorithmConfig, Config
from rlmath.data.dataset import critic_epochs
from rlmath.distributed.mesh import Mesh
from rlmath.planning.checks import (
    device_problems,
    memory_problems,
    setting_problems,
    shape_problems,
)
from rlmath.planning.memory_estimate import Target, largest, mesh_of, plan_ranks
from rlmath.planning.memory_fit import keeps_base
from rlmath.planning.parallelism import divisors
from rlmath.planning.planner.cluster import Cluster
from rlmath.planning.planner.lengths import Batch, lengths_with_mean
from rlmath.planning.planner.rollout import PlannedRollout, engine_of, plan_rollout
from rlmath.planning.planner.training import StepInputs, logprobs_seconds, update_seconds

PHASES = (
    "switch",
    "sync",
    "rollout",
    "logprobs",
    "reference",
    "critic",
    "teacher",
    "update",
    "other",
)
"""Phases in the order of a step; the switch is both ways.

Where engines have no ranks of their own, phases take turns on the same memory, and none runs beside
another."""
TYPICAL_SHARE = 0.3
"""Mean completion as a share of the longest, where not given.

It is 0.29 to 0.31 for R1 models and 27,648 tokens. For calls of tools it is a guess."""
TYPICAL_PROMPT = 128
"""Mean prompt (tokens) where not given; AReaL's step log has 108."""


# ---------------------------------------------------------------- the step


@dataclass(frozen=True)
class StepPlan:
    config: Config
    mesh: Mesh
    cluster: Cluster
    batch: Batch
    rollout: PlannedRollout
    seconds: Mapping[str, float]
    """Seconds of the phases that the run has, by phase."""
    microbatches: int
    """Micro-batches of a minibatch on a data-parallel rank."""
    idle_share: float
    """Share of the update's seconds in which the pipeline's stages wait for one another."""

    @property
    def overlaps(self) -> bool:
        """Whether engines sample on while the other ranks train."""
        return self.config.rollout.ranks > 0 and self.config.rollout.max_staleness > 0

    @property
    def trainer_seconds(self) -> float:
        return sum(self.seconds.values()) - self.seconds["rollout"]

    @property
    def step_seconds(self) -> float:
        sides = self.trainer_seconds, self.seconds["rollout"]
        return max(sides) if self.overlaps else sum(sides)


def batch_of(
    config: Config,
    mean_response: float | None = None,
    mean_prompt: float | None = None,
    mean_given: float | None = None,
    mean_calls: float | None = None,
) -> Batch:
    """The sequences of a step whose completions and prompts have these mean lengths (tokens).

    `mean_response` counts sampled tokens; tools give a completion `mean_given` beside, in
    `mean_calls` calls. All are typical ones where not given. ValueError for means that the settings
    do not allow."""
    longest = config.rollout.max_new_tokens
    longest_prompt = config.data.max_prompt_tokens
    mean = max(1.0, TYPICAL_SHARE * longest) if mean_response is None else mean_response
    prompt = float(min(TYPICAL_PROMPT, longest_prompt)) if mean_prompt is None else mean_prompt
    if not 1 <= prompt <= longest_prompt:
        problem = (
            f"the mean prompt is {prompt:g} tokens; needed: from 1 to "
            f"data.max_prompt_tokens, {longest_prompt}"
        )
        raise ValueError(f"{problem} (--mean-prompt-tokens)")
    group = config.rollout.group_size
    most_calls = 0 if config.tools.format is None else config.tools.max_calls
    calls = TYPICAL_SHARE * most_calls if mean_calls is None else mean_calls
    most_given = unsampled_limit(config)
    given_tokens = mean_given
    if given_tokens is None:
        given_tokens = tool_tokens(config.tools) * calls / max(1, most_calls)
        given_tokens += TYPICAL_SHARE * feedback_tokens(config)
    for option, mean_of_tools, most in (
        ("--mean-calls", calls, most_calls),
        ("--mean-given-tokens", given_tokens, most_given),
    ):
        if not 0 <= mean_of_tools <= most:
            raise ValueError(
                f"{option} is {mean_of_tools:g}; needed: from 0 to {most}, the most that tools.format, "
                "tools.max_calls and tools.max_output_tokens, or turns.max and "
                "turns.max_feedback_tokens, allow"
            )
    return Batch(
        config.data.prompts_per_step * group,
        group,
        prompt,
        lengths=lengths_with_mean(mean, longest),
        given_tokens=given_tokens,
        calls=calls,
    )


def step_inputs(
    config: Config, shapes: RunShapes, target: Target, cluster: Cluster, batch: Batch
) -> StepInputs:
    """Inputs of a step with one length stage's settings and shapes, on the whole cluster.

    The layout has no problems (`planning.parallelism`)."""
    return StepInputs(
        config,
        shapes.policy,
        shapes=shapes,
        target=target,
        cluster=cluster,
        batch=batch,
        mesh=mesh_of(config.parallel, config.rollout, cluster.ranks, rank=0),
    )


def plan_step(inputs: StepInputs) -> StepPlan:
    """A step and its seconds.

    With engines on ranks of their own, trainers are the first ranks, and nothing is switched or
    offloaded for engines; what it takes to send them weights is left out."""
    config = inputs.config
    cluster = inputs.cluster
    coefficients = inputs.cluster.coefficients
    engine_ranks = config.rollout.ranks
    rollout = plan_rollout(inputs)
    batch = inputs.batch
    group = min(batch.group, config.learned_group_size)
    learned = replace(batch, sequences=batch.sequences * group // batch.group, group=group)
    training = replace(inputs, cluster=cluster.first(cluster.ranks - engine_ranks), batch=learned)
    seconds = (
        {} if engine_ranks else {"switch": switch_seconds(inputs), "sync": sync_seconds(inputs)}
    )
    seconds |= {"rollout": rollout.seconds} | _training_phases(training)
    # Every trainer gets all that engines on ranks of their own sample.
    handled = inputs.batch.tokens * (1 / training.parts + bool(engine_ranks))
    seconds["other"] = coefficients.step_seconds + handled * coefficients.token_seconds
    return StepPlan(
        config,
        inputs.mesh,
        cluster=cluster,
        batch=inputs.batch,
        rollout=rollout,
        seconds={phase: number for phase, number in seconds.items() if number > 0},
        microbatches=training.microbatches,
        idle_share=1 - 1 / training.idle_factor,
    )


def _training_phases(training: StepInputs) -> dict[str, float]:
    """Seconds of the phases from log-probs to the update that the run has.

    What it takes to bring an offloaded reference, critic or teacher is left out, and the output
    layer that a loss on the whole vocabulary computes again."""
    config = training.config
    shapes = training.shapes
    seconds = {}
    if recomputes_logprobs(config.algorithm, config.on_policy):
        seconds["logprobs"] = logprobs_seconds(training)
    if config.algorithm.kl_coef > 0:
        seconds["reference"] = logprobs_seconds(training)
    if shapes.critic is not None:
        algorithm = replace(config.algorithm, epochs=critic_epochs(config))
        as_critic = replace(config, algorithm=algorithm, lora=NO_LORA)
        values = replace(training, config=as_critic, shape=shapes.critic)
        seconds["critic"] = logprobs_seconds(values) + update_seconds(values)
    if shapes.teacher is not None:
        # In its embedding it has as many rows as the policy.
        teacher = replace(shapes.teacher, vocab_size=shapes.policy.vocab_size)
        seconds["teacher"] = logprobs_seconds(replace(training, shape=teacher))
    return seconds | {"update": update_seconds(training)}


def recomputes_logprobs(algorithm: AlgorithmConfig, on_policy: bool) -> bool:
    """Whether a step has a pass for the policy's own log-probs.

    It has none where its one minibatch gives them itself (`Config.on_policy`)."""
    return algorithm.selects_tokens or (algorithm.recomputes and not on_policy)


def sync_seconds(inputs: StepInputs) -> float:
    """Seconds of a weight sync.

    Every engine rank's weights are copied, or its adapters alone where the base stays; where the
    layouts differ, other ranks have sent them, all at most."""
    mesh = inputs.mesh
    cluster = inputs.cluster
    engine = engine_of(inputs)
    keeps = keeps_base(inputs.config, inputs.shapes, cluster.ranks, target=inputs.target)
    sent = engine.adapters if keeps else engine.weights
    is_own = mesh.pipeline == mesh.expert == 1 and mesh.tensor == mesh.engine_size
    return cluster.memory_seconds(2 * sent) + cluster.link_seconds(
        0 if is_own else sent, 0, mesh.world_size
    )


def switch_seconds(inputs: StepInputs) -> float:
    """Seconds of switching the memory between training and the engine.

    What is offloaded while the engine samples goes to the host and comes back; gradients hold
    nothing then."""
    config = inputs.config
    cluster = inputs.cluster
    plan, _ = largest(plan_ranks(config, inputs.shapes, cluster.ranks, target=inputs.target))
    names = [
        name for name in ("optimizer", "parameters") if getattr(config.memory, f"offload_{name}")
    ]
    return cluster.host_seconds(2.0 * sum(map(plan.part, names)))


# ---------------------------------------------------------------- layouts


@dataclass(frozen=True)
class Comparison:
    """The layouts of a run on a cluster."""

    plans: tuple[StepPlan, ...]
    """Layouts that are legal and fit, fastest first."""
    without_room: int
    """Layouts that the memory of the devices is too small for."""


def with_layout(config: Config, tensor: int, pipeline: int, engine: int) -> Config:
    """The settings with another layout; data-parallel ranks are what remains.

    Chunks and uneven stages belong to the layout that the settings have, and are left out of
    another."""
    unchanged = tensor == config.parallel.tensor and pipeline == config.parallel.pipeline
    stages = (
        {}
        if unchanged
        else {"virtual_pipeline": 1, "first_stage_layers": None, "last_stage_layers": None}
    )
    parallel = replace(config.parallel, data=None, tensor=tensor, pipeline=pipeline, **stages)
    rollout = replace(config.rollout, tensor_parallel=engine)
    return replace(config, parallel=parallel, rollout=rollout)


def layouts_of(config: Config, inspected: InspectedShapes, cluster: Cluster) -> Iterator[Config]:
    """Layouts of TP x PP x engine TP that no check refuses.

    Tensor-parallel ranks stay within a node."""
    inside = divisors(cluster.ranks_per_node)
    for engine in inside:
        for tensor in inside:
            for pipeline in divisors(inspected.shapes.policy.num_layers):
                layout = with_layout(config, tensor, pipeline, engine=engine)
                if not problems_of(layout, inspected, cluster):
                    yield layout


def problems_of(config: Config, inspected: InspectedShapes, cluster: Cluster) -> list[str]:
    """Problems of this layout, except those of memory."""
    shape = inspected.shapes.policy
    return [
        *setting_problems(config, inspected.shapes.length_stages, cluster.ranks),
        *shape_problems(config, inspected),
        *(device_problems(config, shape, on_gpu=False) if cluster.machine.kind == "cpu" else ()),
    ]


def compare_layouts(inputs: StepInputs) -> Comparison:
    """All layouts of a step; ties go to the layout with fewer ranks to a copy of the model."""
    shapes = inputs.shapes
    target = inputs.target
    cluster = inputs.cluster
    batch = inputs.batch
    plans = []
    without_room = 0
    for layout in layouts_of(inputs.config, InspectedShapes(shapes, {}), cluster):
        if memory_problems(layout, shapes, cluster.ranks):
            without_room += 1
        else:
            plans.append(
                plan_step(step_inputs(layout, shapes, target, cluster=cluster, batch=batch))
            )
    return Comparison(tuple(sorted(plans, key=_by_seconds)), without_room)


def _by_seconds(plan: StepPlan) -> tuple[float, int, int]:
    return plan.step_seconds, plan.mesh.tensor * plan.mesh.pipeline, plan.mesh.engine_size
