"""Step times that others have published, and what is predicted for them.

The figures are those of AReaL's own program. Its version 0.2 has sampling and training on disjoint halves of the GPUs,
one after the other: so they are predicted, with the layouts of its own config files. Version 0.3 has both at the same
time, which is predicted with the coefficients of its synchronous figure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config
from rlmath.models.hf_config import PUBLISHED as MODELS
from rlmath.planning.memory_estimate import Target, mesh_of
from rlmath.planning.planner.lengths import Batch, Lengths, lengths_measured
from rlmath.planning.planner.machines import RANKS_PER_NODE, Cluster, Machine
from rlmath.planning.planner.rollout import rollout_of
from rlmath.planning.planner.splits import Splits, asynchronous, compare_splits
from rlmath.planning.planner.step import plan_step, with_layout
from rlmath.planning.planner.tails import Tails, compare_tails
from rlmath.planning.planner.training import Training, update_work
from rlmath.planning.planner.work import NAMES, Coefficients, Work, seconds_of, slower_by

RECIPES = MODELS.parent / "areal"
"""Recipes with the settings of the rows; only in a checkout of the repository."""


@dataclass(frozen=True)
class Logged:
    """Lengths of completions in AReaL's tutorial, "Monitoring the Training Process": means of its six steps of a 7B
    model on 128 GPUs, 16,384 sequences each. The longest is the default that the tutorial gives, 16k."""

    mean_sequence: float
    mean_prompt: float
    truncated: float
    longest: int


LOGGED = Logged(mean_sequence=7941.9, mean_prompt=107.8, truncated=0.1238, longest=16384)


@dataclass(frozen=True)
class Row:
    """One published step time."""

    name: str
    recipe: str
    """File of configs/areal with batch, lengths and model."""
    nodes: int
    """Of 8 H800."""
    seconds: float
    sampling: tuple[int, int]
    """(GPUs that sample, GPUs of an engine)."""
    training: tuple[int, int, int]
    """(GPUs that train, tensor parallel, pipeline parallel)."""
    disjoint: bool = True
    """Sampling and training have GPUs of their own; else all GPUs do both."""
    running: int = 1024
    """Sequences of an engine at a time. SGLang runs as many as its cache holds; AReaL bounds them for 32B only."""
    prompts: int | None = None
    """None: as the recipe has them; likewise the longest completion, and the completions of a prompt."""
    longest: int | None = None
    group: int | None = None
    staleness: int | None = None
    """Most steps of an asynchronous run; sampling and training then go on at the same time."""


TABLE = (
    Row("1.5B, 1 node", "1.5b_n1.yaml", 1, 3461, (4, 1), (4, 1, 2)),
    Row("1.5B, 4 nodes", "1.5b_n4.yaml", 4, 997, (16, 1), (16, 1, 2)),
    Row("1.5B, 16 nodes", "1.5b_n16.yaml", 16, 391, (64, 1), (64, 1, 2)),
    Row("7B, 4 nodes", "7b_n4.yaml", 4, 2275, (16, 1), (16, 1, 2)),
    Row("7B, 16 nodes", "7b_n16.yaml", 16, 815, (64, 1), (64, 1, 2)),
    Row("32B, 16 nodes", "32b_n16.yaml", 16, 6707, (64, 8), (64, 4, 4), running=128),
)
"""AReaL v0.2, the hardware table of its tutorial; layouts from `allocation_mode` of its examples/configs
(sglang.d4p1m1+d2p2m1 on 8 GPUs, and so on)."""
COLOCATED = (
    Row("1.5B, 16 nodes", "1.5b_n16.yaml", 16, 147.6, (128, 1), (128, 1, 1), disjoint=False),
    Row("7B, 24 nodes", "7b_n16.yaml", 24, 207.7, (192, 1), (192, 2, 1), disjoint=False),
)
"""AReaL v0.3, "Synchronous AReaL" of its blog's table: 41.0 and 57.7 hours for 1,000 steps, all GPUs sample. Its
layouts are not published; those of our recipes are taken."""
PAPER_STEPS = 4
"""Steps by the count of AReaL's blog in one by that of its paper (arXiv:2505.24298, table 1), which has 250 steps for
the same hours: as many as a step has minibatches."""
SYNCHRONOUS = (
    *COLOCATED,
    Row(
        "32B, 48 nodes",
        "32b_n16.yaml",
        48,
        766.5,
        (384, 8),
        (384, 4, 4),
        disjoint=False,
        running=128,
        group=16,
    ),
)
"""`COLOCATED`, and of the paper's table 32B: 51.1 hours for 60 steps (240 by the blog's count), of programs instead of
mathematics. The lengths of these are not published; those of the log are taken."""
ASYNCHRONOUS = (
    Row("1.5B, 16 nodes", "1.5b_n16.yaml", 16, 53.3, (96, 1), (32, 1, 2), staleness=8),
    Row("7B, 24 nodes", "7b_n16.yaml", 24, 91.4, (144, 1), (48, 1, 4), staleness=8),
    Row("32B, 48 nodes", "32b_n16.yaml", 48, 466.5, (288, 8), (96, 2, 8), running=128, group=16, staleness=4),
)
"""The same runs by AReaL v0.3: 14.8 and 25.4 hours for 1,000 steps (blog), 31.1 for 60 (paper). Three quarters of the
GPUs sample; staleness 8 for mathematics, 4 for programs (paper, section 7.1). Layouts, recomputed log-probs, and
`max_concurrent_rollouts` as many as a step has prompts: benchmark/verl_312a8cb of its repository, May 2025."""
LOG = (
    Row("7B, 16 nodes", "7b_n16.yaml", 16, 2260, (64, 1), (64, 1, 2), prompts=1024, longest=LOGGED.longest),
)
"""The same tutorial's log, of February 2025: mean of its six steps, 2,122 to 2,406 s. Version, layout and engine are
not published; predicted with those of the table's row."""


