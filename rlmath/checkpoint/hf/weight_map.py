"""The table of each architecture's Hugging Face tensors and the Megatron tensors that hold them.

Import, export, conversion, weight sync and the memory estimate read it.

A Megatron tensor has a canonical form, one full tensor in which the tensor-parallel shards are
plain chunks along one axis. With G key-value groups, R query heads per group, D head dim, F
feed-forward size and E hidden size:

    plain     the Hugging Face tensor itself
    vocab     the same, rows filled up with zeros to a multiple of the tensor-parallel size
    qkv       [G, R + 2, D, ...]  query heads of a group, then its key and its value; split on axis 0
    gate_up   [2, F, ...]         gate, then up; split on axis 1
    stacked   [P, ...]            P Hugging Face tensors of one shape

"qkv" and "gate_up" are made of three and two Hugging Face tensors, or of one that has all their
rows, as Phi-3's.

LoRA's adapters are tensors of the same kind (`adapter_rules`): B has the rows of the matrix that it
is added to, and A is stacked, [P, rank, columns], for the P Hugging Face matrices of a Megatron
one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, cast

from rlmath.config.model_shape import VALUE_HEAD, ModelShape

Form = Literal["plain", "vocab", "qkv", "gate_up", "stacked"]
STACKED: tuple[Form, ...] = ("gate_up", "stacked")
"""Forms whose first axis counts tensors of one shape."""
PipelineOwner = Literal["first", "layer", "expert", "last"]
Size = Literal[
    "vocab",
    "hidden",
    "head",
    "query",
    "group",
    "heads_per_group_and_2",
    "two",
    "one",
    "ffn",
    "experts",
]


@dataclass(frozen=True)
class Rule:
    """One Megatron tensor, and the Hugging Face tensors that it is made of.

    `{m}` in a name stands for the layer's number in its model chunk (Megatron), `{n}` for that in
    the model; `{x}` for an expert's number among those of its rank (Megatron), `{e}` for that in
    the layer."""

    megatron: tuple[str, ...]
    """The tensor's names: in Megatron's local layers, and if different in Transformer Engine's."""
    hf: tuple[str, ...]
    sizes: tuple[Size | int, ...]
    """Axes of the canonical form: numbers, or names of `canonical_shape`."""
    owner: PipelineOwner
    """The pipeline stage that owns it: the first, the last, or that of its layer.

    "expert": only the ranks of its layer's stage that have the expert own it, and the ranks of
    `Mesh.expert_tensor` share `split_axis`."""
    split_axis: int | None = None
    """Axis of the canonical form that tensor-parallel ranks share; None: every rank has all of
    it."""
    form: Form = "plain"


def _of_decoder(
    megatron: str, hf: str, sizes: str, split_axis: int | None = None, form: Form = "plain"
) -> Rule:
    """A rule for the decoder's layers.

    Names (relative to the layer) and sizes are separated by spaces."""
    return Rule(
        tuple(f"decoder.layers.{{m}}.{name}" for name in megatron.split()),
        tuple(f"model.layers.{{n}}.{name}" for name in hf.split()),
        cast(tuple[Size, ...], tuple(sizes.split())),
        owner="expert" if "{x}" in megatron else "layer",
        split_axis=split_axis,
        form=form,
    )


