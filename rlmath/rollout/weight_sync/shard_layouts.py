"""The parts of the model that each rank holds for training, and those that its engine needs.

They are rectangles of the Hugging Face tensors, computed from the architecture's table
(`weight_map`) and the two layouts alone.

    training_blocks(shape, layout, coordinates): what Megatron's parameters of a rank hold
    engine_blocks(shape, engine_size, part): what vLLM's parameters of a rank need

Both also have the blocks of LoRA adapters, where their rules are given: an engine has a buffer for
A and one for B of each matrix that its layer joins.

A vector counts as a matrix of one column. With a gate projection of 8 x 4 and two tensor-parallel
ranks, rank 1 holds rows 4 to 7 of it, at row 0 of its own fused tensor, and the same rows of the up
projection from row 4 on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from rlmath.checkpoint.hf.weight_map import (
    Placed,
    Rule,
    adapter_rules,
    adapter_weight,
    canonical_shape,
    hf_shapes,
    padded_vocab,
    placed_tensors,
)
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import LoraConfig, ParallelConfig
from rlmath.distributed.mesh import Mesh

ENGINE_VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this before it splits it."""

EVEN_STAGES = ParallelConfig()
TIED_HEAD = "tied head"
"""Key of the last stage's copy of a tied embedding."""

_FUSED_NAMES = {"qkv": ("q_proj", "qkv_proj"), "gate_up": ("gate_proj", "gate_up_proj")}
"""The projection that vLLM's fused parameter is named after, and that name, by a rule's form."""


@dataclass(frozen=True)
class Block:
    """A rectangle of a Hugging Face tensor, and where it lies in a parameter of one rank."""

    tensor: str
    """Name of the Hugging Face tensor, for a part of it with the part's number.

    Query, key and value count as a tensor each, as do gate and up."""
    parameter: str
    """Name of the parameter.

    Training side: the first Hugging Face name of the Megatron tensor (`parameter_key`). Engine:
    vLLM's name."""
    rows: int
    cols: int
    row: int = 0
    col: int = 0
    at_row: int = 0
    """First row in the parameter, seen as a matrix."""
    at_col: int = 0

    @property
    def elements(self) -> int:
        return self.rows * self.cols


@dataclass(frozen=True)
class TrainingLayout:
    tensor: int
    stages: tuple[tuple[int, ...], ...]
    """Numbers of the layers that each pipeline stage holds, over all its chunks."""
    expert: int = 1
    expert_tensor: int = 1


class Coordinates(NamedTuple):
    """Coordinates of a rank in the training layout.

    Ranks that agree in all of them hold the same weights."""

    tensor: int
    stage: int
    expert: int = 0
    expert_tensor: int = 0


def coordinates(mesh: Mesh) -> Coordinates:
    return Coordinates(
        mesh.tensor_rank,
        mesh.pipeline_rank,
        mesh.expert_rank,
        expert_tensor=mesh.expert_tensor_rank,
    )


def training_layout(
    layers: int, mesh: Mesh, parallel: ParallelConfig = EVEN_STAGES
) -> TrainingLayout:
    """The layout that Megatron makes of the settings, which `planning.parallelism` has checked."""
    first, last = parallel.first_stage_layers, parallel.last_stage_layers
    stages = stage_layers(layers, mesh.pipeline, mesh.virtual_pipeline, first=first, last=last)
    return TrainingLayout(mesh.tensor, stages, mesh.expert, expert_tensor=mesh.expert_tensor)


