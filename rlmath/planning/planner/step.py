"""A step of a run on a cluster, predicted: its work and its seconds, phase by phase, on one layout or on every one.

A step switches from training to sampling and back, syncs weights, samples, and trains; where engines have ranks of
their own (`rollout.ranks`), they sample while the others train; what it
takes to send them weights is left out. Weights move as the plan of a sync says
(`weight_sync.reshard_plan`); here their bytes follow from the two layouts as if the model were one even row of numbers,
which costs nothing for a thousand ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config
from rlmath.data.dataset import critic_epochs
from rlmath.distributed.mesh import Mesh
from rlmath.models.hf_config import critic_shape_of, teacher_shape_of
from rlmath.planning.checks import device_problems, memory_problems, setting_problems, shape_problems
from rlmath.planning.memory_estimate import (
    MemoryPlan,
    Target,
    expert_sizes,
    largest,
    mesh_of,
    parameter_sizes,
    plan_ranks,
    without_adapters,
)
from rlmath.planning.planner.lengths import Batch, lengths_with_mean
from rlmath.planning.planner.sampling import BUCKET_MESSAGES, PlannedRollout, engine_of, rollout_of
from rlmath.planning.planner.training import StepInputs, critic_work, logprobs_work, update_work
from rlmath.planning.planner.work import Cluster, Coefficients, Work, seconds_by_coefficient, seconds_of
from rlmath.rollout.weight_sync.reshard_plan import bucket_bytes

PHASES = ("switch", "sync", "rollout", "logprobs", "reference", "critic", "teacher", "update", "other")
"""In the order of a step; the switch is both ways. Where engines have no ranks of their own, phases take turns on the
same memory, none runs beside another."""
TYPICAL_SHARE = 0.3
"""Mean completion as a share of the longest, where not given: 0.29 to 0.31 for R1 models and 27,648 tokens."""
TYPICAL_PROMPT = 128
"""Mean prompt (tokens) where not given; AReaL's step log has 108."""
JUDGED_PER_SECOND = 3500.0
"""Answers that one reward worker checks (docs/benchmarks.md, on two server cores)."""


# ---------------------------------------------------------------- the step


@dataclass(frozen=True)
class StepPlan:
    """A step's prediction."""

    config: Config
    mesh: Mesh
    cluster: Cluster
    batch: Batch
    parts: Mapping[str, Mapping[str, float]]
    """Seconds by phase, by coefficient."""
    rollout: PlannedRollout
    microbatches: int
    """Micro-batches of a minibatch on a data-parallel rank."""
    idle_share: float
    """Share of the update's seconds in which the pipeline's stages wait for one another."""
    tail_seconds: float
    """Seconds of the rollout when no request waits any more."""
    judging_seconds: float
    """Seconds that the workers of an engine judge, while it samples."""

    @property
    def seconds(self) -> dict[str, float]:
        """By phase."""
        return {phase: sum(parts.values()) for phase, parts in self.parts.items()}

    @property
    def overlaps(self) -> bool:
        """Whether engines sample on while the other ranks train."""
        return self.config.rollout.ranks > 0 and self.config.rollout.max_staleness > 0

    @property
    def engine_seconds(self) -> float:
        return self.seconds["rollout"]

    @property
    def trainer_seconds(self) -> float:
        return sum(self.seconds.values()) - self.engine_seconds

    @property
    def step_seconds(self) -> float:
        return self._working_seconds + self.judging_exposed

    @property
    def _working_seconds(self) -> float:
        sides = self.trainer_seconds, self.engine_seconds
        return max(sides) if self.overlaps else sum(sides)

    @property
    def judging_exposed(self) -> float:
        """What of judging is not hidden behind the rollout, or behind the step where engines never wait."""
        beside = self._working_seconds if self.overlaps else self.seconds["rollout"]
        return max(0.0, self.judging_seconds - beside)


