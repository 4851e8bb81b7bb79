"""A step of a run on a cluster, predicted: its work and its seconds, phase by phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import AlgorithmConfig, Config
from rlmath.distributed.mesh import Mesh
from rlmath.planner.coefficients import Coefficients, seconds_by_coefficient, seconds_of
from rlmath.planner.lengths import Batch, lengths_with_mean
from rlmath.planner.machines import Cluster
from rlmath.planner.rollout import Rollout, rollout_of
from rlmath.planner.switching import reference_switch_work, switch_work, sync_work
from rlmath.planner.training import (
    BACKWARD,
    FORWARD,
    Training,
    forward_cost,
    head_flops,
    logprobs_work,
    update_passes,
    update_work,
)
from rlmath.planner.work import Work
from rlmath.trainer.preflight.memory_estimate import Target, largest, mesh_of, plan_ranks

PHASES = ("switch", "sync", "rollout", "logprobs", "reference", "update", "other")
"""In the order of a step; the switch is both ways. They take turns on the same memory, none runs beside another."""
TYPICAL_SHARE = 0.3
"""Mean completion as a share of the longest, where nobody says: 0.29 to 0.31 for R1 models and 27,648 tokens."""
TYPICAL_PROMPT = 128
"""Mean prompt (tokens) where nobody says; AReaL's step log has 108."""
JUDGED_PER_SECOND = 3500.0
"""Answers that one worker judges (docs/benchmarks.md, on two server cores)."""


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of a step over all ranks, without what is idle."""

    sampling: float
    """Of the tokens that are sampled, without prompts."""
    forward: float
    """Of the update and of log-probs."""
    backward: float
    recomputed: float


@dataclass(frozen=True)
class StepPlan:
    """A step's prediction."""

    config: Config
    mesh: Mesh
    cluster: Cluster
    batch: Batch
    work: Mapping[str, Work]
    """By phase, those that the run has."""
    parts: Mapping[str, Mapping[str, float]]
    """Seconds by phase, by coefficient."""
    rollout: Rollout
    microbatches: int
    """Of a minibatch on a data-parallel rank."""
    idle_share: float
    """Of the update's seconds, in which the pipeline's stages wait for one another."""
    tail_seconds: float
    """Of the rollout, when no request waits any more."""
    judging_seconds: float
    """Of the workers of an engine, while it samples."""
    flops: StepFlops

    @property
    def seconds(self) -> dict[str, float]:
        """By phase."""
        return {phase: sum(parts.values()) for phase, parts in self.parts.items()}

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values()) + self.judging_exposed

    @property
    def judging_exposed(self) -> float:
        """What of judging is not hidden behind the rollout."""
        return max(0.0, self.judging_seconds - self.seconds["rollout"])


def batch_of(config: Config, mean_response: float | None = None, mean_prompt: float | None = None) -> Batch:
    """The sequences of a step with completions and prompts of these mean lengths (tokens), or of typical ones.

    Errors: ValueError for lengths that the settings do not allow.
    """
    longest, longest_prompt = config.rollout.max_new_tokens, config.data.max_prompt_tokens
    mean = max(1.0, TYPICAL_SHARE * longest) if mean_response is None else mean_response
    prompt = float(min(TYPICAL_PROMPT, longest_prompt)) if mean_prompt is None else mean_prompt
    if not 1 <= prompt <= longest_prompt:
        told = f"the mean prompt is {prompt:g} tokens; needed: from 1 to data.max_prompt_tokens, {longest_prompt}"
        raise ValueError(f"{told} (--mean-prompt-tokens)")
    group = config.rollout.group_size
    return Batch(config.data.prompts_per_step * group, group, prompt, lengths_with_mean(mean, longest))


def plan_step(
    config: Config,
    shape: ModelShape,
    target: Target,
    cluster: Cluster,
    batch: Batch,
    coefficients: Coefficients,
) -> StepPlan:
    """The layout must have no problems (`preflight.parallelism`)."""
    mesh, machine = mesh_of(config, cluster.ranks, 0), cluster.machine
    training = Training(config, shape, mesh, target, cluster, batch)
    rollout = rollout_of(config, shape, target, cluster, batch, cluster.ranks)
    memory, _ = largest(plan_ranks(config, shape, cluster.ranks, target))
    work = {
        "switch": switch_work(config, memory, target),
        "sync": sync_work(config, shape, mesh, target, cluster),
        "rollout": rollout.work,
    }
    if recomputes_logprobs(config.algorithm):
        work["logprobs"] = logprobs_work(training)
    if config.algorithm.kl_coef > 0:
        work["reference"] = logprobs_work(training) + reference_switch_work(config, memory, target)
    work |= {"update": update_work(training), "other": Work(steps=1, tokens=batch.tokens / training.parts)}
    parts = {phase: seconds_by_coefficient(done, machine, coefficients) for phase, done in work.items()}
    return StepPlan(
        config,
        mesh,
        cluster,
        batch,
        work,
        parts,
        rollout,
        training.microbatches,
        1 - 1 / training.idle_factor,
        tail_seconds(rollout, cluster, coefficients),
        batch.sequences / mesh.engines / config.reward.workers / JUDGED_PER_SECOND,
        step_flops(training),
    )


def recomputes_logprobs(algorithm: AlgorithmConfig) -> bool:
    """Whether a step has a pass for the policy's own log-probs: not where its one minibatch gives them itself
    (`update.Updater`)."""
    only_one = algorithm.n_minibatches == algorithm.epochs == 1
    in_reward = algorithm.kl_coef > 0 and algorithm.kl_in == "reward"
    return algorithm.recompute_logprobs and (in_reward or not only_one)


def tail_seconds(rollout: Rollout, cluster: Cluster, coefficients: Coefficients) -> float:
    """What the steps of the tail cost whatever their batch: the weights, and the engine's own time."""
    share = rollout.tail_steps / rollout.steps
    weights, messages = rollout.weights * rollout.tail_steps, rollout.work.messages * share
    fixed = Work(memory=weights, decode_steps=rollout.tail_steps, messages=messages)
    return seconds_of(fixed, cluster.machine, coefficients)


def step_flops(training: Training) -> StepFlops:
    """FLOPs of a step, of the whole cluster."""
    config, shape, batch = training.config, training.shape, training.batch
    cost, algorithm = forward_cost(shape), config.algorithm
    head = batch.tokens * head_flops(shape)
    layers, attention = batch.tokens * cost.linear - head, batch.squares * cost.quadratic
    one_pass = layers + head + attention
    chunk = shape.num_layers // training.mesh.pipeline // training.mesh.virtual_pipeline
    passes, both = update_passes(config.policy, max(1, chunk)), FORWARD + BACKWARD
    recomputed = layers * (passes.linear - both) + attention * (passes.attention - both)
    alone = recomputes_logprobs(algorithm) + (algorithm.kl_coef > 0)
    prompts = batch.sequences * batch.prompt_tokens
    sampled = batch.tokens - prompts
    return StepFlops(
        sampled * cost.linear + cost.quadratic * (batch.squares - prompts * batch.prompt_tokens),
        FORWARD * one_pass * (algorithm.epochs + alone),
        BACKWARD * one_pass * algorithm.epochs,
        recomputed * algorithm.epochs,
    )