def stage_layers(
    layers: int, pipeline: int, virtual: int = 1, first: int | None = None, last: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """The layers of each pipeline stage.

    Chunks are assigned to the stages in turn: all first chunks, then all second ones.

    >>> stage_layers(8, pipeline=2, virtual=2)
    ((0, 1, 4, 5), (2, 3, 6, 7))
    >>> stage_layers(5, pipeline=2, first=2)
    ((0, 1), (2, 3, 4))
    """
    fixed_sizes = {
        stage: size for stage, size in {0: first, pipeline - 1: last}.items() if size is not None
    }
    even_stages = pipeline - len(fixed_sizes)
    even_size = (layers - sum(fixed_sizes.values())) // even_stages if even_stages else 0
    chunk_sizes = [fixed_sizes.get(stage, even_size) // virtual for stage in range(pipeline)]
    layers_by_stage: list[list[int]] = [[] for _ in range(pipeline)]
    layer = 0
    for _ in range(virtual):
        for stage, size in enumerate(chunk_sizes):
            layers_by_stage[stage].extend(range(layer, layer + size))
            layer += size
    assert layer == layers, f"{layers} layers do not fit into stages of {chunk_sizes} x {virtual}"
    return tuple(map(tuple, layers_by_stage))


def parameter_key(placed: Placed) -> str:
    """The name of a rank's Megatron tensor in the plan."""
    return placed.hf_names[0]


def engine_adapters(shape: ModelShape, lora: LoraConfig) -> tuple[Rule, ...]:
    """The rules of the adapters that engines hold beside the model.

    There are none where they are merged into it, or nothing has adapters."""
    if lora.engine == "merged":
        return ()
    return adapter_rules(shape.architecture, lora.rank, lora.target)


def training_blocks(
    shape: ModelShape,
    layout: TrainingLayout,
    at: Coordinates,
    adapters: tuple[Rule, ...] = (),
) -> Iterator[Block]:
    """The blocks of the model, and then of its adapters, that a rank holds.

    With tied embeddings the last stage has a copy of the embedding (`TIED_HEAD`)."""
    last = len(layout.stages) - 1
    for placed in chain(placed_tensors(shape), placed_tensors(shape, adapters)):
        owner = {"first": 0, "last": last}.get(placed.rule.owner)
        is_held = placed.layer in layout.stages[at.stage] if owner is None else owner == at.stage
        if placed.expert is not None:
            if is_held and placed.expert // (shape.num_experts // layout.expert) == at.expert:
                yield from _megatron_blocks(
                    placed,
                    shape,
                    layout.expert_tensor,
                    tensor_rank=at.expert_tensor,
                    key=parameter_key(placed),
                )
        elif is_held:
            yield from _megatron_blocks(
                placed, shape, layout.tensor, tensor_rank=at.tensor, key=parameter_key(placed)
            )
        elif shape.tied_embeddings and placed.rule.form == "vocab" and at.stage == last:
            yield from _megatron_blocks(
                placed, shape, layout.tensor, tensor_rank=at.tensor, key=TIED_HEAD
            )


def _megatron_blocks(
    placed: Placed, shape: ModelShape, tensor: int, tensor_rank: int, key: str
) -> Iterator[Block]:
    """The blocks of a tensor in a rank's Megatron parameter, by the form of its rule."""
    rule = placed.rule
    if rule.form == "qkv":
        yield from _qkv_groups(placed, shape, tensor, tensor_rank=tensor_rank, key=key)
    elif rule.form == "gate_up":
        yield from _gate_up(placed, shape, tensor, part=tensor_rank, parameter=key)
    elif rule.form == "vocab":
        share = padded_vocab(shape.vocab_size, tensor) // tensor
        yield from _vocab_rows(placed, shape, share, part=tensor_rank, parameter=key)
    elif rule.form == "stacked":
        yield from _stacked(placed, shape, tensor, part=tensor_rank, parameter=key)
    else:
        yield _plain(placed, shape, tensor, part=tensor_rank, parameter=key)


def _qkv_groups(
    placed: Placed, shape: ModelShape, tensor: int, tensor_rank: int, key: str
) -> Iterator[Block]:
    """Blocks in Megatron's order: for each key-value group its queries, its key, its value."""
    D = shape.head_dim
    cols = _columns(placed, shape)
    heads = shape.num_heads // shape.num_kv_heads
    groups = shape.num_kv_heads // tensor
    first = tensor_rank * groups
    for group in range(first, first + groups):
        row = (group - first) * (heads + 2) * D
        for name, count in zip(_parts(placed, 3), (heads, 1, 1), strict=True):
            yield Block(name, key, count * D, cols=cols, row=group * count * D, at_row=row)
            row += count * D


def _parts(placed: Placed, count: int) -> tuple[str, ...]:
    """Names of the tensors that a rule joins, or of their parts where Hugging Face joins them."""
    names = placed.hf_names
    return names if len(names) == count else tuple(f"{names[0]}[{part}]" for part in range(count))


def _gate_up(
    placed: Placed, shape: ModelShape, parts: int, part: int, parameter: str, at_row: int = 0
) -> Iterator[Block]:
    """The part's rows of each tensor, one after the other from `at_row` on: gate, then up."""
    cols = _columns(placed, shape)
    rows = shape.ffn_size // parts
    for number, name in enumerate(_parts(placed, 2)):
        yield Block(
            name, parameter, rows, cols=cols, row=part * rows, at_row=at_row + number * rows
        )


def _vocab_rows(
    placed: Placed, shape: ModelShape, share: int, part: int, parameter: str
) -> Iterator[Block]:
    """The part's rows that belong to tokens; the last parts may hold padding, or only padding."""
    start, stop = part * share, min((part + 1) * share, shape.vocab_size)
    if start < stop:
        yield Block(placed.hf_names[0], parameter, stop - start, cols=shape.hidden_size, row=start)


def _plain(placed: Placed, shape: ModelShape, parts: int, part: int, parameter: str) -> Block:
    """The part's block of a tensor that is split by columns, or not at all."""
    size = canonical_shape(placed.rule, shape, tensor=1)
    rows, cols = size[0], math.prod(size[1:])
    if placed.rule.split_axis is None:
        return Block(placed.hf_names[0], parameter, rows, cols=cols)
    assert placed.rule.split_axis == 1, f"{parameter} is split on an axis that no rule has"
    share = cols // parts
    return Block(placed.hf_names[0], parameter, rows, cols=share, col=part * share)


def _stacked(
    placed: Placed, shape: ModelShape, parts: int, part: int, parameter: str
) -> Iterator[Block]:
    """The part's columns of each tensor, or all of them, the tensors one below the other."""
    _, rows, cols = canonical_shape(placed.rule, shape, tensor=1)
    if placed.rule.split_axis is None:
        parts = 1
        part = 0
    share = cols // parts
    for number, name in enumerate(placed.hf_names):
        yield Block(name, parameter, rows, cols=share, col=part * share, at_row=number * rows)


def _columns(placed: Placed, shape: ModelShape) -> int:
    return math.prod(hf_shapes(placed.rule, shape)[0][1:])


def engine_blocks(
    shape: ModelShape, engine_size: int, part: int, adapters: tuple[Rule, ...] = ()
) -> Iterator[Block]:
    """The blocks that rank `part` of an engine of `engine_size` ranks needs.

    Those of its adapters come after the model's. A tied head is the embedding itself."""
    yield from _engine_model(shape, engine_size, part)
    for placed in placed_tensors(shape, adapters):
        yield from _engine_adapter(placed, shape, engine_size, part=part)


def _engine_model(shape: ModelShape, engine_size: int, part: int) -> Iterator[Block]:
    for placed in placed_tensors(shape):
        name = engine_name(placed)
        form = placed.rule.form
        # The part of one expert stands below the parts of the experts before it.
        if placed.expert is not None and form == "gate_up":
            rows = 2 * shape.ffn_size // engine_size
            yield from _gate_up(
                placed, shape, engine_size, part=part, parameter=name, at_row=placed.expert * rows
            )
        elif placed.expert is not None:
            down = _plain(placed, shape, engine_size, part=part, parameter=name)
            yield replace(down, at_row=placed.expert * down.rows)
        elif form == "qkv":
            yield from _engine_qkv(placed, shape, engine_size, part=part, parameter=name)
        elif form == "gate_up":
            yield from _gate_up(placed, shape, engine_size, part=part, parameter=name)
        elif form == "vocab":
            yield from _vocab_rows(
                placed, shape, engine_vocab_rows(shape, engine_size), part=part, parameter=name
            )
        else:
            yield _plain(placed, shape, engine_size, part=part, parameter=name)


def _engine_adapter(
    placed: Placed, shape: ModelShape, engine_size: int, part: int
) -> Iterator[Block]:
    """The blocks of A or B, a buffer for each of the matrices that Hugging Face names."""
    weight, matrix = adapter_weight(placed.hf_names[0])
    module = weight.removesuffix(".weight")
    for old, new in _FUSED_NAMES.values():
        if module.endswith(f".{old}"):
            module = module.removesuffix(old) + new
    buffer = f"{module}.lora_{matrix.lower()}_stacked"
    form = placed.rule.form
    if form == "stacked":
        blocks = list(_stacked(placed, shape, engine_size, part=part, parameter=buffer))
    elif form == "qkv":
        blocks = list(_engine_qkv(placed, shape, engine_size, part=part, parameter=buffer))
    elif form == "gate_up":
        blocks = list(_gate_up(placed, shape, engine_size, part=part, parameter=buffer))
    else:
        blocks = [_plain(placed, shape, engine_size, part=part, parameter=buffer)]
    for number, block in enumerate(blocks):
        if len(placed.hf_names) == len(blocks):
            yield replace(block, parameter=f"{buffer}.{number}", at_row=0)
        else:  # one matrix has the rows of all
            yield replace(block, parameter=f"{buffer}.0")


def engine_name(placed: Placed) -> str:
    """vLLM's name of the parameter that a rule's tensors are fused into.

    All experts of a layer are in one."""
    if placed.expert is not None:
        mlp, _, _ = placed.hf_names[0].rpartition(".experts.")
        matrix = "w13_weight" if placed.rule.form == "gate_up" else "w2_weight"
        return f"{mlp}.experts.routed_experts.{matrix}"
    old, new = _FUSED_NAMES.get(placed.rule.form, ("", ""))
    return placed.hf_names[0].replace(old, new) if old else placed.hf_names[0]


def engine_vocab_rows(shape: ModelShape, engine_size: int) -> int:
    """Rows of the embedding on one rank of an engine, padding included."""
    padded = -(-shape.vocab_size // ENGINE_VOCAB_MULTIPLE) * ENGINE_VOCAB_MULTIPLE
    return padded // engine_size


def _engine_qkv(
    placed: Placed, shape: ModelShape, engine_size: int, part: int, parameter: str
) -> Iterator[Block]:
    """The part's queries, keys and values.

    With more ranks than key-value heads, several ranks have the same heads."""
    D = shape.head_dim
    cols = _columns(placed, shape)
    copies = max(1, engine_size // shape.num_kv_heads)
    kv_heads = max(1, shape.num_kv_heads // engine_size)
    spans = (
        (part, shape.num_heads // engine_size),
        (part // copies, kv_heads),
        (part // copies, kv_heads),
    )
    row = 0
    for name, (index, heads) in zip(_parts(placed, 3), spans, strict=True):
        yield Block(name, parameter, heads * D, cols=cols, row=index * heads * D, at_row=row)
        row += heads * D


def engine_shapes(
    shape: ModelShape, engine_size: int, adapters: tuple[Rule, ...] = ()
) -> dict[str, tuple[int, int]]:
    """Rows and columns of every parameter on one rank of an engine, padding included.

    Those of adapters' buffers are without padding. All ranks have the same."""
    sizes: dict[str, tuple[int, int]] = {}
    for block in engine_blocks(shape, engine_size, part=0, adapters=adapters):
        rows, _ = sizes.get(block.parameter, (0, 0))
        sizes[block.parameter] = (max(rows, block.at_row + block.rows), block.cols)
    padded = engine_vocab_rows(shape, engine_size)
    vocab = {engine_name(placed) for placed in placed_tensors(shape) if placed.rule.form == "vocab"}
    return {name: (padded if name in vocab else rows, cols) for name, (rows, cols) in sizes.items()}