_EMBEDDING = Rule(
    ("embedding.word_embeddings.weight",),
    ("model.embed_tokens.weight",),
    ("vocab", "hidden"),
    owner="first",
    split_axis=0,
    form="vocab",
)
_HEAD = (
    Rule(("decoder.final_layernorm.weight",), ("model.norm.weight",), ("hidden",), owner="last"),
    replace(_EMBEDDING, megatron=("output_layer.weight",), hf=("lm_head.weight",), owner="last"),
)
_VALUE_HEAD = (
    _HEAD[0],
    Rule(("output_layer.weight",), ("score.weight",), ("one", "hidden"), owner="last"),
    Rule(("output_layer.bias",), ("score.bias",), ("one",), owner="last"),
)
"""The value head in place of `_HEAD`: one number for each token.

It is that of transformers' ...ForTokenClassification with one label."""
_INPUT_NORM = _of_decoder(
    "input_layernorm.weight self_attention.linear_qkv.layer_norm_weight",
    "input_layernorm.weight",
    "hidden",
)
_ATTENTION = (
    _INPUT_NORM,
    _of_decoder(
        "self_attention.linear_qkv.weight",
        "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight",
        "group heads_per_group_and_2 head hidden",
        split_axis=0,
        form="qkv",
    ),
    _of_decoder(
        "self_attention.linear_proj.weight", "self_attn.o_proj.weight", "hidden query", split_axis=1
    ),
)
_QKV_BIAS = _of_decoder(
    "self_attention.linear_qkv.bias",
    "self_attn.q_proj.bias self_attn.k_proj.bias self_attn.v_proj.bias",
    "group heads_per_group_and_2 head",
    split_axis=0,
    form="qkv",
)
_QK_NORM = (
    _of_decoder("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "head"),
    _of_decoder("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "head"),
)
_MLP_NORM = _of_decoder(
    "pre_mlp_layernorm.weight mlp.linear_fc1.layer_norm_weight",
    "post_attention_layernorm.weight",
    "hidden",
)
_GATED_MLP = (
    _MLP_NORM,
    _of_decoder(
        "mlp.linear_fc1.weight",
        "mlp.gate_proj.weight mlp.up_proj.weight",
        "two ffn hidden",
        split_axis=1,
        form="gate_up",
    ),
    _of_decoder("mlp.linear_fc2.weight", "mlp.down_proj.weight", "hidden ffn", split_axis=1),
)
_EXPERTS = (
    _MLP_NORM,
    _of_decoder("mlp.router.weight", "mlp.gate.weight", "experts hidden"),
    _of_decoder(
        "mlp.experts.local_experts.{x}.linear_fc1.weight mlp.experts.linear_fc1.weight{x}",
        "mlp.experts.{e}.gate_proj.weight mlp.experts.{e}.up_proj.weight",
        "two ffn hidden",
        split_axis=1,
        form="gate_up",
    ),
    _of_decoder(
        "mlp.experts.local_experts.{x}.linear_fc2.weight mlp.experts.linear_fc2.weight{x}",
        "mlp.experts.{e}.down_proj.weight",
        "hidden ffn",
        split_axis=1,
    ),
)

_FUSED_QKV = replace(_ATTENTION[1], hf=("model.layers.{n}.self_attn.qkv_proj.weight",))
_FUSED_GATE_UP = replace(_GATED_MLP[1], hf=("model.layers.{n}.mlp.gate_up_proj.weight",))

_PLAIN_DECODER = (_EMBEDDING, *_ATTENTION, *_GATED_MLP, *_HEAD)

TABLES: dict[str, tuple[Rule, ...]] = {
    "Qwen2ForCausalLM": (_EMBEDDING, *_ATTENTION, _QKV_BIAS, *_GATED_MLP, *_HEAD),
    "Qwen3ForCausalLM": (_EMBEDDING, *_ATTENTION, *_QK_NORM, *_GATED_MLP, *_HEAD),
    "Qwen3MoeForCausalLM": (_EMBEDDING, *_ATTENTION, *_QK_NORM, *_EXPERTS, *_HEAD),
    "LlamaForCausalLM": _PLAIN_DECODER,
    "MistralForCausalLM": _PLAIN_DECODER,
    "SmolLM3ForCausalLM": _PLAIN_DECODER,
    "Phi3ForCausalLM": (
        _EMBEDDING,
        _INPUT_NORM,
        _FUSED_QKV,
        _ATTENTION[2],
        _MLP_NORM,
        _FUSED_GATE_UP,
        _GATED_MLP[2],
        *_HEAD,
    ),
}
"""Rules by the architecture that config.json names, in the order in which tensors are streamed."""

_CAUSAL = "ForCausalLM"

VALUE_TABLES: dict[str, tuple[Rule, ...]] = {
    name.replace(_CAUSAL, VALUE_HEAD): (
        *(rule for rule in rules if rule not in _HEAD),
        *_VALUE_HEAD,
    )
    for name, rules in TABLES.items()
}
"""The same models with a value head: critics."""

MODEL_TYPES = {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "SmolLM3ForCausalLM": "smollm3",
    "Phi3ForCausalLM": "phi3",
}
"""The `model_type` of config.json that goes with each architecture."""


def rules_of(architecture: str) -> tuple[Rule, ...]:
    """The rules of a policy or a critic."""
    return TABLES[architecture] if architecture in TABLES else VALUE_TABLES[architecture]


def value_architecture(architecture: str) -> str:
    """The architecture with a value head in place of the output layer.

    >>> value_architecture("Qwen2ForCausalLM")
    'Qwen2ForTokenClassification'
    """
    return architecture.replace(_CAUSAL, VALUE_HEAD)


def model_type(architecture: str) -> str:
    """The `model_type` of a policy's or a critic's config.json."""
    return MODEL_TYPES[architecture.replace(VALUE_HEAD, _CAUSAL)]


def is_value_head(rule: Rule) -> bool:
    return rule in _VALUE_HEAD[1:]


def has_value_head(architecture: str) -> bool:
    """Whether an architecture gives one number for each token, and no logits."""
    return architecture in VALUE_TABLES


def has_qkv_bias(architecture: str) -> bool:
    """Whether the query, key and value projections of an architecture have biases."""
    return _QKV_BIAS in rules_of(architecture)


def has_qk_norm(architecture: str) -> bool:
    """Whether an architecture normalises every head's query and key."""
    return _QK_NORM[0] in rules_of(architecture)


def has_experts(architecture: str) -> bool:
    return any(rule.owner == "expert" for rule in rules_of(architecture))


ADAPTED_MODULES = {"attention": ("linear_qkv", "linear_proj"), "mlp": ("linear_fc1", "linear_fc2")}
"""Megatron's names of the linear layers that get adapters, by `lora.target`; "all": both."""
_PEFT_PREFIX = "base_model.model."
"""The prefix that PEFT puts before the name of a module of a causal language model."""
BUFFER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM's buffers of adapters may have (vLLM 0.32, `config.lora.MaxLoRARanks`)."""
MERGED_BLOCK_BYTES = 64 * 2**20
"""Most float64 numbers of one kind that merging a matrix with its adapter computes at a time."""


def adapter_rules(architecture: str, rank: int, target: str) -> tuple[Rule, ...]:
    """The rules of LoRA adapters of a rank, A and B of every adapted matrix, with PEFT's names.

    There are none for rank 0, nor for experts. A is split like a matrix whose columns are split,
    and B like one whose rows are."""
    if not rank:
        return ()
    rules = []
    for rule in adapted_rules(architecture, target):
        module = rule.megatron[0].removesuffix(".weight")
        splits_columns = rule.form == "plain"
        a = replace(
            _adapter(rule, module, "A"),
            sizes=(len(rule.hf), rank, rule.sizes[-1]),
            split_axis=2 if splits_columns else None,
            form="stacked",
        )
        b = replace(
            _adapter(rule, module, "B"),
            sizes=(*rule.sizes[:-1], rank),
            split_axis=None if splits_columns else rule.split_axis,
        )
        rules += [a, b]
    return tuple(rules)


def adapted_rules(architecture: str, target: str) -> tuple[Rule, ...]:
    """The rules of the matrices that get adapters."""
    groups = ADAPTED_MODULES if target == "all" else (target,)
    ends = tuple(f".{name}.weight" for group in groups for name in ADAPTED_MODULES[group])
    rules = rules_of(architecture)
    return tuple(
        rule for rule in rules if rule.owner == "layer" and rule.megatron[0].endswith(ends)
    )


def _adapter(rule: Rule, module: str, matrix: str) -> Rule:
    names = tuple(adapter_name(name, matrix) for name in rule.hf)
    return replace(rule, megatron=(f"{module}.adapter.{matrix}",), hf=names)


def adapter_name(weight: str, matrix: str) -> str:
    """PEFT's name of A or B for a Hugging Face weight.

    >>> adapter_name("model.layers.0.mlp.up_proj.weight", "A")
    'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    return f"{_PEFT_PREFIX}{weight.removesuffix('.weight')}.lora_{matrix}.weight"


def adapter_weight(name: str) -> tuple[str, str]:
    """The Hugging Face weight, and "A" or "B", of an adapter's tensor: `adapter_name` reversed.

    >>> adapter_weight("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight")
    ('model.layers.0.mlp.up_proj.weight', 'A')
    """
    module, _, matrix = name.removesuffix(".weight").rpartition(".lora_")
    return f"{module.removeprefix(_PEFT_PREFIX)}.weight", matrix


def buffer_rank(rank: int) -> int:
    """The rank of the buffers that hold adapters of this rank, padded with zeros.

    >>> buffer_rank(9)
    16
    """
    return next(size for size in BUFFER_RANKS if size >= rank)


def merging_bytes(rows: int, columns: int, low: int, itemsize: int) -> int:
    """Bytes needed while a matrix of a rank's shard is merged with an adapter.

    The adapter's A has `low` rows. Held beside the matrix are the merged matrix, B among zeros, and
    in float64 A, that B, and two blocks of rows. A weight sync merges one matrix at a time."""
    block = 8 * columns * min(rows, max(1, MERGED_BLOCK_BYTES // (8 * columns)))
    return itemsize * rows * (columns + low) + 8 * low * (rows + columns) + 2 * block


@dataclass(frozen=True)
class Placed:
    """A rule applied to one layer, and to one expert of it (numbers in the model; None outside)."""

    rule: Rule
    layer: int | None
    hf_names: tuple[str, ...]
    expert: int | None = None

    @property
    def adapter_key(self) -> str:
        """The name of an adapter's tensor in checkpoints, by its layer's number in the model."""
        return self.rule.megatron[0].format(m=self.layer)


def placed_tensors(shape: ModelShape, rules: tuple[Rule, ...] | None = None) -> Iterator[Placed]:
    """Every tensor of the model, or of other `rules` (its adapters), in streaming order.

    The order is embedding, layers, head."""
    rules = rules_of(shape.architecture) if rules is None else rules
    for rule in rules:
        if rule.owner == "first":
            yield Placed(rule, None, rule.hf)
    for layer in range(shape.num_layers):
        for rule in rules:
            if rule.owner == "layer":
                yield Placed(rule, layer, tuple(name.format(n=layer) for name in rule.hf))
        for expert, rule in itertools.product(range(shape.num_experts), rules):
            if rule.owner == "expert":
                yield Placed(
                    rule, layer, tuple(name.format(n=layer, e=expert) for name in rule.hf), expert
                )
    for rule in rules:
        tied_head = shape.tied_embeddings and rule.megatron == ("output_layer.weight",)
        if rule.owner == "last" and not tied_head:
            yield Placed(rule, None, rule.hf)


def padded_vocab(vocab_size: int, tensor: int) -> int:
    """Rows of the embedding in Megatron.

    The vocabulary is filled up to a multiple of the tensor-parallel size."""
    return -(-vocab_size // tensor) * tensor


def canonical_shape(rule: Rule, shape: ModelShape, tensor: int) -> tuple[int, ...]:
    """Shape of the rule's canonical form for a tensor-parallel size."""
    sizes: dict[Size, int] = {
        "vocab": padded_vocab(shape.vocab_size, tensor),
        "hidden": shape.hidden_size,
        "head": shape.head_dim,
        "query": shape.num_heads * shape.head_dim,
        "group": shape.num_kv_heads,
        "heads_per_group_and_2": shape.num_heads // shape.num_kv_heads + 2,
        "two": 2,
        "one": 1,
        "ffn": shape.ffn_size,
        "experts": shape.num_experts,
    }
    return tuple(size if isinstance(size, int) else sizes[size] for size in rule.sizes)


def part_rows(rule: Rule, shape: ModelShape) -> list[int]:
    """Rows of the parts that a rule's form joins, such as query, key and value, or gate and up.

    Each part is a Hugging Face tensor, or a part of the only one; other forms have one part."""
    canonical = canonical_shape(rule, shape, tensor=1)
    if rule.form == "qkv":
        D = canonical[2]
        return [shape.num_heads * D, shape.num_kv_heads * D, shape.num_kv_heads * D]
    return [canonical[1]] * canonical[0] if rule.form in STACKED else [canonical[0]]


def hf_shapes(rule: Rule, shape: ModelShape) -> list[tuple[int, ...]]:
    """Shapes of the rule's Hugging Face tensors, in the order of `rule.hf`."""
    row_axes = {"qkv": 3, "gate_up": 2, "stacked": 2}.get(rule.form, 1)
    columns = canonical_shape(rule, shape, tensor=1)[row_axes:]
    rows = part_rows(rule, shape)
    return [(n, *columns) for n in (rows if len(rule.hf) == len(rows) else [sum(rows)])]


def hf_tensors(
    shape: ModelShape, rules: tuple[Rule, ...] | None = None
) -> dict[str, tuple[int, ...]]:
    """Shapes of all Hugging Face tensors of a model, by name, in streaming order.

    With other `rules` they are those of its adapters."""
    return {
        name: size
        for placed in placed_tensors(shape, rules)
        for name, size in zip(placed.hf_names, hf_shapes(placed.rule, shape), strict=True)
    }


def parameter_count(shape: ModelShape, rules: tuple[Rule, ...] | None = None) -> int:
    """Number of parameters of the whole model, or of other `rules` (its adapters).

    A tied embedding counts once."""
    return sum(map(math.prod, hf_tensors(shape, rules).values()))


def shard_shape(rule: Rule, shape: ModelShape, tensor: int) -> tuple[int, ...]:
    """Shape of a tensor-parallel rank's part of the canonical tensor."""
    sizes = list(canonical_shape(rule, shape, tensor))
    if rule.split_axis is not None:
        sizes[rule.split_axis] //= tensor
    return tuple(sizes)