def batch_of(config: Config, mean_response: float | None = None, mean_prompt: float | None = None) -> Batch:
    """The sequences of a step with completions and prompts of these mean lengths (tokens), or of typical ones.

    Errors: ValueError for lengths that the settings do not allow.
    """
    longest, longest_prompt = config.rollout.max_new_tokens, config.data.max_prompt_tokens
    mean = max(1.0, TYPICAL_SHARE * longest) if mean_response is None else mean_response
    prompt = float(min(TYPICAL_PROMPT, longest_prompt)) if mean_prompt is None else mean_prompt
    if not 1 <= prompt <= longest_prompt:
        problem = f"the mean prompt is {prompt:g} tokens; needed: from 1 to data.max_prompt_tokens, {longest_prompt}"
        raise ValueError(f"{problem} (--mean-prompt-tokens)")
    group = config.rollout.group_size
    return Batch(config.data.prompts_per_step * group, group, prompt, lengths_with_mean(mean, longest))


def step_inputs(
    config: Config, shape: ModelShape, target: Target, cluster: Cluster, batch: Batch
) -> StepInputs:
    """What the work of a step follows from, with one stage's settings, on the whole cluster. The layout has no problems
    (`planning.parallelism`)."""
    return StepInputs(
        config, shape, mesh=mesh_of(config, cluster.ranks, 0), target=target, cluster=cluster, batch=batch
    )


def plan_step(inputs: StepInputs, coefficients: Coefficients) -> StepPlan:
    """A step and its seconds. With engines on ranks of their own trainers are the first ranks, and nothing is switched
    or offloaded for engines."""
    config, cluster, machine = inputs.config, inputs.cluster, inputs.cluster.machine
    own, rollout = config.rollout.ranks, rollout_of(inputs)
    training = replace(inputs, cluster=cluster.first(cluster.ranks - own))
    memory, _ = largest(plan_ranks(config, inputs.shape, cluster.ranks, inputs.target))
    work = {"rollout": rollout.work} | _training_phases(training)
    if not own:
        work = {"switch": switch_work(config, memory, inputs.target), "sync": sync_work(inputs)} | work
    # Every trainer gets all that engines on ranks of their own sample.
    handled = inputs.batch.tokens * (1 / training.parts + bool(own))
    work["other"] = Work(steps=1, tokens=handled)
    return StepPlan(
        config,
        inputs.mesh,
        cluster=cluster,
        batch=inputs.batch,
        parts={phase: seconds_by_coefficient(done, machine, coefficients) for phase, done in work.items()},
        rollout=rollout,
        microbatches=training.microbatches,
        idle_share=1 - 1 / training.idle_factor,
        tail_seconds=tail_seconds(rollout, cluster, coefficients),
        judging_seconds=rollout.sampled.count
        / inputs.mesh.num_engines
        / config.reward.workers
        / JUDGED_PER_SECOND,
    )


def _training_phases(training: StepInputs) -> dict[str, Work]:
    """From log-probs to the update; those that the run has. What it takes to bring an offloaded reference, critic or
    teacher is left out, and the output layer that a loss on the whole vocabulary computes again."""
    config, work = training.config, {}
    if recomputes_logprobs(config):
        work["logprobs"] = logprobs_work(training)
    if config.algorithm.kl_coef > 0:
        work["reference"] = logprobs_work(training)
    if (critic := critic_shape_of(config, training.shape)) is not None:
        as_critic = replace(config, algorithm=replace(config.algorithm, epochs=critic_epochs(config)))
        as_critic = without_adapters(as_critic)
        work["critic"] = critic_work(replace(training, config=as_critic, shape=critic))
    if (teacher := teacher_shape_of(config)) is not None:
        rows = training.shape.vocab_size  # of its embedding, as the policy's
        work["teacher"] = logprobs_work(replace(training, shape=replace(teacher, vocab_size=rows)))
    return work | {"update": update_work(training)}


def recomputes_logprobs(config: Config) -> bool:
    """Whether a step has a pass for the policy's own log-probs: not where its one minibatch gives them itself
    (`PolicyUpdater.on_policy`)."""
    algorithm, teacher = config.algorithm, config.teacher
    only_one = algorithm.n_minibatches == algorithm.epochs == 1
    in_reward = algorithm.kl_coef > 0 and algorithm.kl_in == "reward"
    in_advantages = in_reward or (teacher.path is not None and teacher.loss == "advantage")
    recomputes = algorithm.recomputes and (in_advantages or not only_one)
    return recomputes or algorithm.selects_tokens


