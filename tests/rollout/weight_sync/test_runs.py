"""Copies of the plan that are made in one operation."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from rlmath.config.model_shape import ModelShape
from rlmath.rollout.weight_sync.reshard_plan import Copy
from rlmath.rollout.weight_sync.shard_layouts import engine_shapes
from rlmath.rollout.weight_sync.weight_sync import runs_of
from tests.rollout.weight_sync.oracle import (
    EXPERTS,
    SMALL,
    Layout,
    engine_parameters,
    training_parameters,
)
from tests.rollout.weight_sync.oracle import whole_tensors as whole
from tests.rollout.weight_sync.test_reshard_plan import MATRIX, plan_of, source_of


@pytest.mark.parametrize(("layout", "engine_size"), MATRIX)
def test_runs_read_what_the_copies_read(layout: Layout, engine_size: int) -> None:
    plan = plan_of(SMALL, layout, engine_size)
    for rank in range(layout.ranks):
        parameters = training_parameters(SMALL, whole(SMALL), layout, rank)
        sent_copies = (copy for copy in itertools.chain(*plan.rounds) if copy.source == rank)
        copies = [*plan.local[rank], *sent_copies]
        elements_read = torch.cat(
            [
                run.source(parameters[run.first.source_parameter]).flatten()
                for run in runs_of(copies)
            ]
        )
        assert torch.equal(
            elements_read, torch.cat([source_of(copy, parameters).flatten() for copy in copies])
        )


@pytest.mark.parametrize("shape", [SMALL, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_runs_write_a_whole_engine(shape: ModelShape, tensor: int) -> None:
    shape = replace(shape, vocab_size=128)
    layout = Layout(tensor=tensor)
    plan = plan_of(shape, layout, tensor)
    assert not plan.rounds
    for rank in range(layout.ranks):
        parameters = training_parameters(shape, whole(shape), layout, rank)
        engine = {
            name: torch.zeros(size, dtype=torch.int64)
            for name, size in engine_shapes(shape, tensor).items()
        }
        for run in runs_of(plan.local[rank]):
            source = run.source(parameters[run.first.source_parameter])
            run.target(engine[run.first.target_parameter]).copy_(source)
        for name, matrix in engine_parameters(shape, whole(shape), tensor, rank).items():
            assert torch.equal(engine[name], matrix), name


def test_heads_of_a_layer_are_three_operations() -> None:
    plan = plan_of(SMALL, Layout(), 1)
    name = "model.layers.2.self_attn.qkv_proj.weight"
    copies = [copy for copy in plan.local[0] if copy.target_parameter == name]
    assert len(copies) == 3 * SMALL.num_kv_heads
    assert [run.count for run in runs_of(copies)] == [SMALL.num_kv_heads] * 3


def test_what_is_not_equal_or_not_evenly_spread_is_apart() -> None:
    def copy(source_row: int, target_row: int, rows: int = 2) -> Copy:
        return Copy(0, 0, "t", source_row, 0, rows, 3, "p", source_row, 0, "e", target_row, 0)

    rows = [
        copy(0, 0),
        copy(4, 2),
        copy(8, 4),
        copy(11, 6),
        copy(15, 8),
        copy(19, 10, 1),
        copy(2, 11),
    ]
    assert [run.count for run in runs_of(rows)] == [3, 2, 1, 1]
