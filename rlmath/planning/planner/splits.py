"""How many ranks of an asynchronous run are the engines' (`rollout.ranks`): every legal split, predicted."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import AlgorithmConfig, Config
from rlmath.planning.checks import memory_problems, run_problems
from rlmath.planning.memory_estimate import Target
from rlmath.planning.planner.lengths import Batch
from rlmath.planning.planner.machines import Cluster
from rlmath.planning.planner.step import StepPlan, plan_step, problems_of
from rlmath.planning.planner.work import Coefficients

LARGEST_WEIGHT = 5.0
"""`algorithm.importance_mask_high` of configs/algorithms/decoupled.yaml."""
SHOWN = ((1, 4), (1, 2), (5, 8), (3, 4), (7, 8))
"""Shares of all ranks whose nearest splits a table shows beside the fastest."""


@dataclass(frozen=True)
class Splits:
    """The splits of a cluster's ranks between trainers and engines."""

    plans: tuple[StepPlan, ...]
    """Those that are legal and fit, fewest engine ranks first."""
    without_room: int
    """Splits that the memory of the devices is too small for."""
    problems: tuple[str, ...] = ()
    """What keeps the run from every split; empty where there are plans."""

    @property
    def best(self) -> StepPlan | None:
        """The fastest; of equal ones that with fewer engine ranks."""
        return min(self.plans, key=lambda plan: plan.step_seconds, default=None)

    def shown(self, own: StepPlan | None = None) -> tuple[StepPlan, ...]:
        """A few, fewest engine ranks first: those nearest to `SHOWN`, the fastest, and `own`."""
        if self.best is None:
            return () if own is None else (own,)
        chosen = {engine_ranks(plan): plan for plan in (self.best, *(() if own is None else (own,)))}
        for part, of in SHOWN:
            wanted = self.best.cluster.ranks * part / of
            near = min(self.plans, key=lambda plan: abs(engine_ranks(plan) - wanted))
            chosen.setdefault(engine_ranks(near), near)
        return tuple(chosen[ranks] for ranks in sorted(chosen))


def engine_ranks(plan: StepPlan) -> int:
    return plan.config.rollout.ranks


def compare_splits(
    config: Config,
    shape: ModelShape,
    target: Target,
    cluster: Cluster,
    batch: Batch,
    coefficients: Coefficients,
) -> Splits:
    """`config` is that of one stage, asynchronous or not. A split has its layout of a copy of the model, its size of an
    engine, its staleness and its shares of memory, and what `asynchronous` adds."""
    plans, without_room = [], 0
    legal, problems = splits_of(config, shape, cluster)
    if legal:
        problems = start_problems(legal[0], shape, cluster.ranks)
    for found in () if problems else legal:
        if memory_problems(found, shape, cluster.ranks):
            without_room += 1
        else:
            plans.append(plan_step(found, shape, target, cluster, batch, coefficients))
    if without_room and not plans:
        problems = [
            f"no split of the {cluster.ranks} ranks fits the memory of the devices. Give a copy of the model more "
            "ranks (parallel.tensor, parallel.pipeline) or an engine (rollout.tensor_parallel), or start more ranks."
        ]
    return Splits(tuple(plans), without_room, tuple(problems))


def splits_of(config: Config, shape: ModelShape, cluster: Cluster) -> tuple[list[Config], list[str]]:
    """The settings with every number of engine ranks that no check of the layout refuses, fewest first; where there is
    none, what is wrong with the half of the ranks."""
    engine = config.rollout.tensor_parallel
    every = [asynchronous(config, ranks) for ranks in range(engine, cluster.ranks, engine)]
    problems = [problems_of(one, shape, cluster) for one in every]
    legal = [one for one, wrong in zip(every, problems, strict=True) if not wrong]
    if legal:
        return legal, []
    if not every:
        return [], [
            f"the run has {cluster.ranks} rank{'s' * (cluster.ranks != 1)}; needed: more than the {engine} of an "
            "engine (rollout.tensor_parallel), or none is left to train. Start more, or lower rollout.tensor_parallel."
        ]
    return [], problems[len(every) // 2]


def asynchronous(config: Config, ranks: int) -> Config:
    """The same run with engines on so many ranks of their own, and with what these need of the settings."""
    return replace(
        config,
        rollout=replace(config.rollout, ranks=ranks, tail="wait"),
        algorithm=for_old_tokens(config),
        parallel=replace(config.parallel, data=None),
        sync=replace(config.sync, checksum_every=0),
    )


def colocated(config: Config) -> Config:
    """The same run with engines in the training ranks."""
    parallel = config.parallel if config.rollout.ranks == 0 else replace(config.parallel, data=None)
    return replace(config, parallel=parallel, rollout=replace(config.rollout, ranks=0))


def for_old_tokens(config: Config) -> AlgorithmConfig:
    """What a run needs of the algorithm to learn from tokens of weights up to `rollout.max_staleness` steps old. A run
    that does so without recomputed log-probs (AReaL without use_decoupled_loss) stays as it is."""
    rollout, algorithm = config.rollout, config.algorithm
    does_so = rollout.ranks > 0 or rollout.tail == "carry"
    if rollout.max_staleness == 0 or (does_so and not algorithm.recompute_logprobs):
        return algorithm
    return corrected(algorithm)


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


def start_problems(config: Config, shape: ModelShape, ranks: int) -> list[str]:
    """What keeps a run from starting, on whatever machine; also what it needs to learn from older tokens. A reward
    function of the user's is not looked for."""
    reward = replace(config.reward, function=None, rewards=[], weights=[], combine="sum")
    return run_problems(replace(config, reward=reward), ranks, shape)