def tail_seconds(rollout: PlannedRollout, cluster: Cluster, coefficients: Coefficients) -> float:
    """What the steps of the tail cost whatever their batch: the weights, and the engine's own time."""
    share = rollout.tail_steps / rollout.steps
    weights, messages = rollout.weights * rollout.tail_steps, rollout.work.messages * share
    fixed = Work(memory=weights, decode_steps=rollout.tail_steps, messages=messages)
    return seconds_of(fixed, cluster.machine, coefficients)


# ---------------------------------------------------------------- weight sync, offloading and onloading


def sync_work(inputs: StepInputs) -> Work:
    """Every engine rank's weights: copied from the rank's own shard as far as it has them, else sent by another."""
    config, shape, mesh, kind = inputs.config, inputs.shape, inputs.mesh, inputs.target.kind
    weights = engine_of(inputs).weights
    experts = expert_share(shape)
    own = (1 - experts) * own_share(mesh, mesh.tensor)
    own += experts * own_share(mesh, mesh.expert_tensor) / mesh.expert
    received = weights * (1 - own)
    rounds = math.ceil(received / bucket_bytes(config.sync.bucket_mib, kind, mesh.world_size))
    replica = math.lcm(mesh.tensor * mesh.context, mesh.expert * mesh.expert_tensor)
    inside = inputs.cluster.in_a_node(replica if mesh.pipeline == 1 else mesh.world_size)
    return Work(
        memory=2.0 * weights,
        node=received if inside else 0.0,
        network=0.0 if inside else received,
        messages=BUCKET_MESSAGES * rounds,
    )


def own_share(mesh: Mesh, tensor: int) -> float:
    """Share of its engine's weights that a rank holds itself, mean over the ranks; of those that `tensor` ranks share.

    >>> own_share(Mesh(0, 4, 2, pipeline=1, engine_size=1), 2), own_share(Mesh(0, 4, 2, 1, engine_size=2), 2)
    (0.5, 1.0)
    """
    engine = mesh.engine_size
    period = math.lcm(tensor, engine)
    total = sum(_overlap(rank % tensor, tensor, rank % engine, engine) * engine for rank in range(period))
    return total / period / mesh.pipeline


def expert_share(shape: ModelShape) -> float:
    """Share of a model's parameters that its experts have (0 to 1)."""
    if not shape.num_experts:
        return 0.0
    whole = Mesh(0, 1, 1, 1, 1)
    experts = sum(map(sum, expert_sizes(shape, whole, shape.num_layers)))
    return experts / (experts + sum(map(sum, parameter_sizes(shape, whole, shape.num_layers))))


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
    if target.kind == "cpu":  # the host's memory is the device's
        return Work(switches=1, memory=2.0 * 2.0 * moved)
    return Work(switches=1, host=2.0 * moved)


# ---------------------------------------------------------------- layouts


@dataclass(frozen=True)
class Comparison:
    """The layouts of a run on a cluster."""

    plans: tuple[StepPlan, ...]
    """Layouts that are legal and fit, fastest first."""
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
    for engine in inside:
        for tensor in inside:
            for pipeline in _divisors(shape.num_layers):
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


def compare_layouts(inputs: StepInputs, coefficients: Coefficients) -> Comparison:
    """All layouts of a step; ties go to the layout with fewer ranks to a copy of the model."""
    shape, target, cluster, batch = inputs.shape, inputs.target, inputs.cluster, inputs.batch
    plans, without_room = [], 0
    for found in layouts_of(inputs.config, shape, cluster):
        if memory_problems(found, shape, cluster.ranks):
            without_room += 1
        else:
            plans.append(plan_step(step_inputs(found, shape, target, cluster, batch), coefficients))
    return Comparison(tuple(sorted(plans, key=_by_seconds)), without_room)


def _by_seconds(plan: StepPlan) -> tuple[float, int, int]:
    return plan.step_seconds, plan.mesh.tensor * plan.mesh.pipeline, plan.mesh.engine_size


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
