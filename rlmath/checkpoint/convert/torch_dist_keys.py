"""The places of a model's tensors in a torch_dist checkpoint.

Every tensor has keys and shapes, whatever the layout was; a given checkpoint has some of them.

Layers are stacked: "decoder.layers.self_attention.linear_proj.weight" has an axis of layers before
its own, and an expert's weights have one of experts after it. (Models whose layers differ have a
key for each layer, with its number.) A canonical form of `weight_map` becomes rows by merging its
first axes:

    plain     [rows, ...]              unchanged
    vocab     [vocabulary + padding, E]
    qkv       [G x (R + 2) x D, ...]
    gate_up   [2 x F, E]               all of gate, then all of up, whatever the tensor-parallel size
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from rlmath.checkpoint.convert.torch_dist_io import StateReader
from rlmath.checkpoint.hf import weight_map
from rlmath.checkpoint.hf.weight_map import Placed, Rule, placed_tensors
from rlmath.checkpoint.hf.weights import from_canonical
from rlmath.config.help import raise_problems
from rlmath.config.model_shape import ModelShape

_MERGED = {"plain": 1, "vocab": 1, "qkv": 3, "gate_up": 2}
"""Number of a canonical form's first axes that are rows here."""
_NOT_THE_MODEL = tuple(
    "optimizer. critic. reference. chained_ random. rng_state opt_param_scheduler "
    "rerun_state".split()
)
"""Beginnings of the names of what a training run keeps beside the model."""
_NAMES_IN_ERRORS = 8
_MOST_PADDING = 2**14
"""Most rows beyond the vocabulary that count as padding.

Padding reaches a multiple of 128 times the tensor-parallel size."""


# ---------------------------------------------------------------- in any checkpoint


@dataclass(frozen=True)
class Stored:
    """The place of a tensor of the model in a checkpoint."""

    placed: Placed
    keys: tuple[str, ...]
    """Names of the global tensor; a checkpoint has one of them, or more with the same contents."""
    numbered: tuple[str, ...]
    """Names where each layer has its own; then without the layer's axis."""
    lead: tuple[int, ...]
    """Place on the leading axes: (), (layer,) or (layer, expert)."""
    lead_shape: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of this placed tensor, as rows."""
    canonical: tuple[int, ...]
    """Shape of the canonical form."""

    @property
    def global_shape(self) -> tuple[int, ...]:
        return (*self.lead_shape, *self.shape)


def stored_adapters(shape: ModelShape, rules: tuple[Rule, ...]) -> Iterator[Stored]:
    """The adapters of a model in streaming order and canonical form, each layer's by itself."""
    for placed in placed_tensors(shape, rules):
        canonical = weight_map.canonical_shape(placed.rule, shape, 1)
        keys = (placed.adapter_key,)
        yield Stored(placed, keys, (), lead=(), lead_shape=(), shape=canonical, canonical=canonical)


def stored_tensors(shape: ModelShape, tensor: int = 1) -> Iterator[Stored]:
    """Every tensor of a model in streaming order.

    The vocabulary is filled up to a multiple of `tensor`."""
    for placed in placed_tensors(shape):
        canonical = weight_map.canonical_shape(placed.rule, shape, tensor)
        merged = _MERGED[placed.rule.form]
        lead = tuple(number for number in (placed.layer, placed.expert) if number is not None)
        yield Stored(
            placed,
            tuple(dict.fromkeys(_key(name) for name in placed.rule.megatron)),
            tuple(_key(name, placed.layer) for name in placed.rule.megatron) if lead else (),
            lead=lead,
            lead_shape=(shape.num_layers, shape.num_experts)[: len(lead)],
            shape=(math.prod(canonical[:merged]), *canonical[merged:]),
            canonical=canonical,
        )


def _key(name: str, layer: int | None = None) -> str:
    """The key of a tensor of all layers or, with `layer`, of that layer alone.

    >>> _key("decoder.layers.{m}.mlp.linear_fc2.weight"), _key("decoder.layers.{m}.mlp.linear_fc2.weight", 7)
    ('decoder.layers.mlp.linear_fc2.weight', 'decoder.layers.7.mlp.linear_fc2.weight')
    >>> _key("decoder.layers.{m}.mlp.experts.linear_fc2.weight{x}")
    'decoder.layers.mlp.experts.experts.linear_fc2.weight'
    """
    if name.endswith("{x}"):
        name = name.removesuffix("{x}").replace(".experts.", ".experts.experts.")
    name = name.replace(".local_experts.{x}.", ".experts.")
    return name.replace(".{m}", "" if layer is None else f".{layer}")


def written_keys(stored: Stored, shape: ModelShape) -> tuple[str, ...]:
    """The keys under which a tensor is written.

    Transformer Engine's layers and Megatron's local ones ask for the same ones, those of
    Transformer Engine's parameters; but for the norm before experts, which is written under both.
    """
    return (
        stored.keys
        if weight_map.has_experts(shape.architecture) and len(stored.keys) > 1
        else stored.keys[-1:]
    )