@dataclass(frozen=True)
class Predicted:
    """A row and its prediction (seconds)."""

    row: Row
    seconds: float
    rollout: float
    """Of an asynchronous run all that engines do; and the update all that trainers do, at the same time."""
    update: float

    @property
    def rest(self) -> float:
        """Of a run that is not asynchronous."""
        return self.seconds - self.rollout - self.update

    @property
    def error(self) -> float:
        """Relative: 0.1 is predicted 10% too long."""
        return self.seconds / self.row.seconds - 1


@dataclass(frozen=True)
class Calibrated:
    """A row, predicted with coefficients that one synchronous figure gave."""

    found: Predicted
    default_seconds: float
    """With the coefficients that these were before."""
    splits: Splits | None
    """Of an asynchronous row: those of the recipe on the same GPUs, with the same staleness, calibrated, too."""


def logged_lengths(longest: int) -> Lengths:
    """The distribution of the log with another limit: what is cut off there reaches up to this one."""
    mean = LOGGED.mean_sequence - LOGGED.mean_prompt
    return replace(lengths_measured(mean, LOGGED.longest, LOGGED.truncated), longest=longest)


def recipe_file(row: Row) -> Path:
    return RECIPES / row.recipe


def predict(
    row: Row, config: Config, shape: ModelShape, target: Target, machine: Machine, coefficients: Coefficients
) -> Predicted:
    """`config` is that of the row's recipe."""
    trainers, tensor, pipeline = row.training
    config = with_layout(config, tensor, pipeline, row.sampling[1])
    config = replace(config, rollout=replace(config.rollout, max_num_seqs=row.running))
    config, batch = _with_work(row, config)
    if row.disjoint and row.staleness is None:
        halves = _nodes_of(trainers, machine)
        rollout = rollout_of(config, shape, target, halves, batch, row.sampling[0])
        training = Training(config, shape, mesh_of(config, trainers, 0), target, halves, batch)
        rest = Work(steps=1, tokens=batch.tokens / training.parts, network=float(rollout.weights))
        parts = (rollout.work, update_work(training), rest)
        sampling, update, other = (seconds_of(work, machine, coefficients) for work in parts)
        return Predicted(row, sampling + update + other, sampling, update)
    if row.staleness is not None:
        engines, size = row.sampling
        concurrent = math.ceil(batch.sequences * size / engines)
        rollout = replace(config.rollout, max_concurrent_sequences=concurrent, max_staleness=row.staleness)
        config = asynchronous(replace(config, rollout=rollout), engines)
    plan = plan_step(config, shape, target, Cluster(machine, row.nodes, RANKS_PER_NODE), batch, coefficients)
    if plan.overlap is not None:
        return Predicted(row, plan.step_seconds, plan.overlap.engine_seconds, plan.overlap.trainer_seconds)
    return Predicted(row, plan.step_seconds, plan.seconds["rollout"], plan.seconds["update"])


def _with_work(row: Row, config: Config) -> tuple[Config, Batch]:
    """The settings with a row's lengths and groups, and its sequences."""
    longest, group = row.longest or config.rollout.max_new_tokens, row.group or config.rollout.group_size
    config = replace(config, rollout=replace(config.rollout, max_new_tokens=longest, group_size=group))
    sequences = group * (row.prompts or config.data.prompts_per_step)
    return config, Batch(sequences, group, LOGGED.mean_prompt, logged_lengths(longest))


def one_factor(found: Predicted, coefficients: Coefficients) -> Coefficients:
    """Those with which a prediction is what was published. One figure says nothing of the parts of a
    step: of all coefficients that explain it those are taken that are nearest to the given ones, as `calibration.fit`
    does, and these are all slower by the same factor."""
    return slower_by(coefficients, dict.fromkeys(NAMES, found.row.seconds / found.seconds))


def predict_splits(
    row: Row, config: Config, shape: ModelShape, target: Target, machine: Machine, coefficients: Coefficients
) -> Splits:
    """The recipe of an asynchronous row with its own layout, on the row's GPUs, with every split of these."""
    config, batch = _with_work(row, config)
    assert row.staleness is not None
    config = replace(config, rollout=replace(config.rollout, max_staleness=row.staleness))
    cluster = Cluster(machine, row.nodes, RANKS_PER_NODE)
    return compare_splits(config, shape, target, cluster, batch, coefficients)


def predict_tails(
    row: Row, config: Config, shape: ModelShape, target: Target, machine: Machine, coefficients: Coefficients
) -> Tails:
    """Every `rollout.tail` for the recipe of a row as it is: its own layout, all GPUs of the row's nodes sample."""
    config, batch = _with_work(row, config)
    cluster = Cluster(machine, row.nodes, RANKS_PER_NODE)
    return compare_tails(config, shape, target, cluster, batch, coefficients, search=True)


def _nodes_of(ranks: int, machine: Machine) -> Cluster:
    per_node = min(8, ranks)
    return Cluster(machine, ranks // per_node, per_node)


def errors_of_one_factor(predicted: Sequence[Predicted]) -> list[float]:
    """Relative errors where every prediction is multiplied by one factor, fitted to the other rows: the geometric mean
    of their published over predicted seconds."""
    logs = [math.log(found.row.seconds / found.seconds) for found in predicted]
    factors = [math.exp((sum(logs) - own) / (len(logs) - 1)) for own in logs]
    return [
        found.seconds * factor / found.row.seconds - 1
        for found, factor in zip(predicted, factors, strict=True)
    ]


def largest_error(errors: Sequence[float]) -> float:
    """The one furthest from 0."""
    return max(errors, key=abs)
