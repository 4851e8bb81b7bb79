"""Step times that AReaL has published.

They are compared with what is predicted for them by the default coefficients."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from rlmath.checkpoint.hf.config_json import required_shape
from rlmath.checkpoint.hf.run_shapes import read_run_shapes
from rlmath.config.load import load_config
from rlmath.planning.planner.cluster import cluster_of, machine_of
from rlmath.planning.planner.lengths import Batch, lengths_with_mean
from rlmath.planning.planner.rollout import engine_of, plan_rollout
from rlmath.planning.planner.step import step_inputs, with_layout
from rlmath.planning.planner.training import update_seconds
from tests.planning.of_policy import target_of

RECIPES = Path(__file__).resolve().parents[3] / "configs" / "areal"
LENGTHS = lengths_with_mean(7941.9 - 107.8, 16384)
"""Lengths of the step log in AReaL's tutorial, limited to 16,384 tokens; the rows have 27,648."""


@dataclass(frozen=True)
class Row:
    """A step on nodes of 8 H800: sampling, then training, each on a half of the GPUs.

    Source: AReaL v0.2, the hardware table of its tutorial; layouts from its examples/configs."""

    recipe: str
    nodes: int
    seconds: float
    engine: int
    tensor: int
    pipeline: int
    running: int = 1024


TABLE = (
    Row("1.5b_n1.yaml", 1, 3461, 1, 1, 2),
    Row("1.5b_n4.yaml", 4, 997, 1, 1, 2),
    Row("1.5b_n16.yaml", 16, 391, 1, 1, 2),
    Row("7b_n4.yaml", 4, 2275, 1, 1, 2),
    Row("7b_n16.yaml", 16, 815, 1, 1, 2),
    Row("32b_n16.yaml", 16, 6707, 8, 4, 4, running=128),
)


def predicted(row: Row) -> float:
    config = with_layout(
        load_config([RECIPES / row.recipe], []), row.tensor, row.pipeline, row.engine
    )
    config = replace(config, rollout=replace(config.rollout, max_num_seqs=row.running))
    shape, _ = required_shape(config.model.path)
    target = target_of(config)
    group = config.rollout.group_size
    longest = config.rollout.max_new_tokens
    batch = Batch(
        config.data.prompts_per_step * group, group, 107.8, replace(LENGTHS, longest=longest)
    )
    half = cluster_of(machine_of(config.memory.gpu, target), 4 * row.nodes)
    inputs = step_inputs(config, read_run_shapes(config, shape), target, half, batch)
    to_engines = half.link_seconds(engine_of(inputs).weights, 0, 2 * half.ranks)
    other_seconds = half.coefficients.step_seconds + to_engines
    return plan_rollout(inputs).seconds + update_seconds(inputs) + other_seconds


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.recipe)
def test_a_published_step_is_predicted_within_a_quarter(row: Row):
    assert predicted(row) == pytest.approx(row.seconds, rel=0.25)