def object_keys(shape: ModelShape) -> list[str]:
    """The keys of the empty objects ("_extra_state") that Megatron's modules have beside weights.

    Megatron does not load without them: its local layers ask for those of the linear modules,
    Transformer Engine's for those of all."""
    keys: dict[str, None] = {}
    for stored in stored_tensors(shape):
        modules = [key.rpartition(".")[0] for key in written_keys(stored, shape)]
        if stored.placed.layer is not None:
            modules.append("decoder.layers.self_attention.core_attention")
        elif modules != ["decoder.final_layernorm"]:
            continue
        lead = ".".join(map(str, stored.lead or (0,)))
        lead_shape = ".".join(map(str, stored.lead_shape or (1,)))
        experts = [module for module in modules if ".experts." in module]
        keys |= dict.fromkeys(
            f"{module}._extra_state/shard_{lead}_{lead_shape}" for module in experts or modules
        )
    return list(keys)


# ---------------------------------------------------------------- in a given checkpoint


@dataclass(frozen=True)
class StoredRectangle:
    """The rectangle of a global tensor of a checkpoint that is a tensor of the model."""

    stored: Stored
    key: str
    offset: tuple[int, ...]
    size: tuple[int, ...]

    def tensors(self, reader: StateReader, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
        """The Hugging Face tensors."""
        placed = self.stored.placed
        rows = reader.read(self.key, self.offset, self.size).reshape(-1, *self.stored.shape[1:])
        canonical = rows if placed.rule.form == "vocab" else rows.reshape(self.stored.canonical)
        yield from zip(placed.hf_names, from_canonical(placed.rule, canonical, shape), strict=True)


def find_rectangles(
    reader: StateReader, shape: ModelShape, rules: tuple[Rule, ...] | None = None
) -> list[StoredRectangle]:
    """The rectangles of the tensors of the model, or of `rules` (its adapters).

    ValueError that lists missing and unknown tensors, and those of another shape."""
    rectangles = []
    missing = []
    wrong = []
    known_keys = set()
    for stored in stored_tensors(shape) if rules is None else stored_adapters(shape, rules):
        for key in (*stored.keys, *stored.numbered):
            known_keys.add(key)
        rectangle = _find(reader, stored)
        if isinstance(rectangle, StoredRectangle):
            rectangles.append(rectangle)
        elif rectangle is None:
            missing.append(f"{stored.keys[-1]} {list(stored.lead)}".removesuffix(" []"))
        else:
            wrong.append(rectangle)
    unknown = [
        key
        for key in reader.tensors
        if key not in known_keys and not key.startswith(_NOT_THE_MODEL)
    ]
    # Older checkpoints have these frequencies, which follow from config.json.
    unknown = [key for key in unknown if not key.endswith("rotary_pos_emb.inv_freq")]
    problems = [
        *listed("tensors are missing", missing),
        *listed(f"tensors are unknown to {shape.architecture}", unknown),
        *listed("tensors have another shape", list(dict.fromkeys(wrong))),
    ]
    raise_problems(
        f"{reader.folder} as a checkpoint of the model that config.json describes", problems
    )
    return rectangles


def _find(reader: StateReader, stored: Stored) -> StoredRectangle | str | None:
    """The rectangle of a tensor; an error text if its shape is wrong; None if it is missing."""
    name = next(
        (
            key
            for key in (*reversed(stored.keys), *reversed(stored.numbered))
            if key in reader.tensors
        ),
        None,
    )
    if name is None:
        return None
    lead, lead_shape = (
        axes if name in stored.keys else axes[1:] for axes in (stored.lead, stored.lead_shape)
    )
    expected_shape = (*lead_shape, *stored.shape)
    stored_shape = tuple(reader.tensors[name].size)
    is_vocab = stored.placed.rule.form == "vocab"
    filled_up = (
        is_vocab
        and 0 <= stored_shape[0] - expected_shape[0] <= _MOST_PADDING
        and stored_shape[1:] == expected_shape[1:]
    )
    if stored_shape != expected_shape and not filled_up:
        return f"{name} has shape {stored_shape}, config.json makes it {expected_shape}"
    offset = (*lead, *(0 for _ in stored.shape))
    size = (*(1 for _ in lead), *expected_shape[len(lead) :])
    return StoredRectangle(stored, name, offset, size=size)


def listed(problem: str, names: list[str]) -> list[str]:
    """["2 tensors are missing: a; b"], [] where there are none."""
    if not names:
        return []
    ending = f" and {len(names) - _NAMES_IN_ERRORS} more" if len(names) > _NAMES_IN_ERRORS else ""
    return [f"{len(names)} {problem}: {'; '.join(names[:_NAMES_IN_ERRORS])}{ending}"]
