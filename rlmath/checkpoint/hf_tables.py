"""How each architecture's Hugging Face tensors are made of Megatron's: the one table that import, export and weight
sync read.

A Megatron tensor has a canonical form, one full tensor in which the tensor-parallel shards are plain chunks along one
axis. With G key-value groups, R query heads per group, D head dim, F feed-forward size and E hidden size:

    plain     the Hugging Face tensor itself
    vocab     the same, rows filled up with zeros to a multiple of the tensor-parallel size
    qkv       [G, R + 2, D, ...]  query heads of a group, then its key and its value; split on axis 0
    gate_up   [2, F, ...]         gate, then up; split on axis 1
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlmath.model_shape import ModelShape

Form = Literal["plain", "vocab", "qkv", "gate_up"]
Place = Literal["first", "layer", "last"]


@dataclass(frozen=True)
class Rule:
    """One Megatron tensor, and the Hugging Face tensors that it is made of.

    `{m}` in a name stands for the layer's number in its model chunk (Megatron), `{n}` for that in the model.
    """

    megatron: tuple[str, ...]
    """The tensor's names: in Megatron's local layers, and in Transformer Engine's where that differs."""
    hf: tuple[str, ...]
    form: Form
    split_axis: int | None
    """Axis of the canonical form that tensor-parallel ranks share; None: every rank has all of it."""
    place: Place
    """The pipeline stage that owns it: the first, the last, or that of its layer."""


_QWEN2 = (
    Rule(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), "vocab", 0, "first"),
    Rule(
        (
            "decoder.layers.{m}.input_layernorm.weight",
            "decoder.layers.{m}.self_attention.linear_qkv.layer_norm_weight",
        ),
        ("model.layers.{n}.input_layernorm.weight",),
        "plain",
        None,
        "layer",
    ),
    Rule(
        ("decoder.layers.{m}.self_attention.linear_qkv.weight",),
        tuple(f"model.layers.{{n}}.self_attn.{x}_proj.weight" for x in "qkv"),
        "qkv",
        0,
        "layer",
    ),
    Rule(
        ("decoder.layers.{m}.self_attention.linear_qkv.bias",),
        tuple(f"model.layers.{{n}}.self_attn.{x}_proj.bias" for x in "qkv"),
        "qkv",
        0,
        "layer",
    ),
    Rule(
        ("decoder.layers.{m}.self_attention.linear_proj.weight",),
        ("model.layers.{n}.self_attn.o_proj.weight",),
        "plain",
        1,
        "layer",
    ),
    Rule(
        (
            "decoder.layers.{m}.pre_mlp_layernorm.weight",
            "decoder.layers.{m}.mlp.linear_fc1.layer_norm_weight",
        ),
        ("model.layers.{n}.post_attention_layernorm.weight",),
        "plain",
        None,
        "layer",
    ),
    Rule(
        ("decoder.layers.{m}.mlp.linear_fc1.weight",),
        ("model.layers.{n}.mlp.gate_proj.weight", "model.layers.{n}.mlp.up_proj.weight"),
        "gate_up",
        1,
        "layer",
    ),
    Rule(
        ("decoder.layers.{m}.mlp.linear_fc2.weight",),
        ("model.layers.{n}.mlp.down_proj.weight",),
        "plain",
        1,
        "layer",
    ),
    Rule(("decoder.final_layernorm.weight",), ("model.norm.weight",), "plain", None, "last"),
    Rule(("output_layer.weight",), ("lm_head.weight",), "vocab", 0, "last"),
)

TABLES: dict[str, tuple[Rule, ...]] = {"Qwen2ForCausalLM": _QWEN2}
"""Rules by the architecture that config.json names, in the order in which tensors are streamed."""

MODEL_TYPES = {"Qwen2ForCausalLM": "qwen2"}
"""The `model_type` of config.json that goes with each architecture."""


@dataclass(frozen=True)
class Placed:
    """A rule applied to one layer (`layer` is its number in the model, None outside the layers)."""

    rule: Rule
    layer: int | None
    hf_names: tuple[str, ...]


def placed_tensors(shape: ModelShape) -> Iterator[Placed]:
    """Every tensor of the model, in streaming order: the embedding, layer by layer, the head."""
    rules = TABLES[shape.architecture]
    for rule in rules:
        if rule.place == "first":
            yield Placed(rule, None, rule.hf)
    for layer in range(shape.num_layers):
        for rule in rules:
            if rule.place == "layer":
                yield Placed(rule, layer, tuple(name.format(n=layer) for name in rule.hf))
    for rule in rules:
        tied_head = shape.tied_embeddings and rule.megatron == ("output_layer.weight",)
        if rule.place == "last" and not tied_head:
            yield Placed(rule, None, rule.hf)


