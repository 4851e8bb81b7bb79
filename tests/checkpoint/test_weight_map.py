from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from rlmath.checkpoint.hf.weight_map import (
    MODEL_TYPES,
    Rule,
    canonical_shape,
    hf_shapes,
    padded_vocab,
    placed_tensors,
    shard_shape,
)
from rlmath.checkpoint.hf.weights import from_canonical, join, shard, to_canonical
from rlmath.config.model_shape import ModelShape

DENSE = (
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "SmolLM3ForCausalLM",
    "Phi3ForCausalLM",
)


def shape_of(config: Any) -> ModelShape:
    return ModelShape(
        architecture={kind: name for name, kind in MODEL_TYPES.items()}[config.model_type],
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", config.hidden_size // config.num_attention_heads),
        ffn_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        tied_embeddings=config.tie_word_embeddings,
        max_positions=64,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        attention_bias=config.model_type == "qwen2",
        torch_dtype="float32",
        qk_norm=config.model_type == "qwen3",
    )


def config_of(architecture: str = "Qwen2ForCausalLM", tied: bool = False) -> Any:
    """8 heads in 4 groups, so that 4 ranks can share them; a vocabulary that 2 and 4 do not divide.

    Heads of 6 dims do not add up to the hidden size, where an architecture has them."""
    settings: dict[str, Any] = {
        "vocab_size": 11,
        "hidden_size": 16,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
    }
    if architecture != "Qwen2ForCausalLM":
        settings["head_dim"] = 6
    return getattr(transformers, architecture).config_class(**settings)


def model_of(config: Any) -> torch.nn.Module:
    """A random model of transformers."""
    return transformers.AutoModelForCausalLM.from_config(config)


def numbered_tensors(config: Any) -> dict[str, Tensor]:
    """An untied model's tensors by Hugging Face name, no two elements alike."""
    tensors = {}
    start = 1
    for name, tensor in model_of(config).state_dict().items():
        tensors[name] = torch.arange(start, start + tensor.numel()).view(tensor.shape)
        start += tensor.numel()
    return tensors


def rule_of(hf_name: str) -> Rule:
    return next(
        placed.rule
        for placed in placed_tensors(shape_of(config_of()))
        if hf_name in placed.hf_names
    )


QKV_BIAS = rule_of("model.layers.0.self_attn.q_proj.bias")
GATE_UP = rule_of("model.layers.0.mlp.gate_proj.weight")
EMBEDDING = rule_of("model.embed_tokens.weight")

# Two groups of two query heads of two dims, hidden size 1, three feed-forward units, a vocabulary
# of 5.
BY_HAND = ModelShape(
    "Qwen2ForCausalLM", 1, 1, 4, 2, 2, 3, 5, False, 64, 10000.0, 1e-6, True, torch_dtype="float32"
)
Q = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8])
K = torch.tensor([10, 11, 20, 21])
V = torch.tensor([100, 101, 200, 201])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", DENSE)
def test_the_table_names_every_tensor_of_transformers_and_no_other(architecture: str, tied: bool):
    config = config_of(architecture, tied)
    expected = {
        name: tuple(parameter.shape) for name, parameter in model_of(config).named_parameters()
    }
    shape = shape_of(config)
    shapes = [
        (name, size)
        for placed in placed_tensors(shape)
        for name, size in zip(placed.hf_names, hf_shapes(placed.rule, shape), strict=True)
    ]
    assert dict(shapes) == expected
    assert len(shapes) == len(expected), "a tensor is listed twice"
    assert ("lm_head.weight" in expected) != tied


def test_tensors_are_streamed_from_the_embedding_to_the_head():
    places = [(placed.rule.owner, placed.layer) for placed in placed_tensors(shape_of(config_of()))]
    layers = [("layer", layer) for layer in (0, 1) for _ in range(7)]
    assert places == [("first", None), *layers, ("last", None), ("last", None)]


def test_fused_qkv_lays_a_groups_queries_before_its_key_and_value():
    fused = to_canonical(QKV_BIAS, [Q, K, V], BY_HAND, tensor=1)
    assert fused.tolist() == [
        [[1, 2], [3, 4], [10, 11], [100, 101]],
        [[5, 6], [7, 8], [20, 21], [200, 201]],
    ]


def test_each_rank_of_fused_qkv_holds_its_groups():
    fused = to_canonical(QKV_BIAS, [Q, K, V], BY_HAND, tensor=2)
    assert shard(QKV_BIAS, fused, 0, 2).flatten().tolist() == [1, 2, 3, 4, 10, 11, 100, 101]
    assert shard(QKV_BIAS, fused, 1, 2).flatten().tolist() == [5, 6, 7, 8, 20, 21, 200, 201]


def test_a_rank_of_gate_and_up_holds_the_same_units_of_both():
    wide = ModelShape(**vars(BY_HAND) | {"ffn_size": 4})
    gate = torch.tensor([[1], [2], [3], [4]])
    up = torch.tensor([[11], [12], [13], [14]])
    fused = to_canonical(GATE_UP, [gate, up], wide, tensor=2)
    assert shard(GATE_UP, fused, 0, 2).flatten().tolist() == [1, 2, 11, 12]
    assert shard(GATE_UP, fused, 1, 2).flatten().tolist() == [3, 4, 13, 14]


def test_a_vocabulary_is_filled_up_with_zeros_and_cut_again():
    rows = torch.tensor([[1], [2], [3], [4], [5]])
    padded = to_canonical(EMBEDDING, [rows], BY_HAND, tensor=4)
    assert padded.flatten().tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    assert shard(EMBEDDING, padded, 2, 4).flatten().tolist() == [5, 0]
    assert from_canonical(EMBEDDING, padded, BY_HAND)[0].tolist() == rows.tolist()


@pytest.mark.parametrize(
    ("vocab", "tensor", "padded"),
    [(101, 1, 101), (101, 2, 102), (101, 4, 104), (104, 4, 104), (1, 8, 8)],
)
def test_padded_vocabulary(vocab: int, tensor: int, padded: int):
    assert padded_vocab(vocab, tensor) == padded


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("architecture", DENSE)
def test_every_tensor_survives_fusing_sharding_and_the_way_back(architecture: str, tensor: int):
    config = config_of(architecture)
    shape = shape_of(config)
    tensors = numbered_tensors(config)
    names = set()
    for placed in placed_tensors(shape):
        rule = placed.rule
        parts = [tensors[name] for name in placed.hf_names]
        full = to_canonical(rule, parts, shape, tensor)
        assert full.shape == canonical_shape(rule, shape, tensor)
        shards = [shard(rule, full, rank, tensor) for rank in range(tensor)]
        assert {tuple(part.shape) for part in shards} == {shard_shape(rule, shape, tensor)}
        assert torch.equal(join(rule, shards), full)
        for name, part in zip(
            placed.hf_names, from_canonical(rule, join(rule, shards), shape), strict=True
        ):
            assert torch.equal(part, tensors[name]), name
            names.add(name)
    assert names == tensors.keys()
