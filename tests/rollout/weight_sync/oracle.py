"""The oracle of the plan: what every rank holds for training and what its engine should get.

Both are cut from whole numbered tensors. The training side is cut by `hf_tables`, the engine's by
vLLM's own definitions, written down here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from rlmath.checkpoint.hf.weight_map import hf_shapes, placed_tensors
from rlmath.checkpoint.hf.weights import shard, to_canonical
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import ParallelConfig
from rlmath.distributed.mesh import Mesh
from rlmath.rollout.weight_sync.reshard_plan import SyncPlan, cells, plan_sync
from rlmath.rollout.weight_sync.shard_layouts import (
    TIED_HEAD,
    TrainingLayout,
    parameter_key,
    training_layout,
)

SMALL = ModelShape(
    "Qwen2ForCausalLM",
    4,
    5,
    8,
    4,
    2,
    16,
    101,
    False,
    64,
    10000.0,
    1e-6,
    True,
    torch_dtype="float32",
)
"""4 layers, hidden size 5, 8 heads of 2 dims in 4 groups, 16 feed-forward units, a vocabulary that
nothing divides."""
EXPERTS = replace(
    SMALL,
    architecture="Qwen3MoeForCausalLM",
    ffn_size=8,
    attention_bias=False,
    qk_norm=True,
    num_experts=4,
    experts_per_token=2,
)
"""The same with 4 experts of 8 feed-forward units."""


@dataclass(frozen=True)
class Layout:
    """How the actor of a small model is laid out, and which layers that puts on each stage."""

    tensor: int = 1
    stages: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3),)
    data: int = 1
    context: int = 1
    virtual: int = 1
    first: int | None = None
    last: int | None = None
    expert: int = 1
    expert_tensor: int = 1

    @property
    def ranks(self) -> int:
        return self.tensor * self.context * self.data * len(self.stages)

    def mesh(self, engine_size: int) -> Mesh:
        return Mesh(
            0,
            self.ranks,
            self.tensor,
            len(self.stages),
            engine_size,
            virtual_pipeline=self.virtual,
            context=self.context,
            expert=self.expert,
            expert_tensor=self.expert_tensor,
        )

    def training(self, engine_size: int = 1) -> TrainingLayout:
        uneven = ParallelConfig(first_stage_layers=self.first, last_stage_layers=self.last)
        return training_layout(4, self.mesh(engine_size), uneven)

    def __str__(self) -> str:
        sizes = f"TP{self.tensor}xCP{self.context}xPP{len(self.stages)}xDP{self.data}"
        return f"{sizes}-VPP{self.virtual}-first{self.first}-last{self.last}"


def whole_tensors(shape: ModelShape) -> dict[str, Tensor]:
    """Every Hugging Face tensor, no two elements alike, from 1 on."""
    tensors = {}
    start = 1
    for placed in placed_tensors(shape):
        for name, size in zip(placed.hf_names, hf_shapes(placed.rule, shape), strict=True):
            tensors[name] = torch.arange(start, start + math.prod(size)).view(size)
            start += math.prod(size)
    return tensors


def training_parameters(
    shape: ModelShape, whole: Mapping[str, Tensor], layout: Layout, rank: int
) -> dict[str, Tensor]:
    """A rank's Megatron tensors as matrices, by the plan's names.

    Rows of padding are 0."""
    place = replace(layout.mesh(1), rank=rank)
    last = len(layout.stages) - 1
    parameters = {}
    for placed in placed_tensors(shape):
        full = to_canonical(
            placed.rule, [whole[name] for name in placed.hf_names], shape, layout.tensor
        )
        sharing = (place.tensor_rank, layout.tensor)
        if placed.expert is not None:
            each = shape.num_experts // layout.expert
            if placed.expert not in range(place.expert_rank * each, (place.expert_rank + 1) * each):
                continue
            sharing = (place.expert_tensor_rank, layout.expert_tensor)
        matrix = as_matrix(shard(placed.rule, full, *sharing), placed.rule.form)
        stages = {"first": [0], "last": [last]}.get(placed.rule.owner)
        if stages is None:
            stages = [
                number for number, layers in enumerate(layout.stages) if placed.layer in layers
            ]
        if place.pipeline_rank in stages:
            parameters[parameter_key(placed)] = matrix
        elif shape.tied_embeddings and placed.rule.form == "vocab" and place.pipeline_rank == last:
            parameters[TIED_HEAD] = matrix
    return parameters


def as_matrix(canonical: Tensor, form: str) -> Tensor:
    """A shard in canonical axes as the matrix that Megatron keeps, a vector as one column."""
    row_axes = {"qkv": 3, "gate_up": 2}.get(form, 1)
    rows = math.prod(canonical.shape[:row_axes])
    return canonical.reshape(rows, -1)


def engine_parameters(
    shape: ModelShape, whole: Mapping[str, Tensor], engine_size: int, part: int
) -> dict[str, Tensor]:
    """A rank's parameters in vLLM, by vLLM's names, from its definitions.

    `VocabParallelEmbedding` fills up to 64 rows and splits, `QKVParallelLinear` copies key-value
    heads where there are more ranks than those, `MergedColumnParallelLinear` splits each of its
    parts, `RowParallelLinear` splits columns, and `RoutedExperts` does as the last two for every
    expert, one below the other."""
    weights = {}
    for name in (
        "model.embed_tokens.weight",
        *([] if shape.tied_embeddings else ["lm_head.weight"]),
    ):
        padding_rows = -shape.vocab_size % 64
        padded = torch.nn.functional.pad(whole[name], (0, 0, 0, padding_rows))
        weights[name] = padded.chunk(engine_size)[part]
    copies = max(1, engine_size // shape.num_kv_heads)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        for kind in ("weight", "bias") if shape.attention_bias else ("weight",):
            D = shape.head_dim
            heads = (shape.num_heads * D, shape.num_kv_heads * D, shape.num_kv_heads * D)
            attention = [f"{prefix}.self_attn.{x}_proj.{kind}" for x in "qkv"]
            q, k, v = _parts(whole, attention, f"{prefix}.self_attn.qkv_proj.{kind}", heads)
            pieces = [q.chunk(engine_size)[part]]
            pieces += [x.chunk(engine_size // copies)[part // copies] for x in (k, v)]
            weights[f"{prefix}.self_attn.qkv_proj.{kind}"] = torch.cat(pieces)
        networks = [f"{prefix}.mlp.experts.{number}" for number in range(shape.num_experts)] or [
            f"{prefix}.mlp"
        ]
        first = [
            matrix.chunk(engine_size)[part]
            for network in networks
            for matrix in _parts(
                whole,
                [f"{network}.{x}_proj.weight" for x in ("gate", "up")],
                f"{network}.gate_up_proj.weight",
                (shape.ffn_size, shape.ffn_size),
            )
        ]
        second = [
            whole[f"{network}.down_proj.weight"].chunk(engine_size, dim=1)[part]
            for network in networks
        ]
        names = ("gate_up_proj.weight", "down_proj.weight")
        if shape.num_experts:
            names = ("experts.routed_experts.w13_weight", "experts.routed_experts.w2_weight")
            weights[f"{prefix}.mlp.gate.weight"] = whole[f"{prefix}.mlp.gate.weight"]
        weights |= {
            f"{prefix}.mlp.{name}": torch.cat(parts)
            for name, parts in zip(names, (first, second), strict=True)
        }
        out = f"{prefix}.self_attn.o_proj.weight"
        weights[out] = whole[out].chunk(engine_size, dim=1)[part]
        head_norms = ("self_attn.q_norm", "self_attn.k_norm") if shape.qk_norm else ()
        for name in ("input_layernorm", "post_attention_layernorm", *head_norms):
            weights[f"{prefix}.{name}.weight"] = whole[f"{prefix}.{name}.weight"]
    weights["model.norm.weight"] = whole["model.norm.weight"]
    return {
        name: tensor if tensor.dim() == 2 else tensor[:, None] for name, tensor in weights.items()
    }


def _parts(
    whole: Mapping[str, Tensor], names: list[str], fused: str, rows: tuple[int, ...]
) -> Sequence[Tensor]:
    """Hugging Face tensors by their names, or so many rows each of the one that has them all."""
    return whole[fused].split(rows) if fused in whole else [whole[name] for name in names]


def plan_of_all(
    shape: ModelShape,
    layout: TrainingLayout,
    mesh: Mesh,
    element_bytes: int,
    bucket_bytes: int,
    ranks_per_node: int | None = None,
) -> SyncPlan:
    """The plans of all cells, side by side in each round."""
    plans = [
        plan_sync(
            shape, layout, replace(mesh, rank=cell[0]), element_bytes, bucket_bytes, ranks_per_node
        )
        for cell in cells(mesh, ranks_per_node)
    ]
    return SyncPlan(
        local={rank: copies for plan in plans for rank, copies in plan.local.items()},
        rounds=tuple(
            tuple(chain(*rounds)) for rounds in zip(*(plan.rounds for plan in plans), strict=True)
        ),
        missing={rank: count for plan in plans for rank, count in plan.missing.items()},
        element_bytes=element_bytes,
    )
