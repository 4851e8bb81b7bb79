"""What a step may do about its longest completions, predicted side by side, and which is fastest: every `rollout.tail`,
and engines on ranks of their own (`rollout.ranks`), which wait for none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config
from rlmath.planning.memory_estimate import Target
from rlmath.planning.planner.lengths import Batch
from rlmath.planning.planner.machines import Cluster
from rlmath.planning.planner.splits import (
    colocated,
    compare_splits,
    engine_ranks,
    for_old_tokens,
    start_problems,
)
from rlmath.planning.planner.step import StepPlan, plan_step
from rlmath.planning.planner.work import Coefficients
from rlmath.rollout.flight_rules import flight_rules, slice_tokens

STALENESS = (1, 2, 3, 5, 7)
"""`rollout.max_staleness` that a search for settings of "carry" tries."""
SLICES = ((1, 4), (1, 3), (1, 2), (2, 3))
"""`rollout.slice_tokens` that a search for settings of "defer" tries: shares of the longest completion."""
ASYNCHRONOUS_STALENESS = (1, 2, 4, 8)
"""`rollout.max_staleness` that a search for settings of engines on ranks of their own tries, as AReaL's ablation
(arXiv:2505.24298, table 2)."""


@dataclass(frozen=True)
class Tails:
    """The step of a run with each `rollout.tail`, and with engines on ranks of their own."""

    wait: StepPlan
    carry: StepPlan | None
    """With the run's settings of partial rollouts, or their defaults; None: it cannot carry with them."""
    found: tuple[StepPlan, ...]
    """Carrying with other settings, the fastest for each staleness, least first; empty where none were looked for, or
    it cannot carry."""
    problems: tuple[str, ...]
    """What keeps the run from carrying."""
    defer: StepPlan
    """With the run's `rollout.slice_tokens`, or its default."""
    found_defer: StepPlan | None
    """The fastest with other slices; None where none were looked for, or none is faster."""
    asynchronous: StepPlan | None
    """With the run's `rollout.ranks`, or the split of the ranks that is predicted fastest; None: there is no split."""
    found_asynchronous: tuple[StepPlan, ...]
    """With other staleness, each with its fastest split, least first; empty where none were looked for."""
    asynchronous_problems: tuple[str, ...]
    """What keeps the run from every split of its ranks."""

    @property
    def plans(self) -> tuple[StepPlan, ...]:
        own = (self.wait, self.carry, *self.found, self.defer, self.found_defer)
        every = (*own, self.asynchronous, *self.found_asynchronous)
        return tuple(plan for plan in every if plan is not None)

    @property
    def fastest(self) -> StepPlan:
        return min(self.plans, key=_seconds)


def compare_tails(
    config: Config,
    shape: ModelShape,
    target: Target,
    cluster: Cluster,
    batch: Batch,
    coefficients: Coefficients,
    search: bool,
) -> Tails:
    """`config` is that of one stage. `search` looks for other settings of "carry" and "defer", and for other staleness
    and splits of engines on ranks of their own."""
    own, config = config, colocated(config)

    def planned(one: Config) -> StepPlan:
        return plan_step(one, shape, target, cluster, batch, coefficients)

    def fastest(ways: Iterable[Config]) -> StepPlan:
        return min(map(planned, ways), key=_seconds)

    wait, carried = replace(config, rollout=replace(config.rollout, tail="wait")), colocated(carrying(own))
    defer = found_defer = planned(deferring(config, config.rollout.slice_tokens))
    if search:
        found_defer = min(defer, fastest(with_other_slices(config)), key=_seconds)
    slices = defer, found_defer if found_defer is not defer else None
    others = _asynchronous(own, shape, target, cluster, batch, coefficients, search)
    problems = tuple(start_problems(carried, shape, cluster.ranks))
    if problems:
        return Tails(planned(wait), None, (), problems, *slices, *others)
    carry = planned(carried)
    ways = with_more_staleness(own) if search else ()
    found = (fastest(map(colocated, some)) for some in ways)
    more = tuple(plan for plan in found if settings_of_tail(plan) != settings_of_tail(carry))
    return Tails(planned(wait), carry, more, (), *slices, *others)


def _asynchronous(
    config: Config,
    shape: ModelShape,
    target: Target,
    cluster: Cluster,
    batch: Batch,
    coefficients: Coefficients,
    search: bool,
) -> tuple[StepPlan | None, tuple[StepPlan, ...], tuple[str, ...]]:
    """The last three of `Tails`."""
    splits = compare_splits(config, shape, target, cluster, batch, coefficients)
    own = splits.best
    if config.rollout.ranks > 0:
        own = plan_step(config, shape, target, cluster, batch, coefficients)
    if own is None:
        return None, (), splits.problems
    found = []
    for staleness in ASYNCHRONOUS_STALENESS if search else ():
        one = replace(config, rollout=replace(config.rollout, max_staleness=staleness))
        best = compare_splits(one, shape, target, cluster, batch, coefficients).best
        if best is not None and settings_of_tail(best) != settings_of_tail(own):
            found.append(best)
    return own, tuple(found), ()


def _seconds(plan: StepPlan) -> float:
    return plan.step_seconds


def carrying(config: Config) -> Config:
    """The same run with partial rollouts, and with what these need of the algorithm."""
    rollout = replace(config.rollout, tail="carry")
    return replace(config, rollout=rollout, algorithm=for_old_tokens(config))


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


def deferring(config: Config, length: int | None) -> Config:
    """The same run with tail batching; None: slices of the default length."""
    return replace(config, rollout=replace(config.rollout, tail="defer", slice_tokens=length))


def with_other_slices(config: Config) -> Iterator[Config]:
    """The ways to defer that are tried."""
    for part, of in SLICES:
        yield deferring(config, -(-config.rollout.max_new_tokens * part // of))


def settings_of_tail(plan: StepPlan) -> dict[str, str | int | float]:
    """The settings of `rollout` that a plan's step goes by, with their defaults filled in; "asynchronous" stands for
    engines on ranks of their own. With "carry" how old the tokens are that a step learns from (steps, mean); with
    "defer" the share of the groups that are deferred, and of the sampled tokens that are discarded."""
    rollout, carry, defer = plan.config.rollout, plan.rollout.carry, plan.rollout.defer
    if plan.overlap is not None:
        return {
            "tail": "asynchronous",
            "ranks": engine_ranks(plan),
            "max_staleness": rollout.max_staleness,
            "on_new_weights": rollout.on_new_weights,
        }
    if defer is not None:
        return {
            "tail": "defer",
            "slice_tokens": slice_tokens(rollout),
            "deferred": defer.deferred,
            "discarded": defer.discarded,
        }
    if carry is None:
        return {"tail": "wait"}
    return {
        "tail": "carry",
        "max_staleness": rollout.max_staleness,
        "slice_tokens": slice_tokens(rollout),
        "max_groups_in_flight": flight_rules(plan.config).max_groups,
        "staleness": carry.staleness,
    }
