"""Who holds and who needs which rectangle, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlmath.rollout.weight_sync.shard_layouts import (
    TIED_HEAD,
    Block,
    Coordinates,
    TrainingLayout,
    engine_blocks,
    engine_shapes,
    engine_vocab_rows,
    stage_layers,
    training_blocks,
    training_layout,
)
from tests.rollout.weight_sync.oracle import SMALL, Layout

HELD_IN_THE_LAYER = 9
"""Hugging Face tensors of a layer that are matrices or norms; three biases come on top."""


@pytest.mark.parametrize(
    ("arguments", "stages"),
    [
        ((4, 1), [[0, 1, 2, 3]]),
        ((4, 2), [[0, 1], [2, 3]]),
        ((4, 4), [[0], [1], [2], [3]]),
        ((8, 2, 2), [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ((8, 2, 4), [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ((5, 2, 1, 2), [[0, 1], [2, 3, 4]]),
        ((5, 2, 1, None, 1), [[0, 1, 2, 3], [4]]),
        ((5, 2, 1, 2, 3), [[0, 1], [2, 3, 4]]),
        ((8, 4, 1, 1, 3), [[0], [1, 2], [3, 4], [5, 6, 7]]),
        ((7, 3, 1, 3), [[0, 1, 2], [3, 4], [5, 6]]),
        ((14, 4, 2, 2), [[0, 7], [1, 2, 8, 9], [3, 4, 10, 11], [5, 6, 12, 13]]),
        ((10, 3, 2, None, 2), [[0, 1, 5, 6], [2, 3, 7, 8], [4, 9]]),
    ],
)
def test_layers_by_stage(arguments: tuple[int, ...], stages: list[list[int]]) -> None:
    assert stage_layers(*arguments) == tuple(map(tuple, stages))


def test_a_training_layout_is_that_of_the_mesh() -> None:
    mesh = Layout(tensor=2, stages=((0, 2), (1, 3)), virtual=2).mesh(1)
    assert training_layout(4, mesh) == TrainingLayout(2, ((0, 2), (1, 3)))


def held(layout: TrainingLayout, rank: int, stage: int, tied: bool = False) -> list[Block]:
    return list(training_blocks(replace(SMALL, tied_embeddings=tied), layout, Coordinates(rank, stage)))


def test_query_heads_of_a_group_lie_before_its_key_and_value() -> None:
    """Groups 2 and 3 of 4 on the second of two ranks; two query heads of two dims each."""
    name = "model.layers.0.self_attn"
    key = f"{name}.q_proj.weight"
    blocks = [b for b in held(TrainingLayout(2, ((0, 1, 2, 3),)), 1, 0) if b.parameter == key]
    assert [(b.tensor, b.row, b.rows, b.at_row) for b in blocks] == [
        (f"{name}.q_proj.weight", 8, 4, 0),
        (f"{name}.k_proj.weight", 4, 2, 4),
        (f"{name}.v_proj.weight", 4, 2, 6),
        (f"{name}.q_proj.weight", 12, 4, 8),
        (f"{name}.k_proj.weight", 6, 2, 12),
        (f"{name}.v_proj.weight", 6, 2, 14),
    ]
    assert {(b.col, b.cols, b.at_col) for b in blocks} == {(0, 5, 0)}


def test_gate_lies_before_up() -> None:
    name = "model.layers.3.mlp"
    blocks = held(TrainingLayout(4, ((0, 1, 2, 3),)), 1, 0)
    assert [b for b in blocks if b.parameter == f"{name}.gate_proj.weight"] == [
        Block(f"{name}.gate_proj.weight", f"{name}.gate_proj.weight", 4, 5, row=4),
        Block(f"{name}.up_proj.weight", f"{name}.gate_proj.weight", 4, 5, row=4, at_row=4),
    ]


@pytest.mark.parametrize(("kind", "share"), [("mlp.down_proj", 8), ("self_attn.o_proj", 8)])
def test_projections_back_are_split_by_columns(kind: str, share: int) -> None:
    name = f"model.layers.2.{kind}.weight"
    (block,) = (b for b in held(TrainingLayout(2, ((0, 1, 2, 3),)), 1, 0) if b.tensor == name)
    assert block == Block(name, name, 5, share, col=share)


def test_stages_hold_their_layers_and_the_ends_of_the_model() -> None:
    layout = TrainingLayout(1, ((0, 2), (1, 3)))
    first, last = ({b.tensor for b in held(layout, 0, stage)} for stage in (0, 1))
    assert not first & last
    assert {name.split(".")[2] for name in first if ".layers." in name} == {"0", "2"}
    assert {name for name in first if ".layers." not in name} == {"model.embed_tokens.weight"}
    assert {name for name in last if ".layers." not in name} == {"model.norm.weight", "lm_head.weight"}
    assert len(first) == 2 * (HELD_IN_THE_LAYER + 3) + 1


def test_with_a_tied_embedding_the_last_stage_has_a_copy_of_it() -> None:
    two = TrainingLayout(2, ((0, 1), (2, 3)))
    name = "model.embed_tokens.weight"
    assert [b for b in held(two, 1, 1, tied=True) if b.tensor == name] == [
        Block(name, TIED_HEAD, 50, 5, row=51)
    ]
    alone = held(TrainingLayout(1, ((0, 1, 2, 3),)), 0, 0, tied=True)
    assert [b.parameter for b in alone if b.tensor == name] == [name]
    assert "lm_head.weight" not in {b.tensor for b in (*alone, *held(two, 0, 1, tied=True))}


def test_a_rank_that_has_only_padding_of_the_vocabulary_has_no_block_of_it() -> None:
    shape = replace(SMALL, vocab_size=30)
    assert engine_vocab_rows(shape, 2) == 32
    names = [{b.parameter for b in engine_blocks(shape, 2, part)} for part in range(2)]
    assert names[0] - names[1] == {"model.embed_tokens.weight", "lm_head.weight"}
    assert names[1] < engine_shapes(shape, 2).keys()


def test_an_engine_of_more_ranks_than_key_value_heads_has_copies_of_them() -> None:
    """Four heads on eight ranks: ranks 4 and 5 have head 2, and a query head each."""
    name = "model.layers.0.self_attn"
    found = [
        [
            (b.tensor.removeprefix(f"{name}."), b.row, b.rows, b.at_row)
            for b in engine_blocks(SMALL, 8, part)
            if b.parameter == f"{name}.qkv_proj.bias"
        ]
        for part in (4, 5)
    ]
    assert found[0] == [("q_proj.bias", 8, 2, 0), ("k_proj.bias", 4, 2, 2), ("v_proj.bias", 4, 2, 4)]
    assert found[1] == [("q_proj.bias", 10, 2, 0), ("k_proj.bias", 4, 2, 2), ("v_proj.bias", 4, 2, 4)]


def test_shapes_of_an_engines_parameters() -> None:
    sizes = engine_shapes(SMALL, 2)
    layer = "model.layers.1"
    assert sizes["model.embed_tokens.weight"] == sizes["lm_head.weight"] == (64, 5)
    assert sizes[f"{layer}.self_attn.qkv_proj.weight"] == (16, 5)
    assert sizes[f"{layer}.self_attn.qkv_proj.bias"] == (16, 1)
    assert sizes[f"{layer}.self_attn.o_proj.weight"] == (5, 8)
    assert sizes[f"{layer}.mlp.gate_up_proj.weight"] == (16, 5)
    assert sizes[f"{layer}.mlp.down_proj.weight"] == (5, 8)
    assert sizes[f"{layer}.input_layernorm.weight"] == sizes["model.norm.weight"] == (5, 1)
    assert len(sizes) == 3 + 4 * 7
    assert engine_shapes(SMALL, 8)[f"{layer}.self_attn.qkv_proj.weight"] == (6, 5)
