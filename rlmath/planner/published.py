"""Step times that others have published, and what is predicted for them.

The figures are those of AReaL's own program, which has sampling and training on disjoint halves of the GPUs, one after
the other: so they are predicted, with the layouts of its own config files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config
from rlmath.models.hf_config import PUBLISHED as MODELS
from rlmath.planner.lengths import Batch, Lengths, lengths_measured
from rlmath.planner.machines import RANKS_PER_NODE, Cluster, Machine
from rlmath.planner.rollout import rollout_of
from rlmath.planner.step import plan_step, with_layout
from rlmath.planner.tails import Tails, compare_tails
from rlmath.planner.training import Training, update_work
from rlmath.planner.work import Coefficients, Work, seconds_of
from rlmath.trainer.preflight.memory_estimate import Target, mesh_of

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
    """None: as the recipe has them; likewise the longest completion."""
    longest: int | None = None


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
LOG = (
    Row("7B, 16 nodes", "7b_n16.yaml", 16, 2260, (64, 1), (64, 1, 2), prompts=1024, longest=LOGGED.longest),
)
"""The same tutorial's log, of February 2025: mean of its six steps, 2,122 to 2,406 s. Version, layout and engine are
not published; predicted with those of the table's row."""


@dataclass(frozen=True)
class Predicted:
    """A row and its prediction (seconds)."""

    row: Row
    rollout: float
    update: float
    rest: float

    @property
    def seconds(self) -> float:
        return self.rollout + self.update + self.rest

    @property
    def error(self) -> float:
        """Relative: 0.1 is predicted 10% too long."""
        return self.seconds / self.row.seconds - 1


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
    longest = row.longest or config.rollout.max_new_tokens
    rollout = replace(config.rollout, max_num_seqs=row.running, max_new_tokens=longest)
    config = replace(config, rollout=rollout)
    group = config.rollout.group_size
    sequences = group * (row.prompts or config.data.prompts_per_step)
    batch = Batch(sequences, group, LOGGED.mean_prompt, logged_lengths(longest))
    if not row.disjoint:
        plan = plan_step(config, shape, target, Cluster(machine, row.nodes, 8), batch, coefficients)
        own = (plan.seconds["rollout"], plan.seconds["update"])
        return Predicted(row, *own, plan.step_seconds - sum(own))
    halves = _nodes_of(trainers, machine)
    rollout = rollout_of(config, shape, target, halves, batch, row.sampling[0])
    training = Training(config, shape, mesh_of(config, trainers, 0), target, halves, batch)
    rest = Work(steps=1, tokens=batch.tokens / training.parts, network=float(rollout.weights))
    parts = (rollout.work, update_work(training), rest)
    return Predicted(row, *(seconds_of(work, machine, coefficients) for work in parts))


def predict_tails(
    row: Row, config: Config, shape: ModelShape, target: Target, machine: Machine, coefficients: Coefficients
) -> Tails:
    """Every `rollout.tail` for the recipe of a row as it is: its own layout, all GPUs of the row's nodes sample."""
    rollout = config.rollout
    sequences = rollout.group_size * config.data.prompts_per_step
    lengths = logged_lengths(rollout.max_new_tokens)
    batch = Batch(sequences, rollout.group_size, LOGGED.mean_prompt, lengths)
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