def padded_vocab(vocab_size: int, tensor: int) -> int:
    """Rows of the embedding in Megatron: the vocabulary filled up to a multiple of the tensor-parallel size."""
    return -(-vocab_size // tensor) * tensor


def canonical_shape(rule: Rule, shape: ModelShape, tensor: int) -> tuple[int, ...]:
    """Shape of the rule's canonical form for a tensor-parallel size."""
    heads_per_group = shape.num_heads // shape.num_kv_heads
    is_bias = rule.megatron[0].endswith(".bias")
    if rule.form == "vocab":
        return (padded_vocab(shape.vocab_size, tensor), shape.hidden_size)
    if rule.form == "qkv":
        rows = (shape.num_kv_heads, heads_per_group + 2, shape.head_dim)
        return rows if is_bias else (*rows, shape.hidden_size)
    if rule.form == "gate_up":
        return (2, shape.ffn_size, shape.hidden_size)
    if rule.megatron[0].endswith("linear_proj.weight"):
        return (shape.hidden_size, shape.num_heads * shape.head_dim)
    if rule.megatron[0].endswith("linear_fc2.weight"):
        return (shape.hidden_size, shape.ffn_size)
    return (shape.hidden_size,)


def hf_shapes(rule: Rule, shape: ModelShape) -> list[tuple[int, ...]]:
    """Shapes of the rule's Hugging Face tensors, in the order of `rule.hf`."""
    canonical = canonical_shape(rule, shape, tensor=1)
    if rule.form == "qkv":
        _, _, D, *rest = canonical
        rows = (shape.num_heads * D, shape.num_kv_heads * D, shape.num_kv_heads * D)
        return [(n, *rest) for n in rows]
    if rule.form == "gate_up":
        return [canonical[1:]] * 2
    return [canonical]


def parameter_count(shape: ModelShape) -> int:
    """Parameters of the whole model; a tied embedding counts once."""
    return sum(math.prod(size) for placed in placed_tensors(shape) for size in hf_shapes(placed.rule, shape))


def to_canonical(rule: Rule, tensors: Sequence[Tensor], shape: ModelShape, tensor: int) -> Tensor:
    """Hugging Face tensors, in the order of `rule.hf`, as one canonical tensor."""
    target = canonical_shape(rule, shape, tensor)
    if rule.form == "vocab":
        (weight,) = tensors
        return torch.nn.functional.pad(weight, (0, 0, 0, target[0] - weight.shape[0]))
    if rule.form == "qkv":
        G, _, D, *rest = target
        return torch.cat([x.reshape(G, -1, D, *rest) for x in tensors], dim=1)
    if rule.form == "gate_up":
        return torch.stack(list(tensors))
    return tensors[0]


def from_canonical(rule: Rule, full: Tensor, shape: ModelShape) -> list[Tensor]:
    """The inverse of `to_canonical`: Hugging Face tensors in the order of `rule.hf`."""
    if rule.form == "vocab":
        return [full[: shape.vocab_size]]
    if rule.form == "qkv":
        heads_per_group = shape.num_heads // shape.num_kv_heads
        parts = full.split((heads_per_group, 1, 1), dim=1)
        return [part.reshape(-1, *full.shape[3:]) for part in parts]
    if rule.form == "gate_up":
        return [full[0], full[1]]
    return [full]


def shard(rule: Rule, full: Tensor, tensor_rank: int, tensor: int) -> Tensor:
    """A tensor-parallel rank's part of a canonical tensor (still in canonical axes)."""
    if rule.split_axis is None:
        return full
    return full.chunk(tensor, dim=rule.split_axis)[tensor_rank]


def shard_shape(rule: Rule, shape: ModelShape, tensor: int) -> tuple[int, ...]:
    """Shape of `shard`'s result."""
    sizes = list(canonical_shape(rule, shape, tensor))
    if rule.split_axis is not None:
        sizes[rule.split_axis] //= tensor
    return tuple(sizes)


def join(rule: Rule, shards: Sequence[Tensor]) -> Tensor:
    """The canonical tensor of all tensor-parallel ranks' parts."""
    return shards[0] if rule.split_axis is None else torch.cat(list(shards), dim=rule.split_axis)
