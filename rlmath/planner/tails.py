"""What a step may do about its longest completions (`rollout.tail`), predicted side by side, and which is fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import AlgorithmConfig, Config
from rlmath.planner.lengths import Batch
from rlmath.planner.machines import Cluster
from rlmath.planner.step import StepPlan, plan_step
from rlmath.planner.work import Coefficients
from rlmath.trainer.preflight.checks import run_problems
from rlmath.trainer.preflight.memory_estimate import Target
from rlmath.trainer.rollouts import flight_rules, slice_tokens

STALENESS = (1, 2, 3, 5, 7)
"""`rollout.max_staleness` that a search for settings tries."""
LARGEST_WEIGHT = 5.0
"""`algorithm.importance_mask_high` of configs/algorithms/decoupled.yaml."""


@dataclass(frozen=True)
class Tails:
    """The step of a run with each `rollout.tail`."""

    wait: StepPlan
    carry: StepPlan | None
    """With the run's settings of partial rollouts, or their defaults; None: it cannot carry with them."""
    found: tuple[StepPlan, ...]
    """Carrying with other settings, the fastest for each staleness, least first; empty where none were looked for, or
    it cannot carry."""
    problems: tuple[str, ...]
    """What keeps the run from carrying."""

    @property
    def plans(self) -> tuple[StepPlan, ...]:
        return (self.wait, *([self.carry] if self.carry else ()), *self.found)

    @property
    def fastest(self) -> StepPlan:
        return min(self.plans, key=lambda plan: plan.step_seconds)


def compare_tails(
    config: Config,
    shape: ModelShape,
    target: Target,
    cluster: Cluster,
    batch: Batch,
    coefficients: Coefficients,
    search: bool,
) -> Tails:
    """`config` is that of one stage. `search` looks for other settings of partial rollouts."""

    def planned(one: Config) -> StepPlan:
        return plan_step(one, shape, target, cluster, batch, coefficients)

    wait, own = replace(config, rollout=replace(config.rollout, tail="wait")), carrying(config)
    problems = tuple(carry_problems(own, shape, cluster.ranks))
    if problems:
        return Tails(planned(wait), None, (), problems)
    carry = planned(own)
    fastest = [
        min(map(planned, ways), key=lambda plan: plan.step_seconds)
        for ways in (with_more_staleness(config) if search else ())
    ]
    others = tuple(plan for plan in fastest if settings_of_tail(plan) != settings_of_tail(carry))
    return Tails(planned(wait), carry, others, ())


def carry_problems(config: Config, shape: ModelShape, ranks: int) -> list[str]:
    """What keeps a run from carrying completions into the next step, or from starting at all. A reward function of the
    user's is not looked for."""
    return run_problems(replace(config, reward=replace(config.reward, function=None)), ranks, shape)


def carrying(config: Config) -> Config:
    """The same run with partial rollouts, and with what these need of the algorithm."""
    rollout = replace(config.rollout, tail="carry")
    algorithm = corrected(config.algorithm) if rollout.max_staleness > 0 else config.algorithm
    return replace(config, rollout=rollout, algorithm=algorithm)


def corrected(algorithm: AlgorithmConfig) -> AlgorithmConfig:
    """With a bounded weight for tokens that older weights have sampled, where it has none: as
    configs/algorithms/decoupled.yaml."""
    bounded = algorithm.importance_cap is not None or algorithm.importance_mask_high is not None
    return replace(
        algorithm,
        recompute_logprobs=True,
        importance_correction=algorithm.importance_correction or "token",
        importance_mask_high=algorithm.importance_mask_high if bounded else LARGEST_WEIGHT,
    )


def with_more_staleness(config: Config) -> Iterator[list[Config]]:
    """By `STALENESS`, the ways to carry with it that are tried, all with as many groups in flight as may be:

    1. Slices of the default length: a step makes a round unless it has enough complete groups already, and the longest
       completion takes as many rounds as it may take steps.
    2. Above staleness 1, slices twice as long: fewer steps make a round, and less is prefilled again.

    With fewer groups in flight a step makes more rounds, in each of which completions are prefilled again.
    """
    for staleness in STALENESS:
        rollout = replace(
            config.rollout, max_staleness=staleness, slice_tokens=None, max_groups_in_flight=None
        )
        ways = [rollout]
        if staleness > 1:
            ways.append(replace(rollout, slice_tokens=-(-2 * rollout.max_new_tokens // (staleness + 1))))
        yield [carrying(replace(config, rollout=one)) for one in ways]


def settings_of_tail(plan: StepPlan) -> dict[str, str | int | float]:
    """The settings of `rollout` that a plan's step goes by; of partial rollouts with their defaults filled in, and how
    old the tokens are that a step learns from (steps, mean)."""
    rollout, carry = plan.config.rollout, plan.rollout.carry
    if carry is None:
        return {"tail": "wait"}
    return {
        "tail": "carry",
        "max_staleness": rollout.max_staleness,
        "slice_tokens": slice_tokens(rollout),
        "max_groups_in_flight": flight_rules(plan.config).max_groups,
        "staleness": carry.staleness,
    }
